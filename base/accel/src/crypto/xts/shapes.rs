//! How many vectors are in flight at once: the loop shapes of XTS, and which of them is in use.
//!
//! More vectors hide the latency of a round; fewer leave registers free, and a sector of 512 bytes is over sooner.

use std::sync::atomic::{AtomicU8, Ordering};

use super::{SectorSize, Xts};
use crate::shape::{self, Contest, Contestant};
use crate::tier::Tier;

/// The name of this kernel among choices.
const KERNEL: &str = "xts";

/// Vectors in flight: of four blocks with VAES, of one with AES-NI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Eight.
    V8,
    /// Four.
    V4,
}

impl Shape {
    /// Every shape, the default first.
    pub(crate) const ALL: [Shape; 2] = [Shape::V8, Shape::V4];

    /// Its name among choices.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Shape::V8 => "v8",
            Shape::V4 => "v4",
        }
    }
}

/// A shape for each size of sectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shapes([Shape; 2]);

/// The classes: sizes of sectors, and their names.
const CLASSES: [(SectorSize, &str); 2] =
    [(SectorSize::Bytes512, "sectors of 512 B"), (SectorSize::Bytes4096, "sectors of 4 KiB")];

/// The index in [`Shape::ALL`] of the shape in use for each class.
static CHOSEN: [AtomicU8; CLASSES.len()] = [const { AtomicU8::new(UNDECIDED) }; CLASSES.len()];

/// Neither forced nor calibrated so far.
const UNDECIDED: u8 = u8::MAX;

impl Default for Shapes {
    fn default() -> Self {
        Self::both(Shape::ALL[0])
    }
}

impl Shapes {
    /// One for all sizes.
    pub(super) fn both(shape: Shape) -> Self {
        Self([shape; 2])
    }

    /// Those in use.
    pub(super) fn chosen() -> Self {
        let names = Shape::ALL.map(Shape::name);
        let shape = |at: usize| match CHOSEN[at].load(Ordering::Relaxed) {
            UNDECIDED => Shape::ALL[shape::forced_or_none().shape(KERNEL, &names).unwrap_or(0)],
            chosen => Shape::ALL[usize::from(chosen)],
        };
        Self([shape(0), shape(1)])
    }

    /// That of a size.
    pub(super) fn of(self, size: SectorSize) -> Shape {
        match size {
            SectorSize::Bytes512 => self.0[0],
            SectorSize::Bytes4096 => self.0[1],
        }
    }
}

/// The shape in use for a size of sectors.
pub(crate) fn in_use(size: SectorSize) -> Shape {
    Shapes::chosen().of(size)
}

/// The loops of the tier in use, for calibration; none where AES is a library's.
pub(crate) fn contests() -> Vec<Contest> {
    let key: Vec<u8> = (0..64).collect();
    let contest = |(at, (size, class)): (usize, (SectorSize, &'static str))| {
        let contestant = |shape: Shape| {
            let xts = Xts::with_shape(&key, Tier::current(), shape).ok().filter(Xts::has_shapes)?;
            let mut data = vec![0x5A; 32 << 10];
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                xts.encrypt_in_place(size, 1, &mut data);
                data.len()
            });
            Some(Contestant { name: shape.name(), work })
        };
        let contestants = Shape::ALL.into_iter().filter_map(contestant).collect();
        let install = move |shape: usize| CHOSEN[at].store(shape as u8, Ordering::Relaxed);
        Contest { kernel: KERNEL, class, contestants, default: 0, install: Box::new(install) }
    };
    CLASSES.into_iter().enumerate().map(contest).collect()
}
