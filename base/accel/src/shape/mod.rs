//! Loop shapes: which of several loops that do the same work is in use, and why.
//!
//! A [tier](crate::tier) says which instructions there are; how many of them a processor begins in a cycle, and how long
//! each takes, differs between processors of one tier, and with it the fastest loop.  A kernel with several loops has a
//! *default* for the processor at hand, from a table of what was measured or is known of it
//! ([`mod@crate::processor`]).  A program that runs for long calls [`calibrate`] once before it serves; that
//! replaces a default by a loop that is clearly faster here.  The environment variable `FOREBAY_ACCEL_SHAPES` overrides
//! both.
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

use std::fmt;
use std::sync::OnceLock;
use std::time::Duration;

use crate::tier::Tier;
pub(crate) use contest::{Contest, Contestant};

/// The environment variable that forces shapes: `KERNEL=SHAPE`, separated by commas; or `processor`, for the defaults
/// without calibration.
pub const VARIABLE: &str = "FOREBAY_ACCEL_SHAPES";

/// A shape other than the default is taken when it is faster by more than this many percent.
pub const MARGIN_PERCENT: f64 = 5.0;

/// Calibration of all kernels ends after this time, with defaults for those that had too little of it.  It takes a
/// tenth of this on a quiet machine.
pub const TIME_MAX: Duration = Duration::from_millis(100);

/// The loop in use for one kernel and class of sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// The kernel, such as `crc32c`.
    pub kernel: &'static str,
    /// The sizes this choice is for, such as `3 KiB to 12 KiB`.
    pub class: &'static str,
    /// The shape in use.
    pub shape: &'static str,
    /// Why.
    pub reason: Reason,
    /// The default for this processor.
    pub default: &'static str,
    /// What calibration measured, in the order of the kernel's list; empty without calibration.
    pub measured: Vec<Measured>,
}

/// A shape's figure from calibration.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// The shape.
    pub shape: &'static str,
    /// 10^9 bytes a second in the fastest of the rounds.
    pub gb_per_s: f64,
}

/// Why a shape is in use.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Reason {
    /// The default for this processor, without calibration.
    Processor,
    /// The default for this processor; calibration measured nothing clearly faster.
    Confirmed,
    /// Calibration measured it to be faster than the default by so many percent.
    Calibration {
        /// In the median of the rounds.
        percent: f64,
    },
    /// The default for this processor, because calibration ran out of time.
    OutOfTime,
    /// [`VARIABLE`] asks for it.
    Forced,
}

impl fmt::Display for Reason {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Processor => out.write_str("by processor"),
            Reason::Confirmed => out.write_str("by processor, confirmed by calibration"),
            Reason::Calibration { percent } => write!(out, "by calibration (+{percent:.0} %)"),
            Reason::OutOfTime => out.write_str("by processor, calibration ran out of time"),
            Reason::Forced => write!(out, "by {VARIABLE}"),
        }
    }
}

/// Why [`VARIABLE`] cannot be honoured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// An item is neither `KERNEL=SHAPE` nor `processor`.
    #[error("`{0}` is neither KERNEL=SHAPE nor `processor`")]
    Item(String),
    /// No kernel of this name has shapes on the tier in use.
    #[error("no kernel `{kernel}` has shapes on tier {tier}; those that have: {kernels}")]
    Kernel {
        /// What was asked for.
        kernel: String,
        /// The tier in use.
        tier: Tier,
        /// What there is.
        kernels: String,
    },
    /// The kernel has no shape of this name on the tier in use.
    #[error("{kernel} has no shape `{shape}` on tier {tier}; it has: {shapes}")]
    Shape {
        /// The kernel.
        kernel: String,
        /// What was asked for.
        shape: String,
        /// The tier in use.
        tier: Tier,
        /// What there is.
        shapes: String,
    },
}

/// What [`VARIABLE`] says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Forced {
    /// No calibration.
    pub processor: bool,
    /// Kernels and their shapes.
    shapes: Vec<(String, String)>,
}

impl Forced {
    /// Reads the variable's value.
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

    /// Compares with the kernels of the tier in use.  A shape must exist in one class of the kernel at least; classes
    /// without it keep their default.
    fn check(self, tier: Tier, kernels: &[(&'static str, Vec<&'static str>)]) -> Result<Self, ShapeError> {
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
        Ok(self)
    }

    /// The shape that is asked for, if the class has it.
    pub(crate) fn shape(&self, kernel: &str, shapes: &[&str]) -> Option<usize> {
        let (_, wanted) = self.shapes.iter().rev().find(|(name, _)| name == kernel)?;
        shapes.iter().position(|shape| shape == wanted)
    }
}

/// What [`VARIABLE`] asks for.
///
/// # Errors
/// It names a kernel or a shape that the tier in use does not have.
pub fn forced() -> Result<Forced, ShapeError> {
    let text = std::env::var_os(VARIABLE).unwrap_or_default();
    // Making the list of what there is takes memory and time, for which a short command has no use.
    if text.is_empty() {
        return Ok(Forced::default());
    }
    let contests = contests();
    let names: Vec<_> = contests.iter().map(|contest| (contest.kernel, contest.names())).collect();
    Forced::parse(&text.to_string_lossy())?.check(Tier::current(), &names)
}

/// The same, read once a process; a value that cannot be honoured counts for nothing here, see [`Tier::current`].
pub(crate) fn forced_or_none() -> &'static Forced {
    static FORCED: OnceLock<Forced> = OnceLock::new();
    FORCED.get_or_init(|| {
        Forced::parse(&std::env::var_os(VARIABLE).unwrap_or_default().to_string_lossy()).unwrap_or_default()
    })
}

/// Every kernel and class that has more than one shape on the tier in use.
fn contests() -> Vec<Contest> {
    let rooms: [fn() -> Vec<Contest>; 3] = [crate::crc32c::contests, crate::erasure::contests, crate::crypto::contests];
    rooms.iter().flat_map(|room| room()).filter(|contest| contest.contestants.len() > 1).collect()
}

/// What [`calibrate`] found.
static CALIBRATED: OnceLock<Vec<Choice>> = OnceLock::new();

/// Measures the shapes of every kernel and puts the fastest to use, once a process: a second call returns what the
/// first one found.
///
/// It keeps the calling thread busy for a few milliseconds, at most for about [`TIME_MAX`], and belongs before a
/// program begins to serve.  `clock` is a monotonic time since any moment.  What exists already, such as an
/// [`erasure::Code`](crate::erasure::Code), keeps its loops.
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

/// The choices in use: those of [`calibrate`] where it was called, otherwise the defaults for the processor.
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
        Forced::parse(text)?.check(Tier::Portable, &kernels)
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
        // No other test of this crate's unit tests calibrates.
        for choice in choices() {
            assert_eq!((choice.shape, choice.reason), (choice.default, Reason::Processor));
        }
        let begin = std::time::Instant::now();
        let first = calibrate(&mut || begin.elapsed()).to_vec();
        for choice in &first {
            assert!(choice.reason == Reason::OutOfTime || !choice.measured.is_empty(), "{choice:?}");
            assert_eq!(choice.shape == choice.default, !matches!(choice.reason, Reason::Calibration { .. }));
        }
        assert_eq!(calibrate(&mut || panic!("measured a second time")), first);
        assert_eq!(choices(), first);
    }
}
