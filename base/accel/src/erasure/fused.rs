//! Encoding and checksumming in one pass over memory.
//!
//! Where the tier has a kernel that does both ([`super::checksummed`]), and one pass makes all parity, it goes over
//! whole vectors; the odd bytes at the ends are done apart.  Elsewhere chunks are gone over in tiles.  A tile of every
//! data chunk becomes a tile of every parity chunk, and all of them are checksummed while they are still in a core's
//! own caches.  Where a stripe comes from memory its tiles are longer: a prefetcher restarts with every tile of every
//! chunk.

use super::checksummed::{Sum, VECTOR};
use super::code::{K_MAX, M_MAX};
use super::plan::{ErasurePlan, Placement, Room, to_line};
use crate::crc32c::Crc32cKernels;

/// Length in bytes of a tile of a stripe in the caches: long enough for the checksum's full speed.
const TILE: usize = 4096;

/// Total length in bytes of all tiles of a stripe in memory: half of a second-level cache.
const TILES: usize = 512 << 10;

/// Checksums of a stripe's chunks, as far as they have come: raw registers, data first.
pub(super) type Registers = [u32; K_MAX + M_MAX];

/// Makes `outputs` of `inputs`, `len` bytes of each, and brings the registers up to date with both.
///
/// # Safety
/// As for [`ErasurePlan::run`]; the processor has the tier of `kernels`.
pub(super) unsafe fn run(
    plan: &ErasurePlan,
    kernels: &Crc32cKernels,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    len: usize,
    placement: Placement,
    registers: &mut Registers,
) {
    let chunks = inputs.len() + outputs.len();
    let placement = placement.judge(chunks.saturating_mul(len));
    let Some(kernel) = plan.checksummed().filter(|_| len >= 2 * VECTOR) else {
        let tile = match placement {
            Placement::Memory => (TILES / chunks / TILE * TILE).max(TILE),
            _ => TILE,
        };
        // SAFETY: passed on.
        return unsafe { tiles(plan, kernels, inputs, outputs, len, tile, registers) };
    };
    let (head, stream) = match placement {
        Placement::Memory => to_line(outputs, len),
        _ => (0, false),
    };
    let body = (len - head) / VECTOR * VECTOR;
    // SAFETY: head, body and what is left make up the chunks; behind the head the outputs are aligned.
    unsafe {
        tiles(plan, kernels, inputs, outputs, head, TILE, registers);
        let mut sums: [Sum; K_MAX + M_MAX] = [Sum::EMPTY; K_MAX + M_MAX];
        let sums = &mut sums[..chunks];
        sums.iter_mut().zip(&*registers).for_each(|(sum, &register)| *sum = kernel.begin(register));
        let (mut sources, mut targets) = (Room::new(), Room::new());
        plan.run_checksummed(sources.moved(inputs, head), targets.moved(outputs, head), body, stream, sums);
        if stream {
            crate::vector::fence();
        }
        registers.iter_mut().zip(&*sums).for_each(|(register, sum)| *register = kernel.end(sum));
        let (inputs, outputs) = (sources.moved(inputs, head + body), targets.moved(outputs, head + body));
        tiles(plan, kernels, inputs, outputs, len - head - body, TILE, registers);
    }
}

/// Processes the chunks tile by tile: the products, then the checksums.
///
/// # Safety
/// As for [`run`].
unsafe fn tiles(
    plan: &ErasurePlan,
    kernels: &Crc32cKernels,
    inputs: &[*const u8],
    outputs: &[*mut u8],
    len: usize,
    tile: usize,
    registers: &mut Registers,
) {
    let (of_data, of_parity) = registers.split_at_mut(inputs.len());
    let (mut sources, mut targets) = (Room::new(), Room::new());
    for start in (0..len).step_by(tile) {
        let count = tile.min(len - start);
        let (inputs, outputs) = (sources.moved(inputs, start), targets.moved(outputs, start));
        // SAFETY: tiles lie within the chunks.
        unsafe {
            plan.run(inputs, outputs, count, false, Placement::Cached);
            for (register, &input) in of_data.iter_mut().zip(inputs) {
                *register = kernels.update_raw(*register, input, count);
            }
            for (register, &output) in of_parity.iter_mut().zip(outputs) {
                *register = kernels.update_raw(*register, output, count);
            }
        }
    }
}
