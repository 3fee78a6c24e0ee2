//! Volume of the group as a guest of this member's machine has it.

use std::cell::Cell;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, SizeWatch,
    reservation::Reservations,
};

/// Volume of the group as a guest has it.  A guest has no other path, and no way to be told to wait: a request that fails
/// because this member was fenced, or is cut off, is left unanswered, as if the daemon ended.  It stays in the record of
/// requests in flight then, and is executed again when this member serves.
pub(super) struct GuestVolume {
    device: Rc<dyn BlockDevice>,
    /// Set once the connections have ended: what completes now must not change the guest's memory any more.
    over: Rc<Cell<bool>>,
}

impl GuestVolume {
    /// Wraps a volume.
    pub(super) fn new(device: Rc<dyn BlockDevice>) -> Self {
        Self { device, over: Rc::default() }
    }

    /// Ends the connections of an export.
    pub(super) async fn end(&self, disconnect: impl Future<Output = ()>) {
        disconnect.await;
        self.over.set(true);
    }
}

/// Returns what a guest is to see of a result.
fn seen<T>(result: forebay_block::Result<T>, over: &Cell<bool>) -> forebay_block::Result<T> {
    if over.get() {
        return Err(Error::new(ErrorKind::ShuttingDown, "the connection of this guest has ended"));
    }
    match result {
        Err(error) if error.kind() == ErrorKind::Fenced => {
            Err(Error::new(ErrorKind::ShuttingDown, "this member was fenced, and will serve the guest again"))
        }
        result => result,
    }
}

impl BlockDevice for GuestVolume {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<forebay_block::Result<BlockReply>> {
        let (result, over) = (self.device.submit(request), self.over.clone());
        Box::pin(async move { seen(result.await, &over) })
    }

    fn unit(&self) -> Option<u64> {
        self.device.unit()
    }

    fn map(&self, extent: Extent) -> LocalFuture<forebay_block::Result<ExtentMap>> {
        let (result, over) = (self.device.map(extent), self.over.clone());
        Box::pin(async move { seen(result.await, &over) })
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.device.size_watch()
    }

    fn reservations(&self) -> Option<Reservations> {
        self.device.reservations()
    }
}
