//! Trace: the last events of a run, and a hash over all of them.

use std::collections::VecDeque;
use std::fmt;

/// Events that are kept for printing.
const KEPT_MAX: usize = 4096;

/// Kind of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum What {
    Submit,
    Complete,
    Failed,
    Cancel,
    Point,
    Open,
    Close,
    Resize,
    RemoveFile,
    SyncDir,
    Fault,
    PowerOff,
    Crash,
    Kill,
    Net,
    Note,
}

/// One event: when, what, and up to three numbers whose meaning `label` gives.
#[derive(Debug, Clone)]
struct Entry {
    at: u64,
    what: What,
    label: &'static str,
    numbers: [u64; 3],
    text: Option<Box<str>>,
}

impl fmt::Display for Entry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:>12}.{:03} us  {:?} {}", self.at / 1000, self.at % 1000, self.what, self.label)?;
        match &self.text {
            Some(text) => write!(f, " {text}"),
            None => self.numbers.iter().try_for_each(|number| write!(f, " {number}")),
        }
    }
}

/// A bounded record of a run.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    entries: VecDeque<Entry>,
    count: u64,
    hash: u64,
    verbose: bool,
}

impl Trace {
    /// Notes are kept from now on, not only the driver's events.
    pub(crate) fn set_verbose(&mut self) {
        self.verbose = true;
    }

    pub(crate) fn event(&mut self, at: u64, what: What, label: &'static str, numbers: [u64; 3]) {
        self.count += 1;
        let parts = [at, what as u64, label.len() as u64, numbers[0], numbers[1], numbers[2]];
        for part in parts {
            self.hash = (self.hash.rotate_left(5) ^ part).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
        self.keep(Entry { at, what, label, numbers, text: None });
    }

    /// A line by the harness; made only when it is kept, and never part of the hash.
    pub(crate) fn note(&mut self, at: u64, text: impl FnOnce() -> String) {
        if self.verbose {
            self.keep(Entry { at, what: What::Note, label: "", numbers: [0; 3], text: Some(text().into()) });
        }
    }

    fn keep(&mut self, entry: Entry) {
        if self.entries.len() == KEPT_MAX {
            self.entries.pop_front();
        }
        self.entries.push_back(entry);
    }

    pub(crate) fn hash(&self) -> u64 {
        self.hash
    }

    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// Returns the last `lines` events, a line each.
    pub(crate) fn tail(&self, lines: usize) -> String {
        let skip = self.entries.len().saturating_sub(lines);
        let mut out = String::new();
        if self.count as usize > self.entries.len() - skip {
            out.push_str("  ...\n");
        }
        for entry in self.entries.iter().skip(skip) {
            out.push_str(&format!("  {entry}\n"));
        }
        out
    }
}
