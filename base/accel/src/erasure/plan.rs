//! Coefficients prepared for a tier, and the schedule of passes over chunks of any number and length.
//!
//! What a schedule decides:
//! - Up to eight outputs leave one pass over the sources.  More take several, tile by tile, so that memory is still
//!   read once.
//! - Where the chunks are too large for the caches, outputs are stored past them, which spares reading what is about
//!   to be overwritten.  That takes aligned lines: a misalignment that all outputs share is walked off first.
//! - A processor's prefetcher follows a limited number of streams well; with many sources past the caches each is
//!   read a line at a time, unless they all begin at the same place of a page, where that is slower still.

use std::mem::MaybeUninit;

use super::checksummed::{self, ChecksumKernel, Sum};
use super::pass::{ErasureJob, ErasureKernels, OUTPUTS_MAX, Pass};
use super::steps::Steps;
use crate::tier::Tier;
use crate::vector;

/// Maximum number of sources of a plan: `k` of 32, or old and new of as many columns.
pub(crate) const SOURCES_MAX: usize = 64;

/// Length of a tile in bytes: alternating passes process one tile each.
const TILE: usize = 4096;

/// Sources up to which wide steps are faster than narrow ones past the caches.
const WIDE_SOURCES_MAX: usize = 12;

/// Placement of chunks and of their outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Placement {
    /// Placement by size: a stripe larger than a processor's own caches goes to memory.
    #[default]
    Auto,
    /// Outputs are stored into the caches, because they are read again soon.
    Cached,
    /// Outputs are stored past the caches: they are not read again soon, or are too large to stay.
    Memory,
}

impl Placement {
    /// Replaces [`Placement::Auto`] by the placement for a stripe of `stripe` bytes.
    pub(crate) fn judge(self, stripe: usize) -> Self {
        match self {
            Placement::Auto if stripe > CACHED_BYTES_MAX => Placement::Memory,
            Placement::Auto => Placement::Cached,
            decided => decided,
        }
    }
}

/// Length of a cache line in bytes.
const LINE: usize = 64;

/// Length of a page in bytes: the offset in it is the offset in a first-level cache.
const PAGE: usize = 4096;

/// Maximum size in bytes, sources and outputs together, of a stripe that is assumed to live in the caches: twice the
/// size of a core's second-level cache on current servers.
const CACHED_BYTES_MAX: usize = 2 << 20;

/// Coefficients for some number of sources and outputs, ready to be used.
pub(crate) struct ErasurePlan {
    groups: Vec<Group>,
}

/// Up to [`OUTPUTS_MAX`] outputs, which one pass makes.
struct Group {
    wide: Pass,
    narrow: Pass,
    /// Kernel with checksums, in tiers that have it.
    checksummed: Option<ChecksumKernel>,
    outputs: usize,
    /// Tables for all outputs of the first source, then of the second, ...
    tables: Vec<u64>,
    /// Words from one source's tables to the next one's.
    stride: usize,
}

impl ErasurePlan {
    /// Makes a plan for `rows`: a row of `sources` coefficients for each output.  The processor has the tier.
    pub(crate) fn new(tier: Tier, steps: Steps, sources: usize, rows: &[u8]) -> Self {
        assert!(tier.is_available() && (1..=SOURCES_MAX).contains(&sources) && rows.len().is_multiple_of(sources));
        let kernels = ErasureKernels::of(tier);
        let groups = rows.chunks(sources * OUTPUTS_MAX).map(|rows| {
            let outputs = rows.len() / sources;
            let ones = rows[..sources].iter().all(|&coefficient| coefficient == 1);
            let by_source = (0..sources).flat_map(|j| (0..outputs).map(move |i| rows[i * sources + j]));
            let tables = kernels.tables(by_source);
            let vectors = steps.vectors(tier, outputs);
            Group {
                wide: kernels.select(outputs, ones, vectors),
                narrow: kernels.select(outputs, ones, 1),
                checksummed: kernels.fused(outputs, ones, vectors),
                outputs,
                stride: tables.len() / sources,
                tables,
            }
        });
        Self { groups: groups.collect() }
    }

    /// Makes the outputs, or adds to what they hold.
    ///
    /// # Safety
    /// Each of `inputs` (at most as many as the plan has sources) is readable and each of `outputs` (as many as the
    /// plan has) writable for `len` bytes; outputs overlap nothing else.
    pub(crate) unsafe fn run(
        &self,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        len: usize,
        accumulate: bool,
        placement: Placement,
    ) {
        debug_assert_eq!(outputs.len(), self.groups.iter().map(|group| group.outputs).sum::<usize>());
        let placement = placement.judge((inputs.len() + outputs.len()).saturating_mul(len));
        // SAFETY: passed on; every range below lies within `len`.
        unsafe {
            if placement == Placement::Memory {
                self.run_in_memory(inputs, outputs, len, accumulate);
            } else {
                self.run_tiled(inputs, outputs, len, accumulate, false);
            }
        }
    }

    /// Returns the kernel that makes the outputs and checksums in one loop; `None` where the tier has no such kernel,
    /// or the plan takes several passes.
    pub(super) fn checksummed(&self) -> Option<&ChecksumKernel> {
        match &self.groups[..] {
            [group] => group.checksummed.as_ref(),
            _ => None,
        }
    }

    /// Makes the outputs, and brings the sums of all chunks, sources first, up to date with them.
    ///
    /// # Safety
    /// As for [`ErasurePlan::run`]; [`ErasurePlan::checksummed`] is there, and `len` a multiple of
    /// [`checksummed::VECTOR`]; with `stream` the outputs are aligned to a line, and the caller fences.
    pub(super) unsafe fn run_checksummed(
        &self,
        inputs: &[*const u8],
        outputs: &[*mut u8],
        len: usize,
        stream: bool,
        sums: &mut [Sum],
    ) {
        let group = &self.groups[0];
        assert!(sums.len() == inputs.len() + outputs.len() && len.is_multiple_of(checksummed::VECTOR));
        if let Some(kernel) = &group.checksummed {
            let pass = if stream && scattered(inputs) { kernel.narrow } else { kernel.wide };
            // SAFETY: as in `Group::run`.
            unsafe { pass(&group.job(inputs, outputs, len, false, stream), sums.as_mut_ptr()) };
        }
    }

    /// Runs with stores past the caches, where the outputs' alignment allows it.
    ///
    /// # Safety
    /// As for [`ErasurePlan::run`].
    unsafe fn run_in_memory(&self, inputs: &[*const u8], outputs: &[*mut u8], len: usize, accumulate: bool) {
        let (head, aligned) = to_line(outputs, len);
        // SAFETY: head and rest lie within the chunks; behind the head the outputs are aligned.
        unsafe {
            if head > 0 {
                self.run_tiled(inputs, outputs, head, accumulate, false);
            }
            let (mut sources, mut targets) = (Room::new(), Room::new());
            let (inputs, outputs) = (sources.moved(inputs, head), targets.moved(outputs, head));
            self.run_tiled(inputs, outputs, len - head, accumulate, aligned);
            if aligned {
                vector::fence();
            }
        }
    }

    /// Runs every group of outputs, taking turns if there are several.
    ///
    /// # Safety
    /// As for [`ErasurePlan::run`]; with `stream` the outputs are aligned to a line.
    unsafe fn run_tiled(&self, inputs: &[*const u8], outputs: &[*mut u8], len: usize, accumulate: bool, stream: bool) {
        if let [group] = &self.groups[..] {
            // SAFETY: passed on.
            return unsafe { group.run(inputs, outputs, len, accumulate, stream) };
        }
        let (mut sources, mut targets) = (Room::new(), Room::new());
        for start in (0..len).step_by(TILE) {
            let count = TILE.min(len - start);
            let (inputs, mut outputs) = (sources.moved(inputs, start), targets.moved(outputs, start));
            for group in &self.groups {
                let (some, rest) = outputs.split_at(group.outputs);
                outputs = rest;
                // SAFETY: tiles lie within the chunks, and their starts are aligned if the chunks are.
                unsafe { group.run(inputs, some, count, accumulate, stream) };
            }
        }
    }
}

impl Group {
    /// Runs one pass.
    ///
    /// # Safety
    /// As for [`ErasurePlan::run_tiled`].
    unsafe fn run(&self, inputs: &[*const u8], outputs: &[*mut u8], len: usize, accumulate: bool, stream: bool) {
        let job = self.job(inputs, outputs, len, accumulate, stream);
        let pass = if stream && scattered(inputs) { self.narrow } else { self.wide };
        // SAFETY: the caller vouches for the pointers; there are tables for every source, and the processor has the
        // tier, or there were no plan.
        unsafe { pass(&job) }
    }

    /// Makes the job of one pass; it points into its arguments.
    fn job(&self, inputs: &[*const u8], outputs: &[*mut u8], len: usize, accumulate: bool, stream: bool) -> ErasureJob {
        debug_assert!(outputs.len() == self.outputs && inputs.len() * self.stride <= self.tables.len());
        ErasureJob {
            inputs: inputs.as_ptr(),
            sources: inputs.len(),
            outputs: outputs.as_ptr(),
            addends: if accumulate { outputs.as_ptr() } else { std::ptr::null() },
            tables: self.tables.as_ptr(),
            len,
            stream,
        }
    }
}

/// Returns true if there are many sources, and they begin at different places of their pages.
fn scattered(inputs: &[*const u8]) -> bool {
    let line = |input: &*const u8| *input as usize % PAGE / LINE;
    inputs.len() > WIDE_SOURCES_MAX && inputs.iter().any(|input| line(input) != line(&inputs[0]))
}

/// Returns how many of `len` bytes come before a line begins in all outputs, and whether they share one.
pub(super) fn to_line(outputs: &[*mut u8], len: usize) -> (usize, bool) {
    let phase = outputs[0] as usize % LINE;
    let aligned = outputs.iter().all(|&output| output as usize % LINE == phase);
    (if aligned { ((LINE - phase) % LINE).min(len) } else { 0 }, aligned)
}

/// Space for pointers to a stripe's chunks.  Only as much of it is touched as there are, and it is filled where it
/// lies: clearing or moving it would take longer than the smallest stripes.
pub(super) struct Room<P>([MaybeUninit<P>; SOURCES_MAX]);

/// Pointer to bytes, to be read or to be written.
pub(super) trait Pointer: Copy {
    fn moved(self, by: usize) -> Self;
}

impl Pointer for *const u8 {
    fn moved(self, by: usize) -> Self {
        self.wrapping_add(by)
    }
}

impl Pointer for *mut u8 {
    fn moved(self, by: usize) -> Self {
        self.wrapping_add(by)
    }
}

impl<P: Pointer> Room<P> {
    /// Makes an empty list.
    #[inline]
    pub(super) fn new() -> Self {
        Self([const { MaybeUninit::uninit() }; SOURCES_MAX])
    }

    /// Puts pointers into it, at most [`SOURCES_MAX`].
    #[inline]
    pub(super) fn fill(&mut self, all: impl Iterator<Item = P>) -> &[P] {
        let mut count = 0;
        for pointer in all {
            self.0[count].write(pointer);
            count += 1;
        }
        // SAFETY: the first `count` were written; `MaybeUninit` has its content's layout.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), count) }
    }

    /// Puts other pointers into it, all moved on by the same number of bytes.
    #[inline]
    pub(super) fn moved(&mut self, from: &[P], by: usize) -> &[P] {
        self.fill(from.iter().map(|pointer| pointer.moved(by)))
    }
}
