use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use forebay_reactor::BufList;
use forebay_reactor::sync::Notify;

use crate::advice::Advice;
use crate::error::Result;
use crate::extent::{Extent, ExtentMap};
use crate::request::{BlockReply, BlockRequest};
use crate::reservation::Reservations;

/// Boxed future that stays on its core.
pub type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// Geometry and limits of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Size in bytes.
    pub size: u64,
    /// Required alignment of requests, in bytes; 1 when any byte range is allowed.
    pub block_size: u32,
    /// Write unit that needs no read-modify-write, in bytes.
    pub preferred_io: u32,
    /// Maximum length of a read or write in bytes; fronts split longer ones or refuse them.
    pub transfer_max: u32,
    /// True if writes are refused.
    pub read_only: bool,
}

/// Extent of a multi-extent write.
#[derive(Debug, Clone)]
pub struct WriteExtent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Data to write.
    pub data: BufList,
}

/// Volume as a front sees it.
///
/// Overlapping requests in flight at the same time are not ordered.  Each 4 KiB-aligned block of a write is either
/// wholly old or wholly new at any time, also after a crash.  Writes covered by an acknowledged `Flush` or FUA survive
/// a crash.  Dropping the future of a request neither cancels nor undoes it.
pub trait BlockDevice {
    /// Returns the current geometry; the size changes when the volume is resized.
    fn geometry(&self) -> Geometry;

    /// Executes one request.  Never waits for other requests except where the order is stated
    /// ([`BlockRequest::Flush`]).
    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>>;

    /// Executes one request with access advice.  A device without support for advice ignores it.
    fn submit_advised(&self, request: BlockRequest, advice: Advice) -> LocalFuture<Result<BlockReply>> {
        let _ = advice;
        self.submit(request)
    }

    /// Executes several writes that do not overlap, in any order, each as a [`BlockRequest::Write`]; completes when all
    /// are done.  After an error each of them may or may not have been done.  Cheaper than one request each where they
    /// are within the same [`unit`](Self::unit).
    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
        let one = |WriteExtent { offset, data }| self.submit(BlockRequest::Write { offset, data, fua });
        let mut in_flight: Vec<_> = writes.into_iter().map(one).collect();
        let mut all = Ok(());
        // All are polled: one that is done may keep a range locked until then, for which another waits.
        Box::pin(poll_fn(move |cx| {
            in_flight.retain_mut(|write| match write.as_mut().poll(cx) {
                Poll::Ready(Err(error)) if all.is_ok() => {
                    all = Err(error);
                    false
                }
                poll => poll.is_pending(),
            });
            if in_flight.is_empty() { Poll::Ready(std::mem::replace(&mut all, Ok(()))) } else { Poll::Pending }
        }))
    }

    /// Returns the size in bytes of the units, counted from offset 0, in which the device stores data and changes it in
    /// one operation (a volume's objects); `None` where there are no such units.
    fn unit(&self) -> Option<u64> {
        None
    }

    /// Maps the stored extents of `extent`, without reading them.
    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>>;

    /// Returns the watch for size changes; `None` when the size never changes.
    fn size_watch(&self) -> Option<Rc<SizeWatch>>;

    /// Returns the reservations of a volume that several hosts share; `None` where it cannot be reserved.  The device
    /// does not check them, as it does not know the requesting host: fronts do, before they submit.
    fn reservations(&self) -> Option<Reservations> {
        None
    }
}

/// Notifies waiters of changes of a device's size.
#[derive(Default)]
pub struct SizeWatch {
    changed: Notify,
    count: Cell<u64>,
}

impl SizeWatch {
    /// Creates a watch without waiters.
    pub fn new() -> Self {
        Self::default()
    }

    /// Announces that the size has changed.
    pub fn announce(&self) {
        self.count.set(self.count.get() + 1);
        self.changed.notify_all();
    }

    /// Waits for the next change.
    pub async fn changed(&self) {
        let seen = self.count.get();
        self.changed.wait_until(|| self.count.get() != seen).await;
    }
}
