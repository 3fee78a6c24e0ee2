//! Effect of reservations on commands.

use forebay_block::reservation::ReservationAccess;

use crate::scsi::cdb::Command;

/// Returns the access type of a command for persistent reservations (SPC-4 table 63, SBC-3 table 13).
pub(super) fn access(command: &Command) -> Option<ReservationAccess> {
    match command {
        Command::Read(_)
        | Command::Verify { .. }
        | Command::PreFetch(_)
        | Command::ModeSense { .. }
        | Command::GetLbaStatus { .. }
        | Command::ReadDefects { .. } => Some(ReservationAccess::Read),
        Command::ModeSelect { .. }
        | Command::SyncCache(_)
        | Command::SelfTest
        | Command::SetGroups { .. }
        | Command::Reserve
        | Command::StartStop { .. } => Some(ReservationAccess::Write),
        _ if command.is_write() => Some(ReservationAccess::Write),
        _ => None,
    }
}

/// Returns true for commands that are permitted despite an SPC-2 reservation of another initiator (SPC-2, table 9).
pub(super) fn passes_whole(command: &Command) -> bool {
    matches!(
        command,
        Command::Inquiry { .. }
            | Command::ReportLuns { .. }
            | Command::RequestSense { .. }
            | Command::Release
            | Command::ReportGroups { .. }
    )
}
