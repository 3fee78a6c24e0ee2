//! Our kernels against other people's, interleaved: `race ec|crc32c|compress|xts [--rounds N] [--milliseconds MS] [--case PART]`.
//!
//! Prints a line for each value, tab-separated, which `cargo xtask bench` gathers:
//! `group  case  goal  series  side  GB/s` where side is `ours`, `peer` (goals are set against the best of these) or
//! `shown`.  A goal of 0 means that there is none.

mod compress;
mod crc;
mod ec;
mod xts;

use std::time::{Duration, Instant};

/// Whose a series is.
#[derive(Clone, Copy)]
pub enum Side {
    /// Kernel of Forebay.
    Ours,
    /// A peer that counts.
    Peer,
    /// Shown for comparison only.
    Shown,
}

impl Side {
    fn name(self) -> &'static str {
        match self {
            Side::Ours => "ours",
            Side::Peer => "peer",
            Side::Shown => "shown",
        }
    }
}

/// One competitor: its name, whose it is, and the work, which returns the bytes of payload it went over.
pub struct Series<'a> {
    name: String,
    side: Side,
    work: Box<dyn FnMut() -> usize + 'a>,
}

impl<'a> Series<'a> {
    /// A competitor.
    pub fn new(name: &str, side: Side, work: impl FnMut() -> usize + 'a) -> Self {
        Self { name: name.into(), side, work: Box::new(work) }
    }
}

/// Amount and kinds of measurements.
pub struct Race {
    rounds: usize,
    time: Duration,
    part: String,
}

impl Race {
    /// The case is wanted.
    pub fn wants(&self, group: &str, case: &str) -> bool {
        format!("{group}/{case}").contains(&self.part)
    }

    /// Prints a value that is not a rate.
    pub fn value(&self, group: &str, case: &str, goal: f64, name: &str, side: Side, value: f64) {
        println!("{group}\t{case}\t{goal}\t{name}\t{}\t{value:.4}", side.name());
    }

    /// Measures every series once a round, in an order that turns, and prints every value.
    pub fn run(&self, group: &str, case: &str, goal: f64, series: &mut [Series<'_>]) {
        let calls: Vec<u32> = series.iter_mut().map(|one| calibrate(one, self.time)).collect();
        for round in 0..self.rounds {
            for place in 0..series.len() {
                let at = (place + round) % series.len();
                let one = &mut series[at];
                let begin = Instant::now();
                let bytes: usize = (0..calls[at]).map(|_| (one.work)()).sum();
                let rate = bytes as f64 / begin.elapsed().as_secs_f64() / 1e9;
                println!("{group}\t{case}\t{goal}\t{}\t{}\t{rate:.4}", one.name, one.side.name());
            }
        }
    }
}

/// Returns the number of calls that fill the time, after a warm-up.
fn calibrate(series: &mut Series<'_>, time: Duration) -> u32 {
    let mut calls = 1u32;
    loop {
        let begin = Instant::now();
        let _: usize = (0..calls).map(|_| (series.work)()).sum();
        let took = begin.elapsed();
        if took * 4 >= time {
            return (f64::from(calls) * time.as_secs_f64() / took.as_secs_f64()).ceil() as u32;
        }
        calls *= 2;
    }
}

/// Memory of our own, page-aligned, filled with something, and in huge pages where the kernel gives them.
pub struct Memory {
    start: *mut u8,
    len: usize,
}

impl Memory {
    /// Allocates `len` bytes.
    pub fn new(len: usize) -> Self {
        // SAFETY: a fresh anonymous mapping.
        let start = unsafe {
            let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
            libc::mmap(std::ptr::null_mut(), len, protection, flags, -1, 0)
        };
        assert_ne!(start, libc::MAP_FAILED, "no memory");
        let start = start.cast::<u8>();
        let mut value = 1u64;
        for at in (0..len).step_by(8) {
            value = value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // SAFETY: within the mapping, which is page-aligned.
            unsafe { start.add(at).cast::<u64>().write(value) };
        }
        Self { start, len }
    }

    /// A place in it, with room for `len` bytes.
    pub fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(offset + len <= self.len);
        self.start.wrapping_add(offset)
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let option = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let race = Race {
        rounds: option("--rounds").map_or(7, |text| text.parse().expect("a number of rounds")),
        time: Duration::from_millis(option("--milliseconds").map_or(12, |text| text.parse().expect("milliseconds"))),
        part: option("--case").unwrap_or_default(),
    };
    // As the daemon does before it serves.  Standard error: the values are on standard output.
    let begin = Instant::now();
    for choice in forebay_accel::shape::calibrate(&mut || begin.elapsed()) {
        eprintln!("{} {}: {}, {}", choice.kernel, choice.class, choice.shape, choice.reason);
    }
    match arguments.get(1).map(String::as_str) {
        Some("ec") => ec::run(&race),
        Some("crc32c") => crc::run(&race),
        Some("compress") => compress::run(&race),
        Some("xts") => xts::run(&race),
        _ => {
            eprintln!("race ec|crc32c|compress|xts [--rounds N] [--milliseconds MS] [--case PART]");
            std::process::exit(2);
        }
    }
}
