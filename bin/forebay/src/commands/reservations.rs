//! Command `reservations`.

use super::with_session;
use crate::api::ReservationsInfo;
use crate::cli::{GlobalArgs, ReservationsCommand};
use crate::failure::Result;
use crate::ops::{ClearReservations, GetReservations};
use crate::output::{Output, table};

/// Shows or clears an image's reservations.
pub fn run(global: &GlobalArgs, output: Output, command: ReservationsCommand) -> Result<()> {
    match command {
        ReservationsCommand::Ls(options) => {
            let found = with_session(global, |session| session.call(GetReservations(options.image), |_| {}))?;
            output.print(&found, show)
        }
        ReservationsCommand::Clear(options) => {
            let cleared = options.image.clone();
            with_session(global, |session| session.call(ClearReservations(options.image), |_| {}))?;
            output.print(&cleared, |_| String::new())
        }
    }
}

fn show(found: &ReservationsInfo) -> String {
    let rows = found.registrants.iter().map(|registrant| {
        let held = match &found.kind {
            Some(kind) if registrant.holder => kind.clone(),
            _ => String::new(),
        };
        vec![registrant.host.clone(), format!("{:#018x}", registrant.key), held]
    });
    table(&["HOST", "KEY", "HOLDS"], &[], rows)
}
