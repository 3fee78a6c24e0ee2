//! What is logged, to standard error.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::failure::{Failure, Result};

/// Starts logging at a level or by a filter; `default` when none is given.
pub fn start(level: Option<&str>, default: &str) -> Result<()> {
    let text = level.filter(|level| !level.is_empty()).unwrap_or(default);
    let filter = EnvFilter::builder().parse(text).map_err(|error| {
        Failure::invalid(format!("the log level '{text}' is wrong: {error}"))
            .hint("use error, warn, info, debug, trace, or a filter such as info,forebay_nbd=debug")
    })?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    // The journal stamps lines itself.
    let started = if std::env::var_os("JOURNAL_STREAM").is_some() {
        tracing::subscriber::set_global_default(lines.without_time().finish())
    } else {
        tracing::subscriber::set_global_default(lines.finish())
    };
    started.map_err(|error| Failure::failed(error.to_string()))
}
