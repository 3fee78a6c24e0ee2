//! Reed-Solomon erasure coding over GF(2^8) modulo 0x11d.
//!
//! `k` data chunks and `m` parity chunks of one length make a stripe; any `k` of them give back the others.  Chunks are
//! byte for byte those of ISA-L and jerasure (see [`Construction`]), so that they mix with what Ceph's plugins wrote.
//!
//! - [`Code`] encodes, and updates parity for a partial overwrite.  It is immutable: share it, or clone it, freely.
//!   [`Code::encode_checksummed`] gives the CRC32C of every chunk as well, in the same pass over memory.
//! - [`Decoder`] rebuilds lost chunks, data or parity, and remembers the matrices it inverted.  It belongs to one core.
//!
//! ```
//! use forebay_accel::erasure::{Code, Construction, Decoder};
//! let code = Code::new(Construction::Vandermonde, 2, 1)?;
//! let mut parity = [0; 5];
//! code.encode(&[b"quick", b"brown"], &mut [&mut parity])?;
//! let mut lost = [0; 5];
//! Decoder::new(code).rebuild(&[(1, b"brown"), (2, &parity)], &mut [(0, &mut lost)])?;
//! assert_eq!(&lost, b"quick");
//! # Ok::<(), forebay_accel::erasure::CodeError>(())
//! ```

mod both;
mod chunks;
mod code;
mod decode;
mod fused;
pub(crate) mod gf;
mod matrix;
mod pass;
mod plan;

pub use code::{Code, CodeError, K_MAX, K_MIN, M_MAX};
pub use decode::Decoder;
pub use matrix::Construction;
pub use plan::Placement;

use crate::perf::{Kernel, Variant};
use crate::tier::Tier;

/// For `forebay perf accel`: bytes of data encoded, and bytes of data read to rebuild.
pub(crate) fn perf() -> Vec<Kernel> {
    const LEN: usize = 16 << 10;
    let encode = |k: usize, m: usize| {
        let variant = move |tier: Tier| {
            let code = Code::with_tier(Construction::Vandermonde, k, m, tier).expect("an available tier");
            let data = vec![vec![0x5Au8; LEN]; k];
            let mut parity = vec![vec![0u8; LEN]; m];
            Variant::new(tier.name(), move || {
                let sources: Vec<&[u8]> = data.iter().map(|chunk| &chunk[..]).collect();
                let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
                code.encode(&sources, &mut outputs).expect("chunks of the right shape");
                k * LEN
            })
        };
        let variants = Tier::available().map(variant).collect();
        Kernel { name: format!("erasure encode {k}/{m} 16 KiB"), chosen: Tier::current().name().into(), variants }
    };
    let rebuild = |k: usize, m: usize| {
        let variant = move |tier: Tier| {
            let code = Code::with_tier(Construction::Vandermonde, k, m, tier).expect("an available tier");
            let mut decoder = Decoder::new(code);
            let left = vec![vec![0x5Au8; LEN]; k];
            let mut lost = vec![vec![0u8; LEN]; m];
            Variant::new(tier.name(), move || {
                let have: Vec<(usize, &[u8])> =
                    left.iter().enumerate().map(|(at, chunk)| (m + at, &chunk[..])).collect();
                let mut want: Vec<(usize, &mut [u8])> =
                    lost.iter_mut().enumerate().map(|(at, chunk)| (at, &mut chunk[..])).collect();
                decoder.rebuild(&have, &mut want).expect("k chunks suffice");
                k * LEN
            })
        };
        let variants = Tier::available().map(variant).collect();
        Kernel { name: format!("erasure rebuild {k}/{m} 16 KiB"), chosen: Tier::current().name().into(), variants }
    };
    vec![encode(4, 2), encode(8, 3), encode(16, 4), rebuild(8, 3)]
}
