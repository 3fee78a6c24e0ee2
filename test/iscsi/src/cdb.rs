//! CDB builders (SBC-3, SPC-4) for the commands that tests send.

/// Command descriptor block.
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

/// Builds TEST UNIT READY.
pub fn test_unit_ready() -> Cdb {
    cdb(&[0])
}

/// Builds INQUIRY, for a vital product data page if given, with an allocation length of 255 bytes.
pub fn inquiry(page: Option<u8>) -> Cdb {
    cdb(&[0x12, page.is_some().into(), page.unwrap_or(0), 0, 255])
}

/// Builds READ (16).
pub fn read(lba: u64, blocks: u32) -> Cdb {
    run16(0x88, 0, lba, blocks)
}

/// Builds WRITE (16).
pub fn write(lba: u64, blocks: u32) -> Cdb {
    run16(0x8a, 0, lba, blocks)
}

/// Builds SYNCHRONIZE CACHE (16) for the whole unit.
pub fn sync() -> Cdb {
    run16(0x91, 0, 0, 0)
}

/// Builds COMPARE AND WRITE.
pub fn compare_and_write(lba: u64, blocks: u8) -> Cdb {
    let mut cdb = run16(0x89, 0, lba, 0);
    cdb[13] = blocks;
    cdb
}

/// Builds WRITE SAME (16), with the UNMAP bit if asked for.
pub fn write_same(lba: u64, blocks: u32, unmap: bool) -> Cdb {
    run16(0x93, u8::from(unmap) << 3, lba, blocks)
}

/// Builds UNMAP with a parameter list of `len` bytes.
pub fn unmap(len: u16) -> Cdb {
    let [high, low] = len.to_be_bytes();
    cdb(&[0x42, 0, 0, 0, 0, 0, 0, high, low])
}

/// Builds EXTENDED COPY (LID1) with a parameter list of `len` bytes.
pub fn extended_copy(len: u32) -> Cdb {
    let mut cdb = cdb(&[0x83]);
    cdb[10..14].copy_from_slice(&len.to_be_bytes());
    cdb
}

/// Builds a parameter list of [`extended_copy`] for one LBA range between units, which are named by a designator of
/// their page 83h.
pub fn copy_list(from: (&[u8], u64), to: (&[u8], u64), blocks: u16) -> Vec<u8> {
    let mut list = vec![1, 0, 0, 64, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
    for (designator, _) in [from, to] {
        let mut target = vec![0xe4, 0, 0, 0];
        target.extend_from_slice(designator);
        target.resize(28, 0);
        // Block length in bytes.
        target.extend([0, 0, 2, 0]);
        list.extend(target);
    }
    list.extend([0x02, 0, 0, 24, 0, 0, 0, 1, 0, 0]);
    list.extend(blocks.to_be_bytes());
    list.extend(from.1.to_be_bytes());
    list.extend(to.1.to_be_bytes());
    list
}

/// Builds REPORT LUNS with an allocation length of 1024 bytes.
pub fn report_luns() -> Cdb {
    cdb(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 4, 0])
}

/// Builds REPORT TARGET PORT GROUPS with an allocation length, with the extended header if asked for.
pub fn report_port_groups(extended: bool, alloc_len: u32) -> Cdb {
    let mut cdb = cdb(&[0xa3, u8::from(extended) << 5 | 0x0a]);
    cdb[6..10].copy_from_slice(&alloc_len.to_be_bytes());
    cdb
}

/// Builds SET TARGET PORT GROUPS with a parameter list of `len` bytes.
pub fn set_port_groups(len: u32) -> Cdb {
    let mut cdb = cdb(&[0xa4, 0x0a]);
    cdb[6..10].copy_from_slice(&len.to_be_bytes());
    cdb
}

/// Builds RESERVE(6) of the whole unit.
pub fn reserve6() -> Cdb {
    cdb(&[0x16])
}

/// Builds PERSISTENT RESERVE OUT with a 24-byte parameter list.
pub fn reserve_out(action: u8, kind: u8) -> Cdb {
    cdb(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24])
}

/// Builds the parameter list of [`reserve_out`].
pub fn reserve_list(key: u64, service_key: u64, persist: bool) -> [u8; 24] {
    let mut list = [0; 24];
    list[..8].copy_from_slice(&key.to_be_bytes());
    list[8..16].copy_from_slice(&service_key.to_be_bytes());
    list[20] = persist.into();
    list
}

/// Builds PERSISTENT RESERVE IN with an allocation length of 1024 bytes.
pub fn reserve_in(action: u8) -> Cdb {
    cdb(&[0x5e, action, 0, 0, 0, 0, 0, 4, 0])
}
