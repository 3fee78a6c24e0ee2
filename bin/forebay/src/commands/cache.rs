//! `cache status` and `cache clear`.

use std::time::Duration;

use crate::api::ReadCacheInfo;
use crate::cli::{CacheCommand, GlobalArgs};
use crate::client::session::{CommandSession, STATUS_TIMEOUT};
use crate::failure::Result;
use crate::ops::{ClearReadCache, GetReadCache};
use crate::output::{Output, fields};
use crate::units::{Size, percent};

/// Time for emptying a cache whose disk is opened again.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a command on the daemon's read cache.
pub fn run(global: &GlobalArgs, output: Output, command: CacheCommand) -> Result<()> {
    let daemon = CommandSession::daemon(global)?;
    match command {
        CacheCommand::Status => output.print(&daemon.call(&GetReadCache, Some(STATUS_TIMEOUT), |_| {})?, show),
        CacheCommand::Clear => {
            output.print(&daemon.call(&ClearReadCache, Some(CLEAR_TIMEOUT), |_| {})?, |_| String::new())
        }
    }
}

/// Returns one line about the layers of the cache and its hits.
pub fn summary(info: &ReadCacheInfo) -> String {
    let hits = info.hit_percent().map_or_else(String::new, |hits| format!(", {hits:.1} % hits"));
    let disk = match info.disk.as_str() {
        "none" => String::new(),
        "on" => format!(", {} of {} on disk", Size(info.disk_used), Size(info.disk_capacity)),
        _ => format!(", the disk is off ({})", info.reason.as_deref().unwrap_or("unknown reason")),
    };
    format!("{} of {} in memory{disk}{hits}", Size(info.memory_used), Size(info.memory_capacity))
}

fn show(info: &ReadCacheInfo) -> String {
    let used = |used, capacity| format!("{} of {} ({})", Size(used), Size(capacity), percent(used, capacity));
    let mut rows = vec![("memory", used(info.memory_used, info.memory_capacity))];
    let disk = match info.disk.as_str() {
        "on" => used(info.disk_used, info.disk_capacity),
        state => state.to_owned() + &info.reason.as_ref().map_or_else(String::new, |why| format!(": {why}")),
    };
    rows.push(("disk", disk));
    if let Some(path) = &info.path {
        rows.push(("path", path.display().to_string()));
    }
    let hits = info.hit_percent().map_or_else(|| "no reads".to_owned(), |hits| format!("{hits:.1} %"));
    rows.extend([
        ("zeroes", info.zeroes.to_string()),
        ("hits", hits),
        ("from memory", info.hits_memory.to_string()),
        ("from disk", info.hits_disk.to_string()),
        ("known zeroes", info.hits_zero.to_string()),
        ("shared reads", info.hits_shared.to_string()),
        ("misses", info.misses.to_string()),
        ("read by clones", Size(info.read_bytes).to_string()),
        ("read from pools", Size(info.fetched_bytes).to_string()),
    ]);
    if let Some(hits) = info.own.hit_percent() {
        let own = &info.own;
        rows.extend([
            ("own blocks", format!("{hits:.1} % hits, {} misses, {} bypassed", own.misses, own.bypassed)),
            ("own invalidated", own.invalidated.to_string()),
        ]);
    }
    rows.extend([
        ("evicted", format!("{} from memory, {} from disk", info.evicted_memory, info.evicted_disk)),
        ("written to disk", format!("{} ({} left out, since the disk was behind)", info.written, info.dropped)),
        ("disk errors", info.disk_errors.to_string()),
    ]);
    fields(&rows)
}

#[cfg(test)]
mod tests {
    use forebay_readcache::{DiskState, ReadCacheStats, SourceStats};

    use super::*;

    #[test]
    fn the_summary_says_what_is_off_and_why() {
        let stats = ReadCacheStats { memory_capacity: 64 << 20, memory_bytes: 1 << 20, ..ReadCacheStats::default() };
        assert_eq!(summary(&stats.clone().into()), "1 MiB of 64 MiB in memory");
        let on = ReadCacheStats {
            disk: DiskState::On,
            disk_capacity: 1 << 30,
            disk_bytes: 1 << 29,
            parents: SourceStats { hits_memory: 2, hits_joined: 1, misses: 1, ..SourceStats::default() },
            ..stats.clone()
        };
        assert_eq!(summary(&on.into()), "1 MiB of 64 MiB in memory, 512 MiB of 1 GiB on disk, 75.0 % hits");
        let own = SourceStats { hits_disk: 3, misses: 1, ..SourceStats::default() };
        let shown = show(&ReadCacheStats { own, invalidated: 7, ..stats.clone() }.into());
        assert!(shown.contains("75.0 % hits, 1 misses, 0 bypassed") && shown.contains("own invalidated"), "{shown}");
        let off = ReadCacheStats { disk: DiskState::Off("8 errors".into()), ..stats };
        assert_eq!(summary(&off.clone().into()), "1 MiB of 64 MiB in memory, the disk is off (8 errors)");
        let shown = show(&off.into());
        assert!(shown.lines().any(|line| line.starts_with("disk: ") && line.ends_with(" off: 8 errors")), "{shown}");
    }
}
