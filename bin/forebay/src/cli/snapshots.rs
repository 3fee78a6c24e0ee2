//! Arguments that name snapshots, as `IMAGE@SNAP` or with `--snap`, and the options of `snap`.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

use super::names::{NameArgs, OneImage, read_by_way_of};
use super::places::{in_pool, place, pool_text};
use crate::spec::{ImageSpec, SnapshotSpec, SourceSpec};

/// Options of every command on images and snapshots beside the positional `POOL/IMAGE@SNAP`.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct SourceArgs {
    #[command(flatten)]
    pub(super) names: NameArgs,

    /// The snapshot, where the image's spec does not say it
    #[arg(long, value_name = "SNAP")]
    snap: Option<String>,
}

impl SourceArgs {
    /// Returns the image or snapshot that must be named.
    ///
    /// # Errors
    /// When the image or the snapshot is named twice, or by what can be no name.
    pub(super) fn required(&self, positional: Option<&str>) -> Result<SourceSpec, String> {
        let text = self.names.text(positional)?;
        let (image, snapshot) = split(text);
        let image = match image {
            Some(image) => in_pool(self.names.place().as_deref(), image)?,
            None => self.names.required(None)?,
        };
        SourceSpec::new(image, one_snapshot(snapshot, self.snap.as_deref(), "--snap")?)
    }

    /// Returns the snapshot that must be named.
    ///
    /// # Errors
    /// As [`required`](Self::required), and if an image alone is named.
    pub(super) fn snapshot(&self, positional: Option<&str>) -> Result<SnapshotSpec, String> {
        let source = self.required(positional)?;
        source.snapshot().ok_or_else(|| {
            format!("no snapshot of {} is named; write {}@SNAP, or --snap SNAP", source.image, source.image)
        })
    }

    /// Returns whether the snapshot is named by its option.
    pub(super) fn has_snapshot(&self) -> bool {
        self.snap.is_some()
    }
}

/// Splits the text of a spec into image and snapshot.
pub(super) fn split(text: Option<&str>) -> (Option<&str>, Option<&str>) {
    match text.and_then(|text| text.split_once('@')) {
        Some((image, snapshot)) => (Some(image), Some(snapshot)),
        None => (text, None),
    }
}

/// Returns the snapshot that a spec or an option names, but not both.
pub(super) fn one_snapshot<'a>(
    spec: Option<&'a str>,
    option: Option<&'a str>,
    flag: &str,
) -> Result<Option<&'a str>, String> {
    match (spec, option) {
        (Some(one), Some(other)) => {
            Err(format!("'@{one}' and '{flag} {other}' both name the snapshot; leave one of them out"))
        }
        (one, other) => Ok(one.or(other)),
    }
}

/// A command's only image, or a snapshot of it.
#[derive(Debug, Clone)]
pub struct OneSource {
    /// The image or snapshot.
    pub source: SourceSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedSource {
    /// The image, POOL/IMAGE, or a snapshot of it, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE[@SNAP]")]
    spec: Option<String>,
    #[command(flatten)]
    options: SourceArgs,
}

impl TryFrom<TypedSource> for OneSource {
    type Error = String;

    fn try_from(TypedSource { spec, options }: TypedSource) -> Result<Self, String> {
        Ok(Self { source: options.required(spec.as_deref())? })
    }
}

read_by_way_of!(TypedSource => OneSource);

/// A command's only snapshot.
#[derive(Debug, Clone)]
pub struct OneSnapshot {
    /// The snapshot.
    pub snapshot: SnapshotSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedSnapshot {
    /// The snapshot, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE@SNAP")]
    spec: Option<String>,
    #[command(flatten)]
    options: SourceArgs,
}

impl TryFrom<TypedSnapshot> for OneSnapshot {
    type Error = String;

    fn try_from(TypedSnapshot { spec, options }: TypedSnapshot) -> Result<Self, String> {
        Ok(Self { snapshot: options.snapshot(spec.as_deref())? })
    }
}

read_by_way_of!(TypedSnapshot => OneSnapshot);

/// A snapshot and its new name.
#[derive(Debug, Clone)]
pub struct SnapRenameArgs {
    /// The snapshot.
    pub snapshot: SnapshotSpec,
    /// Its new name.
    pub to: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedRenamed {
    /// The snapshot, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE@SNAP")]
    first: Option<String>,

    /// Its new name, POOL/IMAGE@SNAP of the same image
    #[arg(value_name = "TO")]
    second: Option<String>,
    #[command(flatten)]
    options: SourceArgs,

    /// The pool of the new name, which is the same
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    dest_pool: Option<String>,

    /// The namespace of the new name, which is the same
    #[arg(long, value_name = "NAMESPACE")]
    dest_namespace: Option<String>,

    /// The image of the new name, which is the same
    #[arg(long, value_name = "IMAGE", conflicts_with = "second")]
    dest: Option<String>,

    /// Its new name, instead of the positional one
    #[arg(long, value_name = "SNAP")]
    dest_snap: Option<String>,
}

impl TryFrom<TypedRenamed> for SnapRenameArgs {
    type Error = String;

    fn try_from(typed: TypedRenamed) -> Result<Self, String> {
        let TypedRenamed { first, second, options, dest_pool, dest_namespace, dest, dest_snap } = typed;
        // With --image, the only positional argument is the new name.
        let (from, to) = match (options.names.has_image(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        let snapshot = options.snapshot(from.as_deref())?;
        if let (Some(to), Some(dest)) = (&to, &dest) {
            return Err(format!("'{to}' and '--dest {dest}' both name the new name; leave one of them out"));
        }
        let text = to.or(dest);
        let (image, name) = split(text.as_deref());
        if let Some(image) = image {
            let dest = place(dest_pool.as_deref(), dest_namespace.as_deref());
            let place = dest.or(options.names.place().filter(|_| !image.contains('/')));
            let image = in_pool(place.as_deref(), image)?;
            if image != snapshot.image {
                return Err(format!("a snapshot of {} cannot become one of {image}", snapshot.image));
            }
        }
        let name = one_snapshot(name, dest_snap.as_deref(), "--dest-snap")?;
        let name = name.ok_or_else(|| {
            format!("the new name is missing: write {}@NAME after the snapshot, or --dest-snap NAME", snapshot.image)
        })?;
        let to = SnapshotSpec::new(snapshot.image.clone(), name)?.snapshot;
        Ok(Self { snapshot, to })
    }
}

read_by_way_of!(TypedRenamed => SnapRenameArgs);

/// Commands on snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapCommand {
    /// Create a snapshot, while the image is in use too
    ///
    /// It holds every write that was acknowledged before, also those that only a write log has.
    #[command(
        visible_alias = "add",
        after_help = "Examples:\n  forebay snap create local/disk1@monday\n  forebay snap create -p rbd --image disk1 --snap monday"
    )]
    Create(SnapCreateArgs),

    /// List an image's snapshots, in the output format of 'rbd snap ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay snap ls local/disk1 --format json")]
    Ls(SnapLsArgs),

    /// Rename a snapshot
    #[command(
        visible_alias = "mv",
        after_help = "Example:\n  forebay snap rename local/disk1@monday local/disk1@before-upgrade"
    )]
    Rename(SnapRenameArgs),

    /// Remove a snapshot
    ///
    /// One with clones of version 2 moves to the trash, and is removed with the last of them.
    #[command(
        visible_alias = "remove",
        after_help = "Examples:\n  forebay snap rm local/disk1@monday\n  forebay snap rm local/disk1 --snap-id 17"
    )]
    Rm(SnapRmArgs),

    /// Remove all snapshots of an image that are not protected
    ///
    /// Exits with 6 if protected ones are left, and names them.
    #[command(after_help = "Example:\n  forebay snap purge local/disk1")]
    Purge(OneImage),

    /// Protect a snapshot from removal
    #[command(after_help = "Example:\n  forebay snap protect local/disk1@monday")]
    Protect(OneSnapshot),

    /// Allow a snapshot to be removed again
    #[command(after_help = "Example:\n  forebay snap unprotect local/disk1@monday")]
    Unprotect(OneSnapshot),

    /// Roll an image back to a snapshot, which overwrites its data and its size
    ///
    /// The image must not be exported: hosts would mix what they have cached with older data.
    #[command(visible_alias = "revert", after_help = "Example:\n  forebay snap rollback local/disk1@monday")]
    Rollback(OneSnapshot),

    /// Limit the number of an image's snapshots
    #[command(subcommand)]
    Limit(SnapLimitCommand),
}

/// Options of `snap create`.
#[derive(Debug, Args)]
pub struct SnapCreateArgs {
    /// The new snapshot.
    #[command(flatten)]
    pub name: OneSnapshot,

    /// Taken as by rbd; there are no quiesce hooks here
    #[arg(long)]
    pub skip_quiesce: bool,

    /// Taken as by rbd; there are no quiesce hooks here
    #[arg(long)]
    pub ignore_quiesce_error: bool,
}

/// Options of `snap ls`.
#[derive(Debug, Args)]
pub struct SnapLsArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// With the snapshots of groups, of mirroring and in the trash
    #[arg(short, long)]
    pub all: bool,
}

/// Snapshot to remove.
#[derive(Debug, Clone)]
pub enum RemovedSnapshot {
    /// By its name.
    Named(SnapshotSpec),
    /// By its number, as those in the trash have no name of their own.
    Numbered(ImageSpec, u64),
}

/// Options of `snap rm`.
#[derive(Debug)]
pub struct SnapRmArgs {
    /// The snapshot.
    pub snapshot: RemovedSnapshot,
    /// Set to flatten its clones of version 1 and to end its protection first.
    pub force: bool,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedRemoved {
    /// The snapshot, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE@SNAP")]
    spec: Option<String>,
    #[command(flatten)]
    options: SourceArgs,

    /// The snapshot's number, with an image instead of a snapshot; for snapshots in the trash
    #[arg(long, value_name = "N", conflicts_with = "force")]
    snap_id: Option<u64>,

    /// Flatten the snapshot's clones and end its protection first
    #[arg(long)]
    force: bool,
}

impl TryFrom<TypedRemoved> for SnapRmArgs {
    type Error = String;

    fn try_from(TypedRemoved { spec, options, snap_id, force }: TypedRemoved) -> Result<Self, String> {
        let snapshot = match snap_id {
            None => RemovedSnapshot::Named(options.snapshot(spec.as_deref())?),
            Some(id) => {
                let source = options.required(spec.as_deref())?;
                if let Some(snapshot) = source.snapshot() {
                    return Err(format!(
                        "'{snapshot}' and '--snap-id {id}' both name the snapshot; leave one of them out"
                    ));
                }
                RemovedSnapshot::Numbered(source.image, id)
            }
        };
        Ok(Self { snapshot, force })
    }
}

read_by_way_of!(TypedRemoved => SnapRmArgs);

/// Commands on the maximum number of snapshots.
#[derive(Debug, Subcommand)]
pub enum SnapLimitCommand {
    /// Limit the number of snapshots
    #[command(after_help = "Example:\n  forebay snap limit set local/disk1 --limit 10")]
    Set(SnapLimitArgs),

    /// Remove the limit
    #[command(after_help = "Example:\n  forebay snap limit clear local/disk1")]
    Clear(OneImage),
}

/// Options of `snap limit set`.
#[derive(Debug, Args)]
pub struct SnapLimitArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// The maximum number of snapshots
    #[arg(long, value_name = "N")]
    pub limit: u64,
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn one_snapshot_in_every_way() {
        for (arguments, want) in [
            (&["a@s"][..], "local/a@s"),
            (&["rbd/a@s"], "rbd/a@s"),
            (&["-p", "rbd", "a@s"], "rbd/a@s"),
            (&["rbd/a", "--snap", "s"], "rbd/a@s"),
            (&["-p", "rbd", "--image", "a", "--snap", "s"], "rbd/a@s"),
            (&["--image", "rbd/a@s"], "rbd/a@s"),
            (&["a@two words"], "local/a@two words"),
        ] {
            let read: OneSnapshot = read(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            assert_eq!(read.snapshot.to_string(), want, "{arguments:?}");
        }
        for (arguments, says) in [
            (&[][..], "no image is named"),
            (&["--snap", "s"], "no image is named"),
            (&["a"], "no snapshot of local/a is named"),
            (&["a@"], "empty"),
            (&["@s"], "empty"),
            (&["a@s", "--snap", "t"], "both name the snapshot"),
            (&["a@s", "--image", "b"], "both name the image"),
            (&["a@s@t"], "no name may"),
            (&["a@s/t"], "no name may"),
            (&["-p", "rbd", "--snap", "s"], "names no image"),
        ] {
            let said = read::<OneSnapshot>(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }

    #[test]
    fn an_image_or_a_snapshot() {
        let source = |arguments| read::<OneSource>(arguments).map(|read| read.source.to_string());
        for (arguments, want) in [
            (&["a"][..], "local/a"),
            (&["rbd/a@s"], "rbd/a@s"),
            (&["-p", "rbd", "--image", "a"], "rbd/a"),
            (&["--image", "a", "--snap", "s"], "local/a@s"),
        ] {
            assert_eq!(source(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        assert!(source(&[]).is_err());
    }

    #[test]
    fn a_snapshot_and_its_new_name() {
        let renamed = |arguments| read::<SnapRenameArgs>(arguments).map(|read| (read.snapshot.to_string(), read.to));
        for arguments in [
            &["rbd/a@s", "rbd/a@t"][..],
            &["-p", "rbd", "a@s", "a@t"],
            &["rbd/a@s", "--dest-snap", "t"],
            &["rbd/a@s", "rbd/a", "--dest-snap", "t"],
            &["-p", "rbd", "--image", "a", "--snap", "s", "a@t"],
            &["-p", "rbd", "--image", "a", "--snap", "s", "--dest-pool", "rbd", "--dest", "a", "--dest-snap", "t"],
        ] {
            assert_eq!(renamed(arguments), Ok(("rbd/a@s".into(), "t".into())), "{arguments:?}");
        }
        for (arguments, says) in [
            (&["a@s"][..], "the new name is missing"),
            (&["a@s", "a"], "the new name is missing"),
            (&["a@s", "b@t"], "cannot become"),
            (&["rbd/a@s", "a@t"], "cannot become"),
            (&["a@s", "a@t", "--dest-snap", "u"], "both name the snapshot"),
            (&["a@s", "a@"], "empty"),
            (&["a", "a@t"], "no snapshot of local/a is named"),
        ] {
            let said = renamed(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }
}
