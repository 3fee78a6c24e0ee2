//! Tests of named ranges of files on both drivers.

use std::future::Future;
use std::io::ErrorKind;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use crate::common::TempDir;
use forebay_reactor::{Buf, BufMut, ByteRange, File, FileRange, OpenOptions};

crate::on_each_driver!(
    a_range_is_bounded_and_shifted,
    a_range_has_a_fixed_size,
    holes_are_those_of_the_range,
    ranges_are_locked_apart_from_each_other,
    the_whole_and_its_ranges_exclude_each_other,
    a_range_beyond_the_end_is_refused,
    operations_beyond_the_limit_wait_and_complete,
    an_operation_that_nobody_polls_delays_no_other,
    operations_dropped_while_they_wait_are_not_submitted,
);

const DIRECT: OpenOptions = OpenOptions::read_write().direct();
const UNIT: usize = 4096;
const LEN: u64 = 16 * UNIT as u64;

/// Returns a range of the file, 16 units long.
fn range(number: u64, requests: usize) -> FileRange {
    let bytes = ByteRange { offset: (1 + number) * LEN, len: LEN };
    FileRange { name: format!("r{number}"), bytes, requests }
}

/// Creates a file with space for three ranges between two units of other data.
async fn file_of_ranges(dir: &TempDir) -> std::path::PathBuf {
    let path = dir.join("f");
    let file = File::open(&path, DIRECT.create()).expect("opens");
    file.write_at(Buf::copy_of(&vec![0xee; 5 * LEN as usize]), 0).await.expect("writes");
    path
}

fn unit(fill: u8) -> Buf {
    Buf::copy_of(&[fill; UNIT])
}

async fn a_range_is_bounded_and_shifted() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    let one = File::open_range(&path, &range(1, 8), DIRECT).expect("opens");
    one.write_at(unit(1), 0).await.expect("writes the first unit");
    one.write_durable_at(unit(2), LEN - UNIT as u64).await.expect("writes the last unit");
    one.sync_data().await.expect("syncs");
    for (len, at) in [(UNIT, LEN), (2 * UNIT, LEN - UNIT as u64), (UNIT, u64::MAX - 4095), (UNIT, u64::MAX / 2)] {
        let error = one.write_at(Buf::copy_of(&vec![3; len]), at).await.expect_err("beyond the end");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{len} at {at}");
        let error = one.punch_hole(at, len as u64).await.expect_err("beyond the end");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{len} at {at}");
        let error = one.allocate(at, len as u64).await.expect_err("beyond the end");
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{len} at {at}");
    }
    let (read, buf) = one.read_at(BufMut::with_capacity(4 * UNIT), LEN - 2 * UNIT as u64).await;
    assert_eq!(read.expect("reads"), 2 * UNIT, "short at the end");
    assert!(buf[..UNIT] == [0xee; UNIT] && buf[UNIT..] == [2; UNIT]);
    for at in [LEN, LEN + 1, u64::MAX] {
        assert_eq!(one.read_at(BufMut::with_capacity(UNIT), at).await.0.expect("reads"), 0, "at {at}");
    }
    one.punch_hole(0, UNIT as u64).await.expect("keeps the space of a file");
    assert!(one.read_exact_at(0, UNIT).await.expect("reads")[..] == [1; UNIT]);
    drop(one);
    let whole = File::open(&path, DIRECT).expect("opens");
    let mut expected = vec![0xee; 5 * LEN as usize];
    expected[2 * LEN as usize..][..UNIT].fill(1);
    expected[3 * LEN as usize - UNIT..][..UNIT].fill(2);
    assert!(whole.read_exact_at(0, expected.len()).await.expect("reads")[..] == expected[..]);
}

async fn a_range_has_a_fixed_size() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    let one = File::open_range(&path, &range(0, 8), DIRECT).expect("opens");
    assert_eq!((one.info().size, one.info().block_device), (LEN, true));
    assert_eq!(one.size().expect("size"), LEN);
    assert_eq!(one.path(), dir.join("f#r0"));
    assert_eq!(one.allocated_size().expect("unknown"), None);
    assert_eq!(one.file_system_space().expect("no limit"), None);
    one.set_size(LEN).expect("it has this size");
    for size in [0, LEN - 4096, LEN + 4096] {
        let error = one.set_size(size).expect_err("fixed");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("f#r0 is a range of 65536 bytes"), "{error}");
    }
    assert_eq!(std::fs::metadata(&path).expect("stat").len(), 5 * LEN);
}

async fn holes_are_those_of_the_range() {
    let dir = TempDir::new();
    let path = dir.join("f");
    let file = File::open(&path, DIRECT.create()).expect("opens");
    file.set_size(5 * LEN).expect("extends");
    // The range is empty but for its second half; data follows behind it.
    file.write_at(Buf::zeroed(LEN as usize), 2 * LEN + LEN / 2).await.expect("writes");
    let one = File::open_range(&path, &range(1, 8), DIRECT).expect("opens");
    let zero = File::open_range(&path, &range(0, 8), DIRECT).expect("opens");
    if one.next_hole(0).expect("looks") == Some(0) {
        assert_eq!(one.next_data(0).expect("looks"), Some(LEN / 2));
        assert_eq!(one.next_hole(LEN / 2).expect("looks"), Some(LEN), "the end of the range");
        assert_eq!(zero.next_data(0).expect("looks"), None, "what follows is not the range's");
    }
    assert_eq!((one.next_data(LEN).expect("looks"), one.next_hole(LEN).expect("looks")), (None, None));
}

fn is_locked(opened: std::io::Result<File>) -> bool {
    match opened {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
            true
        }
    }
}

async fn ranges_are_locked_apart_from_each_other() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    let open = |number| File::open_range(&path, &range(number, 8), DIRECT.lock());
    let one = open(1).expect("free");
    let two = open(2).expect("another range");
    assert!(is_locked(open(1)) && is_locked(open(2)) && !is_locked(open(0)));
    let mut across = range(0, 8);
    across.bytes.len += 4096;
    assert!(is_locked(File::open_range(&path, &across, DIRECT.lock())), "it overlaps");
    assert!(!is_locked(File::open_range(&path, &range(1, 8), DIRECT)), "without a lock");
    let read_only = OpenOptions::read().direct().lock();
    assert!(is_locked(File::open_range(&path, &range(1, 8), read_only)), "a writer has it");
    let clone = one.clone();
    drop(one);
    assert!(is_locked(open(1)), "a clone has it");
    drop(clone);
    assert!(!is_locked(open(1)), "free again");
    let reader = File::open_range(&path, &range(1, 8), read_only).expect("free");
    assert!(!is_locked(File::open_range(&path, &range(1, 8), read_only)), "readers share it");
    assert!(is_locked(open(1)), "a reader has it");
    drop((reader, two));
    let first = open(1).expect("free");
    let waiting = forebay_reactor::spawn({
        let path = path.clone();
        async move { File::open_range_when_free(path, &range(1, 8), DIRECT.lock()).await.map(drop) }
    });
    forebay_reactor::yield_now().await;
    assert!(!waiting.is_finished(), "it is locked");
    drop(first);
    waiting.await.expect("free again");
}

async fn the_whole_and_its_ranges_exclude_each_other() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    let one = File::open_range(&path, &range(1, 8), DIRECT.lock()).expect("free");
    assert!(is_locked(File::open(&path, DIRECT.lock())), "a range is open");
    drop(one);
    let whole = File::open(&path, DIRECT.lock()).expect("free");
    assert!(is_locked(File::open_range(&path, &range(1, 8), DIRECT.lock())), "the whole is open");
    drop(whole);
    assert!(!is_locked(File::open_range(&path, &range(1, 8), DIRECT.lock())));
}

async fn a_range_beyond_the_end_is_refused() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    for (offset, len) in [(4 * LEN, LEN + 1), (5 * LEN, 4096), (1 << 62, 1 << 62)] {
        let range = FileRange { name: "far".into(), bytes: ByteRange { offset, len }, requests: 1 };
        let error = File::open_range(&path, &range, DIRECT).err().expect("beyond the end");
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof, "{error}");
    }
}

/// Polls a future once.
fn start<F: Future>(future: Pin<&mut F>) {
    let polled = future.poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_pending(), "completed at once");
}

async fn operations_beyond_the_limit_wait_and_complete() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    for requests in [1, 3] {
        let file = File::open_range(&path, &range(1, requests), DIRECT).expect("opens");
        let writes = (0..16).map(|i| {
            let file = file.clone();
            forebay_reactor::spawn(async move { file.write_at(unit(i as u8), i * UNIT as u64).await })
        });
        for write in writes.collect::<Vec<_>>() {
            write.await.expect("writes");
        }
        for i in 0..16 {
            assert!(file.read_exact_at(i * UNIT as u64, UNIT).await.expect("reads")[..] == [i as u8; UNIT]);
        }
    }
}

async fn an_operation_that_nobody_polls_delays_no_other() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    let file = File::open_range(&path, &range(1, 1), DIRECT).expect("opens");
    let mut first = pin!(file.write_at(unit(1), 0));
    let mut second = pin!(file.write_at(unit(2), UNIT as u64));
    start(first.as_mut());
    start(second.as_mut());
    file.write_at(unit(3), 2 * UNIT as u64).await.expect("writes although nothing polls the others");
    let both = file.read_exact_at(0, 2 * UNIT).await.expect("reads");
    assert!(both[..UNIT] == [1; UNIT] && both[UNIT..] == [2; UNIT], "they were before it");
    first.await.expect("written");
    second.await.expect("written");
}

async fn operations_dropped_while_they_wait_are_not_submitted() {
    let dir = TempDir::new();
    let path = file_of_ranges(&dir).await;
    let file = File::open_range(&path, &range(1, 1), DIRECT).expect("opens");
    let mut first = Box::pin(file.write_at(unit(1), 0));
    start(first.as_mut());
    let mut second = Box::pin(file.write_at(unit(2), UNIT as u64));
    start(second.as_mut());
    drop(second);
    let mut third = Box::pin(file.write_at(unit(3), 2 * UNIT as u64));
    start(third.as_mut());
    // What was submitted stays in flight until the kernel has completed it.
    drop(first);
    third.await.expect("writes");
    assert!(file.read_exact_at(UNIT as u64, UNIT).await.expect("reads")[..] == [0xee; UNIT], "it was dropped");
    let polled = std::future::poll_fn(|cx| Poll::Ready(pin!(file.sync_data()).poll(cx).is_pending())).await;
    assert!(polled);
    file.sync_data().await.expect("syncs");
}
