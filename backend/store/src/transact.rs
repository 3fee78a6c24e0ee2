//! Transactions, and whose turn it is.
//!
//! The common one - whole blocks written to an object that is in memory - is done at once, without waiting.  Any
//! other takes its turn among those on the same object, works out on the side what it will have changed (`plan`), waits
//! for space, and is then applied in one go (`commit`).

use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, ErrorKind, LocalFuture, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::sync::oneshot;
use forebay_reactor::{sleep, spawn};

use crate::core::Core;
use crate::format::BLOCK64;
use crate::format::entry::CLONE_SNAPS_MAX;
use crate::format::onode::OBJECT_SIZE_MAX;
use crate::plan::is_guard;

/// How long a write is held up at the gate's edge.
const DELAY_MAX: Duration = Duration::from_millis(4);

/// Holds an object's turn; the next one gets it when this is dropped.
pub struct Turn {
    core: Rc<Core>,
    name: ObjectName,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut turns = self.core.turns.borrow_mut();
        let Some(waiting) = turns.get_mut(&self.name) else { return };
        match waiting.pop_front() {
            Some(next) => {
                drop(turns);
                next.send(());
            }
            None => {
                turns.remove(&self.name);
            }
        }
    }
}

/// A place in the order of an object's transactions, taken at once; wait for it before working.
pub struct Place {
    turn: Option<Turn>,
    waiting: Option<oneshot::Receiver<()>>,
}

impl Place {
    /// Takes a place.
    pub fn take(core: &Rc<Core>, name: &ObjectName) -> Self {
        let mut turns = core.turns.borrow_mut();
        let waiting = match turns.get_mut(name) {
            Some(queue) => {
                let (sender, receiver) = oneshot::channel();
                queue.push_back(sender);
                Some(receiver)
            }
            None => {
                turns.insert(name.clone(), VecDeque::new());
                None
            }
        };
        drop(turns);
        Self { turn: Some(Turn { core: core.clone(), name: name.clone() }), waiting }
    }

    /// Waits until it is its turn.
    pub async fn turn(mut self) -> Turn {
        if let Some(waiting) = self.waiting.take() {
            waiting.await;
        }
        self.turn.take().expect("a place is waited for once")
    }
}

/// Submits a transaction.
pub fn submit(core: &Rc<Core>, name: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
    if let Some(done) = core.write_at_once(name, &transaction) {
        return match done {
            Ok((version, seq)) if transaction.durable => {
                let core = core.clone();
                Box::pin(async move { core.log().sync(seq).await.map(|()| version) })
            }
            Ok((version, _)) => Box::pin(std::future::ready(Ok(version))),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        };
    }
    let place = Place::take(core, name);
    let (sender, receiver) = oneshot::channel();
    let (core, name) = (core.clone(), name.clone());
    // In a task of its own: it goes on even if nobody waits for it any more.
    spawn(async move {
        let turn = place.turn().await;
        let durable = transaction.durable;
        let done = match core.write_in_turn(&name, &transaction).await {
            Some(done) => done,
            None => core.transact(&name, transaction).await,
        };
        drop(turn);
        let answer = match done {
            Ok((version, seq)) if durable => core.log().sync(seq).await.map(|()| version),
            other => other.map(|(version, _)| version),
        };
        sender.send(answer);
    });
    Box::pin(async move { receiver.await.unwrap_or_else(|| Err(ErrorKind::ShuttingDown.into())) })
}

impl Core {
    /// Why nothing may be written now.
    pub fn refuse_writes(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the store is open for reading only"));
        }
        if self.closing.get() {
            return Err(Error::new(ErrorKind::ShuttingDown, "the store is closing"));
        }
        match self.log().failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Users may take segments for that many bytes without a thought: far more are free than the cleaner and the next
    /// checkpoint may need.
    fn gate_is_open(&self, bytes: u64) -> bool {
        self.segments.borrow().free_count() > self.slow_mark() + self.segments_for(bytes)
            && !self.log().is_congested()
            && !self.is_dirty_beyond_bounds()
            && self.host_allows(bytes)
    }

    /// Whole segments that so many bytes take, with their headers; less than one is what the gate has to spare.
    fn segments_for(&self, bytes: u64) -> u32 {
        let blocks = self.segments.borrow().geometry.segment_blocks();
        (bytes / ((blocks - blocks / 64 - 2) * BLOCK64)) as u32
    }

    /// Does a write of whole blocks if nothing has to be waited for.
    fn write_at_once(self: &Rc<Self>, name: &ObjectName, transaction: &Transaction) -> Option<Result<(u64, u64)>> {
        let len = whole_blocks(transaction)?;
        if self.turns.borrow().contains_key(name) || !self.gate_is_open(len) {
            return None;
        }
        self.write_if_loaded(name, transaction)
    }

    /// Does a write of whole blocks in its turn, as soon as there is room, if nothing else has to be waited for.
    async fn write_in_turn(
        self: &Rc<Self>,
        name: &ObjectName,
        transaction: &Transaction,
    ) -> Option<Result<(u64, u64)>> {
        let len = whole_blocks(transaction)?;
        match self.wait_for_room(true, len).await {
            Ok(()) => self.write_if_loaded(name, transaction),
            Err(error) => Some(Err(error)),
        }
    }

    /// Does a write of whole blocks, for which there is room, if what it changes is in memory.
    fn write_if_loaded(self: &Rc<Self>, name: &ObjectName, transaction: &Transaction) -> Option<Result<(u64, u64)>> {
        let len = whole_blocks(transaction)?;
        if self.refuse_writes().is_err() || check_name(name).is_err() {
            return None;
        }
        let object = self.find_cached(name)?;
        if let Some(object) = &object {
            let seen = object.state().snap_seq;
            if transaction.snapc.as_ref().is_some_and(|snapc| snapc.seq > seen)
                || !writes(transaction).all(|(start, data)| Self::is_loaded(object, start, blocks_of(data)))
            {
                return None;
            }
        } else if transaction.snapc.as_ref().is_some_and(|snapc| snapc.seq > 0) {
            return None;
        }
        if self.available() < len {
            return None;
        }
        let log = self.log();
        log.begin_transaction();
        let object = object.unwrap_or_else(|| self.create(name));
        let (size, version) = {
            let ends = writes(transaction).map(|(start, data)| u64::from(start) * BLOCK64 + data.len() as u64);
            (ends.fold(object.state().size, u64::max), self.version.get() + 1)
        };
        writes(transaction).for_each(|(start, data)| self.write_blocks(&object, start, data, size, version));
        self.user_bytes.set(self.user_bytes.get() + len);
        let seq = log.end_transaction();
        self.after_write();
        Some(Ok((version, seq)))
    }

    /// A transaction in its turn: version and batch.
    async fn transact(self: &Rc<Self>, name: &ObjectName, transaction: Transaction) -> Result<(u64, u64)> {
        self.refuse_writes()?;
        check_name(name)?;
        let changes = transaction.ops.iter().any(|op| !is_guard(op));
        let mut work = self.plan_transaction(name, transaction.ops).await?;
        let version = work.object.as_ref().filter(|_| work.exists).map_or(0, |object| object.state().version);
        if !changes {
            return Ok((version, self.log().last_seq()));
        }
        let snapc = transaction.snapc.as_deref();
        if snapc.is_some_and(|snapc| !snapc.is_valid() || snapc.snaps.len() > CLONE_SNAPS_MAX) {
            return Err(Error::new(ErrorKind::Invalid, format!("the snapshot context of a write to {name}")));
        }
        self.load_for(&mut work, snapc).await?;
        self.wait_for_room(work.grows(), work.bytes_appended()).await?;
        // Nothing waits from here on.
        self.commit(name, work, snapc)
    }

    /// Waits until there is room for a transaction: for users' data more than for what only gives up space.
    async fn wait_for_room(&self, grows: bool, bytes: u64) -> Result<()> {
        let need = self.segments_for(bytes);
        let mut slowed = false;
        loop {
            self.refuse_writes()?;
            // Keys and values are small, and removals have some to write: they may use what is reserved.
            if grows && bytes >= BLOCK64 {
                self.check_host(bytes)?;
            }
            let changed = self.changed.wait();
            if self.log().is_congested() {
                self.log().wait_uncongested().await;
                continue;
            }
            let free = self.segments.borrow().free_count().saturating_sub(need);
            let floor = match (grows, self.stuck.get()) {
                (true, _) => self.gate,
                (false, false) => self.gate / 2,
                // The cleaner has used what it may; only giving up space helps now, and takes next to nothing itself.
                (false, true) => 1,
            };
            if free > floor && !self.is_dirty_beyond_bounds() {
                // Nearer the gate everybody is slowed down more, so that nobody is stopped for long.
                let pressure = f64::from(self.slow_mark().saturating_sub(free)) / f64::from(self.slow_mark() - floor);
                if grows && pressure > 0.0 && !self.stuck.get() && !slowed {
                    slowed = true;
                    self.wake_cleaner.notify_all();
                    sleep(DELAY_MAX.mul_f64(pressure * pressure)).await;
                    // Others have taken their share meanwhile.
                    continue;
                }
                return Ok(());
            }
            if free <= floor && self.stuck.get() {
                return Err(self.full());
            }
            if let Some(error) = &*self.upkeep_failure.borrow() {
                return Err(error.clone());
            }
            self.room_wanted.set(self.room_wanted.get().max(need));
            self.wake_cleaner.notify_all();
            changed.await;
        }
    }

    pub fn full(&self) -> Error {
        let text = format!("the store is full: {} of {} bytes used", self.capacity - self.available(), self.capacity);
        Error::new(ErrorKind::NoSpace, text)
    }

    /// Wakes who keeps the store in shape, if there is reason.
    pub fn after_write(&self) {
        // What is only written is never looked up, and must make room as well.
        self.objects.shrink_a_little(self.changes_bytes());
        // What was overwritten since the cleaner gave up may be worth its while.
        let patience = 2 * self.segments.borrow().geometry.segment_size;
        if self.stuck.get() && self.log().bytes_appended() - self.stuck_at.get() >= patience {
            self.stuck.set(false);
            self.futile.set((self.user_bytes.get(), 0, 0));
        }
        if self.wants_checkpoint() || self.wants_cleaning() {
            self.wake_cleaner.notify_all();
        }
    }
}

/// The bytes of a transaction that only writes whole blocks.
fn whole_blocks(transaction: &Transaction) -> Option<u64> {
    let mut bytes = 0;
    for op in &transaction.ops {
        let ObjectOp::Write { offset, data } = op else { return None };
        let len = data.len() as u64;
        let whole = offset.is_multiple_of(BLOCK64) && len.is_multiple_of(BLOCK64);
        if len == 0 || !whole || offset.checked_add(len)? > OBJECT_SIZE_MAX {
            return None;
        }
        bytes += len;
    }
    (bytes > 0).then_some(bytes)
}

/// The first block and the data of each of its writes.
fn writes(transaction: &Transaction) -> impl Iterator<Item = (u32, &BufList)> {
    transaction.ops.iter().filter_map(|op| match op {
        ObjectOp::Write { offset, data } => Some(((offset / BLOCK64) as u32, data)),
        _ => None,
    })
}

fn blocks_of(data: &BufList) -> u32 {
    (data.len() as u64 / BLOCK64) as u32
}

fn check_name(name: &ObjectName) -> Result<()> {
    if name.name().is_empty() || name.name().len() > ObjectName::LEN_MAX || name.namespace().len() > ObjectName::LEN_MAX
    {
        let text = format!("an object's name has 1 to {} bytes", ObjectName::LEN_MAX);
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}
