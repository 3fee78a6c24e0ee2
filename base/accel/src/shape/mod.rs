//! Loop shapes: which of several loops that do the same work is in use, and why.
//!
//! A [tier](crate::tier) says which instructions there are; how many of them a processor begins in a cycle, and how long
//! each takes, differs between processors of one tier, and with it the fastest loop.  A kernel with several loops has a
//! *default* on each tier; that of CRC32C also depends on the processor's vendor ([`mod@crate::processor`]).  A program
//! that runs for long calls [`calibrate`] once before it serves; that replaces a default by a loop that is clearly
//! faster here.  The environment variable `FOREBAY_ACCEL_SHAPES` overrides both.
//!
//! | reason | meaning |
//! |---|---|
//! | by processor | the default; no calibration ran, or it ran out of time |
//! | by processor, confirmed by calibration | calibration found no loop that is faster by [`MARGIN_PERCENT`] |
//! | by calibration | this loop was faster than the default by more than that |
//! | by FOREBAY_ACCEL_SHAPES | forced |
//!
//! Every loop gives the same bytes, so a choice may change while kernels run.

mod contest;
mod slot;
#[cfg(test)]
pub(crate) mod trace;

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use crate::tier::Tier;
pub(crate) use contest::{Contest, Contestant};
pub(crate) use slot::ShapeSlot;

/// Environment variable that forces shapes: `KERNEL=SHAPE`, separated by commas; or `processor`, for the defaults
/// without calibration.
pub const VARIABLE: &str = "FOREBAY_ACCEL_SHAPES";

/// Percent by which another shape must be faster to replace the default.
pub const MARGIN_PERCENT: f64 = 5.0;

/// Time after which calibration of all kernels begins no further round; kernels that had too little of it keep their
/// defaults.  Measured were 4.1 to 12.3 ms, 4.8 ms in the median of 30 starts on a busy machine
/// (`docs/benchmarks/kernels.md`).
pub const TIME_MAX: Duration = Duration::from_millis(100);

/// Choice of the loop for one kernel and class of sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Kernel, such as `crc32c`.
    pub kernel: &'static str,
    /// Sizes that this choice is for, such as `3 KiB to 12 KiB`.
    pub class: &'static str,
    /// Shape in use.
    pub shape: &'static str,
    /// Reason for it.
    pub reason: ShapeReason,
    /// Default for this processor.
    pub default: &'static str,
    /// Figures of calibration, in the order of the kernel's list; empty without calibration.
    pub measured: Vec<ShapeSpeed>,
}

/// Speed of a shape in calibration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShapeSpeed {
    /// Name of the shape.
    pub shape: &'static str,
    /// Speed in the fastest of the rounds, 10^9 bytes a second.
    pub gb_per_s: f64,
}

/// Reason why a shape is in use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ShapeReason {
    /// Default for this processor, without calibration.
    Processor,
    /// Default for this processor; calibration measured nothing clearly faster.
    Confirmed,
    /// Clearly faster than the default in calibration.
    Calibration {
        /// Percent by which it was faster, in the median of the rounds.
        percent: f64,
    },
    /// Default for this processor, because calibration ran out of time.
    OutOfTime,
    /// Forced by [`VARIABLE`].
    Forced,
}

impl fmt::Display for ShapeReason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShapeReason::Processor => out.write_str("by processor"),
            ShapeReason::Confirmed => out.write_str("by processor, confirmed by calibration"),
            ShapeReason::Calibration { percent } => write!(out, "by calibration (+{percent:.0} %)"),
            ShapeReason::OutOfTime => out.write_str("by processor, calibration ran out of time"),
            ShapeReason::Forced => write!(out, "by {VARIABLE}"),
        }
    }
}

/// Error in the value of [`VARIABLE`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// Item that is neither `KERNEL=SHAPE` nor `processor`.
    #[error("`{0}` is neither KERNEL=SHAPE nor `processor`")]
    Item(String),
    /// Kernel that does not exist, or has one loop only on the tier in use.
    #[error("no kernel `{kernel}` has shapes on tier {tier}; those that have: {kernels}")]
    Kernel {
        /// Kernel that was asked for.
        kernel: String,
        /// Tier in use.
        tier: Tier,
        /// Kernels that have shapes.
        kernels: String,
    },
    /// Shape that the kernel lacks on the tier in use.
    #[error("{kernel} has no shape `{shape}` on tier {tier}; it has: {shapes}")]
    Shape {
        /// Kernel that was asked for.
        kernel: String,
        /// Shape that was asked for.
        shape: String,
        /// Tier in use.
        tier: Tier,
        /// Shapes that the kernel has.
        shapes: String,
    },
}

/// Value of [`VARIABLE`].
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Forced {
    /// Disables calibration.
    processor: bool,
    /// Kernels and the shapes that are forced for them.
    shapes: Vec<(String, String)>,
}

impl Forced {
    /// Parses the variable's value.
    fn parse(text: &str) -> Result<Self, ShapeError> {
        let mut forced = Self::default();
        for item in text.split(',').map(str::trim).filter(|item| !item.is_empty()) {
            match item.split_once('=') {
                Some((kernel, shape)) => forced.shapes.push((kernel.trim().into(), shape.trim().into())),
                None if item.eq_ignore_ascii_case("processor") => forced.processor = true,
                None => return Err(ShapeError::Item(item.into())),
            }
        }
        Ok(forced)
    }

    /// Checks the names against the kernels of the tier in use.  A shape must exist in one class of the kernel at
    /// least; classes without it keep their default.
    fn check(&self, tier: Tier, kernels: &[(&'static str, Vec<&'static str>)]) -> Result<(), ShapeError> {
        for (kernel, shape) in &self.shapes {
            let mut shapes = Vec::new();
            for (_, of_class) in kernels.iter().filter(|(name, _)| name == kernel) {
                shapes.extend(of_class.iter().filter(|name| !shapes.contains(*name)).collect::<Vec<_>>());
            }
            if shapes.is_empty() {
                let mut names: Vec<&str> = kernels.iter().map(|(name, _)| *name).collect();
                names.dedup();
                return Err(ShapeError::Kernel { kernel: kernel.clone(), tier, kernels: names.join(", ") });
            }
            if !shapes.contains(&shape.as_str()) {
                let (kernel, shape) = (kernel.clone(), shape.clone());
                return Err(ShapeError::Shape { kernel, shape, tier, shapes: shapes.join(", ") });
            }
        }
        Ok(())
    }

    /// Returns the index of the shape that is forced for a kernel, where the class has it.
    fn shape(&self, kernel: &str, shapes: &[&str]) -> Option<usize> {
        let (_, wanted) = self.shapes.iter().rev().find(|(name, _)| name == kernel)?;
        shapes.iter().position(|shape| shape == wanted)
    }
}

/// Checks that [`VARIABLE`] can be honoured; programs ask at their start and complain.
///
/// # Errors
/// It names a kernel or a shape that the tier in use does not have.
pub fn forced() -> Result<(), ShapeError> {
    let text = std::env::var_os(VARIABLE).unwrap_or_default();
    // Making the list of what there is takes memory and time, for which a short command has no use.
    if text.is_empty() {
        return Ok(());
    }
    let contests = contests();
    let names: Vec<_> = contests.iter().map(|contest| (contest.kernel, contest.names())).collect();
    Forced::parse(&text.to_string_lossy())?.check(Tier::current(), &names)
}

/// Returns the value of [`VARIABLE`], read once per process; one that cannot be parsed is ignored here, see
/// [`Tier::current`].
fn forced_or_none() -> &'static Forced {
    static FORCED: OnceLock<Forced> = OnceLock::new();
    FORCED.get_or_init(|| {
        Forced::parse(&std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy()).unwrap_or_default()
    })
}

/// Returns the shape that a class has before calibration: the forced one, or its default.
pub(crate) fn initial(kernel: &str, shapes: &[&str], default: usize) -> usize {
    forced_or_none().shape(kernel, shapes).unwrap_or(default)
}

/// Lists every kernel and class that has more than one shape on the tier in use.
fn contests() -> Vec<Contest> {
    let rooms: [fn() -> Vec<Contest>; 3] = [crate::crc32c::contests, crate::erasure::contests, crate::crypto::contests];
    rooms.iter().flat_map(|room| room()).filter(|contest| contest.contestants.len() > 1).collect()
}

/// Choices that [`calibrate`] made.
static CALIBRATED: OnceLock<Vec<Choice>> = OnceLock::new();

/// Measures the shapes of every kernel and puts the fastest to use, once a process: a second call returns what the
/// first one found.
///
/// Blocks the calling thread for a few milliseconds, at most for about [`TIME_MAX`]; call it before a program begins to
/// serve.  `clock` returns monotonic time since any moment.  Existing objects, such as an
/// [`erasure::Code`](crate::erasure::Code), keep their loops.
pub fn calibrate(clock: &mut dyn FnMut() -> Duration) -> &'static [Choice] {
    CALIBRATED.get_or_init(|| {
        let forced = forced_or_none();
        let end = clock() + TIME_MAX;
        let decide = |mut contest: Contest| {
            let choice = contest.settle(forced, end, clock);
            contest.install(choice.shape);
            choice
        };
        contests().into_iter().map(decide).collect()
    })
}

/// Lists the choices in use: those of [`calibrate`] where it was called, otherwise the defaults for the processor.
pub fn choices() -> Vec<Choice> {
    match CALIBRATED.get() {
        Some(choices) => choices.clone(),
        None => contests().iter().map(|contest| contest.without_calibration(forced_or_none())).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNELS: [(&str, [&str; 2]); 2] = [("crc32c", ["v4", "v8"]), ("xts", ["v8", "v4"])];

    fn check(text: &str) -> Result<Forced, ShapeError> {
        let kernels: Vec<_> = KERNELS.iter().map(|(kernel, shapes)| (*kernel, shapes.to_vec())).collect();
        let forced = Forced::parse(text)?;
        forced.check(Tier::Portable, &kernels).map(|()| forced)
    }

    #[test]
    fn shapes_are_forced_by_name() {
        let forced = check(" crc32c=v8 , processor").unwrap();
        assert!(forced.processor);
        assert_eq!(forced.shape("crc32c", &["v4", "v8"]), Some(1));
        assert_eq!(forced.shape("crc32c", &["v4"]), None);
        assert_eq!(forced.shape("xts", &["v8", "v4"]), None);
        assert_eq!(check("").unwrap(), Forced::default());
    }

    #[test]
    fn what_cannot_be_honoured_is_an_error_that_says_what_there_is() {
        assert_eq!(check("v8").unwrap_err().to_string(), "`v8` is neither KERNEL=SHAPE nor `processor`");
        let error = check("crc=v8").unwrap_err().to_string();
        assert_eq!(error, "no kernel `crc` has shapes on tier portable; those that have: crc32c, xts");
        let error = check("crc32c=v9").unwrap_err().to_string();
        assert_eq!(error, "crc32c has no shape `v9` on tier portable; it has: v4, v8");
    }

    #[test]
    fn choices_are_the_defaults_until_calibrated_and_then_stay() {
        // No other of this crate's unit tests calibrates.
        let _slots = trace::lock_slots();
        for choice in choices() {
            assert_eq!((choice.shape, choice.reason), (choice.default, ShapeReason::Processor));
        }
        let begin = std::time::Instant::now();
        let first = calibrate(&mut || begin.elapsed()).to_vec();
        for choice in &first {
            assert!(choice.reason == ShapeReason::OutOfTime || !choice.measured.is_empty(), "{choice:?}");
            assert_eq!(choice.shape == choice.default, !matches!(choice.reason, ShapeReason::Calibration { .. }));
        }
        assert_eq!(calibrate(&mut || panic!("measured a second time")), first);
        assert_eq!(choices(), first);
    }
}
