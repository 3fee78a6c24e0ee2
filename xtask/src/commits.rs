//! Subjects of commits: `area: imperative`, short enough for one line of a log.

use anyhow::{Result, bail};

use crate::shell;

/// Newest commits that are looked at: those before them are as they are.
const NEWEST: &str = "30";
/// Longest subject, in characters.
const SUBJECT_MAX: usize = 72;

/// Checks the subjects of the newest commits.
///
/// # Errors
/// Names each that has no area, or is too long.
pub fn check() -> Result<()> {
    let subjects = shell::output(shell::command("git").args(["log", "--no-merges", "-n", NEWEST, "--format=%h %s"]))?;
    let wrong: Vec<String> = subjects
        .lines()
        .filter_map(|line| line.split_once(' '))
        .filter_map(|(commit, subject)| Some(format!("{commit}: {}: {subject}", fault(subject)?)))
        .collect();
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("{}", wrong.join("\n"))
}

/// Returns what is wrong with a subject, if anything is.
fn fault(subject: &str) -> Option<&'static str> {
    let is_area = |area: &str| {
        let is_word = |word: &str| {
            !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_lowercase() || b"0123456789-_/.".contains(&byte))
        };
        area.split(", ").all(is_word)
    };
    match subject.split_once(": ") {
        _ if subject.chars().count() > SUBJECT_MAX => Some("its subject has more than 72 characters"),
        Some((area, text)) if is_area(area) && !text.trim().is_empty() => None,
        _ => Some("its subject is not `area: imperative`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_subject_has_an_area_and_one_line() {
        for good in ["writelog: re-evaluate write-back slots", "reactor, sim: give files one set of calls"] {
            assert_eq!(fault(good), None, "{good}");
        }
        for bad in
            ["Count requests anew", "writelog:", "writelog: ", "Give x: y", ": x", &format!("a: {}", "x".repeat(70))]
        {
            assert!(fault(bad).is_some(), "{bad}");
        }
    }
}
