//! Arguments of `clone` and `children`.

use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::images::{FeatureArgs, StripeArgs};
use super::names::read_by_way_of;
use super::places::{in_pool, place, pool_text};
use super::snapshots::SourceArgs;
use crate::api::CloneVersion;
use crate::spec::{ImageSpec, SnapshotSpec, SourceSpec};
use crate::units::{Size, byte_size};

/// Options of `clone`.
#[derive(Debug)]
pub struct CloneArgs {
    /// Snapshot to clone.
    pub from: SnapshotSpec,
    /// New image.
    pub to: ImageSpec,
    /// Its options.
    pub options: NewCloneArgs,
}

/// Options of a new clone.
#[derive(Debug, Args)]
pub struct NewCloneArgs {
    /// Bytes an object, a power of two from 64K to 32M [default: that of the parent]
    #[arg(long, value_name = "SIZE", value_parser = byte_size)]
    pub object_size: Option<Size>,

    /// Its striping; that of the parent is not inherited.
    #[command(flatten)]
    pub stripes: StripeArgs,

    /// Its features.
    #[command(flatten)]
    pub features: FeatureArgs,

    /// The version of the clone, that is, where it is recorded
    #[arg(long, alias = "rbd-default-clone-format", value_enum, value_name = "VERSION", default_value = "auto")]
    pub clone_format: CloneVersion,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedClone {
    /// The snapshot, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE@SNAP")]
    first: Option<String>,

    /// The new image, POOL/IMAGE
    #[arg(value_name = "TO")]
    second: Option<String>,
    #[command(flatten)]
    source: SourceArgs,

    /// The new image's pool, where its spec does not say it [default: local]
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    dest_pool: Option<String>,

    /// The new image's namespace, where its spec does not say it
    #[arg(long, value_name = "NAMESPACE")]
    dest_namespace: Option<String>,

    /// The new image, instead of the positional one
    #[arg(long, value_name = "IMAGE", conflicts_with = "second")]
    dest: Option<String>,
    #[command(flatten)]
    options: NewCloneArgs,
}

impl TryFrom<TypedClone> for CloneArgs {
    type Error = String;

    fn try_from(typed: TypedClone) -> Result<Self, String> {
        let TypedClone { first, second, source, dest_pool, dest_namespace, dest, options } = typed;
        // With --image, the only positional argument is the new image.
        let (from, to) = match (source.names.has_image(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        let from = source.snapshot(from.as_deref())?;
        if let (Some(to), Some(dest)) = (&to, &dest) {
            return Err(format!("'{to}' and '--dest {dest}' both name the new image; leave one of them out"));
        }
        let Some(to) = to.or(dest) else {
            return Err("the new image is not named; write POOL/IMAGE after the snapshot, or --dest".into());
        };
        let place = place(dest_pool.as_deref(), dest_namespace.as_deref());
        Ok(Self { from, to: in_pool(place.as_deref(), &to)?, options })
    }
}

read_by_way_of!(TypedClone => CloneArgs);

/// Options of `children`.
#[derive(Debug)]
pub struct ChildrenArgs {
    /// Image or snapshot.
    pub source: SourceSpec,
    /// Set to list those in the trash too.
    pub all: bool,
    /// Set to list the clones of clones too.
    pub descendants: bool,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedChildren {
    /// The image, POOL/IMAGE, or a snapshot of it, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE[@SNAP]")]
    spec: Option<String>,
    #[command(flatten)]
    source: SourceArgs,

    /// With the clones that are in the trash
    #[arg(short, long)]
    all: bool,

    /// With the clones of the clones
    #[arg(long)]
    descendants: bool,
}

impl TryFrom<TypedChildren> for ChildrenArgs {
    type Error = String;

    fn try_from(TypedChildren { spec, source, all, descendants }: TypedChildren) -> Result<Self, String> {
        Ok(Self { source: source.required(spec.as_deref())?, all, descendants })
    }
}

read_by_way_of!(TypedChildren => ChildrenArgs);

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn a_snapshot_and_its_clone() {
        let cloned = |arguments| read::<CloneArgs>(arguments).map(|read| format!("{} {}", read.from, read.to));
        for (arguments, want) in [
            (&["rbd/a@s", "rbd/b"][..], "rbd/a@s rbd/b"),
            (&["a@s", "b"], "local/a@s local/b"),
            (&["-p", "rbd", "a@s", "b"], "rbd/a@s local/b"),
            (&["-p", "rbd", "--image", "a", "--snap", "s", "other/b"], "rbd/a@s other/b"),
            (&["-p", "rbd", "--image", "a", "--snap", "s", "--dest-pool", "x", "--dest", "b"], "rbd/a@s x/b"),
            (&["rbd/a@s", "--dest", "b"], "rbd/a@s local/b"),
        ] {
            assert_eq!(cloned(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        for (arguments, says) in [
            (&["a@s"][..], "the new image is not named"),
            (&["a", "b"], "no snapshot of local/a is named"),
            (&["a@s", "b@t"], "names the snapshot"),
            (&["a@s", "rbd/b", "--dest-pool", "x"], "name different pools"),
            (&["a@s", "b", "--dest", "c"], "cannot be used with"),
        ] {
            let said = cloned(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }

    #[test]
    fn features_of_a_new_image() {
        let features = |arguments: &[&str]| {
            let arguments = [&["a@s", "b"], arguments].concat();
            read::<CloneArgs>(&arguments).map(|read| read.options.features.names())
        };
        assert_eq!(features(&[]), Ok(None));
        let both = Some(vec!["layering".to_owned(), "deep-flatten".to_owned()]);
        assert_eq!(features(&["--image-feature", "layering,deep-flatten"]), Ok(both.clone()));
        assert_eq!(features(&["--image-feature", "layering", "--image-feature", "deep-flatten"]), Ok(both.clone()));
        assert_eq!(features(&["--image-shared"]), Ok(both));
        assert!(features(&["--image-shared", "--image-feature", "layering"]).is_err());
    }
}
