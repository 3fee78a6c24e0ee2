//! Volume in memory, as each of its owners has it open.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture,
    Result, SizeWatch,
};
use forebay_reactor::{Buf, sleep};

use crate::rng::Rng;

/// Content that all owners share.
pub(super) type VolumeContent = Rc<RefCell<Vec<u8>>>;

/// Volume as one owner has it open.
pub(super) struct OpenedVolume {
    state: Rc<OpenedState>,
}

pub(super) struct OpenedState {
    content: VolumeContent,
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
    pub(super) fn new(content: &VolumeContent, delay: Duration, rng: Rng) -> (Rc<Self>, Rc<OpenedState>) {
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
        (Rc::new(Self { state: state.clone() }), state)
    }
}

impl OpenedState {
    fn draw_delay(&self) -> Duration {
        let mut rng = self.rng.borrow_mut();
        // Most are short, so that one that is not is overtaken.
        let longest = self.delay.as_micros() as u64;
        let longest = if rng.one_in(4) { longest } else { longest / 20 };
        Duration::from_micros(rng.below(longest + 1))
    }

    fn execute(&self, request: BlockRequest) -> Result<BlockReply> {
        if self.fenced.get() {
            return Err(Error::new(ErrorKind::Fenced, "the pool refuses this owner"));
        }
        if self.closed.get() {
            self.wrong.set(true);
        }
        self.executed.set(self.executed.get() + 1);
        let mut bytes = self.content.borrow_mut();
        let range = |offset: u64, len: usize| offset as usize..offset as usize + len;
        match request {
            BlockRequest::Read(Extent { offset, len }) => {
                let data = Buf::copy_of(&bytes[range(offset, len as usize)]);
                return Ok(BlockReply::Data(data.into()));
            }
            BlockRequest::Write { offset, data, .. } => data.copy_to(&mut bytes[range(offset, data.len())]),
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
        let size = self.state.content.borrow().len() as u64;
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
            match state.fenced.get() {
                true => Err(Error::new(ErrorKind::Fenced, "the pool refuses this owner")),
                false => result,
            }
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
}
