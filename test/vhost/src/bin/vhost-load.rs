//! Benchmarks a vhost-user-blk device, and prints the results.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use clap::{Parser, ValueEnum};
use forebay_vhost_host::load::{self, VhostLoad};

#[derive(Parser)]
struct Arguments {
    /// Socket of the device; several with --idle
    #[arg(long, required = true)]
    socket: Vec<PathBuf>,
    #[command(flatten)]
    load: VhostLoad,
    /// Form of the results
    #[arg(long, value_enum, default_value_t = Form::Text)]
    format: Form,
    /// No load: starts all devices, and waits for a line on the standard input
    #[arg(long)]
    idle: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Form {
    Json,
    Text,
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    if arguments.idle {
        let standing = load::idle(&arguments.socket, &arguments.load)?;
        println!("{} devices", standing.len());
        std::io::stdin().read_line(&mut String::new())?;
        return Ok(());
    }
    ensure!(arguments.socket.len() == 1, "a load is on one device");
    let socket = arguments.socket.first().context("no socket")?;
    let figures = load::run(socket, &arguments.load)?;
    match arguments.format {
        Form::Json => println!("{figures}"),
        Form::Text => println!("{}", figures.trim_matches(['{', '}']).replace('"', "")),
    }
    Ok(())
}
