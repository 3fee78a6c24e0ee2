//! Mode pages: reported and changeable settings (SPC-4 section 7.5, SBC-3 section 6.5).

use super::sense::{Sense, code};
use super::{BLOCK, be16, pad};

/// Changeable mode settings, as a bit set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Modes(pub u8);

impl Modes {
    /// Write cache enabled: writes may be acknowledged before they are durable.
    pub const CACHE: u8 = 1;
    /// D_SENSE: sense data in descriptor format.
    pub const DESCRIPTOR_SENSE: u8 = 2;
    /// SWP: software write protection.
    pub const PROTECT: u8 = 4;
    /// Settings after power on.
    pub const DEFAULT: Modes = Modes(Self::CACHE);

    /// Returns true if `bit` is set.
    pub fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

/// Page control field values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    Current,
    Changeable,
    Default,
}

/// State from which mode pages are built.
#[derive(Debug, Clone, Copy)]
pub struct ModePages {
    /// Current settings.
    pub modes: Modes,
    /// Unit is read-only, regardless of the settings.
    pub read_only: bool,
    /// Capacity in blocks.
    pub blocks: u64,
    /// Used-space threshold in units of the threshold exponent, if there is one.
    pub threshold: Option<u32>,
}

/// MODE SENSE request.
#[derive(Debug, Clone, Copy)]
pub struct Ask {
    /// MODE SENSE (10).
    pub ten: bool,
    /// DBD: no block descriptor.
    pub no_descriptor: bool,
    /// Long block descriptor.
    pub long: bool,
    /// Page control: requested values.
    pub control: u8,
    /// Page code; 0x3f for all.
    pub page: u8,
    /// Subpage code; 0xff for all.
    pub subpage: u8,
}

const ALL: [(u8, u8); 5] = [(0x01, 0), (0x08, 0), (0x0a, 0), (0x1c, 0), (0x1c, 2)];

fn body(page: (u8, u8), values: Values, pages: &ModePages) -> Vec<u8> {
    let modes = match values {
        Values::Current => pages.modes,
        Values::Changeable => Modes(Modes::CACHE | Modes::DESCRIPTOR_SENSE | Modes::PROTECT),
        Values::Default => Modes::DEFAULT,
    };
    let bit = |mode: u8, bit: u8| if modes.has(mode) { bit } else { 0 };
    let fixed = values != Values::Changeable;
    let value = |value: u8| if fixed { value } else { 0 };
    match page {
        // Read-write error recovery: defaults.
        (0x01, _) => vec![0; 10],
        // Caching: write cache enabled.
        (0x08, _) => {
            let mut out = vec![bit(Modes::CACHE, 0x04)];
            pad(&mut out, 18);
            out
        }
        // Control: one task set per I_T nexus, unrestricted reordering, write protection; no busy timeout limit.
        (0x0a, _) => {
            let mut out = vec![value(0x20) | bit(Modes::DESCRIPTOR_SENSE, 0x04), value(0x10)];
            out.extend([bit(Modes::PROTECT, 0x08), 0, 0, 0, value(0xff), value(0xff), 0, 0]);
            out
        }
        // Informational exceptions: reported as unit attentions.
        (0x1c, 0) => {
            let mut out = vec![0, value(0x02)];
            pad(&mut out, 10);
            out
        }
        // Logical block provisioning: one threshold, of used space in the pool.
        _ => {
            let mut out = vec![0; 12];
            if let Some(threshold) = pages.threshold.filter(|_| fixed) {
                // Enabled, and armed for increasing used space.
                out.extend([0x81, 0x02, 0, 0]);
                out.extend(threshold.to_be_bytes());
            }
            out
        }
    }
}

fn write_page(out: &mut Vec<u8>, page: (u8, u8), values: Values, pages: &ModePages) {
    let body = body(page, values, pages);
    match page.1 {
        0 => out.extend([page.0, body.len() as u8]),
        subpage => {
            out.extend([0x40 | page.0, subpage]);
            out.extend((body.len() as u16).to_be_bytes());
        }
    }
    out.extend(body);
}

/// Builds the MODE SENSE data.
///
/// # Errors
/// When there is no such page, or saved values are asked for.
pub fn sense(ask: &Ask, pages: &ModePages) -> Result<Vec<u8>, Sense> {
    let values = match ask.control {
        0 => Values::Current,
        1 => Values::Changeable,
        2 => Values::Default,
        _ => return Err(Sense::illegal(code::SAVING)),
    };
    let wanted = |&(page, subpage): &(u8, u8)| match (ask.page, ask.subpage) {
        (0x3f, 0) => subpage == 0,
        (0x3f, 0xff) => true,
        (asked, 0xff) => page == asked,
        asked => asked == (page, subpage),
    };
    let found: Vec<(u8, u8)> = ALL.into_iter().filter(wanted).collect();
    if found.is_empty() || (ask.page == 0x3f && !matches!(ask.subpage, 0 | 0xff)) {
        return Err(Sense::cdb_bit(if ask.subpage == 0 || ask.subpage == 0xff { 2 } else { 3 }, 5));
    }
    // Write protection; DPOFUA is supported.
    let specific = if pages.read_only || pages.modes.has(Modes::PROTECT) { 0x80 } else { 0 } | 0x10;
    let mut descriptor = Vec::new();
    if !ask.no_descriptor && ask.long {
        descriptor.extend(pages.blocks.to_be_bytes());
        descriptor.extend([0; 4]);
        descriptor.extend(BLOCK.to_be_bytes());
    } else if !ask.no_descriptor {
        descriptor.extend(u32::try_from(pages.blocks).unwrap_or(u32::MAX).to_be_bytes());
        descriptor.extend(BLOCK.to_be_bytes());
    }
    let mut out = match ask.ten {
        true => {
            let [high, low] = (descriptor.len() as u16).to_be_bytes();
            vec![0, 0, 0, specific, u8::from(ask.long && !ask.no_descriptor), 0, high, low]
        }
        false => vec![0, 0, specific, descriptor.len() as u8],
    };
    out.extend(descriptor);
    found.into_iter().for_each(|page| write_page(&mut out, page, values, pages));
    match ask.ten {
        true => {
            let len = (out.len() - 2) as u16;
            out[..2].copy_from_slice(&len.to_be_bytes());
        }
        false => out[0] = (out.len() - 1) as u8,
    }
    Ok(out)
}

/// Parses a MODE SELECT list and returns the new settings.
///
/// # Errors
/// When the list is truncated, or it changes a field that is not changeable.
pub fn select(ten: bool, list: &[u8], pages: &ModePages) -> Result<Modes, Sense> {
    let mut modes = pages.modes;
    if list.is_empty() {
        return Ok(modes);
    }
    let short = Sense::illegal(code::PARAMETER_LIST_LENGTH);
    let header = if ten { 8 } else { 4 };
    if list.len() < header {
        return Err(short);
    }
    let descriptor = if ten { usize::from(be16(list, 6)) } else { usize::from(list[3]) };
    let mut at = header + descriptor;
    if list.len() < at {
        return Err(short);
    }
    if descriptor >= 8 {
        // The block length is not changeable.
        let len_at = header + descriptor.min(16) - 4;
        let len = super::be32(list, len_at) & if descriptor == 8 { 0xff_ffff } else { u32::MAX };
        if len != BLOCK {
            return Err(Sense::list(len_at as u16));
        }
    }
    while at < list.len() {
        let sub = list[at] & 0x40 != 0;
        let head = if sub { 4 } else { 2 };
        if list.len() < at + head {
            return Err(short);
        }
        let page = (list[at] & 0x3f, if sub { list[at + 1] } else { 0 });
        let len = if sub { usize::from(be16(list, at + 2)) } else { usize::from(list[at + 1]) };
        if !ALL.contains(&page) {
            return Err(Sense::list(at as u16));
        }
        let current = body(page, Values::Current, &ModePages { modes, ..*pages });
        let changeable = body(page, Values::Changeable, pages);
        if len != current.len() {
            return Err(Sense::list(at as u16 + 1));
        }
        let Some(new) = list.get(at + head..at + head + len) else { return Err(short) };
        let fixed = |(index, (new, current)): (usize, (&u8, &u8))| {
            let mask = !changeable.get(index).copied().unwrap_or(0);
            (new & mask != current & mask).then_some(index)
        };
        if let Some(wrong) = new.iter().zip(&current).enumerate().find_map(fixed) {
            return Err(Sense::list((at + head + wrong) as u16));
        }
        let mut set = |bit: u8, on: bool| modes = Modes(if on { modes.0 | bit } else { modes.0 & !bit });
        match page {
            (0x08, _) => set(Modes::CACHE, new[0] & 0x04 != 0),
            (0x0a, _) => {
                set(Modes::DESCRIPTOR_SENSE, new[0] & 0x04 != 0);
                set(Modes::PROTECT, new[2] & 0x08 != 0);
            }
            _ => {}
        }
        at += head + len;
    }
    Ok(modes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pages() -> ModePages {
        ModePages { modes: Modes::DEFAULT, read_only: false, blocks: 1000, threshold: Some(7) }
    }

    fn ask(page: u8, subpage: u8, control: u8) -> Ask {
        Ask { ten: true, no_descriptor: true, long: false, control, page, subpage }
    }

    #[test]
    fn what_is_sensed_can_be_selected() {
        let all = sense(&ask(0x3f, 0xff, 0), &pages()).expect("all pages");
        assert_eq!(select(true, &all, &pages()), Ok(Modes::DEFAULT));
        let mut control = sense(&ask(0x0a, 0, 0), &pages()).expect("a page");
        control[10] |= 0x04;
        control[12] |= 0x08;
        let modes = select(true, &control, &pages()).expect("these two can be set");
        assert!(modes.has(Modes::DESCRIPTOR_SENSE) && modes.has(Modes::PROTECT) && modes.has(Modes::CACHE));
        control[11] ^= 0x10;
        assert_eq!(select(true, &control, &pages()), Err(Sense::list(11)));
    }

    #[test]
    fn six_and_ten_have_the_same_pages() {
        let six = sense(&Ask { ten: false, ..ask(0x3f, 0, 0) }, &pages()).expect("pages");
        let ten = sense(&ask(0x3f, 0, 0), &pages()).expect("pages");
        assert_eq!((usize::from(six[0]), &six[4..]), (six.len() - 1, &ten[8..]));
        let long = sense(&Ask { no_descriptor: false, long: true, ..ask(0x08, 0, 0) }, &pages()).expect("a page");
        assert_eq!((long[4], be16(&long, 6), long[24]), (1, 16, 0x08));
    }

    #[test]
    fn what_is_not_there_is_refused() {
        assert_eq!(sense(&ask(0x08, 0, 3), &pages()).unwrap_err().code, code::SAVING);
        assert_eq!(sense(&ask(0x05, 0, 0), &pages()).unwrap_err().code, code::FIELD_IN_CDB);
        assert_eq!(sense(&ask(0x08, 7, 0), &pages()).unwrap_err().code, code::FIELD_IN_CDB);
        assert_eq!(select(true, &[0; 7], &pages()).unwrap_err().code, code::PARAMETER_LIST_LENGTH);
        assert_eq!(select(false, &[0, 0, 0, 0, 0x05, 0], &pages()).unwrap_err().code, code::FIELD_IN_LIST);
    }

    proptest! {
        #[test]
        fn any_list_is_taken_or_refused(list in prop::collection::vec(any::<u8>(), 0..64), ten: bool) {
            let _ = select(ten, &list, &pages());
        }
    }
}
