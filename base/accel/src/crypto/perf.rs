//! Cipher benchmarks for `forebay perf accel`.

use super::xts::{XtsShape, shapes};
use super::{Gcm, SectorSize, Xts};
use crate::perf::{Detail, Kernel, Variant};
use crate::tier::Tier;

/// Length of a call in bytes: an extent as the store writes it.
const LENGTH: usize = 128 << 10;

/// Name of the library that GCM runs on.
const LIBRARY: &str = "aws-lc";

/// Lists sectors of both sizes, and messages.
pub(crate) fn perf(detail: Detail) -> Vec<Kernel> {
    let key: Vec<u8> = (0..64).collect();
    let mut kernels = Vec::new();
    for (bits, key) in [(128, &key[..32]), (256, &key[..])] {
        for size in [SectorSize::Bytes512, SectorSize::Bytes4096] {
            kernels.push(xts(key, bits, size, detail));
        }
    }
    for (bits, key) in [(128, &key[..16]), (256, &key[..32])] {
        let Ok(gcm) = Gcm::new(key) else { continue };
        let (mut data, mut count) = (vec![0; 4096], 0u64);
        let work = move || {
            count += 1;
            let mut nonce = [0; super::NONCE_LEN];
            nonce[..8].copy_from_slice(&count.to_le_bytes());
            std::hint::black_box(gcm.seal(&nonce, &[], &mut data));
            data.len()
        };
        let variants = vec![Variant::new(LIBRARY, work)];
        kernels.push(Kernel { name: format!("aes-{bits}-gcm 4 KiB"), chosen: LIBRARY.into(), variants });
    }
    kernels
}

/// Lists XTS with every set of instructions of this processor.
fn xts(key: &[u8], bits: u16, size: SectorSize, detail: Detail) -> Kernel {
    let in_use = shapes::in_use(size);
    let name = |xts: &Xts, shape: XtsShape| {
        let shaped = detail == Detail::Shapes && xts.has_shapes();
        if shaped { format!("{}/{}", xts.implementation(), shape.name()) } else { xts.implementation().to_owned() }
    };
    let mut variants: Vec<Variant> = Vec::new();
    for tier in Tier::available() {
        let shapes = if detail == Detail::Shapes { &XtsShape::ALL[..] } else { std::slice::from_ref(&in_use) };
        for &shape in shapes {
            let Ok(xts) = Xts::with_shape(key, tier, shape) else { continue };
            let name = name(&xts, shape);
            if variants.iter().any(|variant| variant.name == name) {
                continue;
            }
            let mut data = vec![0; LENGTH];
            variants.push(Variant::new(name, move || {
                xts.encrypt_in_place(size, 1u64, &mut data);
                data.len()
            }));
        }
    }
    let chosen = Xts::new(key).map_or_else(|_| String::new(), |xts| name(&xts, in_use));
    Kernel { name: format!("aes-{bits}-xts sectors of {}", size.get()), chosen, variants }
}
