//! Command `ana`.

use super::CommandSession;
use crate::api::{self, Ana};
use crate::cli::{AnaCommand, GlobalArgs};
use crate::failure::Result;
use crate::ops::{ListAna, SetAna};
use crate::output::{Output, table};

/// Shows or sets the states of asymmetric namespace access.
pub fn run(global: &GlobalArgs, output: Output, command: AnaCommand) -> Result<()> {
    let session = CommandSession::daemon(global)?;
    let states = match command {
        AnaCommand::Ls => session.call(&ListAna, None, |_| {})?,
        AnaCommand::Set(options) => {
            let request = api::SetAnaRequest { state: options.state, port: options.port, group: options.group };
            session.call(&SetAna(request), None, |_| {})?
        }
    };
    output.print(&states, |states| show(states))
}

fn show(states: &[Ana]) -> String {
    let rows = states.iter().map(|ana| {
        let namespaces: Vec<String> = ana.namespaces.iter().map(ToString::to_string).collect();
        vec![
            ana.port.to_string(),
            ana.address.clone(),
            ana.group.to_string(),
            ana.state.clone(),
            namespaces.join(","),
            ana.subsystem.clone(),
        ]
    });
    table(&["PORT", "ADDRESS", "GROUP", "STATE", "NAMESPACES"], &[0, 2], rows)
}
