//! Loop shapes of XTS: the number of vectors in flight, and the selection of the one in use.
//!
//! More vectors hide the latency of a round; fewer leave registers free, and a sector of 512 bytes is over sooner.

use super::{SectorSize, Xts};
use crate::shape::{self, Contest, Contestant, ShapeSlot};
use crate::tier::Tier;

/// Name of this kernel among choices.
const KERNEL: &str = "xts";

/// Number of vectors in flight: of four blocks with VAES, of one with AES-NI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum XtsShape {
    /// Eight vectors in flight.
    V8,
    /// Four vectors in flight.
    V4,
}

impl XtsShape {
    /// Shapes, the default first.
    pub(crate) const ALL: [XtsShape; 2] = [XtsShape::V8, XtsShape::V4];

    /// Returns its name among choices.
    pub(crate) fn name(self) -> &'static str {
        match self {
            XtsShape::V8 => "v8",
            XtsShape::V4 => "v4",
        }
    }
}

/// Shapes for both sizes of sectors.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shapes([XtsShape; 2]);

/// Classes: sizes of sectors, and their names.
const CLASSES: [(SectorSize, &str); 2] =
    [(SectorSize::Bytes512, "sectors of 512 B"), (SectorSize::Bytes4096, "sectors of 4 KiB")];

/// Shape in use for each class: an index in [`XtsShape::ALL`].
static SLOTS: [ShapeSlot; CLASSES.len()] = [const { ShapeSlot::new() }; CLASSES.len()];

impl Default for Shapes {
    fn default() -> Self {
        Self::both(XtsShape::ALL[0])
    }
}

impl Shapes {
    /// Takes one shape for both sizes.
    pub(super) fn both(shape: XtsShape) -> Self {
        Self([shape; 2])
    }

    /// Returns the shapes in use.
    pub(super) fn chosen() -> Self {
        let initial = || shape::initial(KERNEL, &XtsShape::ALL.map(XtsShape::name), 0);
        Self(SLOTS.each_ref().map(|slot| XtsShape::ALL[slot.get(initial)]))
    }

    /// Returns the shape of a size.
    pub(super) fn of(self, size: SectorSize) -> XtsShape {
        match size {
            SectorSize::Bytes512 => self.0[0],
            SectorSize::Bytes4096 => self.0[1],
        }
    }
}

/// Returns the shape in use for a size of sectors.
pub(crate) fn in_use(size: SectorSize) -> XtsShape {
    Shapes::chosen().of(size)
}

/// Lists the loops of the tier in use, for calibration; none where AES is a library's.
pub(crate) fn contests() -> Vec<Contest> {
    let key: Vec<u8> = (0..64).collect();
    let contest = |(at, (size, class)): (usize, (SectorSize, &'static str))| {
        let contestant = |shape: XtsShape| {
            let xts = Xts::with_shape(&key, Tier::current(), shape).ok().filter(Xts::has_shapes)?;
            let mut data = vec![0x5A; 32 << 10];
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                xts.encrypt_in_place(size, 1, &mut data);
                data.len()
            });
            Some(Contestant { name: shape.name(), work })
        };
        let contestants = XtsShape::ALL.into_iter().filter_map(contestant).collect();
        Contest { kernel: KERNEL, class, contestants, default: 0, slot: &SLOTS[at] }
    };
    CLASSES.into_iter().enumerate().map(contest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::trace;

    /// Installs each shape of each class, and encrypts and decrypts with keys made before and after.
    #[test]
    fn an_installed_shape_is_the_loop_that_a_new_key_runs() {
        let _slots = trace::lock_slots();
        for length in [32, 64] {
            let key: Vec<u8> = (0..length).collect();
            let run = |xts: &Xts, size: SectorSize| {
                let mut data = vec![0; 2 * size.get()];
                trace::ran(|| {
                    xts.encrypt_in_place(size, 1, &mut data);
                    xts.decrypt_in_place(size, 1, &mut data);
                })
            };
            for (contest, (size, class)) in contests().iter().zip(CLASSES) {
                assert_eq!(contest.class, class);
                let mut before: Option<(Xts, &str)> = None;
                for shape in contest.names() {
                    contest.install(shape);
                    let xts = Xts::new(&key).unwrap();
                    assert_eq!(run(&xts, size), [shape; 2], "{class}");
                    assert_eq!(in_use(size).name(), shape);
                    if let Some((older, shape)) = before.replace((xts, shape)) {
                        assert_eq!(run(&older, size), [shape; 2], "a key keeps its loops");
                    }
                }
                if let Some(default) = contest.names().first() {
                    contest.install(default);
                }
            }
        }
    }
}
