//! Detection of existing content of a file or device before a store is created: a store, foreign signatures, data, or
//! nothing.
//!
//! Signatures are the subset of those known to `wipefs` that is in use today; see decision 22.

use forebay_block::{BufMut, Error, ErrorKind, Result};
use forebay_reactor::File;

use crate::format::BLOCK64;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::batch::BatchHeader;
use crate::format::ranges;
use crate::format::superblock::{COPIES, MAGIC, SEGMENTS_START, StoreSuperblock};
use crate::recover::read_superblock;

/// Bytes at the start in which signatures are searched, and bytes before the end.
const HEAD: u64 = 2 << 20;
const TAIL: u64 = 1 << 20;
/// Bytes read at a time.
const STEP: u64 = 1 << 20;
/// Number of evenly spaced device locations sampled for data, and bytes per sample.
const SAMPLES: u64 = 256;
const SAMPLE: u64 = 64 << 10;

/// Existing content of a file or device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Occupant {
    /// No content, or only zeroes.
    Nothing,
    /// Forebay store.
    Store,
    /// Forebay store whose superblock is unreadable, with the reason.
    DamagedStore(String),
    /// Foreign signatures or data, each described.
    Foreign(Vec<String>),
}

/// Position of a signature, in bytes.
#[derive(Clone, Copy)]
enum At {
    Start(usize),
    /// Offset before the end.
    End(u64),
}

use At::{End, Start};

/// Name, position and magic bytes of a signature.
type Signature = (&'static str, At, &'static [u8]);

const MD: &[u8] = &0xa92b_4efc_u32.to_le_bytes();

const SIGNATURES: &[Signature] = &[
    ("a LUKS volume", Start(0), b"LUKS\xba\xbe"),
    ("a LUKS volume (second header)", Start(0x4000), b"SKUL\xba\xbe"),
    ("a LUKS volume (second header)", Start(0x8000), b"SKUL\xba\xbe"),
    ("an LVM physical volume", Start(0), b"LABELONE"),
    ("an LVM physical volume", Start(512), b"LABELONE"),
    ("an LVM physical volume", Start(1024), b"LABELONE"),
    ("an LVM physical volume", Start(1536), b"LABELONE"),
    ("a member of a Linux RAID (1.1)", Start(0), MD),
    ("a member of a Linux RAID (1.2)", Start(4096), MD),
    ("a Ceph OSD (BlueStore)", Start(0), b"bluestore block device"),
    ("a bcache device", Start(4096 + 24), b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"),
    ("a bcachefs file system", Start(4096 + 24), b"\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"),
    ("a dm-integrity device", Start(0), b"integrt\0"),
    ("a dm-verity device", Start(0), b"verity\0\0"),
    ("a GPT partition table", Start(512), b"EFI PART"),
    ("a GPT partition table", Start(4096), b"EFI PART"),
    ("a GPT partition table (backup)", End(512), b"EFI PART"),
    ("a GPT partition table (backup)", End(4096), b"EFI PART"),
    ("an MBR partition table or boot sector", Start(510), b"\x55\xaa"),
    ("an XFS file system", Start(0), b"XFSB"),
    ("an XFS log device", Start(0), b"\xfe\xed\xba\xbe"),
    ("a btrfs file system", Start(0x1_0040), b"_BHRfS_M"),
    ("an f2fs file system", Start(1024), b"\x10\x20\xf5\xf2"),
    ("an erofs file system", Start(1024), b"\xe2\xe1\xf5\xe0"),
    ("a squashfs file system", Start(0), b"hsqs"),
    ("an NTFS file system", Start(3), b"NTFS    "),
    ("an exFAT file system", Start(3), b"EXFAT   "),
    ("a ReFS file system", Start(3), b"ReFS\0\0\0\0"),
    ("a BitLocker volume", Start(3), b"-FVE-FS-"),
    ("a FAT file system", Start(54), b"FAT12   "),
    ("a FAT file system", Start(54), b"FAT16   "),
    ("a FAT file system", Start(82), b"FAT32   "),
    ("an ISO 9660 file system", Start(0x8001), b"CD001"),
    ("a UDF file system", Start(0x8001), b"BEA01"),
    ("an HFS+ file system", Start(1024), b"H+\0\x04"),
    ("an HFSX file system", Start(1024), b"HX\0\x05"),
    ("an APFS container", Start(32), b"NXSB"),
    ("a JFS file system", Start(0x8000), b"JFS1"),
    ("a ReiserFS file system", Start(0x1_0034), b"ReIsEr"),
    ("a NILFS2 file system", Start(1024 + 6), b"\x34\x34"),
    ("a GFS2 file system", Start(0x1_0000), b"\x01\x16\x19\x70"),
    ("an OCFS2 file system", Start(2 * 1024), b"OCFSV2"),
    ("an OCFS2 file system", Start(2 * 4096), b"OCFSV2"),
    ("a VMFS file system", Start(1 << 20), b"\x0d\xd0\x01\xc0"),
    ("a DRBD device", End(4096 - 60), b"\x83\x74\x02"),
    ("a member of a DDF RAID", End(512), b"\xde\x11\xde\x11"),
    ("a member of a DDF RAID", End(257 * 512), b"\xde\x11\xde\x11"),
    ("a member of an Intel RAID", End(2 * 512), b"Intel Raid ISM Cfg Sig. "),
    ("a member of an Intel RAID", End(2 * 4096), b"Intel Raid ISM Cfg Sig. "),
    ("a QCOW2 image", Start(0), b"QFI\xfb"),
    ("a VMDK image", Start(0), b"KDMV"),
    ("a VDI image", Start(0x40), b"\x7f\x10\xda\xbe"),
    ("a VHDX image", Start(0), b"vhdxfile"),
    ("a VHD image", End(512), b"conectix"),
    ("named ranges of Forebay", Start(0), ranges::MAGIC),
    ("named ranges of Forebay", Start(0x1_0000), ranges::MAGIC),
    ("write logs of Forebay", Start(0), b"FBYSHLF\x01"),
    ("write logs of Forebay that were not finished", Start(0), b"FBYSHLF\x00"),
];

/// Page sizes of machines that create swap areas.
const PAGES: [usize; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
const SWAPS: [&[u8]; 5] = [b"SWAPSPACE2", b"SWAP-SPACE", b"S1SUSPEND\0", b"S2SUSPEND\0", b"ULSUSPEND\0"];

/// Returns the names of signatures on a device of `size` bytes, given its first and last bytes.
pub fn signatures(head: &[u8], tail: &[u8], size: u64) -> Vec<String> {
    let starts = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|bytes| bytes.starts_with(magic));
    let tail_at = size - tail.len() as u64;
    let ends = |at: u64, magic: &[u8]| {
        let at = at.checked_sub(tail_at).and_then(|at| tail.get(at as usize..));
        at.is_some_and(|bytes| bytes.starts_with(magic))
    };
    let is_there = |&(_, at, magic): &&Signature| match at {
        Start(at) => starts(*at, magic),
        End(before) => size >= *before && ends(size - before, magic),
    };
    let mut found: Vec<String> = Vec::new();
    if starts(1024 + 56, b"\x53\xef") {
        found.push(format!("an ext2, ext3 or ext4 file system{}", label(head, 1024 + 120, 16)));
    }
    found.extend(SIGNATURES.iter().filter(is_there).map(|(name, ..)| match *name {
        "an XFS file system" => format!("{name}{}", label(head, 108, 12)),
        name => name.to_owned(),
    }));
    if PAGES.iter().any(|page| SWAPS.iter().any(|swap| starts(page - 10, swap))) {
        found.push("a swap area".into());
    }
    // Formats 0.90 and 1.0 are located relative to the end: at the last aligned 64 KiB, or 8 KiB before it aligned to 4
    // KiB.
    if size >= 128 << 10 && ends((size & !0xffff) - 0x1_0000, MD) {
        found.push("a member of a Linux RAID (0.90)".into());
    }
    if size >= 128 << 10 && ends((size / 512 - 16) / 8 * 8 * 512, MD) {
        found.push("a member of a Linux RAID (1.0)".into());
    }
    // Uberblocks are in the second half of a label; both labels at the start are within the head.
    let uberblock = 0x00ba_b10c_u64;
    let mut uberblocks = (0..2usize).flat_map(|label| (128..256usize).map(move |at| (label * 256 + at) << 10));
    if uberblocks.any(|at| starts(at, &uberblock.to_le_bytes()) || starts(at, &uberblock.to_be_bytes())) {
        found.push("a member of a ZFS pool".into());
    }
    found.dedup();
    found
}

/// Returns a file system's label, formatted for messages.
fn label(head: &[u8], at: usize, len: usize) -> String {
    let bytes = head.get(at..at + len).unwrap_or_default();
    let text: String = bytes.iter().take_while(|byte| byte.is_ascii_graphic()).map(|&byte| char::from(byte)).collect();
    if text.is_empty() { text } else { format!(" (label '{text}')") }
}

/// Reads up to `len` bytes at `at`; fewer at the end of the file.
async fn read(file: &File, at: u64, len: u64) -> Result<Vec<u8>> {
    let mut out = Vec::with_capacity(len as usize);
    while (out.len() as u64) < len {
        let step = (len - out.len() as u64).min(STEP) as usize;
        let (result, buf) = file.read_at(BufMut::with_capacity(step), at + out.len() as u64).await;
        let failed = |error| Error::from_io(error, format!("looking at what {} holds", file.path().display()));
        let got = result.map_err(failed)?;
        out.extend_from_slice(&buf);
        if got < step {
            break;
        }
    }
    Ok(out)
}

/// Detects the existing content of a file or device.
pub async fn look(file: &File) -> Result<Occupant> {
    let size = file.info().size;
    let head = read(file, 0, HEAD.min(size.next_multiple_of(BLOCK64))).await?;
    let own = own(file, &head).await;
    if let Some(Occupant::Store) = own {
        return Ok(Occupant::Store);
    }
    let tail = read(file, size.saturating_sub(TAIL) / BLOCK64 * BLOCK64, TAIL + BLOCK64).await?;
    let mut found = signatures(&head, &tail, size.max(tail.len() as u64));
    if let Some(damaged) = own {
        if found.is_empty() {
            return Ok(damaged);
        }
        // Another format was created over a store, of which parts remain.
        found.push("remains of a Forebay store".into());
    }
    if found.is_empty()
        && let Some(at) = first_data(file, size).await?
    {
        found.push(format!("unknown data at byte {at}"));
    }
    Ok(if found.is_empty() { Occupant::Nothing } else { Occupant::Foreign(found) })
}

/// Returns the names of foreign signatures at the beginning and at the end of a file or device. Data before byte
/// `own_end` belongs to a store and is not examined as the end.  Unreadable areas count as having none.
pub async fn signatures_beside(file: &File, own_end: u64) -> Vec<String> {
    let size = file.info().size;
    let head = read_readable(file, 0, HEAD.min(size)).await;
    let tail_at = (size.saturating_sub(TAIL) / BLOCK64 * BLOCK64).max(own_end.min(size));
    let tail = read_readable(file, tail_at, size - tail_at).await;
    signatures(&head, &tail, size)
}

/// Reads `len` bytes at `at`, within the file; unreadable blocks are returned as zeroes.
async fn read_readable(file: &File, at: u64, len: u64) -> Vec<u8> {
    let rounded = len.next_multiple_of(BLOCK64);
    let mut out = match read(file, at, rounded).await {
        Ok(bytes) => bytes,
        Err(_) => {
            let mut out = Vec::with_capacity(rounded as usize);
            for block in (0..rounded).step_by(BLOCK64 as usize) {
                let mut bytes = read(file, at + block, BLOCK64).await.unwrap_or_default();
                bytes.resize(BLOCK64 as usize, 0);
                out.extend_from_slice(&bytes);
            }
            out
        }
    };
    out.resize(len as usize, 0);
    out
}

/// Detects a store that begins with `head`; `None` if there is no trace of one.
async fn own(file: &File, head: &[u8]) -> Option<Occupant> {
    let block = |at: u64| head.get(at as usize..(at + BLOCK64) as usize).unwrap_or_default();
    let superblock =
        COPIES.iter().any(|&at| StoreSuperblock::decode(block(at)).is_ok() || block(at).starts_with(MAGIC));
    let anchor = SLOTS.iter().flatten().any(|&at| Anchor::decode_any(block(at)).is_ok());
    // The log begins in the first segment, and returns to it.
    let first = block(SEGMENTS_START);
    let batch = BatchHeader::decode(first).is_ok_and(|header| header.block == SEGMENTS_START / BLOCK64);
    if !superblock && !anchor && !batch {
        return None;
    }
    Some(match read_superblock(file).await {
        Ok(_) => Occupant::Store,
        // A store of a newer version counts as intact, as this version cannot tell.
        Err(error) if error.kind() == ErrorKind::Unsupported => Occupant::Store,
        Err(error) if superblock => Occupant::DamagedStore(error.to_string()),
        Err(_) => Occupant::DamagedStore(
            "both copies of its superblock are overwritten; `forebay store check --rebuild` looks for what they held in the \
             log"
                .into(),
        ),
    })
}

/// Returns the position of the first nonzero data found.  Reads a whole file except its holes; samples a device.
async fn first_data(file: &File, size: u64) -> Result<Option<u64>> {
    let nonzero = |bytes: &[u8]| bytes.iter().position(|&byte| byte != 0).map(|at| at as u64);
    if !file.info().block_device {
        let mut at = 0;
        while at < size {
            let failed = |error| Error::from_io(error, format!("looking for data in {}", file.path().display()));
            let Some(data) = file.next_data(at).map_err(failed)? else { return Ok(None) };
            let from = data / BLOCK64 * BLOCK64;
            let bytes = read(file, from, STEP).await?;
            if let Some(found) = nonzero(&bytes) {
                return Ok(Some(from + found));
            }
            at = from + STEP;
        }
        return Ok(None);
    }
    let ends = [(0, 4 << 20), (size.saturating_sub(4 << 20) / BLOCK64 * BLOCK64, 4 << 20)];
    let spread = (0..SAMPLES).map(|i| (size / SAMPLES * i / BLOCK64 * BLOCK64, SAMPLE));
    for (at, len) in ends.into_iter().chain(spread) {
        if let Some(found) = nonzero(&read(file, at, len).await?) {
            return Ok(Some(at + found));
        }
    }
    Ok(None)
}

/// Refines the error of a failed open: names the content found instead, or reports a store whose superblock is lost.
pub fn explain(file: &File, error: Error, found: Occupant) -> Error {
    if error.kind() != ErrorKind::Invalid {
        return error;
    }
    let path = file.path().display();
    match found {
        Occupant::DamagedStore(why) => Error::new(ErrorKind::Corrupt, format!("{path}: {why}")),
        Occupant::Foreign(found) => {
            let text = format!("{path} is not a Forebay store; it holds {}", found.join(", "));
            Error::new(ErrorKind::Invalid, text)
        }
        Occupant::Nothing if file.info().size >= SEGMENTS_START => Error::new(
            ErrorKind::Invalid,
            format!("{path} is empty; `forebay store init --store {path}` makes a store of it"),
        ),
        Occupant::Nothing | Occupant::Store => error,
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;
    use forebay_reactor::OpenOptions;
    use forebay_sim::{Faults, World};

    use super::*;
    use crate::{CheckOptions, InitOptions, Store};

    const DISK: &str = "/disk";

    /// Returns the signatures at the end of a device of `size` bytes: name, byte address, magic bytes.
    fn at_the_end(size: u64) -> Vec<(&'static str, u64, &'static [u8])> {
        let table = SIGNATURES.iter().filter_map(|&(name, at, magic)| match at {
            Start(_) => None,
            End(before) => Some((name, size - before, magic)),
        });
        let raid_0_90 = ("a member of a Linux RAID (0.90)", size / 0x1_0000 * 0x1_0000 - 0x1_0000, MD);
        let raid_1_0 = ("a member of a Linux RAID (1.0)", (size / 512 - 16) / 8 * 8 * 512, MD);
        table.chain([raid_0_90, raid_1_0]).collect()
    }

    /// Runs a test on a device of `size` bytes with 512-byte sectors.
    fn on_a_device(size: u64, test: impl AsyncFnOnce(&World)) {
        let world = World::new(1, Faults::none());
        world.add_disk(DISK, size, 512);
        let reactor = world.reactor();
        world.run(&reactor, test(&world)).expect("it ends");
    }

    /// Writes bytes at an arbitrary position of the device.
    async fn put(at: u64, bytes: &[u8]) {
        let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let (start, end) = (at / 512 * 512, (at + bytes.len() as u64).next_multiple_of(512));
        let mut sectors = disk.read_exact_at(start, (end - start) as usize).await.expect("read").to_vec();
        sectors[(at - start) as usize..][..bytes.len()].copy_from_slice(bytes);
        disk.write_at(Buf::copy_of(&sectors), start).await.expect("write");
        disk.sync_data().await.expect("sync");
    }

    #[test]
    fn what_lies_at_the_end_of_a_device_is_kept_until_force_clears_it() {
        // Not all devices end with a whole block of 4 KiB, or with a whole 64 KiB.
        for size in [16 << 20, (16 << 20) + 512, (16 << 20) + 4096 + 1536, (17 << 20) - 512] {
            for (name, at, magic) in at_the_end(size) {
                on_a_device(size, async |world| {
                    put(at, magic).await;
                    let what = format!("{name} at byte {at} of {size}");
                    let before = world.peek(DISK, 0, size as usize).expect("peek");
                    let error = Store::init(DISK, InitOptions::default()).await.expect_err(&what);
                    assert_eq!(error.kind(), ErrorKind::Exists, "{what}: {error}");
                    assert!(error.to_string().contains(name), "{what}: {error}");
                    assert!(world.peek(DISK, 0, size as usize).expect("peek") == before, "{what}: nothing is written");
                    Store::init(DISK, InitOptions { force: true, ..InitOptions::default() }).await.expect(&what);
                    let disk = File::open(DISK, OpenOptions::read().direct()).expect("the disk");
                    assert_eq!(look(&disk).await.expect("look"), Occupant::Store, "{what}");
                    assert_eq!(signatures_beside(&disk, 0).await, Vec::<String>::new(), "{what}");
                });
            }
        }
    }

    #[test]
    fn a_store_is_not_rebuilt_where_the_end_of_its_device_is_somebody_elses() {
        const SIZE: u64 = (16 << 20) + 512;
        for unreadable in [false, true] {
            for (name, at, magic) in at_the_end(SIZE) {
                on_a_device(SIZE, async |world| {
                    Store::init(DISK, InitOptions::default()).await.expect("init");
                    let store = Store::open(DISK, Default::default()).await.expect("open");
                    store.close().await.expect("close");
                    drop(store);
                    for at in COPIES.into_iter().chain(SLOTS.into_iter().flatten()) {
                        put(at, &[0; 4096]).await;
                    }
                    put(at, magic).await;
                    if unreadable {
                        assert!(world.set_bad_sector(DISK, COPIES[0]));
                    }
                    let options = CheckOptions { rebuild: true, roll_back: true, ..CheckOptions::default() };
                    let error = Store::check(DISK, options, |_, _| {}).await.expect_err(name);
                    assert_eq!(error.kind(), ErrorKind::Invalid, "{name}: {error}");
                    assert!(error.to_string().contains(name), "{name}: {error}");
                });
            }
        }
    }

    fn found(size: usize, parts: &[(usize, &[u8])]) -> Vec<String> {
        let mut disk = vec![0; size];
        parts.iter().for_each(|(at, bytes)| disk[*at..at + bytes.len()].copy_from_slice(bytes));
        let tail = size.saturating_sub(TAIL as usize);
        signatures(&disk[..size.min(HEAD as usize)], &disk[tail..], size as u64)
    }

    #[test]
    fn every_signature_is_found_at_its_place_and_nowhere_else() {
        const SIZE: usize = 8 << 20;
        assert!(found(SIZE, &[]).is_empty());
        for (name, at, magic) in SIGNATURES {
            let at = match at {
                Start(at) => *at,
                End(before) => SIZE - *before as usize,
            };
            let names = found(SIZE, &[(at, magic)]);
            assert_eq!(names.len(), 1, "{name}: {names:?}");
            assert!(names[0].starts_with(name), "{name}: {names:?}");
            assert!(found(SIZE, &[(at + 1, magic)]).is_empty(), "{name} one byte later");
        }
        for page in PAGES {
            assert_eq!(found(SIZE, &[(page - 10, b"SWAPSPACE2")]), ["a swap area"], "{page}");
        }
    }

    #[test]
    fn what_is_computed_is_found() {
        const SIZE: usize = (8 << 20) + 4096;
        assert_eq!(
            found(SIZE, &[(1024 + 56, b"\x53\xef"), (1024 + 120, b"data")])[0],
            "an ext2, ext3 or ext4 file system (label 'data')"
        );
        assert_eq!(found(SIZE, &[(SIZE - 0x1000 - 0x1_0000, MD)]), ["a member of a Linux RAID (0.90)"]);
        assert_eq!(found(SIZE, &[(SIZE - 8192, MD)]), ["a member of a Linux RAID (1.0)"]);
        for label in 0..2 {
            for magic in [0x00ba_b10c_u64.to_le_bytes(), 0x00ba_b10c_u64.to_be_bytes()] {
                assert_eq!(found(SIZE, &[((label * 256 + 131) << 10, &magic)]), ["a member of a ZFS pool"]);
            }
        }
        // Several signatures, as on a partitioned disk.
        assert_eq!(found(SIZE, &[(510, b"\x55\xaa"), (512, b"EFI PART")]).len(), 2);
        // Shorter than any examined position.
        assert!(found(0, &[]).is_empty() && found(512, &[]).is_empty());
    }

    #[test]
    fn what_a_store_keeps_at_the_end_of_its_device_is_its_own() {
        const STORE: u64 = 16 << 20;
        // The device is larger than the store by less than a segment, or has the same size.
        for size in [STORE, STORE + (128 << 10)] {
            for (name, at, magic) in at_the_end(size) {
                on_a_device(size, async |_| {
                    Store::init(DISK, InitOptions::default()).await.expect("init");
                    let store = Store::open(DISK, Default::default()).await.expect("open");
                    store.close().await.expect("close");
                    drop(store);
                    for at in SLOTS.into_iter().flatten() {
                        put(at, &[0; 4096]).await;
                    }
                    put(at, magic).await;
                    let what = format!("{name} at byte {at} of {size}");
                    let options = CheckOptions { rebuild: true, ..CheckOptions::default() };
                    match Store::check(DISK, options, |_, _| {}).await {
                        Ok(report) => {
                            assert!(at < STORE, "{what}: {report:?}");
                            assert!(report.rebuild.is_some_and(|rebuilt| rebuilt.written), "{what}");
                        }
                        Err(error) => {
                            assert!(at >= STORE, "{what}: {error}");
                            assert_eq!(error.kind(), ErrorKind::Invalid, "{what}: {error}");
                        }
                    }
                });
            }
        }
    }
}
