//! Arguments that name images: `POOL/IMAGE`, or as `rbd` also takes it, `--pool POOL --image NAME`.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{ArgMatches, Args, Command, FromArgMatches, ValueHint};

use super::places::{in_pool, one_place, place, pool_text};
use super::snapshots::SourceArgs;
use crate::spec::{ImageSpec, LOCAL_POOL, PoolSpec, SourceSpec};

/// Options of every command on images beside the positional `POOL/IMAGE`.
#[derive(Debug, Clone, Default, Args)]
pub(super) struct NameArgs {
    /// The image's pool, where its spec does not say it
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,

    /// The image's namespace, where its spec does not say it
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,

    /// The image, instead of the positional one
    #[arg(long = "image", value_name = "IMAGE")]
    image: Option<String>,
}

impl NameArgs {
    /// Returns the image that is named, if one is.
    ///
    /// # Errors
    /// When it is named twice, in two pools, or by what can be no name.
    pub(super) fn image(&self, positional: Option<&str>) -> Result<Option<ImageSpec>, String> {
        self.text(positional)?.map(|text| in_pool(self.place().as_deref(), text)).transpose()
    }

    /// Returns the text that names the image, if one does.
    ///
    /// # Errors
    /// When it is named twice.
    pub(super) fn text<'a>(&'a self, positional: Option<&'a str>) -> Result<Option<&'a str>, String> {
        match (positional, self.image.as_deref()) {
            (Some(one), Some(other)) => {
                Err(format!("'{one}' and '--image {other}' both name the image; leave one of them out"))
            }
            (one, other) => Ok(one.or(other)),
        }
    }

    /// Returns whether the image is named by its option.
    pub(super) fn has_image(&self) -> bool {
        self.image.is_some()
    }

    /// Returns the pool and namespace as they are typed, for [`in_pool`].
    pub(super) fn place(&self) -> Option<String> {
        place(self.pool.as_deref(), self.namespace.as_deref())
    }

    /// Returns the image that must be named.
    pub(super) fn required(&self, positional: Option<&str>) -> Result<ImageSpec, String> {
        self.image(positional)?.ok_or_else(|| match &self.pool {
            Some(pool) => format!("'--pool {pool}' names no image; add '--image NAME', or write {pool}/NAME instead"),
            None => {
                format!("no image is named; write POOL/IMAGE, for example {LOCAL_POOL}/disk1, or --pool and --image")
            }
        })
    }

    /// Returns the place, `POOL[/NAMESPACE]`, of an image that is not named.
    pub(super) fn pool(&self) -> Result<Option<String>, String> {
        one_place(None, self.pool.as_deref(), self.namespace.as_deref())
    }
}

/// Makes a type that clap reads by way of another, whose arguments mean something only together.
macro_rules! read_by_way_of {
    ($raw:ty => $made:ty) => {
        impl FromArgMatches for $made {
            fn from_arg_matches(matches: &ArgMatches) -> std::result::Result<Self, clap::Error> {
                let raw = <$raw>::from_arg_matches(matches)?;
                <$made>::try_from(raw).map_err(|text| clap::Error::raw(clap::error::ErrorKind::ValueValidation, text))
            }

            fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> std::result::Result<(), clap::Error> {
                *self = Self::from_arg_matches(matches)?;
                Ok(())
            }
        }

        impl Args for $made {
            fn augment_args(command: Command) -> Command {
                <$raw>::augment_args(command)
            }

            fn augment_args_for_update(command: Command) -> Command {
                <$raw>::augment_args_for_update(command)
            }
        }
    };
}
pub(super) use read_by_way_of;

/// A command's only image.
#[derive(Debug, Clone)]
pub struct OneImage {
    /// The image.
    pub image: ImageSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedImage {
    /// The image, POOL/IMAGE
    #[arg(value_name = "IMAGE")]
    spec: Option<String>,
    #[command(flatten)]
    options: NameArgs,
}

impl TryFrom<TypedImage> for OneImage {
    type Error = String;

    fn try_from(typed: TypedImage) -> Result<Self, String> {
        Ok(Self { image: typed.options.required(typed.spec.as_deref())? })
    }
}

read_by_way_of!(TypedImage => OneImage);

/// An image, or none.
#[derive(Debug, Clone)]
pub struct MaybeImage {
    /// The image.
    pub image: Option<ImageSpec>,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedMaybe {
    /// Show the watchers of this image, POOL/IMAGE, instead of the daemon
    #[arg(value_name = "IMAGE")]
    spec: Option<String>,
    #[command(flatten)]
    options: NameArgs,
}

impl TryFrom<TypedMaybe> for MaybeImage {
    type Error = String;

    fn try_from(TypedMaybe { spec, options }: TypedMaybe) -> Result<Self, String> {
        let image = match options.place().is_some() {
            true => Some(options.required(spec.as_deref())?),
            false => options.image(spec.as_deref())?,
        };
        Ok(Self { image })
    }
}

read_by_way_of!(TypedMaybe => MaybeImage);

/// Pool or image that `du` counts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DuTarget {
    /// All images of a pool.
    Pool(String),
    /// One image with its snapshots, or one snapshot and those before it.
    Image(SourceSpec),
    /// A bare name: a pool, or if there is none of that name, the image of the default pool.
    PoolOrImage(String),
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedDuTarget {
    /// An image, POOL/IMAGE, a snapshot, POOL/IMAGE@SNAP, or all images of a POOL; a name that no pool has is an image
    /// of the pool local [default: local]
    #[arg(value_name = "POOL[/IMAGE]")]
    spec: Option<String>,
    #[command(flatten)]
    options: SourceArgs,
}

impl TryFrom<TypedDuTarget> for DuTarget {
    type Error = String;

    fn try_from(TypedDuTarget { spec, options }: TypedDuTarget) -> Result<Self, String> {
        let names = &options.names;
        if names.has_image() || options.has_snapshot() {
            return options.required(spec.as_deref()).map(DuTarget::Image);
        }
        let Some(text) = spec.as_deref() else {
            return Ok(DuTarget::Pool(names.pool()?.unwrap_or_else(|| LOCAL_POOL.into())));
        };
        if text.ends_with('/') {
            let pool = one_place(Some(text), names.pool.as_deref(), names.namespace.as_deref())?;
            return Ok(DuTarget::Pool(pool.unwrap_or_else(|| LOCAL_POOL.into())));
        }
        if text.contains(['/', '@']) || names.place().is_some() {
            return options.required(Some(text)).map(DuTarget::Image);
        }
        let PoolSpec(name) = text.parse()?;
        Ok(DuTarget::PoolOrImage(name))
    }
}

read_by_way_of!(TypedDuTarget => DuTarget);

/// An image and its new name.
#[derive(Debug, Clone)]
pub struct RenameOperands {
    /// The image.
    pub image: ImageSpec,
    /// Its new name.
    pub to: ImageSpec,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedRenamed {
    /// The image, POOL/IMAGE
    #[arg(value_name = "IMAGE")]
    first: Option<String>,

    /// Its new name, POOL/IMAGE in the same pool
    #[arg(value_name = "TO")]
    second: Option<String>,
    #[command(flatten)]
    options: NameArgs,

    /// Its new name, instead of the positional one
    #[arg(long, value_name = "TO")]
    dest: Option<String>,

    /// The namespace of the new name, which is the same
    #[arg(long, value_name = "NAMESPACE")]
    dest_namespace: Option<String>,
}

impl TryFrom<TypedRenamed> for RenameOperands {
    type Error = String;

    fn try_from(TypedRenamed { first, second, options, dest, dest_namespace }: TypedRenamed) -> Result<Self, String> {
        // With --image, the only positional argument is the new name.
        let (image, to) = match (options.image.is_some(), second) {
            (true, None) => (None, first),
            (_, second) => (first, second),
        };
        let image = options.required(image.as_deref())?;
        let to = match (to, dest) {
            (Some(one), Some(other)) => {
                return Err(format!("'{one}' and '--dest {other}' both name the new name; leave one of them out"));
            }
            (to, dest) => to.or(dest).ok_or("the new name is missing: write it after the image, or as --dest NAME")?,
        };
        let own = place(Some(&image.pool), Some(image.namespace()).filter(|namespace| !namespace.is_empty()));
        let to = match (to.contains('/'), dest_namespace) {
            (false, None) => in_pool(own.as_deref().filter(|_| options.place().is_some()), &to)?,
            (is_full, namespace) => {
                let pool = options.pool.as_deref().filter(|_| !is_full);
                in_pool(place(pool, namespace.as_deref()).as_deref(), &to)?
            }
        };
        Ok(Self { image, to })
    }
}

read_by_way_of!(TypedRenamed => RenameOperands);

/// A file, and the image that is made of it.
#[derive(Debug, Clone)]
pub struct ImportOperands {
    /// A file or block device, or `-` for standard input.
    pub path: PathBuf,
    /// The new image; named after the file if left out.
    pub image: Option<ImageSpec>,
    /// Its pool if it is named after the file.
    pub pool: Option<String>,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedImported {
    /// A file or block device, or - for standard input
    #[arg(value_name = "PATH", value_hint = ValueHint::FilePath)]
    first: Option<PathBuf>,

    /// The image, POOL/IMAGE; for a new one [default: the file's name in the pool local]
    #[arg(value_name = "IMAGE")]
    second: Option<String>,
    #[command(flatten)]
    options: NameArgs,

    /// The file, instead of the positional one
    #[arg(long = "path", value_name = "PATH", value_hint = ValueHint::FilePath)]
    named: Option<PathBuf>,

    /// The image, instead of the positional one
    #[arg(long, value_name = "IMAGE", conflicts_with = "image")]
    dest: Option<String>,

    /// The image's pool, as --pool
    #[arg(long, value_name = "POOL", value_parser = pool_text, conflicts_with = "pool")]
    dest_pool: Option<String>,

    /// The image's namespace, as --namespace
    #[arg(long, value_name = "NAMESPACE", conflicts_with = "namespace")]
    dest_namespace: Option<String>,
}

impl TryFrom<TypedImported> for ImportOperands {
    type Error = String;

    fn try_from(typed: TypedImported) -> Result<Self, String> {
        let TypedImported { first, second, options, named, dest, dest_pool, dest_namespace } = typed;
        let options = NameArgs {
            pool: options.pool.or(dest_pool),
            namespace: options.namespace.or(dest_namespace),
            image: options.image.or(dest),
        };
        let (path, image) = match (named, first, second) {
            (Some(named), Some(first), Some(_)) => {
                let (first, named) = (first.display(), named.display());
                return Err(format!("'{first}' and '--path {named}' both name the file; leave one of them out"));
            }
            // With --path, the only positional argument is the image.
            (Some(named), first, None) => (named, first.map(text).transpose()?),
            (None, Some(first), second) => (first, second),
            (named, ..) => (named.ok_or("no file is named; write its path, or - for standard input")?, None),
        };
        Ok(Self { path, image: options.image(image.as_deref())?, pool: options.pool()? })
    }
}

/// Returns a positional argument that names an image.
fn text(name: impl Into<OsString>) -> Result<String, String> {
    name.into().into_string().map_err(|name| format!("the image's name '{}' is not UTF-8", name.display()))
}

read_by_way_of!(TypedImported => ImportOperands);

/// An image or a snapshot, and the file that it is written to.
#[derive(Debug, Clone)]
pub struct ExportOperands {
    /// The image or snapshot.
    pub source: SourceSpec,
    /// A new file, a block device, or `-` for standard output; named after the source if left out.
    pub path: Option<PathBuf>,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedExported {
    /// The image, POOL/IMAGE, or a snapshot of it, POOL/IMAGE@SNAP
    #[arg(value_name = "IMAGE[@SNAP]")]
    first: Option<OsString>,

    /// A new file, a block device, or - for standard output [default: the name of the image and snapshot]
    #[arg(value_name = "PATH", value_hint = ValueHint::FilePath)]
    second: Option<PathBuf>,
    #[command(flatten)]
    options: SourceArgs,

    /// The file, instead of the positional one
    #[arg(long = "path", value_name = "PATH", value_hint = ValueHint::FilePath)]
    named: Option<PathBuf>,
}

impl TryFrom<TypedExported> for ExportOperands {
    type Error = String;

    fn try_from(TypedExported { first, second, options, named }: TypedExported) -> Result<Self, String> {
        // With --image, the only positional argument is the file.
        let (image, path) = match options.names.has_image() && second.is_none() {
            true => (None, first.map(PathBuf::from)),
            false => (first.map(text).transpose()?, second),
        };
        let path = match (path, named) {
            (Some(path), Some(named)) => {
                let (path, named) = (path.display(), named.display());
                return Err(format!("'{path}' and '--path {named}' both name the file; leave one of them out"));
            }
            (path, named) => path.or(named),
        };
        Ok(Self { source: options.required(image.as_deref())?, path })
    }
}

read_by_way_of!(TypedExported => ExportOperands);

#[cfg(test)]
pub(super) mod tests {
    use clap::Parser;

    use super::*;

    /// Reads arguments as a command does; what is wrong with them otherwise.
    pub fn read<T: Args>(arguments: &[&str]) -> Result<T, String> {
        #[derive(Parser)]
        struct Program<T: Args> {
            #[command(flatten)]
            arguments: T,
        }
        let read = Program::<T>::try_parse_from([&["x"], arguments].concat());
        read.map(|program| program.arguments).map_err(|error| {
            assert_eq!(error.exit_code(), 2);
            error.to_string()
        })
    }

    #[test]
    fn one_image_in_every_way() {
        for (arguments, want) in [
            (&["a"][..], "local/a"),
            (&["rbd/a"], "rbd/a"),
            (&["-p", "rbd", "a"], "rbd/a"),
            (&["--pool", "rbd", "rbd/a"], "rbd/a"),
            (&["--image", "a"], "local/a"),
            (&["--image", "rbd/a"], "rbd/a"),
            (&["-p", "rbd", "--image", "a"], "rbd/a"),
            (&["-p", "rados:rbd", "--image", "a"], "rbd/a"),
            (&["-p", "rados:local", "--image", "a"], "rados:local/a"),
            (&["rbd/ns/a"], "rbd/ns/a"),
            (&["-p", "rbd", "--namespace", "ns", "a"], "rbd/ns/a"),
            (&["--namespace", "ns", "--image", "a"], "local/ns/a"),
            (&["--namespace", "ns", "rbd/a"], "rbd/ns/a"),
            (&["-p", "rbd", "--namespace", "ns", "rbd/ns/a"], "rbd/ns/a"),
            (&["-p", "rbd", "rbd/ns/a"], "rbd/ns/a"),
        ] {
            let read: OneImage = read(arguments).unwrap_or_else(|error| panic!("{arguments:?}: {error}"));
            assert_eq!(read.image.to_string(), want, "{arguments:?}");
        }
        for (arguments, says) in [
            (&[][..], "no image is named"),
            (&["-p", "rbd"], "names no image"),
            (&["a", "--image", "b"], "both name the image"),
            (&["a", "--image", "a"], "both name the image"),
            (&["-p", "other", "rbd/a"], "different pools"),
            (&["-p", "a/b/c", "x"], "not an image spec"),
            (&["-p", "", "x"], "empty"),
            (&["-p", "", "--namespace", "n", "x"], "empty"),
            (&["--namespace", "x", "rbd/ns/a"], "different namespaces"),
            (&["--namespace", "a/b", "x"], "not an image spec"),
            (&["-p", "other", "--namespace", "ns", "rbd/a"], "different pools"),
            (&["-p", "rbd", "--image", "a@s"], "snapshot"),
        ] {
            let said = read::<OneImage>(arguments).expect_err("wrong");
            assert!(said.contains(says), "{arguments:?}: {said}");
        }
    }

    #[test]
    fn status_of_the_daemon_or_of_an_image() {
        let image = |arguments| read::<MaybeImage>(arguments).map(|read| read.image.map(|image| image.to_string()));
        assert_eq!(image(&[]), Ok(None));
        assert_eq!(image(&["a"]), Ok(Some("local/a".into())));
        assert_eq!(image(&["-p", "rbd", "--image", "a"]), Ok(Some("rbd/a".into())));
        assert!(image(&["-p", "rbd"]).is_err());
    }

    #[test]
    fn what_du_is_asked_about() {
        let source = |text: &str, snap| SourceSpec::new(text.parse().expect("a spec"), snap).expect("a spec");
        let image = |text| DuTarget::Image(source(text, None));
        for (arguments, want) in [
            (&[][..], DuTarget::Pool("local".into())),
            (&["ram/"], DuTarget::Pool("ram".into())),
            (&["-p", "ram"], DuTarget::Pool("ram".into())),
            (&["ram/x"], image("ram/x")),
            (&["x"], DuTarget::PoolOrImage("x".into())),
            (&["-p", "ram", "x"], image("ram/x")),
            (&["--image", "x"], image("local/x")),
            (&["-p", "ram", "--image", "x"], image("ram/x")),
            (&["x@y"], DuTarget::Image(source("local/x", Some("y")))),
            (&["ram/ns/"], DuTarget::Pool("ram/ns".into())),
            (&["-p", "ram", "--namespace", "ns"], DuTarget::Pool("ram/ns".into())),
            (&["-p", "ram", "--namespace", "ns", "x"], image("ram/ns/x")),
            (&["-p", "ram", "x", "--snap", "y"], DuTarget::Image(source("ram/x", Some("y")))),
        ] {
            assert_eq!(read::<DuTarget>(arguments).as_ref(), Ok(&want), "{arguments:?}");
        }
        for arguments in [&["/"][..], &["x", "--image", "y"], &["-p", "a", "b/"], &["-p", "a", "b/c"], &["--snap", "y"]]
        {
            assert!(read::<DuTarget>(arguments).is_err(), "{arguments:?}");
        }
    }

    #[test]
    fn two_things_of_which_one_is_an_image() {
        let renamed =
            |arguments| read::<RenameOperands>(arguments).map(|read| (read.image.to_string(), read.to.to_string()));
        let want = Ok(("rbd/a".to_owned(), "rbd/b".to_owned()));
        for arguments in [
            &["rbd/a", "rbd/b"][..],
            &["-p", "rbd", "a", "b"],
            &["-p", "rbd", "--image", "a", "b"],
            &["-p", "rbd", "--image", "a", "--dest", "b"],
            &["rbd/a", "--dest", "rbd/b"],
        ] {
            assert_eq!(renamed(arguments), want, "{arguments:?}");
        }
        let want = Ok(("rbd/n/a".to_owned(), "rbd/n/b".to_owned()));
        for arguments in [
            &["rbd/n/a", "rbd/n/b"][..],
            &["-p", "rbd", "--namespace", "n", "a", "b"],
            &["rbd/n/a", "rbd/b", "--dest-namespace", "n"],
        ] {
            assert_eq!(renamed(arguments), want, "{arguments:?}");
        }
        for arguments in [&["a"][..], &["--image", "a"], &["a", "b", "--image", "c"], &["a", "b", "--dest", "c"]] {
            assert!(renamed(arguments).is_err(), "{arguments:?}");
        }

        let exported = |arguments| read::<ExportOperands>(arguments).map(|read| (read.source.to_string(), read.path));
        let want = Ok(("rbd/a".to_owned(), Some(PathBuf::from("file"))));
        for arguments in [&["rbd/a", "file"][..], &["-p", "rbd", "a", "file"], &["-p", "rbd", "--image", "a", "file"]] {
            assert_eq!(exported(arguments), want, "{arguments:?}");
        }
        assert_eq!(exported(&["--image", "a"]), Ok(("local/a".to_owned(), None)));
        assert_eq!(exported(&["rbd/a", "--path", "file"]), want);
        assert_eq!(exported(&["-p", "rbd", "--image", "a", "--path", "file"]), want);
        assert!(exported(&["a", "file", "--path", "other"]).is_err());
        assert_eq!(exported(&["a@s", "file"]), Ok(("local/a@s".to_owned(), Some("file".into()))));
        assert!(exported(&["a", "file", "--image", "b"]).is_err());

        let imported =
            |arguments| read::<ImportOperands>(arguments).map(|read| (read.image.map(|i| i.to_string()), read.pool));
        assert_eq!(imported(&["file"]), Ok((None, None)));
        assert_eq!(imported(&["file", "-p", "rbd"]), Ok((None, Some("rbd".into()))));
        assert_eq!(imported(&["file", "-p", "rbd", "a"]), Ok((Some("rbd/a".into()), Some("rbd".into()))));
        assert_eq!(imported(&["file", "--image", "a"]), Ok((Some("local/a".into()), None)));
        assert_eq!(
            imported(&["file", "--dest-pool", "rbd", "--dest", "a"]),
            Ok((Some("rbd/a".into()), Some("rbd".into())))
        );
        assert_eq!(imported(&["--path", "file", "rbd/a"]), Ok((Some("rbd/a".into()), None)));
        assert_eq!(imported(&["--path", "file"]), Ok((None, None)));
        assert!(imported(&["file", "a", "--image", "b"]).is_err());
        assert!(imported(&["file", "a", "--path", "b"]).is_err());
        assert!(imported(&[]).is_err());
    }
}
