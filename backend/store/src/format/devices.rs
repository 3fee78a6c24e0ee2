//! Device table: the devices of a store on several devices, their states, and the places of every segment's columns.
//! Two copies are written alternately, on every device.

use std::collections::BTreeMap;

use super::{BLOCK, MalformedStore, Put, StoreReader, is_sealed, malformed, seal};

const MAGIC: &[u8; 8] = b"FBDEVTAB";
const CRC_AT: usize = 8;
const LEN_AT: usize = 12;

/// Byte addresses of the two copies; the lowest bit of the generation selects one.
pub const PLACES: [u64; 2] = [384 * 1024, 448 * 1024];
/// Space for a copy in bytes.
pub const TABLE_MAX: usize = 64 * 1024;
/// Maximum length of a recorded path in bytes.
pub const PATH_MAX: usize = 512;
/// Maximum number of devices.
pub const DEVICES_MAX: usize = 64;

/// State of a device, as recorded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordedState {
    /// The device has all that was durable.
    Active,
    /// The device lacks batches from `since` on, and nothing is written to it.
    Away {
        /// Number of the first batch that it may lack.
        since: u64,
    },
    /// The device is written to, and is given what it lacks.
    Filling {
        /// Number of the first batch that it may lack.
        since: u64,
        /// Segments below this one are complete.
        below: u32,
    },
}

impl RecordedState {
    /// Returns whether it is [`Active`](Self::Active).
    pub fn is_active(self) -> bool {
        self == Self::Active
    }

    /// Returns whether it is [`Filling`](Self::Filling).
    pub fn is_filling(self) -> bool {
        matches!(self, Self::Filling { .. })
    }
}

/// Device of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceRecord {
    /// Number of the device in the store; never used again.
    pub number: u16,
    /// Identity, which is also in the device's superblock.
    pub id: [u8; 16],
    /// Number of slots, each as long as a column.
    pub slots: u32,
    /// State of the device.
    pub state: RecordedState,
    /// Number of the device that it replaces once it is filled.
    pub replaces: Option<u16>,
    /// Set if the device is being removed: its columns are moved to others, and it gets no more.
    pub leaving: bool,
    /// Path at which it was last opened; for messages only.
    pub path: String,
}

/// Place of a column: the slots of consecutive segments on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ColumnPlace {
    /// Number of the device.
    pub device: u16,
    /// Slot of the first segment.
    pub slot: u32,
}

/// Consecutive segments whose columns are on the same devices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SegmentGroup {
    /// Number of segments.
    pub segments: u32,
    /// Places of the columns. Which of them is column 0 rotates with the segment's number.
    pub columns: Vec<ColumnPlace>,
}

/// Devices of a store, and the places of its segments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceTable {
    /// First eight bytes of the store's UUID.
    pub store: u64,
    /// Number of the table; each change has a higher one.
    pub generation: u64,
    /// Data columns of a segment (k).
    pub data: u16,
    /// Parity columns of a segment (m).
    pub parity: u16,
    /// Length of a column in blocks.
    pub column_blocks: u32,
    /// Number of the next device.
    pub next_number: u16,
    /// Devices, in order of their numbers.
    pub devices: Vec<DeviceRecord>,
    /// Groups of segments, in order.
    pub groups: Vec<SegmentGroup>,
}

impl DeviceTable {
    /// Returns the number of segments.
    pub fn segments(&self) -> u32 {
        self.groups.iter().map(|group| group.segments).sum()
    }

    /// Returns the device with a number.
    pub fn device(&self, number: u16) -> Option<&DeviceRecord> {
        self.devices.iter().find(|device| device.number == number)
    }

    /// Returns the device with a number.
    pub fn device_mut(&mut self, number: u16) -> Option<&mut DeviceRecord> {
        self.devices.iter_mut().find(|device| device.number == number)
    }

    /// Returns the devices that hold columns, without those that are still to replace another one.
    pub fn members(&self) -> impl Iterator<Item = &DeviceRecord> {
        self.devices.iter().filter(|device| device.replaces.is_none())
    }

    /// Returns the devices that are being removed.
    pub fn leaving(&self) -> impl Iterator<Item = &DeviceRecord> {
        self.devices.iter().filter(|device| device.leaving)
    }

    /// Returns the number of columns on a device.
    pub fn columns_on(&self, number: u16) -> u32 {
        let on = |group: &&SegmentGroup| group.columns.iter().any(|column| column.device == number);
        self.groups.iter().filter(on).map(|group| group.segments).sum()
    }

    /// Encodes the table as whole blocks, at most [`TABLE_MAX`] bytes.
    ///
    /// # Errors
    /// When it has too many devices or groups for that.
    pub fn encode(&self) -> Result<Vec<u8>, MalformedStore> {
        let mut out = Vec::with_capacity(BLOCK);
        out.put(MAGIC);
        out.put_u32(0);
        out.put_u32(0);
        out.put_u64(self.store);
        out.put_u64(self.generation);
        out.put_u16(self.data);
        out.put_u16(self.parity);
        out.put_u32(self.column_blocks);
        out.put_u16(self.next_number);
        out.put_u16(self.devices.len() as u16);
        out.put_u32(self.groups.len() as u32);
        for device in &self.devices {
            let (state, since, below) = match device.state {
                RecordedState::Active => (0, 0, 0),
                RecordedState::Away { since } => (1, since, 0),
                RecordedState::Filling { since, below } => (2, since, below),
            };
            out.put_u16(device.number);
            out.put_u8(state);
            out.put_u8(u8::from(device.replaces.is_some()) | u8::from(device.leaving) << 1);
            out.put_u16(device.replaces.unwrap_or(0));
            out.put(&device.id);
            out.put_u32(device.slots);
            out.put_u64(since);
            out.put_u32(below);
            let mut end = device.path.len().min(PATH_MAX);
            while !device.path.is_char_boundary(end) {
                end -= 1;
            }
            out.put_u16(end as u16);
            out.put(&device.path.as_bytes()[..end]);
        }
        for group in &self.groups {
            out.put_u32(group.segments);
            for column in &group.columns {
                out.put_u16(column.device);
                out.put_u32(column.slot);
            }
        }
        if out.len() > TABLE_MAX {
            return malformed(format!("device table: {} bytes, {TABLE_MAX} at most", out.len()));
        }
        let len = out.len() as u32;
        out[LEN_AT..LEN_AT + 4].copy_from_slice(&len.to_le_bytes());
        seal(&mut out, CRC_AT);
        out.resize(out.len().next_multiple_of(BLOCK), 0);
        Ok(out)
    }

    /// Decodes a table, of the store whose UUID begins with `store`, from the bytes at one of its places.
    ///
    /// # Errors
    /// Description of the malformed field.
    pub fn decode(bytes: &[u8], store: u64) -> Result<Self, MalformedStore> {
        if !bytes.starts_with(MAGIC) || bytes.len() < LEN_AT + 4 {
            return malformed("device table: not one");
        }
        let len = u32::from_le_bytes(bytes[LEN_AT..LEN_AT + 4].try_into().expect("four bytes")) as usize;
        let Some(bytes) = bytes.get(..len).filter(|bytes| bytes.len() > LEN_AT + 4 && is_sealed(bytes, CRC_AT)) else {
            return malformed("device table: the checksum is wrong");
        };
        let mut reader = StoreReader::new(&bytes[LEN_AT + 4..], "device table");
        if reader.u64()? != store {
            return malformed("device table: of another store");
        }
        let generation = reader.u64()?;
        let (data, parity) = (reader.u16()?, reader.u16()?);
        let (column_blocks, next_number) = (reader.u32()?, reader.u16()?);
        let (devices, groups) = (reader.u16()?, reader.u32()?);
        let columns = usize::from(data) + usize::from(parity);
        if data == 0 || columns > DEVICES_MAX || usize::from(devices) > DEVICES_MAX || column_blocks == 0 {
            return malformed(format!(
                "device table: {data}+{parity} columns of {column_blocks} blocks, {devices} devices"
            ));
        }
        let devices = (0..devices).map(|_| read_device(&mut reader)).collect::<Result<_, _>>()?;
        let mut table =
            Self { store, generation, data, parity, column_blocks, next_number, devices, groups: Vec::new() };
        for _ in 0..groups {
            let segments = reader.u32()?;
            let columns = (0..columns)
                .map(|_| Ok(ColumnPlace { device: reader.u16()?, slot: reader.u32()? }))
                .collect::<Result<_, _>>()?;
            table.groups.push(SegmentGroup { segments, columns });
        }
        reader.end()?;
        table.check()?;
        Ok(table)
    }

    /// Checks that devices are unique, and that every slot exists and belongs to one column.
    fn check(&self) -> Result<(), MalformedStore> {
        let mut numbers: Vec<u16> = self.devices.iter().map(|device| device.number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        if numbers.len() != self.devices.len() || numbers.last().is_some_and(|&last| last >= self.next_number) {
            return malformed("device table: two devices have one number");
        }
        if let Some(stray) = self
            .devices
            .iter()
            .find(|device| device.replaces.is_some_and(|old| self.device(old).is_none_or(|old| old.replaces.is_some())))
        {
            return malformed(format!("device table: device {} replaces none of the devices", stray.number));
        }
        let mut taken: BTreeMap<u16, Vec<(u64, u64)>> = BTreeMap::new();
        let mut total = 0_u64;
        for group in &self.groups {
            total += u64::from(group.segments);
            if group.segments == 0 {
                return malformed("device table: an empty group of segments");
            }
            for (i, column) in group.columns.iter().enumerate() {
                let end = u64::from(column.slot) + u64::from(group.segments);
                let device = self.device(column.device).filter(|device| device.replaces.is_none());
                if device.is_none_or(|device| end > u64::from(device.slots)) {
                    return malformed(format!("device table: slots up to {end} of device {}", column.device));
                }
                if group.columns[..i].iter().any(|other| other.device == column.device) {
                    return malformed(format!("device table: two columns of a segment on device {}", column.device));
                }
                taken.entry(column.device).or_default().push((u64::from(column.slot), end));
            }
        }
        if total > 1 << 20 {
            return malformed(format!("device table: {total} segments"));
        }
        for (device, runs) in &mut taken {
            runs.sort_unstable();
            if runs.windows(2).any(|pair| pair[0].1 > pair[1].0) {
                return malformed(format!("device table: a slot of device {device} belongs to two columns"));
            }
        }
        Ok(())
    }
}

fn read_device(reader: &mut StoreReader<'_>) -> Result<DeviceRecord, MalformedStore> {
    let number = reader.u16()?;
    let (state, flags) = (reader.u8()?, reader.u8()?);
    let replaced = reader.u16()?;
    let id = reader.bytes(16)?.try_into().expect("16 bytes");
    let slots = reader.u32()?;
    let (since, below) = (reader.u64()?, reader.u32()?);
    let state = match state {
        0 => RecordedState::Active,
        1 => RecordedState::Away { since },
        2 => RecordedState::Filling { since, below },
        other => return malformed(format!("device table: state {other} of device {number}")),
    };
    if flags > 2 {
        return malformed(format!("device table: flags {flags:#x} of device {number}"));
    }
    let len = usize::from(reader.u16()?);
    if len > PATH_MAX {
        return malformed(format!("device table: a path of {len} bytes"));
    }
    let path = reader.text(len)?.to_owned();
    Ok(DeviceRecord { number, id, slots, state, replaces: (flags == 1).then_some(replaced), leaving: flags == 2, path })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::format) fn sample() -> DeviceTable {
        let device = |number: u16, state| DeviceRecord {
            number,
            id: [number as u8; 16],
            slots: 40,
            state,
            replaces: None,
            leaving: false,
            path: format!("/srv/d{number}"),
        };
        let place = |device, slot| ColumnPlace { device, slot };
        DeviceTable {
            store: 77,
            generation: 5,
            data: 2,
            parity: 1,
            column_blocks: 16,
            next_number: 4,
            devices: vec![
                device(0, RecordedState::Active),
                device(1, RecordedState::Away { since: 9 }),
                device(2, RecordedState::Active),
                DeviceRecord { replaces: Some(1), ..device(3, RecordedState::Filling { since: 0, below: 7 }) },
            ],
            groups: vec![
                SegmentGroup { segments: 30, columns: vec![place(0, 0), place(1, 0), place(2, 0)] },
                SegmentGroup { segments: 10, columns: vec![place(0, 30), place(2, 30), place(1, 30)] },
            ],
        }
    }

    #[test]
    fn round_trip_and_damage() {
        let bytes = sample().encode().expect("small");
        assert_eq!(DeviceTable::decode(&bytes, 77), Ok(sample()));
        assert_eq!(sample().segments(), 40);
        assert_eq!((sample().columns_on(1), sample().columns_on(3)), (40, 0));
        let mut leaving = sample();
        leaving.devices[2].leaving = true;
        let found = DeviceTable::decode(&leaving.encode().expect("small"), 77);
        assert_eq!(found.as_ref(), Ok(&leaving));
        assert_eq!(found.expect("valid").leaving().map(|device| device.number).collect::<Vec<_>>(), [2]);
        assert!(DeviceTable::decode(&bytes, 78).is_err(), "another store's");
        let used = u32::from_le_bytes(bytes[LEN_AT..LEN_AT + 4].try_into().expect("four")) as usize;
        for at in 0..used {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(DeviceTable::decode(&bad, 77).is_err(), "byte {at}");
            assert!(DeviceTable::decode(&bytes[..at], 77).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn impossible_tables_are_rejected() {
        let rejected = |change: fn(&mut DeviceTable)| {
            let mut table = sample();
            change(&mut table);
            DeviceTable::decode(&table.encode().expect("small"), 77).expect_err("impossible").0
        };
        assert!(rejected(|table| table.groups[1].columns[0].slot = 29).contains("belongs to two"));
        assert!(rejected(|table| table.groups[1].columns[0].slot = 31).contains("slots up to 41"));
        assert!(rejected(|table| table.groups[0].columns[1].device = 0).contains("two columns"));
        assert!(rejected(|table| table.groups[0].columns[1].device = 3).contains("slots up to"));
        assert!(rejected(|table| table.groups[0].segments = 0).contains("empty group"));
        assert!(rejected(|table| table.devices[3].number = 2).contains("one number"));
        assert!(rejected(|table| table.devices[3].replaces = Some(9)).contains("replaces none"));
        assert!(rejected(|table| table.devices[3].leaving = true).contains("flags 0x3"));
        assert!(rejected(|table| table.data = 0).contains("0+1 columns"));
    }

    #[test]
    fn a_long_path_is_cut_at_a_character() {
        let mut table = sample();
        table.devices[0].path = "ä".repeat(PATH_MAX);
        let found = DeviceTable::decode(&table.encode().expect("small"), 77).expect("valid");
        assert_eq!(found.devices[0].path, "ä".repeat(PATH_MAX / 2));
    }
}
