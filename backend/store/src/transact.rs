//! Transactions.
//!
//! The common one - whole blocks written to an object that is in memory - is done at once, without waiting.  Any
//! other takes its turn among those on the same object, works out on the side what it will have changed (reading what
//! it must), waits for space, and is then applied in one go.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay_accel::crc32c::crc32c;
use forebay_block::{
    Buf, BufList, BufMut, Error, ErrorKind, LocalFuture, ObjectName, ObjectOp, Result, SnapContext, Transaction,
};
use forebay_reactor::sync::oneshot;
use forebay_reactor::{sleep, spawn};

use crate::core::{Core, keys};
use crate::format::entry::{CLONE_SNAPS_MAX, Entry, KEY_MAX, VALUE_INLINE_MAX, VALUE_MAX};
use crate::format::onode::OBJECT_SIZE_MAX;
use crate::format::{BLOCK, BLOCK64, BlobPtr};
use crate::object::{HEAD, Object, blocks_of};

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

/// What a transaction will have changed.
struct Work {
    object: Option<Rc<Object>>,
    exists: bool,
    size: u64,
    /// Where blocks that are not in `blocks` come from: the head, a clone, or (none) nothing is there.
    base: Option<u64>,
    /// Changed blocks; none: not stored.
    blocks: BTreeMap<u32, Option<BufList>>,
    kv: BTreeMap<Vec<u8>, Option<Vec<u8>>>,
    /// The head's keys as they were before, for the clone that is about to be made.
    kept_kv: Vec<(Vec<u8>, Vec<u8>)>,
    /// The snapshots that the clone which is about to be made stands for.
    kept_snaps: Vec<u64>,
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
        let done = core.transact(&name, transaction).await;
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
    }

    /// Whole segments that so many bytes take, with their headers; less than one is what the gate has to spare.
    fn segments_for(&self, bytes: u64) -> u32 {
        let blocks = self.segments.borrow().geometry.segment_blocks();
        (bytes / ((blocks - blocks / 64 - 2) * BLOCK64)) as u32
    }

    /// Does a write of whole blocks if nothing has to be waited for.
    fn write_at_once(self: &Rc<Self>, name: &ObjectName, transaction: &Transaction) -> Option<Result<(u64, u64)>> {
        let [ObjectOp::Write { offset, data }] = &transaction.ops[..] else { return None };
        let len = data.len() as u64;
        let whole = offset.is_multiple_of(BLOCK64) && len.is_multiple_of(BLOCK64);
        if len == 0 || !whole || offset.checked_add(len)? > OBJECT_SIZE_MAX {
            return None;
        }
        if self.turns.borrow().contains_key(name) || self.refuse_writes().is_err() || !self.gate_is_open(len) {
            return None;
        }
        let (start, count) = ((offset / BLOCK64) as u32, (len / BLOCK64) as u32);
        let object = self.find_cached(name)?;
        if let Some(object) = &object {
            let seen = object.state().snap_seq;
            if transaction.snapc.as_ref().is_some_and(|snapc| snapc.seq > seen)
                || !Self::is_loaded(object, start, count)
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
            let state = object.state();
            (state.size.max(offset + len), self.version.get() + 1)
        };
        self.write_blocks(&object, start, data, size, version);
        self.user_bytes.set(self.user_bytes.get() + len);
        let seq = log.end_transaction();
        self.after_write();
        Some(Ok((version, seq)))
    }

    fn create(&self, name: &ObjectName) -> Rc<Object> {
        let oid = self.next_oid.get();
        let entry = Entry::Create { oid, namespace: name.namespace().into(), name: name.name().into() };
        self.log().append(&entry);
        self.apply_create(Object::new(oid, name.clone()))
    }

    fn write_blocks(&self, object: &Rc<Object>, start: u32, data: &BufList, size: u64, version: u64) {
        // Marking may itself append to the log, so it comes first.
        self.mark_dirty(object);
        let log = self.log();
        let oid = object.oid;
        log.append_blocks(data, Entry::write_size, |done, payload, block, stored| {
            let crcs = block_crcs(stored);
            let entry = Entry::Write { oid, start: start + done as u32, payload, size, version, crcs };
            self.apply(object, &entry, block, None);
            entry
        });
    }

    /// Appends an entry and applies it.
    fn perform(&self, object: &Rc<Object>, entry: Entry) {
        self.mark_dirty(object);
        self.log().append(&entry);
        self.apply(object, &entry, 0, None);
    }

    /// A transaction in its turn: version and batch.
    async fn transact(self: &Rc<Self>, name: &ObjectName, transaction: Transaction) -> Result<(u64, u64)> {
        self.refuse_writes()?;
        check_name(name)?;
        let object = self.find(name).await?;
        let mut work = Work {
            exists: object.as_ref().is_some_and(|object| object.state().exists),
            size: object.as_ref().map_or(0, |object| object.state().size),
            base: object.as_ref().map(|_| HEAD),
            object,
            blocks: BTreeMap::new(),
            kv: BTreeMap::new(),
            kept_kv: Vec::new(),
            kept_snaps: Vec::new(),
        };
        let changes = transaction.ops.iter().any(|op| !is_guard(op));
        for op in transaction.ops {
            self.prepare(name, &mut work, op).await?;
        }
        let version = work.object.as_ref().filter(|_| work.exists).map_or(0, |object| object.state().version);
        if !changes {
            return Ok((version, self.log().last_seq()));
        }
        let grows = work.blocks.values().any(Option::is_some) || work.kv.values().any(Option::is_some);
        let snapc = transaction.snapc.as_deref();
        if snapc.is_some_and(|snapc| !snapc.is_valid() || snapc.snaps.len() > CLONE_SNAPS_MAX) {
            return Err(Error::new(ErrorKind::Invalid, format!("the snapshot context of a write to {name}")));
        }
        self.load_for(&mut work, snapc).await?;
        self.wait_for_room(grows, bytes_appended(&work)).await?;
        // Nothing waits from here on.
        self.commit(name, work, snapc)
    }

    /// Loads what [`commit`](Self::commit) will look at.
    async fn load_for(&self, work: &mut Work, snapc: Option<&SnapContext>) -> Result<()> {
        let Some(object) = work.object.clone() else { return Ok(()) };
        let object = &object;
        let seen = object.state().snap_seq;
        if let Some(snapc) = snapc.filter(|snapc| snapc.seq > seen && object.state().exists) {
            for snap in snapc.snaps.iter().map(|snap| snap.0).filter(|&snap| snap > seen) {
                // A writer may not have heard yet that a snapshot is gone.
                if self.lookup(&keys::snap_removed(snap)).await?.is_none() {
                    work.kept_snaps.push(snap);
                }
            }
        }
        let clones = !work.kept_snaps.is_empty();
        if clones && object.state().has_kv {
            work.kept_kv = self.all_kv(object.oid, HEAD).await?;
        }
        if clones || work.base != Some(HEAD) || !work.exists {
            return self.load_pages(object, HEAD, true, 0, u32::MAX / 2).await;
        }
        let mut runs = Runs::new(work.blocks.keys().copied());
        while let Some((start, count)) = runs.next() {
            self.load_pages(object, HEAD, true, start, count).await?;
        }
        Ok(())
    }

    /// Waits until there is room for a transaction: for users' data more than for what only gives up space.
    async fn wait_for_room(&self, grows: bool, bytes: u64) -> Result<()> {
        let need = self.segments_for(bytes);
        let mut slowed = false;
        loop {
            self.refuse_writes()?;
            let changed = self.changed.wait();
            if self.log().is_congested() {
                self.log().wait_uncongested().await;
                continue;
            }
            let free = self.segments.borrow().free_count().saturating_sub(need);
            let floor = if grows { self.gate } else { self.gate / 2 };
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

    async fn prepare(&self, name: &ObjectName, work: &mut Work, op: ObjectOp) -> Result<()> {
        let at = |kind, what: &str| Error::new(kind, format!("{name}: {what}"));
        match op {
            ObjectOp::AssertExists if work.exists => Ok(()),
            ObjectOp::AssertExists => Err(at(ErrorKind::NotFound, "no such object")),
            ObjectOp::AssertVersion(version) => {
                let now = work.object.as_ref().filter(|_| work.exists).map_or(0, |object| object.state().version);
                if work.exists && now == version {
                    Ok(())
                } else {
                    Err(at(ErrorKind::Guard, &format!("version {now}, not {version}")))
                }
            }
            ObjectOp::Compare { offset, data } => self.compare(name, work, offset, &data).await,
            ObjectOp::KvCompare { key, value } => {
                if self.kv_value(work, &key).await? == value {
                    Ok(())
                } else {
                    Err(at(ErrorKind::Guard, "a key's value"))
                }
            }
            ObjectOp::Create { exclusive } => {
                if work.exists && exclusive {
                    return Err(at(ErrorKind::Exists, "the object"));
                }
                work.exists = true;
                Ok(())
            }
            ObjectOp::Write { offset, data } => self.prepare_write(name, work, offset, data).await,
            ObjectOp::WriteFull { data } => {
                self.clear_blocks(work).await?;
                work.size = 0;
                self.prepare_write(name, work, 0, data).await
            }
            ObjectOp::Zero { extent } => {
                let end = extent.checked_end().ok_or_else(|| at(ErrorKind::OutOfRange, "zero"))?.min(work.size);
                if work.exists && extent.offset < end {
                    self.prepare_zero(work, extent.offset, end).await?;
                }
                Ok(())
            }
            ObjectOp::Truncate { size } => {
                if size > OBJECT_SIZE_MAX {
                    return Err(at(ErrorKind::OutOfRange, &format!("a size of {size} bytes")));
                }
                if !work.exists {
                    return Ok(());
                }
                if size < work.size {
                    let upto = u64::from(blocks_of(work.size)) * BLOCK64;
                    self.prepare_zero(work, size, upto).await?;
                }
                work.size = size;
                Ok(())
            }
            ObjectOp::Remove => {
                if !work.exists {
                    return Err(at(ErrorKind::NotFound, "no such object"));
                }
                work.blocks.clear();
                work.base = None;
                self.clear_kv(work).await?;
                (work.exists, work.size) = (false, 0);
                Ok(())
            }
            ObjectOp::KvSet { pairs } => {
                let value_max = VALUE_MAX.min(self.superblock.segment_size as usize / 4);
                if pairs.iter().any(|(key, value)| key.len() > KEY_MAX || value.len() > value_max) {
                    let text = format!("keys have at most {KEY_MAX} bytes, values {value_max}");
                    return Err(at(ErrorKind::Invalid, &text));
                }
                work.kv.extend(pairs.into_iter().map(|(key, value)| (key, Some(value))));
                work.exists = true;
                Ok(())
            }
            ObjectOp::KvRemove { keys } => {
                if !work.exists {
                    return Err(at(ErrorKind::NotFound, "no such object"));
                }
                work.kv.extend(keys.into_iter().map(|key| (key, None)));
                Ok(())
            }
            ObjectOp::Rollback { snap } => self.prepare_rollback(name, work, snap.0).await,
        }
    }

    async fn prepare_write(&self, name: &ObjectName, work: &mut Work, offset: u64, data: BufList) -> Result<()> {
        let len = data.len() as u64;
        let end = offset.checked_add(len).filter(|&end| end <= OBJECT_SIZE_MAX);
        let out = || Error::new(ErrorKind::OutOfRange, format!("{name}: a write of {len} bytes at {offset}"));
        let end = end.ok_or_else(out)?;
        work.exists = true;
        if len == 0 {
            return Ok(());
        }
        self.user_bytes.set(self.user_bytes.get() + len);
        let mut at = offset;
        while at < end {
            let block = (at / BLOCK64) as u32;
            let within = (at % BLOCK64) as usize;
            let take = (BLOCK - within).min((end - at) as usize);
            let from = (at - offset) as usize;
            let piece = data.slice(from..from + take);
            let whole = if take == BLOCK {
                piece
            } else {
                let mut content = self.block_of(work, block).await?;
                piece.copy_to(&mut content[within..within + take]);
                content.into()
            };
            work.blocks.insert(block, Some(whole));
            at += take as u64;
        }
        work.size = work.size.max(end);
        Ok(())
    }

    /// Makes bytes `from..to` read as zeroes: whole blocks are given up, the edges are written.
    async fn prepare_zero(&self, work: &mut Work, from: u64, to: u64) -> Result<()> {
        // Past the end everything is zero already: a tail up to the end is given up whole.
        let to = if to >= work.size { to.next_multiple_of(BLOCK64) } else { to };
        let (first, last) = (from.div_ceil(BLOCK64), to / BLOCK64);
        if first > last {
            self.zero_within(work, last as u32, (from % BLOCK64) as usize..(to % BLOCK64) as usize).await?;
        } else {
            if !from.is_multiple_of(BLOCK64) {
                self.zero_within(work, first as u32 - 1, (from % BLOCK64) as usize..BLOCK).await?;
            }
            if !to.is_multiple_of(BLOCK64) {
                self.zero_within(work, last as u32, 0..(to % BLOCK64) as usize).await?;
            }
        }
        work.blocks.extend((first..last).map(|block| (block as u32, None)));
        Ok(())
    }

    async fn zero_within(&self, work: &mut Work, block: u32, range: std::ops::Range<usize>) -> Result<()> {
        if self.is_stored(work, block).await? {
            let mut content = self.block_of(work, block).await?;
            content[range].fill(0);
            work.blocks.insert(block, Some(content.into()));
        }
        Ok(())
    }

    async fn is_stored(&self, work: &Work, block: u32) -> Result<bool> {
        if let Some(changed) = work.blocks.get(&block) {
            return Ok(changed.is_some());
        }
        let (Some(object), Some(of)) = (&work.object, work.base) else { return Ok(false) };
        self.load_pages(object, of, false, block, 1).await?;
        Ok(object.state().map_of(of).is_some_and(|map| map.get(block).block != 0))
    }

    /// A block's content as the transaction has it so far.
    async fn block_of(&self, work: &Work, block: u32) -> Result<BufMut> {
        let mut out = BufMut::zeroed(BLOCK);
        match work.blocks.get(&block) {
            Some(Some(data)) => data.copy_to(&mut out),
            Some(None) => {}
            None => {
                if let (Some(object), Some(of)) = (&work.object, work.base) {
                    self.load_pages(object, of, false, block, 1).await?;
                    let slot = object.state().map_of(of).map(|map| map.get(block)).unwrap_or_default();
                    if slot.block != 0 {
                        let what = || format!("{} at byte {}", object.name, u64::from(block) * BLOCK64);
                        self.media.read_blocks(slot.block, &[slot.crc], what).await?.copy_to(&mut out);
                    }
                }
            }
        }
        Ok(out)
    }

    async fn compare(&self, name: &ObjectName, work: &Work, offset: u64, data: &BufList) -> Result<()> {
        let out = || Error::new(ErrorKind::OutOfRange, format!("{name}: compare at {offset}"));
        let end = offset.checked_add(data.len() as u64).ok_or_else(out)?;
        let mut at = offset;
        while at < end {
            let block = (at / BLOCK64) as u32;
            let within = (at % BLOCK64) as usize;
            let take = (BLOCK - within).min((end - at) as usize);
            let content = if at < OBJECT_SIZE_MAX { self.block_of(work, block).await? } else { BufMut::zeroed(BLOCK) };
            let want = data.slice((at - offset) as usize..(at - offset) as usize + take).to_vec();
            let have = &content[within..within + take];
            if let Some(differs) = have.iter().zip(&want).position(|(a, b)| a != b) {
                let place = at - offset + differs as u64;
                return Err(Error::new(ErrorKind::Mismatch(place), format!("{name}: compare at {offset}")));
            }
            at += take as u64;
        }
        Ok(())
    }

    async fn kv_value(&self, work: &Work, key: &[u8]) -> Result<Option<Vec<u8>>> {
        if let Some(value) = work.kv.get(key) {
            return Ok(value.clone());
        }
        match &work.object {
            Some(object) if work.base.is_some() && object.state().has_kv => {
                self.lookup(&keys::kv(object.oid, HEAD, key)).await
            }
            _ => Ok(None),
        }
    }

    async fn clear_blocks(&self, work: &mut Work) -> Result<()> {
        let (Some(object), Some(of)) = (&work.object, work.base) else {
            work.blocks.clear();
            return Ok(());
        };
        self.load_pages(object, of, false, 0, u32::MAX / 2).await?;
        let blocks = object.state().map_of(of).map_or(0, crate::object::Map::blocks);
        work.blocks = (0..blocks).map(|block| (block, None)).collect();
        Ok(())
    }

    async fn clear_kv(&self, work: &mut Work) -> Result<()> {
        work.kv.values_mut().for_each(|value| *value = None);
        let Some(object) = work.object.clone().filter(|object| object.state().has_kv) else { return Ok(()) };
        work.kv.extend(self.all_kv(object.oid, HEAD).await?.into_iter().map(|(key, _)| (key, None)));
        Ok(())
    }

    /// The object did not exist at the time that is wanted back.
    async fn prepare_absence(&self, name: &ObjectName, work: &mut Work) -> Result<()> {
        if work.exists { Box::pin(self.prepare(name, work, ObjectOp::Remove)).await } else { Ok(()) }
    }

    async fn prepare_rollback(&self, name: &ObjectName, work: &mut Work, snap: u64) -> Result<()> {
        // Of what is not there nothing can come back.
        let Some(object) = work.object.clone() else { return self.prepare_absence(name, work).await };
        let seen = object.state().snap_seq;
        if snap > seen {
            // No write since the snapshot: it shows what the head was before this transaction.
            let (exists, size) = (object.state().exists, object.state().size);
            work.blocks.clear();
            work.kv.clear();
            work.base = Some(HEAD);
            (work.exists, work.size) = (exists, size);
            return Ok(());
        }
        let find = |clone: &&crate::object::CloneState| clone.snaps.contains(&snap);
        let found = object.state().clones.iter().find(find).map(|clone| (clone.id, clone.size));
        let Some((clone, size)) = found else { return self.prepare_absence(name, work).await };
        self.clear_kv(work).await?;
        work.kv.extend(self.all_kv(object.oid, clone).await?.into_iter().map(|(key, value)| (key, Some(value))));
        work.blocks.clear();
        work.base = Some(clone);
        (work.exists, work.size) = (true, size);
        Ok(())
    }

    /// Applies what was worked out, and puts it into the log as one.
    fn commit(&self, name: &ObjectName, mut work: Work, snapc: Option<&SnapContext>) -> Result<(u64, u64)> {
        // A snapshot that was given up while this waited is in memory still, and gets no clone that nobody would trim.
        work.kept_snaps.retain(|&snap| !matches!(self.lookup_cached(&keys::snap_removed(snap)), Some(Some(_))));
        let added = self.bytes_added(&work);
        if added > self.available() {
            return Err(self.full());
        }
        if let Some(object) = work.object.as_ref().filter(|_| !work.kept_snaps.is_empty()) {
            // The record with all its clones is one blob, and a blob lies in one segment.
            let clones = object.state().clones.len() + 1;
            let snaps: usize = object.state().clones.iter().map(|clone| clone.snaps.len()).sum();
            let pages: usize = object.state().clones.iter().map(|clone| clone.map.pages().len()).sum();
            let kept = object.state().head.pages().len();
            let bytes = 20 * clones + 8 * (snaps + work.kept_snaps.len()) + BlobPtr::SIZE * (pages + kept);
            if bytes > self.superblock.segment_size as usize / 4 {
                let text = format!("{name}: {clones} snapshots of it are more than its record can hold");
                return Err(Error::new(ErrorKind::NoSpace, text));
            }
        }
        let version = self.version.get() + 1;
        let log = self.log();
        log.begin_transaction();
        let object = match work.object {
            Some(object) => object,
            None if work.exists => self.create(name),
            None => {
                // Nothing came of it: it never was, or it was made and removed again.
                self.version.set(version);
                return Ok((version, log.end_transaction()));
            }
        };
        if let Some(snapc) = snapc {
            self.keep_for_snapshots(&object, snapc.seq, work.kept_snaps, work.kept_kv);
        }
        let oid = object.oid;
        match work.base {
            Some(HEAD) => {}
            Some(clone) => self.perform(&object, Entry::Rollback { oid, clone, version }),
            None if object.state().exists && work.exists => {
                let count = object.state().head.blocks();
                self.perform(&object, Entry::Unmap { oid, start: 0, count, size: 0, version });
            }
            None => {}
        }
        for (key, value) in work.kv {
            self.commit_kv(&object, HEAD, key, value);
        }
        if work.exists {
            let size = work.size;
            self.commit_blocks(&object, work.blocks, size, version);
            let state = object.state();
            let settled = state.exists && state.size == size && state.version == version;
            drop(state);
            if !settled {
                self.perform(&object, Entry::Unmap { oid, start: 0, count: 0, size, version });
            }
        } else if object.state().exists {
            self.perform(&object, Entry::Remove { oid, version });
        }
        self.version.set(version);
        let seq = log.end_transaction();
        self.after_write();
        Ok((version, seq))
    }

    /// Bytes by which what is stored grows, at most.
    fn bytes_added(&self, work: &Work) -> u64 {
        let kv: usize =
            work.kv.iter().map(|(key, value)| value.as_ref().map_or(0, |value| key.len() + value.len())).sum();
        let blocks = work.blocks.iter().filter(|(block, data)| {
            let stored = || {
                let Some(object) = work.object.as_ref().filter(|_| work.base == Some(HEAD)) else { return false };
                let state = object.state();
                let slot = state.head.get(**block);
                // What a snapshot keeps is not given up when it is overwritten.
                slot.block != 0 && work.kept_snaps.is_empty() && !state.is_shared(HEAD, **block, slot)
            };
            data.is_some() && !stored()
        });
        let kept: usize = work.kept_kv.iter().map(|(key, value)| key.len() + value.len()).sum();
        (kv + kept) as u64 + blocks.count() as u64 * BLOCK64
    }

    /// Keeps the head as a clone if there are snapshots that it has not seen.
    fn keep_for_snapshots(&self, object: &Rc<Object>, seq: u64, snaps: Vec<u64>, kv: Vec<(Vec<u8>, Vec<u8>)>) {
        if seq <= object.state().snap_seq {
            return;
        }
        let made = !snaps.is_empty();
        self.perform(object, Entry::Clone { oid: object.oid, seq, snaps });
        if made {
            kv.into_iter().for_each(|(key, value)| self.commit_kv(object, seq, key, Some(value)));
        }
    }

    fn commit_kv(&self, object: &Rc<Object>, of: u64, key: Vec<u8>, value: Option<Vec<u8>>) {
        let oid = object.oid;
        match value {
            None => self.perform(object, Entry::KvRemove { oid, of, key }),
            Some(value) if value.len() <= VALUE_INLINE_MAX => {
                self.perform(object, Entry::KvSet { oid, of, key, value })
            }
            Some(value) => {
                self.mark_dirty(object);
                let (len, crc) = (value.len() as u32, crc32c(&value));
                let log = self.log();
                log.append_blob(&value, |at| Entry::KvSetLong { oid, of, key: key.clone(), at, len, crc });
                self.apply(object, &Entry::KvSetLong { oid, of, key, at: 0, len, crc }, 0, Some(value));
            }
        }
    }

    /// Takes keys and then snapshots away from a clone, as one.
    pub fn trim_clone(&self, object: &Rc<Object>, clone: u64, snaps: Vec<u64>, kv: Vec<Vec<u8>>) {
        let log = self.log();
        log.begin_transaction();
        kv.into_iter().for_each(|key| self.commit_kv(object, clone, key, None));
        self.perform(object, Entry::CloneSnaps { oid: object.oid, clone, snaps });
        log.end_transaction();
        self.after_write();
    }

    fn commit_blocks(&self, object: &Rc<Object>, blocks: BTreeMap<u32, Option<BufList>>, size: u64, version: u64) {
        let oid = object.oid;
        let mut holes = Runs::new(blocks.iter().filter(|(_, data)| data.is_none()).map(|(&block, _)| block));
        while let Some((start, count)) = holes.next() {
            if start < object.state().head.blocks() {
                self.perform(object, Entry::Unmap { oid, start, count, size, version });
            }
        }
        let mut run: Option<(u32, BufList)> = None;
        for (block, data) in blocks {
            let Some(data) = data else { continue };
            match &mut run {
                Some((start, list)) if *start + (list.len() / BLOCK) as u32 == block => list.append(data),
                _ => {
                    if let Some((start, list)) = run.replace((block, data)) {
                        self.write_blocks(object, start, &list, size, version);
                    }
                }
            }
        }
        if let Some((start, list)) = run {
            self.write_blocks(object, start, &list, size, version);
        }
    }

    /// Wakes who keeps the store in shape, if there is reason.
    pub fn after_write(&self) {
        // What was overwritten since the cleaner gave up may be worth its while.
        let patience = 2 * self.segments.borrow().geometry.segment_size;
        if self.stuck.get() && self.log().bytes_appended() - self.stuck_at.get() >= patience {
            self.stuck.set(false);
        }
        if self.wants_checkpoint() || self.wants_cleaning() {
            self.wake_cleaner.notify_all();
        }
    }
}

/// CRC32C of each block of buffers that hold whole blocks together.
pub fn block_crcs(bufs: &[Buf]) -> Vec<u32> {
    let mut out = Vec::with_capacity(bufs.iter().map(|buf| buf.len()).sum::<usize>() / BLOCK);
    if bufs.iter().all(|buf| buf.len().is_multiple_of(BLOCK)) {
        bufs.iter().for_each(|buf| out.extend(buf.chunks_exact(BLOCK).map(crc32c)));
        return out;
    }
    let list: BufList = bufs.iter().cloned().collect();
    for at in (0..list.len()).step_by(BLOCK) {
        let block = list.slice(at..at + BLOCK);
        out.push(forebay_accel::crc32c::crc32c_parts(block.parts().iter().map(|part| &part[..])));
    }
    out
}

/// Bytes that a transaction will append to the log, about.
fn bytes_appended(work: &Work) -> u64 {
    let blocks = work.blocks.values().flatten().count() as u64 * BLOCK64;
    let kept = work.kept_kv.iter().map(|(key, value)| key.len() + value.len() + 64);
    let kv = work.kv.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Vec::len) + 64);
    // Values fill the ends of segments badly.
    blocks + 2 * kept.chain(kv).sum::<usize>() as u64
}

fn is_guard(op: &ObjectOp) -> bool {
    use ObjectOp::{AssertExists, AssertVersion, Compare, KvCompare};
    matches!(op, AssertExists | AssertVersion(_) | Compare { .. } | KvCompare { .. })
}

fn check_name(name: &ObjectName) -> Result<()> {
    if name.name().is_empty() || name.name().len() > ObjectName::LEN_MAX || name.namespace().len() > ObjectName::LEN_MAX
    {
        let text = format!("an object's name has 1 to {} bytes", ObjectName::LEN_MAX);
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

/// Joins ascending numbers into runs.
struct Runs<I: Iterator<Item = u32>> {
    rest: std::iter::Peekable<I>,
}

impl<I: Iterator<Item = u32>> Runs<I> {
    fn new(numbers: I) -> Self {
        Self { rest: numbers.peekable() }
    }

    fn next(&mut self) -> Option<(u32, u32)> {
        let start = self.rest.next()?;
        let mut count = 1;
        while self.rest.next_if_eq(&(start + count)).is_some() {
            count += 1;
        }
        Some((start, count))
    }
}
