//! REPORT SUPPORTED OPERATION CODES and its sibling for task management (SPC-4, sections 6.33 and 6.34).

use super::naming::ScsiNaming;
use super::sense::Sense;

/// Command description: opcode, service action, and CDB usage bits.
struct Opcode {
    opcode: u8,
    action: Option<u16>,
    usage: &'static [u8],
}

const fn plain(usage: &'static [u8]) -> Opcode {
    Opcode { opcode: usage[0], action: None, usage }
}

const fn action(action: u16, usage: &'static [u8]) -> Opcode {
    Opcode { opcode: usage[0], action: Some(action), usage }
}

const F: u8 = 0xff;

/// Supported commands, sorted by opcode.
const OPCODES: &[Opcode] = &[
    plain(&[0x00, 0, 0, 0, 0, 0]),
    plain(&[0x03, 0x01, 0, 0, F, 0]),
    plain(&[0x08, 0x1f, F, F, F, 0]),
    plain(&[0x0a, 0x1f, F, F, F, 0]),
    plain(&[0x12, 0x01, F, F, F, 0]),
    plain(&[0x15, 0x10, 0, 0, F, 0]),
    plain(&[0x16, 0, 0, 0, 0, 0]),
    plain(&[0x17, 0, 0, 0, 0, 0]),
    plain(&[0x1a, 0x08, F, F, F, 0]),
    plain(&[0x1b, 0x01, 0, 0x0f, 0xf7, 0]),
    plain(&[0x1d, 0x04, 0, 0, 0, 0]),
    plain(&[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    plain(&[0x28, 0x18, F, F, F, F, 0, F, F, 0]),
    plain(&[0x2a, 0x18, F, F, F, F, 0, F, F, 0]),
    plain(&[0x2e, 0x12, F, F, F, F, 0, F, F, 0]),
    plain(&[0x2f, 0x16, F, F, F, F, 0, F, F, 0]),
    plain(&[0x34, 0x02, F, F, F, F, 0, F, F, 0]),
    plain(&[0x35, 0x02, F, F, F, F, 0, F, F, 0]),
    plain(&[0x37, 0, 0x1f, 0, 0, 0, 0, F, F, 0]),
    plain(&[0x41, 0x08, F, F, F, F, 0, F, F, 0]),
    plain(&[0x42, 0, 0, 0, 0, 0, 0, F, F, 0]),
    plain(&[0x4d, 0, F, F, 0, F, F, F, F, 0]),
    plain(&[0x55, 0x10, 0, 0, 0, 0, 0, F, F, 0]),
    plain(&[0x56, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    plain(&[0x57, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    plain(&[0x5a, 0x18, F, F, 0, 0, 0, F, F, 0]),
    action(0, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, 0]),
    action(1, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, 0]),
    action(2, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, 0]),
    action(3, &[0x5e, 0x1f, 0, 0, 0, 0, 0, F, F, 0]),
    action(0, &[0x5f, 0x1f, 0, 0, 0, F, F, F, F, 0]),
    action(1, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, 0]),
    action(2, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, 0]),
    action(3, &[0x5f, 0x1f, 0, 0, 0, F, F, F, F, 0]),
    action(4, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, 0]),
    action(5, &[0x5f, 0x1f, F, 0, 0, F, F, F, F, 0]),
    action(6, &[0x5f, 0x1f, 0, 0, 0, F, F, F, F, 0]),
    action(7, &[0x5f, 0x1f, 0, 0, 0, F, F, F, F, 0]),
    action(0, &[0x83, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    action(0, &[0x84, 0x1f, F, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    action(3, &[0x84, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    action(4, &[0x84, 0x1f, F, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    plain(&[0x88, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x89, 0x18, F, F, F, F, F, F, F, F, 0, 0, 0, F, 0, 0]),
    plain(&[0x8a, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x8b, 0x18, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x8e, 0x12, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x8f, 0x16, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x90, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x91, 0x02, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0x93, 0x09, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    action(0x10, &[0x9e, 0x1f, 0, 0, 0, 0, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    action(0x12, &[0x9e, 0x1f, F, F, F, F, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0xa0, 0, F, 0, 0, 0, F, F, F, F, 0, 0]),
    action(0x0a, &[0xa3, 0xff, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    action(0x0c, &[0xa3, 0x1f, 0x87, F, F, F, F, F, F, F, 0, 0]),
    action(0x0d, &[0xa3, 0x1f, 0x80, 0, 0, 0, F, F, F, F, 0, 0]),
    action(0x0a, &[0xa4, 0x1f, 0, 0, 0, 0, F, F, F, F, 0, 0]),
    plain(&[0xa8, 0x18, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0xaa, 0x18, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0xae, 0x12, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0xaf, 0x16, F, F, F, F, F, F, F, F, 0, 0]),
    plain(&[0xb7, 0x1f, 0, 0, 0, 0, F, F, F, F, 0, 0]),
];

/// Reported maximum command duration in seconds.
const TIMEOUT_S: u32 = 30;

fn timeouts(out: &mut Vec<u8>) {
    out.extend([0, 0x0a, 0, 0]);
    out.extend(TIMEOUT_S.to_be_bytes());
    out.extend(TIMEOUT_S.to_be_bytes());
}

/// Builds the REPORT SUPPORTED OPERATION CODES data.
///
/// # Errors
/// When one command is asked for with a service action that it lacks, or without one that it has.
pub fn report(with_timeouts: bool, options: u8, opcode: u8, action: u16) -> Result<Vec<u8>, Sense> {
    if options == 0 {
        let mut out = vec![0; 4];
        for one in OPCODES {
            out.extend([one.opcode, 0]);
            out.extend(one.action.unwrap_or(0).to_be_bytes());
            let flags = u8::from(one.action.is_some()) | if with_timeouts { 2 } else { 0 };
            out.extend([0, flags]);
            out.extend((one.usage.len() as u16).to_be_bytes());
            if with_timeouts {
                timeouts(&mut out);
            }
        }
        let len = (out.len() - 4) as u32;
        out[..4].copy_from_slice(&len.to_be_bytes());
        return Ok(out);
    }
    let mut known = OPCODES.iter().filter(|one| one.opcode == opcode);
    let has_actions = known.clone().next().is_some_and(|one| one.action.is_some());
    let found = match options {
        1 if has_actions => return Err(Sense::cdb_bit(2, 2)),
        1 => known.next(),
        2 if !has_actions && known.next().is_some() => return Err(Sense::cdb_bit(2, 2)),
        2 => known.find(|one| one.action == Some(action)),
        3 if has_actions => known.find(|one| one.action == Some(action)),
        3 => known.next().filter(|_| action == 0),
        _ => return Err(Sense::cdb_bit(2, 2)),
    };
    let Some(found) = found else { return Ok(vec![0, 0x01, 0, 0]) };
    let mut out = vec![0, 0x03 | if with_timeouts { 0x80 } else { 0 }];
    out.extend((found.usage.len() as u16).to_be_bytes());
    let at = out.len();
    out.extend(found.usage);
    if let Some(action) = found.action {
        // The service action itself, not a mask of its bits.
        out[at + 1] = found.usage[1] & 0xe0 | action as u8;
    }
    if with_timeouts {
        timeouts(&mut out);
    }
    Ok(out)
}

/// Builds the REPORT SUPPORTED TASK MANAGEMENT FUNCTIONS data.
pub fn functions(long: bool, naming: &ScsiNaming) -> Vec<u8> {
    // Abort task, abort task set, clear task set, logical unit reset, target reset.
    let mut out = vec![0x80 | 0x40 | 0x10 | 0x08 | 0x02, 0, 0, 0];
    if let ScsiNaming::Naa(_) = naming {
        // Query task; query task set, I_T nexus reset.  iSCSI has no requests for them.
        out[0] |= 0x04;
        out[1] |= 0x02 | 0x01;
    }
    if long {
        out[3] = 0x0c;
        out.extend([0; 12]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::sense::code;
    use super::super::{be16, be32, cdb};
    use super::*;

    #[test]
    fn what_is_listed_is_understood() {
        assert!(OPCODES.is_sorted_by_key(|one| (one.opcode, one.action)));
        for one in OPCODES {
            let mut bytes = [0; 16];
            bytes[..one.usage.len()].copy_from_slice(one.usage);
            bytes[1..].fill(0);
            bytes[1] = one.action.unwrap_or(0) as u8;
            match bytes[0] {
                0x15 | 0x55 => bytes[1] = 0x10,
                0x1d => bytes[1] = 4,
                _ => {}
            }
            assert!(cdb::parse(&bytes).is_ok(), "{:#x} {:?}", one.opcode, one.action);
        }
    }

    #[test]
    fn what_is_not_listed_is_not_understood() {
        for opcode in 0..=255u8 {
            if OPCODES.iter().any(|one| one.opcode == opcode) {
                continue;
            }
            let mut bytes = [0; 16];
            bytes[0] = opcode;
            assert_eq!(cdb::parse(&bytes), Err(Sense::illegal(code::INVALID_OPCODE)), "{opcode:#x}");
        }
    }

    #[test]
    fn all_and_one() {
        for timeouts in [false, true] {
            let all = report(timeouts, 0, 0, 0).expect("all");
            let each = if timeouts { 20 } else { 8 };
            assert_eq!(be32(&all, 0) as usize, OPCODES.len() * each);
        }
        let one = report(true, 1, 0x28, 0).expect("one");
        assert_eq!((one[1], be16(&one, 2), one.len()), (0x83, 10, 4 + 10 + 12));
        assert_eq!(report(false, 2, 0x9e, 0x12).expect("one")[5], 0x12);
        assert_eq!(report(false, 2, 0x9e, 0x13).expect("none")[1], 1);
        assert_eq!(report(false, 1, 0xff, 0).expect("none")[1], 1);
        assert!(report(false, 1, 0x9e, 0).is_err() && report(false, 2, 0x28, 0).is_err());
        assert!(report(false, 7, 0x28, 0).is_err());
    }
}
