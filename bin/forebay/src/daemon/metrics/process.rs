//! Memory, CPU time and file descriptors of the process, under the names of the Prometheus client libraries.

use prometheus_client::collector::Collector;
use prometheus_client::encoding::DescriptorEncoder;
use prometheus_client::registry::Unit;

use super::{Encoded, counter, gauge};

#[derive(Debug, Default, PartialEq)]
pub(super) struct Process {
    resident_bytes: u64,
    virtual_bytes: u64,
    cpu_seconds: f64,
    /// Start time in seconds since 1970; 0 if unknown.
    started: f64,
    threads: u64,
    open_files: u64,
    /// Maximum number of open files; 0 if unlimited.
    open_files_max: u64,
}

impl Process {
    pub(super) fn look() -> Self {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let open_files = std::fs::read_dir("/proc/self/fd").map_or(0, |dir| dir.count() as u64);
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        let found = Self::parse(&read("/proc/self/stat"), &read("/proc/stat"));
        Self { open_files, open_files_max: limit.current.unwrap_or(0), ..found }
    }

    /// Parses the fields of stat in proc(5), counted from the closing parenthesis, because the program's name may
    /// contain anything: 14 and 15 (ticks in user and kernel mode), 20 (threads), 22 (its start, in ticks since
    /// boot), 23 (virtual bytes) and 24 (resident pages).
    fn parse(own: &str, system: &str) -> Self {
        let fields: Vec<&str> = own.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let ticks_per_second = rustix::param::clock_ticks_per_second().max(1) as f64;
        let boot = system.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse::<f64>().ok());
        Self {
            resident_bytes: field(24) * rustix::param::page_size() as u64,
            virtual_bytes: field(23),
            cpu_seconds: (field(14) + field(15)) as f64 / ticks_per_second,
            started: boot.map_or(0.0, |boot| boot + field(22) as f64 / ticks_per_second),
            threads: field(20),
            ..Self::default()
        }
    }
}

impl Collector for Process {
    fn encode(&self, mut out: DescriptorEncoder) -> Encoded {
        let out = &mut out;
        let (bytes, seconds) = (Some(&Unit::Bytes), Some(&Unit::Seconds));
        counter(out, "process_cpu", "Processor time used", seconds, self.cpu_seconds)?;
        gauge(out, "process_resident_memory", "Memory in use", bytes, self.resident_bytes as f64)?;
        gauge(out, "process_virtual_memory", "Memory that is mapped", bytes, self.virtual_bytes as f64)?;
        gauge(out, "process_open_fds", "Open files and sockets", None, self.open_files as f64)?;
        if self.open_files_max > 0 {
            let most = self.open_files_max as f64;
            gauge(out, "process_max_fds", "Most files and sockets that may be open", None, most)?;
        }
        gauge(out, "process_threads", "Threads", None, self.threads as f64)?;
        if self.started > 0.0 {
            let help = "When the process started, in seconds since 1970";
            gauge(out, "process_start_time", help, seconds, self.started)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_process_is_found_behind_any_name() {
        let mut stat = String::from("42 (a ) b) S 1 1 1 0 -1 0 0 0 0 0 200 100");
        stat.push_str(" 0 0 20 0 7 0 500 9999 3 18446744073709551615");
        let process = Process::parse(&stat, "cpu 1\nbtime 1000\n");
        let ticks = rustix::param::clock_ticks_per_second() as f64;
        let expected = Process {
            resident_bytes: 3 * rustix::param::page_size() as u64,
            virtual_bytes: 9999,
            cpu_seconds: 300.0 / ticks,
            started: 1000.0 + 500.0 / ticks,
            threads: 7,
            ..Process::default()
        };
        assert_eq!(process, expected);
    }

    #[test]
    fn this_process_takes_something() {
        let process = Process::look();
        assert!(process.resident_bytes > 0 && process.open_files > 0 && process.threads > 0 && process.started > 1e9);
    }
}
