//! Helper threads that compress long writes, while the reactor continues with other tasks.

use std::cell::OnceCell;
use std::collections::VecDeque;
use std::future::poll_fn;

use forebay_accel::compress::engine::{
    CompressionEngine, CompressionJob, CompressionPool, CompressionWork, JobOutcome, PoolOptions,
};
use forebay_block::{Buf, BufList, BufMut, Compression};
use forebay_reactor::start_unpinned;

use crate::blobs::{codec_of, stored_bytes};
use crate::format::blob::{BLOB_HEADER, SECTOR};

/// Jobs that wait for helpers at most: more only keep memory in use.
const DEPTH: usize = 256;

/// Helper threads of a store, which start with the first long write that is compressed.
pub struct CompressionHelpers {
    threads: usize,
    pool: OnceCell<Option<CompressionPool>>,
}

impl CompressionHelpers {
    /// Creates helpers of a number of threads; with 0, the reactor compresses itself.
    pub fn new(threads: usize) -> Self {
        Self { threads, pool: OnceCell::new() }
    }

    /// Returns whether there are helpers.
    pub fn are_available(&self) -> bool {
        self.pool().is_some()
    }

    fn pool(&self) -> Option<&CompressionPool> {
        let start = || {
            let name = "compress".into();
            let options = PoolOptions { workers: self.threads, depth: DEPTH, inline_bytes_max: 0, name };
            match start_unpinned(|| CompressionPool::new(&options)).and_then(|started| started) {
                Ok(pool) => Some(pool),
                Err(error) => {
                    tracing::warn!(%error, "cannot start {} threads that compress; reactors compress", self.threads);
                    None
                }
            }
        };
        if self.threads == 0 {
            return None;
        }
        self.pool.get_or_init(start).as_ref()
    }

    /// Compresses ranges of blocks to the stored bytes of a blob each; `None` where that saves no sector. `buffer` returns a
    /// buffer for a number of bytes.
    pub async fn compress(
        &self,
        compression: Compression,
        ranges: &[BufList],
        buffer: impl Fn(usize) -> BufMut,
    ) -> Option<Vec<Option<Vec<u8>>>> {
        let ((format, codec), pool) = (codec_of(compression)?, self.pool()?);
        let job = |data: &BufList| {
            let at_most = data.len() - SECTOR - BLOB_HEADER;
            let mut output = buffer(data.len());
            output.set_len(data.len());
            let work = CompressionWork::Compress { codec, at_most, sample: false };
            CompressionJob::new(work, data.parts().to_vec(), vec![output])
        };
        let mut jobs: VecDeque<CompressionJob> = ranges.iter().map(job).collect();
        let mut tickets = Vec::with_capacity(ranges.len());
        loop {
            pool.submit_batch(&mut jobs, &mut tickets);
            if jobs.is_empty() {
                break;
            }
            poll_fn(|context| pool.poll_room(context)).await;
        }
        let mut stored = Vec::with_capacity(ranges.len());
        for (ticket, data) in tickets.into_iter().zip(ranges) {
            let finished = ticket.await.ok()?;
            let result = finished.result;
            let (_, output) = finished.into_pages::<Buf, BufMut>()?;
            stored.push(match result {
                Ok(JobOutcome::Done(length)) => stored_bytes(format, data.len(), &output[0][..length]),
                Ok(JobOutcome::PassedThrough) | Err(_) => None,
            });
        }
        Some(stored)
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor};

    use super::*;
    use crate::blobs::BlobCodecs;
    use crate::format::BLOCK;

    #[test]
    fn helpers_store_what_the_reactor_would() {
        let text = include_bytes!("helpers.rs").repeat(60);
        let mut noise = vec![0; 4 * BLOCK];
        let mut state = 7u64;
        for byte in &mut noise {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            *byte = (state >> 56) as u8;
        }
        let scattered: BufList = text[..8 * BLOCK].chunks(BLOCK).map(Buf::copy_of).collect();
        let mut ranges = vec![scattered, Buf::copy_of(&noise).into()];
        // More than the queue holds.
        ranges.extend((0..DEPTH + 40).map(|i| Buf::copy_of(&text[i * 100..i * 100 + (1 + i % 32) * BLOCK]).into()));
        for setting in ["lz4", "zstd:1", "deflate:1"] {
            let setting: Compression = setting.parse().expect(setting);
            let helpers = CompressionHelpers::new(2);
            assert!(helpers.are_available());
            let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
            let found = reactor.block_on(helpers.compress(setting, &ranges, BufMut::with_capacity)).expect("helpers");
            let codecs = BlobCodecs::default();
            let expected: Vec<_> = ranges.iter().map(|data| codecs.compress(setting, &data.to_vec())).collect();
            assert!(found == expected, "{setting}");
            assert_eq!((found[0].is_some(), found[1].is_some()), (true, false), "{setting}");
        }
    }

    #[test]
    fn without_threads_there_are_no_helpers() {
        let helpers = CompressionHelpers::new(0);
        assert!(!helpers.are_available());
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let ranges = [Buf::zeroed(BLOCK).into()];
        assert!(reactor.block_on(helpers.compress(Compression::Lz4, &ranges, BufMut::with_capacity)).is_none());
    }
}
