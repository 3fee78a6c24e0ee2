//! Reservation commands and the Reservation Report (base 7).

use forebay_block::reservation::{EventKind, HostId, Refusal, ReservationAction, ReservationTable, ReservationType};

use super::command::nvm;
use super::{DataStructure, NvmeStatus, Sqe, u64_at};

/// Prefix of the reservation identity of an NVMe host; its host identifier follows, in hexadecimal digits.
const PREFIX: &str = "nvme:";

/// Returns the reservation identity of a host, from its host identifier.
pub fn host(id: &[u8; 16]) -> Option<HostId> {
    let digits: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    HostId::new(format!("{PREFIX}{digits}").as_bytes())
}

/// Returns the host identifier of a reservation identity; zeroes for a host of another protocol.
fn id_of(host: &HostId) -> [u8; 16] {
    let digits = std::str::from_utf8(host.as_bytes()).ok().and_then(|text| text.strip_prefix(PREFIX));
    let mut id = [0; 16];
    if let Some(digits) = digits.filter(|digits| digits.len() == 32 && digits.is_ascii()) {
        for (at, byte) in id.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap_or(0);
        }
    }
    id
}

/// Returns the bytes of data that a reservation command takes from the host.
pub fn data_len(opcode: u8) -> u32 {
    if opcode == nvm::RESV_RELEASE { 8 } else { 16 }
}

/// Decodes Reservation Register, Acquire or Release.
///
/// # Errors
/// Invalid Field for an unsupported field value.
pub fn decode(sqe: &Sqe, data: &[u8]) -> Result<ReservationAction, NvmeStatus> {
    const INVALID: NvmeStatus = NvmeStatus::INVALID_FIELD.final_();
    let dword = sqe.cdw(10);
    let what = dword & 7;
    let ignore = dword & 8 != 0;
    let key = u64_at(data, 0);
    let second = if data.len() >= 16 { u64_at(data, 8) } else { 0 };
    let current = (!ignore).then_some(key);
    let kind = ReservationType::from_nvme((dword >> 8) as u8).ok_or(INVALID);
    match (sqe.opcode(), what) {
        (nvm::RESV_REGISTER, _) => {
            let persist = match dword >> 30 {
                0 => None,
                2 => Some(false),
                3 => Some(true),
                _ => return Err(INVALID),
            };
            match what {
                0 => Ok(ReservationAction::Add { key: second, persist }),
                1 => Ok(ReservationAction::Remove { current, persist }),
                2 => Ok(ReservationAction::Replace { current, new: second, persist }),
                _ => Err(INVALID),
            }
        }
        // IEKEY is not allowed here: Acquire needs the current key.
        (nvm::RESV_ACQUIRE, _) if ignore => Err(INVALID),
        (nvm::RESV_ACQUIRE, 0) => Ok(ReservationAction::Reserve { key, kind: kind? }),
        (nvm::RESV_ACQUIRE, 1 | 2) => {
            Ok(ReservationAction::Preempt { key, victim: second, kind: kind?, abort: what == 2 })
        }
        (nvm::RESV_RELEASE, 0) => Ok(ReservationAction::Release { key: current, kind: kind? }),
        (nvm::RESV_RELEASE, 1) => Ok(ReservationAction::Clear { key: current }),
        _ => Err(INVALID),
    }
}

/// Returns the status for a refusal.
pub fn status(refusal: Refusal) -> NvmeStatus {
    match refusal {
        Refusal::Conflict => NvmeStatus::RESERVATION_CONFLICT.final_(),
        Refusal::Invalid | Refusal::WrongKind | Refusal::TooMany => NvmeStatus::INVALID_FIELD.final_(),
        Refusal::Unsupported => NvmeStatus::INVALID_OPCODE.final_(),
    }
}

/// Encodes a Reservation Report with extended data structures (base figure 436); `cntlid` returns a host's
/// controller.
pub fn report(table: &ReservationTable, cntlid: impl Fn(&[u8; 16]) -> Option<u16>) -> Vec<u8> {
    let mut page = DataStructure::new(64);
    page.u32(0, table.generation());
    page.u8(4, table.held().map_or(0, |held| held.kind.nvme()));
    page.u16(5, table.registrants().len() as u16).u8(9, u8::from(table.persists()));
    for registrant in table.registrants() {
        let id = id_of(&registrant.host);
        let mut entry = DataStructure::new(64);
        entry.u16(0, cntlid(&id).unwrap_or(0xFFFF)).u8(2, u8::from(table.is_holder(&registrant.host)));
        entry.u64(8, registrant.key).bytes(16, &id);
        page.extend(&entry.finish());
    }
    page.finish()
}

/// Returns the type of a notification (base figure 269).
pub fn notification(kind: EventKind) -> u8 {
    match kind {
        EventKind::RegistrationPreempted => 1,
        EventKind::Released => 2,
        EventKind::Cleared => 3,
    }
}

/// Returns the host identifiers of the NVMe hosts among `hosts`.
pub fn identifiers(hosts: &[HostId]) -> impl Iterator<Item = [u8; 16]> + '_ {
    hosts.iter().map(id_of).filter(|id| *id != [0; 16])
}
