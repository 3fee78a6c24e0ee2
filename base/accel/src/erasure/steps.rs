//! Loop shapes of the kernel, the number of vectors per step, and the selection of the one in use.
//!
//! More vectors a step load a coefficient less often and need more registers; what is best depends on how many loads
//! and products a processor begins in a cycle.

use super::pass::ErasureKernels;
use super::{Code, Construction};
use crate::shape::{self, Contest, Contestant, ShapeSlot};
use crate::tier::Tier;

/// Name of this kernel among choices.
const KERNEL: &str = "erasure";

/// Numbers of vectors that a step may take, and their names.
const SHAPES: [(usize, &str); 3] = [(4, "v4"), (2, "v2"), (1, "v1")];

/// Class of plans, which share a choice.  All of its numbers of outputs have the same [widths](ErasureKernels::widths)
/// on every tier.
struct Class {
    name: &'static str,
    outputs: std::ops::RangeInclusive<usize>,
    /// Data and parity chunks of the code that calibration measures.
    measured: (usize, usize),
    slot: ShapeSlot,
}

static CLASSES: [Class; 4] = [
    Class { name: "1 output", outputs: 1..=1, measured: (8, 1), slot: ShapeSlot::new() },
    Class { name: "2 to 3 outputs", outputs: 2..=3, measured: (8, 3), slot: ShapeSlot::new() },
    Class { name: "4 outputs", outputs: 4..=4, measured: (8, 4), slot: ShapeSlot::new() },
    Class { name: "5 to 8 outputs", outputs: 5..=8, measured: (10, 6), slot: ShapeSlot::new() },
];

impl Class {
    /// Returns the class of a number of outputs, 1 to 8.
    fn of(outputs: usize) -> &'static Class {
        let class = CLASSES.iter().find(|class| class.outputs.contains(&outputs));
        class.unwrap_or_else(|| unreachable!("no pass has {outputs} outputs"))
    }

    /// Lists the class's shapes on a tier, the default first.
    fn widths(&self, tier: Tier) -> &'static [usize] {
        ErasureKernels::of(tier).widths(*self.outputs.start())
    }

    /// Returns the vectors of a step in use, on the tier in use.
    fn in_use(&self) -> usize {
        let widths = self.widths(Tier::current());
        let initial = || {
            let names: Vec<&str> = widths.iter().map(|&vectors| name(vectors)).collect();
            shape::initial(KERNEL, &names, 0)
        };
        widths[self.slot.get(initial)]
    }
}

/// Returns the name of a shape.
fn name(vectors: usize) -> &'static str {
    let shape = SHAPES.iter().find(|(known, _)| *known == vectors);
    shape.map(|(_, name)| *name).unwrap_or_else(|| unreachable!("no step has {vectors} vectors"))
}

/// Shape that a plan takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Steps {
    /// Shape in use on the tier in use, default on another one.
    Chosen,
    /// Number of vectors where the number of outputs allows it, otherwise its default.
    Vectors(usize),
}

impl Steps {
    /// Returns the shape of a name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        SHAPES.iter().find(|(_, known)| *known == name).map(|(vectors, _)| Steps::Vectors(*vectors))
    }

    /// Returns the number of vectors per step, for a pass with this number of outputs.
    pub(crate) fn vectors(self, tier: Tier, outputs: usize) -> usize {
        let widths = ErasureKernels::of(tier).widths(outputs);
        match self {
            Steps::Vectors(vectors) if widths.contains(&vectors) => vectors,
            Steps::Chosen if tier == Tier::current() => Class::of(outputs).in_use(),
            _ => widths[0],
        }
    }
}

/// Lists the names of all shapes.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|(_, name)| *name)
}

/// Returns the name of the shape in use for a number of outputs.
pub(super) fn in_use(outputs: usize) -> &'static str {
    name(Steps::Chosen.vectors(Tier::current(), outputs))
}

/// Lists the loops of the tier in use, for calibration.
pub(crate) fn contests() -> Vec<Contest> {
    const LEN: usize = 16 << 10;
    let tier = Tier::current();
    let contest = |class: &'static Class| {
        let (k, m) = class.measured;
        let contestant = |&vectors: &usize| {
            let name = name(vectors);
            let code = Code::with_shape(Construction::Vandermonde, k, m, tier, name).expect("an available tier");
            let data: Vec<Vec<u8>> = vec![vec![0x5A; LEN]; k];
            let mut parity = vec![vec![0u8; LEN]; m];
            let work: Box<dyn FnMut() -> usize> = Box::new(move || {
                let sources: Vec<&[u8]> = data.iter().map(|chunk| &chunk[..]).collect();
                let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
                code.encode(&sources, &mut outputs).expect("chunks of the right shape");
                k * LEN
            });
            Contestant { name, work }
        };
        let contestants = class.widths(tier).iter().map(contestant).collect();
        Contest { kernel: KERNEL, class: class.name, contestants, default: 0, slot: &class.slot }
    };
    CLASSES.iter().map(contest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shape::trace;

    #[test]
    fn a_shape_that_a_number_of_outputs_lacks_gives_way_to_the_default() {
        for tier in Tier::available() {
            for outputs in 1..=8 {
                let widths = ErasureKernels::of(tier).widths(outputs);
                assert!(widths.contains(&1), "{tier} {outputs}: chunks far apart are read a vector at a time");
                for (vectors, name) in SHAPES {
                    let taken = Steps::named(name).unwrap().vectors(tier, outputs);
                    assert_eq!(taken, if widths.contains(&vectors) { vectors } else { widths[0] });
                }
            }
        }
        assert_eq!(Steps::named("v3"), None);
    }

    #[test]
    fn the_numbers_of_outputs_of_a_class_have_the_same_shapes_and_default_on_every_tier() {
        for tier in Tier::ALL {
            for outputs in 1..=8 {
                let class = Class::of(outputs);
                assert_eq!(ErasureKernels::of(tier).widths(outputs), class.widths(tier), "{tier} {outputs}");
                assert!(class.outputs.contains(&class.measured.1), "{}", class.name);
            }
        }
    }

    #[test]
    fn every_class_has_two_shapes_on_every_tier_with_vectors() {
        for tier in Tier::available().filter(|&tier| tier != Tier::Portable) {
            for class in &CLASSES {
                assert!(class.widths(tier).len() >= 2, "{tier} {}", class.name);
            }
        }
    }

    /// Installs each shape of each class, and encodes, with checksums and without, with every number of outputs.
    #[test]
    fn an_installed_shape_is_the_loop_that_runs() {
        let _slots = trace::lock_slots();
        let tier = Tier::current();
        let encode = |m: usize, checksums: bool| {
            let code = Code::new(Construction::Cauchy, 4, m).unwrap();
            let data = vec![vec![0x5A; 1024]; 4];
            let mut parity = vec![vec![0; 1024]; m];
            let sources: Vec<&[u8]> = data.iter().map(|chunk| &chunk[..]).collect();
            let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[..]).collect();
            let mut crcs = vec![0; 4 + m];
            trace::ran(|| {
                if checksums {
                    code.encode_checksummed(&sources, &mut outputs, &mut crcs).unwrap();
                } else {
                    code.encode(&sources, &mut outputs).unwrap();
                }
            })
        };
        for contest in contests() {
            let class = CLASSES.iter().find(|class| class.name == contest.class).unwrap();
            for shape in contest.names() {
                contest.install(shape);
                for m in class.outputs.clone() {
                    assert_eq!(encode(m, false), [shape], "{tier} {m}");
                    assert!(encode(m, true).contains(&shape.to_owned()), "{tier} {m} {shape}");
                    assert_eq!(in_use(m), shape);
                }
            }
            contest.install(contest.names()[0]);
        }
    }
}
