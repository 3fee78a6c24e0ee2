//! Reconstruction of lost chunks.

use std::collections::HashMap;
use std::rc::Rc;

use super::chunks::{common_len, parts_len, walk};
use super::code::{Code, CodeError, K_MAX, M_MAX};
use super::matrix::{choose, recovery_rows};
use super::plan::{ErasurePlan, Placement, Room};

/// Plans a decoder remembers.  A plan takes 1 to 40 KiB; a cluster with one failed host knows a few dozen patterns.
const PLANS_MAX: usize = 256;

/// Chunks as bits; a code has at most 48.
type Set = u64;

/// Key that a plan is remembered by.  The order of what is wanted is part of it: it is the order of the plan's outputs.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Pattern {
    present: Set,
    want: [u8; M_MAX],
    wanted: u8,
}

/// Decoder of lost chunks, with a cache of the inverted matrices of recent loss patterns.
///
/// Belongs to one core, and costs little while unused.
pub struct ErasureDecoder {
    code: Code,
    plans: HashMap<Pattern, Remembered>,
    /// Pattern of the last call, which is usually that of the next one too.
    latest: Option<(Pattern, Rc<Recovery>)>,
    /// Counts the patterns that were looked up.
    now: u64,
}

/// Index of each source of a plan in the list of available chunks.
type Order = [u8; K_MAX];

struct Remembered {
    recovery: Rc<Recovery>,
    used: u64,
}

/// Recovery plan that computes some chunks from others.
struct Recovery {
    /// Indices of the chunks that are read, in the order of the plan's sources.
    chosen: Vec<usize>,
    plan: ErasurePlan,
}

impl ErasureDecoder {
    /// Makes a decoder that remembers nothing yet.
    pub fn new(code: Code) -> Self {
        Self { code, plans: HashMap::new(), latest: None, now: 0 }
    }

    /// Returns the code.
    pub fn code(&self) -> &Code {
        &self.code
    }

    /// Returns how many patterns of losses are remembered.
    pub fn remembered(&self) -> usize {
        self.plans.len()
    }

    /// Writes the chunks `want` from the chunks `have`, both with their numbers: 0 to k-1 are data, then comes parity.
    ///
    /// Reads at most `k` of the available chunks, those that come first in the code, and only as many as are needed.
    /// Lost chunks that are not wanted are not named.
    ///
    /// # Errors
    /// [`CodeError::Chunk`], [`CodeError::Length`], [`CodeError::Lost`]; then nothing was written.
    pub fn rebuild(&mut self, have: &[(usize, &[u8])], want: &mut [(usize, &mut [u8])]) -> Result<(), CodeError> {
        let len =
            common_len(have.iter().map(|(_, chunk)| chunk.len()).chain(want.iter().map(|(_, chunk)| chunk.len())))?;
        let Some((recovery, order)) = self.recovery(have.iter().map(|(at, _)| *at), want.iter().map(|(at, _)| *at))?
        else {
            return Ok(());
        };
        let order = &order[..self.code.k()];
        let (mut sources, mut targets) = (Room::new(), Room::new());
        let inputs = sources.fill(order.iter().map(|&at| have[usize::from(at)].1.as_ptr()));
        let outputs = targets.fill(want.iter_mut().map(|(_, chunk)| chunk.as_mut_ptr()));
        // SAFETY: every chunk has `len` bytes; what is written comes from exclusive references.
        unsafe { recovery.plan.run(inputs, outputs, len, false, Placement::Auto) };
        Ok(())
    }

    /// Does what [`ErasureDecoder::rebuild`] does, for chunks that lie in several parts each.
    ///
    /// # Errors
    /// As for [`ErasureDecoder::rebuild`]; lengths are those of whole chunks.
    pub fn rebuild_parts(
        &mut self,
        have: &[(usize, &[&[u8]])],
        want: &mut [(usize, &mut [&mut [u8]])],
    ) -> Result<(), CodeError> {
        let sources = have.iter().map(|(_, chunk)| parts_len(chunk));
        let len = common_len(sources.chain(want.iter().map(|(_, chunk)| parts_len(chunk))))?;
        let Some((recovery, order)) = self.recovery(have.iter().map(|(at, _)| *at), want.iter().map(|(at, _)| *at))?
        else {
            return Ok(());
        };
        let order = &order[..self.code.k()];
        let placement = Placement::Auto.judge((order.len() + want.len()).saturating_mul(len));
        let sources = order.iter().map(|&at| have[usize::from(at)].1);
        let outputs = want.iter_mut().map(|(_, chunk)| &mut **chunk);
        walk(sources, outputs, |inputs, outputs, count| {
            // SAFETY: the pointers are good for `count` bytes, and exclusive where they are written.
            unsafe { recovery.plan.run(inputs, outputs, count, false, placement) }
        });
        Ok(())
    }

    /// Finds how to make `want` of `have`, and where in `have` each source stands; `None` where nothing is wanted.
    fn recovery(
        &mut self,
        have: impl Iterator<Item = usize>,
        want: impl Iterator<Item = usize>,
    ) -> Result<Option<(Rc<Recovery>, Order)>, CodeError> {
        let chunks = self.code.k() + self.code.m();
        let mut places = [0u8; K_MAX + M_MAX];
        let mut pattern = Pattern { present: 0, want: [0; M_MAX], wanted: 0 };
        let mut named: Set = 0;
        let mut name = |chunk: usize| {
            if chunk >= chunks || named >> chunk & 1 == 1 {
                return Err(CodeError::Chunk(chunk));
            }
            named |= 1 << chunk;
            Ok(())
        };
        for (place, chunk) in have.enumerate() {
            name(chunk)?;
            pattern.present |= 1 << chunk;
            // No chunk is named twice, so places are fewer than chunks.
            places[chunk] = place as u8;
        }
        for chunk in want {
            name(chunk)?;
            // More than m lost chunks cannot be rebuilt.
            *pattern.want.get_mut(usize::from(pattern.wanted)).ok_or(CodeError::Lost)? = chunk as u8;
            pattern.wanted += 1;
        }
        if pattern.wanted == 0 {
            return Ok(None);
        }
        let recovery = match &self.latest {
            Some((latest, recovery)) if *latest == pattern => Rc::clone(recovery),
            _ => self.look_up(pattern)?,
        };
        let mut order = [0; K_MAX];
        order.iter_mut().zip(&recovery.chosen).for_each(|(place, &chunk)| *place = places[chunk]);
        Ok(Some((recovery, order)))
    }

    /// Finds the recovery of a pattern that differs from the last one.
    #[cold]
    fn look_up(&mut self, pattern: Pattern) -> Result<Rc<Recovery>, CodeError> {
        self.now += 1;
        let recovery = match self.plans.get_mut(&pattern) {
            Some(remembered) => {
                remembered.used = self.now;
                Rc::clone(&remembered.recovery)
            }
            None => {
                let want = &pattern.want[..usize::from(pattern.wanted)];
                let recovery = Rc::new(self.plan(pattern.present, want).ok_or(CodeError::Lost)?);
                if self.plans.len() == PLANS_MAX {
                    self.forget();
                }
                self.plans.insert(pattern, Remembered { recovery: Rc::clone(&recovery), used: self.now });
                recovery
            }
        };
        debug_assert_eq!(recovery.chosen.len(), self.code.k());
        self.latest = Some((pattern, Rc::clone(&recovery)));
        Ok(recovery)
    }

    /// Inverts what has to be inverted.
    fn plan(&self, present: Set, want: &[u8]) -> Option<Recovery> {
        let (k, chunks) = (self.code.k(), self.code.k() + self.code.m());
        let parity = self.code.parity_matrix();
        let want: Vec<usize> = want.iter().map(|&chunk| usize::from(chunk)).collect();
        let chosen = choose(parity, k, (0..chunks).filter(|chunk| present >> chunk & 1 == 1))?;
        let rows = recovery_rows(parity, k, &chosen, &want)?;
        Some(Recovery { plan: ErasurePlan::new(self.code.tier(), self.code.steps(), k, &rows), chosen })
    }

    /// Drops the pattern that was met longest ago.
    fn forget(&mut self) {
        let oldest = self.plans.iter().min_by_key(|(_, remembered)| remembered.used).map(|(pattern, _)| *pattern);
        if let Some(pattern) = oldest {
            self.plans.remove(&pattern);
        }
    }
}
