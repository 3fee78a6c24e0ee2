//! Every codec there and back, DEFLATE against zlib both ways, and what is corrupt.

use std::io::Write;

use flate2::{Compress, Compression, Decompress, FlushCompress, FlushDecompress, Status};
use proptest::prelude::*;

use super::*;

fn deflate(framing: Framing, level: u8) -> Codec {
    Codec::Deflate { framing, level: Level::new(level).unwrap() }
}

fn packed(codec: Codec, data: &[u8]) -> Vec<u8> {
    let mut out = vec![0; codec.bound(data.len())];
    let length = Compressor::new().compress(codec, data, &mut out).unwrap();
    out.truncate(length);
    out
}

fn expanded(codec: Codec, stream: &[u8], room: usize) -> Result<Vec<u8>, DecompressError> {
    let mut out = vec![0; room];
    let length = Decompressor::new().decompress(codec, stream, &mut out)?.produced;
    out.truncate(length);
    Ok(out)
}

/// Expands a stream by zlib.
fn zlib_expands(framing: Framing, stream: &[u8], room: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(room + 1);
    if framing == Framing::Gzip {
        let mut reader = flate2::write::GzDecoder::new(&mut out);
        reader.write_all(stream).unwrap();
        reader.finish().unwrap();
        return out;
    }
    let mut state = Decompress::new(framing == Framing::Zlib);
    assert_eq!(state.decompress_vec(stream, &mut out, FlushDecompress::Finish).unwrap(), Status::StreamEnd);
    assert_eq!(state.total_in(), stream.len() as u64);
    out
}

/// Compresses data by zlib, flushing now and then.
fn zlib_packs(framing: Framing, level: u32, flush_every: usize, data: &[u8]) -> Vec<u8> {
    if framing == Framing::Gzip {
        let mut writer = flate2::GzBuilder::new().filename("a name").write(Vec::new(), Compression::new(level));
        writer.write_all(data).unwrap();
        return writer.finish().unwrap();
    }
    let mut state = Compress::new(Compression::new(level), framing == Framing::Zlib);
    let mut out = Vec::with_capacity(data.len() * 2 + 1000 + data.len() / flush_every * 20);
    for (number, piece) in data.chunks(flush_every).enumerate() {
        let flush = if number % 2 == 0 { FlushCompress::Sync } else { FlushCompress::Full };
        let before = state.total_in();
        state.compress_vec(piece, &mut out, flush).unwrap();
        assert_eq!(state.total_in() - before, piece.len() as u64);
    }
    assert_eq!(state.compress_vec(&[], &mut out, FlushCompress::Finish).unwrap(), Status::StreamEnd);
    out
}

/// Data with some order in it.
fn data() -> impl Strategy<Value = Vec<u8>> {
    let noise = proptest::collection::vec(any::<u8>(), 0..300);
    let narrow = proptest::collection::vec(prop_oneof![Just(b'a'), Just(b'b'), Just(0u8)], 0..600);
    let pieces = proptest::collection::vec((prop_oneof![noise, narrow], 1usize..20), 0..8);
    pieces.prop_map(|pieces| pieces.into_iter().flat_map(|(piece, times)| piece.repeat(times)).collect())
}

const FRAMINGS: [Framing; 3] = [Framing::Raw, Framing::Zlib, Framing::Gzip];

fn codec() -> impl Strategy<Value = Codec> {
    prop_oneof![
        4 => (0usize..3, 1u8..=9).prop_map(|(framing, level)| deflate(FRAMINGS[framing], level)),
        1 => Just(Codec::Lz4),
        1 => (-7i8..=5).prop_map(|level| Codec::Zstd { level }),
    ]
}

#[test]
fn nothing_is_no_stream() {
    for codec in [Codec::Zstd { level: 1 }, Codec::Lz4, deflate(FRAMINGS[0], 1), deflate(FRAMINGS[1], 1)] {
        assert!(expanded(codec, &[], 16).is_err(), "{codec:?}");
    }
}

/// Adler-32 as RFC 1950 section 8.2 has it.
fn plain_adler32(data: &[u8]) -> (u32, u32) {
    data.iter().fold((1, 0), |(a, b), &byte| {
        let a = (a + u32::from(byte)) % 65521;
        (a, (b + a) % 65521)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_codec_there_and_back(codec in codec(), data in data()) {
        let stream = packed(codec, &data);
        prop_assert_eq!(expanded(codec, &stream, data.len()), Ok(data.clone()));
        // An output of exactly the needed length suffices, a shorter one does not, on either side.
        let mut out = vec![0; stream.len()];
        prop_assert_eq!(Compressor::new().compress(codec, &data, &mut out), Ok(stream.len()));
        prop_assert_eq!(&out, &stream);
        prop_assert_eq!(
            Compressor::new().compress(codec, &data, &mut out[..stream.len() - 1]),
            Err(CompressError::NoRoom)
        );
        if !data.is_empty() {
            prop_assert_eq!(expanded(codec, &stream, data.len() - 1), Err(DecompressError::TooLong));
        }
    }

    #[test]
    fn zlib_expands_ours(framing in 0usize..3, level in 1u8..=9, data in data()) {
        let framing = FRAMINGS[framing];
        prop_assert_eq!(zlib_expands(framing, &packed(deflate(framing, level), &data), data.len()), data);
    }

    #[test]
    fn we_expand_zlibs(framing in 0usize..3, level in 0u32..=9, every in 1usize..5000, data in data(), step in 1usize..3000) {
        let framing = FRAMINGS[framing];
        let stream = zlib_packs(framing, level, every, &data);
        prop_assert_eq!(expanded(deflate(framing, 1), &stream, data.len()), Ok(data.clone()));
        // And piece by piece.
        let mut inflate = InflateStream::new(framing);
        for _ in 0..2 {
            let (mut out, mut at) = (Vec::new(), 0);
            loop {
                let mut room = vec![0; step];
                let end = stream.len().min(at + step);
                let progress = inflate.step(&stream[at..end], &mut room).unwrap();
                at += progress.consumed;
                out.extend_from_slice(&room[..progress.produced]);
                if progress.done {
                    break;
                }
                prop_assert!(progress.consumed + progress.produced > 0);
            }
            prop_assert_eq!((at, out), (stream.len(), data.clone()));
            inflate.reset();
        }
    }

    #[test]
    fn what_is_cut_short_is_an_error(codec in codec(), data in data(), at: proptest::sample::Index) {
        let stream = packed(codec, &data);
        let cut = &stream[..at.index(stream.len())];
        let room = data.len();
        match expanded(codec, cut, room) {
            // An LZ4 block has no end of its own: a prefix of one may be another.
            Ok(found) if codec == Codec::Lz4 => prop_assert!(data.starts_with(&found)),
            Ok(_) => prop_assert!(false, "a cut stream was taken"),
            Err(_) => {}
        }
    }

    #[test]
    fn a_checksum_notices_a_flipped_bit(gzip: bool, level in 1u8..=9, data in data(), at: proptest::sample::Index, bit in 0u8..8) {
        let codec = deflate(if gzip { Framing::Gzip } else { Framing::Zlib }, level);
        let mut stream = packed(codec, &data);
        let at = at.index(stream.len());
        // The time, flags and system of a gzip header mean nothing; of zlib's, the level does not.
        prop_assume!(at >= if gzip { 10 } else { 2 });
        stream[at] ^= 1 << bit;
        match expanded(codec, &stream, data.len()) {
            // A bit between the end of the last block and the checksum is ignored; and Adler-32 is weak enough to be
            // the same for another output, where periods change places.
            Ok(found) if !gzip => prop_assert_eq!(plain_adler32(&found), plain_adler32(&data)),
            Ok(found) => prop_assert_eq!(found, data),
            Err(error) => prop_assert_ne!(error, DecompressError::NeedsDictionary),
        }
    }

    #[test]
    fn any_bytes_at_all(codec in codec(), bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let mut out = [0xA5; 1000];
        if let Ok(found) = Decompressor::new().decompress(codec, &bytes, &mut out[..900]) {
            prop_assert!(found.consumed <= bytes.len() && found.produced <= 900);
        }
        prop_assert!(out[900..].iter().all(|&byte| byte == 0xA5));
    }
}

#[test]
fn a_bomb_is_stopped_at_the_room_there_is() {
    let zeroes = vec![0; 64 << 20];
    for codec in [deflate(Framing::Gzip, 9), Codec::Zstd { level: 3 }, Codec::Lz4] {
        let stream = packed(codec, &zeroes);
        assert!(stream.len() < zeroes.len() / 200);
        assert_eq!(expanded(codec, &stream, 4096), Err(DecompressError::TooLong), "{codec}");
    }
}

#[test]
fn a_stream_that_needs_a_dictionary_says_so() {
    let mut state = Compress::new(Compression::default(), true);
    state.set_dictionary(b"a dictionary").unwrap();
    let mut stream = Vec::with_capacity(100);
    state.compress_vec(b"said with a dictionary", &mut stream, FlushCompress::Finish).unwrap();
    assert_eq!(expanded(Codec::ZLIB, &stream, 100), Err(DecompressError::NeedsDictionary));
    let mut inflate = InflateStream::new(Framing::Zlib);
    assert_eq!(inflate.step(&stream, &mut [0; 100]), Err(DecompressError::NeedsDictionary));
}

#[test]
fn what_follows_a_stream_is_left_alone() {
    let mut stream = packed(deflate(Framing::Gzip, 6), b"first");
    let length = stream.len();
    stream.extend(packed(deflate(Framing::Gzip, 1), b"second"));
    let mut out = [0; 16];
    let found = Decompressor::new().decompress(deflate(Framing::Gzip, 6), &stream, &mut out).unwrap();
    assert_eq!(found, Expanded { consumed: length, produced: 5 });
}
