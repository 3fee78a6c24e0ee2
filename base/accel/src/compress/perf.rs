//! Codec benchmarks for `forebay perf accel`.

use super::fast::FastEncoder;
use super::{Codec, Compressor, Decompressor, Framing, Level};
use crate::perf::{Kernel, Variant};
use crate::tier::Tier;

/// Block size of the store's compression, in bytes.
const BLOCK: usize = 128 << 10;

/// Each codec as a variant, compressing and expanding; and level 1 by tiers.
pub(crate) fn perf() -> Vec<Kernel> {
    let data = text(BLOCK);
    let codecs: Vec<Codec> = [1, 2, 4, 6, 9]
        .into_iter()
        .filter_map(Level::new)
        .map(|level| Codec::Deflate { framing: Framing::Raw, level })
        .chain([Codec::Lz4, Codec::Zstd { level: 1 }, Codec::Zstd { level: 3 }])
        .collect();
    let compress = codecs.iter().map(|&codec| {
        let (data, mut out, mut state) = (data.clone(), vec![0; codec.bound(BLOCK)], Compressor::new());
        Variant::new(codec.to_string(), move || state.compress(codec, &data, &mut out).map_or(0, |_| data.len()))
    });
    let expand = codecs.iter().map(|&codec| {
        let (mut packed, mut out) = (vec![0; codec.bound(BLOCK)], vec![0; BLOCK]);
        let length = Compressor::new().compress(codec, &data, &mut packed).unwrap_or(0);
        packed.truncate(length);
        let mut state = Decompressor::new();
        Variant::new(codec.to_string(), move || {
            state.decompress(codec, &packed, &mut out).map_or(0, |expanded| expanded.produced)
        })
    });
    // Only this encoder depends on the tier; the other codecs' libraries contain vector code of their own.
    let tiers = Tier::available().filter(|&tier| tier == Tier::Portable || tier >= Tier::Avx2);
    let fast = tiers.map(|tier| {
        let (data, mut out, mut state) = (data.clone(), vec![0; Codec::ZLIB.bound(BLOCK)], FastEncoder::new(tier));
        Variant::new(tier.name(), move || state.compress(&data, &mut out).map_or(0, |_| data.len()))
    });
    let fast: Vec<Variant> = fast.collect();
    let current = Tier::current().name();
    let chosen = if fast.iter().any(|variant| variant.name == current) { current } else { Tier::Portable.name() };
    vec![
        Kernel { name: "deflate-1 128 KiB".into(), chosen: chosen.into(), variants: fast },
        Kernel { name: "compress 128 KiB".into(), chosen: "deflate-1".into(), variants: compress.collect() },
        Kernel { name: "expand 128 KiB".into(), chosen: "deflate-1".into(), variants: expand.collect() },
    ]
}

/// Generates prose-like text: words of a small vocabulary in a pseudorandom order.
fn text(length: usize) -> Vec<u8> {
    const WORDS: &str = include_str!("engine/mod.rs");
    let words: Vec<&str> = WORDS.split_whitespace().collect();
    let mut state = 88_172_645_463_325_252u64;
    let mut out = Vec::with_capacity(length + 32);
    while out.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        // The product of two numbers prefers the first words, as language does.
        let pick = ((state >> 8) as usize % words.len()) * ((state >> 40) as usize % words.len()) / words.len();
        out.extend_from_slice(words[pick].as_bytes());
        out.push(b' ');
    }
    out.truncate(length);
    out
}
