//! Watches, and notifications that wait for acknowledgements.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};

use forebay_block::{Error, ErrorKind, Notified, NotifyAnswer, WatchHandler, Watcher};
use forebay_reactor::sync::Notify;

use super::{ClientModel, PoolObject};

/// Watch of a client on an object.
#[derive(Clone)]
pub(super) struct WatchEntry {
    pub(super) object: PoolObject,
    pub(super) client: Weak<ClientModel>,
    pub(super) watcher: Watcher,
    pub(super) handler: Rc<dyn WatchHandler>,
}

/// Watches of all clients, in the order of registration.
///
/// Invariant: handlers are called and dropped while the list is not borrowed, because they may change it.
#[derive(Default)]
pub(super) struct RamWatches(RefCell<Vec<WatchEntry>>);

impl RamWatches {
    /// Adds a watch.
    pub(super) fn add(&self, entry: WatchEntry) {
        self.0.borrow_mut().push(entry);
    }

    /// Drops the watches for which `stays` returns false, without notifying their clients.
    pub(super) fn retain(&self, stays: impl Fn(&WatchEntry) -> bool) {
        let mut gone = Vec::new();
        self.0.borrow_mut().retain(|entry| {
            let stays = stays(entry);
            if !stays {
                gone.push(entry.handler.clone());
            }
            stays
        });
        drop(gone);
    }

    /// Drops all watches, and tells their clients.
    pub(super) fn break_all(&self) {
        for entry in self.0.take() {
            entry.handler.broken(Error::new(ErrorKind::TimedOut, "the watch was cut"));
        }
    }

    /// Returns the watches on an object.
    pub(super) fn of(&self, object: &PoolObject) -> Vec<WatchEntry> {
        self.0.borrow().iter().filter(|entry| entry.object == *object).cloned().collect()
    }

    /// Returns whether a client has a watch.
    pub(super) fn has(&self, client: u64, cookie: u64) -> bool {
        let is_it = |entry: &WatchEntry| (entry.watcher.client, entry.watcher.cookie) == (client, cookie);
        self.0.borrow().iter().any(is_it)
    }

    /// Returns the number of watches.
    pub(super) fn len(&self) -> usize {
        self.0.borrow().len()
    }
}

/// Notification that waits for acknowledgements.
struct Pending {
    /// Outstanding watchers, by client and cookie.
    wanted: BTreeSet<(u64, u64)>,
    answers: Vec<NotifyAnswer>,
    changed: Rc<Notify>,
}

/// Notifications that wait for acknowledgements, by ID.
#[derive(Default)]
pub(super) struct Notifications {
    pending: RefCell<BTreeMap<u64, Pending>>,
    last: Cell<u64>,
    /// Number of notifications that are still to be lost.
    to_lose: Cell<u32>,
}

impl Notifications {
    /// Loses the next `count` notifications.
    pub(super) fn lose_next(&self, count: u32) {
        self.to_lose.set(count);
    }

    /// Returns whether the next notification is to be lost, and counts it.
    pub(super) fn is_lost(&self) -> bool {
        let left = self.to_lose.get().checked_sub(1);
        self.to_lose.set(left.unwrap_or(0));
        left.is_some()
    }

    /// Begins a notification of some watchers; returns its ID.
    pub(super) fn begin(&self, wanted: BTreeSet<(u64, u64)>) -> u64 {
        let id = self.last.get() + 1;
        self.last.set(id);
        let pending = Pending { wanted, answers: Vec::new(), changed: Rc::new(Notify::new()) };
        self.pending.borrow_mut().insert(id, pending);
        id
    }

    /// Records an acknowledgement, unless the notification has ended.
    pub(super) fn acknowledge(&self, id: u64, answer: NotifyAnswer) {
        if let Some(pending) = self.pending.borrow_mut().get_mut(&id) {
            pending.answers.push(answer);
            pending.changed.notify_all();
        }
    }

    /// Waits until every watcher has acknowledged a notification.
    pub(super) async fn all_acknowledged(&self, id: u64) {
        let changed = self.pending.borrow()[&id].changed.clone();
        let all = || {
            let pending = self.pending.borrow();
            pending[&id].answers.len() >= pending[&id].wanted.len()
        };
        changed.wait_until(all).await;
    }

    /// Ends a notification; returns its acknowledgements and the watchers that have not sent any.
    pub(super) fn end(&self, id: u64) -> Notified {
        let pending = self.pending.borrow_mut().remove(&id).expect("it was there");
        let answered: BTreeSet<_> = pending.answers.iter().map(|by| (by.client, by.cookie)).collect();
        let missed = pending.wanted.difference(&answered).copied().collect();
        Notified { answers: pending.answers, missed }
    }
}
