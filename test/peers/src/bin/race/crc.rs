//! CRC32C: rates are bytes checksummed, or copied, a second.

use std::hint::black_box;

use forebay_accel::Tier;
use forebay_accel::crc32c::{self as ours, OnTier};
use forebay_peers::isal;

use crate::{Memory, Race, Series, Side};

/// Cold buffers come from a region of this size, in an order no prefetcher knows.
const REGION: usize = 512 << 20;

const SIZES: [usize; 12] = [16, 64, 256, 512, 1 << 10, 2 << 10, 4 << 10, 8 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20];

fn name(len: usize) -> String {
    match len {
        0..1024 => format!("{len} B"),
        1024..1_048_576 => format!("{} KiB", len >> 10),
        _ => format!("{} MiB", len >> 20),
    }
}

fn crc_fast(data: &[u8]) -> u32 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, data) as u32
}

/// The table version that textbooks have, a byte a step.
fn table(data: &[u8]) -> u32 {
    static TABLE: [u32; 256] = {
        let mut table = [0; 256];
        let mut byte = 0;
        while byte < 256 {
            let mut crc = byte as u32;
            let mut bit = 0;
            while bit < 8 {
                crc = (crc >> 1) ^ if crc & 1 == 1 { 0x82F6_3B78 } else { 0 };
                bit += 1;
            }
            table[byte] = crc;
            byte += 1;
        }
        table
    };
    !data.iter().fold(!0, |crc, &byte| (crc >> 8) ^ TABLE[usize::from(crc as u8 ^ byte)])
}

/// All checksum races.
pub fn run(race: &Race) {
    let memory = Memory::new(REGION);
    let room = Memory::new(REGION / 2);
    for len in SIZES {
        hot(race, &memory, len);
    }
    for len in SIZES {
        cold(race, &memory, len);
    }
    for (len, goal) in [(4 << 10, 1.4), (64 << 10, 1.8)] {
        copy(race, &memory, &room, "hot", len, goal);
    }
    for len in [4 << 10, 16 << 10, 64 << 10, 1 << 20, 4 << 20] {
        copy(race, &memory, &room, "cold", len, 1.3);
    }
    extent(race, &memory);
}

/// One buffer over and over; a loop for each competitor, because at 16 bytes a closure's call would be half of it.
fn hot(race: &Race, memory: &Memory, len: usize) {
    let case = format!("hot {}", name(len));
    if !race.wants("crc32c", &case) {
        return;
    }
    // SAFETY: within the memory, which outlives the race, and no thread writes to it.
    let data: &[u8] = unsafe { std::slice::from_raw_parts(memory.at(0, len), len) };
    let times = (16_384 / len).max(1);
    macro_rules! series {
        ($name:expr, $side:expr, $function:expr) => {
            Series::new($name, $side, move || {
                for _ in 0..times {
                    black_box($function(black_box(data)));
                }
                times * len
            })
        };
    }
    let mut all = vec![
        series!("forebay", Side::Ours, ours::crc32c),
        series!("isa-l", Side::Peer, isal::crc32c),
        series!("crc-fast", Side::Peer, crc_fast),
        series!("crc32c", Side::Peer, crc32c::crc32c),
    ];
    for tier in Tier::available().filter(|&tier| tier != Tier::current()) {
        let on = OnTier::new(tier).expect("an available tier");
        all.push(series!(&format!("forebay {tier}"), Side::Shown, |data| on.extend(0, data)));
    }
    race.run("crc32c", &case, 1.0, &mut all);
    if len >= 2 << 10 {
        shapes(race, data, len);
    }
    if len == 4 << 10 {
        let mut against_table = [series!("forebay", Side::Ours, ours::crc32c), series!("table", Side::Peer, table)];
        race.run("crc32c", "hot 4 KiB vs table", 60.0, &mut against_table);
    }
}

/// Every loop of the tier in use beside the newest ISA-L, in turns.
fn shapes(race: &Race, data: &[u8], len: usize) {
    let times = (16_384 / len).max(1);
    let series = |name: &str, side, function: Box<dyn Fn(&[u8]) -> u32>| {
        Series::new(name, side, move || {
            for _ in 0..times {
                black_box(function(black_box(data)));
            }
            times * len
        })
    };
    let tier = Tier::current();
    let mut all = vec![
        series("forebay", Side::Ours, Box::new(ours::crc32c)),
        series("isa-l", Side::Peer, Box::new(isal::crc32c)),
    ];
    for shape in OnTier::shapes(tier) {
        let on = OnTier::with_shape(tier, shape).expect("a loop of the tier");
        all.push(series(&format!("{tier}/{shape}"), Side::Shown, Box::new(move |data| on.extend(0, data))));
    }
    race.run("shapes", &name(len), 1.0, &mut all);
}

/// Places that are far apart, each used once a round.
struct Places {
    slot: usize,
    count: usize,
    at: usize,
}

impl Places {
    fn new(region: usize, len: usize) -> Self {
        let slot = len.next_multiple_of(4096) + 4096;
        Self { slot, count: region / slot, at: 1 }
    }

    fn next(&mut self) -> usize {
        // A step that shares no factor with the count visits every place.
        let mut step = self.count * 5 / 8 | 1;
        while gcd(step, self.count) != 1 {
            step += 2;
        }
        self.at = (self.at + step) % self.count;
        self.at * self.slot
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn cold(race: &Race, memory: &Memory, len: usize) {
    let case = format!("cold {}", name(len));
    if !race.wants("crc32c", &case) {
        return;
    }
    let series = |name: &str, side, function: fn(&[u8]) -> u32| {
        let mut places = Places::new(REGION, len);
        Series::new(name, side, move || {
            // SAFETY: within the memory, which outlives the race, and no thread writes to it.
            let data = unsafe { std::slice::from_raw_parts(memory.at(places.next(), len), len) };
            black_box(function(black_box(data)));
            len
        })
    };
    race.run(
        "crc32c",
        &case,
        1.0,
        &mut [
            series("forebay", Side::Ours, ours::crc32c),
            series("isa-l", Side::Peer, isal::crc32c),
            series("crc-fast", Side::Peer, crc_fast),
            series("crc32c", Side::Peer, crc32c::crc32c),
        ],
    );
}

/// Copying and checksumming, against memcpy and the best checksums.
fn copy(race: &Race, memory: &Memory, room: &Memory, heat: &str, len: usize, goal: f64) {
    let case = format!("copy {heat} {}", name(len));
    if !race.wants("crc32c", &case) {
        return;
    }
    let series = |name: &str, side, function: fn(&[u8], &mut [u8]) -> u32| {
        let mut places = Places::new(REGION / 2, len);
        let cold = heat == "cold";
        Series::new(name, side, move || {
            let at = if cold { places.next() } else { 0 };
            // SAFETY: within memories that are apart and outlive the race; no other thread writes now.
            let (from, to) = unsafe {
                let from = std::slice::from_raw_parts(memory.at(at, len), len);
                (from, std::slice::from_raw_parts_mut(room.at(at, len), len))
            };
            black_box(function(black_box(from), to));
            len
        })
    };
    race.run(
        "crc32c",
        &case,
        goal,
        &mut [
            series("forebay", Side::Ours, ours::copy),
            series("memcpy, then isa-l", Side::Peer, |from, to| {
                to.copy_from_slice(from);
                isal::crc32c(to)
            }),
            series("memcpy, then crc-fast", Side::Peer, |from, to| {
                to.copy_from_slice(from);
                crc_fast(to)
            }),
            series("memcpy, then forebay", Side::Shown, |from, to| {
                to.copy_from_slice(from);
                ours::crc32c(to)
            }),
        ],
    );
}

/// The 4 KiB blocks of an extent of 128 KiB.
fn extent(race: &Race, memory: &Memory) {
    if !race.wants("crc32c", "32 blocks of 4 KiB") {
        return;
    }
    const LEN: usize = 128 << 10;
    // SAFETY: within the memory, which outlives the race, and no thread writes to it.
    let data: &[u8] = unsafe { std::slice::from_raw_parts(memory.at(0, LEN), LEN) };
    let each = |function: fn(&[u8]) -> u32| {
        move || {
            for block in black_box(data).chunks(4096) {
                black_box(function(block));
            }
            LEN
        }
    };
    let mut crcs = [0; LEN / 4096];
    race.run(
        "crc32c",
        "32 blocks of 4 KiB",
        1.0,
        &mut [
            Series::new("forebay", Side::Ours, move || {
                ours::crc32c_blocks(black_box(data), 4096, &mut crcs);
                LEN
            }),
            Series::new("isa-l", Side::Peer, each(isal::crc32c)),
            Series::new("crc-fast", Side::Peer, each(crc_fast)),
        ],
    );
}
