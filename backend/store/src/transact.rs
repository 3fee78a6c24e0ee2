//! Transactions and their order.
//!
//! The common case, a write of whole blocks to an object in memory, completes immediately without waiting, if it is not compressed
//! or short.  All other transactions queue behind those on the same object, compute their changes (`plan`, `pack`), wait for space, and are then
//! applied atomically (`commit`).

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Compression, Error, ErrorKind, LocalFuture, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::sync::oneshot;
use forebay_reactor::{sleep, spawn};

use crate::commit::ObjectWrite;
use crate::core::Core;
use crate::format::BLOCK64;
use crate::format::entry::CLONE_SNAPS_MAX;
use crate::format::onode::OBJECT_SIZE_MAX;
use crate::pack::{PackedBlob, PackedRange, packed_at_once_max};
use crate::plan::is_guard;

/// Maximum delay of a write near the reserve watermark.
const DELAY_MAX: Duration = Duration::from_millis(4);

/// Submits a transaction.
pub fn submit(core: &Rc<Core>, name: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
    if let Some(done) = core.write_immediately(name, &transaction) {
        let (core, durable) = (core.clone(), transaction.durable);
        return Box::pin(async move { core.acknowledge(done, durable).await });
    }
    let ticket = core.queues.take_ticket(name);
    let (sender, receiver) = oneshot::channel();
    let (core, name) = (core.clone(), name.clone());
    // Runs in its own task, so that it completes even if the caller stops waiting.
    spawn(async move {
        let guard = ticket.wait().await;
        let durable = transaction.durable;
        let done = match core.write_queued(&name, &transaction).await {
            Some(done) => done,
            None => core.transact(&name, transaction).await,
        };
        drop(guard);
        sender.send(core.acknowledge(done, durable).await);
    });
    Box::pin(async move { receiver.await.unwrap_or_else(|| Err(ErrorKind::ShuttingDown.into())) })
}

impl Core {
    /// Waits until a transaction may be acknowledged: it is durable, or at least written, so that it survives a kill of
    /// this process. Returns the object version.
    async fn acknowledge(&self, done: Result<(u64, u64)>, durable: bool) -> Result<u64> {
        let (version, seq) = done?;
        match durable {
            true => self.log().sync(seq).await?,
            false => self.log().wait_written_to(seq).await?,
        }
        Ok(version)
    }

    /// Returns an error if the store currently rejects writes.
    pub fn refuse_writes(&self) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the store is open for reading only"));
        }
        if self.maintenance.is_closing() {
            return Err(Error::new(ErrorKind::ShuttingDown, "the store is closing"));
        }
        match self.log().failure() {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// Returns whether a write of that many bytes may proceed without waiting: there are far more free segments than
    /// the cleaner and the next checkpoint may need.
    fn is_above_watermarks(&self, bytes: u64) -> bool {
        self.space.free_segments() > self.space.throttle_mark() + self.space.segments_for(bytes)
            && !self.log().is_congested()
            && !self.is_dirty_beyond_bounds()
            && self.space.host_allows(self.log_bytes(), bytes)
    }

    /// Performs a write of whole blocks if it need not wait for anything.
    fn write_immediately(self: &Rc<Self>, name: &ObjectName, transaction: &Transaction) -> Option<Result<(u64, u64)>> {
        let len = whole_blocks(transaction)?;
        if self.queues.is_busy(name) || !self.is_above_watermarks(len) {
            return None;
        }
        self.write_if_loaded(name, transaction)
    }

    /// Performs a write of whole blocks first in its queue, once there is space, if it need not wait for anything else.
    async fn write_queued(self: &Rc<Self>, name: &ObjectName, transaction: &Transaction) -> Option<Result<(u64, u64)>> {
        let len = whole_blocks(transaction)?;
        match self.wait_for_space(true, len).await {
            Ok(()) => self.write_if_loaded(name, transaction),
            Err(error) => Some(Err(error)),
        }
    }

    /// Performs a write of whole blocks, for which there is space, if the affected metadata is in memory.
    fn write_if_loaded(self: &Rc<Self>, name: &ObjectName, transaction: &Transaction) -> Option<Result<(u64, u64)>> {
        let len = whole_blocks(transaction)?;
        if self.refuse_writes().is_err() || check_name(name).is_err() {
            return None;
        }
        let compression = self.policies.compression(name);
        if compression != Compression::None && len > packed_at_once_max(compression) as u64 {
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
        if self.space.available() < len {
            return None;
        }
        // An error is returned by the transaction that is planned then.
        let (key, cipher) = self.encryption_of(name, object.as_ref()).ok()?;
        let packed = match compression {
            Compression::None => Vec::new(),
            _ => self.pack_short(compression, writes(transaction))?,
        };
        let log = self.log();
        log.begin_transaction();
        let object = object.unwrap_or_else(|| self.create(name, key));
        let (size, version) = {
            let ends = writes(transaction).map(|(start, data)| u64::from(start) * BLOCK64 + data.len() as u64);
            (ends.fold(object.state().size, u64::max), self.counters.version() + 1)
        };
        let write = ObjectWrite { object: &object, cipher: cipher.as_deref(), size, version };
        if compression == Compression::None {
            writes(transaction).for_each(|(start, data)| self.write_blocks(&write, start, data));
        }
        for (PackedRange { start, data }, stored) in packed {
            match stored {
                Some(stored) => {
                    self.write_blob(&write, &PackedBlob { start, blocks: blocks_of(&data), stored }, &data);
                }
                None => self.write_blocks(&write, start, &data),
            }
        }
        self.counters.add_user_bytes(len);
        let seq = log.end_transaction();
        self.after_write();
        Some(Ok((version, seq)))
    }

    /// Runs a transaction that is first in its queue; returns the object version and the batch number.
    async fn transact(self: &Rc<Self>, name: &ObjectName, transaction: Transaction) -> Result<(u64, u64)> {
        self.refuse_writes()?;
        check_name(name)?;
        let changes = transaction.ops.iter().any(|op| !is_guard(op));
        let mut plan = self.plan_transaction(name, transaction.ops).await?;
        let version = plan.object.as_ref().filter(|_| plan.exists).map_or(0, |object| object.state().version);
        if !changes {
            return Ok((version, self.log().last_seq()));
        }
        let snapc = transaction.snapc.as_deref();
        if snapc.is_some_and(|snapc| !snapc.is_valid() || snapc.snaps.len() > CLONE_SNAPS_MAX) {
            return Err(Error::new(ErrorKind::Invalid, format!("invalid snapshot context of a write to {name}")));
        }
        self.pack(name, &mut plan).await;
        self.load_for(&mut plan, snapc).await?;
        self.wait_for_space(plan.grows(), plan.bytes_appended()).await?;
        // No await from here on.
        self.commit(name, plan, snapc)
    }

    /// Waits until there is space for a transaction. Writes of user data need more reserve than transactions that only
    /// free space.
    async fn wait_for_space(&self, grows: bool, bytes: u64) -> Result<()> {
        let need = self.space.segments_for(bytes);
        let mut throttled = false;
        loop {
            self.refuse_writes()?;
            // Keys and values are small, and removals must write some: they may use the reserve.
            if grows && bytes >= BLOCK64 {
                self.space.check_host(self.log_bytes(), bytes)?;
            }
            let changed = self.maintenance.next_change();
            if self.log().is_congested() {
                self.log().wait_uncongested().await;
                continue;
            }
            let free = self.space.free_segments().saturating_sub(need);
            let floor = self.space.floor(grows, self.gc.is_stalled());
            if free > floor && !self.is_dirty_beyond_bounds() {
                // Throttles writes progressively towards the watermark, to avoid long stalls.
                let mark = self.space.throttle_mark();
                let share = f64::from(mark.saturating_sub(free)) / f64::from(mark - floor);
                if grows && share > 0.0 && !self.gc.is_stalled() && !throttled {
                    throttled = true;
                    self.maintenance.wake();
                    sleep(DELAY_MAX.mul_f64(share * share)).await;
                    // Other writes may have used the space meanwhile.
                    continue;
                }
                return Ok(());
            }
            if free <= floor && self.gc.is_stalled() {
                return Err(self.space.full());
            }
            if let Some(error) = self.maintenance.failure() {
                return Err(error);
            }
            self.space.request(need);
            self.maintenance.wake();
            changed.await;
        }
    }

    /// Wakes the maintenance task if needed.
    pub fn after_write(&self) {
        // Objects that are only written are never looked up, and must be evicted as well.
        self.objects.shrink_a_little(self.index.changes_bytes());
        if self.gc.is_stalled() {
            let patience = 2 * self.segments.borrow().geometry.segment_size;
            self.gc.resume_after(patience, self.log().bytes_appended(), self.counters.user_bytes());
        }
        if self.wants_checkpoint() || self.wants_cleaning() || self.wants_sparse_rewrite() {
            self.maintenance.wake();
        }
    }
}

/// Returns the number of bytes of a transaction that consists of whole-block writes; `None` for any other.
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

/// Returns the first block and the data of each write.
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
