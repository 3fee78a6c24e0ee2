//! CPU time of a group of processes that carry a mark in their environment, from /proc.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Clock ticks per second of /proc/PID/stat: always 100 on Linux.
const TICKS: u64 = 100;

/// Meter of the CPU time of all processes with one environment entry, those that have ended included.
///
/// A process that ends between two samples is known by what its parent, having waited for it, counts as its children's
/// time.  One that ends unseen, and whose parent waits for no child, is not counted.
pub struct CpuMeter {
    entry: Vec<u8>,
    /// Processes that were looked at, and whether they carry the mark.
    known: BTreeMap<u32, bool>,
    /// Ticks of marked processes that live, those of children they have waited for included.
    living: BTreeMap<u32, Sample>,
    /// Ticks of marked processes that ended without a marked parent.
    gone: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    parent: u32,
    ticks: u64,
}

impl CpuMeter {
    /// Creates a meter of the processes whose environment has `variable=value`.
    pub fn new(variable: &str, value: &str) -> Self {
        let entry = format!("{variable}={value}").into_bytes();
        Self { entry, known: BTreeMap::new(), living: BTreeMap::new(), gone: 0 }
    }

    /// Takes a sample of the processes that live now.
    pub fn sample(&mut self) {
        let folders = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let ids: BTreeSet<u32> = folders.filter_map(|folder| folder.file_name().to_str()?.parse().ok()).collect();
        self.known.retain(|id, _| ids.contains(id));
        let mut living = BTreeMap::new();
        for id in ids {
            let entry = &self.entry;
            let marked = *self.known.entry(id).or_insert_with(|| has_entry(id, entry));
            let stat = marked.then(|| std::fs::read_to_string(format!("/proc/{id}/stat")).ok()).flatten();
            if let Some(sample) = stat.and_then(|stat| parse(&stat)) {
                living.insert(id, sample);
            }
        }
        self.take(living);
    }

    fn take(&mut self, living: BTreeMap<u32, Sample>) {
        for (id, sample) in &self.living {
            // A parent that lives has waited for it and counts it, or will.
            if !living.contains_key(id) && !self.living.contains_key(&sample.parent) {
                self.gone += sample.ticks;
            }
        }
        self.living = living;
    }

    /// Returns the CPU time up to the last sample.
    pub fn time(&self) -> Duration {
        let ticks = self.gone + self.living.values().map(|sample| sample.ticks).sum::<u64>();
        Duration::from_millis(ticks * 1000 / TICKS)
    }
}

fn has_entry(id: u32, entry: &[u8]) -> bool {
    let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
    environment.split(|&byte| byte == 0).any(|other| other == entry)
}

/// Parses /proc/PID/stat (proc(5)): fields 4, and 14 to 17.
fn parse(stat: &str) -> Option<Sample> {
    // The name, field 2, may hold spaces and brackets.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
    Some(Sample { parent: number(4)? as u32, ticks: number(14)? + number(15)? + number(16)? + number(17)? })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell;

    #[test]
    fn a_line_of_proc_is_parsed() {
        let stat = "77 (a (b) c) S 5 77 77 0 -1 4194560 9 9 0 0 10 20 30 40 20 0 1 0 100 1 1";
        assert_eq!(parse(stat), Some(Sample { parent: 5, ticks: 100 }));
        assert_eq!(parse("77 (cut"), None);
    }

    #[test]
    fn what_ended_is_counted_once() {
        let mut meter = CpuMeter::new("A", "b");
        let of = |all: &[(u32, u32, u64)]| {
            all.iter().map(|&(id, parent, ticks)| (id, Sample { parent, ticks })).collect::<BTreeMap<_, _>>()
        };
        meter.take(of(&[(10, 1, 5), (11, 10, 100), (12, 1, 7)]));
        assert_eq!(meter.time(), Duration::from_millis(1120));
        // 10 has waited for 11; 12 was a daemon whose parent had ended before.
        meter.take(of(&[(10, 1, 105)]));
        assert_eq!(meter.time(), Duration::from_millis(1120));
        meter.take(of(&[]));
        assert_eq!(meter.time(), Duration::from_millis(1120));
    }

    #[test]
    fn a_process_that_works_is_measured() {
        let value = format!("cpu-{}", std::process::id());
        let mut child = shell::command("sh")
            .args(["-c", "while :; do :; done"])
            .env("FOREBAY_MARK", &value)
            .spawn()
            .expect("a shell");
        let mut meter = CpuMeter::new("FOREBAY_MARK", &value);
        let measured = shell::wait_for(Duration::from_secs(60), || {
            meter.sample();
            (meter.time() >= Duration::from_millis(50)).then_some(())
        });
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        measured.expect("it takes CPU time");
    }
}
