//! Words of comments: how they begin, and phrases that a storage engineer would have to ask about.

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

/// Checks the comments of every source file.
///
/// # Errors
/// Lists the places with a fault.
pub fn check() -> Result<()> {
    let root = shell::root();
    let files = shell::output(shell::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    let mut wrong = Vec::new();
    for name in files.lines().filter(|name| name.ends_with(".rs") && *name != "xtask/src/words.rs") {
        let Ok(text) = std::fs::read_to_string(root.join(name)) else { continue };
        wrong.extend(faults(&text).into_iter().map(|(line, fault)| format!("{name}:{line}: {fault}")));
    }
    match wrong.is_empty() {
        true => Ok(()),
        false => bail!("{}", wrong.join("\n")),
    }
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
}
