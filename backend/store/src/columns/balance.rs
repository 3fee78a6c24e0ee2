//! Plan of moves: which column is moved to which device next, so that devices can be removed, or added ones be used.
//!
//! The plan depends on the device table alone, so that moving goes on after a restart. Each step is the first of a
//! shortest sequence of moves that gains something, and there is one as long as something can be gained:
//! `docs/design/store-devices.md` has the argument.

use super::places::{add_groups, free_slots, groups_max, merge_groups};
use crate::format::devices::{ColumnPlace, DeviceRecord, DeviceTable, SegmentGroup};

/// Columns of consecutive segments that are to be on another device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnMove {
    /// First segment.
    pub segment: u32,
    /// Number of segments.
    pub segments: u32,
    /// Place of the first segment's column.
    pub from: ColumnPlace,
    /// Place that it is to have.
    pub to: ColumnPlace,
}

/// Device as the plan sees it.
#[derive(Debug, Clone, Copy)]
struct DeviceLoad {
    number: u16,
    /// Columns on it.
    columns: u32,
    /// Free slots, as far as segments can use them.
    free: u32,
    leaving: bool,
}

/// Returns the number of segments that the devices can have, at most `segments_max`, however columns are placed now.
pub fn segments_possible(table: &DeviceTable, segments_max: u32) -> u32 {
    let mut empty = DeviceTable { groups: Vec::new(), ..table.clone() };
    add_groups(&mut empty, segments_max);
    empty.segments()
}

/// Returns the devices that hold columns; with `segments` segments, that is how many columns one can have.
fn loads(table: &DeviceTable, segments: u32) -> Vec<DeviceLoad> {
    let load = |device: &DeviceRecord| {
        let columns = table.columns_on(device.number);
        let is_target = !device.leaving && device.state.is_active();
        let free = if is_target { device.slots.min(segments).saturating_sub(columns) } else { 0 };
        DeviceLoad { number: device.number, columns, free, leaving: device.leaving }
    };
    table.members().map(load).collect()
}

/// Returns the number of columns that must be moved before the devices have `segments_max` segments, or as many as is
/// possible, and none is on a device that is being removed.
pub fn columns_to_move(table: &DeviceTable, segments_max: u32) -> u64 {
    let leaving: u64 = table.leaving().map(|device| u64::from(table.columns_on(device.number))).sum();
    if leaving > 0 {
        return leaving;
    }
    let (more, loads) = gain(table, segments_max);
    lacking(table, more, &loads)
}

/// Returns the next move, of at most `segments_at_once` segments, none of which `is_movable` rejects; `None` if nothing is
/// gained by one.
pub fn plan_move(
    table: &DeviceTable,
    segments_max: u32,
    segments_at_once: u32,
    is_movable: impl Fn(u32) -> bool,
) -> Option<ColumnMove> {
    if table.groups.len() + 2 > groups_max(table) {
        return None;
    }
    let choices =
        if table.leaving().next().is_some() { leaving_moves(table) } else { gaining_moves(table, segments_max)? };
    let MoveChoices { sources, targets, .. } = &choices;
    for from in sources {
        for to in targets {
            let at_once = segments_at_once.min(choices.wanted(from, to)).max(1);
            if let Some(found) = find_move(table, from.number, to.number, at_once, &is_movable) {
                return Some(found);
            }
        }
    }
    // All segments of a source have a column on every target: a third device makes way first.
    for from in sources {
        for &between in &choices.others {
            if between == from.number || find_column(table, from.number, between, &is_movable).is_none() {
                continue;
            }
            for to in targets {
                if let Some(found) = find_move(table, between, to.number, 1, &is_movable) {
                    return Some(found);
                }
            }
        }
    }
    None
}

/// Devices between which columns can be moved with a gain, in the order in which they are tried.
struct MoveChoices {
    /// Devices that have too many columns.
    sources: Vec<DeviceLoad>,
    /// Devices that have free slots to give.
    targets: Vec<DeviceLoad>,
    /// Other devices that stay, and have columns.
    others: Vec<u16>,
    /// Free slots that each device is to have; `None` if devices are emptied.
    more: Option<u32>,
}

impl MoveChoices {
    /// Sorts devices out.
    fn of(
        loads: &[DeviceLoad],
        is_source: impl Fn(&DeviceLoad) -> bool,
        is_target: impl Fn(&DeviceLoad) -> bool,
        more: Option<u32>,
    ) -> Self {
        let chosen = |is_chosen: &dyn Fn(&DeviceLoad) -> bool| -> Vec<DeviceLoad> {
            loads.iter().filter(|load| is_chosen(load)).copied().collect()
        };
        let (mut sources, mut targets) = (chosen(&|load| load.columns > 0 && is_source(load)), chosen(&is_target));
        // What was begun is ended first, so that columns of consecutive segments stay together.
        sources.sort_by_key(|load| (std::cmp::Reverse(load.free), load.number));
        targets.sort_by_key(|load| (load.free, load.number));
        let others = chosen(&|load| load.columns > 0 && !load.leaving && !is_target(load));
        Self { sources, targets, others: others.iter().map(|load| load.number).collect(), more }
    }

    /// Returns the number of columns that are to be moved between two devices.
    fn wanted(&self, from: &DeviceLoad, to: &DeviceLoad) -> u32 {
        self.more.map_or(u32::MAX, |more| more.saturating_sub(from.free).min(to.free.saturating_sub(more)))
    }
}

/// Returns the moves away from devices that are being removed.
fn leaving_moves(table: &DeviceTable) -> MoveChoices {
    MoveChoices::of(&loads(table, table.segments()), |load| load.leaving, |load| load.free > 0, None)
}

/// Returns the moves after which more segments can be made; `None` if none can.
///
/// With `more` new segments, a device can use that many free slots. What one has beyond that is of use to a device that has
/// fewer, whose column is moved there.
fn gaining_moves(table: &DeviceTable, segments_max: u32) -> Option<MoveChoices> {
    let (more, loads) = gain(table, segments_max);
    let choices = MoveChoices::of(&loads, |load| load.free < more, |load| load.free > more, Some(more));
    (lacking(table, more, &loads) > 0).then_some(choices)
}

/// Returns the number of segments that can be made when columns have been moved, and the loads of devices with them.
fn gain(table: &DeviceTable, segments_max: u32) -> (u32, Vec<DeviceLoad>) {
    let possible = segments_possible(table, segments_max);
    (possible.saturating_sub(table.segments()), loads(table, possible))
}

/// Returns the number of free slots that are lacking where `more` segments need them.
fn lacking(table: &DeviceTable, more: u32, loads: &[DeviceLoad]) -> u64 {
    let columns = u64::from(table.data) + u64::from(table.parity);
    let usable: u64 = loads.iter().map(|load| u64::from(load.free.min(more))).sum();
    (columns * u64::from(more)).saturating_sub(usable)
}

/// Returns the first column on one device that can be moved to another, which has none of its segment: its segment, its
/// place, and the end of the group that has it.
fn find_column(
    table: &DeviceTable,
    from: u16,
    to: u16,
    is_movable: &impl Fn(u32) -> bool,
) -> Option<(u32, ColumnPlace, u32)> {
    let mut end = 0;
    table.groups.iter().find_map(|group| {
        let begin = end;
        end += group.segments;
        let place = group.columns.iter().find(|column| column.device == from)?;
        let segment = (begin..end).find(|&segment| is_movable(segment))?;
        let is_there = group.columns.iter().any(|column| column.device == to);
        let place = ColumnPlace { slot: place.slot + segment - begin, ..*place };
        (!is_there).then_some((segment, place, end))
    })
}

/// Returns the first move of columns from one device to free slots of another, of at most `at_once` segments.
fn find_move(
    table: &DeviceTable,
    from: u16,
    to: u16,
    at_once: u32,
    is_movable: &impl Fn(u32) -> bool,
) -> Option<ColumnMove> {
    let free = *free_slots(table).get(&to)?.first()?;
    let (segment, from, end) = find_column(table, from, to, is_movable)?;
    let most = at_once.min(free.len) as usize;
    let segments = (segment..end).take(most).take_while(|&segment| is_movable(segment)).count() as u32;
    Some(ColumnMove { segment, segments, from, to: ColumnPlace { device: to, slot: free.first } })
}

/// Moves columns in a table. Returns false, and changes nothing, if they are not where the move begins, or their new place is
/// taken.
pub fn apply_move(table: &mut DeviceTable, moved: &ColumnMove) -> bool {
    let end = moved.to.slot + moved.segments;
    let is_free = free_slots(table)
        .get(&moved.to.device)
        .is_some_and(|runs| runs.iter().any(|run| run.first <= moved.to.slot && end <= run.first + run.len));
    let mut first = 0;
    let holds = |group: &SegmentGroup, first: u32| {
        first <= moved.segment && moved.segment + moved.segments <= first + group.segments
    };
    let found = table.groups.iter().position(|group| {
        let begin = first;
        first += group.segments;
        holds(group, begin)
    });
    let Some(at) = found.filter(|_| is_free && moved.segments > 0) else { return false };
    let begin: u32 = table.groups[..at].iter().map(|group| group.segments).sum();
    let group = table.groups[at].clone();
    let skipped = moved.segment - begin;
    let Some(column) = group
        .columns
        .iter()
        .position(|column| *column == ColumnPlace { slot: moved.from.slot.wrapping_sub(skipped), ..moved.from })
    else {
        return false;
    };
    if group.columns.iter().any(|other| other.device == moved.to.device) {
        return false;
    }
    let part = |from: u32, segments: u32| {
        let place = |column: &ColumnPlace| ColumnPlace { slot: column.slot + from, ..*column };
        SegmentGroup { segments, columns: group.columns.iter().map(place).collect() }
    };
    let mut middle = part(skipped, moved.segments);
    middle.columns[column] = moved.to;
    let behind = skipped + moved.segments;
    let parts = [part(0, skipped), middle, part(behind, group.segments - behind)];
    table.groups.splice(at..=at, parts.into_iter().filter(|part| part.segments > 0));
    merge_groups(&mut table.groups);
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::columns::places::tests::{places_of, table};

    /// Applies moves until there are none, and adds the segments that are possible then. Returns the number of columns
    /// moved.
    fn balance(table: &mut DeviceTable, at_once: u32, blocked: Option<u32>) -> Result<u64, String> {
        let mut moved = 0;
        for _ in 0..10_000 {
            let is_movable = |segment| Some(segment) != blocked;
            let Some(step) = plan_move(table, u32::MAX, at_once, is_movable) else {
                add_groups(table, u32::MAX);
                return Ok(moved);
            };
            let before = table.clone();
            if !apply_move(table, &step) {
                return Err(format!("{step:?} does not fit {before:?}"));
            }
            let found = DeviceTable::decode(&table.encode().map_err(|error| error.0)?, 1).map_err(|error| error.0)?;
            if found != *table {
                return Err("a table that changes when it is stored".into());
            }
            for segment in 0..before.segments() {
                let (mut old, new) = (places_of(&before, segment), places_of(table, segment));
                if (step.segment..step.segment + step.segments).contains(&segment) {
                    let at = old.iter().position(|place| place.device == step.from.device).expect("it was there");
                    old[at] = ColumnPlace { slot: step.to.slot + segment - step.segment, ..step.to };
                }
                if old != new {
                    return Err(format!("{step:?} moved segment {segment} from {old:?} to {new:?}"));
                }
            }
            moved += u64::from(step.segments);
        }
        Err("it does not end".into())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn added_devices_are_used_as_if_they_had_always_been_there(
            data in 1u16..5,
            parity in 0u16..3,
            more in 0usize..3,
            sizes in proptest::collection::vec(1u32..120, 12),
            added in proptest::collection::vec(1u32..200, 1..4),
            at_once in prop_oneof![Just(1u32), Just(7), Just(1000)],
        ) {
            let columns = usize::from(data + parity);
            let mut table = table(data, parity, &sizes[..columns + more]);
            add_groups(&mut table, u32::MAX);
            prop_assert_eq!(columns_to_move(&table, u32::MAX), 0, "nothing is moved without need");
            for slots in added {
                let number = table.next_number;
                table.devices.push(DeviceRecord { number, slots, ..table.devices[0].clone() });
                table.next_number += 1;
            }
            add_groups(&mut table, u32::MAX);
            let (possible, expected) = (segments_possible(&table, u32::MAX), columns_to_move(&table, u32::MAX));
            let moved = balance(&mut table, at_once, None);
            prop_assert!(moved.is_ok(), "{:?}", moved);
            prop_assert!(table.segments() >= possible, "{} of {}", table.segments(), possible);
            // A device that makes way costs a move more.
            prop_assert!(moved.expect("checked") <= 2 * expected);
        }

        #[test]
        fn devices_are_emptied_if_the_others_have_space(
            data in 1u16..5,
            parity in 0u16..3,
            more in 1usize..4,
            sizes in proptest::collection::vec(20u32..120, 12),
            leaving in proptest::collection::vec(any::<prop::sample::Index>(), 1..3),
            at_once in prop_oneof![Just(1u32), Just(7), Just(1000)],
        ) {
            let columns = usize::from(data + parity);
            let mut table = table(data, parity, &sizes[..columns + more]);
            add_groups(&mut table, u32::MAX);
            for index in leaving.iter().take(more) {
                let at = index.index(table.devices.len());
                table.devices[at].leaving = true;
            }
            // Dropped from the end, as the store does after it has emptied them.
            let kept = segments_possible(&table, u32::MAX).min(table.segments());
            super::super::remove::truncate_groups(&mut table, kept);
            prop_assert_eq!(table.segments(), kept);
            let moved = balance(&mut table, at_once, None);
            prop_assert!(moved.is_ok(), "{:?}", moved);
            for device in table.leaving() {
                prop_assert_eq!(table.columns_on(device.number), 0, "{:?}", table);
            }
            prop_assert!(table.segments() >= kept);
        }

        #[test]
        fn a_segment_that_cannot_be_moved_stays(slots in 30u32..80, blocked in 0u32..30) {
            let mut table = table(2, 1, &[slots, slots, slots, slots]);
            add_groups(&mut table, 30);
            table.devices[1].leaving = true;
            let before = places_of(&table, blocked);
            let moved = balance(&mut table, 5, Some(blocked));
            prop_assert!(moved.is_ok(), "{:?}", moved);
            prop_assert_eq!(places_of(&table, blocked), before.clone());
            let left = u32::from(before.iter().any(|place| place.device == 1));
            prop_assert_eq!(table.columns_on(1), left);
        }
    }

    #[test]
    fn one_device_beside_five_full_ones_takes_its_share() {
        let mut table = table(3, 2, &[100, 100, 100, 100, 100, 100]);
        table.devices[5].slots = 0;
        add_groups(&mut table, u32::MAX);
        table.devices[5].slots = 100;
        assert_eq!((table.segments(), segments_possible(&table, u32::MAX)), (100, 120));
        // 20 more segments need 20 slots on five of six devices; the new one has 80 to give.
        assert_eq!(columns_to_move(&table, u32::MAX), 80);
        assert_eq!(balance(&mut table, 8, None), Ok(80));
        assert_eq!(table.segments(), 120);
        assert!(table.groups.len() <= 12, "{} groups", table.groups.len());
    }

    #[test]
    fn a_move_that_does_not_fit_changes_nothing() {
        let mut table = table(2, 1, &[40, 40, 40, 40]);
        add_groups(&mut table, 30);
        let before = table.clone();
        let place = |device, slot| ColumnPlace { device, slot };
        let step = plan_move(&DeviceTable { devices: leaving(&table, 0), ..table.clone() }, u32::MAX, 4, |_| true);
        let step = step.expect("a column of device 0");
        let wrong = [
            ColumnMove { to: place(9, 0), ..step },
            ColumnMove { from: place(step.from.device, step.from.slot + 1), ..step },
            ColumnMove { segments: 1000, ..step },
            ColumnMove { segment: 500, ..step },
            ColumnMove { segments: 0, ..step },
            ColumnMove { to: places_of(&table, step.segment)[1], ..step },
        ];
        for wrong in wrong {
            assert!(!apply_move(&mut table, &wrong), "{wrong:?}");
            assert_eq!(table, before);
        }
        assert!(apply_move(&mut table, &step));
    }

    fn leaving(table: &DeviceTable, number: u16) -> Vec<DeviceRecord> {
        let mut devices = table.devices.clone();
        devices[usize::from(number)].leaving = true;
        devices
    }
}
