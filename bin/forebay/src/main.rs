//! The daemon and the command line of Forebay: configuration and wiring, nothing else.

mod api;
mod cli;
mod client;
mod commands;
mod config;
mod daemon;
mod engine;
mod failure;
mod kernels;
mod log_place;
mod logging;
mod master_key;
mod ops;
mod output;
mod rbd_options;
mod running;
mod spec;
mod timestamp;
mod transfer;
mod units;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::Cli;
use crate::output::Output;

fn main() -> ExitCode {
    let mut cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // A command that is none may be one of rbd.
        Err(error) => match cli::refusal(std::env::args()).filter(|_| error.exit_code() != 0) {
            Some(failure) => {
                Output::of_arguments(std::env::args()).complain(&failure);
                return ExitCode::from(failure.kind.exit_code());
            }
            None => error.exit(),
        },
    };
    cli.global = cli.global.with_environment();
    let output = Output::new(&cli.global);
    let done = commands::run(cli, output);
    if !logging::flush() {
        // The output is not read, and writing more would block.
        let code = done.as_ref().err().map_or(0, |failure| failure.kind.exit_code());
        std::process::exit(code.into());
    }
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output.complain(&failure);
            ExitCode::from(failure.kind.exit_code())
        }
    }
}
