//! Device with added latency, to measure what hides latency: a write log in front of a simulated cluster.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Extent, ExtentMap, Geometry, LocalFuture, Result, SizeWatch, WriteExtent,
};
use forebay_reactor::sleep;

/// Device whose reads, writes and flushes take longer, at any queue depth.
pub struct Delayed {
    inner: Rc<dyn BlockDevice>,
    delay: Duration,
}

impl Delayed {
    /// Adds `delay` to the completion of each request to `inner`.
    pub fn new(inner: Rc<dyn BlockDevice>, delay: Duration) -> Self {
        Self { inner, delay }
    }

    /// Completes when `request` has completed and the delay, which begins at once, is over.
    fn delay<T: 'static>(&self, request: LocalFuture<T>) -> LocalFuture<T> {
        let delay = sleep(self.delay);
        Box::pin(async move {
            let result = request.await;
            delay.await;
            result
        })
    }
}

impl BlockDevice for Delayed {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.delay(self.inner.submit(request))
    }

    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
        self.delay(self.inner.write_many(writes, fua))
    }

    fn unit(&self) -> Option<u64> {
        self.inner.unit()
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.inner.size_watch()
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use forebay_reactor::{DriverChoice, Reactor, now};

    use super::*;

    /// Device that completes everything at once.
    struct Instantly;

    impl BlockDevice for Instantly {
        fn geometry(&self) -> Geometry {
            unreachable!("not asked for")
        }

        fn submit(&self, _request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
            Box::pin(ready(Ok(BlockReply::Done)))
        }

        fn map(&self, _extent: Extent) -> LocalFuture<Result<ExtentMap>> {
            unreachable!("not asked for")
        }

        fn size_watch(&self) -> Option<Rc<SizeWatch>> {
            None
        }
    }

    #[test]
    fn requests_take_longer() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let delay = Duration::from_millis(20);
            let device = Delayed::new(Rc::new(Instantly), delay);
            let began = now();
            let (first, second) = (device.submit(BlockRequest::Flush), device.write_many(Vec::new(), false));
            assert!(first.await.is_ok() && began.elapsed() >= delay);
            assert!(second.await.is_ok());
        });
    }
}
