//! Options of the commands on images.

use clap::{Args, ValueEnum};
use forebay_block::Compression;

use super::many::ManyImages;
use super::names::{DuTarget, ExportOperands, ImportOperands, OneImage, RenameOperands};
use super::places::{OnePool, pool_text};
use crate::api::NewImageOptions;
use crate::units::{Size, byte_size};

/// Size of the objects of a new image.
#[derive(Debug, Args)]
pub struct ObjectSizeArgs {
    /// Bytes an object, a power of two from 64K to 32M [default: 4M, or in a copy that of the source]
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    object_size: Option<Size>,

    /// The same as a power of two, 22 for 4M; deprecated in rbd
    #[arg(long, value_name = "N", conflicts_with = "object_size", value_parser = clap::value_parser!(u8).range(12..=25))]
    order: Option<u8>,
}

impl ObjectSizeArgs {
    /// Returns it in bytes. Prints a warning on standard error for an option that is deprecated in `rbd`.
    pub fn bytes(&self) -> u64 {
        self.given().unwrap_or(forebay_image::OBJECT_SIZE_DEFAULT)
    }

    /// Returns it in bytes if it is given, and prints the same warning.
    pub fn given(&self) -> Option<u64> {
        match self.order {
            Some(order) => {
                // As `rbd` says it, and as little an error as there.
                eprintln!("forebay: --order is deprecated, use --object-size");
                Some(1 << order)
            }
            None => self.object_size.map(|size| size.0),
        }
    }
}

/// Striping of a new image.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct StripeArgs {
    /// Bytes that go to an object before it is the turn of the next one, a power of two from 512 to the object size
    #[arg(long, value_name = "SIZE", requires = "stripe_count", value_parser = byte_size)]
    stripe_unit: Option<Size>,

    /// Objects that take turns, from 1 to 1024
    #[arg(long, value_name = "N", requires = "stripe_unit")]
    pub stripe_count: Option<u64>,
}

impl StripeArgs {
    /// Returns the stripe unit in bytes.
    pub fn unit(self) -> Option<u64> {
        self.stripe_unit.map(|size| size.0)
    }
}

/// Features of a new image, and the pool of its data.
#[derive(Debug, Default, Args)]
pub struct FeatureArgs {
    /// A feature of the new image instead of the default ones; may be repeated, or separated by commas
    #[arg(long, value_name = "FEATURE", value_delimiter = ',')]
    image_feature: Vec<String>,

    /// Leave out the features that let one client at a time write: exclusive-lock, object-map and fast-diff
    #[arg(long, conflicts_with = "image_feature")]
    image_shared: bool,

    /// Another pool of the cluster for the data
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    pub data_pool: Option<String>,
}

impl FeatureArgs {
    /// Returns the names of the features, if they are not the default ones.
    pub fn names(&self) -> Option<Vec<String>> {
        if self.image_shared {
            return Some(vec!["layering".into(), "deep-flatten".into()]);
        }
        (!self.image_feature.is_empty()).then(|| self.image_feature.clone())
    }
}

/// Options of a new image that is made of something.
#[derive(Debug, Args)]
pub struct NewImageArgs {
    /// Its objects.
    #[command(flatten)]
    objects: ObjectSizeArgs,

    /// Its striping.
    #[command(flatten)]
    stripes: StripeArgs,

    /// Its features.
    #[command(flatten)]
    features: FeatureArgs,

    /// Encrypt its data in the embedded store; a copy of an encrypted image is encrypted there anyway
    #[arg(long)]
    encrypt: bool,
}

impl NewImageArgs {
    /// Returns the options. Prints a warning on standard error for an option that is deprecated in `rbd`.
    pub fn options(&self) -> NewImageOptions {
        NewImageOptions {
            object_size: self.objects.given(),
            stripe_unit: self.stripes.unit(),
            stripe_count: self.stripes.stripe_count,
            features: self.features.names(),
            data_pool: self.features.data_pool.clone(),
            encrypt: self.encrypt,
        }
    }
}

/// Options of `create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The new images.
    #[command(flatten)]
    pub name: ManyImages,

    /// Its size: 10G, 512M, ...; a bare number counts MiB, as in rbd
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Size,

    /// Its objects.
    #[command(flatten)]
    pub objects: ObjectSizeArgs,

    /// Its striping.
    #[command(flatten)]
    pub stripes: StripeArgs,

    /// Its features.
    #[command(flatten)]
    pub features: FeatureArgs,

    /// Compression in the embedded store: none, lz4, zstd, deflate, or with a level: zstd:5 [default: that of the store]
    #[arg(long, value_name = "METHOD")]
    pub compression: Option<Compression>,

    /// Encrypt its data in the embedded store (AES-256-XTS), with a key of its own that the master key wraps
    #[arg(long)]
    pub encrypt: bool,

    /// Format of the image, as for rbd: only 2
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=2))]
    image_format: Option<u8>,
}

/// Options of `ls`.
#[derive(Debug, Args)]
pub struct LsArgs {
    /// The pool.
    #[command(flatten)]
    pub name: OnePool,

    /// With sizes, snapshots, parents of clones, and locks
    #[arg(short, long)]
    pub long: bool,
}

/// Options of `resize`.
#[derive(Debug, Args)]
pub struct ResizeArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Its new size
    #[arg(short, long, value_name = "SIZE", allow_hyphen_values = true)]
    pub size: Size,

    /// Allow the image to shrink, which discards the data past its new end
    #[arg(long)]
    pub allow_shrink: bool,
}

/// Options of `sparsify`.
#[derive(Debug, Args)]
pub struct SparsifyArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Size of the blocks whose bytes are all zero, a power of two from 4K to the size of the image's objects
    #[arg(long, value_name = "SIZE", default_value = "4K", value_parser = byte_size)]
    pub sparse_size: Size,
}

/// Options of `mv`.
#[derive(Debug, Args)]
pub struct MvArgs {
    /// The image and its new name.
    #[command(flatten)]
    pub names: RenameOperands,
}

/// Options of `import`.
#[derive(Debug, Args)]
pub struct ImportArgs {
    /// The file and the new image.
    #[command(flatten)]
    pub names: ImportOperands,

    /// Its options.
    #[command(flatten)]
    pub made: NewImageArgs,

    /// Format of the image, as for rbd: only 2
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=2))]
    image_format: Option<u8>,

    /// Import the bytes unchanged, even if they look like another disk format (qcow2, VMDK, ...) or compressed data
    #[arg(long)]
    pub raw: bool,

    /// Its format.
    #[command(flatten)]
    pub format: ExportFormatArgs,
}

/// Format of an exported image.
#[derive(Debug, Clone, Copy, Args)]
pub struct ExportFormatArgs {
    /// Format of the file: 1 for the bytes of a disk, 2 for an image with its snapshots
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u8).range(1..=2))]
    export_format: u8,
}

impl ExportFormatArgs {
    /// Returns whether the file has snapshots.
    pub fn has_snapshots(self) -> bool {
        self.export_format == 2
    }
}

/// Options of `export`.
#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The image and the file.
    #[command(flatten)]
    pub names: ExportOperands,

    /// Overwrite an existing file
    #[arg(short, long)]
    pub force: bool,

    /// Its format.
    #[command(flatten)]
    pub format: ExportFormatArgs,
}

/// Options of `du`.
#[derive(Debug, Args)]
pub struct DuArgs {
    /// The image or pool.
    #[command(flatten)]
    pub target: DuTarget,

    /// Count bytes, of images without their snapshots; otherwise whole objects are counted in a Ceph pool, as rbd does
    #[arg(long)]
    pub exact: bool,
}

/// Options of `bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Kind of requests; writes overwrite the image's data
    #[arg(long, value_enum, value_name = "TYPE")]
    pub io_type: IoType,

    /// Random or sequential offsets
    #[arg(long, value_enum, value_name = "PATTERN", default_value = "seq")]
    pub io_pattern: IoPattern,

    /// Bytes a request: 4096, 64K, 4M
    #[arg(long, value_name = "SIZE", default_value = "4096", value_parser = parse_bytes)]
    pub io_size: u64,

    /// Requests in flight
    #[arg(long, visible_alias = "io-threads", value_name = "N", default_value = "16", value_parser = clap::value_parser!(u16).range(1..))]
    pub depth: u16,

    /// End after this many bytes: 64M, 1G
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub io_total: Option<u64>,

    /// Duration of the measurement [default: 5, or as long as --io-total takes]
    #[arg(long, value_name = "S", allow_hyphen_values = true, value_parser = parse_seconds)]
    pub seconds: Option<f64>,

    /// Percentage of reads, with readwrite
    #[arg(long, value_name = "PERCENT", default_value = "50", value_parser = clap::value_parser!(u8).range(0..=100))]
    pub rw_mix_read: u8,

    /// Busy-poll for this many microseconds after the last work before sleeping
    #[arg(long, value_name = "US", default_value = "0", value_parser = clap::value_parser!(u32).range(0..=1000))]
    pub linger_us: u32,
}

/// Kind of requests of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IoType {
    /// Reads only.
    Read,
    /// Writes only.
    Write,
    /// Reads and writes.
    #[value(alias = "rw")]
    Readwrite,
}

impl IoType {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            IoType::Read => "read",
            IoType::Write => "write",
            IoType::Readwrite => "readwrite",
        }
    }
}

/// Access pattern of a load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum IoPattern {
    /// Random offsets.
    Rand,
    /// Sequential offsets.
    Seq,
}

impl IoPattern {
    /// Returns the name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            IoPattern::Rand => "rand",
            IoPattern::Seq => "seq",
        }
    }
}

/// A time that something can be measured for.
fn parse_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=1e7).contains(&seconds) => Ok(seconds),
        _ => Err(format!("'{text}' is not a valid duration: a number of seconds from 0.001 to 10000000")),
    }
}

/// A size whose bare number counts bytes.
fn parse_bytes(text: &str) -> Result<u64, String> {
    byte_size(text).map(|size| size.0)
}
