//! Device of a volume whose log is not known.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, Extent, ExtentMap, Geometry, LocalFuture, Result, SizeWatch,
};

/// Device that refuses all requests.
pub(super) struct Refusing {
    pub(super) base: Rc<dyn BlockDevice>,
    pub(super) error: Error,
}

impl BlockDevice for Refusing {
    fn geometry(&self) -> Geometry {
        self.base.geometry()
    }

    fn submit(&self, _request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        Box::pin(ready(Err(self.error.clone())))
    }

    fn map(&self, _extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        Box::pin(ready(Err(self.error.clone())))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.base.size_watch()
    }
}
