//! The fronts: NBD, NVMe/TCP, iSCSI.

use super::Mutant;
use crate::mutants::stage::Stage;

const NBD: Stage = Stage::Lib("forebay-nbd");
const NBD_SERVING: Stage = Stage::Test("forebay-nbd", "serving");
const NVMF: Stage = Stage::Lib("forebay-nvmf");
const NVMF_HOSTILE: Stage = Stage::Test("forebay-nvmf", "hostile");
const NVME_SERVING: Stage = Stage::Test("forebay-nvme-host", "serving");
const NVME_ENDINGS: Stage = Stage::Test("forebay-nvme-host", "endings");
const NVME_MALFORMED: Stage = Stage::Test("forebay-nvme-host", "malformed");
const SCSI: Stage = Stage::Lib("forebay-scsi");
const ISCSI: Stage = Stage::Lib("forebay-iscsi");
const ISCSI_SERVING: Stage = Stage::Test("forebay-iscsi-host", "serving");
const ISCSI_FENCING: Stage = Stage::Test("forebay-iscsi-host", "fencing");
const ISCSI_UNITS: Stage = Stage::Test("forebay-iscsi-host", "units");
const ISCSI_TARGETS: Stage = Stage::Test("forebay-iscsi-host", "targets");

const NBD_EXECUTE: &str = "front/nbd/src/serve/execute.rs";
const COMMAND: &str = "front/nbd/src/session/command.rs";
const IO: &str = "front/nvmf/src/session/io.rs";
const SERVE_IO: &str = "front/nvmf/src/serve/io.rs";
const EXECUTE: &str = "base/scsi/src/unit/execute.rs";
const DATA_OUT: &str = "front/iscsi/src/serve/data_out.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "nbd-fua-lost",
        "NBD: a write with FUA is acknowledged before it is durable",
        NBD_EXECUTE,
        "device.submit(BlockRequest::Write { offset: extent.offset, data, fua })",
        "device.submit(BlockRequest::Write { offset: extent.offset, data, fua: false & fua })",
        &[NBD_SERVING],
    ),
    Mutant::new(
        "nbd-trim-fua-lost",
        "NBD: a trim with FUA is acknowledged before it is durable",
        NBD_EXECUTE,
        "device.submit(BlockRequest::Flush).await?;",
        "",
        &[NBD_SERVING],
    ),
    Mutant::new(
        "nbd-past-the-end",
        "NBD: a request past the end of the export is passed on",
        COMMAND,
        "Some(end) if end <= self.size => {}",
        "Some(_) => {}",
        &[NBD, NBD_SERVING],
    ),
    Mutant::new(
        "nbd-read-only-written",
        "NBD: an export that is read-only is written",
        COMMAND,
        "if self.read_only { Err((Errno::Perm,",
        "if self.read_only && self.size == 0 { Err((Errno::Perm,",
        &[NBD, NBD_SERVING],
    ),
    Mutant::new(
        "nbd-pieces-repeat",
        "NBD: a long write puts its first piece everywhere",
        NBD_EXECUTE,
        "let from = (piece.offset - extent.offset) as usize;",
        "let from = 0;",
        &[NBD_SERVING],
    ),
    Mutant::new(
        "nbd-unbounded",
        "NBD: a connection may have any number of requests in flight",
        "front/nbd/src/serve/outbox.rs",
        "self.total.requests < options.requests_max",
        "self.total.requests < usize::MAX",
        &[NBD_SERVING],
    ),
    Mutant::new(
        "nbd-disconnect-early",
        "NBD: a connection ends before the requests before the disconnect are done",
        "front/nbd/src/serve/connection.rs",
        "let quiet = self.work.is_empty() && self.outbox.is_empty() && self.stalled.is_none();",
        "let quiet = self.outbox.is_empty() && self.stalled.is_none();",
        &[NBD_SERVING],
    ),
    Mutant::new(
        "nvme-past-the-end",
        "NVMe: a read or write past the end of the namespace is passed on",
        IO,
        "if first.checked_add(count).is_none_or(|end| end > rules.blocks) {",
        "if first.checked_add(count).is_none_or(|end| end == 0) {",
        &[NVMF, NVME_SERVING],
    )
    .nth(0),
    Mutant::new(
        "nvme-deallocate-past-the-end",
        "NVMe: a range of Dataset Management past the end is passed on",
        IO,
        "if first.checked_add(count).is_none_or(|end| end > rules.blocks) {",
        "if first.checked_add(count).is_none_or(|end| end == 0) {",
        &[NVMF, NVME_SERVING],
    )
    .nth(1),
    Mutant::new(
        "nvme-write-through-ignored",
        "NVMe: with the write cache off, a write is acknowledged before it is durable",
        SERVE_IO,
        "submit::write(device, extent, data, fua || through)",
        "submit::write(device, extent, data, fua)",
        &[NVME_SERVING],
    ),
    Mutant::new(
        "nvme-late-write-of-the-preempted",
        "NVMe: a write whose data came late is done although its host has lost the reservation",
        SERVE_IO,
        "if let Err(status) = self.admit(&namespace, &ready.command.action) {",
        "if let Err(status) = Ok::<(), NvmeStatus>(()) {",
        &[NVME_SERVING, NVME_ENDINGS, NVMF_HOSTILE],
    ),
    Mutant::new(
        "nvme-fused-elsewhere",
        "NVMe: a fused Compare and Write compares other blocks than it writes",
        "front/nvmf/src/serve/fused.rs",
        "(NvmeAction::Compare(expect), NvmeAction::Write { extent, fua }) if expect == extent => {",
        "(NvmeAction::Compare(expect), NvmeAction::Write { extent, fua }) if expect.len == extent.len => {",
        &[NVME_SERVING],
    ),
    Mutant::new(
        "nvme-data-anywhere",
        "NVMe: a host may send the pieces of a command's data in any order",
        "front/nvmf/src/session/transfer.rs",
        "if u64::from(header.offset) != at || end > u64::from(transfer.len) {",
        "if end > u64::from(transfer.len) {",
        &[NVMF, NVME_MALFORMED],
    ),
    Mutant::new(
        "nvme-mistaken-namespace",
        "NVMe: a host that has not heard of it reaches the next volume under an old namespace id",
        SERVE_IO,
        "queue.association.is_stale(nsid)",
        "queue.association.is_stale(nsid) && nsid == 0",
        &[NVMF_HOSTILE],
    ),
    Mutant::new(
        "nvme-ana-ignored",
        "NVMe: a namespace is served through a port whose ANA state forbids it",
        SERVE_IO,
        "namespace.subsystem.ana(&self.port, &namespace.info).refuses().map_or(Ok(()), Err)",
        "Ok(drop(namespace.subsystem.ana(&self.port, &namespace.info).refuses()))",
        &[NVME_ENDINGS],
    ),
    Mutant::new(
        "iscsi-window-ignored",
        "iSCSI: a command past the window is taken",
        "front/iscsi/src/session/window.rs",
        "if number == self.expected && !before(self.last, number) {",
        "if number == self.expected {",
        &[ISCSI],
    ),
    Mutant::new(
        "iscsi-unasked-unbounded",
        "iSCSI: more data than the first burst may come unasked",
        DATA_OUT,
        "|| len > limit.saturating_sub(*at)",
        "",
        &[ISCSI],
    ),
    Mutant::new(
        "iscsi-data-anywhere",
        "iSCSI: data that was asked for may come in any order",
        DATA_OUT,
        "if ttt != open.ttt || offset != open.at || number != open.data_sn ||",
        "if ttt != open.ttt ||",
        &[ISCSI, ISCSI_SERVING],
    ),
    Mutant::new(
        "iscsi-fua-lost",
        "iSCSI: a write with FUA is acknowledged before it is durable",
        EXECUTE,
        "CommandFuture::Write(unit.device().submit(BlockRequest::Write { offset, data, fua: run.fua }))",
        "CommandFuture::Write(unit.device().submit(BlockRequest::Write { offset, data, fua: false }))",
        &[SCSI, ISCSI_SERVING, ISCSI_UNITS],
    ),
    Mutant::new(
        "iscsi-compare-swapped",
        "iSCSI: COMPARE AND WRITE writes what it should compare with",
        EXECUTE,
        "let (expect, new) = (data.slice(0..half), data.slice(half..half * 2));",
        "let (new, expect) = (data.slice(0..half), data.slice(half..half * 2));",
        &[SCSI, ISCSI_SERVING, ISCSI_UNITS],
    ),
    Mutant::new(
        "iscsi-copy-overlaps",
        "iSCSI: a copy onto itself reads what it has written",
        "base/scsi/src/unit/execute/copy.rs",
        "parts.reverse();",
        "parts.truncate(usize::MAX);",
        &[SCSI, ISCSI_UNITS],
    ),
    Mutant::new(
        "iscsi-reset-overtakes",
        "iSCSI: a reset does not wait for writes of a session that is gone",
        "base/scsi/src/session/orphans.rs",
        "self.tasks.guard_commands(lun, &guard);",
        "drop(guard.clone());",
        &[ISCSI_FENCING],
    ),
    Mutant::new(
        "iscsi-reinstates-across-targets",
        "iSCSI: a login replaces the session of the same initiator port with another target",
        "front/iscsi/src/sessions.rs",
        "target: target.map_or(DISCOVERY, Target::id)",
        "target: target.map_or(DISCOVERY, |_| DISCOVERY + 1)",
        &[ISCSI, ISCSI_TARGETS],
    ),
    Mutant::new(
        "iscsi-login-outlives-list",
        "iSCSI: a login that began before its initiator was struck off the list comes to a session",
        "front/iscsi/src/sessions.rs",
        "if !target.admits(&login.initiator) {",
        "if target.is_removed() && !target.admits(&login.initiator) {",
        &[ISCSI],
    ),
    Mutant::new(
        "iscsi-discovers-all",
        "iSCSI: discovery lists targets that the initiator may not log in to",
        "front/iscsi/src/targets.rs",
        "following.find(|target| target.admits(initiator) && !target.is_hidden()).cloned()",
        "following.find(|target| target.admits(initiator) || after != Bound::Unbounded).cloned()",
        &[ISCSI, ISCSI_TARGETS],
    ),
    Mutant::new(
        "iscsi-removal-leaves-orphans",
        "iSCSI: the removal of a target does not wait for writes of sessions that are gone",
        "front/iscsi/src/target.rs",
        "ending.answers.extend(self.0.scsi.remove_all());",
        "drop(self.0.scsi.remove_all());",
        &[ISCSI_TARGETS],
    ),
    Mutant::new(
        "iscsi-expelled-unanswered",
        "iSCSI: commands in flight are not answered when a host is asked to log out",
        "front/iscsi/src/serve/connection.rs",
        "self.outbox.event(async_event::LOGOUT, [0, 0, LOGOUT_WAIT_S]);",
        "self.abort_all(); self.outbox.event(async_event::LOGOUT, [0, 0, LOGOUT_WAIT_S]);",
        &[ISCSI_TARGETS],
    ),
];
