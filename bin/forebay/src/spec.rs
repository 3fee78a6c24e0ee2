//! Image specs as `rbd` writes them: `[pool/[namespace/]]image[@snap]`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::failure::Failure;

/// The pool that is meant when none is named: the embedded store.
pub const LOCAL_POOL: &str = "local";

/// The pool in memory, lost when the daemon stops.
pub const RAM_POOL: &str = "ram";

/// Says that a pool is the Ceph cluster's, where its name alone would be taken for one of ours.
pub const RADOS_PREFIX: &str = "rados:";

/// Longest pool or image name in bytes.
const NAME_LEN_MAX: usize = forebay_image::NAME_LEN_MAX;

/// An image in a pool, or in a namespace of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
pub struct ImageSpec {
    /// The pool's name.
    pub pool: String,
    /// The image's name, in a namespace `NAMESPACE/NAME`.
    pub image: String,
}

impl ImageSpec {
    /// Creates a spec and validates the names. The namespace may stand with the pool (`POOL/NAMESPACE`) or with the image
    /// (`NAMESPACE/NAME`).
    pub fn new(pool: &str, image: &str) -> Result<Self, String> {
        let (pool, namespace) = split_pool(pool);
        let (own, name) = image.rsplit_once('/').unwrap_or(("", image));
        check_name("image", name)?;
        let image = match (namespace, own) {
            ("", "") if image.contains('/') => return Err(format!("the namespace of the image '{image}' is empty")),
            ("", "") => name.to_owned(),
            ("", namespace) | (namespace, "") => {
                check_name("namespace", namespace)?;
                format!("{namespace}/{name}")
            }
            _ => return Err(format!("'{pool}/{namespace}/{image}' names two namespaces; write POOL/NAMESPACE/IMAGE")),
        };
        Ok(Self { pool: pool_name(pool)?, image })
    }

    /// Creates the spec of an image that a pool or namespace, `place`, lists: a `/` in its name is not that of a namespace.
    pub fn listed(place: &str, name: &str) -> Result<Self, String> {
        check_name("image", name)?;
        Self::new(place, name)
    }

    /// Returns the image's name without its namespace.
    pub fn name(&self) -> &str {
        self.image.rsplit_once('/').map_or(&self.image, |(_, name)| name)
    }

    /// Returns the image's namespace, empty for the default one.
    pub fn namespace(&self) -> &str {
        self.image.rsplit_once('/').map_or("", |(namespace, _)| namespace)
    }

    /// Returns where the image is: `POOL` or `POOL/NAMESPACE`.
    pub fn place(&self) -> String {
        place_text(&self.pool, self.namespace())
    }

    /// Refuses what no new image may be called, although others may have made such an image: what people cannot see, or
    /// see somewhere else than it is.
    pub fn check_new(&self) -> Result<(), Failure> {
        check_visible("image", self.name())
    }
}

/// Splits `POOL[/NAMESPACE]`; the namespace is empty for the default one.
pub fn split_pool(place: &str) -> (&str, &str) {
    place.split_once('/').unwrap_or((place, ""))
}

/// Joins a pool and a namespace, which is empty for the default one.
pub fn place_text(pool: &str, namespace: &str) -> String {
    match namespace {
        "" => pool.into(),
        _ => format!("{pool}/{namespace}"),
    }
}

/// Validates `POOL[/NAMESPACE]`; returns it with the pool's one name.
fn place_name(place: &str) -> Result<String, String> {
    let (pool, namespace) = split_pool(place);
    if place.contains('/') {
        check_name("namespace", namespace)?;
    }
    Ok(place_text(&pool_name(pool)?, namespace))
}

/// Refuses a name with characters that people cannot see, or see somewhere else than they are.
fn check_visible(what: &str, name: &str) -> Result<(), Failure> {
    match name.chars().find(|&c| is_invisible(c)) {
        Some(bad) => {
            let (name, bad) = (visible(name), escaped(bad));
            Err(Failure::invalid(format!("the {what}'s name '{name}' contains {bad}, which is invisible")))
        }
        None => Ok(()),
    }
}

/// Escapes characters that are invisible or change the direction of text.
pub fn visible(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match is_invisible(c) || c.is_control() {
            true => out.push_str(&escaped(c)),
            false => out.push(c),
        }
    }
    out
}

fn escaped(c: char) -> String {
    format!("\\u{{{:x}}}", u32::from(c))
}

/// Returns whether a character has no shape of its own or changes the direction of those around it (Unicode's format
/// characters, fillers and variation selectors).
fn is_invisible(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
        | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{2800}' | '\u{3164}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e0fff}')
}

impl fmt::Display for ImageSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.image)
    }
}

impl FromStr for ImageSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, snap)) = text.split_once('@') {
            return Err(format!(
                "'{text}' names the snapshot '{snap}', and an image is wanted here; name the image alone"
            ));
        }
        match text.split('/').collect::<Vec<_>>()[..] {
            [image] => Self::new(LOCAL_POOL, image),
            [pool, image] => Self::new(pool, image),
            [pool, "", _] => Err(format!("'{text}' has an empty namespace; write {pool}/IMAGE")),
            [pool, namespace, image] => Self::new(&format!("{pool}/{namespace}"), image),
            _ => Err(format!("'{text}' is not an image spec; write POOL/IMAGE, for example {LOCAL_POOL}/disk1")),
        }
    }
}

/// A snapshot of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SnapshotSpec {
    /// The image.
    #[serde(flatten)]
    pub image: ImageSpec,
    /// The snapshot's name.
    pub snapshot: String,
}

impl SnapshotSpec {
    /// Creates a spec from an image and the name of a snapshot, and validates the name.
    pub fn new(image: ImageSpec, snapshot: &str) -> Result<Self, String> {
        check_snapshot(snapshot)?;
        Ok(Self { image, snapshot: snapshot.into() })
    }

    /// Refuses what no new snapshot may be called, although others may have made such a snapshot.
    pub fn check_new(&self) -> Result<(), Failure> {
        check_new_snapshot(&self.snapshot)
    }
}

/// Refuses what no new snapshot may be called.
fn check_new_snapshot(name: &str) -> Result<(), Failure> {
    check_visible("snapshot", name)?;
    if name.len() > NAME_LEN_MAX {
        let what = format!("the snapshot's name has {} bytes; {NAME_LEN_MAX} is the most", name.len());
        return Err(Failure::invalid(what));
    }
    // Clients of the control API would take such a path segment for a directory.
    if name == "." || name == ".." {
        return Err(Failure::invalid(format!("'{name}' cannot be the snapshot's name")));
    }
    Ok(())
}

impl fmt::Display for SnapshotSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.image, self.snapshot)
    }
}

/// A group of images.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupSpec {
    /// The pool's name, in a namespace `POOL/NAMESPACE`.
    pub pool: String,
    /// The group's name.
    pub group: String,
}

impl GroupSpec {
    /// Creates a spec from the names of a pool and a group, and validates both.
    pub fn new(pool: &str, group: &str) -> Result<Self, String> {
        check_name("group", group)?;
        Ok(Self { pool: place_name(pool)?, group: group.into() })
    }

    /// Refuses what no new group may be called, although others may have made such a group.
    pub fn check_new(&self) -> Result<(), Failure> {
        check_visible("group", &self.group)
    }
}

impl fmt::Display for GroupSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.group)
    }
}

impl FromStr for GroupSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some((_, snap)) = text.split_once('@') {
            return Err(format!(
                "'{text}' names the snapshot '{snap}', and a group is wanted here; name the group alone"
            ));
        }
        match text.split('/').collect::<Vec<_>>()[..] {
            [group] => Self::new(LOCAL_POOL, group),
            [pool, group] => Self::new(pool, group),
            [pool, namespace, group] => Self::new(&format!("{pool}/{namespace}"), group),
            _ => Err(format!("'{text}' is not a group spec; write POOL/GROUP, for example {LOCAL_POOL}/database")),
        }
    }
}

/// A snapshot of a group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct GroupSnapshotSpec {
    /// The group.
    #[serde(flatten)]
    pub group: GroupSpec,
    /// The snapshot's name.
    pub snapshot: String,
}

impl GroupSnapshotSpec {
    /// Creates a spec from a group and the name of a snapshot, and validates the name.
    pub fn new(group: GroupSpec, snapshot: &str) -> Result<Self, String> {
        check_snapshot(snapshot)?;
        Ok(Self { group, snapshot: snapshot.into() })
    }

    /// Refuses what no new snapshot may be called, although others may have made such a snapshot.
    pub fn check_new(&self) -> Result<(), Failure> {
        check_new_snapshot(&self.snapshot)
    }
}

impl fmt::Display for GroupSnapshotSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.group, self.snapshot)
    }
}

/// An image in the trash of a pool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TrashSpec {
    /// The pool's name, in a namespace `POOL/NAMESPACE`.
    pub pool: String,
    /// The image's id.
    pub id: String,
}

impl TrashSpec {
    /// Reads `[POOL/[NAMESPACE/]]ID`; an id without a pool is in `pool`, or else in the default one.
    ///
    /// # Errors
    /// When it names another pool than `pool`, or what can be no id.
    pub fn parse(pool: Option<&str>, text: &str) -> Result<Self, String> {
        let (named, id) = match text.rsplit_once('/') {
            Some((named, id)) => (Some(place_name(named)).transpose(), id),
            None => (Ok(None), text),
        };
        let wrong = || format!("'{text}' is not the id of an image; write [POOL/]ID, as 'forebay trash ls' shows it");
        if id.is_empty() || !id.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(wrong());
        }
        let pool = match (named.map_err(|_| wrong())?, pool.map(place_name).transpose()?) {
            (Some(one), Some(other)) if one != other => {
                return Err(format!("'{text}' and '--pool {other}' name different pools; leave one of them out"));
            }
            (one, other) => one.or(other).unwrap_or_else(|| LOCAL_POOL.into()),
        };
        Ok(Self { pool, id: id.into() })
    }
}

impl fmt::Display for TrashSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.id)
    }
}

/// An image, or a snapshot of it, to be read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSpec {
    /// The image.
    pub image: ImageSpec,
    /// The snapshot's name; `None` for the image as it is now.
    pub snapshot: Option<String>,
}

impl SourceSpec {
    /// Creates a spec from an image and perhaps the name of a snapshot, and validates the name.
    pub fn new(image: ImageSpec, snapshot: Option<&str>) -> Result<Self, String> {
        snapshot.map_or(Ok(()), check_snapshot)?;
        Ok(Self { image, snapshot: snapshot.map(Into::into) })
    }

    /// Returns the snapshot that is meant, if one is.
    pub fn snapshot(&self) -> Option<SnapshotSpec> {
        let snapshot = self.snapshot.clone()?;
        Some(SnapshotSpec { image: self.image.clone(), snapshot })
    }
}

impl From<ImageSpec> for SourceSpec {
    fn from(image: ImageSpec) -> Self {
        Self { image, snapshot: None }
    }
}

impl fmt::Display for SourceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.snapshot {
            Some(snapshot) => write!(f, "{}@{snapshot}", self.image),
            None => self.image.fmt(f),
        }
    }
}

/// Validates a snapshot's name. Other clients make names with spaces, which must be readable and removable.
fn check_snapshot(name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err("the snapshot's name is empty; write POOL/IMAGE@SNAP".into());
    }
    match name.chars().find(|&c| c.is_control() || c == '/' || c == '@') {
        Some(bad) => Err(format!("the snapshot's name '{}' contains {bad:?}, which no name may", name.escape_debug())),
        None => Ok(()),
    }
}

/// A pool, or an image in it: `POOL/IMAGE`, `POOL/`, or a bare name, which is a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolSpec(pub String);

impl FromStr for PoolSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(pool_name(text.strip_suffix('/').unwrap_or(text))?))
    }
}

/// A pool or a namespace of it: `POOL[/NAMESPACE][/]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceSpec(pub String);

impl FromStr for PlaceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(Self(place_name(text.strip_suffix('/').unwrap_or(text))?))
    }
}

/// A namespace of a pool, `POOL/NAMESPACE`; one without a pool is in the default one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NamespaceSpec {
    /// The pool's name.
    pub pool: String,
    /// The namespace's name.
    pub namespace: String,
}

impl NamespaceSpec {
    /// Creates a spec from the names of a pool and a namespace, and validates both.
    pub fn new(pool: &str, namespace: &str) -> Result<Self, String> {
        check_name("namespace", namespace)?;
        Ok(Self { pool: pool_name(pool)?, namespace: namespace.into() })
    }

    /// Refuses what no new namespace may be called, although others may have made such a namespace.
    pub fn check_new(&self) -> Result<(), Failure> {
        check_visible("namespace", &self.namespace)
    }
}

impl fmt::Display for NamespaceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.pool, self.namespace)
    }
}

impl FromStr for NamespaceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split('/').collect::<Vec<_>>()[..] {
            [namespace] => Self::new(LOCAL_POOL, namespace),
            [pool, namespace] => Self::new(pool, namespace),
            _ => Err(format!("'{text}' is not a namespace; write POOL/NAMESPACE, for example {LOCAL_POOL}/tenant1")),
        }
    }
}

/// A pool's name, one for each pool: `rados:rbd` and `rbd` are the same, `rados:local` and `local` are not.
fn pool_name(name: &str) -> Result<String, String> {
    let bare = name.strip_prefix(RADOS_PREFIX).unwrap_or(name);
    check_name("pool", bare)?;
    let ours = bare == LOCAL_POOL || bare == RAM_POOL;
    Ok(if ours { name.into() } else { bare.into() })
}

/// Validates a name: it must survive a path, a URI, an NBD export name and a shell without surprises.
fn check_name(what: &str, name: &str) -> Result<(), String> {
    if name.is_empty() {
        return Err(format!("the {what}'s name is empty; write POOL/IMAGE, for example {LOCAL_POOL}/disk1"));
    }
    if name.len() > NAME_LEN_MAX {
        return Err(format!("the {what}'s name has {} bytes; {NAME_LEN_MAX} is the most", name.len()));
    }
    if let Some(bad) = name.chars().find(|&c| c.is_control() || c.is_whitespace() || c == '/' || c == '@') {
        return Err(format!("the {what}'s name '{}' contains {bad:?}, which no name may", name.escape_debug()));
    }
    if name.starts_with('-') || name == "." || name == ".." {
        return Err(format!("'{name}' cannot be the {what}'s name: it would be taken for an option or a directory"));
    }
    Ok(())
}

impl From<ImageSpec> for String {
    fn from(spec: ImageSpec) -> Self {
        spec.to_string()
    }
}

/// Turns a spec's complaint into a failure, for specs that come over the control socket.
pub fn image_spec(pool: &str, image: &str) -> Result<ImageSpec, Failure> {
    ImageSpec::new(pool, image).map_err(Failure::invalid)
}

/// Creates the spec of a namespace from names that come over the control socket.
pub fn namespace_spec(pool: &str, namespace: &str) -> Result<NamespaceSpec, Failure> {
    NamespaceSpec::new(pool, namespace).map_err(Failure::invalid)
}

/// Creates the spec of a snapshot from names that come over the control socket.
pub fn snapshot_spec(pool: &str, image: &str, snapshot: &str) -> Result<SnapshotSpec, Failure> {
    SnapshotSpec::new(image_spec(pool, image)?, snapshot).map_err(Failure::invalid)
}

/// Creates the spec of an image or snapshot from names that come over the control socket.
pub fn source_spec(pool: &str, image: &str, snapshot: Option<&str>) -> Result<SourceSpec, Failure> {
    SourceSpec::new(image_spec(pool, image)?, snapshot).map_err(Failure::invalid)
}

/// Creates the spec of a group from names that come over the control socket.
pub fn group_spec(pool: &str, group: &str) -> Result<GroupSpec, Failure> {
    GroupSpec::new(pool, group).map_err(Failure::invalid)
}

/// Creates the spec of a snapshot of a group from names that come over the control socket.
pub fn group_snapshot_spec(pool: &str, group: &str, snapshot: &str) -> Result<GroupSnapshotSpec, Failure> {
    GroupSnapshotSpec::new(group_spec(pool, group)?, snapshot).map_err(Failure::invalid)
}

/// Reads the spec of an image in the trash from the parts of a request.
pub fn trash_spec(pool: &str, id: &str) -> Result<TrashSpec, Failure> {
    TrashSpec::parse(Some(pool), id).map_err(Failure::invalid)
}

/// Percent-encodes what a URI's path segment or query value may not carry as it is.
pub fn uri_encode(text: &str, keep_slash: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => out.push(byte as char),
            b'/' if keep_slash => out.push('/'),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn specs() {
        let spec: ImageSpec = "disk1".parse().expect("a bare image");
        assert_eq!(spec.to_string(), "local/disk1");
        let spec: ImageSpec = "ram/disk1".parse().expect("pool and image");
        assert_eq!((spec.pool.as_str(), spec.image.as_str()), ("ram", "disk1"));
        let spec: ImageSpec = "rbd/ns/x".parse().expect("a namespace");
        assert_eq!((spec.pool.as_str(), spec.namespace(), spec.name()), ("rbd", "ns", "x"));
        assert_eq!((spec.to_string(), spec.place()), ("rbd/ns/x".into(), "rbd/ns".into()));
        assert_eq!(ImageSpec::new("rbd/ns", "x"), Ok(spec.clone()));
        assert_eq!(ImageSpec::new("rados:rbd", "ns/x"), Ok(spec));
        assert_eq!("rados:local/ns/x".parse::<ImageSpec>().expect("a spec").place(), "rados:local/ns");
        for (text, pool) in [("rados:rbd/x", "rbd"), ("rbd/x", "rbd"), ("rados:local/x", "rados:local")] {
            assert_eq!(text.parse::<ImageSpec>().expect("a spec").pool, pool);
        }
    }

    #[test]
    fn specs_that_are_none() {
        for (text, says) in [
            ("", "empty"),
            ("local/", "empty"),
            ("rados:/x", "empty"),
            ("/x", "empty"),
            ("a//c", "namespace"),
            ("a/b/", "empty"),
            ("a/-b/c", "namespace"),
            ("a/b/c/d", "not an image spec"),
            ("local/x@snap", "snapshot"),
            ("local/a b", "' '"),
            ("local/-x", "option"),
            ("local/..", "directory"),
            ("local/\u{7}", "contains"),
        ] {
            let error = text.parse::<ImageSpec>().expect_err(text);
            assert!(error.contains(says), "{text}: {error}");
        }
        assert!(format!("local/{}", "x".repeat(NAME_LEN_MAX + 1)).parse::<ImageSpec>().is_err());
        assert!(ImageSpec::listed("a", "b/c").is_err(), "it is not in the namespace b");
        assert_eq!(ImageSpec::listed("a/b", "c"), ImageSpec::new("a", "b/c"));
        for (pool, image) in [("a/b", "c/d"), ("a", "/c"), ("a/", "c/d/e"), ("a/b/c", "d")] {
            assert!(ImageSpec::new(pool, image).is_err(), "{pool} {image}");
        }
    }

    #[test]
    fn specs_of_snapshots() {
        let image: ImageSpec = "rbd/x".parse().expect("a spec");
        let spec = SnapshotSpec::new(image.clone(), "monday noon").expect("a spec");
        assert_eq!(spec.to_string(), "rbd/x@monday noon");
        spec.check_new().expect("a name");
        assert_eq!(SourceSpec::new(image.clone(), Some("s")).expect("a spec").to_string(), "rbd/x@s");
        assert_eq!(SourceSpec::from(image.clone()).to_string(), "rbd/x");
        for name in ["", "a/b", "a@b", "\u{7}"] {
            assert!(SnapshotSpec::new(image.clone(), name).is_err(), "{name:?}");
            assert!(SourceSpec::new(image.clone(), Some(name)).is_err(), "{name:?}");
        }
        let long = "x".repeat(NAME_LEN_MAX + 1);
        for name in ["..", "a\u{200b}", &long] {
            let spec = SnapshotSpec::new(image.clone(), name).expect("others may have made it");
            assert!(spec.check_new().is_err(), "{name:?}");
        }
    }

    #[test]
    fn uris() {
        assert_eq!(uri_encode("a b/ö?", false), "a%20b%2F%C3%B6%3F");
        assert_eq!(uri_encode("/run/x y", true), "/run/x%20y");
    }
}
