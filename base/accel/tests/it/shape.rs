//! Which loops are in use in a process, by what its environment says.

use std::process::Command;
use std::time::Instant;

use forebay_accel::Tier;
use forebay_accel::crc32c::{self, OnTier};
use forebay_accel::crypto::{SectorSize, Xts};
use forebay_accel::erasure::{Code, Construction};
use forebay_accel::perf::{Detail, kernels};
use forebay_accel::shape;

/// Checksums, parity and sectors of every class of sizes, which must not depend on the loops.
fn work() -> String {
    let data: Vec<u8> = (0..(1usize << 20)).map(|at| (at.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let mut crc = 0;
    for len in [1, 100, 1200, 2048, 4096, 9000, 65_536, 1 << 20] {
        crc = crc32c::extend(crc, &data[..len]);
    }
    let mut all = format!("{crc:08x}");
    for (k, m) in [(4, 1), (8, 3), (10, 6), (6, 12)] {
        let code = Code::new(Construction::Cauchy, k, m).unwrap();
        let chunks: Vec<&[u8]> = data.chunks(5000).take(k).collect();
        let mut parity = vec![vec![0; 5000]; m];
        let mut crcs = vec![0; k + m];
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
        code.encode_checksummed(&chunks, &mut outputs, &mut crcs).unwrap();
        all += &format!(" {crcs:x?}");
    }
    let key: Vec<u8> = (0..64).collect();
    for size in [SectorSize::Bytes512, SectorSize::Bytes4096] {
        let mut sectors = data[..40_960].to_vec();
        Xts::new(&key).unwrap().encrypt_in_place(size, 7u64, &mut sectors);
        all += &format!(" {:08x}", crc32c::crc32c(&sectors));
    }
    all
}

/// Child process of the tests below: prints the choices in use, before and after a calibration, and its results.
#[test]
fn in_a_process_of_its_own() {
    let print = |moment: &str| {
        for choice in shape::choices() {
            println!("CHOICE {moment}|{}|{}|{}|{}", choice.kernel, choice.class, choice.shape, choice.reason);
        }
        for kernel in kernels(Detail::Shapes) {
            println!("IN_USE {moment}|{}|{}", kernel.name, kernel.chosen);
        }
        println!("WORK {}", work());
    };
    println!("FORCED {}", shape::forced().map_or_else(|error| error.to_string(), |_| "well".into()));
    print("before");
    let begin = Instant::now();
    assert_eq!(shape::calibrate(&mut || begin.elapsed()), shape::choices());
    print("after");
}

/// Prefixes of the lines that such a process prints.
const MARKS: [&str; 4] = ["CHOICE ", "IN_USE ", "WORK ", "FORCED "];

/// Runs such a process with these environment variables, and returns the lines that it prints.
fn lines(variables: &[(&str, &str)]) -> Vec<String> {
    let program = std::env::current_exe().unwrap();
    // A program for another processor needs its emulator again.
    let runner = std::env::var("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER").ok();
    let runner = runner.filter(|_| cfg!(target_arch = "aarch64")).unwrap_or_default();
    let words: Vec<&str> = runner.split_whitespace().chain(program.to_str()).collect();
    let mut process = Command::new(words[0]);
    process.args(&words[1..]);
    process.args(["--exact", "shape::in_a_process_of_its_own", "--nocapture", "--test-threads=1"]);
    let output = process.env(shape::VARIABLE, "").envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    // The harness's own words may stand before the first line.
    let cut = |line: &str| MARKS.iter().find_map(|mark| line.find(mark)).map(|at| line[at..].to_owned());
    text.lines().filter_map(cut).collect()
}

fn with<'a>(lines: &'a [String], start: &str) -> Vec<&'a str> {
    lines.iter().filter_map(|line| line.strip_prefix(start)).collect()
}

#[test]
fn a_forced_shape_is_in_use_and_gives_the_same_bytes() {
    let expected = work();
    for shape in OnTier::shapes(Tier::current()) {
        let lines = lines(&[(shape::VARIABLE, &format!("crc32c={shape},xts=v4,erasure=v2"))]);
        // On one tier only the checksum has shapes, and on `portable` none has.
        for choice in with(&lines, "CHOICE ") {
            let fields: Vec<&str> = choice.split('|').collect();
            let wanted = match fields[1] {
                "crc32c" => shape,
                "xts" => "v4",
                _ => "v2",
            };
            assert_eq!((fields[3], fields[4]), (wanted, "by FOREBAY_ACCEL_SHAPES"), "{choice}");
        }
        assert_eq!(with(&lines, "WORK "), [&expected, &expected], "{shape}");
    }
}

/// Forces each erasure shape on each tier: also one that equals a class's default, and where defaults differ by the
/// number of outputs.
#[test]
fn a_forced_erasure_shape_stays_in_use_through_calibration_on_every_tier() {
    for tier in Tier::available().filter(|&tier| tier != Tier::Portable) {
        for shape in Code::shapes() {
            let forced = format!("erasure={shape}");
            let lines = lines(&[(forebay_accel::tier::VARIABLE, tier.name()), (shape::VARIABLE, &forced)]);
            // Four vectors a step are too many for some numbers of outputs.
            let variant = format!("{tier}/{shape}");
            let mut kernels = kernels(Detail::Shapes);
            kernels.retain(|kernel| {
                kernel.name.starts_with("erasure") && kernel.variants.iter().any(|one| one.name == variant)
            });
            assert!(!kernels.is_empty(), "{variant}");
            for moment in ["before", "after"] {
                for kernel in &kernels {
                    let line = format!("IN_USE {moment}|{}|{variant}", kernel.name);
                    assert!(lines.contains(&line), "no line `{line}` in {lines:#?}");
                }
            }
        }
    }
}

#[test]
fn without_calibration_the_processor_decides() {
    let lines = lines(&[(shape::VARIABLE, "processor")]);
    assert_eq!(with(&lines, "FORCED "), ["well"]);
    assert!(with(&lines, "CHOICE ").iter().all(|choice| choice.ends_with("|by processor")), "{lines:?}");
}

#[test]
fn calibration_decides_for_every_class_on_every_tier_and_changes_no_byte() {
    let expected = work();
    for tier in Tier::available() {
        let lines = lines(&[(forebay_accel::tier::VARIABLE, tier.name())]);
        let (before, after) = (with(&lines, "CHOICE before|"), with(&lines, "CHOICE after|"));
        assert_eq!(before.len(), after.len());
        assert_eq!(before.is_empty(), tier == Tier::Portable, "{tier}");
        assert!(before.iter().all(|choice| choice.ends_with("|by processor")), "{before:?}");
        assert!(after.iter().all(|choice| choice.contains("calibration")), "{after:?}");
        assert_eq!(with(&lines, "WORK "), [&expected, &expected], "{tier}");
    }
}

#[test]
fn a_shape_that_is_not_there_is_named_with_those_that_are() {
    if Tier::current() == Tier::Portable {
        return;
    }
    let said = lines(&[(shape::VARIABLE, "crc32c=v9")]);
    let said = with(&said, "FORCED ")[0];
    assert!(said.starts_with("crc32c has no shape `v9` on tier") && said.contains("v8"), "{said}");
}
