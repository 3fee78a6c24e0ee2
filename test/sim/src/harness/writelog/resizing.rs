//! The volume's size changes while the log is at work.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockReply, BlockRequest, Extent, Result};
use forebay_reactor::sleep;
use forebay_writelog::WriteLog;

use super::backend::Backend;
use super::watched::Oracles;
use crate::oracle::BLOCK;
use crate::rng::Rng;
use crate::world::World;

/// Client that changes the size, and tells both oracles.
pub(super) struct Resizing {
    pub(super) log: Rc<WriteLog>,
    pub(super) backend: Rc<Backend>,
    pub(super) world: World,
    pub(super) oracles: Oracles,
    /// Size that the host was told.
    pub(super) told_size: Rc<Cell<u64>>,
    /// Largest size that is drawn.
    pub(super) most: u64,
    /// The backend fails now and then.
    pub(super) may_fail: bool,
    pub(super) rng: Rng,
}

impl Resizing {
    /// Changes the size this many times. Returns how often it shrank and grew.
    pub(super) async fn all(mut self, times: u64) -> Result<(u64, u64)> {
        let (mut shrunk, mut grown) = (0, 0);
        for _ in 0..times {
            sleep(Duration::from_micros(self.rng.below(20_000))).await;
            let (from, to) = (self.told_size.get(), self.draw());
            self.resize(from, to).await?;
            shrunk += u64::from(to < from);
            grown += u64::from(to > from);
        }
        Ok((shrunk, grown))
    }

    fn draw(&mut self) -> u64 {
        let size = self.rng.below(self.most / BLOCK + 1) * BLOCK;
        match self.rng.below(6) {
            0 => self.most,
            // An end within a block, now and then.
            1 => (size + self.rng.below(BLOCK / 512) * 512).min(self.most),
            _ => size,
        }
    }

    async fn resize(&mut self, from: u64, to: u64) -> Result<()> {
        let cut = Extent::new(to, from.saturating_sub(to));
        let zeroes = BlockRequest::WriteZeroes { extent: cut, no_unmap: false, fua: true };
        self.world.note(|| format!("resize from {from} to {to}"));
        self.oracles.blocks.borrow_mut().set_size(from.min(to), from.max(to));
        let tokens = (to < from).then(|| {
            (self.oracles.blocks.borrow_mut().cut_begins(cut), self.oracles.order.borrow_mut().submit(&zeroes))
        });
        // Cut short by an error the size is the old one, and part of the end may be gone: again.
        let mut result = self.go(from, to).await;
        while result.is_err() && self.may_fail && self.log.mode().is_on() && !self.world.is_off() {
            sleep(Duration::from_micros(self.rng.below(5_000))).await;
            result = self.go(from, to).await;
        }
        if self.world.is_off() {
            // The receiver is gone.
            std::future::pending::<()>().await;
        }
        self.world.note(|| format!("resized from {from} to {to}: {result:?}"));
        result?;
        let mut blocks = self.oracles.blocks.borrow_mut();
        if let Some((token, ordered)) = tokens {
            self.oracles.order.borrow_mut().complete(ordered, &Ok(BlockReply::Done));
            blocks.cut_ends(token, cut, &Ok(()));
        }
        blocks.set_size(to, to);
        self.told_size.set(to);
        Ok(())
    }

    async fn go(&self, from: u64, to: u64) -> Result<()> {
        if to >= from {
            return self.backend.resize(to, &self.world).await;
        }
        let shrinking = self.log.shrink(to).await?;
        let done = self.backend.resize(to, &self.world).await;
        drop(shrinking);
        done
    }
}
