use std::cell::{Cell, RefCell};
use std::future::ready;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, BufList, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture,
    Result, SizeWatch,
};
use forebay_reactor::GuardedMapping;
use proptest::prelude::*;

use super::fuzz::{bytes_of, parts_of};
use super::*;
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;
use crate::stats::VhostRequestKind;

const SERIAL: [u8; SERIAL_LEN] = *b"volume-7\0\0\0\0\0\0\0\0\0\0\0\0";

fn geometry() -> Geometry {
    Geometry { size: 1 << 20, block_size: 1, preferred_io: 4096, transfer_max: 8192, read_only: false }
}

fn rules() -> BlockRules {
    BlockRules { geometry: geometry(), read_only: false, features: features(false, 1), writeback: true }
}

/// Returns the readable bytes of a request.
fn request(kind: u32, sector: u64, data: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes()[..], &[0xab; 4], &sector.to_le_bytes(), data].concat()
}

fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
    [&sector.to_le_bytes()[..], &sectors.to_le_bytes(), &flags.to_le_bytes()].concat()
}

/// Parses a request with `space` writable bytes before the status.
fn parse(readable: &[u8], space: usize, rules: &BlockRules) -> std::result::Result<BlockCommand, BlockViolation> {
    BlockCommand::parse(&parts_of(readable, []), &parts_of(&vec![0; space + 1], []), rules)
}

fn parsed(readable: &[u8], space: usize, rules: &BlockRules) -> BlockCommand {
    parse(readable, space, rules).expect("a header and a status")
}

/// Returns the refusal of a request.
fn refused(readable: &[u8], space: usize, rules: &BlockRules) -> (VhostRequestKind, u8, String) {
    match parsed(readable, space, rules) {
        BlockCommand::Refused(kind, refusal) => (kind, refusal.status(), refusal.to_string()),
        command => panic!("{command:?} was not refused"),
    }
}

#[test]
fn fields_of_the_configuration_are_where_the_standard_has_them() {
    let geometry = Geometry { size: (1 << 30) + 700, preferred_io: 65536, ..geometry() };
    let bytes = BlockConfig::new(&geometry, false, 6).bytes();
    let number =
        |at: usize, len: usize| bytes[at..at + len].iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
    let fields = [
        ("capacity", 0, 8, (1 << 21) + 1),
        ("size_max", 8, 4, 262_144),
        ("seg_max", 12, 4, 126),
        ("geometry", 16, 4, 0),
        ("blk_size", 20, 4, 512),
        ("physical_block_exp", 24, 1, 3),
        ("alignment_offset", 25, 1, 0),
        ("min_io_size", 26, 2, 128),
        ("opt_io_size", 28, 4, 128),
        ("writeback", 32, 1, 1),
        ("unused0", 33, 1, 0),
        ("num_queues", 34, 2, 6),
        ("max_discard_sectors", 36, 4, 4 << 20),
        ("max_discard_seg", 40, 4, 32),
        ("discard_sector_alignment", 44, 4, 128),
        ("max_write_zeroes_sectors", 48, 4, 4 << 20),
        ("max_write_zeroes_seg", 52, 4, 32),
        ("write_zeroes_may_unmap", 56, 1, 1),
        ("unused1", 57, 3, 0),
    ];
    let mut next = 0;
    for (name, at, len, value) in fields {
        assert_eq!((at, number(at, len)), (next, value), "{name}");
        next = at + len;
    }
    assert_eq!((next, BLOCK_CONFIG_LEN), (60, 60));
}

#[test]
fn blocks_of_the_configuration_fit_the_volume() {
    for (block_size, preferred_io, logical, exponent, blocks) in [
        (1, 4096, 512, 3, 8),
        (4096, 4096, 4096, 0, 1),
        (512, 0, 512, 0, 1),
        (2048, 1 << 20, 2048, 1, 512),
        (512, 3 * 4096, 512, 0, 24),
        (4096, 4097, 4096, 0, 1),
        (1 << 16, 1 << 16, 4096, 0, 16),
    ] {
        let geometry = Geometry { size: (1 << 30) + 4095, block_size, preferred_io, ..geometry() };
        let bytes = BlockConfig::new(&geometry, true, 1).bytes();
        assert_eq!(bytes[20..24], u32::to_le_bytes(logical), "{geometry:?}");
        assert_eq!((bytes[24], bytes[26..28] == u16::to_le_bytes(blocks)), (exponent, true), "{geometry:?}");
        assert_eq!(capacity(&geometry) % u64::from(logical), 0);
        assert_eq!(bytes[0..8], u64::to_le_bytes(capacity(&geometry) / 512));
        assert!(bytes[36..44].iter().chain(&bytes[48..57]).all(|&byte| byte == 0), "no limits of what is not offered");
    }
}

#[test]
fn only_the_write_cache_is_configured() {
    let mut config = BlockConfig::new(&geometry(), false, 1);
    assert!(config.writeback());
    config.write(32, &[0]).expect("off");
    assert!(!config.writeback() && !config.update(&geometry(), false), "an update keeps the write cache");
    assert_eq!(config.write(32, &[2]), Err(BlockConfigRefusal::Value(2)));
    for (offset, bytes) in [(0, &[1; 8][..]), (32, &[1, 0]), (32, &[]), (33, &[1]), (u32::MAX, &[1])] {
        assert_eq!(config.write(offset, bytes), Err(BlockConfigRefusal::NotWritable { offset, len: bytes.len() }));
    }
    config.write(32, &[1]).expect("on");
    config.negotiated(feature::FLUSH | feature::CONFIG_WCE);
    assert!(config.writeback());
    config.negotiated(feature::CONFIG_WCE);
    assert!(!config.writeback(), "a driver that does not flush");
    assert!(config.update(&Geometry { size: 1 << 21, ..geometry() }, false), "the size changed");
    let mut read = [9; 8];
    config.read(1, &mut read);
    assert_eq!(read, [0x10, 0, 0, 0, 0, 0, 0, 0], "4096 sectors");
    for offset in [59, 60, 4096, u32::MAX] {
        read.fill(9);
        config.read(offset, &mut read);
        assert_eq!(read, [0; 8], "zero past the known fields");
    }
}

#[test]
fn features_of_a_read_only_device_change_nothing() {
    let changes = feature::DISCARD | feature::WRITE_ZEROES;
    assert_eq!(features(true, 1) & (changes | feature::RO | feature::MQ), feature::RO);
    assert_eq!(features(false, 2) & (changes | feature::RO | feature::MQ), changes | feature::MQ);
}

#[test]
fn requests_are_parsed() {
    let rules = rules();
    assert_eq!(parsed(&request(0, 3, &[]), 1024, &rules), BlockCommand::Read(Extent::new(1536, 1024)));
    let write = BlockCommand::Write { extent: Extent::new(512, 512), fua: false };
    assert_eq!(parsed(&request(1, 1, &[7; 512]), 0, &rules), write);
    assert_eq!(parsed(&request(4, 9, &[]), 0, &rules), BlockCommand::Flush);
    for (space, len) in [(20, 20), (5, 5), (100, 20)] {
        assert_eq!(parsed(&request(8, 0, &[]), space, &rules), BlockCommand::GetId { len });
    }
    let two = [range(8, 8, 0), range(4, 0, 0), range(0, 2, 0)].concat();
    let extents = vec![Extent::new(4096, 4096), Extent::new(0, 1024)];
    assert_eq!(parsed(&request(11, 0, &two), 0, &rules), BlockCommand::Discard { extents, fua: false });
    let extents = vec![
        ZeroedExtent { extent: Extent::new(4096, 4096), no_unmap: true },
        ZeroedExtent { extent: Extent::new(0, 512), no_unmap: false },
    ];
    let zero = request(13, 0, &[range(8, 8, 0), range(0, 1, 1)].concat());
    assert_eq!(parsed(&zero, 0, &rules), BlockCommand::WriteZeroes { extents, fua: false });
}

#[test]
fn changes_are_durable_at_once_without_a_write_cache() {
    let (flush, switch) = (feature::FLUSH, feature::CONFIG_WCE);
    for (features, writeback, durable) in [
        (flush | switch, true, false),
        (flush | switch, false, true),
        (flush, true, false),
        (flush, false, false),
        (switch, true, true),
        (0, true, true),
    ] {
        let features = features | feature::DISCARD | feature::WRITE_ZEROES;
        let rules = BlockRules { features, writeback, ..rules() };
        for (kind, data) in [(1, vec![0; 512]), (11, range(0, 1, 0)), (13, range(0, 1, 0))] {
            let command = parsed(&request(kind, 0, &data), 0, &rules);
            let (BlockCommand::Write { fua, .. }
            | BlockCommand::Discard { fua, .. }
            | BlockCommand::WriteZeroes { fua, .. }) = command
            else {
                panic!("{command:?}")
            };
            assert_eq!(fua, durable, "{command:?} with {features:#x}");
        }
    }
}

#[test]
fn wrong_requests_are_refused() {
    use VhostRequestKind::*;
    let rules = rules();
    let end = capacity(&rules.geometry) / SECTOR;
    let (io, unsupported) = (status::IOERR, status::UNSUPP);
    let many = vec![0; 16 * (RANGES_MAX as usize + 1)];
    for (readable, space, kind, status, text) in [
        (request(0, 0, &[]), 511, Read, io, "not a multiple of 512"),
        (request(1, 0, &[0; 100]), 0, Write, io, "not a multiple of 512"),
        (request(0, end, &[]), 512, Read, io, "past the end"),
        (request(0, u64::MAX, &[]), 512, Read, io, "past the end"),
        (request(1, end - 1, &[0; 1024]), 0, Write, io, "past the end"),
        (request(0, 0, &[]), (32 << 20) + 512, Read, io, "at most 33554432"),
        (request(11, 0, &[]), 0, Discard, io, "0 ranges"),
        (request(11, 0, &[0; 17]), 0, Discard, io, "not a multiple of 16"),
        (request(13, 0, &many), 0, WriteZeroes, io, "33 ranges"),
        (request(11, 0, &range(0, RANGE_SECTORS_MAX + 1, 0)), 0, Discard, io, "at most 4194304"),
        (request(11, 0, &range(end, 1, 0)), 0, Discard, io, "past the end"),
        (request(11, 0, &range(0, 1, 1)), 0, Discard, unsupported, "flags 0x1"),
        (request(13, 0, &range(0, 1, 2)), 0, WriteZeroes, unsupported, "flags 0x2"),
        (request(2, 0, &[]), 0, Other, unsupported, "type 2"),
        (request(10, 0, &[]), 32, Other, unsupported, "type 10"),
        (request(14, 0, &range(0, 1, 0)), 0, Other, unsupported, "type 14"),
        (request(0x8000_0000, 0, &[]), 512, Other, unsupported, "type 2147483648"),
    ] {
        let (found_kind, found_status, found) = refused(&readable, space, &rules);
        assert_eq!((found_kind, found_status), (kind, status), "{found}");
        assert!(found.contains(text), "{found:?} has no {text:?}");
    }
    let read_only = BlockRules { read_only: true, ..rules };
    for (kind, data) in [(1, vec![0; 512]), (11, range(0, 1, 0)), (13, range(0, 1, 0))] {
        let (_, status, text) = refused(&request(kind, 0, &data), 0, &read_only);
        assert_eq!((status, text.as_str()), (io, "device is read-only"));
    }
    assert_eq!(parsed(&request(0, 0, &[]), 512, &read_only), BlockCommand::Read(Extent::new(0, 512)));
    let plain = BlockRules { features: feature::FLUSH, ..rules };
    assert_eq!(refused(&request(11, 0, &range(0, 1, 0)), 0, &plain).1, unsupported, "not negotiated");
    let large = BlockRules { geometry: Geometry { block_size: 4096, ..rules.geometry }, ..rules };
    assert!(refused(&request(0, 1, &[]), 4096, &large).2.contains("not aligned to blocks of 4096"));
    assert!(refused(&request(0, 0, &[]), 512, &large).2.contains("not aligned to blocks of 4096"));
    assert!(matches!(parsed(&request(0, 8, &[]), 8192, &large), BlockCommand::Read(_)));
}

#[test]
fn what_cannot_be_answered_stops_the_device() {
    let status = parts_of(&[0], []);
    for len in 0..16 {
        let readable = parts_of(&request(0, 0, &[])[..len], [len / 2]);
        assert_eq!(BlockCommand::parse(&readable, &status, &rules()), Err(BlockViolation::NoHeader(len as u64)));
    }
    let header = parts_of(&request(4, 0, &[]), []);
    for writable in [vec![], parts_of(&[], [0])] {
        assert_eq!(BlockCommand::parse(&header, &writable, &rules()), Err(BlockViolation::NoStatus));
    }
    assert_eq!(BlockCommand::parse(&header, &status, &rules()), Ok(BlockCommand::Flush));
}

/// Device in memory, which records requests.
#[derive(Default)]
struct RecordingDevice {
    bytes: RefCell<Vec<u8>>,
    requests: RefCell<Vec<String>>,
    fails_with: Cell<Option<ErrorKind>>,
    is_short: Cell<bool>,
}

impl BlockDevice for RecordingDevice {
    fn geometry(&self) -> Geometry {
        geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let fua = |fua| if fua { " fua" } else { "" };
        let mut bytes = self.bytes.borrow_mut();
        bytes.resize(geometry().size as usize, 0x11);
        let at = request.extent().map_or(0..0, |extent| extent.offset as usize..extent.end() as usize);
        let (text, reply) = match request {
            BlockRequest::Read(Extent { offset, len }) => {
                let len = len as usize - usize::from(self.is_short.get());
                let data = Buf::copy_of(&bytes[at.start..at.start + len]);
                (format!("read {offset} {len}"), BlockReply::Data(data.into()))
            }
            BlockRequest::Write { offset, data, fua: durable } => {
                data.copy_to(&mut bytes[at]);
                (format!("write {offset} {}{}", data.len(), fua(durable)), BlockReply::Done)
            }
            BlockRequest::Discard(Extent { offset, len }) => (format!("discard {offset} {len}"), BlockReply::Done),
            BlockRequest::WriteZeroes { extent, no_unmap, fua: durable } => {
                let Extent { offset, len } = extent;
                (format!("zero {offset} {len} {no_unmap}{}", fua(durable)), BlockReply::Done)
            }
            other => (format!("{other:?}").to_lowercase(), BlockReply::Done),
        };
        self.requests.borrow_mut().push(text);
        Box::pin(ready(match self.fails_with.get() {
            Some(kind) => Err(Error::new(kind, "device")),
            None => Ok(reply),
        }))
    }

    fn map(&self, _: Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(ready(Ok(ExtentMap::new())))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Executes a command on a device; returns the result and the device requests.
fn executed(device: &Rc<RecordingDevice>, command: BlockCommand, data: &[u8]) -> (BlockDone, Vec<String>) {
    let served: Rc<dyn BlockDevice> = device.clone();
    let future = pin!(execute(&served, command, Buf::copy_of(data).into(), &SERIAL, geometry().transfer_max));
    let Poll::Ready(done) = future.poll(&mut Context::from_waker(Waker::noop())) else { panic!("device is ready") };
    (done, device.requests.take())
}

#[test]
fn commands_become_requests_of_the_device() {
    let device = Rc::new(RecordingDevice::default());
    let first = Extent::new(0, 4096);
    let last = Extent::new(8192, 512);
    let zeroed = |extent, no_unmap| ZeroedExtent { extent, no_unmap };
    let refusal = BlockCommand::Refused(VhostRequestKind::Other, BlockRefusal::Type(77));
    for (command, data, requests, status, len) in [
        (BlockCommand::Read(first), 0, &["read 0 4096"][..], 0, 4096),
        (
            BlockCommand::Read(Extent::new(512, 16384 + 512)),
            0,
            &["read 512 8192", "read 8704 8192", "read 16896 512"],
            0,
            16896,
        ),
        (BlockCommand::Read(Extent::new(512, 0)), 0, &[], 0, 0),
        (BlockCommand::Write { extent: last, fua: true }, 512, &["write 8192 512 fua"], 0, 0),
        (
            BlockCommand::Write { extent: Extent::new(0, 8704), fua: false },
            8704,
            &["write 0 8192", "write 8192 512"],
            0,
            0,
        ),
        (BlockCommand::Write { extent: Extent::new(0, 0), fua: false }, 0, &[], 0, 0),
        (BlockCommand::Flush, 0, &["flush"], 0, 0),
        (BlockCommand::GetId { len: 8 }, 0, &[], 0, 8),
        (BlockCommand::Discard { extents: vec![], fua: false }, 0, &[], 0, 0),
        (BlockCommand::Discard { extents: vec![], fua: true }, 0, &["flush"], 0, 0),
        (BlockCommand::Discard { extents: vec![first], fua: false }, 0, &["discard 0 4096"], 0, 0),
        (
            BlockCommand::Discard { extents: vec![first, last], fua: true },
            0,
            &["discard 0 4096", "discard 8192 512", "flush"],
            0,
            0,
        ),
        (
            BlockCommand::WriteZeroes { extents: vec![zeroed(first, true), zeroed(last, false)], fua: true },
            0,
            &["zero 0 4096 true fua", "zero 8192 512 false fua"],
            0,
            0,
        ),
        (refusal, 0, &[], status::UNSUPP, 0),
    ] {
        let (done, found) = executed(&device, command.clone(), &vec![0x22; data]);
        assert_eq!((done.status, done.data.len(), done.error.is_some()), (status, len, status != 0), "{command:?}");
        assert_eq!(found, requests, "{command:?}");
    }
    let bytes = device.bytes.borrow();
    assert_eq!((bytes[0], bytes[8703], bytes[8704]), (0x22, 0x22, 0x11));
}

#[test]
fn errors_of_the_device_become_a_status() {
    let device = Rc::new(RecordingDevice::default());
    let long = Extent::new(0, 16384);
    for (kind, status) in
        [(ErrorKind::Io, 1), (ErrorKind::Unsupported, 2), (ErrorKind::NoSpace, 1), (ErrorKind::Fenced, 1)]
    {
        device.fails_with.set(Some(kind));
        for command in [BlockCommand::Flush, BlockCommand::Read(long), BlockCommand::Write { extent: long, fua: false }]
        {
            let (done, requests) = executed(&device, command, &[0; 16384]);
            assert_eq!((done.status, done.data.len(), requests.len()), (status, 0, 1), "ends at the first error");
            assert_eq!(done.error.expect("a reason").kind(), kind);
        }
    }
    device.fails_with.set(None);
    device.is_short.set(true);
    for extent in [long, Extent::new(0, 512)] {
        let (done, _) = executed(&device, BlockCommand::Read(extent), &[]);
        assert_eq!((done.status, done.data.is_empty()), (status::IOERR, true), "a device that returns too few bytes");
    }
}

#[test]
fn completion_writes_data_and_status_and_logs_their_pages() {
    let log_bits = Rc::new(GuardedMapping::anonymous(64).expect("memory"));
    let log = DirtyLog::new(log_bits.clone());
    // Parts begin at guest address 0x10_0000, so on page 256, and 3 bytes lie between them.
    let writable = parts_of(&[9; 8193], [4096, 4090]);
    let dirty = || {
        let mut bits = [0];
        log_bits.read(32, &mut bits);
        log_bits.write(32, &[0]);
        bits[0]
    };
    let done = |status, data: usize| BlockDone { status, data: Buf::copy_of(&vec![5; data]).into(), error: None };
    assert_eq!(complete(&writable, &done(0, 8192), Some(&log)), 8193);
    assert_eq!(bytes_of(&writable), [&[5; 8192][..], &[0]].concat());
    assert_eq!(dirty(), 0b111);
    assert_eq!(complete(&writable, &done(1, 0), Some(&log)), 0, "the status alone is not at the beginning");
    assert_eq!(bytes_of(&writable), [&[5; 8192][..], &[1]].concat());
    assert_eq!(dirty(), 0b100);
    assert_eq!(complete(&writable[2..], &done(2, 0), None), 0);
    assert_eq!(complete(&parts_of(&[9], [0, 1, 0]), &done(0, 0), None), 1);
}

/// Lengths of parts, mostly short.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    proptest::collection::vec(prop_oneof![3 => 0..24_usize, 1 => 0..5000_usize], 0..8)
}

fn any_request() -> impl Strategy<Value = Vec<u8>> {
    let kind = proptest::sample::select(vec![0_u32, 1, 4, 8, 11, 13, 99]);
    let ranges = proptest::collection::vec((0..3000_u64, 0..5000_u32, 0..3_u32), 0..5);
    let ranges = ranges.prop_map(|all| all.iter().flat_map(|&(at, len, flags)| range(at, len, flags)).collect());
    let data = prop_oneof![
        ranges,
        (0..6_usize).prop_map(|sectors| (0..sectors * 512).map(|at| at as u8).collect::<Vec<u8>>()),
        proptest::collection::vec(any::<u8>(), 0..100),
    ];
    (kind, 0..3000_u64, data).prop_map(|(kind, sector, data)| request(kind, sector, &data))
}

fn checked(parts: &[GuestPart], skip: u64, len: u64) -> BufList {
    gather(parts, skip, len, &PayloadPools::new())
}

proptest! {
    #[test]
    fn borders_of_descriptors_do_not_change_a_request(
        (options, readable) in (any::<[u8; 3]>(), any_request()),
        cuts in proptest::collection::vec(0..40_u8, 0..8),
        cut in any::<proptest::sample::Index>(),
        whole in any::<bool>(),
    ) {
        let readable = &readable[..if whole { readable.len() } else { cut.index(readable.len()) }];
        fuzz::block_request(&[&[options[0], cuts.len() as u8, options[1], options[2]], &cuts[..], readable].concat());
    }

    #[test]
    fn any_bytes_are_parsed(input in proptest::collection::vec(any::<u8>(), 0..300)) {
        fuzz::block_request(&input);
    }

    #[test]
    fn data_is_the_same_after_scatter_and_gather(
        bytes in proptest::collection::vec(any::<u8>(), 0..9000),
        (from, to, pieces) in (lengths(), lengths(), lengths()),
        skip in 0..9500_u64,
        len in 0..9500_u64,
    ) {
        let parts = parts_of(&bytes, from);
        let first = bytes.len().min(skip as usize);
        let last = bytes.len().min(first + len as usize);
        let data = checked(&parts, skip, len);
        prop_assert_eq!(data.to_vec(), &bytes[first..last]);
        let mut copy = vec![0; len as usize];
        prop_assert_eq!(copy_from(&parts, skip, &mut copy), last - first);
        prop_assert_eq!(&copy[..last - first], &bytes[first..last]);
        // Any division into buffers, and less space than data as well as more.
        let (mut list, mut at) = (BufList::new(), 0_usize);
        for piece in pieces.into_iter().chain([usize::MAX]) {
            let end = data.len().min(at.saturating_add(piece));
            list.push(Buf::copy_of(&data.slice(at..end).to_vec()));
            at = end;
        }
        let target = parts_of(&vec![0xcc; bytes.len() / 2], to);
        let written = scatter(&list, &target) as usize;
        prop_assert_eq!(written, data.len().min(bytes.len() / 2));
        let found = bytes_of(&target);
        prop_assert_eq!(&found[..written], &data.to_vec()[..written]);
        prop_assert!(found[written..].iter().all(|&byte| byte == 0xcc));
    }
}

#[test]
fn long_data_is_gathered_in_pieces() {
    let bytes: Vec<u8> = (0..(2 << 20) + 1000).map(|at: usize| (at / 7) as u8).collect();
    let data = checked(&parts_of(&bytes, [10, 1 << 20]), 5, u64::MAX);
    assert_eq!(data.parts().iter().map(|part| part.len()).collect::<Vec<_>>(), [1 << 20, 1 << 20, 995]);
    assert!(data.to_vec() == bytes[5..]);
}
