//! Words of comments: how they begin, and phrases that a storage engineer would have to ask about.

use std::collections::BTreeMap;

use anyhow::{Result, bail};

use crate::shell;

/// First words that name nothing: a doc comment begins with a verb or a domain noun.
const BEGINNINGS: &[&str] = &[
    "As",
    "Has",
    "How",
    "Is",
    "It",
    "Nothing",
    "Of",
    "So",
    "Something",
    "That",
    "There",
    "They",
    "This",
    "Those",
    "What",
    "When",
    "Where",
    "Whether",
    "Who",
    "Why",
];

/// Phrases of no specification, textbook or manual.
const PHRASES: &[&str] = &["to be had", "for ever", "to and fro"];

/// Folders in which some comments are still as they must not be, and how many at most: a limit may sink, never rise.
const LIMITS: &[(&str, usize)] = &[("bin/forebay", 48)];

/// Checks the comments of every source file.
///
/// # Errors
/// Names the folders with more than their limit, and the places, or a limit that is higher than it has to be.
pub fn check() -> Result<()> {
    let root = shell::root();
    let files = shell::output(shell::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in files.lines().filter(|name| name.ends_with(".rs") && *name != "xtask/src/words.rs") {
        let Ok(text) = std::fs::read_to_string(root.join(name)) else { continue };
        for (line, fault) in faults(&text) {
            found.entry(folder(name)).or_default().push(format!("{name}:{line}: {fault}"));
        }
    }
    let mut wrong = Vec::new();
    for (folder, limit) in LIMITS {
        let count = found.get(*folder).map_or(0, Vec::len);
        if count < *limit {
            wrong.push(format!("{folder} has {count} comments as they must not be: lower its limit of {limit}"));
        }
    }
    for (folder, places) in found {
        let limit = LIMITS.iter().find(|(name, _)| *name == folder).map_or(0, |(_, limit)| *limit);
        if places.len() > limit {
            wrong.push(format!("{folder}: {} comments, {limit} at most:\n{}", places.len(), places.join("\n")));
        }
    }
    match wrong.is_empty() {
        true => Ok(()),
        false => bail!("{}", wrong.join("\n")),
    }
}

/// Returns the folder of a file whose limit counts: the crate's.
fn folder(name: &str) -> String {
    let parts: Vec<&str> = name.split('/').collect();
    let depth = if ["xtask", "fuzz"].contains(&parts[0]) { 1 } else { 2 };
    parts[..depth.min(parts.len() - 1)].join("/")
}

/// Returns the lines with a fault, and what it is.
fn faults(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_docs = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        let docs = line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::trim);
        if let Some(words) = docs
            && !in_docs
            && let Some(fault) = beginning(words).or_else(|| one_word(words))
        {
            found.push((index + 1, fault));
        }
        if let Some(phrase) = PHRASES.iter().find(|phrase| line.starts_with("//") && has_words(line, phrase)) {
            found.push((index + 1, format!("\"{phrase}\"")));
        }
        in_docs = docs.is_some();
    }
    found
}

/// Returns what is wrong with the beginning of a doc comment.
fn beginning(words: &str) -> Option<String> {
    let first = words.split(|end: char| !end.is_alphanumeric()).next().unwrap_or_default();
    BEGINNINGS.contains(&first).then(|| format!("begins with \"{first}\", not with a verb or a domain noun"))
}

/// Returns what is wrong with a sentence of one word.
fn one_word(words: &str) -> Option<String> {
    (words.ends_with('.') && !words.contains(' ')).then(|| format!("\"{words}\" is no sentence"))
}

/// Returns whether a line has a phrase that no letter goes on from: "for every" is none of "for ever".
fn has_words(line: &str, phrase: &str) -> bool {
    line.match_indices(phrase).any(|(at, _)| !line[at + phrase.len()..].starts_with(char::is_alphabetic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_begin_with_a_verb_or_a_noun() {
        for good in
            ["/// Returns the mode.", "/// Write-back batch.\n/// What it holds is dirty.", "// What counts is x", ""]
        {
            assert_eq!(faults(good), [], "{good}");
        }
        for bad in ["/// What it counts.", "//! How it stands.", "/// Where.", "    // it is not to be had here"] {
            assert_eq!(faults(bad).len(), 1, "{bad}");
        }
    }

    #[test]
    fn a_crate_has_one_limit() {
        assert_eq!(folder("front/nbd/src/serve/execute.rs"), "front/nbd");
        assert_eq!(folder("xtask/src/words.rs"), "xtask");
    }
}
