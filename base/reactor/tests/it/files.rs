//! Tests of files on both drivers.

use std::os::unix::fs::MetadataExt;

use crate::common::TempDir;
use forebay_reactor::{Buf, BufList, BufMut, File, OpenOptions, fs};

crate::on_each_driver!(
    reads_what_was_written,
    permissions_do_not_follow_symbolic_links,
    short_only_at_the_end,
    direct_reads_end_at_an_odd_length,
    thousands_of_parts,
    many_at_once,
    punched_ranges_read_as_zeroes,
    allocated_ranges_are_counted_and_hold_nothing,
    a_lock_keeps_others_out,
    a_lock_that_comes_free_is_waited_for,
    opening_says_what_is_wrong,
    a_read_dropped_halfway_leaves_memory_alone,
    a_file_closed_under_its_operations,
    more_pools_than_a_ring_registers,
);

const DIRECT: OpenOptions = OpenOptions::read_write().create().direct();

fn pattern(len: usize, seed: u8) -> Buf {
    let mut buf = BufMut::zeroed(len);
    buf.iter_mut().enumerate().for_each(|(at, byte)| *byte = (at / 512) as u8 ^ (at as u8).wrapping_mul(31) ^ seed);
    buf.freeze()
}

async fn reads_what_was_written() {
    let dir = TempDir::new();
    for options in [OpenOptions::read_write().create(), DIRECT] {
        let file = File::open(dir.join("f"), options).expect("opens");
        let data = pattern(64 * 1024, 1);
        file.write_at(data.clone(), 8192).await.expect("writes");
        file.write_durable_at(data.slice(0..4096), 0).await.expect("writes durably");
        file.sync_data().await.expect("syncs");
        let back = file.read_exact_at(8192, data.len()).await.expect("reads");
        assert!(back[..] == data[..]);
        assert!(file.read_exact_at(0, 4096).await.expect("reads")[..] == data[..4096]);
        assert_eq!(file.size().expect("size"), 8192 + 64 * 1024);
        file.set_size(4096).expect("truncates");
        assert_eq!(file.size().expect("size"), 4096);
        file.set_size(0).expect("truncates");
    }
    fs::sync_dir(dir.join("")).expect("syncs the directory");
    fs::remove_file(dir.join("f")).expect("removes");
    assert!(!dir.join("f").exists());
}

async fn short_only_at_the_end() {
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), OpenOptions::read_write().create()).expect("opens");
    file.write_at(pattern(5000, 2), 0).await.expect("writes");
    let (result, buf) = file.read_at(BufMut::with_capacity(8192), 1000).await;
    assert_eq!(result.expect("reads"), 4000);
    assert!(buf[..] == pattern(5000, 2)[1000..]);
    let (result, buf) = file.read_at(buf, 9000).await;
    assert_eq!((result.expect("reads"), buf.len()), (0, 4000));
    let error = file.read_exact_at(4999, 2).await.expect_err("too short");
    assert_eq!(error.kind(), std::io::ErrorKind::UnexpectedEof);
    let (result, _) = file.read_at(BufMut::with_capacity(0), 0).await;
    assert_eq!(result.expect("reads"), 0);
    file.write_at(BufList::new(), 0).await.expect("writes nothing");
}

async fn direct_reads_end_at_an_odd_length() {
    let dir = TempDir::new();
    std::fs::write(dir.join("f"), &pattern(10_001, 3)[..]).expect("writes");
    let file = File::open(dir.join("f"), DIRECT).expect("opens");
    let info = file.info();
    assert_eq!((info.size, info.block_device), (10_001, false));
    assert!(info.sector.is_power_of_two() && info.sector <= 4096, "a sector of {} bytes", info.sector);
    let (result, buf) = file.read_at(BufMut::with_capacity(65_536), 4096).await;
    assert_eq!(result.expect("reads"), 10_001 - 4096);
    assert!(buf[..] == pattern(10_001, 3)[4096..]);
}

async fn thousands_of_parts() {
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), OpenOptions::read_write().create()).expect("opens");
    let data = pattern(3 * 5000, 4);
    // Copies, because adjacent buffers of one allocation would be merged.
    let list: BufList = (0..5000).map(|at| Buf::copy_of(&data[3 * at..3 * at + 3])).collect();
    assert_eq!(list.parts().len(), 5000);
    file.write_at(list, 7).await.expect("writes");
    assert!(file.read_exact_at(7, data.len()).await.expect("reads")[..] == data[..]);
}

/// More operations than the submission queue and the completion queue can contain.
async fn many_at_once() {
    const COUNT: usize = 6000;
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), OpenOptions::read_write().create()).expect("opens");
    let writes: Vec<_> = (0..COUNT)
        .map(|at| {
            let file = file.clone();
            forebay_reactor::spawn(async move { file.write_at(pattern(512, at as u8), 512 * at as u64).await })
        })
        .collect();
    for write in writes {
        write.await.expect("writes");
    }
    let reads: Vec<_> = (0..COUNT)
        .map(|at| {
            let file = file.clone();
            forebay_reactor::spawn(async move { file.read_exact_at(512 * at as u64, 512).await })
        })
        .collect();
    for (at, read) in reads.into_iter().enumerate() {
        assert!(read.await.expect("reads")[..] == pattern(512, at as u8)[..]);
    }
}

async fn allocated_ranges_are_counted_and_hold_nothing() {
    let dir = TempDir::new();
    let path = dir.join("sparse");
    let file = File::open(&path, OpenOptions::read_write().create()).expect("opens");
    file.set_size(8 << 20).expect("longer");
    let before = file.allocated_size().expect("known").expect("a file");
    assert!(before < 1 << 20, "{before}");
    assert_eq!(file.next_data(0).expect("known"), None);
    file.allocate(1 << 20, 2 << 20).await.expect("space");
    file.allocate(0, 0).await.expect("nothing to allocate");
    let after = file.allocated_size().expect("known").expect("a file");
    assert!(after >= 2 << 20, "{after}");
    assert_eq!(file.size().expect("known"), 8 << 20);
    file.write_at(Buf::copy_of(&[7; 4096]), 5 << 20).await.expect("written");
    let data = file.next_data(4 << 20).expect("known");
    assert_eq!(data, Some(5 << 20));
    assert_eq!(file.next_data(6 << 20).expect("known"), None);
    assert_eq!(file.next_hole(5 << 20).expect("known"), Some((5 << 20) + 4096));
    assert_eq!(file.next_hole(6 << 20).expect("known"), Some(6 << 20));
    assert_eq!(file.next_hole(9 << 20).expect("known"), None);
    let space = fs::file_system_space(dir.join("sparse")).expect("known").expect("a limit");
    assert!(0 < space.available && space.available <= space.total, "{space:?}");
}

async fn punched_ranges_read_as_zeroes() {
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), DIRECT).expect("opens");
    let data = pattern(1 << 20, 5);
    file.write_at(data.clone(), 0).await.expect("writes");
    file.sync_data().await.expect("syncs");
    let before = std::fs::metadata(dir.join("f")).expect("stat").blocks();
    file.punch_hole(4096, 512 * 1024).await.expect("punches");
    file.punch_hole(0, 0).await.expect("nothing to punch");
    let back = file.read_exact_at(0, data.len()).await.expect("reads");
    assert!(back[..4096] == data[..4096]);
    assert!(back[4096..4096 + 512 * 1024].iter().all(|&byte| byte == 0));
    assert!(back[4096 + 512 * 1024..] == data[4096 + 512 * 1024..]);
    assert_eq!(file.size().expect("size"), 1 << 20);
    assert!(std::fs::metadata(dir.join("f")).expect("stat").blocks() < before);
}

async fn a_lock_keeps_others_out() {
    let dir = TempDir::new();
    let first = File::open(dir.join("f"), DIRECT.lock()).expect("opens");
    let error = File::open(dir.join("f"), DIRECT.lock()).err().expect("locked");
    assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
    File::open(dir.join("f"), OpenOptions::read()).expect("opens without a lock");
    drop(first);
    File::open(dir.join("f"), DIRECT.lock()).expect("free again");
}

async fn a_lock_that_comes_free_is_waited_for() {
    let dir = TempDir::new();
    let first = File::open(dir.join("f"), DIRECT.lock()).expect("opens");
    let waiting = forebay_reactor::spawn({
        let path = dir.join("f");
        async move { File::open_when_free(path, DIRECT.lock()).await.map(drop) }
    });
    forebay_reactor::yield_now().await;
    assert!(!waiting.is_finished(), "it is locked");
    drop(first);
    waiting.await.expect("free again");
    let missing = File::open_when_free(dir.join("none"), OpenOptions::read()).await.err().expect("not there");
    assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
}

async fn opening_says_what_is_wrong() {
    use std::io::ErrorKind;
    let dir = TempDir::new();
    let open = |name: &str, options| File::open(dir.join(name), options).map(drop).map_err(|error| error.kind());
    assert_eq!(open("none", OpenOptions::read()), Err(ErrorKind::NotFound));
    assert_eq!(open("new", DIRECT.create_new()), Ok(()));
    assert_eq!(open("new", DIRECT.create_new()), Err(ErrorKind::AlreadyExists));
    assert_eq!(open("", OpenOptions::read()), Err(ErrorKind::InvalidInput));
    let reader = File::open(dir.join("new"), OpenOptions::read()).expect("opens");
    assert!(reader.write_at(pattern(512, 0), 0).await.is_err());
}

/// Checks that buffers of dropped reads return to their pool only when the kernel has finished, so that one taken from
/// the pool in between keeps the data written to it.
async fn a_read_dropped_halfway_leaves_memory_alone() {
    const LEN: usize = 256 * 1024;
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), DIRECT).expect("opens");
    file.write_at(pattern(LEN, 6), 0).await.expect("writes");
    let pool = forebay_reactor::BufPool::new(LEN, 16);
    for round in 0..50u8 {
        let mut read = Box::pin(file.read_at(pool.get(), 0));
        std::future::poll_fn(|cx| {
            let _ = read.as_mut().poll(cx);
            std::task::Poll::Ready(())
        })
        .await;
        forebay_reactor::yield_now().await;
        drop(read);
        let mut other = pool.get();
        other.set_len(LEN);
        other.fill(round);
        forebay_reactor::yield_now().await;
        file.sync_data().await.expect("syncs");
        assert!(other.iter().all(|&byte| byte == round), "the kernel wrote into a buffer that is not its own");
    }
    while pool.outstanding() > 0 {
        forebay_reactor::yield_now().await;
    }
}

async fn a_file_closed_under_its_operations() {
    let dir = TempDir::new();
    for round in 0..20u8 {
        let file = File::open(dir.join("f"), DIRECT).expect("opens");
        let task = forebay_reactor::spawn(async move { file.write_at(pattern(1 << 20, round), 0).await });
        forebay_reactor::yield_now().await;
        drop(task.cancel().await);
        // May get the same file descriptor; the write must not reach this file.
        let other = File::open(dir.join("other"), DIRECT).expect("opens");
        let reader = File::open(dir.join("f"), DIRECT.lock()).expect("opens");
        reader.sync_data().await.expect("syncs");
        assert_eq!(other.size().expect("size"), 0);
    }
}

/// Checks that all memory of pools, registered or not, can be written from and read into, while pools come and go.
async fn more_pools_than_a_ring_registers() {
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), DIRECT).expect("opens");
    let mut stay = Vec::new();
    for round in 0..600u32 {
        let pool = forebay_reactor::BufPool::new(4096, 2);
        let mut buf = pool.get();
        buf.extend_from_slice(&[round as u8; 4096]);
        let at = u64::from(round % 7) * 4096;
        file.write_at(buf, at).await.expect("writes");
        let (result, back) = file.read_at(pool.get(), at).await;
        assert_eq!(result.expect("reads"), 4096);
        assert!(back.iter().all(|&byte| byte == round as u8));
        if round % 2 == 0 {
            stay.push((pool, back));
        }
    }
    for (round, (_, buf)) in stay.iter().enumerate() {
        assert!(buf.iter().all(|&byte| byte == (2 * round) as u8), "somebody else's read landed here");
    }
}

async fn permissions_do_not_follow_symbolic_links() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let dir = TempDir::new();
    let (file, link) = (dir.join("file"), dir.join("link"));
    std::fs::write(&file, "").expect("written");
    symlink(&file, &link).expect("linked");
    let mode = || std::fs::metadata(&file).expect("a file").permissions().mode() & 0o777;
    fs::set_mode(&file, 0o640).expect("set");
    assert_eq!(mode(), 0o640);
    fs::set_mode(&link, 0o666).expect_err("it is a link");
    assert_eq!(mode(), 0o640);
    let before = std::fs::metadata(&file).expect("a file").uid();
    // Another user takes root; without it nothing changes.
    let _ = fs::set_owner(&link, Some(before + 1), None);
    assert_eq!(std::fs::metadata(&file).expect("a file").uid(), before);
}
