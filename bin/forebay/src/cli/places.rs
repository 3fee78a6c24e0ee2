//! Arguments that say where an image or a group is: `POOL[/NAMESPACE]`, or as `rbd` also takes it, `--pool POOL
//! --namespace NAMESPACE`.

use std::str::FromStr;

use clap::{ArgMatches, Args, Command, FromArgMatches};

use super::names::read_by_way_of;
use crate::spec::{ImageSpec, LOCAL_POOL, PlaceSpec, PoolSpec, place_text, split_pool};

/// Reads the value of `--pool`, which is not empty: what a script left out must not select the default pool.
pub(super) fn pool_text(text: &str) -> Result<String, String> {
    match text {
        "" => Err("the pool's name is empty".into()),
        _ => Ok(text.into()),
    }
}

/// Joins the values of `--pool` and `--namespace` for [`in_pool`]: `[POOL][/NAMESPACE]`.
pub(super) fn place(pool: Option<&str>, namespace: Option<&str>) -> Option<String> {
    match (pool, namespace) {
        (None, None) => None,
        (pool, None) => pool.map(Into::into),
        (pool, Some(namespace)) => Some(format!("{}/{namespace}", pool.unwrap_or_default())),
    }
}

/// Reads an image spec; what it leaves out is said by `place`, or else the default pool is meant.
///
/// # Errors
/// When it names another pool or namespace than `place`.
pub(super) fn in_pool(place: Option<&str>, text: &str) -> Result<ImageSpec, String> {
    spec_in_pool(place, text, |spec: &ImageSpec| spec.place())
}

/// Reads any spec of the form `POOL/NAME` or `POOL/NAMESPACE/NAME`, of which `place_of` returns all but the name, as
/// [`in_pool`] does.
///
/// # Errors
/// As there.
pub(super) fn spec_in_pool<T: FromStr<Err = String>>(
    place: Option<&str>,
    text: &str,
    place_of: impl Fn(&T) -> String,
) -> Result<T, String> {
    let Some(place) = place else { return text.parse() };
    let (pool, namespace) = split_pool(place);
    let pool = match (pool, place.contains('/')) {
        ("", true) => None,
        _ => Some(pool.parse::<PoolSpec>()?.0),
    };
    let full = match text.split('/').collect::<Vec<_>>()[..] {
        [name] => format!("{}/{name}", place_text(pool.as_deref().unwrap_or(LOCAL_POOL), namespace)),
        [typed, name] => format!("{}/{name}", place_text(typed, namespace)),
        _ => text.to_owned(),
    };
    let spec: T = full.parse()?;
    let found = place_of(&spec);
    let (found_pool, found_namespace) = split_pool(&found);
    if let Some(pool) = pool.filter(|pool| pool != found_pool) {
        return Err(format!("'{text}' and '--pool {pool}' name different pools; leave one of them out"));
    }
    if !namespace.is_empty() && namespace != found_namespace {
        return Err(format!("'{text}' and '--namespace {namespace}' name different namespaces; leave one of them out"));
    }
    Ok(spec)
}

/// Returns the place, `POOL[/NAMESPACE]`, that a positional argument, `--pool` and `--namespace` name, which must agree.
pub(super) fn one_place(
    positional: Option<&str>,
    pool: Option<&str>,
    namespace: Option<&str>,
) -> Result<Option<String>, String> {
    let pool = pool.map(str::parse::<PoolSpec>).transpose()?.map(|PoolSpec(pool)| pool);
    let Some(positional) = positional else {
        return place(pool.as_deref(), namespace)
            .map(|place| match place.strip_prefix('/') {
                Some(namespace) => format!("{LOCAL_POOL}/{namespace}"),
                None => place,
            })
            .map(|place| place.parse().map(|PlaceSpec(place)| place))
            .transpose();
    };
    let PlaceSpec(found) = positional.parse()?;
    let (found_pool, found_namespace) = split_pool(&found);
    if let Some(pool) = pool.filter(|pool| pool != found_pool) {
        return Err(format!("'{positional}' and '--pool {pool}' name different pools; leave one of them out"));
    }
    match namespace {
        None => Ok(Some(found)),
        Some(namespace) if found_namespace.is_empty() => {
            Ok(Some(place_text(found_pool, namespace).parse::<PlaceSpec>()?.0))
        }
        Some(namespace) if namespace == found_namespace => Ok(Some(found)),
        Some(namespace) => Err(format!(
            "'{positional}' and '--namespace {namespace}' name different namespaces; leave one of them out"
        )),
    }
}

/// A pool, or a namespace of it.
#[derive(Debug, Clone)]
pub struct OnePool {
    /// Place, `POOL[/NAMESPACE]`.
    pub pool: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedPool {
    /// The pool, or a namespace of it, POOL/NAMESPACE [default: local]
    #[arg(value_name = "POOL")]
    name: Option<String>,

    /// The pool, instead of the positional one, as rbd takes it
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,

    /// The namespace, where the positional argument does not say it
    #[arg(long, value_name = "NAMESPACE")]
    namespace: Option<String>,
}

impl TryFrom<TypedPool> for OnePool {
    type Error = String;

    fn try_from(typed: TypedPool) -> Result<Self, String> {
        let place = one_place(typed.name.as_deref(), typed.pool.as_deref(), typed.namespace.as_deref())?;
        Ok(Self { pool: place.unwrap_or_else(|| LOCAL_POOL.into()) })
    }
}

read_by_way_of!(TypedPool => OnePool);

/// A pool as a whole.
#[derive(Debug, Clone)]
pub struct PoolOnly {
    /// Its name.
    pub pool: String,
}

/// Arguments before validation.
#[derive(Debug, Args)]
struct TypedPoolOnly {
    /// The pool [default: local]
    #[arg(value_name = "POOL")]
    name: Option<String>,

    /// The pool, instead of the positional one, as rbd takes it
    #[arg(short, long, value_name = "POOL", value_parser = pool_text)]
    pool: Option<String>,
}

impl TryFrom<TypedPoolOnly> for PoolOnly {
    type Error = String;

    fn try_from(TypedPoolOnly { name, pool }: TypedPoolOnly) -> Result<Self, String> {
        let place = one_place(name.as_deref(), pool.as_deref(), None)?;
        let PoolSpec(pool) = place.as_deref().unwrap_or(LOCAL_POOL).parse()?;
        Ok(Self { pool })
    }
}

read_by_way_of!(TypedPoolOnly => PoolOnly);

#[cfg(test)]
mod tests {
    use super::super::names::tests::read;
    use super::*;

    #[test]
    fn a_pool_in_every_way() {
        let pool = |arguments| read::<OnePool>(arguments).map(|read| read.pool);
        for (arguments, want) in [
            (&[][..], "local"),
            (&["rbd"], "rbd"),
            (&["rbd/"], "rbd"),
            (&["-p", "rbd"], "rbd"),
            (&["-p", "x", "x"], "x"),
            (&["rbd/ns"], "rbd/ns"),
            (&["rbd/ns/"], "rbd/ns"),
            (&["-p", "rbd", "--namespace", "ns"], "rbd/ns"),
            (&["--namespace", "ns"], "local/ns"),
            (&["rbd", "--namespace", "ns"], "rbd/ns"),
            (&["-p", "rbd", "rbd/ns"], "rbd/ns"),
        ] {
            assert_eq!(pool(arguments).as_deref(), Ok(want), "{arguments:?}");
        }
        assert!(pool(&["-p", "x", "y"]).expect_err("two").contains("different pools"));
        assert!(pool(&["x/n", "--namespace", "m"]).expect_err("two").contains("different namespaces"));
        assert!(pool(&["x/n/m"]).is_err());
    }
}
