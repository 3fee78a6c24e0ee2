//! Commands, control requests, event buffers and sizes of virtio-scsi that are wrong, or unusual.

mod chains;
mod commands;
mod config;
mod control;
mod lists;

use std::path::Path;
use std::time::{Duration, Instant};

use super::DeviceReaction::{self, Accepted, Failed};
use super::{CANARY, HostileCase, PROBE_SECTOR, REACTION, Tolerance, attach, pattern, same};
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEndStage::{self, Running};
use crate::front_end::{FrontEnd, FrontEndOptions};
use crate::message::feature;
use crate::scsi::control::{EVENT_SIZE, task_function};
use crate::scsi::{
    FIRST_REQUEST_QUEUE, ScsiFieldSizes, ScsiHost, ScsiHostCommand, ScsiHostCompletion, cdb, response, status,
    unit_address,
};

/// Queue of the commands of cases.
const REQUESTS: usize = FIRST_REQUEST_QUEUE;
/// Queue of commands that prepare a case, so that rings of the first one are as they were created.
const PREPARATIONS: usize = FIRST_REQUEST_QUEUE + 1;
/// Sizes that every device begins with.
const SIZES: ScsiFieldSizes = ScsiFieldSizes::DEFAULT;

/// Returns all cases for one format.
pub(super) fn cases(is_packed: bool) -> Vec<HostileCase> {
    let mut all = chains::cases();
    all.extend(commands::cases());
    all.extend(lists::cases());
    all.extend(control::cases());
    all.extend(config::cases());
    for case in &mut all {
        case.name = format!("{} scsi: {}", if is_packed { "packed" } else { "split" }, case.name);
    }
    match is_packed {
        true => all.into_iter().map(|case| case.with(feature::RING_PACKED)).collect(),
        false => all,
    }
}

/// Returns the options of cases.
fn options() -> FrontEndOptions {
    let FrontEndOptions { memory, queue_size, patience, .. } = super::options();
    FrontEndOptions { memory, queue_size, patience, ..FrontEndOptions::scsi(2) }
}

/// Case on a virtio-scsi device.
fn case(
    name: impl Into<String>,
    stage: FrontEndStage,
    tolerance: Tolerance,
    attack: impl Fn(&mut FrontEnd) -> Result<DeviceReaction> + Send + Sync + 'static,
) -> HostileCase {
    HostileCase { options: options(), ..HostileCase::new(name, stage, tolerance, attack) }
}

/// Case on a running device whose unit 0 is ready.
fn ready_case(
    name: impl Into<String>,
    tolerance: Tolerance,
    attack: impl Fn(&mut FrontEnd) -> Result<DeviceReaction> + Send + Sync + 'static,
) -> HostileCase {
    case(name, Running, tolerance, move |fe| {
        make_ready(fe)?;
        attack(fe)
    })
}

/// Case of one command.
fn command(
    name: impl Into<String>,
    tolerance: Tolerance,
    make: impl Fn() -> ScsiHostCommand + Send + Sync + 'static,
) -> HostileCase {
    ready_case(name, tolerance, move |fe| Ok(judge(&run(fe, REQUESTS, &make())?)))
}

/// Waits until unit 0 is ready, so that no unit attention is taken for the reaction to a case.
fn make_ready(fe: &mut FrontEnd) -> Result<()> {
    let deadline = Instant::now() + 5 * REACTION;
    let ready = ScsiHostCommand::new(0, cdb::test_unit_ready());
    loop {
        // An end of the connection would be no reaction to the case, either.
        let done = run(fe, PREPARATIONS, &ready);
        let done = done.map_err(|error| FrontEndError::Violation(format!("before the case: {error}")))?;
        if done.is_good() {
            return Ok(());
        }
        if !done.is_transient() || Instant::now() >= deadline {
            return Err(FrontEndError::Violation(format!("unit 0 is not ready: {done:x?}")));
        }
        std::thread::yield_now();
    }
}

/// Runs one command on a queue of the device.
fn run(fe: &mut FrontEnd, queue: usize, command: &ScsiHostCommand) -> Result<ScsiHostCompletion> {
    let used = fe.run_buffers(queue, &command.buffers(SIZES))?;
    Ok(ScsiHostCompletion::decode(used, SIZES))
}

/// Returns what a completed command says about the device.
fn judge(done: &ScsiHostCompletion) -> DeviceReaction {
    match (done.response, done.status) {
        (response::OK, status::GOOD) => Accepted,
        (response::OK, status) => Failed(status),
        (response, _) => Failed(response),
    }
}

/// Connects a host whose unit 0 is ready.
fn connect(socket: &Path, patience: Duration) -> Result<ScsiHost> {
    let options = FrontEndOptions { patience, ..options() };
    let mut host = ScsiHost::over(attach(socket, &options, Running, patience)?)?;
    host.post_events(4, EVENT_SIZE)?;
    host.ready(0)?;
    Ok(host)
}

/// Writes what no case may change.
pub(super) fn write_canary(socket: &Path, patience: Duration) -> Result<()> {
    let mut host = connect(socket, patience)?;
    let capacity = host.capacity(0)?;
    if capacity.block_size != 512 || capacity.last_lba < 1 << 16 {
        return Err(FrontEndError::Violation(format!("unit 0 is of no use to the cases: {capacity:?}")));
    }
    host.write(0, CANARY.start, &pattern(CANARY.start, CANARY.end - CANARY.start, 0))?;
    host.synchronize(0)
}

/// Checks with a well-behaved host that unit 0 still has its data, that it reads and writes, that it is not reserved,
/// and that the control queue is served.
pub(super) fn check(socket: &Path, number: u64, patience: Duration) -> Result<()> {
    let mut host = connect(socket, patience)?;
    if host.sizes != SIZES {
        return Err(FrontEndError::Violation(format!("sizes of another connection: {:?}", host.sizes)));
    }
    let count = CANARY.end - CANARY.start;
    let found = host.read(0, CANARY.start, count as u32)?;
    same("the first part of unit 0", found == pattern(CANARY.start, count, 0))?;
    let written = pattern(PROBE_SECTOR, 8, number + 1);
    host.write(0, PROBE_SECTOR, &written)?;
    same("what was written", host.read(0, PROBE_SECTOR, 8)? == written)?;
    match host.manage(task_function::QUERY_TASK_SET, unit_address(0, 0), 0)? {
        response::OK | response::FUNCTION_SUCCEEDED | response::FUNCTION_REJECTED => Ok(()),
        other => Err(FrontEndError::Violation(format!("response {other} to QUERY TASK SET"))),
    }
}
