//! Stores the files of a folder with each compression setting, and prints a table of what they take.
//!
//! ```text
//! compression STORE FOLDER [WRITE_KIB]
//! ```
//!
//! `STORE` is a file that is overwritten. Each file becomes objects of 4 MiB, written 128 KiB at a time unless told
//! otherwise; the last block of a file is left out.

use std::path::Path;
use std::time::Instant;

use forebay_block::{
    Buf, DataPolicy, ObjectBackend, ObjectName, ObjectOp, ObjectRead, SnapId, StoredBytes, Transaction,
};
use forebay_reactor::{DriverChoice, Reactor};
use forebay_store::{InitOptions, Store, StoreOptions};

const OBJECT: usize = 4 << 20;
const BLOCK: usize = 4096;
const SETTINGS: [&str; 6] = ["none", "lz4", "zstd:1", "zstd:3", "deflate:1", "deflate:6"];

/// Reads the files of a folder.
fn files(folder: &Path) -> Vec<Vec<u8>> {
    let entries = std::fs::read_dir(folder).expect("a folder").flatten();
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    paths.sort();
    paths.iter().map(|path| std::fs::read(path).expect("a file")).collect()
}

async fn measure(path: &Path, setting: &str, data: &[Vec<u8>], write: usize) {
    let options = InitOptions { size: 4 << 30, force: true, ..InitOptions::default() };
    Store::init(path, options).await.expect("init");
    let store = Store::open(path, StoreOptions { data_cache: 0, ..StoreOptions::default() }).await.expect("open");
    let policy = DataPolicy { compression: setting.parse().expect("a setting") };
    store.set_data_policy(&ObjectName::new(""), Some(policy)).await.expect("a policy");
    let objects = data.iter().flat_map(|file| file.chunks(OBJECT));
    let objects: Vec<_> = objects.map(|part| &part[..part.len() / BLOCK * BLOCK]).enumerate().collect();
    let name = |number: usize| ObjectName::new(format!("rbd_data.corpus.{number:016x}"));
    let bytes: usize = objects.iter().map(|(_, part)| part.len()).sum();
    let began = Instant::now();
    for &(number, part) in &objects {
        for (i, piece) in part.chunks(write).enumerate() {
            let op = ObjectOp::Write { offset: (i * write) as u64, data: Buf::copy_of(piece).into() };
            store.submit(&name(number), Transaction::of(op)).await.expect("write");
        }
    }
    store.flush().await.expect("flush");
    let wrote = began.elapsed().as_secs_f64();
    let began = Instant::now();
    let mut sum = StoredBytes::default();
    for &(number, part) in &objects {
        let found = store.read(&name(number), ObjectRead::head(0, part.len() as u64)).await.expect("read");
        assert!(found.fill(forebay_block::Extent::new(0, part.len() as u64)) == *part, "object {number}");
        let sizes = store.stored_bytes(&name(number), SnapId::HEAD).await.expect("sizes").expect("known");
        sum = StoredBytes { logical: sum.logical + sizes.logical, stored: sum.stored + sizes.stored };
    }
    let read = began.elapsed().as_secs_f64();
    let rate = |seconds: f64| bytes as f64 / 1e6 / seconds;
    println!(
        "| {setting} | {bytes} | {} | {} | {:.2} | {:.0} | {:.0} |",
        sum.logical,
        sum.stored,
        bytes as f64 / sum.stored as f64,
        rate(wrote),
        rate(read)
    );
    store.close().await.expect("close");
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let [path, folder, rest @ ..] = &args[..] else { panic!("compression STORE FOLDER [WRITE_KIB]") };
    let write = rest.first().map_or(128, |kib| kib.parse().expect("a number")) << 10;
    let data = files(Path::new(folder));
    println!(
        "| compression | bytes | logical | stored | ratio | MB/s written | MB/s read |\n|---|---|---|---|---|---|---|"
    );
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(async {
        for setting in SETTINGS {
            measure(Path::new(path), setting, &data, write).await;
        }
    });
}
