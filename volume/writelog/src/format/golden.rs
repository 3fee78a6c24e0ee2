//! Golden encodings of each structure: logs on existing disks must stay readable.

use super::*;

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn superblock() -> LogSuperblock {
    LogSuperblock {
        features: 0,
        serial: 7,
        log: *b"0123456789abcdef",
        epoch: 3,
        run: 5,
        medium: MediumKind::Ssd,
        clean: true,
        unit: 512,
        size: 16 << 20,
        slots: 0,
        created_s: 1_700_000_000,
        tail_pos: 100,
        tail_block: 9,
        tail_seq: 11,
        head_block: 12,
        copy: None,
        volume: "store:00/img".into(),
        name: "local/disk".into(),
        encryption: None,
    }
}

fn entry(seq: u64) -> EntryRecord {
    EntryRecord {
        kind: EntryKind::Write,
        extent: Extent::new(8192, 4096),
        seq,
        generation: 2,
        place: 101,
        crc: 0x1234_5678,
        time_ms: 1_700_000_000_123,
        term: 0,
        salt: None,
    }
}

#[test]
fn the_superblock_is_what_it_was() {
    let bytes = superblock().encode();
    assert_eq!(bytes.len(), SUPER_LEN);
    assert_eq!(
        hex(&bytes[..160]),
        include_str!("golden/superblock.hex").trim(),
        "the first 160 bytes; the rest is zero"
    );
    assert!(bytes[160..].iter().all(|&byte| byte == 0));
    assert_eq!(LogSuperblock::decode(&bytes), Ok(superblock()));
    for at in 8..160 {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x10;
        assert!(matches!(LogSuperblock::decode(&damaged), Err(LogFormatError::Damaged(_))), "byte {at}");
    }
    assert_eq!(LogSuperblock::decode(&[0; SUPER_LEN]), Err(LogFormatError::Stranger));
    let newer = LogSuperblock { features: 1 << 40, ..superblock() }.encode();
    assert!(matches!(LogSuperblock::decode(&newer), Err(LogFormatError::Newer(_))));
}

#[test]
fn the_superblock_of_a_log_with_members_is_what_it_was() {
    let mut superblock = superblock();
    superblock.set_copy(CopyState { copy: *b"copycopycopycopy", kept: 12, cut: 15, filling: true });
    let bytes = superblock.encode();
    assert_eq!(hex(&bytes[..224]), include_str!("golden/superblock-members.hex").trim());
    assert!(bytes[224..].iter().all(|&byte| byte == 0));
    assert_eq!(LogSuperblock::decode(&bytes), Ok(superblock.clone()));
    let mut other = superblock.clone();
    other.features = 0;
    assert!(matches!(LogSuperblock::decode(&other.encode()), Err(LogFormatError::Damaged(_))), "no feature bit");
    other = superblock.clone();
    other.copy = None;
    assert!(matches!(LogSuperblock::decode(&other.encode()), Err(LogFormatError::Newer(_))), "a feature of version 2");
    other = superblock;
    other.set_copy(CopyState { copy: [1; 16], kept: 16, cut: 15, filling: true });
    assert!(matches!(LogSuperblock::decode(&other.encode()), Err(LogFormatError::Damaged(_))), "the cut is too low");
}

#[test]
fn the_superblock_of_a_copy_in_persistent_memory_is_what_it_was() {
    let mut superblock = LogSuperblock { medium: MediumKind::Pmem, unit: 64, slots: 0, ..superblock() };
    superblock.set_copy(CopyState { copy: *b"copycopycopycopy", kept: 12, cut: 15, filling: true });
    let bytes = superblock.encode();
    assert_eq!(hex(&bytes[..224]), include_str!("golden/superblock-pmem.hex").trim());
    let is_valid = |changed: LogSuperblock| LogSuperblock::decode(&changed.encode()) == Ok(changed);
    for unit in [64, 512, 1024, 4096] {
        assert!(is_valid(LogSuperblock { unit, ..superblock.clone() }), "unit {unit}");
    }
    for unit in [0, 1, 32, 128, 256, 576, 8192] {
        assert!(!is_valid(LogSuperblock { unit, ..superblock.clone() }), "unit {unit}");
    }
    assert!(!is_valid(LogSuperblock { slots: 100, ..superblock.clone() }), "a ring of entries");
    assert!(!is_valid(LogSuperblock { medium: MediumKind::Ssd, ..superblock.clone() }), "no sectors of 64 bytes");
    let places = blocks_size_max(64) / 4096 * 4096;
    assert!(is_valid(LogSuperblock { size: places, ..superblock.clone() }));
    assert!(!is_valid(LogSuperblock { size: places + 4096, ..superblock.clone() }), "no places for its payloads");
    let mut without = LogSuperblock { slots: 100, copy: None, features: 0, ..superblock };
    assert!(is_valid(without.clone()));
    without.slots = 0;
    assert!(!is_valid(without), "append blocks without members");
}

#[test]
fn an_append_block_in_persistent_memory_is_what_it_was() {
    let units = 2 + 64;
    let header = BlockHeader {
        run: 5,
        count: 1,
        behind: 1,
        number: 12,
        pos: 99,
        first_seq: 77,
        tail_pos: 90,
        tail_seq: 70,
        units,
    };
    let mut bytes = [0; 128];
    header.encode(0xdead_beef, &[entry(77)], &mut bytes);
    assert_eq!(hex(&bytes), include_str!("golden/block-pmem.hex").trim());
    assert_eq!(BlockHeader::peek(&bytes, 0xdead_beef, 64), Some(header));
    assert_eq!(header.entries(&bytes, 0xdead_beef, 64, 10_000), Ok(vec![entry(77)]));
}

#[test]
fn the_superblock_of_an_encrypted_log_is_what_it_was() {
    let mut plain = superblock();
    for members in [false, true] {
        let mut encrypted = plain.clone();
        encrypted.set_encryption(*b"checkcheckcheck!");
        let bytes = encrypted.encode();
        assert_eq!(LogSuperblock::decode(&bytes), Ok(encrypted.clone()));
        assert_eq!(bytes[16], plain.features as u8 | 2);
        let after = bytes.windows(16).position(|found| found == b"checkcheckcheck!").expect("the check value");
        assert!(bytes[after - 10..after] == *b"local/disk" && bytes[after + 16..].iter().all(|&byte| byte == 0));
        if !members {
            assert_eq!(hex(&bytes[..192]), include_str!("golden/superblock-encrypted.hex").trim());
        }
        plain.set_copy(CopyState { copy: *b"copycopycopycopy", kept: 12, cut: 15, filling: true });
    }
}

#[test]
fn an_entry_of_an_encrypted_log_is_what_it_was() {
    let entry = EntryRecord { term: 5, salt: Some(0x0403_0201), ..entry(77) };
    let bytes = entry.encode(0xdead_beef);
    assert_eq!(hex(&bytes), include_str!("golden/entry-encrypted.hex").trim());
    assert_eq!(EntryRecord::decode(&bytes, 0xdead_beef, 77), Ok(entry));
    for flags in [2, 3, 0x81] {
        let mut other = bytes;
        other[1] = flags;
        reseal(&mut other, 60);
        assert!(EntryRecord::decode(&other, 0xdead_beef, 77).is_err(), "flags {flags}");
    }
    let odd = EntryRecord { extent: Extent::new(0, 513), ..entry };
    assert_eq!((odd.stored_len(), EntryRecord { salt: None, ..odd }.stored_len()), (528, 513));
    // A block of another run does not have it, even without members.
    let (count, behind, number, pos, first_seq, tail_pos, tail_seq) = (1, 0, 1, 0, 77, 0, 77);
    for (run, is_valid) in [(5, true), (6, false)] {
        let units = 1 + 8;
        let header = BlockHeader { run, count, behind, number, pos, first_seq, tail_pos, tail_seq, units };
        let mut bytes = [0; 512];
        header.encode(9, &[EntryRecord { place: 1, ..entry }], &mut bytes);
        assert_eq!(header.entries(&bytes, 9, 512, 100).is_ok(), is_valid, "run {run}");
    }
}

#[test]
fn blocks_follow_by_their_runs() {
    let alone = superblock();
    assert!(
        alone.accepts(5, 3, 100) && alone.accepts(6, 5, 100) && !alone.accepts(7, 5, 100) && !alone.accepts(3, 4, 1)
    );
    let mut member = superblock();
    member.set_copy(CopyState { copy: [1; 16], kept: 12, cut: 15, filling: false });
    assert!(member.accepts(4, 4, 14) && member.accepts(5, 4, 15));
    assert!(!member.accepts(4, 4, 15), "left over from a former term");
    assert!(!member.accepts(5, 4, 14), "of a term that had not begun");
    assert!(!member.accepts(6, 5, 16) && !member.accepts(3, 4, 13));
    assert!(member.believes(4, 11) && !member.believes(4, 12) && !member.believes(4, 14) && member.believes(5, 15));
}

#[test]
fn an_entry_is_what_it_was() {
    let bytes = entry(77).encode(0xdead_beef);
    assert_eq!(hex(&bytes), include_str!("golden/entry.hex").trim());
    assert_eq!(EntryRecord::decode(&bytes, 0xdead_beef, 77), Ok(entry(77)));
    assert!(EntryRecord::decode(&bytes, 0xdead_beef, 78).is_err());
    assert!(EntryRecord::decode(&bytes, 0xdead_beee, 77).is_err());
    for at in 0..ENTRY_LEN {
        let mut damaged = bytes;
        damaged[at] ^= 1;
        assert!(EntryRecord::decode(&damaged, 0xdead_beef, 77).is_err(), "byte {at}");
    }
}

#[test]
fn an_append_block_is_what_it_was() {
    let header = BlockHeader {
        run: 5,
        count: 1,
        behind: 1,
        number: 12,
        pos: 100,
        first_seq: 77,
        tail_pos: 90,
        tail_seq: 70,
        units: 9,
    };
    let mut bytes = [0; 512];
    header.encode(0xdead_beef, &[entry(77)], &mut bytes);
    assert_eq!(hex(&bytes[..128]), include_str!("golden/block.hex").trim());
    let found = BlockHeader::peek(&bytes, 0xdead_beef, 512).expect("a header");
    assert_eq!(found, header);
    assert_eq!(found.entries(&bytes, 0xdead_beef, 512, 10_000), Ok(vec![entry(77)]));
    for at in 0..128 {
        let mut damaged = bytes;
        damaged[at] ^= 1;
        let found = BlockHeader::peek(&damaged, 0xdead_beef, 512);
        assert!(found.is_none_or(|found| found.entries(&damaged, 0xdead_beef, 512, 10_000).is_err()), "byte {at}");
    }
}

#[test]
fn a_directory_is_what_it_was() {
    let log = |at: u8, start| ShelfEntry { log: [at; 16], start, size: 16 << 20 };
    let directory =
        LogDirectory { serial: 4, medium: MediumKind::Pmem, logs: vec![log(1, LOGS_AT), log(2, LOGS_AT + (32 << 20))] };
    let bytes = directory.encode();
    assert_eq!(hex(&bytes[..192]), include_str!("golden/directory.hex").trim());
    assert_eq!(LogDirectory::decode(&bytes), Ok(directory.clone()));
    assert_eq!(directory.room_for(16 << 20, None), Some(LOGS_AT + (16 << 20)));
    assert_eq!(directory.room_for(17 << 20, None), Some(LOGS_AT + (48 << 20)));
    assert_eq!(directory.room_for(17 << 20, Some(LOGS_AT + (64 << 20))), None);
}

#[test]
fn a_word_has_a_check() {
    assert_eq!(encode_word(0x0123_4567, 0xdead_beef), 0x0000_0123_4567_0000 | GOLDEN_CHECK);
    for seq in [0, 1, 1 << 46] {
        let word = encode_word(seq, 9);
        assert_eq!(decode_word(word, 9), Ok(seq));
        assert!((0..64).all(|bit| decode_word(word ^ 1 << bit, 9).is_err()));
        assert!(decode_word(word, 10).is_err());
    }
}

/// Check in the word of [`a_word_has_a_check`].
const GOLDEN_CHECK: u64 = 46_967;
