//! Arguments of `config`: an image or a pool, an option, and its value.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

use super::names::{NameArgs, OneImage, read_by_way_of};
use crate::spec::{ImageSpec, PoolSpec};

/// Commands on overridden options.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Override options for an image
    #[command(subcommand)]
    Image(ConfigImageCommand),

    /// Override options for the images of a pool
    #[command(subcommand)]
    Pool(ConfigPoolCommand),
}

/// Commands on the options of an image.
#[derive(Debug, Subcommand)]
pub enum ConfigImageCommand {
    /// List the options with the values in force, in the output format of 'rbd config image ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay config image ls local/disk1 --format json")]
    Ls(OneImage),

    /// Show the value that an image overrides an option with
    #[command(after_help = "Example:\n  forebay config image get local/disk1 rbd_qos_iops_limit")]
    Get(ImageOption),

    /// Override an option; limits of exported images change at once
    #[command(
        after_help = "Examples:\n  forebay config image set local/disk1 rbd_qos_iops_limit 1000\n  forebay config image set -p rbd --image disk1 rbd_qos_bps_limit 100M"
    )]
    Set(ImageOptionValue),

    /// End an override
    #[command(
        visible_alias = "remove",
        after_help = "Example:\n  forebay config image rm local/disk1 rbd_qos_iops_limit"
    )]
    Rm(ImageOption),
}

/// Commands on the options of a pool.
#[derive(Debug, Subcommand)]
pub enum ConfigPoolCommand {
    /// List the options with the values in force, in the output format of 'rbd config pool ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay config pool ls local")]
    Ls(ConfigPool),

    /// Show the value that a pool overrides an option with
    #[command(after_help = "Example:\n  forebay config pool get local rbd_qos_iops_limit")]
    Get(PoolOption),

    /// Override an option for the images that do not override it themselves
    #[command(after_help = "Example:\n  forebay config pool set local rbd_qos_iops_limit 1000")]
    Set(PoolOptionValue),

    /// End an override
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay config pool rm local rbd_qos_iops_limit")]
    Rm(PoolOption),
}

/// An image, and an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOption {
    /// The image.
    pub image: ImageSpec,
    /// Name of the option.
    pub key: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedImageOption {
    /// The image, POOL/IMAGE
    #[arg(value_name = "IMAGE")]
    first: Option<String>,

    /// The option, for example rbd_qos_iops_limit
    #[arg(value_name = "KEY")]
    second: Option<String>,
    #[command(flatten)]
    options: NameArgs,
}

impl TryFrom<TypedImageOption> for ImageOption {
    type Error = String;

    fn try_from(TypedImageOption { first, second, options }: TypedImageOption) -> Result<Self, String> {
        let [image, key] = match (options.has_image(), second) {
            (true, Some(extra)) => return Err(too_many(&extra)),
            (true, None) => [None, first],
            (false, second) => [first, second],
        };
        Ok(Self { image: options.required(image.as_deref())?, key: named(key)? })
    }
}

read_by_way_of!(TypedImageOption => ImageOption);

/// An image, an option, and a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageOptionValue {
    /// The image.
    pub image: ImageSpec,
    /// Name of the option.
    pub key: String,
    /// Value of the option.
    pub value: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedImageValue {
    /// The image, POOL/IMAGE
    #[arg(value_name = "IMAGE")]
    first: Option<String>,

    /// The option, for example rbd_qos_iops_limit
    #[arg(value_name = "KEY")]
    second: Option<String>,

    /// Its value; counts may end in K, M, G and so on, for powers of 1000
    #[arg(value_name = "VALUE")]
    third: Option<String>,
    #[command(flatten)]
    options: NameArgs,
}

impl TryFrom<TypedImageValue> for ImageOptionValue {
    type Error = String;

    fn try_from(TypedImageValue { first, second, third, options }: TypedImageValue) -> Result<Self, String> {
        let [image, key, value] = match (options.has_image(), third) {
            (true, Some(extra)) => return Err(too_many(&extra)),
            (true, None) => [None, first, second],
            (false, third) => [first, second, third],
        };
        let image = options.required(image.as_deref())?;
        let key = named(key)?;
        let value = valued(value, &key)?;
        Ok(Self { image, key, value })
    }
}

read_by_way_of!(TypedImageValue => ImageOptionValue);

fn too_many(extra: &str) -> String {
    format!("'{extra}' is one argument too many: --image names the image already")
}

fn named(key: Option<String>) -> Result<String, String> {
    key.ok_or_else(|| "no option is named; write one after the image, for example rbd_qos_iops_limit".into())
}

fn valued(value: Option<String>, key: &str) -> Result<String, String> {
    value.filter(|value| !value.is_empty()).ok_or_else(|| format!("the value is missing: write one after {key}"))
}

/// A pool that must be named.
#[derive(Debug, Args)]
pub struct ConfigPool {
    /// The pool
    #[arg(value_name = "POOL")]
    pub pool: PoolSpec,
}

/// A pool, and an option.
#[derive(Debug, Args)]
pub struct PoolOption {
    /// The pool
    #[arg(value_name = "POOL")]
    pub pool: PoolSpec,

    /// The option, for example rbd_qos_iops_limit
    #[arg(value_name = "KEY")]
    pub key: String,
}

/// A pool, an option, and a value.
#[derive(Debug, Args)]
pub struct PoolOptionValue {
    /// The pool and the option.
    #[command(flatten)]
    pub of: PoolOption,

    /// Its value; counts may end in K, M, G and so on, for powers of 1000
    #[arg(value_name = "VALUE")]
    pub value: String,
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    fn option(arguments: &[&str]) -> Result<(String, String), String> {
        read::<ImageOption>(arguments).map(|read| (read.image.to_string(), read.key))
    }

    fn value(arguments: &[&str]) -> Result<(String, String, String), String> {
        read::<ImageOptionValue>(arguments).map(|read| (read.image.to_string(), read.key, read.value))
    }

    #[test]
    fn an_image_an_option_and_a_value() {
        for arguments in [&["rbd/a", "k"][..], &["-p", "rbd", "a", "k"], &["--image", "rbd/a", "k"]] {
            assert_eq!(option(arguments), Ok(("rbd/a".into(), "k".into())), "{arguments:?}");
            let arguments = [arguments, &["5"]].concat();
            assert_eq!(value(&arguments), Ok(("rbd/a".into(), "k".into(), "5".into())), "{arguments:?}");
        }
        for (arguments, says) in [
            (&["rbd/a"][..], "no option is named"),
            (&[], "no image is named"),
            (&["--image", "a", "k", "5", "6"], "too many"),
            (&["a", "k"], "the value is missing"),
            (&["a", "k", ""], "the value is missing"),
        ] {
            let said = value(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
        assert!(option(&["--image", "a", "k", "5"]).expect_err("wrong").contains("too many"));
    }
}
