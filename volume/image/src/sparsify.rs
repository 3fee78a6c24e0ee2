//! Deallocation of zeroes that an image stores.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent, LocalFuture, ObjectOp, ObjectRead, Result, SnapId, SparseData};

use crate::format::ImageFeatures;
use crate::image::Image;
use crate::info::ObjectProgress;
use crate::open_image::OpenImage;
use crate::owner::OwnerOperation;
use crate::requests::{WriteFlags, change_managed};
use crate::window::{WALK_WINDOW, after_others, windowed};

/// Smallest block that is deallocated, in bytes.
pub const SPARSE_SIZE_MIN: u64 = 4096;
/// Bytes of objects read at once.
const READ_AT_ONCE: u64 = 32 << 20;

impl Image {
    /// Deallocates the aligned blocks of `sparse_size` bytes that are stored although all their bytes are zero, and removes
    /// objects that have no others. What the image reads as does not change; writes go on meanwhile. Durable when this returns.
    ///
    /// Snapshots keep what they share with the image: the space is freed once none has it any more.
    ///
    /// # Errors
    /// `Invalid` unless `sparse_size` is a power of two from [`SPARSE_SIZE_MIN`] to the size of an object; `ReadOnly`; `Busy`
    /// if another client keeps the lock; `Unsupported` for an image of a shared pool without an exclusive lock; errors of the backend: it can be called again then.
    pub async fn sparsify(&self, sparse_size: u64, mut progress: impl FnMut(ObjectProgress)) -> Result<()> {
        let shared = self.shared();
        let sparsified = async {
            let object_size = shared.layout().object_size();
            if !sparse_size.is_power_of_two() || !(SPARSE_SIZE_MIN..=object_size).contains(&sparse_size) {
                let what =
                    format!("blocks of {sparse_size} bytes: a power of two from 4096 to {object_size} is needed");
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            if shared.is_shared() && !shared.header().features.has(ImageFeatures::EXCLUSIVE_LOCK) {
                // A write of another client between the read and the change would be lost.
                return Err(Error::new(ErrorKind::Unsupported, "it has no exclusive lock"));
            }
            if self.ask_owner(OwnerOperation::Sparsify { sparse_size }, &mut progress).await? {
                return Ok(());
            }
            drop(self.begin_change().await?);
            let total = shared.layout().objects(shared.size());
            let mut objects = 0..total;
            let mut done = 0;
            progress(ObjectProgress { done, total });
            let next = || {
                let object = objects.next()?;
                let work: LocalFuture<Result<()>> = Box::pin(sparsify_one(shared.clone(), object, sparse_size));
                Some(after_others(work))
            };
            let window = (READ_AT_ONCE / object_size).clamp(1, WALK_WINDOW as u64) as usize;
            windowed(window, next, |_, ()| {
                done += 1;
                progress(ObjectProgress { done, total });
            })
            .await?;
            shared.data().flush().await
        };
        let sparsified: Result<()> = sparsified.await;
        sparsified.map_err(|error| error.within(format_args!("sparsifying image {}", shared.name())))
    }
}

async fn sparsify_one(shared: Rc<OpenImage>, object: u64, sparse_size: u64) -> Result<()> {
    let size = shared.layout().object_size();
    // Writes to the object wait: one between the read and the change would be lost.
    let _hold = shared.enter_alone(shared.layout().span_of(&(object..object + 1))).await?;
    shared.check_there()?;
    if shared.map().is_some_and(|map| !map.may_exist(object)) {
        return Ok(());
    }
    let read = ObjectRead::new(SnapId::HEAD, Extent::new(0, size));
    let stored = match shared.data().read(&shared.object_name(object), read).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        stored => stored?,
    };
    // An empty object hides the parent's data.
    if stored.runs.is_empty() && shared.overlap_in(shared.head(), object) > 0 {
        return Ok(());
    }
    let ops = clearing(stored, sparse_size);
    if ops.is_empty() {
        return Ok(());
    }
    change_managed(shared, object, ops, WriteFlags::default()).await.map(drop)
}

/// Returns the operations that deallocate the zeroes of an object; none if it stores no whole block of them. `Remove` if it
/// stores nothing else.
fn clearing(stored: SparseData, sparse_size: u64) -> Vec<ObjectOp> {
    // Blocks that are stored, and whether all bytes are zero so far; in order.
    let mut blocks: Vec<(u64, bool)> = Vec::new();
    for (offset, data) in stored.runs {
        let data = data.into_contiguous();
        let mut rest = &data[..];
        let mut at = offset;
        while !rest.is_empty() {
            let block = at / sparse_size;
            let (part, more) = rest.split_at(rest.len().min(((block + 1) * sparse_size - at) as usize));
            let is_zero = part.iter().all(|byte| *byte == 0);
            match blocks.last_mut().filter(|(last, _)| *last == block) {
                Some((_, zero)) => *zero &= is_zero,
                None => blocks.push((block, is_zero)),
            }
            at += part.len() as u64;
            rest = more;
        }
    }
    let Some(last_data) = blocks.iter().rposition(|(_, is_zero)| !is_zero) else {
        return vec![ObjectOp::Remove];
    };
    let mut ops: Vec<ObjectOp> = Vec::new();
    for &(block, _) in blocks[..last_data].iter().filter(|(_, is_zero)| *is_zero) {
        match ops.last_mut() {
            Some(ObjectOp::Zero { extent }) if extent.end() == block * sparse_size => extent.len += sparse_size,
            _ => ops.push(ObjectOp::Zero { extent: Extent::new(block * sparse_size, sparse_size) }),
        }
    }
    if last_data + 1 < blocks.len() {
        ops.push(ObjectOp::Truncate { size: (blocks[last_data].0 + 1) * sparse_size });
    }
    ops
}

#[cfg(test)]
mod tests {
    use forebay_block::{Buf, BufList};

    use super::*;

    /// Returns the operations for an object in which each letter is 1 KiB: `.` a hole, `0` zeroes, another data.
    fn cleared(object: &str) -> Vec<ObjectOp> {
        let mut runs: Vec<(u64, BufList)> = Vec::new();
        for (i, letter) in object.chars().enumerate().filter(|(_, letter)| *letter != '.') {
            // One byte of data is enough, the last one.
            let mut bytes = vec![0; 1024];
            bytes[1023] = if letter == '0' { 0 } else { letter as u8 };
            let (offset, data) = (i as u64 * 1024, BufList::from(Buf::copy_of(&bytes)));
            match runs.last_mut().filter(|(at, run)| at + run.len() as u64 == offset) {
                Some((_, run)) => run.append(data),
                None => runs.push((offset, data)),
            }
        }
        clearing(SparseData { runs }, 4096)
    }

    /// Returns operations by the numbers of their blocks.
    fn ops(object: &str) -> Vec<String> {
        let block = |offset: u64| offset / 4096;
        let named = cleared(object).into_iter().map(|op| match op {
            ObjectOp::Remove => "remove".to_owned(),
            ObjectOp::Truncate { size } => format!("cut {}", block(size)),
            ObjectOp::Zero { extent } => format!("zero {}+{}", block(extent.offset), block(extent.len)),
            other => panic!("{other:?}"),
        });
        named.collect()
    }

    #[test]
    fn whole_blocks_of_zeroes_are_deallocated() {
        assert_eq!(ops("aaaa"), [""; 0]);
        assert_eq!(ops("000a000a"), [""; 0]);
        assert_eq!(ops("0000a..."), ["zero 0+1"]);
        assert_eq!(ops("0000"), ["remove"]);
        assert_eq!(ops("....0000..00"), ["remove"]);
        assert_eq!(ops("aaaa0000bbbb"), ["zero 1+1"]);
        assert_eq!(ops("aaaa00000000bbbb0.0.cccc"), ["zero 1+2", "zero 4+1"]);
        assert_eq!(ops("aaaa....0000bbbb"), ["zero 2+1"]);
        assert_eq!(ops("a00.0000"), ["cut 1"]);
        assert_eq!(ops("0000a0000000....0000"), ["zero 0+1", "cut 2"]);
        // An object that exists without data.
        assert_eq!(ops("...."), ["remove"]);
    }
}
