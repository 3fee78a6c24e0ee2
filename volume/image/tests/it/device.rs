//! Image as a block device: random requests compared with a plain vector, and atomicity.

use std::cell::Cell;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::common::{Stormy, bytes, objects, pattern, run};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, ErrorKind, Extent, ExtentState, ObjectBackend, Result, WriteExtent,
};
use forebay_image::{CreateOptions, Image, ImageOpenOptions};
use forebay_ram::RamBackend;
use forebay_reactor::{spawn, timeout, yield_now};
use proptest::prelude::*;

/// Object size in bytes: the smallest, so that many requests cross a boundary.
const OBJECT: u64 = 64 << 10;

async fn image(backend: &Rc<dyn ObjectBackend>, size: u64) -> Rc<Image> {
    let options = CreateOptions { size, object_size: OBJECT, ..CreateOptions::default() };
    forebay_image::create(backend, "vm", options).await.expect("created");
    Image::open(backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened")
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

async fn read(image: &Image, offset: u64, len: u64) -> Vec<u8> {
    image.submit(BlockRequest::Read(Extent::new(offset, len))).await.expect("a read").into_data().to_vec()
}

async fn write(image: &Image, offset: u64, data: &[u8]) {
    image.submit(BlockRequest::Write { offset, data: bytes(data), fua: false }).await.expect("a write");
}

/// Random step, with arbitrary offsets; the driver fits them to the image's size.
#[derive(Debug, Clone)]
enum Step {
    /// Requests submitted at once; those that overlap an earlier one are left out.
    Batch(Vec<Ask>),
    /// Writes submitted as one; those that overlap an earlier one are left out.
    WriteMany(Vec<(Extent, u8)>, bool),
    /// Compare-and-write whose expectation holds, or differs somewhere.
    CompareAndWrite {
        extent: Extent,
        seed: u8,
        wrong_at: Option<u64>,
        fua: bool,
    },
    Resize(u64),
    Map(Extent),
    Reopen,
}

#[derive(Debug, Clone)]
enum Ask {
    Read(Extent),
    Write(Extent, u8, bool),
    Discard(Extent),
    Zeroes(Extent, bool, bool),
    Flush,
}

impl Ask {
    fn extent(&self) -> Extent {
        match self {
            Ask::Read(extent) | Ask::Write(extent, ..) | Ask::Discard(extent) | Ask::Zeroes(extent, ..) => *extent,
            Ask::Flush => Extent::new(0, 0),
        }
    }

    fn request(&self) -> BlockRequest {
        match *self {
            Ask::Read(extent) => BlockRequest::Read(extent),
            Ask::Write(extent, seed, fua) => {
                BlockRequest::Write { offset: extent.offset, data: bytes(&pattern(seed, extent.len as usize)), fua }
            }
            Ask::Discard(extent) => BlockRequest::Discard(extent),
            Ask::Zeroes(extent, no_unmap, fua) => BlockRequest::WriteZeroes { extent, no_unmap, fua },
            Ask::Flush => BlockRequest::Flush,
        }
    }
}

fn place() -> impl Strategy<Value = u64> {
    prop_oneof![
        3 => 0..6 * OBJECT,
        2 => (0..6u64).prop_map(|object| object * OBJECT),
        1 => (1..6u64, 0..3u64).prop_map(|(object, by)| object * OBJECT - 1 + by),
        1 => (0..6 * OBJECT / 4096).prop_map(|block| block * 4096),
    ]
}

fn extent() -> impl Strategy<Value = Extent> {
    prop_oneof![
        3 => (place(), 0..9000u64).prop_map(|(offset, len)| Extent::new(offset, len)),
        2 => (place(), place()).prop_map(|(a, b)| Extent::new(a.min(b), a.abs_diff(b))),
        1 => (0..6u64).prop_map(|object| Extent::new(object * OBJECT, OBJECT)),
    ]
}

fn ask() -> impl Strategy<Value = Ask> {
    prop_oneof![
        3 => extent().prop_map(Ask::Read),
        5 => (extent(), any::<u8>(), any::<bool>()).prop_map(|(extent, seed, fua)| Ask::Write(extent, seed, fua)),
        2 => extent().prop_map(Ask::Discard),
        2 => (extent(), any::<bool>(), any::<bool>()).prop_map(|(extent, a, b)| Ask::Zeroes(extent, a, b)),
        1 => Just(Ask::Flush),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let wrong = prop_oneof![Just(None), any::<u64>().prop_map(Some)];
    let compare = (extent(), any::<u8>(), wrong, any::<bool>())
        .prop_map(|(extent, seed, wrong_at, fua)| Step::CompareAndWrite { extent, seed, wrong_at, fua });
    prop_oneof![
        8 => prop::collection::vec(ask(), 1..8).prop_map(Step::Batch),
        3 => prop::collection::vec((extent(), any::<u8>()), 0..12)
            .prop_flat_map(|writes| (Just(writes), any::<bool>()))
            .prop_map(|(writes, fua)| Step::WriteMany(writes, fua)),
        3 => compare,
        2 => place().prop_map(Step::Resize),
        1 => extent().prop_map(Step::Map),
        1 => Just(Step::Reopen),
    ]
}

struct Check {
    backend: Rc<dyn ObjectBackend>,
    image: Rc<Image>,
    model: Vec<u8>,
}

impl Check {
    fn fits(&self, extent: Extent) -> bool {
        extent.end() <= self.model.len() as u64
    }

    fn part(&mut self, extent: Extent) -> &mut [u8] {
        &mut self.model[extent.offset as usize..extent.end() as usize]
    }

    async fn step(&mut self, step: &Step) {
        match step {
            Step::Batch(asks) => self.batch(asks).await,
            Step::WriteMany(writes, fua) => self.write_many(writes, *fua).await,
            Step::CompareAndWrite { extent, seed, wrong_at, fua } => {
                self.compare_and_write(*extent, *seed, *wrong_at, *fua).await;
            }
            Step::Resize(size) => {
                self.image.resize(*size, true, |_| {}).await.expect("resized");
                self.model.resize(*size as usize, 0);
                assert_eq!(self.image.geometry().size, *size);
            }
            Step::Map(extent) => self.map(*extent).await,
            Step::Reopen => {
                let read_only = ImageOpenOptions { read_only: true };
                let other = Image::open(self.backend.clone(), "vm", read_only).await.expect("opened");
                self.image =
                    Image::open(self.backend.clone(), "vm", ImageOpenOptions::default()).await.expect("opened");
                drop(other);
            }
        }
    }

    async fn batch(&mut self, asks: &[Ask]) {
        let mut used: Vec<Extent> = Vec::new();
        let mut running = Vec::new();
        for ask in asks {
            let extent = ask.extent();
            if used.iter().any(|other| other.overlaps(extent)) {
                continue;
            }
            used.push(extent);
            running.push((ask.clone(), self.image.submit(ask.request())));
        }
        // Polled in reverse order of submission: that must not matter.
        for (ask, answer) in running.into_iter().rev() {
            let answer = answer.await;
            let extent = ask.extent();
            if !self.fits(extent) {
                assert_eq!(kind(answer), Some(ErrorKind::OutOfRange), "{ask:?}");
                continue;
            }
            let reply = answer.unwrap_or_else(|error| panic!("{ask:?}: {error}"));
            match (&ask, reply) {
                (Ask::Read(_), BlockReply::Data(data)) => assert!(data == self.part(extent)[..], "{ask:?}"),
                (Ask::Write(_, seed, _), BlockReply::Done) => {
                    let data = pattern(*seed, extent.len as usize);
                    self.part(extent).copy_from_slice(&data);
                }
                (Ask::Discard(_) | Ask::Zeroes(..), BlockReply::Done) => self.part(extent).fill(0),
                (Ask::Flush, BlockReply::Done) => {}
                (_, reply) => panic!("{ask:?} was answered {reply:?}"),
            }
        }
    }

    async fn write_many(&mut self, writes: &[(Extent, u8)], fua: bool) {
        let mut used: Vec<(Extent, Vec<u8>)> = Vec::new();
        for &(extent, seed) in writes {
            if !used.iter().any(|(other, _)| other.overlaps(extent)) {
                used.push((extent, pattern(seed, extent.len as usize)));
            }
        }
        let patch = |(extent, data): &(Extent, Vec<u8>)| WriteExtent { offset: extent.offset, data: bytes(data) };
        let answer = self.image.write_many(used.iter().map(patch).collect(), fua).await;
        if !used.iter().all(|(extent, _)| self.fits(*extent)) {
            // Refused as a whole, before any write.
            assert_eq!(kind(answer), Some(ErrorKind::OutOfRange), "{used:?}");
            return;
        }
        answer.unwrap_or_else(|error| panic!("{used:?}: {error}"));
        used.iter().for_each(|(extent, data)| self.part(*extent).copy_from_slice(data));
    }

    async fn compare_and_write(&mut self, extent: Extent, seed: u8, wrong_at: Option<u64>, fua: bool) {
        let data = pattern(seed, extent.len as usize);
        let mut expect = data.clone();
        if self.fits(extent) {
            expect.copy_from_slice(self.part(extent));
        }
        let wrong_at = wrong_at.filter(|_| extent.len > 0).map(|at| at % extent.len);
        if let Some(at) = wrong_at {
            expect[at as usize] ^= 0x80;
        }
        let request =
            BlockRequest::CompareAndWrite { offset: extent.offset, expect: bytes(&expect), data: bytes(&data), fua };
        let answer = self.image.submit(request).await;
        match wrong_at {
            _ if !self.fits(extent) => assert_eq!(kind(answer), Some(ErrorKind::OutOfRange)),
            Some(at) => assert_eq!(kind(answer), Some(ErrorKind::Mismatch(at)), "{extent:?}"),
            None => {
                answer.expect("what is there was expected");
                self.part(extent).copy_from_slice(&data);
            }
        }
    }

    async fn map(&mut self, extent: Extent) {
        let answer = self.image.map(extent).await;
        if !self.fits(extent) {
            assert_eq!(kind(answer), Some(ErrorKind::OutOfRange));
            return;
        }
        let mut at = extent.offset;
        for run in answer.expect("a map").runs() {
            assert_eq!(run.extent.offset, at);
            at = run.extent.end();
            let zero = self.part(run.extent).iter().all(|&byte| byte == 0);
            assert!(zero || run.state == ExtentState::Data, "{run:?} holds bytes");
        }
        assert_eq!(at, extent.end());
    }

    async fn finish(mut self) {
        let size = self.model.len() as u64;
        assert!(read(&self.image, 0, size).await == self.model, "all of it at the end");
        self.map(Extent::new(0, size)).await;
        let usage = self.image.usage().await.expect("usage");
        assert_eq!(usage.provisioned, size);
        let holds = self.model.iter().filter(|&&byte| byte != 0).count() as u64;
        assert!((holds..=size).contains(&usage.used), "{usage:?} for {holds} bytes that are not zero");
        drop(self.image);
        forebay_image::remove(&self.backend, "vm", |_| {}).await.expect("removed");
        assert_eq!(objects(&self.backend).await, ["rbd_directory"]);
    }
}

fn check(backend: Rc<dyn ObjectBackend>, size: u64, steps: &[Step]) {
    run(async {
        let image = image(&backend, size).await;
        let mut check = Check { backend, image, model: vec![0; size as usize] };
        for step in steps {
            check.step(step).await;
        }
        check.finish().await;
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_requests_do_what_a_vector_does(size in place(), steps in prop::collection::vec(step(), 1..30)) {
        check(RamBackend::new("ram"), size, &steps);
    }

    #[test]
    fn late_answers_make_no_difference(
        seed in any::<u64>(),
        size in place(),
        steps in prop::collection::vec(step(), 1..20),
    ) {
        check(Stormy::new(seed, 6), size, &steps);
    }

    /// During a shrink, requests before the new end succeed, those beyond it succeed or are refused, and when the
    /// image grows again none of their data is left.
    #[test]
    fn nothing_survives_beyond_a_shrunk_end(
        seed in any::<u64>(),
        new_size in place(),
        asks in prop::collection::vec(ask(), 1..12),
        before in 0..6usize,
    ) {
        run(async {
            let size = 6 * OBJECT;
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 8);
            let image = image(&backend, size).await;
            let mut model = pattern(1, size as usize);
            write(&image, 0, &model).await;
            let fits = |extent: Extent| extent.end() <= new_size || extent.offset >= new_size;
            let mut used: Vec<Extent> = Vec::new();
            let mut asks: Vec<Ask> = asks.into_iter().filter(|ask| !matches!(ask, Ask::Read(_))).collect();
            asks.retain(|ask| {
                let extent = ask.extent();
                let good = fits(extent) && extent.end() <= size && !used.iter().any(|other| other.overlaps(extent));
                used.push(extent);
                good
            });
            let (early, late) = asks.split_at(before.min(asks.len()));
            let mut running: Vec<_> = early.iter().map(|ask| (ask, image.submit(ask.request()))).collect();
            let shrinking = spawn({
                let image = image.clone();
                async move { image.resize(new_size, true, |_| {}).await }
            });
            yield_now().await;
            running.extend(late.iter().map(|ask| (ask, image.submit(ask.request()))));
            for (ask, answer) in running {
                let extent = ask.extent();
                match answer.await {
                    Ok(_) if extent.end() > new_size => {}
                    Ok(_) => {
                        let part = &mut model[extent.offset as usize..extent.end() as usize];
                        match ask {
                            Ask::Write(_, seed, _) => part.copy_from_slice(&pattern(*seed, extent.len as usize)),
                            _ => part.fill(0),
                        }
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::OutOfRange);
                        assert!(extent.end() > new_size, "{ask:?} was refused");
                    }
                }
            }
            shrinking.await.expect("shrunk");
            assert_eq!(image.size(), new_size);
            image.resize(size, false, |_| {}).await.expect("grown");
            model[new_size as usize..].fill(0);
            assert!(read(&image, 0, size).await == model);
        });
    }
}

/// Concurrent increments of one number that crosses the boundary of two objects, with writes next to it.
#[test]
fn compare_and_write_is_atomic_over_objects() {
    for seed in 0..20 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 5);
            let image = image(&backend, 2 * OBJECT).await;
            let at = OBJECT - 8;
            let writers = (0..6).map(|_| {
                let image = image.clone();
                spawn(async move {
                    for _ in 0..8 {
                        loop {
                            let now = read(&image, at, 16).await;
                            let count = u128::from_be_bytes(now[..].try_into().expect("16 bytes"));
                            // Both halves change each time.
                            let next = (count + (1 << 64 | 1)).to_be_bytes();
                            let request = BlockRequest::CompareAndWrite {
                                offset: at,
                                expect: bytes(&now),
                                data: bytes(&next),
                                fua: false,
                            };
                            match image.submit(request).await {
                                Ok(_) => break,
                                Err(error) => assert!(matches!(error.kind(), ErrorKind::Mismatch(_)), "{error}"),
                            }
                        }
                    }
                })
            });
            let writers: Vec<_> = writers.collect();
            let stop = Rc::new(Cell::new(false));
            let beside = spawn({
                let (image, stop) = (image.clone(), stop.clone());
                async move {
                    while !stop.get() {
                        write(&image, at - 100, &[1; 100]).await;
                        write(&image, at + 16, &[2; 100]).await;
                    }
                }
            });
            for writer in writers {
                writer.await;
            }
            stop.set(true);
            beside.await;
            let count = u128::from_be_bytes(read(&image, at, 16).await[..].try_into().expect("16 bytes"));
            assert_eq!(count, 48 * (1 << 64 | 1), "seed {seed}");
        });
    }
}

/// Compare-and-write over two objects against plain writes of the same bytes: a write between the comparison and the
/// write is never lost.
#[test]
fn a_write_never_slips_into_a_compare_and_write() {
    for seed in 0..100 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 7);
            let image = image(&backend, 2 * OBJECT).await;
            let at = OBJECT - 4;
            let both = BlockRequest::CompareAndWrite {
                offset: at,
                expect: BufList::zeroes(8),
                data: bytes(&[1; 8]),
                fua: false,
            };
            let whole = BlockRequest::Write { offset: at, data: bytes(&[2; 8]), fua: false };
            let half = BlockRequest::Write { offset: at, data: bytes(&[2; 4]), fua: false };
            let other = if seed % 2 == 0 { whole } else { half.clone() };
            let is_half = seed % 2 == 1;
            let swapped = image.submit(both);
            if seed % 3 == 0 {
                yield_now().await;
            }
            let written = image.submit(other);
            written.await.expect("a write");
            let swapped = swapped.await;
            let now = read(&image, at, 8).await;
            match swapped {
                // Swapped first, then written.
                Ok(_) if is_half => assert_eq!(now, [2, 2, 2, 2, 1, 1, 1, 1], "seed {seed}"),
                Ok(_) => assert_eq!(now, [2; 8], "seed {seed}"),
                Err(error) => {
                    assert!(matches!(error.kind(), ErrorKind::Mismatch(_)));
                    assert_eq!(now[..4], [2; 4], "seed {seed}");
                }
            }
        });
    }
}

#[test]
fn a_dropped_request_is_done_all_the_same() {
    for seed in 0..100 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 6);
            let image = image(&backend, 3 * OBJECT).await;
            // Within one object, or over two.
            let (offset, len) = if seed % 2 == 0 { (0, 5000) } else { (OBJECT / 2, OBJECT) };
            let data = pattern(3, len as usize);
            let fua = seed % 3 == 0;
            let mut cx = Context::from_waker(Waker::noop());
            let polled = seed % 5 < 2;
            if seed % 7 < 3 {
                let patch =
                    |from: usize, to: usize| WriteExtent { offset: offset + from as u64, data: bytes(&data[from..to]) };
                let mut answer = image.write_many(vec![patch(0, 100), patch(100, data.len())], fua);
                let _ = polled.then(|| answer.as_mut().poll(&mut cx));
            } else {
                let mut answer = image.submit(BlockRequest::Write { offset, data: bytes(&data), fua });
                let _ = polled.then(|| answer.as_mut().poll(&mut cx));
            }
            // Locking the whole image waits for the write; the comparison follows.
            let mut expect = vec![0; 3 * OBJECT as usize];
            expect[offset as usize..][..data.len()].copy_from_slice(&data);
            let swap =
                BlockRequest::CompareAndWrite { offset: 0, expect: bytes(&expect), data: bytes(&expect), fua: false };
            image.submit(swap).await.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        });
    }
}

/// Writes submitted as one wait for a range, while an exclusive lock waits for what of them has been admitted.
#[test]
fn writes_submitted_as_one_do_not_wait_for_themselves() {
    for seed in 0..40 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 6);
            let image = image(&backend, 4 * OBJECT).await;
            let swap = || {
                let zeroes = || BufList::zeroes(OBJECT as usize);
                image.submit(BlockRequest::CompareAndWrite {
                    offset: OBJECT / 2,
                    expect: zeroes(),
                    data: zeroes(),
                    fua: false,
                })
            };
            // One locks the range, the other waits for it.
            let swaps = [swap(), swap()];
            yield_now().await;
            let patch = |offset| WriteExtent { offset, data: bytes(b"data") };
            let writes = image.write_many(vec![patch(OBJECT), patch(2 * OBJECT), patch(3 * OBJECT)], seed % 2 == 0);
            let done = timeout(Duration::from_secs(20), writes).await;
            done.expect("the writes wait for an exclusive lock that waits for them").expect("writes");
            for swap in swaps {
                let swapped = swap.await;
                assert!(swapped.is_ok() || matches!(kind(swapped), Some(ErrorKind::Mismatch(_))), "seed {seed}");
            }
            assert_eq!(read(&image, 2 * OBJECT, 4).await, b"data");
        });
    }
}

/// A request over more objects than are in flight at once does not recreate objects that are cut off in the meantime.
#[test]
fn a_long_write_does_not_outlive_the_end() {
    for seed in 0..6 {
        run(async {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 4);
            let size = 80 * OBJECT;
            let image = image(&backend, size).await;
            let long = match seed % 3 {
                0 => BlockRequest::Write { offset: 0, data: bytes(&pattern(1, size as usize)), fua: false },
                _ => BlockRequest::WriteZeroes { extent: Extent::new(0, size), no_unmap: true, fua: seed % 3 == 1 },
            };
            let written = image.submit(long);
            image.resize(OBJECT, true, |_| {}).await.expect("shrunk");
            written.await.expect("it was there first");
            let data = objects(&backend).await.into_iter().filter(|name| name.starts_with("rbd_data."));
            assert_eq!(data.count(), 1, "seed {seed}: objects past the end");
        });
    }
}

/// Requests that wait for the range during a shrink are refused afterwards.
#[test]
fn requests_that_waited_look_at_the_size_again() {
    for seed in 0..20 {
        // In a task, which is woken before those of the requests, since it began to wait before them.
        let test = async move {
            let backend: Rc<dyn ObjectBackend> = Stormy::new(seed, 4);
            let image = image(&backend, 2 * OBJECT).await;
            let swap = |seed: u8| BlockRequest::CompareAndWrite {
                offset: OBJECT - 4,
                expect: BufList::zeroes(8),
                data: bytes(&[seed; 8]),
                fua: false,
            };
            let first = image.submit(swap(1));
            // The first one has locked the range by then, and keeps it for a few turns.
            yield_now().await;
            let waiting = [
                image.submit(swap(2)),
                image.submit(BlockRequest::Write { offset: OBJECT, data: bytes(&[3; 2]), fua: false }),
                image.submit(BlockRequest::CompareAndWrite {
                    offset: OBJECT,
                    expect: BufList::zeroes(1),
                    data: bytes(&[4]),
                    fua: false,
                }),
            ];
            image.resize(0, true, |_| {}).await.expect("shrunk");
            first.await.expect("it was first");
            for answer in waiting {
                let kind = kind(answer.await);
                let good = matches!(kind, None | Some(ErrorKind::OutOfRange | ErrorKind::Mismatch(_)));
                assert!(good, "seed {seed}: {kind:?}");
            }
            let data = objects(&backend).await.into_iter().filter(|name| name.starts_with("rbd_data."));
            assert_eq!(data.count(), 0, "seed {seed}: objects past the end");
        };
        run(async { spawn(test).await });
    }
}

#[test]
fn a_full_pool_refuses_writes_and_takes_discards() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::with_capacity("ram", 4 * OBJECT);
        let image = image(&backend, 100 * OBJECT).await;
        let fill = BlockRequest::Write { offset: 0, data: bytes(&pattern(1, 10 * OBJECT as usize)), fua: false };
        assert_eq!(kind(image.submit(fill).await), Some(ErrorKind::NoSpace));
        image.submit(BlockRequest::Discard(Extent::new(0, 100 * OBJECT))).await.expect("a discard");
        assert_eq!(image.usage().await.expect("usage").used, 0);
        write(&image, 50 * OBJECT, &pattern(2, OBJECT as usize)).await;
        let kept = BlockRequest::WriteZeroes { extent: Extent::new(0, 2 * OBJECT), no_unmap: true, fua: true };
        image.submit(kept).await.expect("zeroes that keep their space");
        assert_eq!(image.usage().await.expect("usage").used, 3 * OBJECT);
        let given_back = BlockRequest::WriteZeroes { extent: Extent::new(0, 2 * OBJECT), no_unmap: false, fua: true };
        image.submit(given_back).await.expect("zeroes that give it back");
        assert_eq!(image.usage().await.expect("usage").used, OBJECT);
    });
}

#[test]
fn requests_that_make_no_sense() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        let image = image(&backend, 1 << 40).await;
        for extent in [Extent::new(u64::MAX, 2), Extent::new(1 << 40, 1), Extent::new(0, (1 << 40) + 1)] {
            for request in [
                BlockRequest::Read(extent),
                BlockRequest::Discard(extent),
                BlockRequest::WriteZeroes { extent, no_unmap: true, fua: false },
            ] {
                assert_eq!(kind(image.submit(request).await), Some(ErrorKind::OutOfRange), "{extent:?}");
            }
            assert_eq!(kind(image.map(extent).await), Some(ErrorKind::OutOfRange));
        }
        let longer = BlockRequest::CompareAndWrite { offset: 0, expect: bytes(b"aa"), data: bytes(b"b"), fua: false };
        assert_eq!(kind(image.submit(longer).await), Some(ErrorKind::Invalid));
        let too_long = BlockRequest::Read(Extent::new(0, image.geometry().transfer_max as u64 + 1));
        assert_eq!(kind(image.submit(too_long).await), Some(ErrorKind::Invalid));
        assert_eq!(read(&image, 1 << 40, 0).await, b"", "nothing at the very end is fine");
    });
}

/// Requests over many objects have a bounded number of operations in flight.
#[test]
fn long_requests_are_bounded() {
    run(async {
        let stormy = Stormy::new(1, 4);
        let backend: Rc<dyn ObjectBackend> = stormy.clone();
        let image = image(&backend, 1000 * OBJECT).await;
        stormy.count();
        image.submit(BlockRequest::Discard(Extent::new(0, 1000 * OBJECT))).await.expect("a discard");
        let (submitted, most) = stormy.counted();
        assert_eq!(submitted, 1000);
        assert!((2..=64).contains(&most), "{most} at once");
    });
}

#[test]
fn polling_a_ready_answer_needs_no_reactor_turn() {
    run(async {
        let backend: Rc<dyn ObjectBackend> = RamBackend::new("ram");
        let image = image(&backend, OBJECT).await;
        let mut answer = image.submit(BlockRequest::Write { offset: 0, data: bytes(b"x"), fua: false });
        let polled = answer.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Ready(Ok(BlockReply::Done))));
    });
}
