//! The words of a command line so far, read by the tree of commands that `clap` has.

use std::path::PathBuf;

use clap::{Arg, ArgAction, Command, ValueHint};

use super::Candidate;
use super::names::NameKind;
use crate::cli::GlobalArgs;

/// Candidates for the word to complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Values {
    /// One of these.
    Words(Vec<Candidate>),
    /// The name of something that the daemon knows.
    Names(NameKind),
    /// A path.
    Files,
    /// The path of a directory.
    Directories,
}

/// A command line up to the cursor.
#[derive(Debug)]
pub struct CommandLine<'a> {
    /// The word to complete.
    pub current: String,
    /// Part of it before a value: `--option=`, or nothing.
    pub before_value: &'a str,
    /// Possible completions.
    pub values: Values,
    data: Option<PathBuf>,
    control: Option<PathBuf>,
}

/// Command of the tree that the words lead to.
struct CommandPosition<'a> {
    command: &'a Command,
    /// Names of the commands on the way, without the program's.
    path: Vec<&'a str>,
    /// Number of positional arguments given.
    positionals: usize,
    /// Ids of the options that are given.
    given: Vec<&'a str>,
    /// `--` was given: what follows are no options.
    only_positionals: bool,
}

impl<'a> CommandLine<'a> {
    /// Reads words, of which the first is the program and the last the one to complete.
    pub fn parse(root: &'a Command, words: &'a [String]) -> Self {
        let (current, before) = words.split_last().map_or(("", &[][..]), |(last, rest)| (last.as_str(), rest));
        let mut place = CommandPosition {
            command: root,
            path: Vec::new(),
            positionals: 0,
            given: Vec::new(),
            only_positionals: false,
        };
        let mut line = Self {
            current: current.to_owned(),
            before_value: "",
            values: Values::Words(Vec::new()),
            data: None,
            control: None,
        };
        let mut waiting: Option<&Arg> = None;
        for word in before.iter().skip(1) {
            match waiting.take() {
                Some(option) => line.note(option, word),
                None => waiting = line.step(&mut place, word),
            }
        }
        if words.len() < 2 {
            return line;
        }
        if let Some(option) = waiting {
            line.values = values_of(&place, option);
        } else if current.starts_with('-') && !place.only_positionals {
            match current.split_once('=').and_then(|(name, _)| Some((name, place.option(name)?))) {
                Some((name, option)) => {
                    line.before_value = &current[..=name.len()];
                    line.values = values_of(&place, option);
                }
                None => line.values = Values::Words(place.options()),
            }
        } else {
            line.values = place.next_values();
        }
        line
    }

    /// Returns the options of the line that say which daemon is meant, over those of the environment.
    pub fn global(&self, global: &GlobalArgs) -> GlobalArgs {
        let mut global = global.clone();
        global.data = self.data.clone().or(global.data);
        global.control = self.control.clone().or(global.control);
        global
    }

    /// Takes a word that is complete; returns the option whose value comes next.
    fn step(&mut self, place: &mut CommandPosition<'a>, word: &'a str) -> Option<&'a Arg> {
        if place.only_positionals || !word.starts_with('-') || word == "-" {
            match place.command.find_subcommand(word).filter(|_| !place.only_positionals && place.positionals == 0) {
                Some(command) => {
                    place.command = command;
                    place.path.push(command.get_name());
                }
                None => place.positionals += 1,
            }
            return None;
        }
        if word == "--" {
            place.only_positionals = true;
            return None;
        }
        let (name, value) = match word.split_once('=') {
            Some((name, value)) => (name, Some(value)),
            None => (word, None),
        };
        // Of short options together (`-lp POOL`) the last can have a value.
        let option = place.option(name)?;
        place.given.push(option.get_id().as_str());
        if !option.get_action().takes_values() {
            return None;
        }
        match value {
            Some(value) => {
                self.note(option, value);
                None
            }
            None => Some(option),
        }
    }

    /// Remembers the value of an option that says which daemon is meant.
    fn note(&mut self, option: &Arg, value: &str) {
        let path = match value.strip_prefix("~/").zip(std::env::home_dir()) {
            Some((rest, home)) => home.join(rest),
            None => PathBuf::from(value),
        };
        match option.get_id().as_str() {
            "data" => self.data = Some(path),
            "control" => self.control = Some(path),
            _ => {}
        }
    }
}

impl<'a> CommandPosition<'a> {
    fn option(&self, name: &str) -> Option<&'a Arg> {
        let mut options = self.command.get_arguments().filter(|arg| !arg.is_positional());
        match name.strip_prefix("--") {
            Some(long) => options.find(|option| {
                option.get_long() == Some(long) || option.get_all_aliases().is_some_and(|all| all.contains(&long))
            }),
            None => options.find(|option| option.get_short() == name.chars().next_back()),
        }
    }

    /// Options that can still be given.
    fn options(&self) -> Vec<Candidate> {
        let again = |option: &Arg| matches!(option.get_action(), ArgAction::Append | ArgAction::Count);
        let fits =
            |option: &&Arg| !option.is_hide_set() && (again(option) || !self.given.contains(&option.get_id().as_str()));
        let options = self.command.get_arguments().filter(fits);
        options
            .filter_map(|option| Some(Candidate::new(format!("--{}", option.get_long()?), help_of(option))))
            .collect()
    }

    /// Possible values of the next word, unless it is an option.
    fn next_values(&self) -> Values {
        if self.positionals == 0 && self.command.has_subcommands() {
            let commands = self.command.get_subcommands().filter(|command| !command.is_hide_set());
            let candidate = |command: &Command| {
                let about = command.get_about().map(ToString::to_string).unwrap_or_default();
                Candidate::new(command.get_name(), first_line(&about))
            };
            return Values::Words(commands.map(candidate).collect());
        }
        match self.command.get_positionals().nth(self.positionals) {
            Some(argument) => values_of(self, argument),
            // Nothing but options is left.
            None if self.only_positionals => Values::Words(Vec::new()),
            None => Values::Words(self.options()),
        }
    }
}

/// Returns what the value of an argument can be.
fn values_of(place: &CommandPosition<'_>, argument: &Arg) -> Values {
    // As the help shows it.
    let shown = argument.get_value_names().and_then(|names| names.first()).map_or("", |name| name.as_str());
    let kind = match (place.path.as_slice(), shown) {
        // These make an image: of its name only the pool can be known.
        (["create" | "import"], "IMAGE") | (_, "TO") => Some(NameKind::NewImage),
        (["detach"], "IMAGE") => Some(NameKind::Export),
        (_, "IMAGE" | "POOL[/IMAGE]" | "IMAGE@SNAP" | "IMAGE[@SNAP]") => Some(NameKind::Image),
        (_, "POOL") => Some(NameKind::Pool),
        _ => None,
    };
    if let Some(kind) = kind {
        return Values::Names(kind);
    }
    let possible = argument.get_possible_values();
    if !possible.is_empty() {
        let shown = possible.iter().filter(|value| !value.is_hide_set());
        let help = |help: &clap::builder::StyledStr| first_line(&help.to_string());
        return Values::Words(
            shown
                .map(|value| Candidate::new(value.get_name(), value.get_help().map(help).unwrap_or_default()))
                .collect(),
        );
    }
    match argument.get_value_hint() {
        ValueHint::AnyPath | ValueHint::FilePath | ValueHint::ExecutablePath => Values::Files,
        ValueHint::DirPath => Values::Directories,
        _ => Values::Words(Vec::new()),
    }
}

fn help_of(option: &Arg) -> String {
    first_line(&option.get_help().map(ToString::to_string).unwrap_or_default())
}

/// A tab or a line's end would be taken for the end of the help.
fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().replace('\t', " ")
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::cli::Cli;

    fn parse(words: &[&str]) -> (Values, String) {
        let mut root = Cli::command();
        root.build();
        let words: Vec<String> = ["forebay"].iter().chain(words).map(|&word| word.to_owned()).collect();
        let line = CommandLine::parse(&root, &words);
        (line.values, line.before_value.to_owned())
    }

    fn words(values: &Values) -> Vec<&str> {
        match values {
            Values::Words(words) => words.iter().map(|each| each.word.as_str()).collect(),
            other => panic!("no words: {other:?}"),
        }
    }

    #[test]
    fn what_comes_next_is_known_from_the_tree_of_commands() {
        let names = |words: &[&str]| match parse(words).0 {
            Values::Names(kind) => kind,
            other => panic!("{words:?}: {other:?}"),
        };
        assert_eq!(names(&["info", ""]), NameKind::Image);
        assert_eq!(names(&["--format", "json", "info", "--data=/x", "lo"]), NameKind::Image);
        assert_eq!(names(&["info", "--", "lo"]), NameKind::Image);
        assert_eq!(names(&["log", "flush", ""]), NameKind::Image);
        assert_eq!(names(&["detach", "--force", ""]), NameKind::Export);
        assert_eq!(names(&["create", ""]), NameKind::NewImage);
        assert_eq!(names(&["mv", "local/a", ""]), NameKind::NewImage);
        assert_eq!(names(&["rename", "local/a", ""]), NameKind::NewImage);
        assert_eq!(names(&["ls", ""]), NameKind::Pool);
        assert_eq!(names(&["du", ""]), NameKind::Image);
        assert_eq!(names(&["info", "--image", ""]), NameKind::Image);
        assert_eq!(names(&["info", "-p", ""]), NameKind::Pool);
        assert_eq!(names(&["mv", "local/a", "--dest", ""]), NameKind::NewImage);
        for words in [&["import", ""][..], &["export", "local/a", ""], &["serve", "--config", ""], &["info", "-c", ""]]
        {
            assert_eq!(parse(words).0, Values::Files, "{words:?}");
        }
        assert_eq!(parse(&["status", "--data", ""]).0, Values::Directories);
    }

    #[test]
    fn commands_options_and_their_values_are_words() {
        let (commands, _) = parse(&[""]);
        assert!(words(&commands).contains(&"attach") && words(&commands).contains(&"ls"));
        assert!(!words(&commands).iter().any(|word| word.starts_with("__")), "what is hidden is not offered");
        assert!(words(&parse(&["log", ""]).0).contains(&"discard"));
        let (options, _) = parse(&["attach", "local/x", "--nbd", ""]);
        assert!(words(&options).contains(&"--read-only") && !words(&options).contains(&"--nbd"), "{options:?}");
        assert_eq!(words(&parse(&["ls", "--format", ""]).0), ["plain", "json"]);
        let (values, before) = parse(&["ls", "--format=j"]);
        assert_eq!((words(&values), before.as_str()), (vec!["plain", "json"], "--format="));
        assert!(words(&parse(&["create", "local/x", "--size", ""]).0).is_empty(), "any size fits");
        assert!(words(&parse(&["nonsense", ""]).0).contains(&"--data"));
    }
}
