//! Effect of reservations on commands.

use forebay_block::reservation::ReservationAccess;

use crate::cdb::ScsiCommand;

/// Returns the access type of a command for persistent reservations (SPC-4 table 63, SBC-3 table 13).
pub(super) fn access(command: &ScsiCommand) -> Option<ReservationAccess> {
    match command {
        ScsiCommand::Read(_)
        | ScsiCommand::Verify { .. }
        | ScsiCommand::PreFetch(_)
        | ScsiCommand::ModeSense { .. }
        | ScsiCommand::GetLbaStatus { .. }
        | ScsiCommand::ReadDefects { .. } => Some(ReservationAccess::Read),
        ScsiCommand::ModeSelect { .. }
        | ScsiCommand::SyncCache(_)
        | ScsiCommand::SelfTest
        | ScsiCommand::SetGroups { .. }
        | ScsiCommand::Reserve
        | ScsiCommand::StartStop { .. } => Some(ReservationAccess::Write),
        _ if command.is_write() => Some(ReservationAccess::Write),
        _ => None,
    }
}

/// Returns true for commands that are permitted despite an SPC-2 reservation of another initiator (SPC-2, table 9).
pub(super) fn passes_whole(command: &ScsiCommand) -> bool {
    matches!(
        command,
        ScsiCommand::Inquiry { .. }
            | ScsiCommand::ReportLuns { .. }
            | ScsiCommand::RequestSense { .. }
            | ScsiCommand::Release
            | ScsiCommand::ReportGroups { .. }
    )
}
