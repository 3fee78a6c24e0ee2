//! `cargo xtask check`: everything that is known without running the code.

use std::time::Instant;

use anyhow::{Result, bail};

use crate::shell::{self, cargo};
use crate::{commits, layers, mutants, names, policy, words};

/// Arguments of `check`.
#[derive(clap::Args)]
pub struct CheckArguments {
    /// Only the rules that need no compiler: formatting, layering, policy, planted faults
    #[arg(long)]
    quick: bool,
}

/// Runs every check, and fails at the end if one of them did.
pub fn run(arguments: &CheckArguments) -> Result<()> {
    let mut failed = Vec::new();
    let mut step = |title: &str, work: &mut dyn FnMut() -> Result<()>| {
        let begin = Instant::now();
        match work() {
            Ok(()) => println!("{} {title} ({})", shell::paint("ok", "32"), shell::seconds(begin.elapsed())),
            Err(error) => {
                println!("{} {title}\n{error:#}", shell::paint("FAILED", "1;31"));
                failed.push(title.to_owned());
            }
        }
    };
    step("formatting", &mut || shell::run(cargo().args(["fmt", "--all", "--check"])));
    step("formatting of fuzz targets", &mut || {
        shell::run(cargo().args(["fmt", "--manifest-path", "fuzz/Cargo.toml", "--check"]))
    });
    step("layering", &mut layers::check);
    step("house rules", &mut policy::check);
    step("words of comments", &mut words::check);
    step("names of types", &mut names::check);
    step("planted faults", &mut mutants::check);
    step("commit subjects", &mut commits::check);
    if !arguments.quick {
        step("clippy", &mut || {
            shell::run(cargo().args(["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"]))
        });
        step("documentation", &mut || {
            shell::run(
                cargo()
                    .args(["doc", "--quiet", "--workspace", "--no-deps", "--document-private-items"])
                    .env("RUSTDOCFLAGS", "-D warnings"),
            )
        });
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("failed: {}", failed.join(", "))
}
