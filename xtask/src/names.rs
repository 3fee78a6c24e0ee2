//! Names of types: one name, one meaning, in all crates that the daemon is made of.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::shell;

/// Folders of those crates.
const FOLDERS: &[&str] = &["backend/", "base/", "bin/", "front/", "volume/"];

/// Words that begin the definition of a type.
const KINDS: &[&str] = &["struct ", "enum ", "trait ", "type ", "union "];

/// Definitions that repeat another type's name, at most: the limit may sink, never rise.
const LIMIT: usize = 36;

/// Checks the names of types that more than their own module sees.
///
/// # Errors
/// Lists the names with several definitions when there are more than the limit, or says that the limit is higher than it
/// has to be.
pub fn check() -> Result<()> {
    let root = shell::root();
    let files = shell::output(shell::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let is_counted = |name: &str| {
        FOLDERS.iter().any(|folder| name.starts_with(folder)) && name.contains("/src/") && name.ends_with(".rs")
    };
    for name in files.lines().filter(|name| is_counted(name)) {
        let Ok(text) = std::fs::read_to_string(root.join(name)) else { continue };
        for defined in definitions(&text) {
            places.entry(defined.to_owned()).or_default().push(name.to_owned());
        }
    }
    places.retain(|_, places| places.len() > 1);
    let repeated: usize = places.values().map(|places| places.len() - 1).sum();
    if repeated < LIMIT {
        bail!("{repeated} definitions repeat another type's name: lower the limit of {LIMIT} in xtask/src/names.rs");
    }
    if repeated > LIMIT {
        let mut places: Vec<_> = places.into_iter().collect();
        places.sort_by_key(|(_, places)| std::cmp::Reverse(places.len()));
        let lines: Vec<String> =
            places.iter().map(|(name, places)| format!("{:3} {name}: {}", places.len(), places.join(", "))).collect();
        bail!(
            "{repeated} definitions repeat another type's name, {LIMIT} at most; say what the new one is of, as \
             LogState does:\n{}",
            lines.join("\n")
        );
    }
    Ok(())
}

/// Returns the types of a file that other modules see.  Those within a module of the file, such as its tests, are not
/// counted.
fn definitions(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let rest = line.strip_prefix("pub")?;
        let rest = match rest.strip_prefix('(') {
            Some(within) => within.split_once(") ")?.1,
            None => rest.strip_prefix(' ')?,
        };
        let rest = rest.strip_prefix("unsafe ").unwrap_or(rest);
        let named = KINDS.iter().find_map(|kind| rest.strip_prefix(kind))?;
        named.split(|end: char| !end.is_alphanumeric() && end != '_').next().filter(|name| !name.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_that_others_see_are_found() {
        let text = "pub struct Log;\npub(crate) enum Mode { A }\npub(super) unsafe trait Media {}\nstruct Own;\n\
            pub type Handle<T> = Box<T>;\n    pub struct Inner;\npub fn log() {}\npub use other::Log;\n";
        assert_eq!(definitions(text).collect::<Vec<_>>(), ["Log", "Mode", "Media", "Handle"]);
    }
}
