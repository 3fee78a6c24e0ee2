//! Entry points for fuzzing: corrupt input ends in an error within its memory, and what is compressed comes back.

use super::fast::FastEncoder;
use super::{Codec, Compressor, Decompressor, Framing, InflateStream, Level};
use crate::tier::Tier;

/// Maximum length of the plain data of a round trip, in bytes: more than two blocks.
const PLAIN_MAX: usize = 300 << 10;

fn codec(choice: u8) -> Codec {
    let framing = [Framing::Raw, Framing::Zlib, Framing::Gzip][usize::from(choice) % 3];
    match choice % 16 {
        14 => Codec::Lz4,
        15 => Codec::Zstd { level: i8::try_from(choice / 16 % 5).unwrap_or_default() - 1 },
        level => Codec::Deflate { framing, level: Level::new(level % 9 + 1).unwrap_or(Level::FASTEST) },
    }
}

/// Expands arbitrary bytes: the first selects the codec, two more the output length.
///
/// # Panics
/// When memory behind the output is touched, or a stream that zlib's way of reading accepts is read differently.
pub fn expand(data: &[u8]) {
    let [choice, low, high, stream @ ..] = data else { return };
    let codec = codec(*choice);
    let room = usize::from(u16::from_le_bytes([*low, *high]));
    let mut out = vec![0xA5; room + 32];
    let found = Decompressor::new().decompress(codec, stream, &mut out[..room]);
    assert!(out[room..].iter().all(|&byte| byte == 0xA5), "written behind the output");
    if let Ok(found) = found {
        assert!(found.produced <= room && found.consumed <= stream.len());
    }
    let Codec::Deflate { framing, .. } = codec else { return };
    // The other reader is stricter (it refuses some incomplete codes), so what it takes the first one takes.
    if let Some((plain, consumed)) = in_steps(framing, stream, room, 1 + usize::from(*low) * 7) {
        let found = found.expect("a stream that zlib's way of reading accepts");
        assert_eq!((found.consumed, &out[..found.produced]), (consumed, &plain[..]));
    }
}

/// Expands a stream in small steps; `None` if it is corrupt, truncated, or longer than `room`.
fn in_steps(framing: Framing, stream: &[u8], room: usize, step: usize) -> Option<(Vec<u8>, usize)> {
    let mut inflate = InflateStream::new(framing);
    let (mut plain, mut at) = (Vec::new(), 0);
    loop {
        let mut piece = vec![0; step];
        let end = stream.len().min(at + step);
        let progress = inflate.step(&stream[at..end], &mut piece).ok()?;
        plain.extend_from_slice(&piece[..progress.produced]);
        at += progress.consumed;
        if plain.len() > room {
            return None;
        }
        if progress.done {
            return Some((plain, at));
        }
        if progress.consumed + progress.produced == 0 {
            return None;
        }
    }
}

/// Compresses data made from a recipe, and expands it again; level 1 on every tier.
///
/// # Panics
/// When it does not come back, or the tiers differ.
pub fn round_trip(data: &[u8]) {
    let [choice, recipe @ ..] = data else { return };
    let (codec, plain) = (codec(*choice), cook(recipe));
    let mut packed = vec![0; codec.bound(plain.len())];
    let length = Compressor::new().compress(codec, &plain, &mut packed).expect("room for the worst case");
    let mut out = vec![0; plain.len()];
    let found = Decompressor::new().decompress(codec, &packed[..length], &mut out).expect("our own stream");
    assert_eq!((found.consumed, found.produced), (length, plain.len()));
    assert!(out == plain, "{codec}");

    let mut first: Option<Vec<u8>> = None;
    for tier in Tier::available().filter(|&tier| tier == Tier::Portable || tier >= Tier::Avx2) {
        let mut out = vec![0; Codec::ZLIB.bound(plain.len())];
        let length = FastEncoder::new(tier).compress(&plain, &mut out).expect("room for the worst case");
        out.truncate(length);
        match &first {
            None => {
                let read = in_steps(Framing::Raw, &out, plain.len(), 8192);
                assert!(read == Some((plain.clone(), length)), "zlib's way of reading refuses level 1");
                first = Some(out);
            }
            Some(first) => assert!(*first == out, "{tier} differs"),
        }
    }
}

/// Plain data from a recipe: runs of bytes, and copies of what is already there, near and far, so that a short input
/// of the fuzzer makes long data with matches of every length and distance.
fn cook(mut recipe: &[u8]) -> Vec<u8> {
    let mut plain: Vec<u8> = Vec::new();
    while let [what, rest @ ..] = recipe {
        recipe = rest;
        if *what < 0x60 || plain.is_empty() {
            let (run, rest) = recipe.split_at(recipe.len().min(usize::from(*what) + 1));
            plain.extend_from_slice(run);
            recipe = rest;
        } else if let [a, b, c, rest @ ..] = recipe {
            recipe = rest;
            let distance = usize::from(u16::from_le_bytes([*a, *b])) % plain.len() + 1;
            let length = (usize::from(*c) + 3) << (usize::from(*what) % 9);
            for _ in 0..length.min(PLAIN_MAX.saturating_sub(plain.len())) {
                plain.push(plain[plain.len() - distance]);
            }
        }
        if plain.len() >= PLAIN_MAX {
            break;
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn anything_is_survived(data in proptest::collection::vec(any::<u8>(), 0..500)) {
            super::expand(&data);
            super::round_trip(&data);
        }
    }
}
