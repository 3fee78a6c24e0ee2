//! CDBs and parameter lists of common commands (SPC-4, SBC-3).

/// Force unit access, in the flags of READ (16) and WRITE (16).
pub const FUA: u8 = 0x08;
/// Blocks may be deallocated, in the flags of WRITE SAME (16).
pub const UNMAP: u8 = 0x08;
/// No data follow and zeroes are written, in the flags of WRITE SAME (16).
pub const NO_DATA: u8 = 0x01;

/// Service actions of PERSISTENT RESERVE IN (SPC-4, 6.15).
#[allow(missing_docs)]
pub mod reserve_in {
    pub const READ_KEYS: u8 = 0;
    pub const READ_RESERVATION: u8 = 1;
    pub const REPORT_CAPABILITIES: u8 = 2;
    pub const READ_FULL_STATUS: u8 = 3;
}

/// Service actions of PERSISTENT RESERVE OUT (SPC-4, 6.16).
#[allow(missing_docs)]
pub mod reserve_out {
    pub const REGISTER: u8 = 0;
    pub const RESERVE: u8 = 1;
    pub const RELEASE: u8 = 2;
    pub const CLEAR: u8 = 3;
    pub const PREEMPT: u8 = 4;
    pub const PREEMPT_AND_ABORT: u8 = 5;
    pub const REGISTER_AND_IGNORE: u8 = 6;
    pub const REGISTER_AND_MOVE: u8 = 7;
}

/// Types of persistent reservations (SPC-4, 6.15.3.4).
#[allow(missing_docs)]
pub mod reservation_type {
    pub const WRITE_EXCLUSIVE: u8 = 1;
    pub const EXCLUSIVE_ACCESS: u8 = 3;
    pub const WRITE_EXCLUSIVE_REGISTRANTS: u8 = 5;
    pub const EXCLUSIVE_ACCESS_REGISTRANTS: u8 = 6;
    pub const WRITE_EXCLUSIVE_ALL: u8 = 7;
    pub const EXCLUSIVE_ACCESS_ALL: u8 = 8;
}

/// Vital product data pages.
#[allow(missing_docs)]
pub mod vpd {
    pub const SUPPORTED: u8 = 0x00;
    pub const SERIAL: u8 = 0x80;
    pub const IDENTIFICATION: u8 = 0x83;
    pub const BLOCK_LIMITS: u8 = 0xB0;
    pub const CHARACTERISTICS: u8 = 0xB1;
    pub const PROVISIONING: u8 = 0xB2;
}

/// Returns a CDB of 16 bytes with a place, a number of blocks, and flags in its second byte.
pub fn range16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> Vec<u8> {
    let mut cdb = vec![opcode, flags];
    cdb.extend(lba.to_be_bytes());
    cdb.extend(blocks.to_be_bytes());
    cdb.extend([0, 0]);
    cdb
}

/// Returns TEST UNIT READY.
pub fn test_unit_ready() -> Vec<u8> {
    vec![0; 6]
}

/// Returns REQUEST SENSE, for sense data in descriptor format if asked for.
pub fn request_sense(descriptor: bool, length: u8) -> Vec<u8> {
    vec![0x03, descriptor.into(), 0, 0, length, 0]
}

/// Returns INQUIRY for the standard data, or for a vital product data page.
pub fn inquiry(page: Option<u8>, length: u16) -> Vec<u8> {
    let [high, low] = length.to_be_bytes();
    vec![0x12, page.is_some().into(), page.unwrap_or(0), high, low, 0]
}

/// Returns READ CAPACITY (16).
pub fn read_capacity16(length: u32) -> Vec<u8> {
    range16(0x9E, 0x10, 0, length)
}

/// Returns READ (16).
pub fn read16(lba: u64, blocks: u32) -> Vec<u8> {
    range16(0x88, 0, lba, blocks)
}

/// Returns WRITE (16).
pub fn write16(lba: u64, blocks: u32) -> Vec<u8> {
    range16(0x8A, 0, lba, blocks)
}

/// Returns SYNCHRONIZE CACHE (16); 0 blocks are all up to the end.
pub fn synchronize_cache16(lba: u64, blocks: u32) -> Vec<u8> {
    range16(0x91, 0, lba, blocks)
}

/// Returns WRITE SAME (16), with [`UNMAP`] and [`NO_DATA`] among its flags.
pub fn write_same16(lba: u64, blocks: u32, flags: u8) -> Vec<u8> {
    range16(0x93, flags, lba, blocks)
}

/// Returns COMPARE AND WRITE.
pub fn compare_and_write(lba: u64, blocks: u8) -> Vec<u8> {
    let mut cdb = range16(0x89, 0, lba, 0);
    cdb[13] = blocks;
    cdb
}

/// Returns UNMAP with a parameter list of `length` bytes.
pub fn unmap(length: u16) -> Vec<u8> {
    let [high, low] = length.to_be_bytes();
    vec![0x42, 0, 0, 0, 0, 0, 0, high, low, 0]
}

/// Returns the parameter list of UNMAP for ranges of blocks: first block and number.
pub fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let length = 16 * ranges.len() as u16;
    let mut list = [(length + 6).to_be_bytes(), length.to_be_bytes(), [0; 2], [0; 2]].concat();
    for (lba, blocks) in ranges {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}

/// Returns REPORT LUNS.
pub fn report_luns(select: u8, length: u32) -> Vec<u8> {
    let mut cdb = vec![0xA0, 0, select, 0, 0, 0];
    cdb.extend(length.to_be_bytes());
    cdb.extend([0, 0]);
    cdb
}

/// Returns PERSISTENT RESERVE IN.
pub fn persistent_reserve_in(action: u8, length: u16) -> Vec<u8> {
    let [high, low] = length.to_be_bytes();
    vec![0x5E, action, 0, 0, 0, 0, 0, high, low, 0]
}

/// Returns PERSISTENT RESERVE OUT with a parameter list of `length` bytes.
pub fn persistent_reserve_out(action: u8, kind: u8, length: u32) -> Vec<u8> {
    let mut cdb = vec![0x5F, action, kind, 0, 0];
    cdb.extend(length.to_be_bytes());
    cdb.push(0);
    cdb
}

/// Returns the parameter list of PERSISTENT RESERVE OUT; flags of 1 let the registration survive a loss of power.
pub fn reserve_list(key: u64, service_key: u64, flags: u8) -> Vec<u8> {
    let mut list = [key.to_be_bytes(), service_key.to_be_bytes()].concat();
    list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cdbs_have_the_length_of_their_group() {
        // The three highest bits of the opcode are the group code (SPC-4, 4.2.5.1).
        let length = |opcode: u8| [6, 10, 10, 0, 16, 12, 0, 0][usize::from(opcode >> 5)];
        let all = [
            test_unit_ready(),
            request_sense(true, 252),
            inquiry(Some(vpd::SERIAL), 255),
            read_capacity16(32),
            read16(1, 2),
            write16(1, 2),
            synchronize_cache16(0, 0),
            write_same16(1, 2, UNMAP),
            compare_and_write(1, 2),
            unmap(24),
            report_luns(0, 16),
            persistent_reserve_in(0, 8),
            persistent_reserve_out(0, 0, 24),
        ];
        for cdb in all {
            assert_eq!(cdb.len(), length(cdb[0]), "{cdb:x?}");
        }
    }

    #[test]
    fn numbers_are_where_the_standards_have_them() {
        let write = write16(0x0102_0304_0506_0708, 0x090A_0B0C);
        assert_eq!(write, [0x8A, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]);
        assert_eq!(compare_and_write(0, 7)[10..14], [0, 0, 0, 7]);
        assert_eq!(inquiry(Some(0xB0), 0x0102), [0x12, 1, 0xB0, 1, 2, 0]);
        assert_eq!(report_luns(2, 0x0102_0304)[2..10], [2, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(persistent_reserve_out(1, 3, 24), [0x5F, 1, 3, 0, 0, 0, 0, 0, 24, 0]);
        let list = unmap_list(&[(5, 6), (7, 8)]);
        assert_eq!((list.len(), &list[..4]), (40, &[0, 38, 0, 32][..]));
        assert_eq!((list[15], list[19], list[31], list[35]), (5, 6, 7, 8));
        assert_eq!((reserve_list(1, 2, 1).len(), reserve_list(1, 2, 1)[20]), (24, 1));
    }
}
