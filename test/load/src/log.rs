//! Log collector: the lines of a test, logged on its thread.

use std::fmt::{self, Write};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Event, Metadata, Subscriber, span};

/// Log lines as `LEVEL message field=value ...`, fields in the order of the source.
#[derive(Clone, Default)]
pub struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    /// Runs `test`, and collects what it logs on this thread.  A panic of `test` passes through.
    pub fn of(test: impl FnOnce(&Lines)) {
        /// With a single collector, `tracing` lets the first thread that reaches a callsite decide whether it is
        /// enabled: a thread without collector would disable it for all.
        static ANOTHER: OnceLock<Dispatch> = OnceLock::new();
        ANOTHER.get_or_init(|| Dispatch::new(NoSubscriber::default()));
        let lines = Lines::default();
        tracing::subscriber::with_default(lines.clone(), || test(&lines));
    }

    /// Takes the lines that begin with `start`.
    pub fn take(&self, start: &str) -> Vec<String> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let (found, others) = lines.drain(..).partition(|line| line.starts_with(start));
        *lines = others;
        found
    }
}

impl Subscriber for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line::default();
        event.record(&mut line);
        let line = format!("{} {}{}", event.metadata().level(), line.message, line.fields);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(line);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        match field.name() {
            "message" => self.message = format!("{value:?}"),
            name => drop(write!(self.fields, " {name}={value:?}")),
        }
    }
}
