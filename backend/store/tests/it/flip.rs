//! Damage of single bytes of the store's disk.

use forebay_block::Buf;
use forebay_reactor::{File, OpenOptions};

use crate::common::DISK;

/// Flips a bit of one byte.
pub async fn flip(at: u64) {
    let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
    let start = at / 4096 * 4096;
    let mut block = disk.read_exact_at(start, 4096).await.expect("read").to_vec();
    block[(at - start) as usize] ^= 4;
    disk.write_at(Buf::copy_of(&block), start).await.expect("write");
    disk.sync_data().await.expect("sync");
}
