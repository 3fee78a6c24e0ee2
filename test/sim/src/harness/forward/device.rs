//! Volume in memory, as each of its owners has it open.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::reservation::{Keep, ReservationPeers, Reservations};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture,
    Result, SizeWatch,
};
use forebay_reactor::{Buf, sleep};

use crate::oracle::BLOCK;
use crate::rng::Rng;

/// Stored volume, which all owners share.
pub(super) struct VolumeContent {
    /// The blocks of hosts that coordinate, and a last one, to which hosts write that fence each other.
    bytes: RefCell<Vec<u8>>,
    /// Stored reservation table.
    pub(super) table: RefCell<Option<Vec<u8>>>,
    /// Keys of registrations whose preemption was acknowledged: no write of theirs may land.
    pub(super) preempted: RefCell<BTreeSet<u64>>,
    /// Key whose write has landed after that.
    pub(super) stale: Cell<Option<u64>>,
}

impl VolumeContent {
    pub(super) fn new(blocks: u64) -> Rc<Self> {
        Rc::new(Self {
            bytes: RefCell::new(vec![0; ((blocks + 1) * BLOCK) as usize]),
            table: RefCell::default(),
            preempted: RefCell::default(),
            stale: Cell::default(),
        })
    }

    /// Returns the offset of the block to which hosts write that fence each other.
    fn fenced_block(&self) -> u64 {
        self.bytes.borrow().len() as u64 - BLOCK
    }

    /// Returns a write of a host that has registered with a key.
    pub(super) fn fenced_write(&self, key: u64) -> BlockRequest {
        let data = Buf::copy_of(&key.to_le_bytes()).into();
        BlockRequest::Write { offset: self.fenced_block(), data, fua: false }
    }

    /// Notes a write that takes effect.
    fn written(&self, offset: u64, bytes: &[u8]) {
        if offset >= self.fenced_block()
            && let Ok(key) = bytes.try_into().map(u64::from_le_bytes)
            && self.preempted.borrow().contains(&key)
        {
            self.stale.set(Some(key));
        }
    }
}

/// Volume as one owner has it open.
pub(super) struct OpenedVolume {
    state: Rc<OpenedState>,
    reservations: Reservations,
}

pub(super) struct OpenedState {
    content: Rc<VolumeContent>,
    delay: Duration,
    rng: RefCell<Rng>,
    /// The pool takes nothing more from this owner.
    pub(super) fenced: Cell<bool>,
    /// Set when the owner has given the volume up: a request that is executed then is a violation.
    pub(super) closed: Cell<bool>,
    pub(super) executing: Cell<usize>,
    pub(super) executed: Cell<u64>,
    pub(super) wrong: Cell<bool>,
}

impl OpenedVolume {
    pub(super) async fn open(
        content: &Rc<VolumeContent>,
        delay: Duration,
        rng: Rng,
    ) -> Result<(Rc<Self>, Rc<OpenedState>)> {
        let state = Rc::new(OpenedState {
            content: content.clone(),
            delay,
            rng: RefCell::new(rng),
            fenced: Cell::new(false),
            closed: Cell::new(false),
            executing: Cell::new(0),
            executed: Cell::new(0),
            wrong: Cell::new(false),
        });
        let (reservations, joint) = Reservations::joint(Rc::new(NothingKept), Rc::new(StoredInPool(state.clone())));
        joint.begin().await?;
        Ok((Rc::new(Self { state: state.clone(), reservations }), state))
    }
}

/// Storage of the table that is not used, as the pool has it.
struct NothingKept;

impl Keep for NothingKept {
    fn save(&self, _table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Table in the pool, which an owner changes as long as it is not fenced.
struct StoredInPool(Rc<OpenedState>);

impl ReservationPeers for StoredInPool {
    fn claim(&self) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn load(&self) -> LocalFuture<Result<Option<Vec<u8>>>> {
        Box::pin(std::future::ready(Ok(self.0.content.table.borrow().clone())))
    }

    fn replace(&self, before: Option<Vec<u8>>, after: Vec<u8>) -> LocalFuture<Result<()>> {
        let state = self.0.clone();
        Box::pin(async move {
            let delays = (state.draw_delay(), state.draw_delay());
            sleep(delays.0).await;
            state.check_fenced()?;
            if state.closed.get() {
                state.wrong.set(true);
            }
            if *state.content.table.borrow() != before {
                return Err(Error::new(ErrorKind::Guard, "another table is stored"));
            }
            *state.content.table.borrow_mut() = Some(after);
            sleep(delays.1).await;
            state.check_fenced()
        })
    }

    fn announce(&self) -> LocalFuture<()> {
        Box::pin(std::future::ready(()))
    }

    fn knows(&self, _incarnation: u64) -> LocalFuture<Result<bool>> {
        // The former owner is gone: what is not persistent is lost.
        Box::pin(std::future::ready(Ok(false)))
    }
}

impl OpenedState {
    fn check_fenced(&self) -> Result<()> {
        match self.fenced.get() {
            true => Err(Error::new(ErrorKind::Fenced, "the pool refuses this owner")),
            false => Ok(()),
        }
    }

    fn draw_delay(&self) -> Duration {
        let mut rng = self.rng.borrow_mut();
        // Most are short, so that one that is not is overtaken.
        let longest = self.delay.as_micros() as u64;
        let longest = if rng.one_in(4) { longest } else { longest / 20 };
        Duration::from_micros(rng.below(longest + 1))
    }

    fn execute(&self, request: BlockRequest) -> Result<BlockReply> {
        self.check_fenced()?;
        if self.closed.get() {
            self.wrong.set(true);
        }
        self.executed.set(self.executed.get() + 1);
        let mut bytes = self.content.bytes.borrow_mut();
        let range = |offset: u64, len: usize| offset as usize..offset as usize + len;
        match request {
            BlockRequest::Read(Extent { offset, len }) => {
                let data = Buf::copy_of(&bytes[range(offset, len as usize)]);
                return Ok(BlockReply::Data(data.into()));
            }
            BlockRequest::Write { offset, data, .. } => {
                data.copy_to(&mut bytes[range(offset, data.len())]);
                drop(bytes);
                self.content.written(offset, &data.to_vec());
            }
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => {
                bytes[range(extent.offset, extent.len as usize)].fill(0);
            }
            BlockRequest::CompareAndWrite { offset, expect, data, .. } => {
                let found = &mut bytes[range(offset, data.len())];
                let expect = expect.to_vec();
                if let Some(at) = (0..expect.len()).find(|&at| expect[at] != found[at]) {
                    return Err(Error::new(ErrorKind::Mismatch(at as u64), "comparing"));
                }
                data.copy_to(found);
            }
            BlockRequest::Flush => {}
        }
        Ok(BlockReply::Done)
    }
}

impl BlockDevice for OpenedVolume {
    fn geometry(&self) -> Geometry {
        let size = self.state.content.bytes.borrow().len() as u64;
        Geometry { size, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let state = self.state.clone();
        state.executing.set(state.executing.get() + 1);
        Box::pin(async move {
            let (before, after) = (state.draw_delay(), state.draw_delay());
            sleep(before).await;
            let result = state.execute(request);
            sleep(after).await;
            state.executing.set(state.executing.get() - 1);
            state.check_fenced()?;
            result
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        map.push(extent.offset, extent.len, ExtentState::Data);
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }

    fn reservations(&self) -> Option<Reservations> {
        Some(self.reservations.clone())
    }
}
