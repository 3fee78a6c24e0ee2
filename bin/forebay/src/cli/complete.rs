//! Options of `__complete`: the request of a shell's completion script.

use std::ffi::OsString;

use clap::{Args, ValueEnum};

/// Options of `__complete`.
#[derive(Debug, Args)]
pub struct CompleteArgs {
    /// The shell that asks
    #[arg(value_enum)]
    pub shell: Quoting,

    /// The words of the line up to the cursor, the program's name first and the word to complete last
    #[arg(last = true)]
    pub words: Vec<OsString>,
}

/// Shell whose words are completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Quoting {
    /// Quoted as typed and split at `:` and `=` too; takes words quoted for insertion.
    Bash,
    /// Without quotes; takes words and what they mean.
    Zsh,
    /// The same, but the word to complete is as typed.
    Fish,
}
