//! Writes to a mapped image, whose client outlives the daemon.
//!
//! The kernel sends a request again whose reply takes too long, over another connection.  If both were in flight in the
//! volume, the first could be carried out last, after a later write to the same range that was acknowledged.
//!
//! And it goes on after a `kill -9` of the daemon: it does not write again what was acknowledged before, and a flush that it
//! sends later must cover that too.  A write log in the mode `on-flush` acknowledges a write while only this process has it.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{BlockReply, BlockRequest, CompleteOnDrop, Extent, LocalFuture};
use forebay_qos::SharedRequest;
use forebay_reactor::sync::Notify;

use crate::engine::volumes::Volume;

/// State of the writes of a volume.  Disabled until the image is mapped, then enabled for as long as the volume is open.
///
/// Invariants:
/// 1. Of two writes that overlap, the second is submitted only when the first has completed, also if nobody waits for the
///    first any more, or when the first was dropped while it waited.  The order is that in which they arrive.
/// 2. A write survives a kill of this process when it is acknowledged. Discards to a write log in the mode `on-flush` are
///    excepted: a range whose discard is lost has its old content, which no reader may rely on.
#[derive(Default)]
pub struct MappedWrites {
    is_enabled: Cell<bool>,
    queue: Rc<WriteQueue>,
}

/// Writes that wait or are in flight, in the order of their arrival.  A range lock would not keep that order: a write
/// could take a part of the range for which an earlier one waits.
#[derive(Default)]
struct WriteQueue {
    next: Cell<u64>,
    extents: RefCell<BTreeMap<u64, Extent>>,
    /// Signaled when a write has left the queue.
    changed: Notify,
}

/// Place of a write in the queue; leaves it when dropped.
struct QueuedWrite {
    queue: Rc<WriteQueue>,
    number: u64,
    extent: Extent,
}

impl QueuedWrite {
    /// Enters a write as the last one.
    fn enter(queue: &Rc<WriteQueue>, extent: Extent) -> Self {
        let number = queue.next.get();
        queue.next.set(number + 1);
        queue.extents.borrow_mut().insert(number, extent);
        Self { queue: queue.clone(), number, extent }
    }

    /// Returns whether no write before it overlaps it.
    fn is_first(&self) -> bool {
        let (start, end) = (self.extent.offset, self.extent.end());
        let overlaps = |before: &Extent| before.offset < end && start < before.end();
        !self.queue.extents.borrow().range(..self.number).any(|(_, before)| overlaps(before))
    }

    async fn wait(&self) {
        self.queue.changed.wait_until(|| self.is_first()).await;
    }
}

impl Drop for QueuedWrite {
    fn drop(&mut self) {
        self.queue.extents.borrow_mut().remove(&self.number);
        self.queue.changed.notify_all();
    }
}

impl MappedWrites {
    /// Applies the invariants to writes from now on.
    pub fn enable(&self) {
        self.is_enabled.set(true);
    }

    /// Submits a write to a range when those before it that overlap it have completed.  `keep` is dropped when it has
    /// completed, and so is what `submit` returns with it, unless it is submitted at once: that is returned then.
    fn submit<T: 'static, S: 'static>(
        &self,
        extent: Extent,
        keep: impl Sized + 'static,
        submit: impl FnOnce() -> (LocalFuture<T>, Option<S>) + 'static,
    ) -> (LocalFuture<T>, Option<S>) {
        let place = QueuedWrite::enter(&self.queue, extent);
        if place.is_first() {
            let (submitted, share) = submit();
            return (Box::pin(CompleteOnDrop::new(submitted, (place, keep))), share);
        }
        let submitted = async move {
            place.wait().await;
            let (submitted, share) = submit();
            CompleteOnDrop::new(submitted, (place, keep, share)).await
        };
        (Box::pin(submitted), None)
    }
}

impl Volume {
    /// Submits a request as [`submit_limited`](Self::submit_limited) does, under the invariants of [`MappedWrites`].
    pub(in crate::engine) fn submit_mapped(
        self: &Rc<Self>,
        request: BlockRequest,
    ) -> (LocalFuture<forebay_block::Result<BlockReply>>, Option<SharedRequest>) {
        if !self.mapped_writes.is_enabled.get() || !request.is_write() {
            return self.submit_limited(request);
        }
        let Some(extent) = request.extent() else { return self.submit_limited(request) };
        let volume = self.clone();
        self.mapped_writes.submit(extent, self.clone(), move || {
            let early = volume.attachment.log().is_some_and(|log| log.acknowledges_early());
            volume.submit_limited(if early { made_durable(request) } else { request })
        })
    }
}

/// Returns a write that is durable before it is acknowledged.
fn made_durable(request: BlockRequest) -> BlockRequest {
    match request {
        BlockRequest::Write { offset, data, .. } => BlockRequest::Write { offset, data, fua: true },
        BlockRequest::WriteZeroes { extent, no_unmap, .. } => BlockRequest::WriteZeroes { extent, no_unmap, fua: true },
        BlockRequest::CompareAndWrite { offset, expect, data, .. } => {
            BlockRequest::CompareAndWrite { offset, expect, data, fua: true }
        }
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::sync::oneshot;
    use forebay_reactor::{DriverChoice, JoinHandle, Reactor, spawn, yield_now};

    use super::*;

    /// A write that completes when the sender is used.
    fn write(writes: &MappedWrites, offset: u64, begun: &Rc<Cell<u32>>) -> (oneshot::Sender<()>, LocalFuture<()>) {
        let (done, waiting) = oneshot::channel();
        let begun = begun.clone();
        let submit = move || -> (LocalFuture<()>, Option<()>) {
            begun.set(begun.get() + 1);
            let completes = async move {
                waiting.await;
            };
            (Box::pin(completes), None)
        };
        (done, writes.submit(Extent::new(offset, 10), (), submit).0)
    }

    async fn settle() {
        for _ in 0..10 {
            yield_now().await;
        }
    }

    #[test]
    fn a_write_that_is_sent_again_waits_for_the_first_though_nobody_waits_for_that() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let (writes, begun) = (MappedWrites::default(), Rc::new(Cell::new(0)));
            let (first_done, first) = write(&writes, 0, &begun);
            let (_beside_done, _beside) = write(&writes, 10, &begun);
            assert_eq!(begun.get(), 2, "they do not overlap");
            let (again_done, again) = write(&writes, 0, &begun);
            let (_later_done, later) = write(&writes, 5, &begun);
            let (again, later): (JoinHandle<()>, JoinHandle<()>) = (spawn(again), spawn(later));
            drop(first);
            settle().await;
            assert_eq!(begun.get(), 2, "the first is in flight");
            first_done.send(());
            settle().await;
            assert_eq!(begun.get(), 3, "in their order");
            again_done.send(());
            again.await;
            settle().await;
            assert!(!later.is_finished(), "it overlaps the one beside, too");
            assert_eq!(begun.get(), 3);
        });
    }

    #[test]
    fn a_write_that_waits_is_not_overtaken_by_one_that_overlaps_a_free_part_of_it() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let (writes, begun) = (MappedWrites::default(), Rc::new(Cell::new(0)));
            let (first_done, first) = write(&writes, 0, &begun);
            let (second_done, second) = write(&writes, 5, &begun);
            let (_third_done, third) = write(&writes, 12, &begun);
            assert_eq!(begun.get(), 1, "the third does not overlap the first, but the second, which waits");
            let (second, third): (JoinHandle<()>, JoinHandle<()>) = (spawn(second), spawn(third));
            first_done.send(());
            first.await;
            settle().await;
            assert_eq!(begun.get(), 2);
            second_done.send(());
            second.await;
            settle().await;
            assert_eq!(begun.get(), 3);
            third.abort();
        });
    }

    #[test]
    fn a_write_that_is_dropped_while_it_waits_holds_up_no_other() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let (writes, begun) = (MappedWrites::default(), Rc::new(Cell::new(0)));
            let (_first_done, _first) = write(&writes, 0, &begun);
            let (_, second) = write(&writes, 5, &begun);
            let (third_done, third) = write(&writes, 12, &begun);
            let third: JoinHandle<()> = spawn(third);
            settle().await;
            drop(second);
            third_done.send(());
            third.await;
            assert_eq!(begun.get(), 2, "the first and the third");
        });
    }
}
