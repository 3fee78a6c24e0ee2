//! The ciphers, for `forebay perf accel`.

use super::Gcm;
use crate::perf::{Kernel, Variant};

/// What every kernel here runs on.
const LIBRARY: &str = "aws-lc";

/// Messages of both key sizes.
pub(crate) fn perf() -> Vec<Kernel> {
    let key: Vec<u8> = (0..64).collect();
    let mut kernels = Vec::new();
    let mut add = |name: String, work: Box<dyn FnMut() -> usize>| {
        let variants = vec![Variant { name: LIBRARY.into(), work }];
        kernels.push(Kernel { name, chosen: LIBRARY.into(), variants });
    };
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
        add(format!("aes-{bits}-gcm 4 KiB"), Box::new(work));
    }
    kernels
}
