//! Formats that a disk may be packed in, by their first bytes: what is imported as it is would be no disk.

/// A format that is not the bytes of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Container {
    /// Name of the format.
    pub name: &'static str,
    /// Program that converts it to the bytes of a disk.
    pub converter: Converter,
}

/// Program that converts a format to the bytes of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Converter {
    /// `qemu-img convert`.
    Qemu,
    /// A program that unpacks to a pipe with `-dc`.
    Pipe(&'static str),
    /// `import --export-format 2`: it is no disk, but an image.
    ExportFormat2,
    /// `import-diff`: it is no disk, but the changes of one.
    ImportDiff,
}

/// Bytes that the longest of them wants to see.
pub const HEAD_LEN: usize = 64;

const FORMATS: &[(&[u8], &str, Converter)] = &[
    (b"QFI\xfb", "a qcow2 image", Converter::Qemu),
    (b"QED\0", "a QED image", Converter::Qemu),
    (b"KDMV", "a VMDK image", Converter::Qemu),
    (b"# Disk DescriptorFile", "the descriptor of a VMDK image", Converter::Qemu),
    (b"vhdxfile", "a VHDX image", Converter::Qemu),
    (b"conectix", "a VHD image", Converter::Qemu),
    (b"<<< Oracle VM VirtualBox Disk Image", "a VDI image", Converter::Qemu),
    (b"<<< Sun VirtualBox Disk Image", "a VDI image", Converter::Qemu),
    (b"WithoutFreeSpace", "a Parallels image", Converter::Qemu),
    (b"WithouFreSpacExt", "a Parallels image", Converter::Qemu),
    (b"rbd image v2\n", "an export of rbd in format 2", Converter::ExportFormat2),
    (b"rbd diff v1\n", "a diff of rbd", Converter::ImportDiff),
    (b"rbd diff v2\n", "a diff of rbd", Converter::ImportDiff),
    (b"\x1f\x8b\x08", "compressed by gzip", Converter::Pipe("gzip")),
    (b"\xfd7zXZ\0", "compressed by xz", Converter::Pipe("xz")),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", Converter::Pipe("zstd")),
    (b"\x04\x22\x4d\x18", "compressed by lz4", Converter::Pipe("lz4")),
    (b"BZh", "compressed by bzip2", Converter::Pipe("bzip2")),
];

/// Returns the format that begins like this.
pub fn container(head: &[u8]) -> Option<Container> {
    let found = FORMATS.iter().find(|(magic, ..)| head.starts_with(magic));
    found.map(|&(_, name, converter)| Container { name, converter })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disks_are_not_taken_for_containers() {
        let mut mbr = vec![0; 512];
        mbr[..2].copy_from_slice(&[0xeb, 0x63]);
        for head in [&[][..], &[0; HEAD_LEN], &mbr, b"EFI PART", b"LUKS\xba\xbe", b"XFSB"] {
            assert_eq!(container(head), None, "{head:?}");
        }
        assert_eq!(container(b"QFI\xfb\0\0\0\x03").map(|found| found.converter), Some(Converter::Qemu));
        assert!(FORMATS.iter().all(|(magic, ..)| magic.len() <= HEAD_LEN));
    }
}
