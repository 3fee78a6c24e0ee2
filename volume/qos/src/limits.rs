//! Limits of a volume, and their text in librbd's options.

use std::time::Duration;

use forebay_block::BlockRequest;

/// Limit of a rate, with its burst: `rbd_qos_X_limit`, `rbd_qos_X_burst` and `rbd_qos_X_burst_seconds`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Requests or bytes per second in the long run; 0 for no limit.
    pub rate: u64,
    /// Requests or bytes per second in a burst; 0 for `rate`.
    pub burst: u64,
    /// Length of a burst in seconds, at least 1.
    pub burst_seconds: u64,
}

impl Default for RateLimit {
    fn default() -> Self {
        Self { rate: 0, burst: 0, burst_seconds: 1 }
    }
}

impl RateLimit {
    /// Creates a limit without a burst.
    pub fn of(rate: u64) -> Self {
        Self { rate, ..Self::default() }
    }

    /// Returns whether the burst is below the rate, which is an error of its author; such a burst is ignored.
    pub fn has_invalid_burst(&self) -> bool {
        self.burst > 0 && self.burst < self.rate
    }

    /// Returns the limit that is in force: an invalid burst is replaced by none, as librbd does.
    pub(crate) fn in_force(self) -> Self {
        match self.has_invalid_burst() {
            true => Self { burst: self.rate, ..Self::of(self.rate) },
            false => Self { burst: self.burst.max(self.rate), ..self },
        }
    }
}

/// Kinds of requests that no limit applies to: the bits of `rbd_qos_exclude_ops`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExcludedOperations(pub u64);

impl ExcludedOperations {
    /// Returns whether a request is excluded.
    fn has(self, request: &BlockRequest) -> bool {
        let bit = match request {
            BlockRequest::Read(_) => 1,
            BlockRequest::Write { .. } => 2,
            BlockRequest::Discard(_) => 4,
            BlockRequest::WriteZeroes { .. } => 8,
            BlockRequest::CompareAndWrite { .. } => 16,
            BlockRequest::Flush => 0,
        };
        self.0 & bit != 0
    }
}

/// Limits of a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QosLimits {
    /// Requests per second.
    pub iops: RateLimit,
    /// Bytes per second.
    pub bps: RateLimit,
    /// Reads per second.
    pub read_iops: RateLimit,
    /// Changes per second: writes, discards, zeroes, compare-and-writes.
    pub write_iops: RateLimit,
    /// Bytes per second of reads.
    pub read_bps: RateLimit,
    /// Bytes per second of changes.
    pub write_bps: RateLimit,
    /// Minimum time between two points in time at which waiting requests continue.
    pub tick: Duration,
    /// Kinds of requests without limits.
    pub excluded: ExcludedOperations,
}

impl Default for QosLimits {
    fn default() -> Self {
        let none = RateLimit::default();
        Self {
            iops: none,
            bps: none,
            read_iops: none,
            write_iops: none,
            read_bps: none,
            write_bps: none,
            tick: Duration::from_millis(50),
            excluded: ExcludedOperations::default(),
        }
    }
}

/// Names of the limits, as in `rbd_qos_NAME_limit`.
const NAMES: [&str; 6] = ["iops", "bps", "read_iops", "write_iops", "read_bps", "write_bps"];

impl QosLimits {
    /// Returns the limits with their names, as in `rbd_qos_NAME_limit`.
    pub fn named(&self) -> [(&'static str, RateLimit); 6] {
        let limits = [self.iops, self.bps, self.read_iops, self.write_iops, self.read_bps, self.write_bps];
        std::array::from_fn(|at| (NAMES[at], limits[at]))
    }

    fn named_mut(&mut self) -> [(&'static str, &mut RateLimit); 6] {
        [
            (NAMES[0], &mut self.iops),
            (NAMES[1], &mut self.bps),
            (NAMES[2], &mut self.read_iops),
            (NAMES[3], &mut self.write_iops),
            (NAMES[4], &mut self.read_bps),
            (NAMES[5], &mut self.write_bps),
        ]
    }

    /// Returns whether there is any limit.
    pub fn has_any(&self) -> bool {
        self.named().iter().any(|(_, limit)| limit.rate > 0)
    }

    /// Returns whether no limit applies to a request: it is a flush, or of an excluded kind.
    pub fn excludes(&self, request: &BlockRequest) -> bool {
        matches!(request, BlockRequest::Flush) || self.excluded.has(request)
    }

    /// Reads limits from options by name, such as `rbd_qos_iops_limit`; options that are not set have librbd's default.
    /// Returns also what is wrong with options that were ignored for that.
    pub fn from_options<'a>(option: impl Fn(&str) -> Option<&'a str>) -> (Self, Vec<String>) {
        let mut limits = Self::default();
        let mut ignored = Vec::new();
        let mut read = |name: String, least: u64, value: &mut u64| {
            match option(&name).map(parse_count) {
                Some(Ok(count)) if count >= least => *value = count,
                Some(Ok(count)) => ignored.push(format!("{name} is {count}, but must be {least} at least")),
                Some(Err(error)) => ignored.push(format!("{name}: {error}")),
                None => {}
            };
        };
        let mut tick_ms = limits.tick.as_millis() as u64;
        read("rbd_qos_schedule_tick_min".into(), 1, &mut tick_ms);
        for (name, limit) in limits.named_mut() {
            read(format!("rbd_qos_{name}_limit"), 0, &mut limit.rate);
            read(format!("rbd_qos_{name}_burst"), 0, &mut limit.burst);
            read(format!("rbd_qos_{name}_burst_seconds"), 1, &mut limit.burst_seconds);
        }
        limits.tick = Duration::from_millis(tick_ms);
        match option("rbd_qos_exclude_ops").map(parse_operations) {
            Some(Ok(excluded)) => limits.excluded = excluded,
            Some(Err(error)) => ignored.push(format!("rbd_qos_exclude_ops: {error}")),
            None => {}
        }
        for (name, limit) in limits.named() {
            if limit.has_invalid_burst() {
                let RateLimit { rate, burst, .. } = limit;
                ignored.push(format!("rbd_qos_{name}_burst {burst} is less than rbd_qos_{name}_limit {rate}"));
            }
        }
        (limits, ignored)
    }
}

/// Parses a count as Ceph does: a decimal number, with one of the suffixes K, M, G, T, P and E for powers of 1000.
///
/// # Errors
/// A text that says what is wrong.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let wrong = || format!("'{text}' is no count: write a number such as 1000, or 5M for 5 million");
    let power = text.chars().last().and_then(|last| "KMGTPE".find(last));
    let (digits, scale) = match power {
        Some(power) => (&text[..text.len() - 1], 1000_u64.pow(power as u32 + 1)),
        None => (text, 1),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let count = if number > i64::MAX as u64 { None } else { number.checked_mul(scale) };
    count.ok_or_else(|| format!("'{text}' is too large"))
}

/// Parses the kinds of requests of `rbd_qos_exclude_ops`: a number with their bits, or their names.
///
/// # Errors
/// A text that says what is wrong.
pub fn parse_operations(text: &str) -> Result<ExcludedOperations, String> {
    const OPERATIONS: [&str; 5] = ["read", "write", "discard", "write_same", "compare_and_write"];
    if text.trim().is_empty() {
        return Ok(ExcludedOperations(0));
    }
    let bits = match text.trim().parse::<u64>() {
        Ok(bits) => bits,
        Err(_) => text.split(',').map(str::trim).try_fold(0, |bits, name| {
            let found = OPERATIONS.iter().position(|&operation| operation == name);
            let known = OPERATIONS.join(", ");
            found.map(|at| bits | 1 << at).ok_or_else(|| format!("'{name}' is no operation; there are {known}"))
        })?,
    };
    match bits >> OPERATIONS.len() {
        0 => Ok(ExcludedOperations(bits)),
        _ => Err(format!("{bits} has bits of no operation; the bits of all are {}", (1 << OPERATIONS.len()) - 1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_those_of_ceph() {
        for (text, want) in [
            ("0", 0),
            ("1000", 1000),
            ("007", 7),
            ("+5", 5),
            ("1K", 1000),
            ("1M", 1_000_000),
            ("18E", 18 * 10_u64.pow(18)),
        ] {
            assert_eq!(parse_count(text), Ok(want), "{text}");
        }
        for text in [
            "",
            "K",
            "1k",
            "1Ki",
            "1_M",
            "10MB",
            "0x10",
            "12B",
            "12 K",
            "-5",
            "1.5",
            "abc",
            "20E",
            "18446744073709551615",
        ] {
            assert!(parse_count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn limits_are_read_from_options() {
        let set = [
            ("rbd_qos_iops_limit", "1000"),
            ("rbd_qos_iops_burst", "5"),
            ("rbd_qos_write_bps_limit", "5M"),
            ("rbd_qos_write_bps_burst", "10M"),
            ("rbd_qos_write_bps_burst_seconds", "60"),
            ("rbd_qos_read_iops_limit", "many"),
            ("rbd_qos_schedule_tick_min", "0"),
            ("rbd_qos_exclude_ops", "discard,write_same"),
        ];
        let option = |name: &str| set.iter().find(|(known, _)| *known == name).map(|(_, value)| *value);
        let (limits, ignored) = QosLimits::from_options(option);
        let write_bps = RateLimit { rate: 5_000_000, burst: 10_000_000, burst_seconds: 60 };
        let iops = RateLimit { rate: 1000, burst: 5, burst_seconds: 1 };
        let want = QosLimits { iops, write_bps, excluded: ExcludedOperations(12), ..QosLimits::default() };
        assert_eq!(limits, want);
        assert_eq!(ignored.len(), 3, "{ignored:?}");
        assert_eq!(limits.iops.in_force(), RateLimit { rate: 1000, burst: 1000, burst_seconds: 1 });
        assert!(limits.has_any() && !QosLimits::default().has_any());
        assert_eq!(QosLimits::from_options(|_| None), (QosLimits::default(), Vec::new()));
    }

    #[test]
    fn operations_have_names_and_bits() {
        assert_eq!(parse_operations("read, compare_and_write"), Ok(ExcludedOperations(17)));
        assert_eq!(parse_operations("31"), Ok(ExcludedOperations(31)));
        assert_eq!(parse_operations(""), Ok(ExcludedOperations(0)));
        assert!(parse_operations("32").is_err() && parse_operations("read,erase").is_err());
    }
}
