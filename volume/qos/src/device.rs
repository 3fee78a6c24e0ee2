//! Device with limits in front of another.

use std::rc::Rc;

use forebay_block::reservation::Reservations;
use forebay_block::{
    Advice, BlockDevice, BlockReply, BlockRequest, Extent, ExtentMap, Geometry, LocalFuture, Result, SizeWatch,
};

use crate::volume::VolumeQos;

/// Device whose requests wait for the limits of a volume. A flush does not wait: it makes durable what was acknowledged
/// before, and a request that waits was not.
pub struct QosDevice {
    inner: Rc<dyn BlockDevice>,
    qos: Rc<VolumeQos>,
}

impl QosDevice {
    /// Puts the limits in front of a device.
    pub fn new(inner: Rc<dyn BlockDevice>, qos: Rc<VolumeQos>) -> Self {
        Self { inner, qos }
    }

    fn submit_when_admitted(
        &self,
        request: BlockRequest,
        submit: impl FnOnce(&dyn BlockDevice, BlockRequest) -> LocalFuture<Result<BlockReply>> + 'static,
    ) -> LocalFuture<Result<BlockReply>> {
        match self.qos.admit(&request) {
            None => submit(&*self.inner, request),
            Some(wait) => {
                let inner = self.inner.clone();
                Box::pin(async move {
                    wait.await;
                    submit(&*inner, request).await
                })
            }
        }
    }
}

impl BlockDevice for QosDevice {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.submit_when_admitted(request, |inner, request| inner.submit(request))
    }

    fn submit_advised(&self, request: BlockRequest, advice: Advice) -> LocalFuture<Result<BlockReply>> {
        self.submit_when_admitted(request, move |inner, request| inner.submit_advised(request, advice))
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(extent)
    }

    fn unit(&self) -> Option<u64> {
        self.inner.unit()
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.inner.size_watch()
    }

    fn reservations(&self) -> Option<Reservations> {
        self.inner.reservations()
    }
}
