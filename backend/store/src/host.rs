//! The file system that a store's file lies on: what space it has left for a file that is sparse, and a reserve that lets
//! removals be written when it is full.
//!
//! The reserve is space allocated past the end of the file.  It is given up when the log finds no space, taken again when
//! there is plenty, and what would grow the store is refused in between.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind};
use forebay_reactor::sync::Notify;
use forebay_reactor::{File, Instant, fs, now, spawn};

/// Bytes of log after which the space is looked at again while there is plenty.
const LOOK_BYTES: u64 = 4 << 20;
/// While there is not, it is looked at again this much later.
const LOOK_AFTER: Duration = Duration::from_millis(50);
/// Largest reserve.
const RESERVE_MAX: u64 = 64 << 20;
/// Smallest.
const RESERVE_MIN: u64 = 8 << 20;

/// Space beneath a store in a file.
pub struct Host {
    file: File,
    /// End of the store in its file: the reserve lies behind it.
    end: u64,
    reserve: u64,
    /// The reserve is allocated.
    holds_reserve: Cell<bool>,
    /// It is being allocated or given up.
    busy: Cell<bool>,
    /// That has ended.
    idle: Notify,
    /// Times that it was given up.
    given: Cell<u64>,
    /// Bytes that the log could take when they were last looked for; all of a file that is not sparse.
    room: Cell<u64>,
    /// Bytes appended to the log, and the time, at that look.
    seen: Cell<(u64, Option<Instant>)>,
}

impl Host {
    /// Of a store's file; `None` on a device, or where space has no end.
    pub fn new(file: &File, end: u64) -> Option<Rc<Self>> {
        if file.info().block_device || !matches!(fs::file_system_space(file.path()), Ok(Some(_))) {
            return None;
        }
        Some(Rc::new(Self {
            file: file.clone(),
            end,
            reserve: (end / 16).clamp(RESERVE_MIN, RESERVE_MAX),
            holds_reserve: Cell::new(false),
            busy: Cell::new(false),
            idle: Notify::new(),
            given: Cell::new(0),
            room: Cell::new(u64::MAX),
            seen: Cell::default(),
        }))
    }

    /// Takes the reserve, which may still be there from before.
    pub async fn start(&self) {
        match self.file.allocate(self.end, self.reserve).await {
            Ok(()) => self.holds_reserve.set(true),
            Err(error) => {
                tracing::debug!(%error, "no space is reserved behind the store");
                // A part of it helps nobody.
                let _ = self.file.set_size(self.end);
            }
        }
    }

    /// All of the file has blocks of its own.
    pub fn is_whole(&self) -> bool {
        let held = if self.holds_reserve.get() { self.reserve } else { 0 };
        matches!(self.file.allocated_size(), Ok(Some(allocated)) if allocated.saturating_sub(held) >= self.end)
    }

    /// Bytes that the log may still take for what grows the store; `in_use`: bytes of segments in use; `wanted`: bytes
    /// that somebody asks for, to whom a figure that is too small must be a new one.
    pub fn room(self: &Rc<Self>, appended: u64, in_use: u64, wanted: u64) -> u64 {
        let (at, when) = self.seen.get();
        let since = appended.saturating_sub(at);
        let left = self.room.get().saturating_sub(since);
        let due = match when {
            Some(when) => when.elapsed() >= LOOK_AFTER && left < wanted || left > 0 && since >= LOOK_BYTES,
            None => true,
        };
        if !due {
            return left;
        }
        self.look(in_use);
        self.seen.set((appended, Some(now())));
        self.room.get()
    }

    fn look(self: &Rc<Self>, in_use: u64) {
        let space = fs::file_system_space(self.file.path());
        let (Ok(Some(space)), Ok(Some(allocated))) = (space, self.file.allocated_size()) else {
            // Writing tells.
            self.room.set(u64::MAX);
            return;
        };
        let held = if self.holds_reserve.get() { self.reserve } else { 0 };
        let allocated = allocated.saturating_sub(held);
        if allocated >= self.end {
            self.room.set(u64::MAX);
            return;
        }
        // What free segments have kept needs no more space.
        let found = space.available + allocated.saturating_sub(in_use);
        // Twice: once for the reserve itself, once for what is on its way to the file.
        let kept = if self.holds_reserve.get() { self.reserve / 2 } else { self.reserve + self.reserve / 2 };
        self.room.set(found.saturating_sub(kept));
        if !self.holds_reserve.get() && !self.busy.get() && space.available >= 2 * self.reserve {
            self.take_reserve();
        }
    }

    fn take_reserve(self: &Rc<Self>) {
        self.busy.set(true);
        let host = self.clone();
        drop(spawn(async move {
            match host.file.allocate(host.end, host.reserve).await {
                Ok(()) => host.holds_reserve.set(true),
                // A file system that cannot do it, or somebody was faster: removals may then find no space.
                Err(error) => tracing::debug!(%error, "no space is reserved behind the store"),
            }
            host.busy.set(false);
            host.idle.notify_all();
        }));
    }

    /// Times that the reserve was given up.
    pub fn times_given(&self) -> u64 {
        self.given.get()
    }

    /// Gives the reserve up for a write that found no space, or sees that this was done since it began, when
    /// [`times_given`](Self::times_given) was `before`; false when there is none.
    pub async fn give_reserve(&self, before: u64) -> bool {
        self.idle.wait_until(|| !self.busy.get()).await;
        if self.given.get() != before {
            return true;
        }
        if !self.holds_reserve.replace(false) {
            return false;
        }
        self.busy.set(true);
        tracing::warn!(
            "the file system of {} is full; the store uses its reserve, and takes nothing but removals",
            self.file.path().display()
        );
        // Some file systems do the one, some the other.
        let punched = self.file.punch_hole(self.end, self.reserve).await;
        let given = self.file.set_size(self.end).and(punched);
        if let Err(error) = given {
            tracing::warn!(%error, "the store's reserve cannot be used");
        }
        self.room.set(0);
        self.given.set(before + 1);
        self.busy.set(false);
        self.idle.notify_all();
        true
    }

    /// Why the store cannot grow.
    pub fn full(&self) -> Error {
        let path = self.file.path().display();
        let left = fs::file_system_space(self.file.path()).ok().flatten().map_or(0, |space| space.available);
        let text = format!(
            "the host's file system is full: {left} bytes are left where {path} lies, a sparse file that cannot grow"
        );
        Error::new(ErrorKind::NoSpace, text)
    }
}
