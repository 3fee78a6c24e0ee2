//! Command `namespace`.

use super::shapes::table;
use super::with_session;
use crate::cli::{GlobalArgs, NamespaceCommand};
use crate::failure::Result;
use crate::ops::{CreateNamespace, ListNamespaces, RemoveNamespace};
use crate::output::Output;

/// Manages namespaces.
pub fn run(global: &GlobalArgs, output: Output, command: NamespaceCommand) -> Result<()> {
    match command {
        NamespaceCommand::Create(named) => {
            with_session(global, |session| session.call(CreateNamespace(named.spec.clone()), |_| {}))?;
            output.print(&named.spec, |_| String::new())
        }
        NamespaceCommand::Ls(named) => {
            let listed = with_session(global, |session| session.call(ListNamespaces { pool: named.pool }, |_| {}))?;
            output.print(&listed, |listed| table(["NAME"], &[], listed.iter().map(|each| [each.name.clone()])))
        }
        NamespaceCommand::Rm(named) => {
            with_session(global, |session| session.call(RemoveNamespace(named.spec.clone()), |_| {}))?;
            output.print(&named.spec, |_| String::new())
        }
    }
}
