//! Allocation of slots: which devices the columns of new segments are on.

use std::collections::BTreeMap;

use crate::format::devices::{ColumnPlace, DeviceTable, SegmentGroup};

/// Divisor of the segments that one group takes while devices differ in free slots; more groups use space more evenly.
const GROUP_SHARE: u32 = 16;

/// Free slots of a device: their first one and their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FreeRun {
    first: u32,
    len: u32,
}

/// Returns the free slots of each device that holds columns.
fn free_slots(table: &DeviceTable) -> BTreeMap<u16, Vec<FreeRun>> {
    let mut free = BTreeMap::new();
    for device in table.members() {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::devices::{DeviceRecord, RecordedState};

    fn table(data: u16, parity: u16, slots: &[u32]) -> DeviceTable {
        let device = |(number, &slots): (usize, &u32)| DeviceRecord {
            number: number as u16,
            id: [number as u8; 16],
            slots,
            state: RecordedState::Active,
            replaces: None,
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
