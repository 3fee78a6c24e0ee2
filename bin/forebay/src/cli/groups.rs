//! Options of `group`.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

use super::gateways::{
    CreateGroupArgs, DrainGroupArgs, GroupStatusArgs, JoinGroupArgs, RebalanceGroupArgs, RemoveGroupArgs, SetGroupArgs,
    SetWeightArgs,
};
use super::names::read_by_way_of;
use super::places::{OnePool, in_pool, place, pool_text, spec_in_pool};
use super::snapshots::{one_snapshot, split};
use crate::spec::{GroupSnapshotSpec, GroupSpec, ImageSpec, LOCAL_POOL, split_pool};

/// Reads the spec of a group; what it leaves out is said by `place`, or else the default pool is meant.
///
/// # Errors
/// When it names another pool or namespace than `place`.
fn group_in_pool(place: Option<&str>, text: &str) -> Result<GroupSpec, String> {
    spec_in_pool(place, text, |spec: &GroupSpec| spec.pool.clone())
}

/// Returns the text that names a group, which must be named once.
fn one_group<'a>(positional: Option<&'a str>, option: Option<&'a str>) -> Result<&'a str, String> {
    match (positional, option) {
        (Some(one), Some(other)) => {
            Err(format!("'{one}' and '--group {other}' both name the group; leave one of them out"))
        }
        (one, other) => one
            .or(other)
            .ok_or_else(|| format!("no group is named; write POOL/GROUP, for example {LOCAL_POOL}/database")),
    }
}

/// Options of commands on a group beside the positional `POOL/GROUP`.
#[derive(Debug, Args)]
struct GroupArgs {
    /// The group's pool, where its spec does not say it
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,

    /// The group's namespace, where its spec does not say it
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,

    /// The group, instead of the positional one
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
}

impl GroupArgs {
    fn place(&self) -> Option<String> {
        place(self.pool.as_deref(), self.namespace.as_deref())
    }

    fn required(&self, positional: Option<&str>) -> Result<GroupSpec, String> {
        group_in_pool(self.place().as_deref(), one_group(positional, self.group.as_deref())?)
    }
}

/// A command's only group.
#[derive(Debug, Clone)]
pub struct OneGroup {
    /// The group.
    pub group: GroupSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedGroup {
    /// The group, POOL/GROUP
    #[arg(value_name = "GROUP")]
    spec: Option<String>,
    #[command(flatten)]
    options: GroupArgs,
}

impl TryFrom<TypedGroup> for OneGroup {
    type Error = String;

    fn try_from(TypedGroup { spec, options }: TypedGroup) -> Result<Self, String> {
        Ok(Self { group: options.required(spec.as_deref())? })
    }
}

read_by_way_of!(TypedGroup => OneGroup);

/// A group and its new name.
#[derive(Debug, Clone)]
pub struct RenamedGroup {
    /// The group.
    pub group: GroupSpec,
    /// Its new name.
    pub to: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedRenamedGroup {
    /// The group, POOL/GROUP
    #[arg(value_name = "GROUP")]
    first: Option<String>,

    /// Its new name, in the same pool
    #[arg(value_name = "TO")]
    second: Option<String>,
    #[command(flatten)]
    options: GroupArgs,

    /// The pool of the new name, which is the same
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    dest_pool: Option<String>,

    /// The namespace of the new name, which is the same
    #[arg(long, value_name = "NAMESPACE")]
    dest_namespace: Option<String>,

    /// The new name, instead of the positional one
    #[arg(long, value_name = "GROUP", conflicts_with = "second")]
    dest_group: Option<String>,
}

impl TryFrom<TypedRenamedGroup> for RenamedGroup {
    type Error = String;

    fn try_from(typed: TypedRenamedGroup) -> Result<Self, String> {
        let TypedRenamedGroup { first, second, options, dest_pool, dest_namespace, dest_group } = typed;
        // With --group, the only positional argument is the new name.
        let (from, to) = match (options.group.is_some(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        let group = options.required(from.as_deref())?;
        let to = to.or(dest_group).ok_or("the new name is missing: write it after the group, or --dest-group")?;
        let to = match (to.contains('/'), place(dest_pool.as_deref(), dest_namespace.as_deref())) {
            (false, None) => format!("{}/{to}", group.pool).parse()?,
            (false, Some(namespace)) if namespace.starts_with('/') => {
                group_in_pool(Some(&format!("{}{namespace}", split_pool(&group.pool).0)), &to)?
            }
            (_, place) => group_in_pool(place.as_deref(), &to)?,
        };
        if to.pool != group.pool {
            return Err(format!("{group} cannot become {to}: a group stays in its pool and namespace"));
        }
        Ok(Self { group, to: to.group })
    }
}

read_by_way_of!(TypedRenamedGroup => RenamedGroup);

/// A group and an image.
#[derive(Debug, Clone)]
pub struct GroupAndImage {
    /// The group.
    pub group: GroupSpec,
    /// The image.
    pub image: ImageSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedGroupAndImage {
    /// The group, POOL/GROUP
    #[arg(value_name = "GROUP")]
    first: Option<String>,

    /// The image, POOL/IMAGE
    #[arg(value_name = "IMAGE")]
    second: Option<String>,

    /// The pool of the group and of the image, where they do not say it
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,

    /// The group's pool, where its spec does not say it
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    group_pool: Option<String>,

    /// The group's namespace, where its spec does not say it
    #[arg(long, value_name = "NAMESPACE")]
    group_namespace: Option<String>,

    /// The group, instead of the positional one
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,

    /// The image's pool, where its spec does not say it
    #[arg(long, value_name = "POOL", value_parser = pool_text)]
    image_pool: Option<String>,

    /// The image's namespace, where its spec does not say it
    #[arg(long, value_name = "NAMESPACE")]
    image_namespace: Option<String>,

    /// The image, instead of the positional one
    #[arg(long, visible_alias = "image-id", value_name = "IMAGE")]
    image: Option<String>,
}

impl TryFrom<TypedGroupAndImage> for GroupAndImage {
    type Error = String;

    fn try_from(typed: TypedGroupAndImage) -> Result<Self, String> {
        let TypedGroupAndImage {
            first,
            second,
            pool,
            group_pool,
            group_namespace,
            group,
            image_pool,
            image_namespace,
            image,
        } = typed;
        // With --group, the only positional argument is the image.
        let (named, member) = match (group.is_some(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        // The pool of both is the default only.
        let place_of = |own: Option<String>, namespace: Option<String>, is_full: bool| {
            place(own.or_else(|| pool.clone().filter(|_| !is_full)).as_deref(), namespace.as_deref())
        };
        let group_text = one_group(named.as_deref(), group.as_deref())?;
        let group_place = place_of(group_pool, group_namespace, group_text.contains('/'));
        let group = group_in_pool(group_place.as_deref(), group_text)?;
        let member = match (member, image) {
            (Some(one), Some(other)) => {
                return Err(format!("'{one}' and '--image {other}' both name the image; leave one of them out"));
            }
            (one, other) => one.or(other).ok_or("no image is named; write POOL/IMAGE after the group, or --image")?,
        };
        let image = in_pool(place_of(image_pool, image_namespace, member.contains('/')).as_deref(), &member)?;
        Ok(Self { group, image })
    }
}

read_by_way_of!(TypedGroupAndImage => GroupAndImage);

/// A command's only snapshot of a group.
#[derive(Debug, Clone)]
pub struct OneGroupSnapshot {
    /// The snapshot.
    pub snapshot: GroupSnapshotSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedGroupSnapshot {
    /// The snapshot, POOL/GROUP@SNAP
    #[arg(value_name = "GROUP@SNAP")]
    spec: Option<String>,
    #[command(flatten)]
    options: GroupArgs,

    /// The snapshot, where the group's spec does not say it
    #[arg(long, value_name = "SNAP")]
    snap: Option<String>,
}

/// Returns the snapshot that a positional argument and options name.
fn snapshot(spec: Option<&str>, options: &GroupArgs, snap: Option<&str>) -> Result<GroupSnapshotSpec, String> {
    let (group, own) = split(spec);
    let (group, own) = match own {
        Some(_) => (group, own),
        None => {
            let (_, of_option) = split(options.group.as_deref());
            (group, of_option)
        }
    };
    let option = split(options.group.as_deref()).0;
    let group = group_in_pool(options.place().as_deref(), one_group(group, option)?)?;
    let name = one_snapshot(own, snap, "--snap")?
        .ok_or_else(|| format!("no snapshot of {group} is named; write {group}@SNAP, or --snap SNAP"))?;
    GroupSnapshotSpec::new(group, name)
}

impl TryFrom<TypedGroupSnapshot> for OneGroupSnapshot {
    type Error = String;

    fn try_from(TypedGroupSnapshot { spec, options, snap }: TypedGroupSnapshot) -> Result<Self, String> {
        Ok(Self { snapshot: snapshot(spec.as_deref(), &options, snap.as_deref())? })
    }
}

read_by_way_of!(TypedGroupSnapshot => OneGroupSnapshot);

/// A snapshot of a group and its new name.
#[derive(Debug, Clone)]
pub struct RenamedGroupSnapshot {
    /// The snapshot.
    pub snapshot: GroupSnapshotSpec,
    /// Its new name.
    pub to: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedRenamedSnapshot {
    /// The snapshot, POOL/GROUP@SNAP
    #[arg(value_name = "GROUP@SNAP")]
    first: Option<String>,

    /// Its new name
    #[arg(value_name = "TO")]
    second: Option<String>,
    #[command(flatten)]
    options: GroupArgs,

    /// The snapshot, where the group's spec does not say it
    #[arg(long, value_name = "SNAP")]
    snap: Option<String>,

    /// The new name, instead of the positional one
    #[arg(long, value_name = "SNAP", conflicts_with = "second")]
    dest_snap: Option<String>,
}

impl TryFrom<TypedRenamedSnapshot> for RenamedGroupSnapshot {
    type Error = String;

    fn try_from(typed: TypedRenamedSnapshot) -> Result<Self, String> {
        let TypedRenamedSnapshot { first, second, options, snap, dest_snap } = typed;
        // With --group, the only positional argument is the new name.
        let (from, to) = match (options.group.is_some(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        let snapshot = snapshot(from.as_deref(), &options, snap.as_deref())?;
        let to = to.or(dest_snap).ok_or("the new name is missing: write it after the snapshot, or --dest-snap")?;
        let to = GroupSnapshotSpec::new(snapshot.group.clone(), &to)?.snapshot;
        Ok(Self { snapshot, to })
    }
}

read_by_way_of!(TypedRenamedSnapshot => RenamedGroupSnapshot);

/// Commands on groups.
#[derive(Debug, Subcommand)]
pub enum GroupCommand {
    /// Create a group of images, or with --gateways one of daemons
    #[command(
        after_help = "Examples:\n  forebay group create local/database\n  forebay group create rbd/gw --gateways"
    )]
    Create(CreateGroupArgs),

    /// List the groups of a pool or namespace
    #[command(visible_alias = "list", after_help = "Example:\n  forebay group ls rbd")]
    Ls(OnePool),

    /// Rename a group
    #[command(visible_alias = "mv", after_help = "Example:\n  forebay group rename local/database local/warehouse")]
    Rename(RenamedGroup),

    /// Remove a group and its snapshots; its images stay
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay group rm local/database")]
    Rm(RemoveGroupArgs),

    /// Add images to groups, and remove them
    #[command(subcommand)]
    Image(GroupImageCommand),

    /// Create, list and remove snapshots of groups, and roll groups back to them
    #[command(subcommand)]
    Snap(GroupSnapCommand),

    /// Make the daemon a member of a group of gateways, now and after each restart
    #[command(after_help = "Example:\n  forebay group join rbd/gw")]
    Join(JoinGroupArgs),

    /// Let the daemon leave its group of gateways; other members get its volumes
    #[command(after_help = "Example:\n  forebay group leave")]
    Leave,

    /// Show members and volumes of a group of gateways
    #[command(after_help = "Example:\n  forebay group status --format json")]
    Status(GroupStatusArgs),

    /// Move all volumes of a member of a group of gateways to others, before its machine is worked on
    #[command(after_help = "Examples:\n  forebay group drain\n  forebay group drain gateway2 --undo")]
    Drain(DrainGroupArgs),

    /// Change the policy of the daemon's group of gateways
    #[command(after_help = "Examples:\n  forebay group set --rebalance on\n  forebay group set --hosts group")]
    Set(SetGroupArgs),

    /// Set the share of the load that a member of a group of gateways has
    ///
    /// Volumes that the member has stay with it until they are rebalanced.
    #[command(after_help = "Examples:\n  forebay group set-weight 200\n  forebay group set-weight 0 gateway2")]
    SetWeight(SetWeightArgs),

    /// Move volumes so that the members of a group of gateways are loaded alike, a few at a time
    ///
    /// Loads are requests and bytes, smoothed over a minute.  A volume is moved only if that lowers the load of its owner,
    /// and leaves the next one with at least a tenth less.
    #[command(after_help = "Examples:\n  forebay group rebalance --dry-run\n  forebay group rebalance")]
    Rebalance(RebalanceGroupArgs),
}

/// Commands on the images of a group.
#[derive(Debug, Subcommand)]
pub enum GroupImageCommand {
    /// Add an image to a group
    ///
    /// An image belongs to one group at most.
    #[command(after_help = "Example:\n  forebay group image add local/database local/disk1")]
    Add(GroupAndImage),

    /// List the images of a group, in the output format of 'rbd group image ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay group image ls local/database --format json")]
    Ls(OneGroup),

    /// Remove an image from a group; the image stays, and so do its parts of the group's snapshots
    ///
    /// An image that is gone is named by its id.
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay group image rm local/database local/disk1")]
    Rm(GroupAndImage),
}

/// Commands on the snapshots of a group.
#[derive(Debug, Subcommand)]
pub enum GroupSnapCommand {
    /// Create a snapshot of all images of a group at one moment, while they are in use too
    ///
    /// Writes of hosts wait for a few milliseconds.  If the snapshot has a write to one image, it has every write to any image
    /// that was acknowledged before that one was submitted.
    #[command(
        visible_alias = "add",
        after_help = "Examples:\n  forebay group snap create local/database@monday\n  forebay group snap create -p rbd --group database --snap monday"
    )]
    Create(GroupSnapCreateArgs),

    /// List the snapshots of a group, in the output format of 'rbd group snap ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay group snap ls local/database")]
    Ls(OneGroup),

    /// Rename a snapshot of a group
    #[command(
        visible_alias = "mv",
        after_help = "Example:\n  forebay group snap rename local/database@monday before-upgrade"
    )]
    Rename(RenamedGroupSnapshot),

    /// Remove a snapshot of a group from all images
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay group snap rm local/database@monday")]
    Rm(OneGroupSnapshot),

    /// Roll the images of a group back to a snapshot, which overwrites their data and their sizes
    ///
    /// None of them may be exported: hosts would mix what they have cached with older data.
    #[command(visible_alias = "revert", after_help = "Example:\n  forebay group snap rollback local/database@monday")]
    Rollback(OneGroupSnapshot),
}

/// Options of `group snap create`.
#[derive(Debug, Args)]
pub struct GroupSnapCreateArgs {
    /// The new snapshot.
    #[command(flatten)]
    pub name: OneGroupSnapshot,

    /// Taken as by rbd; there are no quiesce hooks here
    #[arg(long)]
    pub skip_quiesce: bool,

    /// Taken as by rbd; there are no quiesce hooks here
    #[arg(long)]
    pub ignore_quiesce_error: bool,
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn a_group_in_every_way() {
        let group = |arguments| read::<OneGroup>(arguments).map(|read| read.group.to_string());
        for (arguments, want) in [
            (&["g"][..], "local/g"),
            (&["rbd/g"], "rbd/g"),
            (&["-p", "rbd", "g"], "rbd/g"),
            (&["-p", "rbd", "--group", "g"], "rbd/g"),
            (&["--group", "rbd/g"], "rbd/g"),
            (&["rbd/ns/g"], "rbd/ns/g"),
            (&["-p", "rbd", "--namespace", "ns", "g"], "rbd/ns/g"),
            (&["--namespace", "ns", "--group", "g"], "local/ns/g"),
        ] {
            assert_eq!(group(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        for (arguments, says) in [
            (&[][..], "no group is named"),
            (&["g", "--group", "h"], "both name the group"),
            (&["rbd/ns/g", "--namespace", "x"], "different namespaces"),
            (&["g@s"], "names the snapshot"),
            (&["-p", "x", "rbd/g"], "different pools"),
        ] {
            let said = group(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }

    #[test]
    fn a_group_and_an_image_or_a_new_name() {
        let both = |arguments| read::<GroupAndImage>(arguments).map(|read| format!("{} {}", read.group, read.image));
        for (arguments, want) in [
            (&["g", "a"][..], "local/g local/a"),
            (&["rbd/g", "data/a"], "rbd/g data/a"),
            (&["-p", "rbd", "g", "a"], "rbd/g rbd/a"),
            (&["-p", "rbd", "g", "data/a"], "rbd/g data/a"),
            (&["--group", "g", "a"], "local/g local/a"),
            (&["--group-pool", "x", "--group", "g", "--image-pool", "y", "--image", "a"], "x/g y/a"),
            (&["-p", "x", "--group-namespace", "n", "--image-namespace", "n", "g", "a"], "x/n/g x/n/a"),
            (&["x/n/g", "x/n/a"], "x/n/g x/n/a"),
        ] {
            assert_eq!(both(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        for arguments in [&["g"][..], &["g", "a", "--image", "b"], &["--image-pool", "x", "g", "y/a"]] {
            assert!(both(arguments).is_err(), "{arguments:?}");
        }
        let renamed = |arguments| read::<RenamedGroup>(arguments).map(|read| format!("{} {}", read.group, read.to));
        for (arguments, want) in [
            (&["rbd/g", "rbd/h"][..], "rbd/g h"),
            (&["rbd/g", "h"], "rbd/g h"),
            (&["-p", "rbd", "--group", "g", "h"], "rbd/g h"),
            (&["rbd/g", "--dest-group", "h"], "rbd/g h"),
            (&["rbd/g", "--dest-pool", "rbd", "--dest-group", "h"], "rbd/g h"),
            (&["rbd/n/g", "h"], "rbd/n/g h"),
            (&["rbd/n/g", "rbd/n/h"], "rbd/n/g h"),
            (&["rbd/n/g", "--dest-namespace", "n", "--dest-group", "h"], "rbd/n/g h"),
        ] {
            assert_eq!(renamed(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        assert!(renamed(&["rbd/n/g", "rbd/h"]).expect_err("wrong").contains("stays in its pool"));
        assert!(renamed(&["rbd/g", "x/h"]).expect_err("wrong").contains("stays in its pool"));
        assert!(renamed(&["rbd/g"]).expect_err("wrong").contains("new name is missing"));
    }

    #[test]
    fn a_snapshot_of_a_group_in_every_way() {
        let one = |arguments| read::<OneGroupSnapshot>(arguments).map(|read| read.snapshot.to_string());
        for (arguments, want) in [
            (&["g@s"][..], "local/g@s"),
            (&["rbd/g@s"], "rbd/g@s"),
            (&["-p", "rbd", "--group", "g", "--snap", "s"], "rbd/g@s"),
            (&["rbd/g", "--snap", "s"], "rbd/g@s"),
            (&["--group", "rbd/g@s"], "rbd/g@s"),
        ] {
            assert_eq!(one(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        assert!(one(&["rbd/g"]).expect_err("wrong").contains("no snapshot"));
        assert!(one(&["g@s", "--snap", "t"]).expect_err("wrong").contains("both name the snapshot"));
        let renamed =
            |arguments| read::<RenamedGroupSnapshot>(arguments).map(|read| format!("{} {}", read.snapshot, read.to));
        assert_eq!(renamed(&["rbd/g@s", "t"]).as_deref(), Ok("rbd/g@s t"));
        assert_eq!(
            renamed(&["-p", "rbd", "--group", "g", "--snap", "s", "--dest-snap", "t"]).as_deref(),
            Ok("rbd/g@s t")
        );
        assert!(renamed(&["rbd/g@s", "rbd/g@t"]).is_err(), "as rbd");
    }
}
