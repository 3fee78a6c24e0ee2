//! A backend that is slower than it is: for measuring what a write log gives in front of a cluster, without a cluster.
//!
//! Only when the environment says `FOREBAY_DEBUG_BACKEND_DELAY_US=N`: every write, flush and read of an image then takes
//! N microseconds longer, at any depth.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, Extent, ExtentMap, Geometry, LocalFuture, Patch, Reply, Request, Result, SizeWatch};
use forebay_reactor::sleep;

/// What the environment is asked for.
pub const VARIABLE: &str = "FOREBAY_DEBUG_BACKEND_DELAY_US";

/// An image behind a pause.
struct Delayed {
    inner: Rc<dyn BlockDevice>,
    pause: Duration,
}

/// The device, behind a pause if the environment asks for one.
pub fn delayed(inner: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
    let asked = std::env::var(VARIABLE).ok().and_then(|text| text.parse().ok());
    match asked.filter(|&micros| micros > 0) {
        None => inner,
        Some(micros) => {
            tracing::warn!("{VARIABLE}: every request to this image takes {micros} us longer than it must");
            Rc::new(Delayed { inner, pause: Duration::from_micros(micros) })
        }
    }
}

impl BlockDevice for Delayed {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        let (inner, pause) = (self.inner.submit(request), sleep(self.pause));
        Box::pin(async move {
            let result = inner.await;
            pause.await;
            result
        })
    }

    fn write_many(&self, writes: Vec<Patch>, fua: bool) -> LocalFuture<Result<()>> {
        let (inner, pause) = (self.inner.write_many(writes, fua), sleep(self.pause));
        Box::pin(async move {
            let result = inner.await;
            pause.await;
            result
        })
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
