//! Options of the commands on changes and copies of images.

use std::path::PathBuf;

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand, ValueHint};

use super::images::NewImageArgs;
use super::names::{ExportOperands, ImportOperands, read_by_way_of};
use super::places::{in_pool, place, pool_text};
use super::snapshots::{OneSource, SourceArgs};
use crate::spec::{ImageSpec, SourceSpec};

/// Range of changes.
#[derive(Debug, Clone, Args)]
pub struct ChangesArgs {
    /// The older snapshot that the changes begin at [default: the beginning, when the image was empty]
    #[arg(long, value_name = "SNAP")]
    pub from_snap: Option<String>,

    /// Compare whole objects, which is faster, and finds more
    #[arg(long)]
    pub whole_object: bool,
}

/// Options of `diff`.
#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The image or snapshot.
    #[command(flatten)]
    pub name: OneSource,

    /// The changes.
    #[command(flatten)]
    pub changes: ChangesArgs,
}

/// Options of `export-diff`.
#[derive(Debug, Args)]
pub struct ExportDiffArgs {
    /// The image or snapshot, and the file.
    #[command(flatten)]
    pub names: ExportOperands,

    /// The changes.
    #[command(flatten)]
    pub changes: ChangesArgs,

    /// Overwrite an existing file
    #[arg(short, long)]
    pub force: bool,
}

/// Options of `import-diff`.
#[derive(Debug, Args)]
pub struct ImportDiffArgs {
    /// The file and the image.
    #[command(flatten)]
    pub names: ImportOperands,
}

/// Options of `merge-diff`.
#[derive(Debug, Args)]
pub struct MergeDiffArgs {
    /// The first diff, or - for standard input
    #[arg(value_name = "FIRST", value_hint = ValueHint::FilePath)]
    pub first: PathBuf,

    /// The second diff, which begins where the first one ends
    #[arg(value_name = "SECOND", value_hint = ValueHint::FilePath)]
    pub second: PathBuf,

    /// A new file, or - for standard output
    #[arg(value_name = "PATH", value_hint = ValueHint::FilePath, required_unless_present = "named", conflicts_with = "named")]
    pub path: Option<PathBuf>,

    /// The new file, instead of the positional one
    #[arg(long = "path", id = "named", value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub named: Option<PathBuf>,

    /// Overwrite an existing file
    #[arg(short, long)]
    pub force: bool,
}

/// An image or snapshot, and the image that it is copied to.
#[derive(Debug, Clone)]
pub struct CopyOperands {
    /// The image or snapshot.
    pub source: SourceSpec,
    /// The new image.
    pub to: ImageSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedCopied {
    /// The image, POOL/IMAGE, or a snapshot of it, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE[@SNAP]")]
    first: Option<String>,

    /// The new image, POOL/IMAGE
    #[arg(value_name = "TO")]
    second: Option<String>,
    #[command(flatten)]
    options: SourceArgs,

    /// The new image, instead of the positional one
    #[arg(long, value_name = "IMAGE")]
    dest: Option<String>,

    /// The pool of the new image, where its spec does not say it [default: that of the source]
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    dest_pool: Option<String>,

    /// The namespace of the new image, where its spec does not say it
    #[arg(long, value_name = "NAMESPACE")]
    dest_namespace: Option<String>,
}

impl TryFrom<TypedCopied> for CopyOperands {
    type Error = String;

    fn try_from(typed: TypedCopied) -> Result<Self, String> {
        let TypedCopied { first, second, options, dest, dest_pool, dest_namespace } = typed;
        // With --image, the only positional argument is the new image.
        let (source, to) = match (options.names.has_image(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        let source = options.required(source.as_deref())?;
        let to = match (to, dest) {
            (Some(one), Some(other)) => {
                return Err(format!("'{one}' and '--dest {other}' both name the new image; leave one of them out"));
            }
            (to, dest) => {
                to.or(dest).ok_or("the new image is missing: write it after the source, or as --dest NAME")?
            }
        };
        let to_place = match (place(dest_pool.as_deref(), dest_namespace.as_deref()), to.contains('/')) {
            (None, false) => Some(source.image.place()),
            (Some(namespace), false) if namespace.starts_with('/') => Some(format!("{}{namespace}", source.image.pool)),
            (place, _) => place,
        };
        Ok(Self { to: in_pool(to_place.as_deref(), &to)?, source })
    }
}

read_by_way_of!(TypedCopied => CopyOperands);

/// Options of `cp`.
#[derive(Debug, Args)]
pub struct CopyArgs {
    /// The image and its copy.
    #[command(flatten)]
    pub names: CopyOperands,

    /// The options of the copy.
    #[command(flatten)]
    pub made: NewImageArgs,
}

/// Commands on images with all their snapshots.
#[derive(Debug, Subcommand)]
pub enum DeepCommand {
    /// Copy an image with its snapshots to a new image
    ///
    /// Of a snapshot, the older ones are copied too.
    #[command(
        visible_alias = "copy",
        after_help = "Examples:\n  forebay deep cp local/disk1 rbd/disk1\n  forebay deep cp rbd/child rbd/own --flatten"
    )]
    Cp(DeepCopyArgs),
}

/// Options of `deep cp`.
#[derive(Debug, Args)]
pub struct DeepCopyArgs {
    /// The image and its copy.
    #[command(flatten)]
    pub names: CopyOperands,

    /// The options of the copy.
    #[command(flatten)]
    pub made: NewImageArgs,

    /// Copy the data of a clone's parent too, so that the copy is independent of it
    #[arg(long)]
    pub flatten: bool,
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn an_image_and_its_copy() {
        let copied =
            |arguments| read::<CopyOperands>(arguments).map(|read| (read.source.to_string(), read.to.to_string()));
        for (arguments, source, to) in [
            (&["a", "b"][..], "local/a", "local/b"),
            (&["rbd/a@s", "b"], "rbd/a@s", "rbd/b"),
            (&["rbd/a", "local/b"], "rbd/a", "local/b"),
            (&["-p", "rbd", "--image", "a", "--snap", "s", "b"], "rbd/a@s", "rbd/b"),
            (&["rbd/a", "--dest", "b"], "rbd/a", "rbd/b"),
            (&["rbd/a", "--dest-pool", "local", "--dest", "b"], "rbd/a", "local/b"),
            (&["rbd/a", "b", "--dest-pool", "local"], "rbd/a", "local/b"),
        ] {
            assert_eq!(copied(arguments), Ok((source.into(), to.into())), "{arguments:?}");
        }
        for (arguments, says) in [
            (&["a"][..], "the new image is missing"),
            (&["a", "b", "--dest", "c"], "both name the new image"),
            (&["a", "b@s"], "snapshot"),
            (&["a", "rbd/b", "--dest-pool", "local"], "different pools"),
        ] {
            let said = copied(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }

    #[test]
    fn diffs_to_merge() {
        let merged = |arguments| read::<MergeDiffArgs>(arguments).map(|read| read.path.or(read.named));
        assert_eq!(merged(&["a", "b", "c"]), Ok(Some("c".into())));
        assert_eq!(merged(&["-", "b", "--path", "c"]), Ok(Some("c".into())));
        assert!(merged(&["a", "b"]).is_err() && merged(&["a", "b", "c", "--path", "d"]).is_err());
    }
}
