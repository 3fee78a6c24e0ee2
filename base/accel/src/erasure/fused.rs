//! Encoding and checksumming in one pass over memory.
//!
//! Chunks are gone over in tiles.  A tile of every data chunk becomes a tile of every parity chunk, and all of them
//! are checksummed while they are still in a core's own caches.  Where a stripe comes from memory its tiles are longer:
//! a prefetcher begins anew with every tile of every chunk.

use super::code::{K_MAX, M_MAX};
use super::plan::{Placement, Plan, Shifted};
use crate::crc32c::Kernels;

/// Bytes of a tile of a stripe that is in the caches: long enough for the checksum's full speed.
const TILE: usize = 4096;

/// Bytes of all tiles together where a stripe comes from memory: half of a second-level cache.
const TILES: usize = 512 << 10;

/// The checksums of a stripe's chunks, as far as they have come: raw registers, data first.
pub(super) type Registers = [u32; K_MAX + M_MAX];

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
    let chunks = inputs.len() + outputs.len();
    let tile = match placement.judge(chunks.saturating_mul(len)) {
        Placement::Memory => (TILES / chunks / TILE * TILE).max(TILE),
        _ => TILE,
    };
    let (of_data, of_parity) = registers.split_at_mut(inputs.len());
    for start in (0..len).step_by(tile) {
        let count = tile.min(len - start);
        let inputs = Shifted::new(inputs, start);
        let outputs = Shifted::new(outputs, start);
        // SAFETY: tiles lie within the chunks.
        unsafe {
            plan.run(inputs.get(), outputs.get(), count, false, Placement::Cached);
            for (register, &input) in of_data.iter_mut().zip(inputs.get()) {
                *register = kernels.update_raw(*register, input, count);
            }
            for (register, &output) in of_parity.iter_mut().zip(outputs.get()) {
                *register = kernels.update_raw(*register, output, count);
            }
        }
    }
}
