//! Device that records what hosts see of a volume, and what it may hold after that.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Extent, ExtentMap, Geometry, LocalFuture, Result, SizeWatch,
};

use super::BACKEND;
use crate::oracle::{BlockOracle, Expected, ORDER_SECTOR, OrderOracle};
use crate::workload::verify_blocks;
use crate::world::{CrashKind, World};

/// Both oracles of a volume: what its blocks may hold, and in which order its writes may show.
#[derive(Clone)]
pub(in crate::harness) struct Oracles {
    world: World,
    pub(in crate::harness) blocks: Rc<RefCell<BlockOracle>>,
    pub(in crate::harness) order: Rc<RefCell<OrderOracle>>,
    /// End of the life before this one.
    before: Rc<Cell<CrashKind>>,
}

impl Oracles {
    /// Creates the device of an empty volume of `size` bytes.
    pub(in crate::harness) fn new(world: &World, size: u64, expected: Expected) -> Self {
        let mut blocks = BlockOracle::new(expected);
        blocks.set_size(size, size);
        let (blocks, before) = (Rc::new(RefCell::new(blocks)), Rc::new(Cell::new(CrashKind::Power)));
        Self { world: world.clone(), blocks, order: Rc::default(), before }
    }

    /// Returns a device every request to which passes both; `strict`: what is answered lasts, flushed or not.
    pub(in crate::harness) fn watch(&self, inner: Rc<dyn BlockDevice>, strict: bool) -> Rc<dyn BlockDevice> {
        Rc::new(Watched { inner, oracles: self.clone(), strict })
    }

    /// Reads the first `span` bytes of a device: they hold what they may hold after the life before this one.
    pub(in crate::harness) async fn verify(&self, device: &dyn BlockDevice, span: u64) -> Result<()> {
        verify_blocks(device, &self.blocks, span, self.before.get()).await.map(drop)
    }

    /// Reads them of the backend, when nothing is left in the log.
    pub(in crate::harness) async fn verify_backend(&self, backend: &dyn BlockDevice, span: u64) -> Result<()> {
        verify_blocks(backend, &self.blocks, span, CrashKind::Power).await.map(drop)
    }

    /// Ends a life; `unprotected`: what a log acknowledged early and had not yet made last was on its way to the
    /// backend, and no log is there any more that makes it whole again.
    pub(in crate::harness) fn crash(&self, kind: CrashKind, unprotected: bool) {
        self.blocks.borrow_mut().crash(CrashKind::Power);
        if unprotected {
            self.blocks.borrow_mut().mix();
        }
        self.order.borrow_mut().crash();
        self.before.set(kind);
    }

    /// Returns the first violation that the host has seen.
    pub(in crate::harness) fn violation(&self) -> std::result::Result<(), String> {
        self.blocks.borrow().violation().map_or(Ok(()), |text| Err(text.to_owned()))
    }

    /// The backend alone is consistent, always.
    pub(in crate::harness) fn check_backend(&self) -> std::result::Result<(), String> {
        let read = |sector| self.world.peek(BACKEND, sector * ORDER_SECTOR, ORDER_SECTOR as usize).unwrap_or_default();
        self.order.borrow().check(read).map_err(|text| format!("the backend alone: {text}"))
    }
}

/// Device that the host sees: every request passes both oracles.
struct Watched {
    inner: Rc<dyn BlockDevice>,
    oracles: Oracles,
    /// Set when acknowledged writes are durable, flushed or not.
    strict: bool,
}

impl BlockDevice for Watched {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let mut told = request.clone();
        if self.strict {
            match &mut told {
                BlockRequest::Write { fua, .. } | BlockRequest::WriteZeroes { fua, .. } => *fua = true,
                BlockRequest::CompareAndWrite { fua, .. } => *fua = true,
                _ => {}
            }
        }
        let oracles = self.oracles.clone();
        let block = oracles.blocks.borrow_mut().submit(&told);
        let order = oracles.order.borrow_mut().submit(&told);
        let name = describe(&request);
        oracles.world.note(|| format!("submit {name}"));
        let answer = self.inner.submit(request);
        Box::pin(async move {
            let result = answer.await;
            if oracles.world.is_off() {
                // The receiver is gone.
                std::future::pending::<()>().await;
            }
            oracles.world.note(|| format!("answer {name}: {:?}", result.as_ref().map(drop)));
            oracles.blocks.borrow_mut().complete(block, &result);
            oracles.order.borrow_mut().complete(order, &result);
            result
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.inner.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// A request, for people.
pub(super) fn describe(request: &BlockRequest) -> String {
    match request {
        BlockRequest::Write { offset, data, fua } => {
            let what = crate::stamp::describe(*offset / 512 * 512, &data.to_vec());
            format!("write {} at {offset} fua {fua}: {what}", data.len())
        }
        BlockRequest::CompareAndWrite { offset, data, .. } => {
            format!("compare and write {} at {offset}: {}", data.len(), crate::stamp::describe(*offset, &data.to_vec()))
        }
        request => format!("{request:?}"),
    }
}
