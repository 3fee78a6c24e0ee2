//! Writes of parts and of the table, off the read path.

use std::rc::Rc;

use forebay_block::Buf;
use forebay_reactor::sync::join_all;

use crate::disk::Disk;
use crate::format::{CacheGeometry, RowKind, part_crc};
use crate::part::PartKey;
use crate::table::TableRow;

/// Parts, or blocks of the table, written at a time.
const BATCH: usize = 16;

/// Part that is being written into the slot of a row.
struct SlotWrite {
    key: PartKey,
    row: u32,
    crc: u32,
    data: Buf,
}

/// Writes what is queued until the disk is turned off or closed.
pub(crate) async fn write_queued(disk: Rc<Disk>, now_ms: impl Fn() -> u32) {
    loop {
        let has_work = || !disk.queue.borrow().is_empty() || disk.table.borrow().is_dirty();
        disk.changed.wait_until(|| has_work() || disk.closing.get() || !disk.is_on()).await;
        if !disk.is_on() || !has_work() {
            return;
        }
        let _turn = disk.turn.acquire(1).await;
        write_parts(&disk, now_ms()).await;
        write_table(&disk).await;
    }
}

/// Writes a batch of parts into free slots. A row gets its key after its slot is written: in memory at once, on disk
/// with the next write of its block. In between the stored row is free, or names a part that the slot has no more, which
/// its checksum shows.
async fn write_parts(disk: &Rc<Disk>, now_ms: u32) {
    let mut writes = Vec::new();
    while writes.len() < BATCH {
        let Some(key) = disk.queue.borrow_mut().pop_front() else { break };
        let Some(data) = disk.pending.borrow().get(&key).cloned() else { continue };
        let (row, crc) = (take_row(disk), part_crc(&key.source.0, key.object, key.part, &data));
        match (row, crc) {
            (Some(row), Some(crc)) => writes.push(SlotWrite { key, row, crc, data }),
            _ => {
                disk.pending.borrow_mut().remove(&key);
                disk.counters.dropped.add(1);
            }
        }
    }
    let each = |write: &SlotWrite| {
        let (file, at, data) = (disk.file.clone(), disk.geometry.slot_at(write.row), write.data.clone());
        Box::pin(async move { file.write_at(data, at).await })
    };
    let results = join_all(writes.iter().map(each)).await;
    for (SlotWrite { key, row, crc, data }, result) in writes.into_iter().zip(results) {
        // Turned off meanwhile: there is no index any more.
        if !disk.is_on() {
            return;
        }
        let is_wanted = disk.take_pending(&key, &data);
        match result {
            Ok(()) if !is_wanted => {
                disk.table.borrow_mut().release(row);
                disk.succeeded();
            }
            Ok(()) => {
                let content = TableRow { key: key.clone(), kind: RowKind::Data, crc, verified: true };
                disk.table.borrow_mut().set(row, content);
                let evicted = disk.index.borrow_mut().insert(key, row, now_ms);
                debug_assert!(evicted.is_none(), "there was a free row");
                disk.counters.written.add(1);
                disk.succeeded();
            }
            Err(error) => {
                disk.table.borrow_mut().release(row);
                disk.counters.errors.add(1);
                disk.note_error(&format!("cannot write the slot of row {row}: {error}"));
            }
        }
    }
}

/// Takes a free row, evicting others until there is one.
fn take_row(disk: &Disk) -> Option<u32> {
    loop {
        if let Some(row) = disk.table.borrow_mut().take_data() {
            return Some(row);
        }
        let (_, row) = disk.index.borrow_mut().evict()?;
        disk.counters.evicted.add(1);
        disk.table.borrow_mut().release(row);
    }
}

/// Writes a batch of changed blocks of the table.
async fn write_table(disk: &Rc<Disk>) {
    let blocks = disk.table.borrow_mut().take_dirty(BATCH, &disk.incarnation.get());
    let each = |(block, bytes): &(u32, Vec<u8>)| {
        let (file, at, bytes) = (disk.file.clone(), CacheGeometry::block_at(*block), Buf::copy_of(bytes));
        Box::pin(async move { file.write_at(bytes, at).await })
    };
    let results = join_all(blocks.iter().map(each)).await;
    for ((block, _), result) in blocks.iter().zip(results) {
        match result {
            Ok(()) => disk.succeeded(),
            Err(error) => {
                disk.counters.errors.add(1);
                disk.note_error(&format!("cannot write block {block} of the table: {error}"));
            }
        }
    }
}
