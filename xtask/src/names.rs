//! Names of types: one name, one meaning, in all crates that the daemon is made of.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::shell;

/// Folders of those crates.
const FOLDERS: &[&str] = &["backend/", "base/", "bin/", "front/", "volume/"];

/// Words that begin the definition of a type.
const KINDS: &[&str] = &["struct ", "enum ", "trait ", "type ", "union "];

/// Names with several definitions that mean the same, each with the reason.
const SHARED: &[(&str, &str)] = &[
    ("Result", "a crate's shorthand for results with its own error"),
    ("Sender", "sending half of a channel, named by its module as in std"),
    ("Receiver", "receiving half of a channel, named by its module as in std"),
];

/// Words that say nothing alone: a type's name says what it is of, as `LogState` does.
const BARE: &[&str] = &[
    "Action", "Answer", "Held", "Inner", "Kind", "Outcome", "Piece", "Place", "Run", "Shared", "State", "View", "Work",
];

/// Files that define a name, by name.
type Definitions = BTreeMap<String, Vec<String>>;

/// Checks the names of types that more than their own module sees.
///
/// # Errors
/// Lists the names with several definitions that do not mean the same, those that say nothing alone, and the exceptions
/// that are no longer needed.
pub fn check() -> Result<()> {
    let root = shell::root();
    let files = shell::output(shell::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    let mut defined = Definitions::new();
    let is_checked = |name: &str| {
        FOLDERS.iter().any(|folder| name.starts_with(folder)) && name.contains("/src/") && name.ends_with(".rs")
    };
    for file in files.lines().filter(|name| is_checked(name)) {
        let Ok(text) = std::fs::read_to_string(root.join(file)) else { continue };
        for name in definitions(&text) {
            defined.entry(name.to_owned()).or_default().push(file.to_owned());
        }
    }
    let wrong = faults(&defined);
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("name a type by what it is of, as LogState is:\n{}", wrong.join("\n"))
}

/// Returns what is wrong with names, one text for each.
fn faults(defined: &Definitions) -> Vec<String> {
    let is_shared = |name: &str| SHARED.iter().any(|(shared, _)| *shared == name);
    let mut wrong = Vec::new();
    for (name, files) in defined {
        if files.len() > 1 && !is_shared(name) {
            wrong.push(format!("{name} has {} definitions: {}", files.len(), files.join(", ")));
        }
        if BARE.contains(&name.as_str()) {
            wrong.push(format!("{name} says nothing alone: {}", files.join(", ")));
        }
    }
    for (name, reason) in SHARED {
        if defined.get(*name).is_none_or(|files| files.len() < 2) {
            wrong.push(format!("{name} has one definition at most, and needs no exception ({reason})"));
        }
    }
    wrong
}

/// Returns the types of a file that other modules see.  Those within a module of the file, such as its tests, are not
/// checked.
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

    fn define(defined: &mut Definitions, name: &str, files: &[&str]) {
        defined.insert(name.to_owned(), files.iter().map(|&file| file.to_owned()).collect());
    }

    #[test]
    fn names_are_unique_but_for_the_exceptions() {
        let mut defined = Definitions::new();
        for (name, _) in SHARED {
            define(&mut defined, name, &["base/a/src/lib.rs", "base/b/src/lib.rs"]);
        }
        define(&mut defined, "LogState", &["volume/a/src/lib.rs"]);
        assert!(faults(&defined).is_empty());

        define(&mut defined, "Connection", &["front/a/src/lib.rs", "front/b/src/lib.rs"]);
        define(&mut defined, "State", &["volume/a/src/lib.rs"]);
        define(&mut defined, "Result", &["base/a/src/lib.rs"]);
        let wrong = faults(&defined);
        let beginnings: Vec<_> = wrong.iter().map(|text| text.split_once(' ').expect("words").0).collect();
        assert_eq!(beginnings, ["Connection", "State", "Result"]);
        assert!(wrong[0].contains("front/a/src/lib.rs, front/b/src/lib.rs"), "{wrong:?}");
    }
}
