//! Jobs through both engines, from plain threads: no engine here needs an executor.

use std::collections::VecDeque;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;

use super::*;
use crate::compress::{Compressor, Decompressor, Framing, Level};

const FAST: Codec = Codec::Deflate { framing: Framing::Zlib, level: Level::FASTEST };

/// Wakes a thread.
struct Unpark(thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

fn text(length: usize) -> Vec<u8> {
    include_bytes!("pool.rs").iter().copied().cycle().take(length).collect()
}

fn pages(data: &[u8], size: usize) -> Vec<Vec<u8>> {
    data.chunks(size).map(<[u8]>::to_vec).collect()
}

fn compress(codec: Codec, data: &[u8]) -> CompressionJob {
    let work = CompressionWork::Compress { codec, at_most: data.len(), sample: false };
    CompressionJob::new(work, pages(data, 4096), vec![vec![0u8; 4096]; data.len().div_ceil(4096)])
}

fn result(finished: Finished) -> Vec<u8> {
    let Ok(JobOutcome::Done(length)) = finished.result else { panic!("{:?}", finished.result) };
    let (_, output) = finished.into_pages::<Vec<u8>, Vec<u8>>().unwrap();
    let mut all = output.concat();
    all.truncate(length);
    all
}

/// Page whose reading blocks until it is released: a job that does not end.
struct Gate(Vec<u8>, Arc<std::sync::Mutex<mpsc::Receiver<()>>>);

impl Deref for Gate {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let _ = self.1.lock().unwrap().recv();
        &self.0
    }
}

fn closed_gate() -> (mpsc::Sender<()>, CompressionJob) {
    let (open, gate) = mpsc::channel();
    let gate = Gate(vec![1; 8192], Arc::new(std::sync::Mutex::new(gate)));
    let work = CompressionWork::Compress { codec: FAST, at_most: 8192, sample: false };
    (open, CompressionJob::new(work, vec![gate], vec![vec![0u8; 8192]]))
}

fn pool(workers: usize, depth: usize) -> CompressionPool {
    CompressionPool::new(&PoolOptions { workers, depth, inline_bytes_max: 0, name: "test".into() }).unwrap()
}

#[test]
fn pages_there_and_back() {
    let pool = pool(2, 4);
    let engines: [&dyn CompressionEngine; 2] = [&pool, &Inline];
    for engine in engines {
        for codec in [FAST, Codec::ZLIB, Codec::Lz4, Codec::Zstd { level: 3 }] {
            for length in [1, 4095, 4096, 4097, 32 * 4096] {
                let data = text(length);
                let job = CompressionJob::new(
                    CompressionWork::Compress { codec, at_most: codec.bound(length), sample: false },
                    pages(&data, 4096),
                    vec![vec![0u8; 1000]; codec.bound(length).div_ceil(1000)],
                );
                let stream = result(block_on(async { submit(engine, job).await.await }).unwrap());
                let mut plain = vec![0; length];
                Decompressor::new().decompress(codec, &stream, &mut plain).unwrap();
                assert_eq!(plain, data);
                let job = CompressionJob::new(
                    CompressionWork::Decompress { codec },
                    pages(&stream, 777),
                    vec![vec![0u8; 4096]; length.div_ceil(4096)],
                );
                assert_eq!(result(block_on(async { submit(engine, job).await.await }).unwrap()), data);
            }
        }
    }
}

#[test]
fn what_does_not_shrink_is_passed_through_with_its_pages() {
    let mut state = 9u64;
    let noise: Vec<u8> = (0..65_536)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 56) as u8
        })
        .collect();
    for sample in [false, true] {
        let work = CompressionWork::Compress { codec: FAST, at_most: 60_000, sample };
        let job = CompressionJob::new(work, pages(&noise, 4096), vec![vec![0u8; 65_536]]);
        let finished = block_on(Inline.submit(job).ok().unwrap()).unwrap();
        assert_eq!(finished.result, Ok(JobOutcome::PassedThrough));
        let (input, _) = finished.into_pages::<Vec<u8>, Vec<u8>>().unwrap();
        assert_eq!(input.concat(), noise);
    }
    // Where the caller would take more than its own pages hold, it is told so.
    let work = CompressionWork::Compress { codec: FAST, at_most: 100_000, sample: false };
    let finished =
        block_on(Inline.submit(CompressionJob::new(work, vec![noise], vec![vec![0u8; 4096]])).ok().unwrap()).unwrap();
    assert_eq!(finished.result, Err(JobError::NoRoom));
}

#[test]
fn corrupt_input_is_an_error_and_the_engine_goes_on() {
    let pool = pool(1, 4);
    let bad = CompressionJob::new(
        CompressionWork::Decompress { codec: FAST },
        vec![vec![0xFFu8; 100]],
        vec![vec![0u8; 4096]],
    );
    let good = compress(FAST, &text(10_000));
    let (bad, good) = (pool.submit(bad).ok().unwrap(), pool.submit(good).ok().unwrap());
    assert_eq!(block_on(bad).unwrap().result, Err(JobError::Decompress(DecompressError::Corrupt)));
    assert!(block_on(good).unwrap().result.is_ok());
}

#[test]
fn a_full_queue_gives_the_job_back_and_says_when_there_is_room() {
    let pool = pool(1, 2);
    let (open, job) = closed_gate();
    let first = block_on(submit(&pool, job));
    // The thread takes the first job off the queue, sooner or later; then two fit behind it.
    let (second_open, second) = closed_gate();
    let second = block_on(submit(&pool, second));
    let (third_open, third) = closed_gate();
    let third = block_on(submit(&pool, third));
    let Err(Full(back)) = pool.submit(compress(FAST, &text(5000))) else { panic!("three jobs fit") };
    assert_eq!(back.input.total(), 5000);

    let woken = Arc::new(AtomicUsize::new(0));
    struct Count(Arc<AtomicUsize>);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let waker = Waker::from(Arc::new(Count(woken.clone())));
    assert!(pool.poll_room(&mut Context::from_waker(&waker)).is_pending());
    assert!(pool.poll_room(&mut Context::from_waker(&waker)).is_pending());
    drop(open);
    let fourth = block_on(submit(&pool, back));
    drop((second_open, third_open));
    for ticket in [first, second, third, fourth] {
        assert!(block_on(ticket).unwrap().result.is_ok());
    }
    assert_eq!(woken.load(Ordering::SeqCst), 1);
}

#[test]
fn a_batch_is_taken_as_far_as_there_is_room() {
    let pool = pool(1, 3);
    let (open, job) = closed_gate();
    let first = block_on(submit(&pool, job));
    let mut jobs: VecDeque<CompressionJob> = (0..6).map(|_| compress(FAST, &text(9000))).collect();
    let mut tickets = Vec::new();
    pool.submit_batch(&mut jobs, &mut tickets);
    // The first job may still be in the queue, or with the thread.
    assert!(tickets.len() == 2 || tickets.len() == 3, "{}", tickets.len());
    assert_eq!(jobs.len(), 6 - tickets.len());
    drop(open);
    while !jobs.is_empty() {
        block_on(poll_fn(|context| pool.poll_room(context)));
        pool.submit_batch(&mut jobs, &mut tickets);
    }
    assert!(block_on(first).unwrap().result.is_ok());
    for ticket in tickets {
        assert_eq!(result(block_on(ticket).unwrap()), {
            let (data, mut out) = (text(9000), vec![0; 9000]);
            let length = Compressor::new().compress(FAST, &data, &mut out).unwrap();
            out[..length].to_vec()
        });
    }
}

#[test]
fn dropping_the_pool_ends_its_jobs_first_and_dropping_a_ticket_does_no_harm() {
    let pool = pool(2, 64);
    let mut tickets: Vec<JobTicket> =
        (0..40).map(|_| pool.submit(compress(Codec::ZLIB, &text(20_000))).ok().unwrap()).collect();
    tickets.truncate(20);
    drop(pool);
    for mut ticket in tickets {
        assert!(ticket.try_take().unwrap().unwrap().result.is_ok());
    }
}

#[test]
fn small_jobs_are_done_at_once() {
    let options = PoolOptions { inline_bytes_max: 4096, ..PoolOptions::default() };
    let pool = CompressionPool::new(&options).unwrap();
    let mut ticket = pool.submit(compress(FAST, &text(4096))).ok().unwrap();
    assert!(ticket.try_take().unwrap().unwrap().result.is_ok());
    assert_eq!(pool.depth(), options.depth);
}

#[test]
fn many_submitters_keep_many_workers_busy() {
    let pool = pool(3, 4);
    let data = text(30_000);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                block_on(async {
                    for _ in 0..50 {
                        let ticket = submit(&pool, compress(FAST, &data)).await;
                        let stream = result(ticket.await.unwrap());
                        let mut plain = vec![0; data.len()];
                        Decompressor::new().decompress(FAST, &stream, &mut plain).unwrap();
                        assert_eq!(plain, data);
                    }
                });
            });
        }
    });
}

#[test]
fn a_ticket_whose_engine_breaks_says_so() {
    let (completion, ticket) = ticket();
    let waiting = thread::spawn(move || block_on(ticket).err());
    drop(completion);
    assert_eq!(waiting.join().unwrap(), Some(EngineGone));
    let (completion, mut ticket) = super::ticket();
    let waker = Waker::noop();
    assert!(Pin::new(&mut ticket).poll(&mut Context::from_waker(waker)).is_pending());
    drop(completion);
    assert!(matches!(ticket.try_take(), Some(Err(EngineGone))));
}
