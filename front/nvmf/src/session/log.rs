//! Log pages of a controller: one table of the supported pages, and Get Log Page.

use super::admin::{self, ControllerView, ana_log_max};
use super::{Controller, ControllerType, TRANSFER_MAX};
use crate::wire::command::NSID_ALL;
use crate::wire::log::{self, Health, id};
use crate::wire::{NvmeStatus, Sqe};

const INVALID_FIELD: NvmeStatus = NvmeStatus::INVALID_FIELD.final_();
const INVALID_LOG: NvmeStatus = NvmeStatus::INVALID_LOG.final_();

/// Sources of a page's content.
struct Source<'a> {
    controller: &'a Controller,
    view: &'a dyn ControllerView,
    sqe: &'a Sqe,
}

/// Supported log page.
struct LogPage {
    id: u8,
    /// Types of controllers that have the page.
    of: &'static [ControllerType],
    /// Encodes the whole page.
    encode: fn(&Source<'_>) -> Result<Vec<u8>, NvmeStatus>,
}

const IO: &[ControllerType] = &[ControllerType::Io];
const DISCOVERY: &[ControllerType] = &[ControllerType::Discovery];
const BOTH: &[ControllerType] = &[ControllerType::Io, ControllerType::Discovery];

const fn page(
    id: u8,
    of: &'static [ControllerType],
    encode: fn(&Source<'_>) -> Result<Vec<u8>, NvmeStatus>,
) -> LogPage {
    LogPage { id, of, encode }
}

/// Supported log pages, in ascending order of their identifiers.  A new page needs its identifier and encoding in
/// `wire::log`, and an entry here; if an event announces it, also an entry in the controller's `EVENT_TYPES`.
const PAGES: &[LogPage] = &[
    page(id::SUPPORTED, BOTH, |source| Ok(log::supported(ids(source.controller.kind)))),
    page(id::ERROR, BOTH, |source| Ok(log::errors(source.controller.errors()))),
    page(id::SMART, IO, health),
    page(id::FIRMWARE, IO, |source| Ok(log::firmware(&source.view.identity().firmware))),
    page(id::CHANGED, IO, |source| Ok(log::changed(&source.controller.changed()))),
    page(id::EFFECTS, IO, |source| Ok(log::effects(source.view.reservations()))),
    page(id::ANA, IO, ana),
    page(id::FEATURES, BOTH, |source| Ok(log::features(&admin::supported_features(source.controller)))),
    page(id::MI_COMMANDS, BOTH, |_| Ok(log::mi_commands())),
    page(id::DISCOVERY, DISCOVERY, discovery),
    page(id::RESERVATION, IO, reservation),
];

/// Returns the identifiers of the log pages of a type of controller.
fn ids(kind: ControllerType) -> impl Iterator<Item = u8> {
    PAGES.iter().filter(move |page| page.of.contains(&kind)).map(|page| page.id)
}

/// Executes Get Log Page: returns the part of a page that the host asks for.
///
/// # Errors
/// Invalid Log Page if the controller does not have the page, Invalid Field for an invalid part of it.
pub(super) fn get(controller: &mut Controller, view: &dyn ControllerView, sqe: &Sqe) -> Result<Vec<u8>, NvmeStatus> {
    let retain = sqe.cdw(10) & 1 << 15 != 0;
    let dwords = u64::from(sqe.cdw(10) >> 16) | u64::from(sqe.cdw(11) & 0xFFFF) << 16;
    let len = (dwords + 1) * 4;
    let offset = u64::from(sqe.cdw(12)) | u64::from(sqe.cdw(13)) << 32;
    if len > TRANSFER_MAX as u64 || offset % 4 != 0 {
        return Err(INVALID_FIELD);
    }
    let id = sqe.cdw(10) as u8;
    let page = PAGES.iter().find(|page| page.id == id && page.of.contains(&controller.kind)).ok_or(INVALID_LOG)?;
    let content = (page.encode)(&Source { controller, view, sqe })?;
    if offset > content.len() as u64 {
        return Err(INVALID_FIELD);
    }
    if !retain {
        controller.log_read(id);
    }
    let mut part = content[offset as usize..].to_vec();
    part.resize(len as usize, 0);
    Ok(part)
}

fn health(source: &Source<'_>) -> Result<Vec<u8>, NvmeStatus> {
    // The page covers the controller, not a namespace.
    if ![0, NSID_ALL].contains(&source.sqe.nsid()) {
        return Err(INVALID_FIELD);
    }
    Ok(log::health(&Health { errors: source.controller.error_count(), ..source.view.health() }))
}

fn ana(source: &Source<'_>) -> Result<Vec<u8>, NvmeStatus> {
    let (change, groups) = source.view.ana();
    let groups_only = source.sqe.cdw(10) >> 8 & 1 != 0;
    let mut page = log::ana(change, &groups, groups_only);
    // Hosts read the maximum length of this page, part by part.
    page.resize(page.len().max(ana_log_max(source.view.ana_groups_max())), 0);
    Ok(page)
}

fn discovery(source: &Source<'_>) -> Result<Vec<u8>, NvmeStatus> {
    let (generation, entries) = source.view.discovery();
    Ok(log::discovery(generation, &entries))
}

fn reservation(source: &Source<'_>) -> Result<Vec<u8>, NvmeStatus> {
    if !source.view.reservations() {
        return Err(INVALID_LOG);
    }
    let (oldest, count) = source.controller.notification();
    Ok(log::reservation(oldest, count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pages_of_each_type_of_controller() {
        assert!(PAGES.is_sorted_by(|before, after| before.id < after.id));
        let io: Vec<u8> = ids(ControllerType::Io).collect();
        assert_eq!(io, [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x0C, 0x12, 0x13, 0x80]);
        let discovery: Vec<u8> = ids(ControllerType::Discovery).collect();
        assert_eq!(discovery, [0x00, 0x01, 0x12, 0x13, 0x70]);
    }
}
