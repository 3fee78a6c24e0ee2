use std::cell::Cell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;

use forebay_reactor::BufList;
use forebay_reactor::sync::Notify;

use crate::advice::Advice;
use crate::error::Result;
use crate::extent::{Extent, ExtentMap};
use crate::request::{Reply, Request};
use crate::reservation::Reservations;

/// A future that stays on its core.
pub type LocalFuture<T> = Pin<Box<dyn Future<Output = T>>>;

/// A device's shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes.
    pub size: u64,
    /// The unit in which requests must be aligned, in bytes; 1 when any byte range goes.
    pub block_size: u32,
    /// The unit that is written without reading first, in bytes.
    pub preferred_io: u32,
    /// The longest read or write in bytes; fronts cut longer ones or refuse them.
    pub transfer_max: u32,
    /// Writes are refused.
    pub read_only: bool,
}

/// One of several writes.
#[derive(Debug, Clone)]
pub struct Patch {
    /// First byte.
    pub offset: u64,
    /// What is written.
    pub data: BufList,
}

/// A volume as a front sees it.
///
/// Requests that overlap while both are in flight have no order between them; each 4 KiB-aligned block of a write
/// is either wholly the old or wholly the new one at any time, after a crash too.  What `Flush` or FUA has answered
/// for survives a crash.  Dropping the future of a request neither ends nor undoes it.
pub trait BlockDevice {
    /// Its shape now; the size changes when the volume is resized.
    fn geometry(&self) -> Geometry;

    /// Does one request.  Never waits for others but where the order is stated ([`Request::Flush`]).
    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>>;

    /// The same, with advice.  A device that makes nothing of it does the request.
    fn submit_advised(&self, request: Request, advice: Advice) -> LocalFuture<Result<Reply>> {
        let _ = advice;
        self.submit(request)
    }

    /// Does several writes that do not overlap, in any order, as [`Request::Write`] would do each; answered when all are
    /// done.  After an error any of them may have been done or not.  Costs less than one request each where they are
    /// within the same [`unit`](Self::unit).
    fn write_many(&self, writes: Vec<Patch>, fua: bool) -> LocalFuture<Result<()>> {
        let one = |Patch { offset, data }| self.submit(Request::Write { offset, data, fua });
        let under_way: Vec<_> = writes.into_iter().map(one).collect();
        Box::pin(async move {
            let mut all = Ok(());
            for write in under_way {
                all = all.and(write.await.map(drop));
            }
            all
        })
    }

    /// Bytes of the units, counted from its beginning, in which the device stores what it holds, and changes it in one go
    /// (a volume's objects); `None` where there is nothing of the kind.
    fn unit(&self) -> Option<u64> {
        None
    }

    /// What is stored where, for `extent`, without reading it.
    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>>;

    /// Tells when the size changes; `None` when it never does.
    fn size_watch(&self) -> Option<Rc<SizeWatch>>;

    /// Who may read and write it, where several hosts share it; `None` where nobody can reserve it.  The device does
    /// not look itself, as it does not know who asks: fronts do, before they submit.
    fn reservations(&self) -> Option<Reservations> {
        None
    }
}

/// Tells those who wait that a device's size changed.
#[derive(Default)]
pub struct SizeWatch {
    changed: Notify,
    count: Cell<u64>,
}

impl SizeWatch {
    /// Nobody waits yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// The size has changed.
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
