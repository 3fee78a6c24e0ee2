//! Which kernels there are, which variant of each is in use, and a piece of work to time each of them with.
//!
//! This crate holds no clock.  A program that wants figures (`forebay perf accel`) takes the list, calls each variant's
//! work as often as it likes and does the dividing.  A room joins the list with one line in [`kernels`].

/// A kernel and its variants: for most the tiers, for codecs and ciphers the libraries or engines.
pub struct Kernel {
    /// What it does, with the sizes it is timed at, such as `crc32c 4 KiB`.
    pub name: String,
    /// The variant a call to this crate uses in this process.
    pub chosen: String,
    /// Everything that can run on this machine, the plainest first.
    pub variants: Vec<Variant>,
}

/// One way to do a kernel's work.
pub struct Variant {
    /// A tier's name, or a library's.
    pub name: String,
    /// Does the work once, and returns the bytes of payload it went over.
    pub work: Box<dyn FnMut() -> usize>,
}

impl Variant {
    /// A variant by its name and its work.
    pub fn new(name: impl Into<String>, work: impl FnMut() -> usize + 'static) -> Self {
        Self { name: name.into(), work: Box::new(work) }
    }
}

/// Every kernel of this crate that can be timed.
pub fn kernels() -> Vec<Kernel> {
    let rooms: [fn() -> Vec<Kernel>; 4] =
        [crate::crc32c::perf, crate::erasure::perf, crate::compress::perf, crate::crypto::perf];
    rooms.iter().flat_map(|room| room()).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_kernel_names_its_variants_and_works() {
        for kernel in &mut super::kernels() {
            assert!(kernel.variants.iter().any(|variant| variant.name == kernel.chosen), "{}", kernel.name);
            for variant in &mut kernel.variants {
                assert!((variant.work)() > 0, "{} {}", kernel.name, variant.name);
            }
        }
    }
}
