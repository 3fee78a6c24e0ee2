//! The ciphers, for `forebay perf accel`.

use super::{Gcm, SectorSize, Xts};
use crate::perf::{Kernel, Variant};
use crate::tier::Tier;

/// Bytes a call: an extent as the store writes it.
const LENGTH: usize = 128 << 10;

/// What GCM runs on.
const LIBRARY: &str = "aws-lc";

/// Sectors of both sizes, and messages.
pub(crate) fn perf() -> Vec<Kernel> {
    let key: Vec<u8> = (0..64).collect();
    let mut kernels = Vec::new();
    for (bits, key) in [(128, &key[..32]), (256, &key[..])] {
        for size in [SectorSize::Bytes512, SectorSize::Bytes4096] {
            kernels.push(xts(key, bits, size));
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

/// XTS over every set of instructions there is.
fn xts(key: &[u8], bits: u16, size: SectorSize) -> Kernel {
    let mut variants: Vec<Variant> = Vec::new();
    for tier in Tier::available() {
        let Ok(xts) = Xts::with_tier(key, tier) else { continue };
        let name = xts.implementation();
        if variants.iter().any(|variant| variant.name == name) {
            continue;
        }
        let mut data = vec![0; LENGTH];
        variants.push(Variant::new(name, move || {
            xts.encrypt_in_place(size, 1, &mut data);
            data.len()
        }));
    }
    let chosen = Xts::new(key).map_or("", |xts| xts.implementation());
    Kernel { name: format!("aes-{bits}-xts sectors of {}", size.get()), chosen: chosen.into(), variants }
}
