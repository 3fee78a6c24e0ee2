//! Processor identification, by which [`mod@crate::shape`] selects its defaults.

use std::sync::OnceLock;

/// Vendor of a processor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vendor {
    /// Intel processor.
    Intel,
    /// AMD processor.
    Amd,
    /// Another one, or an architecture that does not name its vendor.
    Other,
}

/// Identity of a processor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Processor {
    /// Vendor, as CPUID names it.
    pub vendor: Vendor,
    /// Family as in the vendor's tables, the extended part added; 0 where there is none.
    pub family: u32,
    /// Model in the family, the extended part included.
    pub model: u32,
    /// Name that the processor reports; in a virtual machine this may be a general one.
    pub name: String,
}

impl Processor {
    /// Returns the processor that this process runs on.
    pub fn current() -> &'static Processor {
        static CURRENT: OnceLock<Processor> = OnceLock::new();
        CURRENT.get_or_init(read)
    }

    /// Decodes CPUID's vendor and the version word of its leaf 1.
    #[cfg(any(target_arch = "x86_64", test))]
    fn decode(vendor: &[u8], version: u32, name: String) -> Self {
        let vendor = match vendor {
            b"GenuineIntel" => Vendor::Intel,
            b"AuthenticAMD" => Vendor::Amd,
            _ => Vendor::Other,
        };
        let field = |from: u32, bits: u32| version >> from & ((1 << bits) - 1);
        let base = field(8, 4);
        let family = if base == 15 { base + field(20, 8) } else { base };
        // Intel's family 6 and every family from 15 on have an extended model.
        let extended = if base == 6 || base == 15 { field(16, 4) << 4 } else { 0 };
        Self { vendor, family, model: extended | field(4, 4), name }
    }
}

#[cfg(target_arch = "x86_64")]
fn read() -> Processor {
    use std::arch::x86_64::{__cpuid, CpuidResult};
    let bytes = |words: [u32; 3]| words.map(u32::to_le_bytes).concat();
    let CpuidResult { ebx, ecx, edx, .. } = __cpuid(0);
    let vendor = bytes([ebx, edx, ecx]);
    let mut name = Vec::new();
    if __cpuid(0x8000_0000).eax >= 0x8000_0004 {
        for leaf in 0x8000_0002..=0x8000_0004 {
            let CpuidResult { eax, ebx, ecx, edx } = __cpuid(leaf);
            name.extend([eax, ebx, ecx, edx].map(u32::to_le_bytes).concat());
        }
    }
    let name = String::from_utf8_lossy(&name).trim_matches(['\0', ' ']).to_owned();
    Processor::decode(&vendor, __cpuid(1).eax, name)
}

#[cfg(not(target_arch = "x86_64"))]
fn read() -> Processor {
    Processor { vendor: Vendor::Other, family: 0, model: 0, name: std::env::consts::ARCH.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_makers_write_them() {
        let decode = |vendor: &[u8], version| {
            let processor = Processor::decode(vendor, version, String::new());
            (processor.vendor, processor.family, processor.model)
        };
        // Sapphire Rapids, Zen 4 (Genoa), Zen 5 (Turin), and something else.
        assert_eq!(decode(b"GenuineIntel", 0x0008_06F8), (Vendor::Intel, 6, 0x8F));
        assert_eq!(decode(b"AuthenticAMD", 0x00A1_0F11), (Vendor::Amd, 0x19, 0x11));
        assert_eq!(decode(b"AuthenticAMD", 0x00B0_0F21), (Vendor::Amd, 0x1A, 0x02));
        assert_eq!(decode(b"CentaurHauls", 0x0000_06F2).0, Vendor::Other);
    }

    #[test]
    fn this_processor_has_a_name() {
        assert!(!Processor::current().name.is_empty());
    }
}
