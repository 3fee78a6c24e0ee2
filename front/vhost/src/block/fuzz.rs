//! Entry point of the fuzzers: a request in, and a panic if it is parsed or executed as it must not be.

use std::cell::Cell;
use std::future::ready;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, Extent, ExtentMap, Geometry, LocalFuture, Result, SizeWatch,
};
use forebay_reactor::GuardedMapping;

use super::{
    BlockCommand, BlockRules, PayloadPools, SECTOR, SERIAL_LEN, buffer_len, capacity, complete, execute, feature,
    features, gather, status,
};
use crate::memory::{GuestArea, GuestPart};

/// Returns guest memory with `bytes`, in parts of the given lengths and a last one for the rest.  A few other bytes lie
/// between them.
pub(super) fn parts_of(bytes: &[u8], lengths: impl IntoIterator<Item = usize>) -> Vec<GuestPart> {
    const GAP: usize = 3;
    let (mut cuts, mut at) = (Vec::new(), 0);
    for len in lengths {
        let end = bytes.len().min(at + len);
        cuts.push(at..end);
        at = end;
    }
    cuts.push(at..bytes.len());
    let mapping = Rc::new(GuardedMapping::anonymous(bytes.len() + cuts.len() * GAP).expect("memory"));
    let place = |(number, cut): (usize, std::ops::Range<usize>)| {
        let at = cut.start + number * GAP;
        let area = GuestArea::of(&mapping, at, cut.len()).expect("as long as all parts");
        area.write(0, &bytes[cut]);
        GuestPart { guest: 0x10_0000 + at as u64, area }
    };
    cuts.into_iter().enumerate().map(place).collect()
}

/// Returns the bytes of parts.
pub(super) fn bytes_of(parts: &[GuestPart]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for part in parts {
        let at = bytes.len();
        bytes.resize(at + part.area.len(), 0);
        part.area.read(0, &mut bytes[at..]);
    }
    bytes
}

/// Device that checks requests and forgets them; it reads as ones.
struct CheckingDevice {
    geometry: Geometry,
    requests: Cell<usize>,
}

impl BlockDevice for CheckingDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.requests.set(self.requests.get() + 1);
        if let Some(extent) = request.extent() {
            let block = u64::from(self.geometry.block_size);
            assert!(extent.len > 0 && extent.end() <= self.geometry.size, "{extent:?} past the end");
            assert!(extent.offset.is_multiple_of(block) && extent.len.is_multiple_of(block), "{extent:?} unaligned");
        }
        assert!(!request.is_write() || !self.geometry.read_only, "write to a read-only device");
        let reply = match request {
            BlockRequest::Read(extent) => {
                assert!(extent.len <= self.geometry.transfer_max.into(), "read of {} bytes", extent.len);
                BlockReply::Data(forebay_reactor::Buf::copy_of(&vec![1; extent.len as usize]).into())
            }
            BlockRequest::Write { data, .. } => {
                assert!(data.len() <= self.geometry.transfer_max as usize, "write of {} bytes", data.len());
                BlockReply::Done
            }
            _ => BlockReply::Done,
        };
        Box::pin(ready(Ok(reply)))
    }

    fn map(&self, _: Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(ready(Ok(ExtentMap::new())))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Parses and executes a request.
///
/// The input is a byte of options, the number of descriptors' lengths, the half sectors of the writable parts, a byte
/// for what they have beyond those (mostly the status alone), the descriptors' lengths, and the readable bytes.
///
/// # Panics
/// When an invariant is broken.
pub fn block_request(data: &[u8]) {
    let Some((&[options, count, half_sectors, bytes], rest)) = data.split_first_chunk() else { return };
    let (lengths, readable) = rest.split_at(rest.len().min(usize::from(count % 16)));
    let lengths = || lengths.iter().map(|&len| usize::from(len));
    let read_only = options & 1 != 0;
    let block_size = [1, 512, 1024, 4096][usize::from(options >> 1 & 3)];
    let geometry =
        Geometry { size: 100_001 * SECTOR + 7, block_size, preferred_io: 4096, transfer_max: 8192, read_only };
    let rules = BlockRules {
        geometry,
        read_only,
        features: features(read_only, 1) & if options & 8 != 0 { !feature::FLUSH } else { !0 },
        writeback: options & 16 != 0,
    };
    let odd = if bytes < 128 { 1 } else { usize::from(bytes - 128) };
    let space = vec![0xee; usize::from(half_sectors) * 256 + odd];
    let (parts, writable) = (parts_of(readable, lengths()), parts_of(&space, lengths()));
    let parsed = BlockCommand::parse(&parts, &writable, &rules);
    let whole = BlockCommand::parse(&parts_of(readable, []), &parts_of(&space, []), &rules);
    assert_eq!(parsed, whole, "borders of descriptors changed the request");
    let Ok(command) = parsed else {
        assert!(readable.len() < 16 || space.is_empty(), "{whole:?} of a complete request");
        return;
    };
    let pools = PayloadPools::new();
    let data = command.gather(&parts, &pools);
    if let BlockCommand::Write { extent, .. } = &command {
        assert!(extent.end() <= capacity(&geometry), "{extent:?} past the end");
        assert_eq!(data.to_vec(), readable[16..], "data of a write");
    } else {
        assert!(data.is_empty());
    }
    assert_eq!(gather(&parts, 3, u64::MAX, &pools).to_vec(), readable[3..]);
    let device = Rc::new(CheckingDevice { geometry, requests: Cell::new(0) });
    let served: Rc<dyn BlockDevice> = device.clone();
    let future = pin!(execute(&served, command.clone(), data, &[b's'; SERIAL_LEN], geometry.transfer_max));
    let Poll::Ready(done) = future.poll(&mut Context::from_waker(Waker::noop())) else { panic!("device is ready") };
    assert_eq!(done.status != status::OK, matches!(command, BlockCommand::Refused(..)), "{done:?} of {command:?}");
    assert_eq!(done.status != status::OK, done.error.is_some());
    assert!(done.error.is_none() || device.requests.get() == 0, "a refused request was executed");
    let used = complete(&writable, &done, None);
    let written = bytes_of(&writable);
    assert!(u64::from(used) <= buffer_len(&writable) && written.last() == Some(&done.status));
    let filled = done.data.len();
    assert_eq!(written[..filled], done.data.to_vec());
    assert!(written[filled..written.len() - 1].iter().all(|&byte| byte == 0xee), "more was written than the data");
    if let BlockCommand::Read(extent) = command {
        assert_eq!((used as usize, extent.len as usize), (space.len(), space.len() - 1));
    }
    drop::<BufList>(done.data);
}
