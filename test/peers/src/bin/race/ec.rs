//! Erasure coding: rates are bytes of data encoded, or bytes read to rebuild, a second.

use std::mem::MaybeUninit;

use forebay_accel::Tier;
use forebay_accel::crc32c::crc32c;
use forebay_accel::erasure::{Code, Construction, ErasureDecoder};
use forebay_peers::debian::{Isal, Jerasure};
use forebay_peers::isal::{self, Encoder};

use crate::{Memory, Race, Series, Side};

/// A chunk that stays in a core's caches with all others of its stripe, and one that does not.
const CACHED: usize = 16 << 10;
const LARGE: usize = 1 << 20;

/// Stripes of large chunks go round in at least this much memory.
const ROUND: usize = 256 << 20;

/// Lines by which skewed chunks are offset from each other.
const SKEW: usize = 5 * 64;

const SHAPES: [(usize, usize); 9] = [(2, 1), (4, 1), (4, 2), (6, 3), (8, 2), (8, 3), (8, 4), (10, 4), (16, 4)];

/// Buffers of the chunks of some stripes: `k` data, `m` parity and `m` rebuilt ones each.
struct Stripes {
    memory: Memory,
    k: usize,
    m: usize,
    len: usize,
    skew: usize,
    stride: usize,
    sets: usize,
}

impl Stripes {
    fn new(k: usize, m: usize, len: usize, skew: usize, round: usize) -> Self {
        // A page between chunks keeps large ones from sharing more than their page alignment.
        let stride = len.next_multiple_of(4096) + 4096 + if skew > 0 { 16_384 } else { 0 };
        let stripe = (k + 2 * m) * stride;
        let sets = round.div_ceil(stripe).max(1);
        let stripes = Self { memory: Memory::new(stripe * sets), k, m, len, skew, stride, sets };
        let code = Code::new(Construction::Vandermonde, k, m).expect("a shape");
        for set in 0..sets {
            // SAFETY: the chunks are within the memory and apart from each other; no other thread uses them now.
            unsafe {
                let data: Vec<&[u8]> =
                    (0..k).map(|at| std::slice::from_raw_parts(stripes.chunk(set, at), len)).collect();
                let mut parity: Vec<&mut [u8]> =
                    (k..k + m).map(|at| std::slice::from_raw_parts_mut(stripes.chunk(set, at), len)).collect();
                code.encode(&data, &mut parity).expect("a stripe");
            }
        }
        stripes
    }

    fn chunk(&self, set: usize, at: usize) -> *mut u8 {
        self.memory.at((set * (self.k + 2 * self.m) + at) * self.stride + at * self.skew, self.len)
    }

    /// The chunks of a stripe, to be read or written.
    fn pointers(&self, set: usize, chunks: std::ops::Range<usize>) -> Vec<*mut u8> {
        chunks.map(|at| self.chunk(set, at)).collect()
    }
}

/// All pointers of all stripes, made before the clock runs.
struct Prepared {
    inputs: Vec<Vec<*const u8>>,
    outputs: Vec<Vec<*mut u8>>,
    len: usize,
    next: usize,
}

impl Prepared {
    fn new(stripes: &Stripes, read: impl Fn(usize) -> usize, outputs: std::ops::Range<usize>) -> Self {
        let pointers = |set| (0..stripes.k).map(|at| stripes.chunk(set, read(at)).cast_const()).collect();
        Self {
            inputs: (0..stripes.sets).map(pointers).collect(),
            outputs: (0..stripes.sets).map(|set| stripes.pointers(set, outputs.clone())).collect(),
            len: stripes.len,
            next: 0,
        }
    }

    fn turn(&mut self) -> usize {
        self.next = (self.next + 1) % self.inputs.len();
        self.next
    }

    fn ours(&mut self, work: impl FnOnce(&[&[u8]], &mut [&mut [u8]])) -> usize {
        let set = self.turn();
        let len = self.len;
        let (sources, targets) = (&self.inputs[set], &self.outputs[set]);
        // SAFETY: the chunks are within the stripes' memory, which outlives the race; outputs overlap nothing.
        let sources = sources.iter().map(|&from| unsafe { std::slice::from_raw_parts(from, len) });
        // SAFETY: as above.
        let targets = targets.iter().map(|&to| unsafe { std::slice::from_raw_parts_mut(to, len) });
        listed(sources, |inputs| listed(targets, |outputs| work(inputs, outputs)));
        len * self.inputs[set].len()
    }

    fn theirs(&mut self, encoder: &Encoder) -> usize {
        let set = self.turn();
        // SAFETY: the chunks have that length, and their numbers are those of the encoder's matrix.
        unsafe { encoder.encode(self.len, &self.inputs[set], &self.outputs[set]) };
        self.len * self.inputs[set].len()
    }
}

/// Calls `run` with a list of up to 32 references, made without touching more memory than they take: the peers' lists
/// are made before the clock runs.
fn listed<T, R>(items: impl Iterator<Item = T>, run: impl FnOnce(&mut [T]) -> R) -> R {
    let mut room = [const { MaybeUninit::<T>::uninit() }; 32];
    let count = room.iter_mut().zip(items).map(|(place, item)| place.write(item)).count();
    // SAFETY: the first `count` were written just now.
    run(unsafe { std::slice::from_raw_parts_mut(room.as_mut_ptr().cast::<T>(), count) })
}

/// All erasure-coding races.
pub fn run(race: &Race) {
    for (place, len, round) in [("cached", CACHED, 1), ("memory", LARGE, ROUND)] {
        for (alignment, skew) in [("aligned", 0), ("skewed", SKEW)] {
            for (k, m) in SHAPES {
                let names = ["encode", "rebuild", "fused"].map(|what| format!("{what}-{k}-{m}-{place}-{alignment}"));
                if names.iter().any(|name| race.wants("ec", name)) {
                    let stripes = Stripes::new(k, m, len, skew, round);
                    encode(race, &stripes, &names[0], goal(m, k, place, alignment));
                    rebuild(race, &stripes, &names[1], goal(m, k, place, alignment));
                    if k >= 4 && m >= 2 {
                        fused(race, &stripes, &names[2], if place == "cached" { 1.35 } else { 1.5 });
                    }
                }
            }
        }
    }
    tiers(race);
    shapes(race);
    blocks(race);
}

/// Returns the goal that issue and design set.
fn goal(m: usize, k: usize, place: &str, alignment: &str) -> f64 {
    match (place, alignment) {
        ("memory", _) if k >= 4 && m >= 2 => 1.25,
        ("memory", _) => 1.0,
        _ if m <= 2 => 1.0,
        (_, "aligned") if m == 4 => 1.5,
        (_, "aligned") => 1.3,
        _ => 1.15,
    }
}

fn encode(race: &Race, stripes: &Stripes, name: &str, goal: f64) {
    if !race.wants("ec", name) {
        return;
    }
    let (k, m) = (stripes.k, stripes.m);
    let code = Code::new(Construction::Vandermonde, k, m).expect("a shape");
    let isal = Encoder::new(k, code.parity_matrix());
    let (mut a, mut b) = (Prepared::new(stripes, |at| at, k..k + m), Prepared::new(stripes, |at| at, k..k + m));
    race.run(
        "ec",
        name,
        goal,
        &mut [
            Series::new("forebay", Side::Ours, || a.ours(|data, parity| code.encode(data, parity).expect("a stripe"))),
            Series::new("isa-l", Side::Peer, || b.theirs(&isal)),
        ],
    );
}

/// The first m data chunks are lost.
fn rebuild(race: &Race, stripes: &Stripes, name: &str, goal: f64) {
    if !race.wants("ec", name) {
        return;
    }
    let (k, m) = (stripes.k, stripes.m);
    let lost = m.min(k);
    let code = Code::new(Construction::Vandermonde, k, m).expect("a shape");
    // What ISA-L's caller would compute: the rows that make the lost chunks of those that are left.
    let rows = rows_by_rebuilding(&code, lost);
    let isal = Encoder::new(k, &rows);
    let mut decoder = ErasureDecoder::new(code);
    let outputs = k + m..k + m + lost;
    let (mut a, mut b) =
        (Prepared::new(stripes, |at| at + lost, outputs.clone()), Prepared::new(stripes, |at| at + lost, outputs));
    check(stripes, &mut b, &isal, lost);
    race.run(
        "ec",
        name,
        goal,
        &mut [
            Series::new("forebay", Side::Ours, || {
                a.ours(|left, rebuilt| {
                    let left = left.iter().enumerate().map(|(at, &chunk)| (lost + at, chunk));
                    let rebuilt = rebuilt.iter_mut().enumerate().map(|(at, chunk)| (at, &mut **chunk));
                    listed(left, |have| listed(rebuilt, |want| decoder.rebuild(have, want).expect("k chunks")));
                })
            }),
            Series::new("isa-l", Side::Peer, || b.theirs(&isal)),
        ],
    );
}

/// The matrix of a recovery, found by rebuilding unit vectors: column j is what chunk j alone contributes.
fn rows_by_rebuilding(code: &Code, lost: usize) -> Vec<u8> {
    let k = code.k();
    let units: Vec<Vec<u8>> = (0..k).map(|at| (0..k).map(|byte| u8::from(byte == at)).collect()).collect();
    let have: Vec<(usize, &[u8])> = units.iter().enumerate().map(|(at, unit)| (lost + at, &unit[..])).collect();
    let mut rows = vec![vec![0; k]; lost];
    let mut want: Vec<(usize, &mut [u8])> = rows.iter_mut().enumerate().map(|(at, row)| (at, &mut row[..])).collect();
    ErasureDecoder::new(code.clone()).rebuild(&have, &mut want).expect("k chunks");
    rows.concat()
}

/// The peer really rebuilds.
fn check(stripes: &Stripes, prepared: &mut Prepared, isal: &Encoder, lost: usize) {
    prepared.theirs(isal);
    let set = prepared.next;
    for at in 0..lost {
        let chunk = stripes.chunk(set, stripes.k + stripes.m + at).cast_const();
        // SAFETY: both chunks are within the stripes' memory, and no thread writes now.
        let (rebuilt, was) = unsafe {
            let was = stripes.chunk(set, at).cast_const();
            (std::slice::from_raw_parts(chunk, stripes.len), std::slice::from_raw_parts(was, stripes.len))
        };
        assert!(rebuilt == was, "ISA-L rebuilt something else");
    }
}

/// Encoding and the checksums of all chunks.
fn fused(race: &Race, stripes: &Stripes, name: &str, goal: f64) {
    if !race.wants("ec", name) {
        return;
    }
    let (k, m) = (stripes.k, stripes.m);
    let code = Code::new(Construction::Vandermonde, k, m).expect("a shape");
    let isal = Encoder::new(k, code.parity_matrix());
    let prepared = || Prepared::new(stripes, |at| at, k..k + m);
    let (mut a, mut b, mut c, mut d) = (prepared(), prepared(), prepared(), prepared());
    let mut crcs = vec![0; k + m];
    let separate = |prepared: &mut Prepared, sum: fn(&[u8]) -> u32| {
        let bytes = prepared.theirs(&isal);
        let (inputs, outputs) = (&prepared.inputs[prepared.next], &prepared.outputs[prepared.next]);
        for pointer in inputs.iter().copied().chain(outputs.iter().map(|output| output.cast_const())) {
            // SAFETY: the chunk is within the stripes' memory, and no thread writes now.
            std::hint::black_box(sum(unsafe { std::slice::from_raw_parts(pointer, prepared.len) }));
        }
        bytes
    };
    race.run(
        "ec",
        name,
        goal,
        &mut [
            Series::new("forebay", Side::Ours, || {
                a.ours(|data, parity| code.encode_checksummed(data, parity, &mut crcs).expect("a stripe"))
            }),
            Series::new("isa-l, then isa-l", Side::Peer, || separate(&mut b, isal::crc32c)),
            Series::new("isa-l, then crc-fast", Side::Peer, || separate(&mut c, crc_fast)),
            Series::new("isa-l, then forebay", Side::Shown, || separate(&mut d, crc32c)),
        ],
    );
}

fn crc_fast(data: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, data) as u32
}

/// Each tier against ISA-L's own, cached.
fn tiers(race: &Race) {
    for tier in Tier::available().filter(|&tier| tier != Tier::best() && tier != Tier::Portable) {
        for (k, m) in [(4, 2), (8, 3), (8, 4), (16, 4)] {
            let name = format!("{tier}-encode-{k}-{m}-cached-aligned");
            if !race.wants("tiers", &name) {
                continue;
            }
            let stripes = Stripes::new(k, m, CACHED, 0, 1);
            let code = Code::with_tier(Construction::Vandermonde, k, m, tier).expect("a shape");
            let isal = Encoder::on(tier, k, code.parity_matrix()).expect("a tier of ISA-L");
            let (mut a, mut b) =
                (Prepared::new(&stripes, |at| at, k..k + m), Prepared::new(&stripes, |at| at, k..k + m));
            race.run(
                "tiers",
                &name,
                1.0,
                &mut [
                    Series::new("forebay", Side::Ours, || {
                        a.ours(|data, parity| code.encode(data, parity).expect("a stripe"))
                    }),
                    Series::new("isa-l", Side::Peer, || b.theirs(&isal)),
                ],
            );
        }
    }
}

/// For the plots: every tier and every peer.
fn field(race: &Race, group: &str, name: &str, k: usize, m: usize, len: usize) {
    if !race.wants(group, name) {
        return;
    }
    let stripes = Stripes::new(k, m, len, SKEW, 1);
    let matrix = Code::new(Construction::Vandermonde, k, m).expect("a shape").parity_matrix().to_vec();
    let mut series = Vec::new();
    for tier in Tier::available() {
        let code = Code::with_tier(Construction::Vandermonde, k, m, tier).expect("a shape");
        let mut prepared = Prepared::new(&stripes, |at| at, k..k + m);
        series.push(Series::new(&format!("forebay {tier}"), Side::Ours, move || {
            prepared.ours(|data, parity| code.encode(data, parity).expect("a stripe"))
        }));
        if let Some(encoder) = Encoder::on(tier, k, &matrix) {
            let mut prepared = Prepared::new(&stripes, |at| at, k..k + m);
            series.push(Series::new(&format!("isa-l {tier}"), Side::Peer, move || prepared.theirs(&encoder)));
        }
    }
    if let Ok(isal) = Isal::open() {
        let tables = isal.tables(k, &matrix);
        let mut prepared = Prepared::new(&stripes, |at| at, k..k + m);
        series.push(Series::new("isa-l 2.30", Side::Shown, move || {
            let set = prepared.turn();
            // SAFETY: the chunks have that length, and their numbers are those of the tables.
            unsafe { isal.encode(len, &tables, &prepared.inputs[set], &prepared.outputs[set]) };
            len * k
        }));
    }
    if let Ok(jerasure) = Jerasure::open() {
        let mut entries: Vec<i32> = jerasure.parity_matrix(k, m);
        let mut prepared = Prepared::new(&stripes, |at| at, k..k + m);
        series.push(Series::new("jerasure", Side::Shown, move || {
            let set = prepared.turn();
            // SAFETY: the chunks have that length, a multiple of 8, and their numbers are those of the matrix.
            unsafe { jerasure.encode(len, &mut entries, &prepared.inputs[set], &prepared.outputs[set]) };
            len * k
        }));
    }
    let solomon = reed_solomon_erasure::galois_8::ReedSolomon::new(k, m).expect("a shape");
    let mut prepared = Prepared::new(&stripes, |at| at, k..k + m);
    series.push(Series::new("reed-solomon-erasure", Side::Shown, move || {
        prepared.ours(|data, parity| solomon.encode_sep(data, parity).expect("a stripe"))
    }));
    race.run(group, name, 0.0, &mut series);
}

fn shapes(race: &Race) {
    for (k, m) in [(2, 1), (4, 1), (4, 2), (6, 3), (8, 3), (8, 4), (10, 4), (16, 4), (16, 6), (16, 8), (32, 4)] {
        field(race, "shapes", &format!("{k}/{m}"), k, m, CACHED);
    }
}

fn blocks(race: &Race) {
    for power in 9..=22 {
        let len: usize = 1 << power;
        let name = if len < 1 << 10 {
            format!("{len} B")
        } else if len < 1 << 20 {
            format!("{} KiB", len >> 10)
        } else {
            format!("{} MiB", len >> 20)
        };
        field(race, "blocks", &name, 8, 3, len);
    }
}
