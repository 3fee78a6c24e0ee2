//! Reed-Solomon code: its shape and matrix, encoding, and parity updates.

use std::ops::RangeInclusive;
use std::sync::Arc;

use super::chunks::{common_len, parts_len, walk};
use super::fused;
use super::matrix::{Construction, parity_rows};
use super::plan::{ErasurePlan, Placement, Room};
use super::steps::{self, Steps};
use crate::crc32c::Crc32cKernels;
use crate::tier::{Tier, TierError};

/// Minimum number of data chunks.
pub const K_MIN: usize = 2;

/// Maximum number of data chunks.
pub const K_MAX: usize = 32;

/// Maximum number of parity chunks.
pub const M_MAX: usize = 16;

/// Reason why chunks could not be encoded or rebuilt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodeError {
    /// Shape that no code has.
    #[error("a code has 2 to 32 data chunks and 1 to 16 parity chunks, not {k}/{m}")]
    Shape {
        /// Data chunks asked for.
        k: usize,
        /// Parity chunks asked for.
        m: usize,
    },
    /// Tier that cannot be used here.
    #[error(transparent)]
    Tier(#[from] TierError),
    /// Name that no loop shape has.
    #[error("unknown loop shape `{0}` for erasure coding; use one of: v4, v2, v1")]
    Steps(String),
    /// Number of chunks, or of places for checksums, that is not the code's.
    #[error("expected {expected} of {what}, got {found}")]
    Count {
        /// Kind: `data` or `parity` chunks, or places for a `checksum`.
        what: &'static str,
        /// Number that there must be.
        expected: usize,
        /// Number that there is.
        found: usize,
    },
    /// Chunks that differ in length.
    #[error("the chunks differ in length: {expected} bytes and {found} bytes")]
    Length {
        /// Length of the first chunk in bytes.
        expected: usize,
        /// Length of another chunk in bytes.
        found: usize,
    },
    /// Number of a chunk that is not in the code, or stands twice in the lists of a call.
    #[error("chunk {0} is out of range or was named twice")]
    Chunk(usize),
    /// Too few chunks are left: fewer than `k` chunks, or (only with [`Construction::Vandermonde`]) chunks whose
    /// rows are dependent.
    #[error("the remaining chunks do not suffice to reconstruct the lost ones")]
    Lost,
}

/// Reed-Solomon code, ready to encode.  Cloning is cheap.
#[derive(Clone)]
pub struct Code {
    inner: Arc<Inner>,
}

struct Inner {
    construction: Construction,
    k: usize,
    m: usize,
    tier: Tier,
    steps: Steps,
    /// Parity rows of the generator matrix, `m` of `k` bytes.
    parity: Vec<u8>,
    encode: ErasurePlan,
    crc: Crc32cKernels,
    /// Parity update plans, one per data chunk: the change of the parity from the sum of old and new content.
    updates: Vec<ErasurePlan>,
}

impl Code {
    /// Makes a code of `k` data and `m` parity chunks, for the tier in use.
    ///
    /// # Errors
    /// [`CodeError::Shape`]: `k` is not in 2..=32, or `m` not in 1..=16.
    pub fn new(construction: Construction, k: usize, m: usize) -> Result<Self, CodeError> {
        Self::with_tier(construction, k, m, Tier::current())
    }

    /// Makes a code that uses a certain tier.
    ///
    /// # Errors
    /// As for [`Code::new`], and [`CodeError::Tier`] where the processor lacks it.
    pub fn with_tier(construction: Construction, k: usize, m: usize, tier: Tier) -> Result<Self, CodeError> {
        Self::with_steps(construction, k, m, tier, Steps::Chosen)
    }

    /// Makes a code that uses a certain tier and loop shape, for tests and measurements; where a pass has too many
    /// outputs for the shape, it takes its default.
    ///
    /// # Errors
    /// As for [`Code::with_tier`], and [`CodeError::Steps`] for another name than those of [`Code::shapes`].
    pub fn with_shape(
        construction: Construction,
        k: usize,
        m: usize,
        tier: Tier,
        shape: &str,
    ) -> Result<Self, CodeError> {
        let steps = Steps::named(shape).ok_or_else(|| CodeError::Steps(shape.to_owned()))?;
        Self::with_steps(construction, k, m, tier, steps)
    }

    /// Lists the names of all loop shapes.
    pub fn shapes() -> impl Iterator<Item = &'static str> {
        steps::names()
    }

    fn with_steps(construction: Construction, k: usize, m: usize, tier: Tier, steps: Steps) -> Result<Self, CodeError> {
        const K: RangeInclusive<usize> = K_MIN..=K_MAX;
        if !K.contains(&k) || !(1..=M_MAX).contains(&m) {
            return Err(CodeError::Shape { k, m });
        }
        if !tier.is_available() {
            return Err(TierError::Absent(tier).into());
        }
        let parity = parity_rows(construction, k, m);
        let encode = ErasurePlan::new(tier, steps, k, &parity);
        let column = |at: usize| -> Vec<u8> { parity.chunks_exact(k).flat_map(|row| [row[at], row[at]]).collect() };
        let updates = (0..k).map(|at| ErasurePlan::new(tier, steps, 2, &column(at))).collect();
        Ok(Self {
            inner: Arc::new(Inner {
                construction,
                k,
                m,
                tier,
                steps,
                parity,
                encode,
                crc: Crc32cKernels::of(tier),
                updates,
            }),
        })
    }

    /// Returns the number of data chunks.
    pub fn k(&self) -> usize {
        self.inner.k
    }

    /// Returns the number of parity chunks, and so of losses that can be repaired.
    pub fn m(&self) -> usize {
        self.inner.m
    }

    /// Returns the construction of the coefficients.
    pub fn construction(&self) -> Construction {
        self.inner.construction
    }

    /// Returns the tier whose kernels are used.
    pub fn tier(&self) -> Tier {
        self.inner.tier
    }

    /// Returns the loop shape that its plans take.
    pub(super) fn steps(&self) -> Steps {
        self.inner.steps
    }

    /// Returns the coefficients of the parity: `m` rows of `k` bytes, as ISA-L and jerasure lay them out.
    pub fn parity_matrix(&self) -> &[u8] {
        &self.inner.parity
    }

    /// Encodes the parity of `data`: `k` chunks into `m` chunks, all of one length, of any alignment.
    ///
    /// # Errors
    /// [`CodeError::Count`], [`CodeError::Length`]; then nothing was written.
    pub fn encode(&self, data: &[&[u8]], parity: &mut [&mut [u8]]) -> Result<(), CodeError> {
        self.encode_to(data, parity, Placement::Auto)
    }

    /// Does what [`Code::encode`] does, told whether the parity should be left in the caches.
    ///
    /// # Errors
    /// As for [`Code::encode`].
    pub fn encode_to(&self, data: &[&[u8]], parity: &mut [&mut [u8]], placement: Placement) -> Result<(), CodeError> {
        self.counts(data.len(), parity.len())?;
        let len = common_len(data.iter().map(|chunk| chunk.len()).chain(parity.iter().map(|chunk| chunk.len())))?;
        let (mut sources, mut targets) = (Room::new(), Room::new());
        let inputs = sources.fill(data.iter().map(|chunk| chunk.as_ptr()));
        let outputs = targets.fill(parity.iter_mut().map(|chunk| chunk.as_mut_ptr()));
        // SAFETY: every chunk has `len` bytes; parity comes from exclusive references, so it overlaps nothing.
        unsafe { self.inner.encode.run(inputs, outputs, len, false, placement) };
        Ok(())
    }

    /// Does what [`Code::encode`] does, for chunks that lie in several parts each; where one chunk is cut says nothing
    /// about another.
    ///
    /// # Errors
    /// As for [`Code::encode`]; lengths are those of whole chunks.
    pub fn encode_parts(&self, data: &[&[&[u8]]], parity: &mut [&mut [&mut [u8]]]) -> Result<(), CodeError> {
        self.each_run(data, parity, |inputs, outputs, count, placement| {
            // SAFETY: `each_run` hands out pointers that are good for `count` bytes and exclusive where written.
            unsafe { self.inner.encode.run(inputs, outputs, count, false, placement) }
        })
    }

    /// Calls `run` for every run of bytes over which all chunks are contiguous.
    fn each_run(
        &self,
        data: &[&[&[u8]]],
        parity: &mut [&mut [&mut [u8]]],
        mut run: impl FnMut(&[*const u8], &[*mut u8], usize, Placement),
    ) -> Result<(), CodeError> {
        self.counts(data.len(), parity.len())?;
        let sources = data.iter().map(|chunk| parts_len(chunk));
        let len = common_len(sources.chain(parity.iter().map(|chunk| parts_len(chunk))))?;
        let placement = Placement::Auto.judge((data.len() + parity.len()).saturating_mul(len));
        let outputs = parity.iter_mut().map(|chunk| &mut **chunk);
        walk(data.iter().copied(), outputs, |inputs, outputs, count| run(inputs, outputs, count, placement));
        Ok(())
    }

    /// Makes the parity as [`Code::encode`] does, and the CRC32C of every chunk, data first, in one pass over memory.
    ///
    /// # Errors
    /// As for [`Code::encode`], and [`CodeError::Count`] where `crcs` has not `k + m` places.
    pub fn encode_checksummed(
        &self,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
        crcs: &mut [u32],
    ) -> Result<(), CodeError> {
        self.encode_checksummed_to(data, parity, crcs, Placement::Auto)
    }

    /// Does what [`Code::encode_checksummed`] does, told whether the parity should be left in the caches.
    ///
    /// # Errors
    /// As for [`Code::encode_checksummed`].
    pub fn encode_checksummed_to(
        &self,
        data: &[&[u8]],
        parity: &mut [&mut [u8]],
        crcs: &mut [u32],
        placement: Placement,
    ) -> Result<(), CodeError> {
        self.counts(data.len(), parity.len())?;
        self.places(crcs.len())?;
        let len = common_len(data.iter().map(|chunk| chunk.len()).chain(parity.iter().map(|chunk| chunk.len())))?;
        let (mut sources, mut targets) = (Room::new(), Room::new());
        let inputs = sources.fill(data.iter().map(|chunk| chunk.as_ptr()));
        let outputs = targets.fill(parity.iter_mut().map(|chunk| chunk.as_mut_ptr()));
        let mut registers = [!0; K_MAX + M_MAX];
        let inner = &*self.inner;
        // SAFETY: every chunk has `len` bytes; parity comes from exclusive references, so it overlaps nothing.
        unsafe {
            fused::run(&inner.encode, &inner.crc, inputs, outputs, len, placement, &mut registers);
        }
        crcs.iter_mut().zip(registers).for_each(|(crc, register)| *crc = !register);
        Ok(())
    }

    /// Does what [`Code::encode_checksummed`] does, for chunks that lie in several parts each.
    ///
    /// # Errors
    /// As for [`Code::encode_checksummed`]; lengths are those of whole chunks.
    pub fn encode_parts_checksummed(
        &self,
        data: &[&[&[u8]]],
        parity: &mut [&mut [&mut [u8]]],
        crcs: &mut [u32],
    ) -> Result<(), CodeError> {
        self.places(crcs.len())?;
        let mut registers = [!0; K_MAX + M_MAX];
        let inner = &*self.inner;
        self.each_run(data, parity, |inputs, outputs, count, placement| {
            // SAFETY: `each_run` hands out pointers that are good for `count` bytes and exclusive where written.
            unsafe { fused::run(&inner.encode, &inner.crc, inputs, outputs, count, placement, &mut registers) }
        })?;
        crcs.iter_mut().zip(registers).for_each(|(crc, register)| *crc = !register);
        Ok(())
    }

    /// Brings parity up to date after a part of one data chunk has changed from `old` to `new`: `parity` holds the same
    /// range of each parity chunk.
    ///
    /// # Errors
    /// [`CodeError::Chunk`] where `chunk` is no data chunk; [`CodeError::Count`], [`CodeError::Length`].  Then nothing
    /// was written.
    pub fn update(&self, chunk: usize, old: &[u8], new: &[u8], parity: &mut [&mut [u8]]) -> Result<(), CodeError> {
        self.change(chunk, &[old, new], parity)
    }

    /// Does what [`Code::update`] does, by the difference (the exclusive or) of old and new, for a caller that has
    /// computed it already.
    ///
    /// # Errors
    /// As for [`Code::update`].
    pub fn update_by(&self, chunk: usize, difference: &[u8], parity: &mut [&mut [u8]]) -> Result<(), CodeError> {
        self.change(chunk, &[difference], parity)
    }

    fn change(&self, chunk: usize, sources: &[&[u8]], parity: &mut [&mut [u8]]) -> Result<(), CodeError> {
        let plan = self.inner.updates.get(chunk).ok_or(CodeError::Chunk(chunk))?;
        self.counts(self.k(), parity.len())?;
        let lens = sources.iter().map(|source| source.len()).chain(parity.iter().map(|chunk| chunk.len()));
        let len = common_len(lens)?;
        let inputs: [*const u8; 2] = [sources[0].as_ptr(), sources[sources.len() - 1].as_ptr()];
        let mut targets = Room::new();
        let outputs = targets.fill(parity.iter_mut().map(|chunk| chunk.as_mut_ptr()));
        // SAFETY: everything has `len` bytes; parity comes from exclusive references.
        unsafe { plan.run(&inputs[..sources.len()], outputs, len, true, Placement::Auto) };
        Ok(())
    }

    fn places(&self, crcs: usize) -> Result<(), CodeError> {
        let expected = self.k() + self.m();
        if crcs == expected { Ok(()) } else { Err(CodeError::Count { what: "checksum", expected, found: crcs }) }
    }

    fn counts(&self, data: usize, parity: usize) -> Result<(), CodeError> {
        for (what, expected, found) in [("data", self.k(), data), ("parity", self.m(), parity)] {
            if expected != found {
                return Err(CodeError::Count { what, expected, found });
            }
        }
        Ok(())
    }
}

impl std::fmt::Debug for Code {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Code({:?} {}/{} on {})", self.construction(), self.k(), self.m(), self.tier())
    }
}
