//! Syncs of a file that several logs are in: those that are asked for at the same time are one.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;

use forebay_reactor::sync::Notify;
use forebay_reactor::{File, spawn, yield_now};

/// Syncs of one file.
#[derive(Default)]
pub(crate) struct SharedSync {
    /// One that has not begun.
    next: RefCell<Option<Rc<PendingSync>>>,
}

#[derive(Default)]
struct PendingSync {
    result: RefCell<Option<io::Result<()>>>,
    ended: Notify,
}

impl SharedSync {
    /// Makes every write to the file durable that has ended.
    ///
    /// # Errors
    /// Errors of the file.
    pub(crate) async fn sync(self: &Rc<Self>, file: &File) -> io::Result<()> {
        let waiting = self.next.borrow().clone();
        let sync = waiting.unwrap_or_else(|| {
            let (sync, syncs, file) = (Rc::new(PendingSync::default()), self.clone(), file.clone());
            self.next.replace(Some(sync.clone()));
            let begun = sync.clone();
            // A task of its own: a future that waits may be dropped, and the others wait on.
            drop(spawn(async move {
                // Others that have just ended a write join.
                yield_now().await;
                syncs.next.take();
                begun.result.replace(Some(file.sync_data().await));
                begun.ended.notify_all();
            }));
            sync
        });
        sync.ended.wait_until(|| sync.result.borrow().is_some()).await;
        match &*sync.result.borrow() {
            Some(Err(error)) => Err(error
                .raw_os_error()
                .map_or_else(|| io::Error::new(error.kind(), error.to_string()), io::Error::from_raw_os_error)),
            _ => Ok(()),
        }
    }
}
