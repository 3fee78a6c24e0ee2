//! Changing an image's size while it is in use, and cutting off its end.

use std::ops::Range;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent, LocalFuture, ObjectBackend, ObjectOp, Result, SnapContext, Transaction};

use crate::format::{Header, header_object};
use crate::image::{Image, Shared};
use crate::images::{Progress, SIZE_MAX, within};
use crate::layout::Layout;
use crate::window::{WALK_WINDOW, windowed};

/// Removes the objects that lie wholly in `range`, and cuts the one in which it begins.
///
/// Nothing of it is durable before the next flush.  It can be repeated: what is gone stays gone.
pub(crate) async fn trim(
    backend: &Rc<dyn ObjectBackend>,
    layout: &Layout,
    snapc: Option<Rc<SnapContext>>,
    range: Range<u64>,
    progress: &mut impl FnMut(Progress),
) -> Result<()> {
    let first_whole = layout.objects(range.start);
    let end = layout.objects(range.end);
    let cut = (!range.start.is_multiple_of(layout.object_size())).then(|| range.start / layout.object_size());
    let total = cut.iter().count() as u64 + end.saturating_sub(first_whole);
    let mut objects = (first_whole..end).chain(cut);
    let next = || -> Option<LocalFuture<Result<u64>>> {
        let object = objects.next()?;
        let op = match cut {
            Some(cut) if cut == object => ObjectOp::Truncate { size: range.start % layout.object_size() },
            _ => ObjectOp::Remove,
        };
        let transaction = Transaction { snapc: snapc.clone(), ops: vec![op], durable: false };
        Some(unless_absent(backend.submit(&layout.name(object), transaction)))
    };
    let mut done = 0;
    progress(Progress { done, total });
    windowed(WALK_WINDOW, next, |_, _| {
        done += 1;
        progress(Progress { done, total });
    })
    .await
}

/// Removing what is not there is done.
pub(crate) fn unless_absent(work: LocalFuture<Result<u64>>) -> LocalFuture<Result<u64>> {
    Box::pin(async move {
        match work.await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            other => other,
        }
    })
}

/// Shows the size that is being shrunk to; unless it is kept, the one before comes back.
struct Shown<'a> {
    shared: &'a Shared,
    before: Option<u64>,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.shared.set_size(before);
        }
    }
}

impl Image {
    /// Changes the size to `new_size` bytes, while requests go on.
    ///
    /// Growing, the new end reads as zeroes.  Shrinking, which must be allowed, requests beyond the new end are
    /// refused with `OutOfRange` from now on, those under way are waited for, and the objects there are removed;
    /// `progress` tells how many.  Cut short by a crash, the size is the old one, and part of the end may be gone:
    /// shrink again.
    ///
    /// # Errors
    /// `Invalid` for a size beyond [`SIZE_MAX`], or a smaller one without `allow_shrink`; `ReadOnly`; those of the
    /// backend, after which the size is the old one.
    pub async fn resize(&self, new_size: u64, allow_shrink: bool, mut progress: impl FnMut(Progress)) -> Result<()> {
        let shared = self.shared();
        let refuse = |kind, why: String| Err(Error::new(kind, format!("resizing image {}: {why}", shared.name())));
        if self.is_read_only() {
            return refuse(ErrorKind::ReadOnly, "opened for reading only".to_owned());
        }
        if new_size > SIZE_MAX {
            return refuse(ErrorKind::Invalid, format!("{new_size} bytes are more than the largest size, {SIZE_MAX}"));
        }
        let _alone = shared.resizing().acquire(1).await;
        shared.check_there()?;
        let size = shared.size();
        if new_size < size && !allow_shrink {
            return refuse(ErrorKind::Invalid, format!("{new_size} bytes are fewer than {size}, and that loses data"));
        }
        let resized = if new_size < size {
            shrink(shared, size, new_size, &mut progress).await
        } else {
            grow(shared, size, new_size, &mut progress).await
        };
        resized.map_err(|error| within(format_args!("resizing image {} to {new_size} bytes", shared.name()), error))
    }
}

async fn grow(shared: &Shared, size: u64, new_size: u64, progress: &mut impl FnMut(Progress)) -> Result<()> {
    if new_size > size {
        store_size(shared, new_size).await?;
        shared.set_size(new_size);
    }
    progress(Progress { done: 0, total: 0 });
    Ok(())
}

async fn shrink(shared: &Shared, size: u64, new_size: u64, progress: &mut impl FnMut(Progress)) -> Result<()> {
    let mut shown = Shown { shared, before: Some(size) };
    shared.set_size(new_size);
    let hold = shared.gate().hold(Extent::new(new_size, size - new_size)).await;
    trim(shared.backend(), shared.layout(), shared.snapc(), new_size..size, progress).await?;
    // What is cut off must be gone for good before the header says so, or growing again would bring it back.
    shared.backend().flush().await?;
    store_size(shared, new_size).await?;
    shown.before = None;
    drop(hold);
    Ok(())
}

async fn store_size(shared: &Shared, size: u64) -> Result<()> {
    let ops = vec![ObjectOp::AssertExists, ObjectOp::KvSet { pairs: vec![Header::encode_size(size)] }];
    shared.backend().submit(&header_object(shared.id()), Transaction::new(ops).durable()).await.map(drop)
}
