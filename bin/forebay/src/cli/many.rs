//! Arguments that name several images: one after another, or in a file.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use clap::{ArgMatches, Args, Command, FromArgMatches, ValueHint};

use super::names::{NameArgs, read_by_way_of};
use super::places::in_pool;
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;

/// One image or more.
#[derive(Debug, Clone)]
pub struct ManyImages {
    /// Images that the command line names.
    named: Vec<ImageSpec>,
    /// A file that names more.
    from: Option<PathBuf>,
    /// The pool and namespace of names without them.
    pool: Option<String>,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedImages {
    /// The image, POOL/IMAGE; there may be several
    #[arg(value_name = "IMAGE")]
    specs: Vec<String>,
    #[command(flatten)]
    options: NameArgs,

    /// A file that names images, one a line, or - for standard input; empty lines and those that begin with # do not count
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    images_from: Option<PathBuf>,
}

impl TryFrom<TypedImages> for ManyImages {
    type Error = String;

    fn try_from(typed: TypedImages) -> std::result::Result<Self, String> {
        let TypedImages { specs, options, images_from: from } = typed;
        let pool = options.place();
        let named = match specs.as_slice() {
            [] if from.is_some() => options.image(None)?.into_iter().collect(),
            [] => vec![options.required(None)?],
            [one] => vec![options.required(Some(one))?],
            // With --image, which names the image as well, this is refused.
            several => {
                options.image(several.first().map(String::as_str))?;
                several.iter().map(|text| in_pool(pool.as_deref(), text)).collect::<std::result::Result<_, _>>()?
            }
        };
        Ok(Self { named, from, pool })
    }
}

read_by_way_of!(TypedImages => ManyImages);

impl ManyImages {
    /// Returns whether the command is about one image, which is answered without a list.
    pub fn is_one(&self) -> bool {
        self.from.is_none() && self.named.len() == 1
    }

    /// Returns the images, after reading the file.
    ///
    /// # Errors
    /// A file that cannot be read, or has lines that name no image.
    pub fn resolve(self) -> Result<Vec<ImageSpec>> {
        let mut images = self.named;
        if let Some(path) = self.from {
            let (text, shown) = read(&path)?;
            for (at, line) in text.lines().enumerate() {
                let line = line.trim();
                if line.is_empty() || line.starts_with('#') {
                    continue;
                }
                let spec = in_pool(self.pool.as_deref(), line)
                    .map_err(|text| Failure::invalid(format!("{shown}, line {}: {text}", at + 1)))?;
                images.push(spec);
            }
            if images.is_empty() {
                return Err(Failure::invalid(format!("{shown} names no image")).hint("write one POOL/IMAGE a line"));
            }
        }
        Ok(images)
    }
}

/// Reads the file of names; returns how it is called as well.
fn read(path: &Path) -> Result<(String, String)> {
    let (read, shown) = match path.as_os_str() == "-" {
        true => {
            let mut text = String::new();
            (io::stdin().read_to_string(&mut text).map(|_| text), "standard input".to_owned())
        }
        false => (fs::read_to_string(path), path.display().to_string()),
    };
    let text = read.map_err(|error| Failure::io(error, format_args!("reading the names of images from {shown}")))?;
    Ok((text, shown))
}

/// Does something with one image after another; the first failure ends it, and says how many are done.
pub fn each<T>(images: Vec<ImageSpec>, mut work: impl FnMut(ImageSpec) -> Result<T>) -> Result<Vec<T>> {
    let count = images.len();
    let mut done = Vec::with_capacity(count);
    for image in images {
        let name = (count > 1).then(|| image.to_string());
        match (work(image), name) {
            (Ok(value), _) => done.push(value),
            (Err(failure), None) => return Err(failure),
            (Err(failure), Some(name)) => {
                return Err(failure.context(format_args!("{name}, after {} of {count} images", done.len())));
            }
        }
    }
    Ok(done)
}
