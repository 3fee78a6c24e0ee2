//! Allocation of slots: which devices the columns of new segments are on.

use std::collections::BTreeMap;

use crate::format::devices::{ColumnPlace, DeviceTable, PATH_MAX, SegmentGroup, TABLE_MAX};

/// Divisor of the segments that one group takes while devices differ in free slots; more groups use space more evenly.
const GROUP_SHARE: u32 = 16;

/// Free slots of a device: their first one and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FreeRun {
    pub first: u32,
    pub len: u32,
}

/// Returns the free slots of each device that may get columns.
pub(super) fn free_slots(table: &DeviceTable) -> BTreeMap<u16, Vec<FreeRun>> {
    let mut free = BTreeMap::new();
    for device in table.members().filter(|device| !device.leaving) {
        let mut taken: Vec<(u32, u32)> = table
            .groups
            .iter()
            .flat_map(|group| group.columns.iter().map(move |column| (column, group.segments)))
            .filter(|(column, _)| column.device == device.number)
            .map(|(column, segments)| (column.slot, column.slot + segments))
            .collect();
        taken.sort_unstable();
        let mut runs = Vec::new();
        let mut at = 0;
        for (from, to) in taken.into_iter().chain([(device.slots, device.slots)]) {
            if from > at {
                runs.push(FreeRun { first: at, len: from - at });
            }
            at = to;
        }
        free.insert(device.number, runs);
    }
    free
}

/// Returns the groups of segments that the free slots of the devices allow, at most `segments` in total and
/// `groups_max` groups.  Slots are taken from the devices that have most left.
pub fn plan_groups(table: &DeviceTable, mut segments: u32, groups_max: usize) -> Vec<SegmentGroup> {
    let columns = usize::from(table.data) + usize::from(table.parity);
    let mut free = free_slots(table);
    let mut groups = Vec::new();
    while segments > 0 && groups.len() < groups_max {
        let left = |runs: &Vec<FreeRun>| runs.iter().map(|run| run.len).sum::<u32>();
        let mut by_space: Vec<(u32, u16)> = free.iter().map(|(number, runs)| (left(runs), *number)).collect();
        by_space.sort_by_key(|&(left, number)| (std::cmp::Reverse(left), number));
        if by_space.len() < columns {
            break;
        }
        let (least, next) = (by_space[columns - 1].0, by_space.get(columns).map_or(0, |(left, _)| *left));
        if least == 0 {
            break;
        }
        // Devices that are not chosen now are as full as these ones then, or nearly.
        let wanted = if next == 0 { least } else { (least - next).max(least / GROUP_SHARE).max(1) };
        let mut chosen: Vec<u16> = by_space[..columns].iter().map(|(_, number)| *number).collect();
        chosen.sort_unstable();
        let contiguous = chosen.iter().map(|number| free[number][0].len).min().unwrap_or(0);
        let count = wanted.min(contiguous).min(segments);
        let columns = chosen
            .iter()
            .map(|number| {
                let runs = free.get_mut(number).expect("a device of the table");
                let slot = runs[0].first;
                runs[0].first += count;
                runs[0].len -= count;
                if runs[0].len == 0 {
                    runs.remove(0);
                }
                ColumnPlace { device: *number, slot }
            })
            .collect();
        groups.push(SegmentGroup { segments: count, columns });
        segments -= count;
    }
    groups
}

/// Bytes of a device table before its devices, and of a device without its path.
const TABLE_HEADER: usize = 48;
const DEVICE_RECORD: usize = 40;

/// Returns the number of groups that a table has space for, with the longest paths, and one more device that replaces
/// another one.
pub(super) fn groups_max(table: &DeviceTable) -> usize {
    let columns = usize::from(table.data) + usize::from(table.parity);
    let devices = (table.devices.len() + 1) * (DEVICE_RECORD + PATH_MAX);
    TABLE_MAX.saturating_sub(TABLE_HEADER + devices) / (4 + 6 * columns)
}

/// Returns whether `next`, behind `group`, has its columns in the following slots of the same devices.
fn continues(group: &SegmentGroup, next: &SegmentGroup) -> bool {
    let follows = |(column, next): (&ColumnPlace, &ColumnPlace)| {
        column.device == next.device && column.slot + group.segments == next.slot
    };
    group.columns.len() == next.columns.len() && group.columns.iter().zip(&next.columns).all(follows)
}

/// Merges neighbouring groups whose columns lie behind each other.
pub fn merge_groups(groups: &mut Vec<SegmentGroup>) {
    groups.dedup_by(|next, group| {
        let merges = continues(group, next);
        if merges {
            group.segments += next.segments;
        }
        merges
    });
}

/// Adds groups of the free slots that can make segments, up to `segments_max` segments in total.
pub fn add_groups(table: &mut DeviceTable, segments_max: u32) {
    let more = segments_max.saturating_sub(table.segments());
    // One that continues the last group needs no space.
    let groups = plan_groups(table, more, (groups_max(table) + 1).saturating_sub(table.groups.len()));
    let before = (table.groups.clone(), groups_max(table).max(table.groups.len()));
    table.groups.extend(groups);
    merge_groups(&mut table.groups);
    if table.groups.len() > before.1 {
        table.groups.truncate(before.1);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::devices::{DeviceRecord, RecordedState};

    pub fn table(data: u16, parity: u16, slots: &[u32]) -> DeviceTable {
        let device = |(number, &slots): (usize, &u32)| DeviceRecord {
            number: number as u16,
            id: [number as u8; 16],
            slots,
            state: RecordedState::Active,
            replaces: None,
            leaving: false,
            path: String::new(),
        };
        DeviceTable {
            store: 1,
            generation: 1,
            data,
            parity,
            column_blocks: 16,
            next_number: slots.len() as u16,
            devices: slots.iter().enumerate().map(device).collect(),
            groups: Vec::new(),
        }
    }

    /// Returns the largest number of segments that any allocation could make.
    fn most(columns: u64, slots: &[u32]) -> u64 {
        let fits = |count: u64| slots.iter().map(|&slots| u64::from(slots).min(count)).sum::<u64>() >= columns * count;
        (0..).find(|&count| !fits(count + 1)).expect("bounded")
    }

    proptest! {
        #[test]
        fn unequal_devices_are_used_up(
            data in 1u16..5,
            parity in 0u16..3,
            more in 0usize..4,
            sizes in proptest::collection::vec(1u32..300, 12),
        ) {
            let columns = usize::from(data + parity);
            let slots = &sizes[..columns + more];
            let mut table = table(data, parity, slots);
            table.groups = plan_groups(&table, u32::MAX, usize::MAX);
            let bytes = table.encode().expect("few groups");
            let decoded = DeviceTable::decode(&bytes, 1);
            prop_assert_eq!(decoded.as_ref(), Ok(&table), "a table that is valid");
            let (made, best) = (u64::from(table.segments()), most(columns as u64, slots));
            prop_assert!(made <= best && made * 20 >= best * 19, "{} segments of {}", made, best);
        }
    }

    /// Returns the places of a segment's columns.
    pub fn places_of(table: &DeviceTable, segment: u32) -> Vec<ColumnPlace> {
        let mut first = 0;
        for group in &table.groups {
            if segment < first + group.segments {
                let place = |column: &ColumnPlace| ColumnPlace { slot: column.slot + segment - first, ..*column };
                return group.columns.iter().map(place).collect();
            }
            first += group.segments;
        }
        panic!("segment {segment} of {first}");
    }

    proptest! {
        #[test]
        fn growth_keeps_all_places_and_uses_free_slots(
            data in 1u16..5,
            parity in 0u16..3,
            more in 0usize..3,
            sizes in proptest::collection::vec(1u32..100, 12),
            steps in proptest::collection::vec((0usize..9, 0u32..100), 1..6),
            most in 50u32..1000,
        ) {
            let columns = usize::from(data + parity);
            let mut slots = sizes[..columns + more].to_vec();
            let mut table = table(data, parity, &slots);
            add_groups(&mut table, most);
            for (device, added) in steps {
                let before = table.clone();
                match table.devices.get_mut(device) {
                    Some(record) => {
                        record.slots += added;
                        slots[device] += added;
                    }
                    // One more device.
                    None => {
                        let number = table.next_number;
                        table.devices.push(DeviceRecord { number, slots: added, ..before.devices[0].clone() });
                        table.next_number += 1;
                        slots.push(added);
                    }
                }
                add_groups(&mut table, most);
                prop_assert!(table.segments() <= most && table.segments() >= before.segments());
                for segment in 0..before.segments() {
                    prop_assert_eq!(places_of(&before, segment), places_of(&table, segment));
                }
                let bytes = table.encode().expect("few groups");
                let decoded = DeviceTable::decode(&bytes, 1);
                prop_assert_eq!(decoded.as_ref(), Ok(&table), "a table that is valid");
                prop_assert!(u64::from(table.segments()) <= super::tests::most(columns as u64, &slots));
                let free = free_slots(&table).values().filter(|runs| !runs.is_empty()).count();
                prop_assert!(table.segments() == most || free < columns, "{} devices have free slots", free);
            }
        }
    }

    #[test]
    fn a_table_without_space_takes_no_more_groups() {
        let mut table = table(1, 1, &[6000, 6000, 6000]);
        // Every second slot of two devices is taken, so that each free one makes a group of its own.
        let place = |device, slot| ColumnPlace { device, slot };
        let taken = |at: u32| SegmentGroup { segments: 1, columns: vec![place(0, 2 * at), place(1, 2 * at)] };
        table.groups = (0..3000).map(taken).collect();
        table.devices.pop();
        let most = groups_max(&table);
        add_groups(&mut table, u32::MAX);
        assert!(table.groups.len() <= most && table.groups.len() + 2 > most, "{} of {most}", table.groups.len());
        table.devices.iter_mut().for_each(|device| device.path = "x".repeat(PATH_MAX));
        table.encode().expect("it fits, with the longest paths");
    }

    #[test]
    fn groups_behind_each_other_are_merged() {
        let mut table = table(3, 2, &[100; 5]);
        add_groups(&mut table, 60);
        assert_eq!((table.groups.len(), table.segments()), (1, 60));
        table.devices.iter_mut().for_each(|device| device.slots = 150);
        add_groups(&mut table, u32::MAX);
        assert_eq!((table.groups.len(), table.segments()), (1, 150));
        assert_eq!(table.groups[0].columns[4], ColumnPlace { device: 4, slot: 0 });
    }

    #[test]
    fn equal_devices_have_one_group_and_new_slots_are_appended() {
        let mut table = table(3, 2, &[100; 5]);
        table.groups = plan_groups(&table, u32::MAX, usize::MAX);
        assert_eq!((table.groups.len(), table.segments()), (1, 100));
        table.devices.iter_mut().for_each(|device| device.slots = 150);
        let more = plan_groups(&table, u32::MAX, usize::MAX);
        assert_eq!((more.len(), more[0].segments, more[0].columns[0].slot), (1, 50, 100));
    }
}
