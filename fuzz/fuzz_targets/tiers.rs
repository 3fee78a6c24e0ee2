//! Every tier of the kernels against the portable one, on shapes, lengths and alignments that the fuzzer chooses.

use forebay_accel::Tier;
use forebay_accel::crc32c::OnTier;
use forebay_accel::erasure::{Code, CodeError, Construction, ErasureDecoder, Placement};

const CONSTRUCTIONS: [Construction; 3] =
    [Construction::Vandermonde, Construction::Cauchy, Construction::JerasureVandermonde];

/// Compares checksums and stripes of all tiers.
pub fn run(data: &[u8]) {
    let Some((choice, payload)) = data.split_first_chunk::<8>() else { return };
    checksums(choice, payload);
    stripes(choice, payload);
}

fn checksums(choice: &[u8; 8], payload: &[u8]) {
    let skip = usize::from(choice[0] % 64).min(payload.len());
    let message = &payload[skip..];
    let (a, b) = message.split_at(usize::from(choice[1]) * message.len() / 256);
    let plain = OnTier::new(Tier::Portable).expect("always there");
    let crc = plain.extend(0, message);
    for tier in Tier::available() {
        let on = OnTier::new(tier).expect("an available tier");
        assert_eq!(on.extend(0, message), crc, "{tier}");
        for shape in OnTier::shapes(tier) {
            let on = OnTier::with_shape(tier, shape).expect("a loop of the tier");
            assert_eq!(on.extend(0, message), crc, "{tier}/{shape}");
        }
        assert_eq!(on.combine(on.extend(0, a), on.extend(0, b), b.len() as u64), crc, "{tier}");
        let mut copy = vec![0; message.len() + 64];
        let to = usize::from(choice[2] % 64);
        assert_eq!(on.copy_extend(0, message, &mut copy[to..to + message.len()]), crc, "{tier}");
        assert_eq!(&copy[to..to + message.len()], message, "{tier}");
    }
}

fn stripes(choice: &[u8; 8], payload: &[u8]) {
    let construction = CONSTRUCTIONS[usize::from(choice[3]) % 3];
    let (k, m) = (2 + usize::from(choice[4]) % 31, 1 + usize::from(choice[5]) % 16);
    let len = payload.len() / k;
    let chunks: Vec<&[u8]> = (0..k).map(|at| &payload[at * len..(at + 1) * len]).collect();
    let placement = if choice[6] & 1 == 1 { Placement::Memory } else { Placement::Cached };
    let mut expected: Option<(Vec<Vec<u8>>, Vec<u32>)> = None;
    for (tier, shape) in Tier::available().flat_map(|tier| Code::shapes().map(move |shape| (tier, shape))) {
        let code = Code::with_shape(construction, k, m, tier, shape).expect("a shape");
        let mut parity = vec![vec![0; len]; m];
        let mut crcs = vec![0; k + m];
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
        if choice[6] & 2 == 0 {
            code.encode_to(&chunks, &mut outputs, placement).expect("a stripe");
        } else {
            code.encode_checksummed_to(&chunks, &mut outputs, &mut crcs, placement).expect("a stripe");
        }
        let (first, sums) = expected.get_or_insert_with(|| (parity.clone(), crcs.clone()));
        assert!(*first == parity && *sums == crcs, "{code:?} {shape} {placement:?}");
        rebuild(code, choice[7], &chunks, &parity);
    }
}

/// Loses up to m chunks from some place on.
fn rebuild(code: Code, place: u8, data: &[&[u8]], parity: &[Vec<u8>]) {
    let all: Vec<&[u8]> = data.iter().copied().chain(parity.iter().map(|chunk| &chunk[..])).collect();
    let (chunks, losses) = (all.len(), code.m());
    let lost = |at: usize| (at + chunks - usize::from(place) % chunks) % chunks < losses;
    let have: Vec<(usize, &[u8])> = (0..chunks).filter(|&at| !lost(at)).map(|at| (at, all[at])).collect();
    let mut rebuilt = vec![vec![0; data[0].len()]; losses];
    let mut want: Vec<(usize, &mut [u8])> =
        (0..chunks).filter(|&at| lost(at)).zip(rebuilt.iter_mut().map(|chunk| &mut chunk[..])).collect();
    let dependent = code.construction() == Construction::Vandermonde && losses >= 4;
    match ErasureDecoder::new(code).rebuild(&have, &mut want) {
        Ok(()) => want.iter().for_each(|(at, chunk)| assert!(**chunk == *all[*at])),
        Err(error) => assert!(error == CodeError::Lost && dependent),
    }
}
