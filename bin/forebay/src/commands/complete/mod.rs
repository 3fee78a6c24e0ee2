//! `__complete`: what could come next on a command line, for the scripts in `packaging/completions`.
//!
//! The first line of the output says whether file names fit (`none`, `files`, `dirs`), each further one is a word.
//! On any error nothing is offered and nothing is printed, since the user is typing a command line.

mod bash;
mod line;
mod names;

use clap::CommandFactory;

use crate::cli::{Cli, CompleteArgs, GlobalArgs, Quoting};
use crate::failure::Result;
use crate::output::put;
use line::{CommandLine, Values};

/// A word that fits, and what it means.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Candidate {
    word: String,
    help: String,
}

impl Candidate {
    fn new(word: impl Into<String>, help: impl Into<String>) -> Self {
        Self { word: word.into(), help: help.into() }
    }
}

/// Prints what could come next.
pub fn complete(global: &GlobalArgs, asked: CompleteArgs) -> Result<()> {
    // What is no UTF-8 fits nothing that is offered.
    let words: Vec<String> = asked.words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let (words, typed) = match asked.shell {
        Quoting::Bash => {
            let (words, typed) = bash::join(&words);
            (words, Some(typed))
        }
        Quoting::Zsh | Quoting::Fish => (words, None),
    };
    let mut command = Cli::command();
    command.build();
    let line = CommandLine::parse(&command, &words);
    let (files, found) = find(global, &line);
    let mut out = format!("{files}\n");
    for candidate in found.iter().filter(|candidate| candidate.word.starts_with(&line.current)) {
        match &typed {
            Some(typed) => match typed.insertion(&candidate.word) {
                Some(word) => out.extend([&word, "\n"]),
                None => continue,
            },
            None => out.extend([&candidate.word, "\t", &candidate.help, "\n"]),
        }
    }
    put(out.as_bytes())
}

/// Returns whether files fit, and the words that do.
fn find(global: &GlobalArgs, line: &CommandLine<'_>) -> (&'static str, Vec<Candidate>) {
    let prefixed = |found: Vec<Candidate>| {
        // What follows `--option=` is one word with it.
        let before = line.before_value;
        found.into_iter().map(|each| Candidate { word: format!("{before}{}", each.word), ..each }).collect()
    };
    match line.values {
        Values::Files => ("files", Vec::new()),
        Values::Directories => ("dirs", Vec::new()),
        Values::Words(ref words) => ("none", prefixed(words.clone())),
        Values::Names(kind) => {
            let value = line.current.strip_prefix(line.before_value).unwrap_or_default();
            ("none", prefixed(names::find(&line.global(global), kind, value)))
        }
    }
}
