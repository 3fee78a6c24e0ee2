//! Progress bars on a terminal.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::api::Progress;
use crate::cli::GlobalArgs;

/// Draws how far something has come, on standard error if that is a terminal.
pub struct Bar {
    bar: ProgressBar,
}

/// Unit that a bar counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgressUnit {
    /// Bytes, shown with their rate.
    Bytes,
    /// Anything else, shown in percent.
    Steps,
}

impl Bar {
    /// A bar with a label; hidden on request, or if standard error is no terminal.
    pub fn new(global: &GlobalArgs, word: &'static str, counts: ProgressUnit) -> Self {
        if global.no_progress || !std::io::stderr().is_terminal() {
            return Self { bar: ProgressBar::hidden() };
        }
        let template = match counts {
            ProgressUnit::Bytes => "{msg} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
            ProgressUnit::Steps => "{msg} [{bar:30}] {percent} % {eta}",
        };
        let style = ProgressStyle::with_template(template).expect("a template of this file").progress_chars("=> ");
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr_with_hz(10));
        bar.set_style(style);
        bar.set_message(word);
        bar.enable_steady_tick(Duration::from_millis(500));
        Self { bar }
    }

    /// Shows the newest state.
    pub fn show(&self, progress: Progress) {
        if progress.total > 0 && self.bar.length() != Some(progress.total) {
            self.bar.set_length(progress.total);
        }
        self.bar.set_position(progress.done);
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
