//! How many vectors a step of the kernel takes: its loop shapes, and which of them is in use.
//!
//! More vectors a step load a coefficient less often and need more registers; what is best depends on how many loads
//! and products a processor begins in a cycle.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::pass::widths;
use super::{Code, Construction};
use crate::shape::{self, Contest, Contestant};
use crate::tier::Tier;

/// The name of this kernel among choices.
const KERNEL: &str = "erasure";

/// The vectors a step may take, and their names.
const SHAPES: [(usize, &str); 3] = [(4, "v4"), (2, "v2"), (1, "v1")];

/// A class of plans, which share a choice: how many outputs they have, and the shape that is measured for them.
struct Class {
    name: &'static str,
    outputs: std::ops::RangeInclusive<usize>,
    measured: (usize, usize),
}

const CLASSES: [Class; 3] = [
    Class { name: "1 output", outputs: 1..=1, measured: (8, 1) },
    Class { name: "2 to 4 outputs", outputs: 2..=4, measured: (8, 3) },
    Class { name: "5 to 8 outputs", outputs: 5..=8, measured: (10, 6) },
];

/// Vectors a step in use for each class on the tier in use; 0: each number of outputs has its own default.
static CHOSEN: [AtomicUsize; CLASSES.len()] = [const { AtomicUsize::new(UNDECIDED) }; CLASSES.len()];

/// Neither forced nor calibrated so far.
const UNDECIDED: usize = usize::MAX;

/// Which shape a plan takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Steps {
    /// The one in use.
    Chosen,
    /// So many vectors where the number of outputs allows it, otherwise its default.
    Vectors(usize),
}

impl Steps {
    /// The shape of a name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        SHAPES.iter().find(|(_, known)| *known == name).map(|(vectors, _)| Steps::Vectors(*vectors))
    }

    /// Vectors a step of a pass.
    pub(crate) fn vectors(self, tier: Tier, outputs: usize) -> usize {
        let wanted = match self {
            Steps::Vectors(vectors) => vectors,
            Steps::Chosen if tier == Tier::current() => chosen(outputs),
            Steps::Chosen => 0,
        };
        let widths = widths(tier, outputs);
        if widths.contains(&wanted) { wanted } else { widths[0] }
    }
}

/// The names of all shapes.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    SHAPES.iter().map(|(_, name)| *name)
}

/// The names of a class's shapes on a tier, and which of them is the default: that of the measured number of outputs.
fn of_class(tier: Tier, class: &Class) -> (Vec<(usize, &'static str)>, usize) {
    let everywhere = |vectors: usize| class.outputs.clone().all(|outputs| widths(tier, outputs).contains(&vectors));
    let shapes: Vec<_> = SHAPES.into_iter().filter(|(vectors, _)| everywhere(*vectors)).collect();
    let default = widths(tier, class.measured.1)[0];
    let at = shapes.iter().position(|(vectors, _)| *vectors == default).unwrap_or(0);
    (shapes, at)
}

/// The choice for a number of outputs on the tier in use.
fn chosen(outputs: usize) -> usize {
    let Some(at) = CLASSES.iter().position(|class| class.outputs.contains(&outputs)) else { return 0 };
    match CHOSEN[at].load(Ordering::Relaxed) {
        UNDECIDED => {
            let (shapes, _) = of_class(Tier::current(), &CLASSES[at]);
            let names: Vec<&str> = shapes.iter().map(|(_, name)| *name).collect();
            shape::forced_or_none().shape(KERNEL, &names).map_or(0, |forced| shapes[forced].0)
        }
        vectors => vectors,
    }
}

/// The name of the shape in use for a number of outputs.
pub(super) fn in_use(outputs: usize) -> &'static str {
    let vectors = Steps::Chosen.vectors(Tier::current(), outputs);
    SHAPES.iter().find(|(known, _)| *known == vectors).map_or("", |(_, name)| name)
}

/// The loops of the tier in use, for calibration.
pub(crate) fn contests() -> Vec<Contest> {
    const LEN: usize = 16 << 10;
    let tier = Tier::current();
    let contest = |(at, class): (usize, &Class)| {
        let (shapes, default) = of_class(tier, class);
        let (k, m) = class.measured;
        let contestant = |&(_, name): &(usize, &'static str)| {
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
        let contestants = shapes.iter().map(contestant).collect();
        let install = move |shape: usize| {
            // The default of the class stands for those of each number of outputs.
            let vectors = if shape == default { 0 } else { shapes[shape].0 };
            CHOSEN[at].store(vectors, Ordering::Relaxed);
        };
        Contest { kernel: KERNEL, class: class.name, contestants, default, install: Box::new(install) }
    };
    CLASSES.iter().enumerate().map(contest).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_that_a_number_of_outputs_lacks_gives_way_to_the_default() {
        for tier in Tier::available() {
            for outputs in 1..=8 {
                let widths = widths(tier, outputs);
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
    fn every_class_has_two_shapes_on_every_tier_with_vectors() {
        for tier in Tier::available().filter(|&tier| tier != Tier::Portable) {
            for class in &CLASSES {
                let (shapes, default) = of_class(tier, class);
                assert!(shapes.len() >= 2, "{tier} {}", class.name);
                assert_eq!(shapes[default].0, widths(tier, class.measured.1)[0]);
            }
        }
    }
}
