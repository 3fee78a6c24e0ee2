//! DEFLATE: rates are bytes of plain data a second; `ratio` is plain bytes for each compressed byte.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use forebay_accel::compress::engine::{
    CompressionEngine, CompressionJob, CompressionPool, CompressionWork, JobTicket, PoolOptions,
};
use forebay_accel::compress::{Codec, Compressor, Decompressor, Framing, Level};
use forebay_peers::corpus::Corpus;
use forebay_peers::igzip::Igzip;
use forebay_peers::zlib::Zlib;

use crate::{Race, Series, Side};

fn codec(level: u8) -> Codec {
    Codec::Deflate { framing: Framing::Raw, level: Level::new(level).expect("a level") }
}

fn size(bytes: usize) -> String {
    format!("{} KiB", bytes >> 10)
}

/// All of it.
pub fn run(race: &Race) {
    let corpus = Corpus::from_environment().expect("a folder of files");
    for (block, goal) in [(4 << 10, 3.0), (16 << 10, 0.0), (64 << 10, 4.0), (128 << 10, 4.0)] {
        level(race, &corpus, 1, block, goal);
    }
    for (number, goal) in [(2, 0.0), (3, 0.0), (4, 0.0), (5, 0.0), (6, 3.0), (7, 0.0), (8, 0.0), (9, 0.0)] {
        level(race, &corpus, number, 128 << 10, goal);
    }
    for (block, goal) in [(4 << 10, 0.0), (64 << 10, 2.2), (128 << 10, 2.2)] {
        inflate(race, &corpus, block, goal);
    }
    engine(race, &corpus);
}

fn level(race: &Race, corpus: &Corpus, level: u8, block: usize, goal: f64) {
    let case = format!("level {level} {}", size(block));
    if !race.wants("compress", &case) {
        return;
    }
    let blocks = corpus.blocks(block);
    let plain: usize = blocks.iter().map(|block| block.len()).sum();
    let room = codec(level).bound(block) + 1024;
    let mut series: Vec<(&str, Side, Box<dyn FnMut(&[u8], &mut [u8]) -> usize>)> = Vec::new();
    let mut ours = Compressor::new();
    series.push((
        "forebay",
        Side::Ours,
        Box::new(move |data, out| ours.compress(codec(level), data, out).expect("room for the worst case")),
    ));
    let mut zlib = Zlib::deflate(i32::from(level)).expect("Debian's zlib");
    series.push(("zlib", Side::Peer, Box::new(move |data, out| zlib.run(data, out))));
    // igzip has four levels, of which the last is about zlib's third.
    if level <= 3 {
        let mut igzip = Igzip::new(u32::from(level));
        series.push(("igzip", Side::Shown, Box::new(move |data, out| igzip.deflate(data, out))));
    }
    let libdeflate_level = libdeflater::CompressionLvl::new(i32::from(level)).expect("a level of both");
    let mut libdeflate = libdeflater::Compressor::new(libdeflate_level);
    series.push((
        "libdeflate",
        Side::Shown,
        Box::new(move |data, out| libdeflate.deflate_compress(data, out).expect("room for the worst case")),
    ));
    // What each makes of it, and that zlib can read it.
    let mut out = vec![0; room];
    let mut check = Zlib::inflate().expect("Debian's zlib");
    let mut back = vec![0; block];
    for (name, side, work) in &mut series {
        let mut packed = 0;
        for data in &blocks {
            let length = work(data, &mut out);
            assert!(check.run(&out[..length], &mut back) == data.len() && back[..data.len()] == **data, "{name}");
            packed += length;
        }
        race.value("ratio", &case, 1.0, name, *side, plain as f64 / packed as f64);
    }
    let mut series: Vec<Series<'_>> = series
        .into_iter()
        .map(|(name, side, mut work)| {
            let (blocks, mut out) = (&blocks, vec![0; room]);
            Series::new(name, side, move || {
                blocks.iter().for_each(|data| {
                    work(data, &mut out);
                });
                plain
            })
        })
        .collect();
    race.run("compress", &case, goal, &mut series);
}

fn inflate(race: &Race, corpus: &Corpus, block: usize, goal: f64) {
    let case = format!("inflate {}", size(block));
    if !race.wants("compress", &case) {
        return;
    }
    let blocks = corpus.blocks(block);
    let plain: usize = blocks.iter().map(|block| block.len()).sum();
    let mut zlib = Zlib::deflate(6).expect("Debian's zlib");
    let mut out = vec![0; codec(6).bound(block) + 1024];
    let streams: Vec<Vec<u8>> = blocks
        .iter()
        .map(|data| {
            let length = zlib.run(data, &mut out);
            out[..length].to_vec()
        })
        .collect();
    let streams = &streams;
    let mut series = Vec::new();
    let mut add = |name, side, mut work: Box<dyn FnMut(&[u8], &mut [u8]) -> usize>| {
        let mut out = vec![0; block];
        series
            .push(Series::new(name, side, move || streams.iter().map(|stream| work(stream, &mut out)).sum::<usize>()));
    };
    let mut ours = Decompressor::new();
    add(
        "forebay",
        Side::Ours,
        Box::new(move |data, out| ours.decompress(codec(1), data, out).expect("zlib's stream").produced),
    );
    let mut zlib = Zlib::inflate().expect("Debian's zlib");
    add("zlib", Side::Peer, Box::new(move |data, out| zlib.run(data, out)));
    add("igzip", Side::Shown, Box::new(Igzip::inflate));
    let _ = plain;
    race.run("compress", &case, goal, &mut series);
}

struct Unpark(std::thread::Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

fn wait<F: Future + Unpin>(mut future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    loop {
        match std::pin::Pin::new(&mut future).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(output) => return output,
            Poll::Pending => std::thread::park(),
        }
    }
}

/// Time this thread has been on a processor, in microseconds: what waiting or being put aside costs is not in it.
fn thread_us() -> f64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the clock exists on every Linux, and the place is ours.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
    assert_eq!(failed, 0, "no clock of the thread");
    now.tv_sec as f64 * 1e6 + now.tv_nsec as f64 / 1e3
}

/// Jobs of 32 pages on two threads, against twice what one thread does with the same blocks in one piece; and what it
/// costs to submit one.
///
/// The submitter sleeps until a batch of its jobs has ended and puts the next batch in its place, so that the threads
/// never run dry; beginning and end of a turn are small beside its middle.
fn engine(race: &Race, corpus: &Corpus) {
    const JOB: usize = 32 * 4096;
    const OPEN: usize = 48;
    const BATCH: usize = 16;
    for (number, passes) in [(1u8, 12), (6, 3)] {
        let case = format!("engine level {number}");
        if !race.wants("compress", &case) {
            continue;
        }
        if std::thread::available_parallelism().map_or(1, usize::from) < 2 {
            eprintln!("{case}: left out, since this process may run on one processor only");
            continue;
        }
        let blocks: Vec<&[u8]> = corpus.blocks(JOB).into_iter().filter(|block| block.len() == JOB).collect();
        let pool =
            CompressionPool::new(&PoolOptions { workers: 2, depth: 64, ..PoolOptions::default() }).expect("threads");
        let total = passes * blocks.len() * JOB;
        let work = CompressionWork::Compress { codec: codec(number), at_most: JOB, sample: false };
        let job = |data: &&[u8]| {
            let input: Vec<Box<[u8]>> = data.chunks(4096).map(Box::from).collect();
            let output: Vec<Box<[u8]>> = (0..33).map(|_| vec![0u8; 4096].into_boxed_slice()).collect();
            CompressionJob::new(work, input, output)
        };
        // One job for each block, as the single thread has one piece of memory for each, and as many as may be open.
        let mut idle: VecDeque<CompressionJob> = blocks.iter().cycle().take(blocks.len().max(OPEN)).map(job).collect();
        let mut submits: Vec<f64> = Vec::new();
        let submits_of = &mut submits;
        let jobs = passes * blocks.len();
        let mut turn = move || {
            let mut open: VecDeque<JobTicket> = VecDeque::new();
            let mut submitted = 0;
            while submitted < jobs || !open.is_empty() {
                while submitted < jobs && open.len() < OPEN {
                    let job = idle.pop_front().expect("more jobs than are open");
                    let begin = thread_us();
                    let ticket = pool.submit(job).ok().expect("room for as many as are open");
                    submits_of.push(thread_us() - begin);
                    open.push_back(ticket);
                    submitted += 1;
                }
                let batch = BATCH.min(open.len());
                // The last of the batch first: those before it have ended then, or are about to.
                let last = open.remove(batch - 1).expect("as many as that");
                let ended = std::iter::once(wait(last).expect("the pool is there"));
                for finished in ended.chain(open.drain(..batch - 1).map(|ticket| wait(ticket).expect("the pool"))) {
                    assert!(finished.result.is_ok());
                    let (input, output) =
                        finished.into_pages::<Box<[u8]>, Box<[u8]>>().expect("the pages that went in");
                    idle.push_back(CompressionJob::new(work, input, output));
                }
            }
            total
        };
        let mut alone = Compressor::new();
        let mut out = vec![0; codec(number).bound(JOB)];
        let mut single = || {
            for _ in 0..passes {
                for data in &blocks {
                    alone.compress(codec(number), data, &mut out).expect("room for the worst case");
                }
            }
            2 * total
        };
        // What two processors give on the same blocks with nothing between them.
        let (front, back) = blocks.split_at(blocks.len() / 2);
        let mut apart = || {
            let work = |blocks: &[&[u8]]| {
                let (mut alone, mut out) = (Compressor::new(), vec![0; codec(number).bound(JOB)]);
                for data in (0..passes).flat_map(|_| blocks) {
                    alone.compress(codec(number), data, &mut out).expect("room for the worst case");
                }
            };
            std::thread::scope(|scope| {
                scope.spawn(|| work(front));
                work(back);
            });
            total
        };
        let mut series = [
            Series::new("forebay", Side::Ours, &mut turn),
            Series::new("twice one core", Side::Peer, &mut single),
            Series::new("two threads apart", Side::Shown, &mut apart),
        ];
        race.run("compress", &case, 0.95, &mut series);
        drop(series);
        drop(turn);
        let mean = submits.iter().sum::<f64>() / submits.len() as f64;
        submits.sort_by(f64::total_cmp);
        // As a rate, so that more is better: submissions a microsecond; two microseconds are the limit.
        let case = format!("submit level {number}");
        let median = submits[submits.len() / 2];
        let p99 = submits[submits.len() * 99 / 100];
        for (case, goal, value) in
            [(case.clone(), 1.0, median), (format!("{case} mean"), 1.0, mean), (format!("{case} p99"), 0.0, p99)]
        {
            race.value("submit", &case, goal, "forebay", Side::Ours, 1.0 / value);
            race.value("submit", &case, goal, "limit of 2 us", Side::Peer, 0.5);
        }
    }
}
