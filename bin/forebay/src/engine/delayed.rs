//! Backend with added latency, to measure a write log in front of a simulated cluster.
//!
//! Enabled only by the environment variable `FOREBAY_DEBUG_BACKEND_DELAY_US=N`: every write, flush and read of an
//! image then takes N microseconds longer, at any queue depth.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, Extent, ExtentMap, Geometry, LocalFuture, Reply, Request, Result, SizeWatch, WriteExtent,
};
use forebay_reactor::sleep;

/// Environment variable that enables the delay.
pub const VARIABLE: &str = "FOREBAY_DEBUG_BACKEND_DELAY_US";

/// Image with a delay.
struct Delayed {
    inner: Rc<dyn BlockDevice>,
    pause: Duration,
}

/// Wraps the device in a delay if the environment enables one.
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

    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
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
