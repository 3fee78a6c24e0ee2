//! Options of the commands that manage images: `image-meta`, `lock`, `feature`, `object-map`.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

use super::names::{NameArgs, OneImage, read_by_way_of};
use super::snapshots::OneSource;
use crate::spec::ImageSpec;

/// An image, and what follows it on the command line.
#[derive(Debug, Args)]
struct TypedOperands {
    /// The image, POOL/IMAGE, and what follows it
    #[arg(value_name = "IMAGE")]
    operands: Vec<String>,
    #[command(flatten)]
    options: NameArgs,
}

impl TypedOperands {
    /// Returns the image and the `names.len()` operands after it; with `--image`, all operands are those.
    fn resolve<const N: usize>(self, names: [&str; N]) -> Result<(ImageSpec, [String; N]), String> {
        let (image, rest) = self.split()?;
        match <[String; N]>::try_from(rest) {
            Ok(operands) => Ok((image, operands)),
            Err(rest) if rest.len() < N => Err(format!("the {} is missing after the image", names[rest.len()])),
            Err(rest) => Err(format!("'{}' is one argument too many", rest[N])),
        }
    }

    fn split(self) -> Result<(ImageSpec, Vec<String>), String> {
        let mut rest = self.operands;
        let image = match self.options.has_image() || rest.is_empty() {
            true => self.options.required(None)?,
            false => {
                let first = rest.remove(0);
                self.options.required(Some(&first))?
            }
        };
        Ok((image, rest))
    }
}

/// An image and a metadata key.
#[derive(Debug, Clone)]
pub struct MetadataKey {
    /// The image.
    pub image: ImageSpec,
    /// The key.
    pub key: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
#[command(override_usage = "forebay image-meta get|rm <IMAGE> <KEY>")]
struct TypedKey {
    #[command(flatten)]
    typed: TypedOperands,
}

impl TryFrom<TypedKey> for MetadataKey {
    type Error = String;

    fn try_from(typed: TypedKey) -> Result<Self, String> {
        let (image, [key]) = typed.typed.resolve(["key"])?;
        Ok(Self { image, key: not_empty("key", key)? })
    }
}

read_by_way_of!(TypedKey => MetadataKey);

/// An image, a metadata key and its value.
#[derive(Debug, Clone)]
pub struct MetadataPair {
    /// The image.
    pub image: ImageSpec,
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
#[command(override_usage = "forebay image-meta set <IMAGE> <KEY> <VALUE>")]
struct TypedPair {
    #[command(flatten)]
    typed: TypedOperands,
}

impl TryFrom<TypedPair> for MetadataPair {
    type Error = String;

    fn try_from(typed: TypedPair) -> Result<Self, String> {
        let (image, [key, value]) = typed.typed.resolve(["key", "value"])?;
        Ok(Self { image, key: not_empty("key", key)?, value: not_empty("value", value)? })
    }
}

read_by_way_of!(TypedPair => MetadataPair);

fn not_empty(what: &str, text: String) -> Result<String, String> {
    if text.is_empty() { Err(format!("the {what} is empty")) } else { Ok(text) }
}

/// Commands on the metadata of images.
#[derive(Debug, Subcommand)]
pub enum ImageMetaCommand {
    /// List the metadata of an image, in the output format of 'rbd image-meta ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay image-meta ls rbd/disk1 --format json")]
    Ls(OneImage),

    /// Show a metadata value
    #[command(after_help = "Example:\n  forebay image-meta get rbd/disk1 owner")]
    Get(MetadataKey),

    /// Set a metadata value
    #[command(after_help = "Example:\n  forebay image-meta set rbd/disk1 owner 'the storage team'")]
    Set(MetadataPair),

    /// Remove a metadata value
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay image-meta rm rbd/disk1 owner")]
    Rm(MetadataKey),
}

/// An image and the id of a lock.
#[derive(Debug, Clone)]
pub struct LockId {
    /// The image.
    pub image: ImageSpec,
    /// The id.
    pub id: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
#[command(override_usage = "forebay lock add [--shared <TAG>] <IMAGE> <LOCK-ID>")]
struct TypedLock {
    #[command(flatten)]
    typed: TypedOperands,
}

impl TryFrom<TypedLock> for LockId {
    type Error = String;

    fn try_from(typed: TypedLock) -> Result<Self, String> {
        let (image, [id]) = typed.typed.resolve(["id of the lock"])?;
        Ok(Self { image, id: not_empty("id of the lock", id)? })
    }
}

read_by_way_of!(TypedLock => LockId);

/// An image, the id of a lock and its holder.
#[derive(Debug, Clone)]
pub struct HeldLock {
    /// The image.
    pub image: ImageSpec,
    /// The id.
    pub id: String,
    /// The holder, `client.N`.
    pub locker: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
#[command(override_usage = "forebay lock rm <IMAGE> <LOCK-ID> <LOCKER>")]
struct TypedHeldLock {
    #[command(flatten)]
    typed: TypedOperands,
}

impl TryFrom<TypedHeldLock> for HeldLock {
    type Error = String;

    fn try_from(typed: TypedHeldLock) -> Result<Self, String> {
        let (image, [id, locker]) = typed.typed.resolve(["id of the lock", "locker"])?;
        let number = locker.strip_prefix("client.").and_then(|number| number.parse::<u64>().ok());
        if number.is_none() {
            return Err(format!("'{locker}' is no locker; write client.N, as 'forebay lock ls' shows it"));
        }
        Ok(Self { image, id: not_empty("id of the lock", id)?, locker })
    }
}

read_by_way_of!(TypedHeldLock => HeldLock);

/// Commands on the locks of images.
#[derive(Debug, Subcommand)]
pub enum LockCommand {
    /// List the locks on an image, in the output format of 'rbd lock ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay lock ls rbd/disk1 --format json")]
    Ls(OneImage),

    /// Lock an image by hand, which keeps every client from writing that needs its exclusive lock
    ///
    /// The lock stays until it is removed.
    #[command(
        after_help = "Examples:\n  forebay lock add rbd/disk1 maintenance\n  forebay lock add rbd/disk1 a --shared team"
    )]
    Add(LockAddArgs),

    /// Remove a lock, and fence its holder: the cluster refuses that client from then on
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay lock rm rbd/disk1 maintenance client.4123")]
    Rm(HeldLock),
}

/// Options of `lock add`.
#[derive(Debug, Args)]
pub struct LockAddArgs {
    /// The image and the lock.
    #[command(flatten)]
    pub lock: LockId,

    /// Share the lock with others of the same tag
    #[arg(long, value_name = "TAG")]
    pub shared: Option<String>,
}

/// An image and names of features.
#[derive(Debug, Clone)]
pub struct FeatureNames {
    /// The image.
    pub image: ImageSpec,
    /// The names.
    pub features: Vec<String>,
}

/// Arguments before validation.
#[derive(Debug, Args)]
#[command(override_usage = "forebay feature enable|disable <IMAGE> <FEATURE>...")]
struct TypedFeatures {
    #[command(flatten)]
    typed: TypedOperands,
}

impl TryFrom<TypedFeatures> for FeatureNames {
    type Error = String;

    fn try_from(typed: TypedFeatures) -> Result<Self, String> {
        let (image, features) = typed.typed.split()?;
        if features.is_empty() {
            return Err("at least one feature must be named after the image".into());
        }
        let features = features.iter().flat_map(|names| names.split(',')).map(str::to_owned).collect();
        Ok(Self { image, features })
    }
}

read_by_way_of!(TypedFeatures => FeatureNames);

/// Commands on the features of images.
#[derive(Debug, Subcommand)]
pub enum FeatureCommand {
    /// Enable features of an image, while it is in use too
    ///
    /// exclusive-lock, object-map and fast-diff; the last two go together, and are to be completed by 'object-map rebuild'.
    #[command(after_help = "Example:\n  forebay feature enable rbd/disk1 object-map fast-diff")]
    Enable(FeatureNames),

    /// Disable features of an image, while it is in use too
    ///
    /// exclusive-lock, object-map, fast-diff and deep-flatten.
    #[command(after_help = "Example:\n  forebay feature disable rbd/disk1 object-map")]
    Disable(FeatureNames),
}

/// Commands on object maps.
#[derive(Debug, Subcommand)]
pub enum ObjectMapCommand {
    /// Compare the object map of an image or snapshot with its objects, and mark it as invalid if it is wrong
    ///
    /// Exits with 0 in either case, as rbd does; standard error names the objects.
    #[command(after_help = "Example:\n  forebay object-map check rbd/disk1@monday --format json")]
    Check(OneSource),

    /// Rebuild the object map of an image or snapshot from its objects, while the image is in use too
    #[command(after_help = "Example:\n  forebay object-map rebuild rbd/disk1")]
    Rebuild(OneSource),
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn an_image_and_what_follows_it() {
        for arguments in
            [&["rbd/a", "k", "v"][..], &["-p", "rbd", "a", "k", "v"], &["-p", "rbd", "--image", "a", "k", "v"]]
        {
            let pair: MetadataPair = read(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            assert_eq!((pair.image.to_string().as_str(), &pair.key[..], &pair.value[..]), ("rbd/a", "k", "v"));
        }
        for (arguments, says) in [
            (&[][..], "no image is named"),
            (&["a"], "the key is missing"),
            (&["a", "k"], "the value is missing"),
            (&["a", "k", "v", "w"], "too many"),
            (&["--image", "a", "k", "v", "w"], "too many"),
            (&["a", "", "v"], "the key is empty"),
            (&["a", "k", ""], "the value is empty"),
            (&["a@s", "k", "v"], "snapshot"),
        ] {
            let said = read::<MetadataPair>(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
        let key: MetadataKey = read(&["a", "k"]).expect("an image and a key");
        assert_eq!((key.image.to_string().as_str(), &key.key[..]), ("local/a", "k"));
    }

    #[test]
    fn locks_and_features() {
        let lock: LockAddArgs = read(&["--image", "rbd/a", "auto 3", "--shared", "t"]).expect("a lock");
        assert_eq!((&lock.lock.id[..], lock.shared.as_deref()), ("auto 3", Some("t")));
        let held: HeldLock = read(&["rbd/a", "x", "client.42"]).expect("a lock");
        assert_eq!((&held.id[..], &held.locker[..]), ("x", "client.42"));
        for (arguments, says) in [
            (&["a", "x"][..], "the locker is missing"),
            (&["a", "x", "me"], "is no locker"),
            (&["a", "x", "client."], "is no locker"),
            (&["a", "", "client.1"], "is empty"),
        ] {
            let said = read::<HeldLock>(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
        let names: FeatureNames = read(&["a", "object-map,fast-diff", "exclusive-lock"]).expect("features");
        assert_eq!(names.features, ["object-map", "fast-diff", "exclusive-lock"]);
        assert!(read::<FeatureNames>(&["a"]).expect_err("none").contains("at least one feature"));
    }
}
