//! Encoding and checksumming in one pass over memory.
//!
//! Chunks are gone over in tiles that all fit into a core's own caches together.  A tile of every data chunk is
//! checksummed, which brings it in, strictly forwards; the parity's tiles are made of it and checksummed while they are
//! still there.  Where parity goes past the caches it is made in a tile on the stack, and checksummed on its way out.

use std::mem::MaybeUninit;

use super::code::{K_MAX, M_MAX};
use super::plan::{Placement, Plan, Shifted};
use crate::crc32c::Kernels;

/// Bytes of a tile: long enough for the checksum's full speed, and 48 of them are a fraction of a second-level cache.
const TILE: usize = 4096;

/// The checksums of a stripe's chunks, as far as they have come: raw registers, data first.
pub(super) type Registers = [u32; K_MAX + M_MAX];

/// A tile for each parity chunk.
#[repr(align(64))]
struct Stage([[MaybeUninit<u8>; TILE]; M_MAX]);

/// Makes `outputs` of `inputs`, `len` bytes of each, and brings the registers up to date with both.
///
/// # Safety
/// As for [`Plan::run`]; the processor has the tier of `kernels`.
pub(super) unsafe fn run(
    plan: &Plan,
    kernels: &Kernels,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    len: usize,
    placement: Placement,
    registers: &mut Registers,
) {
    let stripe = (inputs.len() + outputs.len()).saturating_mul(len);
    let memory = placement.judge(stripe) == Placement::Memory;
    let stream = memory && outputs.iter().all(|&output| (output as usize).is_multiple_of(64));
    let mut stage = Stage([[MaybeUninit::uninit(); TILE]; M_MAX]);
    let mut staged = [std::ptr::null_mut(); M_MAX];
    for (pointer, tile) in staged.iter_mut().zip(&mut stage.0) {
        *pointer = tile.as_mut_ptr().cast();
    }
    let staged = &staged[..outputs.len()];
    let (of_data, of_parity) = registers.split_at_mut(inputs.len());
    for start in (0..len).step_by(TILE) {
        let count = TILE.min(len - start);
        let inputs = Shifted::new(inputs, start);
        let outputs = Shifted::new(outputs, start);
        // SAFETY: tiles lie within the chunks and the stage; streamed outputs are aligned, since tiles are whole lines.
        unsafe {
            for (register, &input) in of_data.iter_mut().zip(inputs.get()) {
                *register = kernels.update_raw(*register, input, count);
            }
            let made = if stream { staged } else { outputs.get() };
            plan.run(inputs.get(), made, count, false, Placement::Cached);
            for ((register, &output), &made) in of_parity.iter_mut().zip(outputs.get()).zip(made) {
                *register = if stream {
                    kernels.stream_raw(*register, made, output, count)
                } else {
                    kernels.update_raw(*register, made, count)
                };
            }
        }
    }
    if stream {
        crate::crc32c::fence();
    }
}
