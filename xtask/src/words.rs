//! Words of comments, log lines, errors and pages: beginnings of doc comments, and phrases that a storage engineer would
//! have to ask about.

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

/// Phrases of no specification, textbook or manual, without a use that is worth an exception.
const PHRASES: &[&str] = &[
    "to be had",
    "for ever",
    "to and fro",
    "whoever",
    "somebody",
    "nobody else",
    "under way",
    "anew",
    "strewn",
    "shut out",
    "stand back",
    "stands back",
    "does not get on",
    "makes no sense",
    "makes up its mind",
    "in the same words",
    "had its say",
    "tells of",
    "what nobody",
];

/// Macros and attributes whose string literals are log lines or errors.
const TEXTS: &[&str] = &[
    "#[error(",
    "tracing::trace!(",
    "tracing::debug!(",
    "tracing::info!(",
    "tracing::warn!(",
    "tracing::error!(",
    "bail!(",
    "ensure!(",
    "anyhow!(",
    ".context(",
    ".with_context(",
    ".hint(",
    "Failure::",
];

/// Checks the comments, log lines and errors of every source file, and the prose of every page.
///
/// # Errors
/// Lists the places with a fault.
pub fn check() -> Result<()> {
    let root = shell::root();
    let files = shell::output(shell::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    let mut wrong = Vec::new();
    for name in files.lines().filter(|name| *name != "xtask/src/words.rs") {
        let faults = match name.rsplit_once('.') {
            Some((_, "rs")) => faults,
            Some((_, "md")) => prose_faults,
            _ => continue,
        };
        let Ok(text) = std::fs::read_to_string(root.join(name)) else { continue };
        wrong.extend(faults(&text).into_iter().map(|(line, fault)| format!("{name}:{line}: {fault}")));
    }
    match wrong.is_empty() {
        true => Ok(()),
        false => bail!("{}", wrong.join("\n")),
    }
}

/// Returns the lines of a source file that have a fault, with its description.
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
        let is_text = line.starts_with("//") || TEXTS.iter().any(|begin| line.contains(begin));
        if let Some(phrase) = PHRASES.iter().find(|phrase| is_text && has_words(line, phrase)) {
            found.push((index + 1, format!("\"{phrase}\"")));
        }
        in_docs = docs.is_some();
    }
    found
}

/// Returns the lines of a page that have a fault, outside of code and tables.
fn prose_faults(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut in_code = false;
    for (index, line) in text.lines().enumerate() {
        let line = line.trim_start();
        if line.starts_with("```") {
            in_code = !in_code;
        }
        if in_code || line.starts_with('|') {
            continue;
        }
        if let Some(phrase) = PHRASES.iter().find(|phrase| has_words(line, phrase)) {
            found.push((index + 1, format!("\"{phrase}\"")));
        }
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

/// Returns whether a line has a phrase as whole words, in upper or lower case: "for every" does not have "for ever".
fn has_words(line: &str, phrase: &str) -> bool {
    let line = line.to_ascii_lowercase();
    line.match_indices(phrase).any(|(at, _)| {
        !line[..at].ends_with(char::is_alphanumeric) && !line[at + phrase.len()..].starts_with(char::is_alphanumeric)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_lines_and_errors_have_no_riddles() {
        let good = "    tracing::warn!(%error, \"io_uring unavailable; using epoll\");";
        let bad = "    tracing::warn!(%error, \"io_uring is not to be had here\");";
        assert_eq!(faults(good), []);
        assert_eq!(faults(bad), [(1, "\"to be had\"".to_owned())]);
        assert_eq!(faults("#[error(\"Whoever asks waits\")]").len(), 1, "in upper case, too");
        assert_eq!(faults("let name = \"whoever\";"), [], "data");
    }

    #[test]
    fn prose_is_checked_outside_of_code_and_tables() {
        assert_eq!(prose_faults("Wait for every request.\n\n```\necho anew\n```\n| anew | 1 |\n"), []);
        assert_eq!(prose_faults("# A title\n\nIt begins anew.\n"), [(3, "\"anew\"".to_owned())]);
    }

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
