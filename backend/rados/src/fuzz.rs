//! Entry points for fuzzers and property tests: decode bytes from monitors and OSDs with all decoders.  Must neither
//! panic, nor take long, nor use much memory.

use forebay_block::Extent;
use forebay_messenger::wire::PayloadReader;
use forebay_reactor::{Buf, BufList};

use crate::config::dns::{RESPONSE_LEN_MAX, ResolvConf, SrvQuery};
use crate::config::{Conf, find_key, parse_monitors};
use crate::crush::CrushMap;
use crate::map::{Incremental, MonMap, OsdMap, PgId};
use crate::monitor::wire as monitor;
use crate::osd::hobject::HObject;
use crate::osd::wire::{Backoff, OsdReply};
use crate::pool::answer;

/// Decodes monitor maps, OSD maps and incremental maps, and uses the results.
pub fn maps(data: &[u8]) {
    let _ = MonMap::decode(data);
    let whole = OsdMap::decode_unverified(data);
    let change = Incremental::decode_unverified(data);
    if let Ok(mut map) = whole {
        let groups: Vec<PgId> =
            map.pools.keys().take(4).flat_map(|&pool| (0..4).map(move |seed| PgId { pool, seed })).collect();
        for &pg in &groups {
            map.map_pg(pg);
        }
        if let Ok(change) = change {
            let _ = map.apply(change);
            for pg in groups {
                map.map_pg(pg);
            }
        }
    }
}

/// Decodes a CRUSH map and computes placements with it.
pub fn crush(data: &[u8]) {
    let Some((&seed, data)) = data.split_first() else { return };
    let Ok(map) = CrushMap::decode(data) else { return };
    let weights = [0x1_0000, 0x8000, 0, 0x1_0000, 0x1_0000, 0x4000, 0x1_0000, 0x1_0000];
    for rule in 0..map.rules().min(4) {
        for max in [1, 3, 6] {
            let placed = map.place(rule, seed.into(), max, &weights, i64::from(seed % 3) - 1);
            assert!(placed.len() <= max);
        }
    }
}

/// Decodes messages of monitors and OSDs.
pub fn messages(data: &[u8]) {
    let Some((&version, data)) = data.split_first() else { return };
    let _ = monitor::osd_maps(data);
    let _ = monitor::mon_map(data);
    let _ = monitor::config(data);
    let _ = monitor::command_ack(data);
    let _ = monitor::pool_reply(data);
    let _ = monitor::statfs_reply(data);
    let _ = monitor::auth_reply(data);
    let _ = Backoff::decode(data);
    let _ = monitor::version_reply(data);
    let _ = crate::pool::shared::watchers(data);
    let _ = crate::pool::shared::notified(data);
    crate::osd::watch::decode_any(version.into(), data);
    let list = || BufList::from(Buf::copy_of(data));
    let payload = BufList::zeroes(usize::from(version) * 3);
    if let Ok(reply) = OsdReply::decode(version.into(), data, payload) {
        let output: usize = reply.ops.iter().map(|(_, data)| data.len()).sum();
        assert!(output <= usize::from(version) * 3);
    }
    let mut reader = PayloadReader::new(data, "anything");
    if let Ok(one) = HObject::decode(&mut reader) {
        assert!(one == one.clone() && (one.max || one < HObject { max: true, ..HObject::default() }));
    }
    let _ = answer::stat(&list());
    let _ = answer::extents(&list());
    let _ = answer::pairs(&list());
    let _ = answer::attrs(&list());
    let _ = answer::snap_set(&list());
    let _ = answer::names(&list());
    if let Ok(read) = answer::sparse(list(), Extent::new(4096, 65536)) {
        assert_eq!(read.fill(Extent::new(4096, 65536)).len(), 65536);
    }
}

/// Decodes responses of name servers, and parses resolver settings.
pub fn dns(data: &[u8]) {
    let response = &data[..data.len().min(RESPONSE_LEN_MAX)];
    if let Ok(targets) = SrvQuery::new(0, "_ceph-mon._tcp").decode(response) {
        assert!(targets.len() <= response.len() / 11);
        assert!(targets.iter().all(|(host, _)| !host.is_empty() && host.len() < 128 * 64));
    }
    if let Ok(text) = std::str::from_utf8(data) {
        let settings = ResolvConf::parse(text);
        assert!(settings.servers.len() + settings.search.len() <= data.len());
    }
}

/// Parses configuration files, keyrings and lists of monitors.
pub fn config(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    if let Ok(conf) = Conf::parse(text, "ceph", "admin", "host") {
        for name in ["mon_host", "keyring", "a", "b"] {
            let _ = conf.get(name);
        }
    }
    let _ = find_key(text, "client.admin");
    let _ = parse_monitors(text);
}
