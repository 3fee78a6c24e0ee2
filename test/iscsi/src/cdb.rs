//! Commands as bytes (SBC-3, SPC-4): the few that tests send.

/// A command.
pub type Cdb = [u8; 16];

fn cdb(bytes: &[u8]) -> Cdb {
    let mut cdb = [0; 16];
    cdb[..bytes.len()].copy_from_slice(bytes);
    cdb
}

fn run16(opcode: u8, flags: u8, lba: u64, blocks: u32) -> Cdb {
    let mut cdb = cdb(&[opcode, flags]);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

/// TEST UNIT READY.
pub fn test_unit_ready() -> Cdb {
    cdb(&[0])
}

/// INQUIRY, of a page if there is one, with room for 255 bytes.
pub fn inquiry(page: Option<u8>) -> Cdb {
    cdb(&[0x12, page.is_some().into(), page.unwrap_or(0), 0, 255])
}

/// READ (16).
pub fn read(lba: u64, blocks: u32) -> Cdb {
    run16(0x88, 0, lba, blocks)
}

/// WRITE (16).
pub fn write(lba: u64, blocks: u32) -> Cdb {
    run16(0x8a, 0, lba, blocks)
}

/// SYNCHRONIZE CACHE (16): all of it.
pub fn sync() -> Cdb {
    run16(0x91, 0, 0, 0)
}

/// COMPARE AND WRITE.
pub fn compare_and_write(lba: u64, blocks: u8) -> Cdb {
    let mut cdb = run16(0x89, 0, lba, 0);
    cdb[13] = blocks;
    cdb
}

/// WRITE SAME (16), with UNMAP if asked for.
pub fn write_same(lba: u64, blocks: u32, unmap: bool) -> Cdb {
    run16(0x93, u8::from(unmap) << 3, lba, blocks)
}

/// UNMAP with a list of `len` bytes.
pub fn unmap(len: u16) -> Cdb {
    let [high, low] = len.to_be_bytes();
    cdb(&[0x42, 0, 0, 0, 0, 0, 0, high, low])
}

/// EXTENDED COPY (LID1) with a list of `len` bytes.
pub fn extended_copy(len: u32) -> Cdb {
    let mut cdb = cdb(&[0x83]);
    cdb[10..14].copy_from_slice(&len.to_be_bytes());
    cdb
}

/// A list of [`extended_copy`] for one run of blocks between units, which are named by a designator of their page 83.
pub fn copy_list(from: (&[u8], u64), to: (&[u8], u64), blocks: u16) -> Vec<u8> {
    let mut list = vec![1, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
    for (designator, _) in [from, to] {
        let mut target = vec![0xe4, 0, 0, 0];
        target.extend_from_slice(designator);
        target.resize(28, 0);
        // Bytes of a block.
        target.extend([0, 0, 2, 0]);
        list.extend(target);
    }
    list.extend([0x02, 0, 0, 24, 0, 0, 0, 1, 0, 0]);
    list.extend(blocks.to_be_bytes());
    list.extend(from.1.to_be_bytes());
    list.extend(to.1.to_be_bytes());
    list
}

/// REPORT LUNS with room for 1024 bytes.
pub fn report_luns() -> Cdb {
    cdb(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 4, 0])
}

/// PERSISTENT RESERVE OUT with the 24 bytes of a plain list.
pub fn reserve_out(action: u8, kind: u8) -> Cdb {
    cdb(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24])
}

/// The parameter list of [`reserve_out`].
pub fn reserve_list(key: u64, service_key: u64, persist: bool) -> [u8; 24] {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&service_key.to_be_bytes());
    list[20] = persist.into();
    list
}

/// PERSISTENT RESERVE IN with room for 1024 bytes.
pub fn reserve_in(action: u8) -> Cdb {
    cdb(&[0x5e, action, 0, 0, 0, 0, 0, 4, 0])
}
