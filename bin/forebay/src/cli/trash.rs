//! Options of `trash`.

use clap::{ArgMatches, Args, Command, FromArgMatches, Subcommand};

use super::names::{OneImage, read_by_way_of};
use super::places::{OnePool, one_place, pool_text};
use crate::spec::TrashSpec;

/// An image in the trash.
#[derive(Debug, Clone)]
pub struct OneTrashed {
    /// The image.
    pub spec: TrashSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedTrashed {
    /// The id of the image, [POOL/[NAMESPACE/]]ID, as 'trash ls' shows it
    #[arg(value_name = "ID")]
    trashed: Option<String>,

    /// The image's pool, where the id does not say it
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,

    /// The image's namespace, where the id does not say it
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,

    /// The id, instead of the positional one
    #[arg(long, value_name = "ID")]
    image_id: Option<String>,
}

impl TryFrom<TypedTrashed> for OneTrashed {
    type Error = String;

    fn try_from(TypedTrashed { trashed, pool, namespace, image_id }: TypedTrashed) -> Result<Self, String> {
        let text = match (trashed, image_id) {
            (Some(one), Some(other)) => {
                return Err(format!("'{one}' and '--image-id {other}' both name the image; leave one of them out"));
            }
            (one, other) => one.or(other).ok_or("no image is named; write its id, which 'forebay trash ls' shows")?,
        };
        // The place before the id, if it has one.
        let (typed, id) = text.rsplit_once('/').map_or((None, text.as_str()), |(typed, id)| (Some(typed), id));
        let place = one_place(typed, pool.as_deref(), namespace.as_deref())?;
        Ok(Self { spec: TrashSpec::parse(place.as_deref(), id)? })
    }
}

read_by_way_of!(TypedTrashed => OneTrashed);

/// Commands on the trash.
#[derive(Debug, Subcommand)]
pub enum TrashCommand {
    /// Move an image to the trash, where its id names it
    ///
    /// Its clones continue to read it.  Images that are exported or open are refused.
    #[command(
        visible_alias = "move",
        after_help = "Examples:\n  forebay trash mv local/disk1\n  forebay trash mv rbd/disk1 --expires-at '2 weeks'"
    )]
    Mv(TrashMvArgs),

    /// List the images in the trash, in the output format of 'rbd trash ls'
    #[command(visible_alias = "list", after_help = "Example:\n  forebay trash ls --long -p rbd")]
    Ls(TrashLsArgs),

    /// Restore an image from the trash
    #[command(after_help = "Example:\n  forebay trash restore local/0a1b2c3d4e5f60 --image disk1")]
    Restore(TrashRestoreArgs),

    /// Remove an image in the trash and all its data
    #[command(visible_alias = "remove", after_help = "Example:\n  forebay trash rm local/0a1b2c3d4e5f60")]
    Rm(TrashRmArgs),

    /// Remove the expired images in the trash
    ///
    /// Exits with 6 if some cannot be removed, and names them.
    #[command(after_help = "Example:\n  forebay trash purge local --expired-before '1 week ago'")]
    Purge(TrashPurgeArgs),
}

/// Options of `trash mv`.
#[derive(Debug, Args)]
pub struct TrashMvArgs {
    /// The image.
    #[command(flatten)]
    pub name: OneImage,

    /// Time up to which it is only removed by force, as 'date --date' reads it
    #[arg(long, value_name = "TIME", default_value = "now")]
    pub expires_at: String,
}

/// Options of `trash ls`.
#[derive(Debug, Args)]
pub struct TrashLsArgs {
    /// The pool.
    #[command(flatten)]
    pub name: OnePool,

    /// With those of mirroring and of migrations
    #[arg(short, long)]
    pub all: bool,

    /// With sources, times, states and parents
    #[arg(short, long)]
    pub long: bool,
}

/// Options of `trash restore`.
#[derive(Debug, Args)]
pub struct TrashRestoreArgs {
    /// The image in the trash.
    #[command(flatten)]
    pub name: OneTrashed,

    /// Its new name [default: the former one]
    #[arg(long = "image", value_name = "NAME")]
    pub image: Option<String>,
}

/// Options of `trash rm`.
#[derive(Debug, Args)]
pub struct TrashRmArgs {
    /// The image in the trash.
    #[command(flatten)]
    pub name: OneTrashed,

    /// Remove it although its deferment has not expired
    #[arg(long)]
    pub force: bool,
}

/// Options of `trash purge`.
#[derive(Debug, Args)]
pub struct TrashPurgeArgs {
    /// The pool.
    #[command(flatten)]
    pub name: OnePool,

    /// Remove those that expired before this time, as 'date --date' reads it [default: now]
    #[arg(long, value_name = "TIME")]
    pub expired_before: Option<String>,

    /// Refused: this build does not purge by the usage of the pool
    #[arg(long, value_name = "USAGE", conflicts_with = "expired_before")]
    pub threshold: Option<f32>,
}

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn the_id_of_an_image_is_not_that_of_a_client_of_the_cluster() {
        use clap::Parser;
        let line = ["forebay", "trash", "rm", "rbd/1015fdba71ed", "--id", "me"];
        let read = crate::cli::Cli::try_parse_from(line).expect("a command");
        assert_eq!(read.global.ceph.id.as_deref(), Some("me"));
        let read = crate::cli::Cli::try_parse_from(&line[..4]).expect("a command");
        assert_eq!(read.global.ceph.id, None);
    }

    #[test]
    fn an_image_in_the_trash_in_every_way() {
        for (arguments, want) in [
            (&["1015fdba71ed"][..], "local/1015fdba71ed"),
            (&["rbd/1015fdba71ed"], "rbd/1015fdba71ed"),
            (&["-p", "rbd", "1015fdba71ed"], "rbd/1015fdba71ed"),
            (&["-p", "rbd", "--image-id", "1015fdba71ed"], "rbd/1015fdba71ed"),
            (&["rbd/ns/1015fdba71ed"], "rbd/ns/1015fdba71ed"),
            (&["-p", "rbd", "--namespace", "ns", "1015fdba71ed"], "rbd/ns/1015fdba71ed"),
        ] {
            let read: OneTrashed = read(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            assert_eq!(read.spec.to_string(), want, "{arguments:?}");
        }
        for (arguments, says) in [
            (&[][..], "no image is named"),
            (&["-p", "rbd"], "no image is named"),
            (&["a", "--image-id", "b"], "both name the image"),
            (&["-p", "other", "rbd/a"], "different pools"),
            (&["a b"], "not the id of an image"),
            (&["rbd/"], "not the id of an image"),
        ] {
            let said = read::<OneTrashed>(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }
}
