//! Opening of a store on several devices: identification of the devices, and what each one is trusted with.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions};

use super::device::ColumnDevice;
use super::set::ColumnSet;
use crate::core::corrupt;
use crate::format::BLOCK;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::devices::{DeviceRecord, DeviceTable, PLACES, RecordedState, TABLE_MAX};
use crate::format::superblock::{SEGMENTS_START, StoreSuperblock};
use crate::recover::read_superblock;
use crate::store::open_file;

/// Opened devices of a store, and the checkpoint to start from.
pub struct OpenedSet {
    pub set: Rc<ColumnSet>,
    /// Superblock of the store, with its current number of segments.
    pub superblock: StoreSuperblock,
    pub anchor: Anchor,
    /// Set if a newer checkpoint may have been lost.
    pub anchor_lost: bool,
    /// Set if one copy of a superblock was damaged.
    pub one_superblock: bool,
}

/// Device that was found at a path.
pub(super) struct FoundDevice {
    pub path: PathBuf,
    pub file: File,
    pub superblock: StoreSuperblock,
    /// Newest readable device table on it.
    pub table: Option<DeviceTable>,
    /// Newest anchors on it, one for each slot.
    pub anchors: Vec<Option<Anchor>>,
    /// Set if one copy of the superblock is damaged.
    pub one_damaged: bool,
    /// Set if the copies of the superblock have different feature bits.
    pub features_differ: bool,
}

impl FoundDevice {
    fn newest_anchor(&self) -> Option<u64> {
        self.anchors.iter().flatten().map(|anchor| anchor.generation).max()
    }
}

/// Result of looking at paths.
pub(super) struct FoundDevices {
    pub devices: Vec<FoundDevice>,
    /// Paths that hold no usable device of the store, with the reason.
    pub unusable: Vec<(PathBuf, String)>,
}

/// Looks at every path, and sorts out what is not a device of the store. `expected` is the UUID of the store, if known.
///
/// # Errors
/// `Busy` if a device is in use; `Invalid` if no device of a store is there, or one is there twice; `Unsupported` for a
/// store of a newer version.
pub(super) async fn find_devices(
    paths: &[PathBuf],
    expected: Option<[u8; 16]>,
    how: OpenOptions,
) -> Result<FoundDevices> {
    let mut found = FoundDevices { devices: Vec::new(), unusable: Vec::new() };
    for path in paths {
        match look(path.clone(), how).await {
            Ok(device) => found.devices.push(device),
            Err(error) if matches!(error.kind(), ErrorKind::Busy | ErrorKind::Unsupported) => return Err(error),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                found.unusable.push((path.clone(), format!("nothing is at {}", path.display())));
            }
            Err(error) => found.unusable.push((path.clone(), error.to_string())),
        }
    }
    let uuid = match expected {
        Some(uuid) => uuid,
        None => most_frequent(&found.devices).ok_or_else(|| {
            let why: Vec<&str> = found.unusable.iter().map(|(_, why)| &why[..]).collect();
            Error::new(ErrorKind::Invalid, format!("none of the paths has a device of a store: {}", why.join("; ")))
        })?,
    };
    let (ours, foreign): (Vec<_>, Vec<_>) =
        found.devices.into_iter().partition(|device| device.superblock.uuid == uuid);
    for device in foreign {
        let why = format!("{} is a device of another store", device.path.display());
        found.unusable.push((device.path, why));
    }
    let mut by_id: BTreeMap<[u8; 16], &FoundDevice> = BTreeMap::new();
    for device in &ours {
        let identity = device.superblock.device.expect("a device of a set has an identity");
        if let Some(other) = by_id.insert(identity.id, device) {
            let text = format!(
                "{} and {} are both device {} of the store: one is a copy; leave it out",
                other.path.display(),
                device.path.display(),
                identity.number
            );
            return Err(Error::new(ErrorKind::Invalid, text));
        }
    }
    if ours.is_empty() {
        let why: Vec<&str> = found.unusable.iter().map(|(_, why)| &why[..]).collect();
        return Err(Error::new(ErrorKind::NotFound, format!("no device of the store is there: {}", why.join("; "))));
    }
    Ok(FoundDevices { devices: ours, unusable: found.unusable })
}

/// Returns the UUID of the store that most of the devices belong to.
fn most_frequent(devices: &[FoundDevice]) -> Option<[u8; 16]> {
    let mut counts: BTreeMap<[u8; 16], usize> = BTreeMap::new();
    devices.iter().for_each(|device| *counts.entry(device.superblock.uuid).or_default() += 1);
    counts.into_iter().max_by_key(|(_, count)| *count).map(|(uuid, _)| uuid)
}

async fn look(path: PathBuf, how: OpenOptions) -> Result<FoundDevice> {
    let file = open_file(&path, how).await?;
    let found = read_superblock(&file).await?;
    let (superblock, one_damaged, features_differ) = (found.superblock, found.one_damaged, found.features_differ);
    if superblock.device.is_none() {
        let text = format!("{} is a store of its own, not a device of one on several devices", path.display());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    let store = superblock.store_number();
    let mut table: Option<DeviceTable> = None;
    for at in PLACES {
        let (result, bytes) = file.read_at(BufMut::with_capacity(TABLE_MAX), at).await;
        result.map_err(|error| Error::from_io(error, format!("reading byte {at} of {}", path.display())))?;
        if let Ok(found) = DeviceTable::decode(&bytes, store)
            && table.as_ref().is_none_or(|newest| found.generation > newest.generation)
        {
            table = Some(found);
        }
    }
    let mut anchors = Vec::new();
    for slot in SLOTS {
        let mut newest: Option<Anchor> = None;
        for at in slot {
            let (result, block) = file.read_at(BufMut::with_capacity(BLOCK), at).await;
            result.map_err(|error| {
                Error::from_io(error, format!("reading an anchor at byte {at} of {}", path.display()))
            })?;
            if let Ok(anchor) = Anchor::decode(&block, store)
                && newest.as_ref().is_none_or(|newest| anchor.generation > newest.generation)
            {
                newest = Some(anchor);
            }
        }
        anchors.push(newest);
    }
    Ok(FoundDevice { path, file, superblock, table, anchors, one_damaged, features_differ })
}

/// Device of the table, with what was found of it.
struct Candidate<'a> {
    record: &'a DeviceRecord,
    found: Option<&'a FoundDevice>,
    /// Reason why it is not usable, or not trusted.
    reason: String,
    /// Set if its content is older than what was durable on it.
    past: bool,
}

impl Candidate<'_> {
    fn is_trusted(&self) -> bool {
        self.record.state == RecordedState::Active && self.found.is_some() && !self.past
    }
}

/// Matches the devices of the table with those that were found.
fn match_devices<'a>(newest: &'a DeviceTable, found: &'a FoundDevices) -> Vec<Candidate<'a>> {
    let mut candidates: Vec<Candidate<'a>> = newest
        .devices
        .iter()
        .map(|record| {
            let id_of = |device: &&FoundDevice| device.superblock.device.map(|identity| identity.id) == Some(record.id);
            let mut reason = String::new();
            let needed = SEGMENTS_START + u64::from(record.slots) * u64::from(newest.column_blocks) * BLOCK as u64;
            let device = found.devices.iter().find(id_of).filter(|device| {
                let size = device.file.info().size;
                if size < needed {
                    reason = format!("it was cut short: {size} bytes of {needed}");
                }
                size >= needed
            });
            if device.is_none() && reason.is_empty() {
                let at_path = found.unusable.iter().find(|(path, _)| path.as_os_str() == record.path.as_str());
                reason = at_path.map_or_else(|| "no path has it".into(), |(_, why)| why.clone());
            }
            Candidate { record, found: device, reason, past: false }
        })
        .collect();
    let active = |candidate: &&Candidate<'_>| candidate.record.state == RecordedState::Active;
    let mut generations: Vec<u64> = candidates
        .iter()
        .filter(active)
        .filter_map(|candidate| candidate.found)
        .flat_map(|device| device.anchors.iter().flatten().map(|anchor| anchor.generation))
        .collect();
    generations.sort_unstable();
    generations.dedup();
    // A crash may have left a device without the newest anchor, or the newest table, but never without those before.
    let anchor_least = generations.iter().rev().nth(1).copied().unwrap_or(0);
    for candidate in &mut candidates {
        let Some(device) = candidate.found else { continue };
        let table = device.table.as_ref().map_or(0, |table| table.generation);
        let anchor = device.newest_anchor();
        // One that was just added lacks nothing, whatever anchors were copied to it.
        let mut columns = newest.groups.iter().flat_map(|group| &group.columns);
        let has_columns = columns.any(|column| column.device == candidate.record.number);
        if candidate.record.state == RecordedState::Active
            && has_columns
            && (table + 1 < newest.generation || anchor.is_none_or(|anchor| anchor < anchor_least))
        {
            candidate.past = true;
            candidate.reason = format!(
                "its content is from the past (device table {table} of {}, checkpoint {} of {anchor_least} or later)",
                newest.generation,
                anchor.map_or_else(|| "none".into(), |anchor| anchor.to_string()),
            );
        }
    }
    candidates
}

/// Rejects a set of which too many devices are gone, or of which a newer state may exist on those that are gone.
fn check_sufficient(newest: &DeviceTable, candidates: &[Candidate<'_>], accept_missing: bool) -> Result<()> {
    let members = || candidates.iter().filter(|candidate| candidate.record.replaces.is_none());
    let lacking: Vec<String> = members()
        .filter(|candidate| !candidate.is_trusted())
        .map(|candidate| {
            let state = match (candidate.found.is_some(), candidate.record.state) {
                (true, RecordedState::Away { .. } | RecordedState::Filling { .. }) => "is not complete",
                (true, RecordedState::Active) => "is not usable",
                (false, _) => "is missing",
            };
            let reason = if candidate.reason.is_empty() { String::new() } else { format!(": {}", candidate.reason) };
            format!("device {} ({}) {state}{reason}", candidate.record.number, candidate.record.path)
        })
        .collect();
    let (total, parity) = (members().count(), usize::from(newest.parity));
    if lacking.len() > parity {
        let text = format!(
            "{} of {total} devices are gone, and parity allows {parity}; nothing was written. {}",
            lacking.len(),
            lacking.join("; ")
        );
        return Err(Error::new(ErrorKind::Io, text));
    }
    let unseen = members()
        .filter(|candidate| candidate.record.state == RecordedState::Active && !candidate.is_trusted())
        .count();
    if unseen >= total - parity && !accept_missing {
        let text = format!(
            "the devices that are there may be out of date, since those that are missing could have continued without them: \
             {}. If these devices were not used since, accept that with --accept-missing-devices",
            lacking.join("; ")
        );
        return Err(Error::new(ErrorKind::Io, text));
    }
    Ok(())
}

/// Returns the newest of the tables that devices have. Two of one generation are left by a crash that wrote the first to
/// devices that were then missing, when the second was written: what most devices have counts, and of the same number
/// the one that says that more are away.
fn newest_table<'a>(tables: impl Iterator<Item = &'a DeviceTable> + Clone) -> Option<DeviceTable> {
    let newest = tables.clone().max_by_key(|table| {
        let holders = tables.clone().filter(|other| other == table).count();
        let away = table.devices.iter().filter(|device| device.state != RecordedState::Active).count();
        (table.generation, holders, away)
    });
    newest.cloned()
}

/// Returns the newest anchor of trusted devices, and whether a slot is readable on none of them.
fn newest_anchor(candidates: &[Candidate<'_>]) -> Result<(Anchor, bool)> {
    let trusted: Vec<&FoundDevice> =
        candidates.iter().filter(|candidate| candidate.is_trusted()).filter_map(|candidate| candidate.found).collect();
    let of_slot = |slot: usize| {
        let anchors = trusted.iter().filter_map(|device| device.anchors[slot].clone());
        anchors.max_by_key(|anchor| anchor.generation)
    };
    let found: Vec<Option<Anchor>> = (0..SLOTS.len()).map(of_slot).collect();
    let lost = found.iter().any(Option::is_none);
    let newest = found.into_iter().flatten().max_by_key(|anchor| anchor.generation);
    newest.map(|anchor| (anchor, lost)).ok_or_else(|| corrupt("no anchor can be read on any device of the store"))
}

/// Returns the table with the states that the devices have from now on.
fn next_table(newest: &DeviceTable, candidates: &[Candidate<'_>], anchor: &Anchor) -> DeviceTable {
    let mut table = newest.clone();
    for candidate in candidates {
        let number = candidate.record.number;
        if candidate.record.replaces.is_some() && candidate.found.is_none() {
            table.devices.retain(|device| device.number != number);
            continue;
        }
        let record = table.device_mut(number).expect("a device of the table");
        record.state = match (candidate.found, record.state) {
            // What was durable at the last checkpoint, the device has.
            (None, RecordedState::Active) => RecordedState::Away { since: anchor.redo.seq },
            (None, RecordedState::Away { since } | RecordedState::Filling { since, .. }) => {
                RecordedState::Away { since }
            }
            (Some(_), RecordedState::Active) if candidate.past => RecordedState::Filling { since: 0, below: 0 },
            (Some(_), RecordedState::Away { since }) => RecordedState::Filling { since, below: 0 },
            (Some(_), state) => state,
        };
        if let Some(found) = candidate.found {
            record.path = found.path.display().to_string();
        }
    }
    table
}

impl ColumnSet {
    /// Opens the devices of a store. Devices that are missing are recorded as away, and devices that were away are filled
    /// from now on, unless `read_only`.
    ///
    /// # Errors
    /// Those of identification; `Io` if more devices are gone than parity allows, or newer states may be missing with
    /// them (unless `accept_missing`); `Corrupt` if the device table or all anchors are damaged.
    pub async fn open(
        paths: &[PathBuf],
        expected: Option<[u8; 16]>,
        read_only: bool,
        accept_missing: bool,
    ) -> Result<OpenedSet> {
        let how = if read_only { OpenOptions::read() } else { OpenOptions::read_write() };
        let found = find_devices(paths, expected, how.direct().lock()).await?;
        let newest = newest_table(found.devices.iter().filter_map(|device| device.table.as_ref()))
            .ok_or_else(|| corrupt("no device table can be read on any device of the store"))?;
        let candidates = match_devices(&newest, &found);
        for device in &found.devices {
            let identity = device.superblock.device.expect("a device of a set has an identity");
            if newest.devices.iter().all(|record| record.id != identity.id) {
                let path = device.path.display();
                tracing::warn!(
                    "{path} was device {} of the store and is not any more; it is not used",
                    identity.number
                );
            }
        }
        check_sufficient(&newest, &candidates, accept_missing)?;
        let (anchor, anchor_lost) = newest_anchor(&candidates)?;
        let table = next_table(&newest, &candidates, &anchor);
        let mut superblock = found.devices[0].superblock.clone();
        superblock.device = None;
        superblock.segment_count = table.segments();
        // A crash may have set a feature bit on some devices only, or a device was away then.
        superblock.features = found.devices.iter().fold(0, |all, device| all | device.superblock.features);
        let lacks_features = |device: &FoundDevice| device.superblock.features != superblock.features;
        let features_differ = found.devices.iter().any(|device| device.features_differ || lacks_features(device));
        let one_superblock = found.devices.iter().any(|device| device.one_damaged);
        let devices = table.devices.iter().map(|record| {
            let candidate = candidates.iter().find(|candidate| candidate.record.number == record.number);
            let device = candidate.and_then(|candidate| candidate.found);
            let file = device.map(|device| device.file.clone());
            let path = device.map_or_else(|| PathBuf::from(&record.path), |device| device.path.clone());
            let made =
                ColumnDevice::new(record.number, record.id, record.slots, record.replaces, path, file, record.state);
            if let Some(candidate) = candidate {
                made.set_reason(candidate.reason.clone());
            }
            Rc::new(made)
        });
        let set = ColumnSet::new(table.clone(), devices.collect(), read_only)?;
        if let Some(text) = set.degraded() {
            tracing::error!("{}: {text}", set.name());
        }
        let lacks_table = |candidate: &Candidate<'_>| {
            let table = candidate.found.filter(|_| candidate.is_trusted()).map(|device| device.table.as_ref());
            table.is_some_and(|table| table.is_none_or(|table| table.generation != newest.generation))
        };
        if candidates.iter().any(lacks_table) && !read_only {
            // A crash may have left it on some devices only. A device lacks at most the newest one then.
            set.spread_table(&newest).await;
        }
        let lacks_anchor = |candidate: &Candidate<'_>| {
            let newest = candidate.found.filter(|_| candidate.is_trusted()).map(|device| device.newest_anchor());
            newest.is_some_and(|newest| newest != Some(anchor.generation))
        };
        if candidates.iter().any(lacks_anchor) && !read_only {
            // As for the table: a device lacks at most the newest anchor.
            let block = Buf::copy_of(&anchor.encode());
            for at in SLOTS[(anchor.generation % 2) as usize] {
                set.spread(&block, at, |_| true).await;
            }
        }
        if table != newest && !read_only {
            let _permit = set.changing.acquire(1).await;
            set.write_table(table, &[]).await?;
        }
        if features_differ && !read_only {
            set.write_superblocks(&superblock).await?;
        }
        Ok(OpenedSet { set, superblock, anchor, anchor_lost, one_superblock })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(generation: u64, away: usize) -> DeviceTable {
        let device = |number: u16| DeviceRecord {
            number,
            id: [number as u8; 16],
            slots: 30,
            state: if usize::from(number) < away { RecordedState::Away { since: 7 } } else { RecordedState::Active },
            replaces: None,
            leaving: false,
            path: String::new(),
        };
        DeviceTable {
            store: 1,
            generation,
            data: 1,
            parity: 2,
            column_blocks: 16,
            next_number: 3,
            devices: (0..3).map(device).collect(),
            groups: Vec::new(),
        }
    }

    #[test]
    fn of_two_tables_of_one_generation_the_one_written_without_the_others_counts() {
        let newest = |tables: &[DeviceTable]| newest_table(tables.iter()).expect("a table");
        assert_eq!(newest(&[table(4, 2), table(5, 0), table(3, 2)]), table(5, 0));
        assert_eq!(newest(&[table(5, 0), table(5, 1), table(5, 1)]), table(5, 1));
        assert_eq!(newest(&[table(5, 1), table(5, 1), table(5, 0)]), table(5, 1));
        assert_eq!(newest(&[table(5, 0), table(5, 0), table(5, 1)]), table(5, 0));
        assert_eq!(
            (newest(&[table(5, 0), table(5, 1)]), newest(&[table(5, 1), table(5, 0)])),
            (table(5, 1), table(5, 1))
        );
        assert_eq!(newest_table([].iter()), None);
    }
}
