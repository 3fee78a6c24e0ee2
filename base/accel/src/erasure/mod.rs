//! Reed-Solomon erasure coding over GF(2^8) modulo 0x11d.
//!
//! Stripes have `k` data chunks and `m` parity chunks of one length; any `k` of them determine the others (see
//! [`Construction`] for exceptions).  Chunks are byte-identical with those of ISA-L and jerasure, so that they
//! interoperate with chunks written by Ceph's plugins.
//!
//! - [`Code`] encodes, and updates parity for a partial overwrite.  It is immutable: share it, or clone it, freely.
//!   [`Code::encode_checksummed`] gives the CRC32C of every chunk as well, in the same pass over memory.
//! - [`ErasureDecoder`] rebuilds lost chunks, data or parity, and remembers the matrices it inverted.  It belongs to
//!   one core.
//!
//! ```
//! use forebay_accel::erasure::{Code, Construction, ErasureDecoder};
//! let code = Code::new(Construction::Vandermonde, 2, 1)?;
//! let mut parity = [0; 5];
//! code.encode(&[b"quick", b"brown"], &mut [&mut parity])?;
//! let mut lost = [0; 5];
//! ErasureDecoder::new(code).rebuild(&[(1, b"brown"), (2, &parity)], &mut [(0, &mut lost)])?;
//! assert_eq!(&lost, b"quick");
//! # Ok::<(), forebay_accel::erasure::CodeError>(())
//! ```

mod checksummed;
mod chunks;
mod code;
mod decode;
mod fused;
pub(crate) mod gf;
mod matrix;
mod pass;
mod plan;
mod steps;

pub use code::{Code, CodeError, K_MAX, K_MIN, M_MAX};
pub use decode::ErasureDecoder;
pub use matrix::Construction;
pub use plan::Placement;
pub(crate) use steps::contests;

use crate::perf::{Detail, Kernel, Variant};
use crate::tier::Tier;

/// Lists encoding and rebuilding of several codes, for `forebay perf accel`; counted are the bytes of data encoded, and
/// those read to rebuild.
pub(crate) fn perf(detail: Detail) -> Vec<Kernel> {
    const LEN: usize = 16 << 10;
    /// Lists a kernel on every tier, with the shape in use or with each.
    fn kernel(name: String, detail: Detail, k: usize, m: usize, work: fn(Code) -> Box<dyn FnMut() -> usize>) -> Kernel {
        let mut variants = Vec::new();
        let current = Tier::current();
        for tier in Tier::available() {
            if detail == Detail::Tiers || tier == Tier::Portable {
                let code = Code::with_tier(Construction::Vandermonde, k, m, tier).expect("an available tier");
                variants.push(Variant::new(tier.name(), work(code)));
                continue;
            }
            for shape in Code::shapes() {
                // A shape that falls back to the default is listed under the default's name.
                let Some(steps) = steps::Steps::named(shape) else { continue };
                if steps::Steps::Vectors(steps.vectors(tier, m)) == steps {
                    let code = Code::with_shape(Construction::Vandermonde, k, m, tier, shape).expect("a shape");
                    variants.push(Variant::new(format!("{tier}/{shape}"), work(code)));
                }
            }
        }
        let by_tier = detail == Detail::Tiers || current == Tier::Portable;
        let chosen = if by_tier { current.name().into() } else { format!("{current}/{}", steps::in_use(m)) };
        Kernel { name, chosen, variants }
    }
    fn encode(code: Code) -> Box<dyn FnMut() -> usize> {
        let (k, m) = (code.k(), code.m());
        let data = vec![vec![0x5Au8; LEN]; k];
        let mut parity = vec![vec![0u8; LEN]; m];
        Box::new(move || {
            let sources: Vec<&[u8]> = data.iter().map(|chunk| &chunk[..]).collect();
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
            code.encode(&sources, &mut outputs).expect("chunks of the right shape");
            k * LEN
        })
    }
    fn rebuild(code: Code) -> Box<dyn FnMut() -> usize> {
        let (k, m) = (code.k(), code.m());
        let mut decoder = ErasureDecoder::new(code);
        let left = vec![vec![0x5Au8; LEN]; k];
        let mut lost = vec![vec![0u8; LEN]; m];
        Box::new(move || {
            let have: Vec<(usize, &[u8])> = left.iter().enumerate().map(|(at, chunk)| (m + at, &chunk[..])).collect();
            let mut want: Vec<(usize, &mut [u8])> =
                lost.iter_mut().enumerate().map(|(at, chunk)| (at, &mut chunk[..])).collect();
            decoder.rebuild(&have, &mut want).expect("k chunks suffice");
            k * LEN
        })
    }
    let mut kernels: Vec<Kernel> = [(4, 2), (8, 3), (16, 4)]
        .map(|(k, m)| kernel(format!("erasure encode {k}/{m} 16 KiB"), detail, k, m, encode))
        .into();
    if detail == Detail::Shapes {
        for (k, m) in [(8, 1), (10, 6)] {
            kernels.push(kernel(format!("erasure encode {k}/{m} 16 KiB"), detail, k, m, encode));
        }
    }
    kernels.push(kernel("erasure rebuild 8/3 16 KiB".into(), detail, 8, 3, rebuild));
    kernels
}
