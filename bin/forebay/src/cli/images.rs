//! What the commands on images take.

use std::path::PathBuf;

use clap::{Args, ValueHint};

use crate::spec::{ImageSpec, PoolSpec};
use crate::units::Size;

/// Options of `create`.
#[derive(Debug, Args)]
pub struct Create {
    /// The new image, POOL/IMAGE
    pub image: ImageSpec,

    /// Its size: 10G, 512M, ...; a bare number counts MiB, as in rbd
    #[arg(short, long, value_name = "SIZE")]
    pub size: Size,

    /// Bytes an object, a power of two from 64K to 32M
    #[arg(long, value_name = "SIZE", default_value = "4M")]
    pub object_size: Size,
}

/// Options of `ls`.
#[derive(Debug, Args)]
pub struct Ls {
    /// The pool
    #[arg(default_value = "local")]
    pub pool: PoolSpec,

    /// With sizes
    #[arg(short, long)]
    pub long: bool,
}

/// A command's only image.
#[derive(Debug, Args)]
pub struct OneImage {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,
}

/// Options of `resize`.
#[derive(Debug, Args)]
pub struct Resize {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Its new size
    #[arg(short, long, value_name = "SIZE")]
    pub size: Size,

    /// Allow the image to become smaller, which loses the data past its new end
    #[arg(long)]
    pub allow_shrink: bool,
}

/// Options of `mv`.
#[derive(Debug, Args)]
pub struct Mv {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// Its new name, POOL/IMAGE in the same pool
    pub to: ImageSpec,
}

/// Options of `import`.
#[derive(Debug, Args)]
pub struct Import {
    /// A file or block device, or - for standard input
    #[arg(value_hint = ValueHint::FilePath)]
    pub path: PathBuf,

    /// The new image, POOL/IMAGE [default: the file's name in the pool local]
    pub image: Option<ImageSpec>,

    /// Bytes an object, a power of two from 64K to 32M
    #[arg(long, value_name = "SIZE", default_value = "4M")]
    pub object_size: Size,
}

/// Options of `export`.
#[derive(Debug, Args)]
pub struct Export {
    /// The image, POOL/IMAGE
    pub image: ImageSpec,

    /// A new file, a block device, or - for standard output [default: the image's name]
    #[arg(value_hint = ValueHint::FilePath)]
    pub path: Option<PathBuf>,

    /// Replace a file that is there
    #[arg(short, long)]
    pub force: bool,
}

/// Options of `du`.
#[derive(Debug, Args)]
pub struct Du {
    /// An image, POOL/IMAGE, or all those of a pool, POOL/
    #[arg(default_value = "local/", value_name = "POOL/[IMAGE]")]
    pub what: String,
}
