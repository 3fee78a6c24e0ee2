//! Tests of the store on real files.

use std::path::PathBuf;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::*;
use forebay_reactor::{DriverChoice, Reactor, sleep, spawn};
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};

struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("forebay-store-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a directory for the test");
        Self(path)
    }

    fn image(&self) -> PathBuf {
        self.0.join("store.img")
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn run<F: Future<Output = ()>>(test: F) {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(test);
}

async fn small(dir: &Dir, size: u64) -> Rc<Store> {
    Store::init(dir.image(), InitOptions { size, segment_size: 64 << 10, ..InitOptions::default() })
        .await
        .expect("init");
    open(dir).await
}

async fn open(dir: &Dir) -> Rc<Store> {
    Store::open(dir.image(), StoreOptions::default()).await.expect("open")
}

fn write(offset: u64, data: Vec<u8>) -> Transaction {
    Transaction::of(ObjectOp::Write { offset, data: Buf::copy_of(&data).into() })
}

async fn read(store: &Store, name: &ObjectName, offset: u64, len: u64) -> Vec<u8> {
    let read = ObjectRead::head(offset, len);
    store.read(name, read).await.expect("read").fill(read.extent).to_vec()
}

async fn clean(dir: &Dir) {
    let report = Store::check(dir.image(), CheckOptions { data: true, ..CheckOptions::default() }, |_, _| {})
        .await
        .expect("check");
    assert!(report.is_clean(), "{report:?}");
}

#[test]
fn what_is_written_is_read_also_after_reopening() {
    run(async {
        let dir = Dir::new("basic");
        let store = small(&dir, 16 << 20).await;
        let name = ObjectName::new("a");
        store.submit(&name, write(4096, vec![7; 8192])).await.expect("write");
        assert_eq!(read(&store, &name, 0, 16384).await, [vec![0; 4096], vec![7; 8192], vec![0; 4096]].concat());
        store.submit(&name, write(5000, vec![9; 10])).await.expect("write");
        store.close().await.expect("close");
        drop(store);
        clean(&dir).await;
        let store = open(&dir).await;
        let mut expected = vec![7; 8192];
        expected[904..914].fill(9);
        assert_eq!(read(&store, &name, 4096, 8192).await, expected);
        let busy = Store::open(dir.image(), StoreOptions::default()).await.err().expect("it is open already");
        assert_eq!(busy.kind(), ErrorKind::Busy);
    });
}

#[test]
fn an_opener_waits_for_one_who_is_just_leaving() {
    run(async {
        let dir = Dir::new("leaving");
        let store = small(&dir, 16 << 20).await;
        let name = ObjectName::new("a");
        store.submit(&name, write(0, vec![7; 4096])).await.expect("write");
        let leaving = spawn(async move {
            // Long enough for the other task to find the lock held; the assertions do not depend on the exact time.
            sleep(Duration::from_millis(100)).await;
            store.close().await.expect("close");
        });
        let store = open(&dir).await;
        assert_eq!(read(&store, &name, 0, 4096).await, [7; 4096]);
        leaving.await;
    });
}

#[test]
fn overwriting_for_long_keeps_working() {
    run(async {
        let dir = Dir::new("churn");
        let store = small(&dir, 16 << 20).await;
        let capacity = store.stats().capacity;
        let objects = 8;
        let blocks = capacity * 8 / 10 / objects / 4096;
        let mut model = vec![0u32; (objects * blocks) as usize];
        let mut seed = 1u64;
        for round in 1..40_000u32 {
            seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let at = (seed >> 33) % (objects * blocks);
            let name = ObjectName::new(format!("o{}", at / blocks));
            let data = round.to_le_bytes().repeat(1024);
            store.submit(&name, write(at % blocks * 4096, data)).await.expect("write");
            model[at as usize] = round;
            if round % 128 == 0 {
                store.flush().await.expect("flush");
            }
        }
        let stats = store.stats();
        eprintln!("{stats:?} wa {}", stats.device_bytes as f64 / stats.user_bytes as f64);
        store.close().await.expect("close");
        drop(store);
        clean(&dir).await;
        let store = open(&dir).await;
        for (at, &round) in model.iter().enumerate() {
            let at = at as u64;
            let name = ObjectName::new(format!("o{}", at / blocks));
            if round != 0 {
                assert_eq!(read(&store, &name, at % blocks * 4096, 4096).await, round.to_le_bytes().repeat(1024));
            }
        }
    });
}

#[test]
fn a_full_store_says_so_and_recovers() {
    run(async {
        let dir = Dir::new("full");
        let store = small(&dir, 8 << 20).await;
        let mut written = 0;
        let error = loop {
            let name = ObjectName::new(format!("o{}", written / 16));
            match store.submit(&name, write(written % 16 * 65536, vec![written as u8 | 1; 65536])).await {
                Ok(_) => written += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), ErrorKind::NoSpace);
        assert!(written * 65536 * 100 >= store.stats().capacity * 90, "full at {written} of {:?}", store.stats());
        // Cleaning rounds that gain only what the next one loses must terminate.
        let rounds = store.stats().checkpoints;
        assert!(rounds < written + 200, "{rounds} checkpoints for {written} writes");
        store.flush().await.expect("flush");
        assert_eq!(read(&store, &ObjectName::new("o0"), 65536, 3).await, [1; 3]);
        store.submit(&ObjectName::new("o0"), Transaction::of(ObjectOp::Remove)).await.expect("remove");
        for _ in 0..100 {
            store.submit(&ObjectName::new("new"), write(0, vec![1; 65536])).await.expect("write after remove");
        }
        store.close().await.expect("close");
        drop(store);
        clean(&dir).await;
    });
}

#[test]
fn a_store_is_not_made_through_a_dangling_link() {
    run(async {
        let dir = Dir::new("dangling");
        let target = dir.0.join("target");
        std::os::unix::fs::symlink(&target, dir.image()).expect("a link");
        // Neither for a valid request, nor for one that fails and would remove the link by name.
        for size in [16 << 20, 4096] {
            let options = InitOptions { size, segment_size: 64 << 10, ..InitOptions::default() };
            let error = Store::init(dir.image(), options).await.expect_err("a link");
            assert!(error.to_string().contains("a link to a file that is not there"), "{error}");
            assert!(dir.image().is_symlink() && !target.exists(), "size {size}");
        }
    });
}
