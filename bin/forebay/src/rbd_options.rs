//! Options of librbd that can be overridden for an image or a pool: names, defaults, and values, as `rbd config` has them;
//! and Forebay's own.

use forebay_image::OWN_BLOCKS_KEY;
use forebay_qos::{parse_count, parse_operations};

use crate::failure::{Failure, Result};

/// Prefix of the metadata keys of overridden options.
pub const METADATA_PREFIX: &str = "conf_";

/// Option of librbd.
#[derive(Debug, Clone, Copy)]
pub struct RbdOption {
    /// Name of the option.
    pub name: &'static str,
    /// Value where nothing overrides it.
    pub default: &'static str,
    values: OptionValues,
    scope: OptionScope,
}

/// Places that can override an option.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum OptionScope {
    /// A pool or an image.
    Image,
    /// A pool only.
    Pool,
}

/// Values that an option takes.
#[derive(Debug, Clone, Copy)]
enum OptionValues {
    /// `true`, `false`, or a number.
    Switch,
    /// Count from the first to the second, with the suffixes of [`parse_count`].
    Count(u64, u64),
    /// Bytes, with suffixes for powers of 1024.
    Size,
    /// Power of two from 4 KiB to 32 MiB, in bytes.
    Granularity,
    /// Number of at least that.
    Number(f64),
    /// Number from 0 to 1.
    Fraction,
    /// One of these words.
    OneOf(&'static [&'static str]),
    /// Feature bits, or the names of features.
    Features,
    /// Kinds of requests.
    Operations,
    /// Compression setting.
    Compression,
    /// Any text.
    Text,
}

use OptionScope::{Image, Pool};
use OptionValues::{
    Compression, Count, Features, Fraction, Granularity, Number, OneOf, Operations, Size, Switch, Text,
};

const MAX: u64 = u64::MAX;

const fn option(name: &'static str, default: &'static str, values: OptionValues, scope: OptionScope) -> RbdOption {
    RbdOption { name, default, values, scope }
}

/// Options that `rbd config pool ls` of Ceph 16 lists, in its order.
#[rustfmt::skip]
static OPTIONS: [RbdOption; 109] = [
    option("rbd_atime_update_interval", "60", Count(0, MAX), Image),
    option("rbd_balance_parent_reads", "false", Switch, Image),
    option("rbd_balance_snap_reads", "false", Switch, Image),
    option("rbd_blkin_trace_all", "false", Switch, Image),
    option("rbd_blocklist_expire_seconds", "0", Count(0, MAX), Image),
    option("rbd_blocklist_on_break_lock", "true", Switch, Image),
    option("rbd_cache", "true", Switch, Image),
    option("rbd_cache_block_writes_upfront", "false", Switch, Image),
    option("rbd_cache_max_dirty", "25165824", Size, Image),
    option("rbd_cache_max_dirty_age", "1.000000", Number(f64::NEG_INFINITY), Image),
    option("rbd_cache_max_dirty_object", "0", Count(0, MAX), Image),
    option("rbd_cache_policy", "writearound", OneOf(&["writethrough", "writeback", "writearound"]), Image),
    option("rbd_cache_size", "33554432", Size, Image),
    option("rbd_cache_target_dirty", "16777216", Size, Image),
    option("rbd_cache_writethrough_until_flush", "false", Switch, Image),
    option("rbd_clone_copy_on_read", "false", Switch, Image),
    option("rbd_compression_hint", "none", OneOf(&["none", "compressible", "incompressible"]), Image),
    option("rbd_concurrent_management_ops", "10", Count(1, MAX), Image),
    option("rbd_default_clone_format", "auto", OneOf(&["1", "2", "auto"]), Pool),
    option("rbd_default_data_pool", "", Text, Pool),
    option("rbd_default_features", "61", Features, Pool),
    option("rbd_default_map_options", "", Text, Image),
    option("rbd_default_order", "22", Count(0, MAX), Pool),
    option("rbd_default_snapshot_quiesce_mode", "required", OneOf(&["required", "ignore-error", "skip"]), Image),
    option("rbd_default_stripe_count", "0", Count(0, MAX), Pool),
    option("rbd_default_stripe_unit", "0", Size, Pool),
    option("rbd_disable_zero_copy_writes", "true", Switch, Image),
    option("rbd_discard_granularity_bytes", "65536", Granularity, Image),
    option("rbd_enable_alloc_hint", "true", Switch, Image),
    option("rbd_invalidate_object_map_on_timeout", "true", Switch, Image),
    option("rbd_io_scheduler", "simple", OneOf(&["none", "simple"]), Image),
    option("rbd_io_scheduler_simple_max_delay", "0", Count(0, MAX), Image),
    option("rbd_journal_commit_age", "5.000000", Number(f64::NEG_INFINITY), Image),
    option("rbd_journal_max_concurrent_object_sets", "0", Count(0, MAX), Image),
    option("rbd_journal_max_payload_bytes", "16384", Size, Image),
    option("rbd_journal_object_flush_age", "0.000000", Number(f64::NEG_INFINITY), Image),
    option("rbd_journal_object_flush_bytes", "1048576", Size, Image),
    option("rbd_journal_object_flush_interval", "0", Count(0, MAX), Image),
    option("rbd_journal_object_max_in_flight_appends", "0", Count(0, MAX), Image),
    option("rbd_journal_object_writethrough_until_flush", "true", Switch, Image),
    option("rbd_journal_order", "24", Count(12, 26), Pool),
    option("rbd_journal_pool", "", Text, Pool),
    option("rbd_journal_splay_width", "4", Count(0, MAX), Pool),
    option("rbd_localize_parent_reads", "false", Switch, Image),
    option("rbd_localize_snap_reads", "false", Switch, Image),
    option("rbd_mirror_concurrent_image_deletions", "1", Count(1, MAX), Pool),
    option("rbd_mirror_concurrent_image_syncs", "5", Count(0, MAX), Pool),
    option("rbd_mirror_delete_retry_interval", "30.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirror_image_perf_stats_prio", "5", Count(0, 11), Pool),
    option("rbd_mirror_image_policy_migration_throttle", "300", Count(0, MAX), Pool),
    option("rbd_mirror_image_policy_rebalance_timeout", "0.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirror_image_policy_type", "simple", OneOf(&["none", "simple"]), Pool),
    option("rbd_mirror_image_policy_update_throttle_interval", "1.000000", Number(1.0), Pool),
    option("rbd_mirror_image_state_check_interval", "30", Count(1, MAX), Pool),
    option("rbd_mirror_journal_commit_age", "5.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirror_journal_poll_age", "5.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirror_leader_heartbeat_interval", "5", Count(1, MAX), Pool),
    option("rbd_mirror_leader_max_acquire_attempts_before_break", "3", Count(0, MAX), Pool),
    option("rbd_mirror_leader_max_missed_heartbeats", "2", Count(0, MAX), Pool),
    option("rbd_mirror_memory_autotune", "true", Switch, Pool),
    option("rbd_mirror_memory_base", "805306368", Size, Pool),
    option("rbd_mirror_memory_cache_autotune_interval", "30.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirror_memory_cache_min", "134217728", Size, Pool),
    option("rbd_mirror_memory_cache_resize_interval", "5.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirror_memory_expected_fragmentation", "0.150000", Fraction, Pool),
    option("rbd_mirror_memory_target", "4294967296", Size, Pool),
    option("rbd_mirror_perf_stats_prio", "5", Count(0, 11), Pool),
    option("rbd_mirror_sync_point_update_age", "30.000000", Number(f64::NEG_INFINITY), Pool),
    option("rbd_mirroring_delete_delay", "0", Count(0, MAX), Image),
    option("rbd_mirroring_max_mirroring_snapshots", "5", Count(3, MAX), Image),
    option("rbd_mirroring_replay_delay", "0", Count(0, MAX), Image),
    option("rbd_mirroring_resync_after_disconnect", "false", Switch, Image),
    option("rbd_move_parent_to_trash_on_remove", "false", Switch, Image),
    option("rbd_move_to_trash_on_remove", "false", Switch, Image),
    option("rbd_move_to_trash_on_remove_expire_seconds", "0", Count(0, MAX), Image),
    option("rbd_mtime_update_interval", "60", Count(0, MAX), Image),
    option("rbd_non_blocking_aio", "true", Switch, Image),
    option("rbd_parent_cache_enabled", "false", Switch, Image),
    option("rbd_persistent_cache_mode", "disabled", OneOf(&["disabled", "rwl", "ssd"]), Image),
    option("rbd_persistent_cache_path", "/tmp", Text, Image),
    option("rbd_persistent_cache_size", "1073741824", Count(1 << 30, MAX), Image),
    option("rbd_plugins", "", Text, Image),
    option("rbd_qos_bps_burst", "0", Count(0, MAX), Image),
    option("rbd_qos_bps_burst_seconds", "1", Count(1, MAX), Image),
    option("rbd_qos_bps_limit", "0", Count(0, MAX), Image),
    option("rbd_qos_iops_burst", "0", Count(0, MAX), Image),
    option("rbd_qos_iops_burst_seconds", "1", Count(1, MAX), Image),
    option("rbd_qos_iops_limit", "0", Count(0, MAX), Image),
    option("rbd_qos_read_bps_burst", "0", Count(0, MAX), Image),
    option("rbd_qos_read_bps_burst_seconds", "1", Count(1, MAX), Image),
    option("rbd_qos_read_bps_limit", "0", Count(0, MAX), Image),
    option("rbd_qos_read_iops_burst", "0", Count(0, MAX), Image),
    option("rbd_qos_read_iops_burst_seconds", "1", Count(1, MAX), Image),
    option("rbd_qos_read_iops_limit", "0", Count(0, MAX), Image),
    option("rbd_qos_schedule_tick_min", "50", Count(1, MAX), Image),
    option("rbd_qos_write_bps_burst", "0", Count(0, MAX), Image),
    option("rbd_qos_write_bps_burst_seconds", "1", Count(1, MAX), Image),
    option("rbd_qos_write_bps_limit", "0", Count(0, MAX), Image),
    option("rbd_qos_write_iops_burst", "0", Count(0, MAX), Image),
    option("rbd_qos_write_iops_burst_seconds", "1", Count(1, MAX), Image),
    option("rbd_qos_write_iops_limit", "0", Count(0, MAX), Image),
    option("rbd_quiesce_notification_attempts", "10", Count(1, MAX), Image),
    option("rbd_read_from_replica_policy", "default", OneOf(&["default", "balance", "localize"]), Image),
    option("rbd_readahead_disable_after_bytes", "52428800", Size, Image),
    option("rbd_readahead_max_bytes", "524288", Size, Image),
    option("rbd_readahead_trigger_requests", "10", Count(0, MAX), Image),
    option("rbd_request_timed_out_seconds", "30", Count(0, MAX), Image),
    option("rbd_skip_partial_discard", "true", Switch, Image),
    option("rbd_sparse_read_threshold_bytes", "65536", Size, Image),
];

/// Option that only newer versions of Ceph have; it is listed where it is set.
static NEWER: RbdOption = option("rbd_qos_exclude_ops", "0", Operations, Image);

/// Option of Forebay, for images only: caches own blocks of the image in the read cache. librbd does not see its key.
pub static OWN_BLOCKS: RbdOption = option("forebay_cache_own_blocks", "false", Switch, Image);

/// Option of Forebay: compression of the data of an image, or of the embedded store by default. It is a data policy of the
/// backend and no metadata of the image.
pub static COMPRESSION: RbdOption = option("forebay_compression", "none", Compression, Image);

/// Returns the options that `ls` lists of an image or of a pool, by name.
pub fn listed(scope: OptionScope) -> impl Iterator<Item = &'static RbdOption> {
    OPTIONS.iter().chain([&NEWER, &OWN_BLOCKS, &COMPRESSION]).filter(move |option| option.scope <= scope)
}

/// Returns whether an option is listed only where it is set.
pub fn is_newer(option: &RbdOption) -> bool {
    [NEWER.name, OWN_BLOCKS.name, COMPRESSION.name].contains(&option.name)
}

/// Returns the option of that name.
///
/// # Errors
/// [`Invalid`](crate::failure::FailureKind::Invalid) if there is none.
pub fn find(key: &str) -> Result<&'static RbdOption> {
    if !key.starts_with("rbd_") && key != OWN_BLOCKS.name && key != COMPRESSION.name {
        return Err(Failure::invalid(format!("not an rbd option: '{key}'")).hint(format!(
            "options are named rbd_..., for example rbd_qos_iops_limit; Forebay's own are {} and {}",
            OWN_BLOCKS.name, COMPRESSION.name
        )));
    }
    let found = OPTIONS.iter().chain([&NEWER, &OWN_BLOCKS, &COMPRESSION]).find(|option| option.name == key);
    found.ok_or_else(|| {
        Failure::invalid(format!("invalid config key: '{key}'")).hint("'forebay config pool ls' lists the options")
    })
}

/// Returns the name of the option that a metadata key of an image or a pool overrides.
pub fn overridden_by(key: &str) -> Option<&str> {
    if key == OWN_BLOCKS_KEY {
        return Some(OWN_BLOCKS.name);
    }
    // Who fences an owner looks for the key alone. Compression is no metadata.
    key.strip_prefix(METADATA_PREFIX).filter(|name| ![OWN_BLOCKS.name, COMPRESSION.name].contains(name))
}

/// Returns whether a value switches an option on, as librbd reads it.
pub fn is_on(value: &str) -> bool {
    value.eq_ignore_ascii_case("true") || value.parse::<i32>().is_ok_and(|number| number != 0)
}

impl RbdOption {
    /// Returns the metadata key that overrides it.
    pub fn metadata_key(&self) -> String {
        if self.name == OWN_BLOCKS.name { OWN_BLOCKS_KEY.into() } else { format!("{METADATA_PREFIX}{}", self.name) }
    }

    /// Checks a value for an image or a pool.
    ///
    /// # Errors
    /// [`Invalid`](crate::failure::FailureKind::Invalid) if the option cannot be overridden there, or not by this value.
    pub fn check(&self, value: &str, scope: OptionScope) -> Result<()> {
        let name = self.name;
        if self.scope > scope {
            return Err(Failure::invalid(format!("{name} cannot be set for an image"))
                .hint(format!("set it for the pool: forebay config pool set POOL {name} {value}")));
        }
        if name == OWN_BLOCKS.name && scope == Pool {
            return Err(Failure::invalid(format!("{name} cannot be set for a pool"))
                .hint(format!("set it for an image: forebay config image set POOL/IMAGE {name} {value}")));
        }
        let invalid = |why: String| Err(Failure::invalid(format!("invalid value of {name}: {why}")));
        if value.is_empty() {
            return invalid("it is empty".into());
        }
        let wrong = |what: String| format!("'{value}' is not {what}");
        let checked = match self.values {
            Switch => match value.to_ascii_lowercase().as_str() {
                "true" | "false" => Ok(()),
                other => other.parse::<i32>().map(drop).map_err(|_| wrong("true or false".into())),
            },
            Count(least, most) => parse_count(value).and_then(|count| match (least..=most).contains(&count) {
                true => Ok(()),
                false if most == MAX => Err(wrong(format!("{least} or more"))),
                false => Err(wrong(format!("from {least} to {most}"))),
            }),
            Size => parse_size(value).map(drop).ok_or_else(|| wrong("a number of bytes, such as 64K".into())),
            Granularity => parse_size(value)
                .filter(|size| size.is_power_of_two() && (4 << 10..=32 << 20).contains(size))
                .map(drop)
                .ok_or_else(|| wrong("a power of two from 4K to 32M".into())),
            Number(least) => match value.parse::<f64>() {
                Ok(number) if number >= least => Ok(()),
                Ok(_) => Err(wrong(format!("{least} or more"))),
                Err(_) => Err(wrong("a number".into())),
            },
            Fraction => match value.parse::<f64>() {
                Ok(number) if (0.0..=1.0).contains(&number) => Ok(()),
                _ => Err(wrong("a number from 0 to 1".into())),
            },
            OneOf(words) => match words.contains(&value) {
                true => Ok(()),
                false => Err(wrong(format!("one of {}", words.join(", ")))),
            },
            Features => match value.parse::<u64>() {
                Ok(bits) if bits < 1 << FEATURES.len() => Ok(()),
                Err(_) if value.split(',').all(|name| FEATURES.contains(&name.trim())) => Ok(()),
                _ => Err(wrong(format!("a sum of feature bits, or names out of {}", FEATURES.join(", ")))),
            },
            Operations => parse_operations(value).map(drop),
            Compression => value.parse::<forebay_block::Compression>().map(drop).map_err(|error| error.to_string()),
            Text => Ok(()),
        };
        checked.or_else(invalid)
    }
}

/// Features of images, by bit.
const FEATURES: [&str; 8] =
    ["layering", "striping", "exclusive-lock", "object-map", "fast-diff", "deep-flatten", "journaling", "data-pool"];

/// Parses a size as Ceph does: a number, with one of the suffixes B, K, M, G, T, P and E for powers of 1024, or Ki, Mi and
/// so on.
fn parse_size(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let power = match &text[digits.len()..] {
        "" | "B" => 0,
        suffix => {
            let (letter, rest) = suffix.split_at(1);
            ["", "i"].contains(&rest).then(|| "KMGTPE".find(letter)).flatten()? as u32 + 1
        }
    };
    digits.parse::<u64>().ok()?.checked_mul(1024_u64.checked_pow(power)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_those_that_rbd_lists() {
        assert!(OPTIONS.is_sorted_by_key(|option| option.name));
        assert_eq!((listed(Pool).count(), listed(Image).count()), (OPTIONS.len() + 3, 77 + 3));
        for option in &OPTIONS {
            let is_text = matches!(option.values, Text | OneOf(_));
            assert!(is_text || option.check(option.default, Pool).is_ok(), "{}", option.name);
        }
        assert!(OWN_BLOCKS.check("true", Image).is_ok() && OWN_BLOCKS.check("true", Pool).is_err());
        assert!(
            OWN_BLOCKS.check("maybe", Image).is_err() && is_on("True") && is_on("1") && !is_on("0") && !is_on("on")
        );
        for setting in ["none", "lz4", "zstd", "zstd:19", "deflate:1"] {
            assert!(COMPRESSION.check(setting, Image).is_ok() && COMPRESSION.check(setting, Pool).is_ok());
        }
        let error = COMPRESSION.check("gzip", Image).expect_err("no setting");
        assert!(error.message.contains("deflate[:LEVEL]"), "{}", error.message);
        assert_eq!(overridden_by(&COMPRESSION.metadata_key()), None);
        for option in listed(Pool).filter(|option| option.name != COMPRESSION.name) {
            assert_eq!(overridden_by(&option.metadata_key()), Some(option.name));
        }
        assert_eq!(find("rbd_qos_iops_limit").expect("known").default, "0");
        for key in ["rbd_nosuch", "forebay_nosuch", "osd_max", "", "conf_rbd_cache"] {
            assert!(find(key).is_err(), "{key}");
        }
    }

    /// Compares with the values that `rbd config pool set` of Ceph 16.2 took and refused.
    #[test]
    fn values_are_taken_as_by_rbd() {
        let takes = |key: &str| {
            let values = ["x", "0", "1", "1K", "1Ki", "1.5", "true", "yes", "-1", "33", "2000000000", "1T", ""];
            let option = find(key).expect("known");
            values.into_iter().filter(|value| option.check(value, Pool).is_ok()).collect::<Vec<_>>()
        };
        for (key, want) in [
            ("rbd_qos_iops_limit", &["0", "1", "1K", "33", "2000000000", "1T"][..]),
            ("rbd_qos_iops_burst_seconds", &["1", "1K", "33", "2000000000", "1T"]),
            ("rbd_cache", &["0", "1", "true", "-1", "33", "2000000000"]),
            ("rbd_cache_size", &["0", "1", "1K", "1Ki", "33", "2000000000", "1T"]),
            ("rbd_cache_max_dirty_age", &["0", "1", "1.5", "-1", "33", "2000000000"]),
            ("rbd_cache_policy", &[]),
            ("rbd_journal_order", &[]),
            ("rbd_discard_granularity_bytes", &[]),
            ("rbd_mirror_memory_expected_fragmentation", &["0", "1"]),
            ("rbd_mirror_perf_stats_prio", &["0", "1"]),
            ("rbd_mirroring_max_mirroring_snapshots", &["1K", "33", "2000000000", "1T"]),
            ("rbd_persistent_cache_size", &["2000000000", "1T"]),
            ("rbd_default_clone_format", &["1"]),
            ("rbd_default_features", &["0", "1", "33"]),
            ("rbd_plugins", &["x", "0", "1", "1K", "1Ki", "1.5", "true", "yes", "-1", "33", "2000000000", "1T"]),
        ] {
            assert_eq!(takes(key), want, "{key}");
        }
        let features = find("rbd_default_features").expect("known");
        assert!(features.check("1", Image).is_err() && features.check("layering,deep-flatten", Pool).is_ok());
        assert!(find("rbd_cache_policy").expect("known").check("writeback", Image).is_ok());
        assert!(find("rbd_qos_exclude_ops").expect("known").check("read,discard", Image).is_ok());
    }
}
