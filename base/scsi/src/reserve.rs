//! PERSISTENT RESERVE IN and OUT: conversion between wire formats and `forebay_block::Reservations` (SPC-4, sections
//! 5.13, 6.15 and 6.16).

use forebay_block::reservation::{HostId, Refusal, ReservationAction, ReservationTable, ReservationType};

use super::cdb::{PrIn, PrOut};
use super::naming::ScsiNaming;
use super::ports::TargetPort;
use super::sense::{Sense, code};
use super::{be16, be32, be64, pad};

/// Parameter list length in bytes of all service actions except REGISTER AND MOVE.
const LIST_LEN: u32 = 24;
/// Prefix of the host ids of iSCSI initiators.
const ISCSI: &str = "iscsi:";
/// Prefix of the host ids of initiators with an NAA identifier.
const NAA: &str = "naa:";

/// Builds the host id of an iSCSI initiator port: initiator name and ISID.
pub fn host(initiator: &str, isid: [u8; 6]) -> Option<HostId> {
    HostId::new(format!("{ISCSI}{}", port_name(initiator, isid)).as_bytes())
}

/// Builds the host id of an initiator port with an NAA identifier.
pub fn naa_host(port: [u8; 8]) -> HostId {
    let name = format!("{NAA}{:016x}", u64::from_be_bytes(port));
    HostId::new(name.as_bytes()).expect("a short name")
}

/// Returns the NAA identifier of a host, if it has one.
fn naa_of(host: &HostId) -> Option<[u8; 8]> {
    let digits = std::str::from_utf8(host.as_bytes()).ok()?.strip_prefix(NAA)?;
    u64::from_str_radix(digits, 16).ok().map(u64::to_be_bytes)
}

/// Returns the initiator port name (RFC 7143, section 4.4.1).
pub fn port_name(initiator: &str, isid: [u8; 6]) -> String {
    use std::fmt::Write;
    let mut name = format!("{initiator},i,0x");
    for byte in isid {
        let _ = write!(name, "{byte:02x}");
    }
    name
}

/// Length of the TransportID of an NAA identifier in bytes.
const NAA_TRANSPORT_LEN: usize = 24;

/// Encodes a TransportID (SPC-4, section 7.6.4).  A host of another protocol gets an iSCSI name that no initiator has.
fn transport_id(host: &HostId) -> Vec<u8> {
    if let Some(port) = naa_of(host) {
        let mut out = vec![0x06, 0, 0, 0];
        out.extend(port);
        pad(&mut out, NAA_TRANSPORT_LEN);
        return out;
    }
    let name = std::str::from_utf8(host.as_bytes()).ok().and_then(|name| name.strip_prefix(ISCSI));
    let mut text = match name {
        Some(name) => name.as_bytes().to_vec(),
        None => {
            let digits: String = host.as_bytes().iter().take(32).map(|byte| format!("{byte:02x}")).collect();
            format!("iqn.2026-11.io.forebay:other.{digits},i,0x000000000000").into_bytes()
        }
    };
    text.push(0);
    let len = text.len().next_multiple_of(4).max(20);
    pad(&mut text, len);
    let mut out = vec![0x45, 0];
    out.extend((len as u16).to_be_bytes());
    out.extend(text);
    out
}

/// Parses a TransportID of the target's protocol.  Returns the host that it names, and its length in bytes.
fn parse_transport_id(bytes: &[u8], naming: &ScsiNaming) -> Option<(HostId, usize)> {
    if bytes.first()? & 0x3f != naming.protocol() {
        return None;
    }
    if let ScsiNaming::Naa(_) = naming {
        let port = bytes.get(..NAA_TRANSPORT_LEN)?.get(4..12)?.try_into().ok()?;
        return (bytes[0] >> 6 == 0).then(|| (naa_host(port), NAA_TRANSPORT_LEN));
    }
    let len = usize::from(be16(bytes, 2));
    let text = bytes.get(4..4 + len)?;
    let end = text.iter().position(|&byte| byte == 0)?;
    let name = std::str::from_utf8(&text[..end]).ok()?;
    // A TransportID without ISID names a device. Reservations belong to initiator ports.
    if bytes[0] >> 6 != 1 || !name.contains(",i,0x") {
        return None;
    }
    Some((HostId::new(format!("{ISCSI}{}", name.to_ascii_lowercase()).as_bytes())?, 4 + len))
}

/// Builds the PERSISTENT RESERVE IN data.
pub fn report(action: PrIn, table: &ReservationTable) -> Vec<u8> {
    let mut out = table.generation().to_be_bytes().to_vec();
    out.extend([0; 4]);
    let holder = table.held();
    match action {
        PrIn::Keys => table.registrants().iter().for_each(|registrant| out.extend(registrant.key.to_be_bytes())),
        PrIn::Reservation => {
            if let Some(held) = holder {
                let key = if held.kind.is_held_by_all() { 0 } else { table.key_of(&held.holder).unwrap_or(0) };
                out.extend(key.to_be_bytes());
                out.extend([0, 0, 0, 0, 0, held.kind.scsi(), 0, 0]);
            }
        }
        PrIn::Capabilities => {
            // All target ports and persistence through power loss are supported.
            let persists = u8::from(table.persists());
            return vec![0, 8, 0x04 | 0x01, 0x80 | 0x10 | persists, 0xea, 0x01, 0, 0];
        }
        PrIn::FullStatus => {
            for registrant in table.registrants() {
                let holds = table.is_holder(&registrant.host);
                let kind = holder.filter(|_| holds).map_or(0, |held| held.kind.scsi());
                let id = transport_id(&registrant.host);
                out.extend(registrant.key.to_be_bytes());
                // Applies to all target ports.
                out.extend([0, 0, 0, 0, 0x02 | u8::from(holds), kind, 0, 0, 0, 0, 0, 0]);
                out.extend((id.len() as u32).to_be_bytes());
                out.extend(id);
            }
        }
    }
    let len = (out.len() - 8) as u32;
    out[4..8].copy_from_slice(&len.to_be_bytes());
    out
}

/// Converts PERSISTENT RESERVE OUT to an action on the reservation table.
///
/// REGISTER AND MOVE may name any of `ports`, those of all target port groups, and a host of the target's protocol.  The port has no effect: a registration
/// applies to an initiator port through all target ports (ALL_TG_PT).
///
/// # Errors
/// When its list has a wrong length, or its fields are invalid.
pub fn action(
    action: PrOut,
    scope_type: u8,
    list: &[u8],
    (naming, ports): (&ScsiNaming, &[TargetPort]),
) -> Result<ReservationAction, Sense> {
    let length = Sense::illegal(code::PARAMETER_LIST_LENGTH);
    if (list.len() as u32) < LIST_LEN || (action != PrOut::RegisterAndMove && list.len() as u32 != LIST_LEN) {
        return Err(length);
    }
    let (key, new) = (be64(list, 0), be64(list, 8));
    let takes_kind = matches!(action, PrOut::Reserve | PrOut::Release | PrOut::Preempt | PrOut::PreemptAndAbort);
    let kind = match ReservationType::from_scsi(scope_type & 0x0f) {
        _ if !takes_kind => ReservationType::WriteExclusive,
        // Only logical unit scope is supported.
        Some(_) if scope_type >> 4 != 0 => return Err(Sense::cdb_bit(2, 7)),
        Some(kind) => kind,
        None => return Err(Sense::cdb_bit(2, 3)),
    };
    let registers = matches!(action, PrOut::Register | PrOut::RegisterAndIgnore);
    if registers && list[20] & 0x08 != 0 {
        // Registering other initiator ports (SPEC_I_PT) is not supported.
        return Err(Sense::list(20));
    }
    let persist = Some(list[20] & 1 != 0);
    Ok(match action {
        PrOut::Register => ReservationAction::Register { current: Some(key), new, persist },
        PrOut::RegisterAndIgnore => ReservationAction::Register { current: None, new, persist },
        PrOut::Reserve => ReservationAction::Reserve { key, kind },
        PrOut::Release => ReservationAction::Release { key: Some(key), kind },
        PrOut::Clear => ReservationAction::Clear { key: Some(key) },
        PrOut::Preempt => ReservationAction::Preempt { key, victim: new, kind, abort: false },
        PrOut::PreemptAndAbort => ReservationAction::Preempt { key, victim: new, kind, abort: true },
        PrOut::RegisterAndMove => {
            let id_len = be32(list, 20) as usize;
            let id = list.get(24..).filter(|id| id.len() == id_len).ok_or(length)?;
            let port = be16(list, 18);
            if ports.iter().all(|known| known.relative_id != port) {
                return Err(Sense::list(18));
            }
            let (to, used) = parse_transport_id(id, naming).ok_or(Sense::list(24))?;
            if used != id_len {
                return Err(Sense::list(26));
            }
            ReservationAction::Move { key, new, to, unregister: list[17] & 2 != 0, persist: Some(list[17] & 1 != 0) }
        }
    })
}

/// Converts a refusal to sense data; `None` is RESERVATION CONFLICT.
pub fn refusal(refusal: Refusal) -> Option<Sense> {
    match refusal {
        Refusal::Conflict => None,
        Refusal::Invalid => Some(Sense::list(8)),
        Refusal::WrongKind => Some(Sense::illegal(code::INVALID_RELEASE)),
        Refusal::TooMany => Some(Sense::illegal(code::REGISTRATION_RESOURCES)),
        Refusal::Unsupported => Some(Sense::illegal(code::INVALID_OPCODE)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: &[TargetPort] = &[TargetPort::SINGLE, TargetPort { group: 2, relative_id: 0x102 }];
    const ISID: [u8; 6] = [0x80, 1, 2, 3, 4, 5];

    fn iscsi() -> ScsiNaming {
        ScsiNaming::Iscsi("iqn.x:y".into())
    }

    #[test]
    fn hosts_have_a_transport_id() {
        let host = host("iqn.a:b", ISID).expect("a host");
        let id = transport_id(&host);
        assert_eq!((id[0], usize::from(be16(&id, 2)) + 4, id.len() % 4), (0x45, id.len(), 0));
        assert_eq!(parse_transport_id(&id, &iscsi()), Some((host, id.len())));
        for cut in 0..id.len() {
            let _ = parse_transport_id(&id[..cut], &iscsi());
        }
        assert_eq!(parse_transport_id(&[0x05, 0, 0, 4, b'i', b'q', b'n', 0], &iscsi()), None, "a device is no port");
    }

    #[test]
    fn hosts_with_an_identifier_have_a_transport_id() {
        let port = [0x32, 1, 2, 3, 4, 5, 6, 0xff];
        let naming = ScsiNaming::Naa([0x30; 8]);
        let host = naa_host(port);
        let id = transport_id(&host);
        assert_eq!((id.len(), id[0], &id[4..12]), (24, 0x06, &port[..]));
        assert_eq!(parse_transport_id(&id, &naming), Some((host, 24)));
        assert_eq!(parse_transport_id(&id[..23], &naming), None);
        assert_eq!(parse_transport_id(&id, &iscsi()), None, "a host of another protocol");
    }

    #[test]
    fn lists_are_read_and_status_is_written() {
        let mut table = ReservationTable::new();
        let host = host("iqn.a:b", ISID).expect("a host");
        let mut list = [0; 24];
        list[15] = 7;
        list[20] = 1;
        let register = action(PrOut::Register, 0, &list, (&iscsi(), PORTS)).expect("an action");
        table.apply(&host, &register).expect("registered");
        list[7] = 7;
        let reserve = action(PrOut::Reserve, 3, &list, (&iscsi(), PORTS)).expect("an action");
        table.apply(&host, &reserve).expect("reserved");
        assert_eq!(report(PrIn::Keys, &table), [0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 7]);
        assert_eq!(report(PrIn::Reservation, &table)[8..], [0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 3, 0, 0]);
        assert_eq!(report(PrIn::Capabilities, &table)[3] & 1, 1);
        let status = report(PrIn::FullStatus, &table);
        assert_eq!((be32(&status, 4) as usize + 8, status[20], status[21]), (status.len(), 3, 3));
        assert_eq!(action(PrOut::Reserve, 2, &list, (&iscsi(), PORTS)), Err(Sense::cdb_bit(2, 3)));
        assert_eq!(action(PrOut::Reserve, 0x13, &list, (&iscsi(), PORTS)), Err(Sense::cdb_bit(2, 7)));
        assert_eq!(
            action(PrOut::Clear, 0, &list[..23], (&iscsi(), PORTS)).unwrap_err().code,
            code::PARAMETER_LIST_LENGTH
        );
        list[20] = 8;
        assert_eq!(action(PrOut::Register, 0, &list, (&iscsi(), PORTS)), Err(Sense::list(20)));
    }

    #[test]
    fn registrations_move_through_every_target_port() {
        let host = host("iqn.a:b", ISID).expect("a host");
        let id = transport_id(&host);
        let mut list = vec![0; 24];
        list[7] = 1;
        list[15] = 2;
        list[20..].copy_from_slice(&(id.len() as u32).to_be_bytes());
        list.extend(id);
        for port in [1_u16, 0x102, 2, 0] {
            list[18..20].copy_from_slice(&port.to_be_bytes());
            let moved =
                ReservationAction::Move { key: 1, new: 2, to: host.clone(), unregister: false, persist: Some(false) };
            let known = PORTS.iter().any(|known| known.relative_id == port);
            let expected = if known { Ok(moved) } else { Err(Sense::list(18)) };
            assert_eq!(action(PrOut::RegisterAndMove, 0, &list, (&iscsi(), PORTS)), expected, "port {port}");
        }
    }
}
