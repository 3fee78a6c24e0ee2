//! Unit identification and description: INQUIRY and its vital product data, READ CAPACITY and REPORT LUNS.

use super::naming::{DESIGNATOR_MAX, NameDesignator, ScsiNaming};
use super::ports::TargetPort;
use super::{BLOCK, PHYSICAL_EXPONENT, be16, be32, pad};

/// Peripheral device type of a direct access block device.
const DISK: u8 = 0x00;
const WELL_KNOWN: u8 = 0x1e;
/// Peripheral qualifier 011b and device type 1Fh: no device at this LUN.
const NOTHING: u8 = 0x7f;

/// Maximum transfer length in blocks: 32 MiB.
pub const TRANSFER_BLOCKS_MAX: u32 = 65_536;
/// Optimal transfer length in blocks: 1 MiB.
const TRANSFER_BLOCKS_BEST: u32 = 2048;
/// Maximum length of COMPARE AND WRITE in blocks.
pub const COMPARE_BLOCKS_MAX: u32 = 128;
/// Maximum length of WRITE SAME in blocks: 2 GiB of zeroes, which are cheap; other patterns are written in pieces.
pub const SAME_BLOCKS_MAX: u32 = 0x40_0000;
/// Maximum number of blocks of an UNMAP, in one descriptor or all of them: 512 MiB.
pub const UNMAP_BLOCKS_MAX: u32 = 0x10_0000;
/// Maximum number of descriptors of an UNMAP.
pub const UNMAP_DESCRIPTORS_MAX: u32 = 256;

/// Unit identity, stable across restarts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitIdentity {
    /// UUID of the volume.
    pub uuid: [u8; 16],
    /// Product revision; at most 4 bytes.
    pub revision: String,
}

impl UnitIdentity {
    /// Returns the unit serial number: the UUID's 32 digits.
    pub fn serial(&self) -> String {
        use std::fmt::Write;
        let mut text = String::with_capacity(32);
        for byte in self.uuid {
            let _ = write!(text, "{byte:02x}");
        }
        text
    }

    /// Returns the NAA identifier: locally assigned (type 3), 60 bits of the UUID.
    pub fn naa(&self) -> [u8; 8] {
        ScsiNaming::naa(&self.uuid)
    }
}

/// Appends a text field of fixed length, padded with spaces.
fn field(out: &mut Vec<u8>, text: &str, len: usize) {
    let printable = text.bytes().map(|byte| if (0x20..0x7f).contains(&byte) { byte } else { b'_' });
    out.extend(printable.chain(std::iter::repeat(b' ')).take(len));
}

/// T10 vendor identification, the same for every unit.
pub const VENDOR: &str = "FOREBAY";
/// Product identification, the same for every unit: hosts have rules for vendor and product, so neither depends on the
/// volume.
pub const PRODUCT: &str = "Forebay volume";

/// Asymmetric access that the standard INQUIRY data reports (TPGS field).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum TargetPortGroupSupport {
    /// Implicit: states change without a request of a host.
    Implicit = 0x10,
    /// Implicit and explicit; for a single group, whose state never changes.
    Both = 0x30,
}

/// Third-party copy (3PC field).
const THIRD_PARTY_COPY: u8 = 0x08;

/// Builds the standard INQUIRY data.
pub fn standard(identity: &UnitIdentity, groups: TargetPortGroupSupport, naming: &ScsiNaming) -> Vec<u8> {
    let mut out = vec![DISK, 0, 0x06, 0x12, 0, THIRD_PARTY_COPY | groups as u8, 0, 0x02];
    field(&mut out, VENDOR, 8);
    field(&mut out, PRODUCT, 16);
    field(&mut out, &identity.revision, 4);
    pad(&mut out, 58);
    // SAM-5, SPC-4, SBC-3, and the transport.
    for version in [0x00a0u16, 0x0460, 0x04c0].into_iter().chain(naming.version()) {
        out.extend(version.to_be_bytes());
    }
    pad(&mut out, 96);
    out[4] = (out.len() - 5) as u8;
    out
}

/// Builds the standard INQUIRY data for a LUN without a unit.
pub fn nothing() -> Vec<u8> {
    let mut out = vec![NOTHING, 0, 0x06, 0x12, 31, 0, 0, 0x02];
    field(&mut out, VENDOR, 8);
    field(&mut out, "", 20);
    out
}

/// Builds the standard INQUIRY data of the REPORT LUNS well-known logical unit.
pub fn well_known() -> Vec<u8> {
    let mut out = nothing();
    out[0] = WELL_KNOWN;
    out
}

/// Parameters of a vital product data page.
#[derive(Debug, Clone, Copy)]
pub struct VpdParameters<'a> {
    /// Unit identity.
    pub identity: &'a UnitIdentity,
    /// Volume name for people; it may change.
    pub name: &'a str,
    /// Names of the target.
    pub naming: &'a ScsiNaming,
    /// Target port through which the page is requested.
    pub port: TargetPort,
    /// Rotational medium.
    pub rotational: bool,
    /// Threshold set size exponent: thresholds count in 2^n blocks.
    pub threshold_exponent: u8,
}

const PAGES: [u8; 8] = [0x00, 0x80, 0x83, 0x86, 0x8f, 0xb0, 0xb1, 0xb2];

/// Builds a vital product data page; `None` when there is no such page.
pub fn page(page: u8, unit: &VpdParameters<'_>) -> Option<Vec<u8>> {
    let mut out = vec![DISK, page, 0, 0];
    match page {
        0x00 => out.extend(PAGES),
        0x80 => out.extend(unit.identity.serial().bytes()),
        0x83 => designators(&mut out, unit),
        0x86 => {
            // No protection; head of queue, ordered, simple; there is a volatile cache.
            out.extend([0, 0x07, 0x01, 0x00]);
            pad(&mut out, 64);
        }
        0x8f => third_party_copy(&mut out),
        0xb0 => limits(&mut out),
        0xb1 => {
            out.extend(if unit.rotational { 7200u16 } else { 1 }.to_be_bytes());
            pad(&mut out, 64);
        }
        0xb2 => {
            // UNMAP, WRITE SAME (16) and (10) with unmap; unmapped blocks read as zeroes; thin.
            out.extend([unit.threshold_exponent, 0x80 | 0x40 | 0x20 | 0x04, 0x02, 0]);
        }
        _ => return None,
    }
    let len = (out.len() - 4) as u16;
    out[2..4].copy_from_slice(&len.to_be_bytes());
    Some(out)
}

fn designator(out: &mut Vec<u8>, code_set: u8, kind: u8, name: &[u8]) {
    out.extend([code_set, kind, 0, name.len() as u8]);
    out.extend(name);
}

/// Association of a designator with the target port.
const PORT: u8 = 1;
/// Association of a designator with the target.
const TARGET: u8 = 2;

/// Appends a designator of a port or target, which carries the protocol identifier.
fn transport_designator(out: &mut Vec<u8>, protocol: u8, association: u8, designator: &NameDesignator) {
    let NameDesignator { code_set, kind, name } = designator;
    out.extend([protocol << 4 | code_set, 0x80 | association << 4 | kind, 0, name.len() as u8]);
    out.extend(name);
}

/// Returns the NAA designator of the unit, as third-party copies name it.
pub fn naa_designator(identity: &UnitIdentity) -> [u8; 12] {
    let mut out = [0; 12];
    out[..4].copy_from_slice(&[1, 3, 0, 8]);
    out[4..].copy_from_slice(&identity.naa());
    out
}

fn designators(out: &mut Vec<u8>, unit: &VpdParameters<'_>) {
    out.extend(naa_designator(unit.identity));
    let mut uuid = vec![0x10, 0];
    uuid.extend(unit.identity.uuid);
    designator(out, 1, 0x0a, &uuid);
    let mut vendor = Vec::new();
    field(&mut vendor, VENDOR, 8);
    vendor.extend(unit.identity.serial().bytes());
    designator(out, 2, 1, &vendor);
    let TargetPort { group, relative_id } = unit.port;
    let protocol = unit.naming.protocol();
    let number =
        |kind: u8, number: u16| NameDesignator { code_set: 1, kind, name: u32::from(number).to_be_bytes().to_vec() };
    transport_designator(out, protocol, PORT, &number(4, relative_id));
    transport_designator(out, protocol, PORT, &number(5, group));
    transport_designator(out, protocol, PORT, &unit.naming.port(group, relative_id));
    transport_designator(out, protocol, TARGET, &unit.naming.target());
    // The volume name is a vendor-specific designator: identifiers that hosts rely on must not change when it does.
    let name = &unit.name[..unit.name.floor_char_boundary(DESIGNATOR_MAX)];
    if !name.is_empty() {
        designator(out, 3, 0, name.as_bytes());
    }
}

fn limits(out: &mut Vec<u8>) {
    // WSNZ: WRITE SAME of zero blocks does not mean all blocks up to the end.
    out.extend([0x01, COMPARE_BLOCKS_MAX as u8]);
    out.extend((1u16 << PHYSICAL_EXPONENT).to_be_bytes());
    for number in [TRANSFER_BLOCKS_MAX, TRANSFER_BLOCKS_BEST, 0, UNMAP_BLOCKS_MAX, UNMAP_DESCRIPTORS_MAX] {
        out.extend(number.to_be_bytes());
    }
    // Unmap granularity and alignment; the alignment is marked valid.
    out.extend((1u32 << PHYSICAL_EXPONENT).to_be_bytes());
    out.extend(0x8000_0000u32.to_be_bytes());
    out.extend(u64::from(SAME_BLOCKS_MAX).to_be_bytes());
    pad(out, 64);
}

fn third_party_copy(out: &mut Vec<u8>) {
    let mut add = |kind: u16, body: &[u8]| {
        // Each descriptor's length is a multiple of four.
        let len = body.len().next_multiple_of(4);
        out.extend(kind.to_be_bytes());
        out.extend((len as u16).to_be_bytes());
        out.extend(body);
        out.extend(std::iter::repeat_n(0, len - body.len()));
    };
    // Supported commands: EXTENDED COPY (LID1), and RECEIVE COPY RESULTS with its three service actions.
    add(0x0001, &[8, 0x83, 1, 0x00, 0x84, 3, 0x00, 0x03, 0x04]);
    // Parameter data.
    let mut body = vec![0; 28];
    body[4..6].copy_from_slice(&super::copy::TARGETS_MAX.to_be_bytes());
    body[6..8].copy_from_slice(&super::copy::SEGMENTS_MAX.to_be_bytes());
    body[8..12].copy_from_slice(&(super::copy::LIST_MAX as u32).to_be_bytes());
    add(0x0004, &body);
    // Supported descriptors: block to block, and units named by their designators.
    add(0x0008, &[2, 0x02, 0xe4]);
    // Supported CSCD descriptor numbers beside those of the list: none.
    add(0x000c, &[0, 0]);
    // General copy operations.
    let mut body = vec![0; 32];
    body[3] = 1;
    body[7] = 1;
    add(0x8001, &body);
}

/// Builds the READ CAPACITY (10) data; a unit too large for 32 bits reports the maximum.
pub fn capacity10(blocks: u64) -> Vec<u8> {
    let last = u32::try_from(blocks.saturating_sub(1)).unwrap_or(u32::MAX);
    [last.to_be_bytes(), BLOCK.to_be_bytes()].concat()
}

/// Builds the READ CAPACITY (16) data.
pub fn capacity16(blocks: u64) -> Vec<u8> {
    let mut out = blocks.saturating_sub(1).to_be_bytes().to_vec();
    out.extend(BLOCK.to_be_bytes());
    // Thin provisioned; unmapped blocks read as zeroes.
    out.extend([0, PHYSICAL_EXPONENT, 0xc0, 0]);
    pad(&mut out, 32);
    out
}

/// Builds the REPORT LUNS data.
pub fn report_luns(luns: impl Iterator<Item = [u8; 8]>) -> Vec<u8> {
    let mut out = vec![0; 8];
    luns.for_each(|lun| out.extend(lun));
    let len = (out.len() - 8) as u32;
    out[..4].copy_from_slice(&len.to_be_bytes());
    out
}

/// Parses the parameter list of UNMAP into descriptors of first block and count; `None` when it is truncated.
pub fn unmap_list(list: &[u8]) -> Option<impl Iterator<Item = (u64, u32)> + '_> {
    let len = usize::from(be16(list, 2)) / 16 * 16;
    let descriptors = list.get(8..8 + len)?;
    Some(descriptors.chunks_exact(16).map(|one| (super::be64(one, 0), be32(one, 8))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> UnitIdentity {
        UnitIdentity { uuid: [0x12; 16], revision: "0.1".into() }
    }

    fn naming() -> ScsiNaming {
        ScsiNaming::Iscsi("iqn.x:y".into())
    }

    fn unit<'a>(identity: &'a UnitIdentity, naming: &'a ScsiNaming) -> VpdParameters<'a> {
        VpdParameters {
            identity,
            name: "local/disk",
            naming,
            port: TargetPort::SINGLE,
            rotational: false,
            threshold_exponent: 11,
        }
    }

    #[test]
    fn every_page_has_the_length_that_it_says() {
        let (identity, naming) = (identity(), naming());
        let unit = unit(&identity, &naming);
        assert!(PAGES.is_sorted());
        for number in PAGES {
            let page = page(number, &unit).expect("a page");
            assert_eq!((page[1], usize::from(be16(&page, 2)) + 4), (number, page.len()), "{number:#x}");
        }
        assert_eq!(page(0xb0, &unit).expect("a page").len(), 64);
        assert_eq!(page(0xb1, &unit).expect("a page").len(), 64);
        assert!(page(0xb5, &unit).is_none());
        let standard = standard(&identity, TargetPortGroupSupport::Both, &naming);
        assert_eq!(standard.len(), usize::from(standard[4]) + 5);
        assert_eq!(
            (standard[5], &standard[8..32]),
            (0x38, &b"FOREBAY Forebay volume  "[..]),
            "the same for every volume"
        );
    }

    #[test]
    fn a_name_is_told_apart_from_the_identity() {
        let (identity, naming) = (identity(), naming());
        let page = |name: &str| page(0x83, &VpdParameters { name, ..unit(&identity, &naming) }).expect("a page");
        let (one, other) = (page("local/disk"), page("local/another"));
        assert!(one.ends_with(b"\x03\x00\x00\x0alocal/disk"), "{one:x?}");
        let common = one.len() - 14;
        assert_eq!(one[4..common], other[4..common], "what hosts know it by does not change with its name");
        // Long names are truncated, never within a character.
        let long = page(&"ä".repeat(200));
        let name = &long[common + 4..];
        assert_eq!((long[common + 3], name.len()), (252, 252));
        assert_eq!(std::str::from_utf8(name), Ok(&*"ä".repeat(126)));
        assert_eq!(usize::from(be16(&long, 2)) + 4, long.len());
        assert_eq!(page("").len(), common);
    }

    #[test]
    fn designators_follow_each_other() {
        let (identity, naming) = (identity(), naming());
        let unit = unit(&identity, &naming);
        let page = page(0x83, &unit).expect("a page");
        let (mut at, mut kinds) = (4, Vec::new());
        while at < page.len() {
            kinds.push(page[at + 1] & 0x3f);
            at += 4 + usize::from(page[at + 3]);
        }
        assert_eq!((at, kinds), (page.len(), vec![3, 10, 1, 0x14, 0x15, 0x18, 0x28, 0]));
        assert_eq!(page[8] >> 4, 3, "a locally assigned name");
    }

    #[test]
    fn pages_name_the_port_of_the_session() {
        let (identity, naming) = (identity(), naming());
        assert_eq!(standard(&identity, TargetPortGroupSupport::Implicit, &naming)[5], 0x18);
        let port = TargetPort { group: 0x1234, relative_id: 0x56 };
        let page = page(0x83, &VpdParameters { port, ..unit(&identity, &naming) }).expect("a page");
        let contains = |wanted: &[u8]| page.windows(wanted.len()).any(|window| window == wanted);
        assert!(contains(&[0x51, 0x94, 0, 4, 0, 0, 0, 0x56]), "relative target port: {page:x?}");
        assert!(contains(&[0x51, 0x95, 0, 4, 0, 0, 0x12, 0x34]), "target port group: {page:x?}");
        assert!(contains(b"iqn.x:y,t,0x1234\0"), "target port name: {page:x?}");
    }

    #[test]
    fn names_are_those_of_the_transport() {
        let (identity, naming) = (identity(), ScsiNaming::Naa([0x31, 2, 3, 4, 5, 6, 7, 8]));
        let standard = standard(&identity, TargetPortGroupSupport::Both, &naming);
        assert_eq!(standard[58..66], [0x00, 0xa0, 0x04, 0x60, 0x04, 0xc0, 0, 0], "no transport is claimed");
        let page = page(0x83, &unit(&identity, &naming)).expect("a page");
        let contains = |wanted: &[u8]| page.windows(wanted.len()).any(|window| window == wanted);
        assert!(contains(&[0x61, 0x94, 0, 4, 0, 0, 0, 1]), "relative target port: {page:x?}");
        assert!(contains(&[0x61, 0x93, 0, 8, 0x31, 2, 3, 4, 5, 6, 7, 9]), "target port: {page:x?}");
        assert!(contains(&[0x61, 0xa3, 0, 8, 0x31, 2, 3, 4, 5, 6, 7, 8]), "target: {page:x?}");
    }

    #[test]
    fn large_units_say_that_they_are() {
        assert_eq!(capacity10(1 << 32), [0xff, 0xff, 0xff, 0xff, 0, 0, 2, 0]);
        assert_eq!(capacity10((1 << 32) + 1)[..4], [0xff; 4]);
        assert_eq!(be16(&capacity10(8), 2), 7);
        assert_eq!(capacity16(1 << 33)[..8], ((1u64 << 33) - 1).to_be_bytes());
    }

    #[test]
    fn unmap_lists_that_are_cut_short_are_seen() {
        let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
        list.extend([0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 6, 0, 0, 0, 0]);
        assert_eq!(unmap_list(&list).expect("whole").collect::<Vec<_>>(), [(5, 6)]);
        assert!(unmap_list(&list[..20]).is_none());
        assert_eq!(unmap_list(&[]).map(Iterator::count), None);
    }
}
