//! `completions` and `man`.

use std::fs;
use std::path::Path;

use clap::CommandFactory;
use clap_complete::Shell;

use crate::cli::Cli;
use crate::failure::{Failure, Result};
use crate::output::put;

/// Prints a shell's completions.
pub fn completions(shell: Shell) -> Result<()> {
    match shell {
        // These ask the program what fits.
        Shell::Bash => put(include_bytes!("../../../../packaging/completions/forebay.bash")),
        Shell::Zsh => put(include_bytes!("../../../../packaging/completions/forebay.zsh")),
        Shell::Fish => put(include_bytes!("../../../../packaging/completions/forebay.fish")),
        // These know commands and options.
        _ => {
            let mut out = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "forebay", &mut out);
            put(&out)
        }
    }
}

/// Prints the manual page, or writes one page a command.
pub fn man(dir: Option<&Path>) -> Result<()> {
    let fail = |error| Failure::io(error, "writing the manual");
    match dir {
        None => {
            let mut out = Vec::new();
            clap_mangen::Man::new(Cli::command()).render(&mut out).map_err(fail)?;
            put(&out)
        }
        Some(dir) => {
            fs::create_dir_all(dir).map_err(fail)?;
            clap_mangen::generate_to(Cli::command(), dir).map_err(fail)
        }
    }
}
