//! List of kernels, the variant of each in use, and a unit of work to time each of them with.
//!
//! This crate holds no clock.  A benchmark (`forebay perf accel`) takes the list, runs each variant's work as often as
//! needed and computes the throughput.  A module joins the list with one line in [`kernels`].

/// Kernel and its variants: for most the tiers, for codecs and ciphers the libraries or engines.
pub struct Kernel {
    /// Work, with the sizes it is timed at, such as `crc32c 4 KiB`.
    pub name: String,
    /// Variant that a call to this crate uses in this process.
    pub chosen: String,
    /// Variants that can run on this machine, the plainest first.
    pub variants: Vec<Variant>,
}

/// Variant of a kernel: one way to do its work.
pub struct Variant {
    /// Name of a tier, or of a library.
    pub name: String,
    /// Does the work once, and returns the bytes of payload it went over.
    pub work: Box<dyn FnMut() -> usize>,
}

impl Variant {
    /// Makes a variant of its name and its work.
    pub fn new(name: impl Into<String>, work: impl FnMut() -> usize + 'static) -> Self {
        Self { name: name.into(), work: Box::new(work) }
    }
}

/// Detail of a list of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Detail {
    /// One variant per tier, with the loop shapes in use.
    Tiers,
    /// Lists a variant for each [loop shape](mod@crate::shape) of every tier, as `tier/shape`, and more sizes.
    Shapes,
}

/// Lists every kernel of this crate that can be timed.
pub fn kernels(detail: Detail) -> Vec<Kernel> {
    let rooms: [fn(Detail) -> Vec<Kernel>; 4] =
        [crate::crc32c::perf, crate::erasure::perf, |_| crate::compress::perf(), crate::crypto::perf];
    rooms.iter().flat_map(|room| room(detail)).collect()
}

#[cfg(test)]
mod tests {
    use super::Detail;

    #[test]
    fn every_kernel_names_its_variants_and_works() {
        let all = [Detail::Tiers, Detail::Shapes].map(super::kernels);
        for mut kernel in all.into_iter().flatten() {
            assert!(kernel.variants.iter().any(|variant| variant.name == kernel.chosen), "{}", kernel.name);
            for variant in &mut kernel.variants {
                assert!((variant.work)() > 0, "{} {}", kernel.name, variant.name);
            }
        }
    }
}
