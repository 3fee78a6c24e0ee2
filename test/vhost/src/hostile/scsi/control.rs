//! Control requests, event buffers, and the use of queues for what they are not for.

use std::time::{Duration, Instant};

use super::super::rings::chain;
use super::super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use super::DeviceReaction::{self, Accepted, Failed, QueueError};
use super::{PREPARATIONS, REQUESTS, SIZES, case, judge, make_ready, ready_case, run};
use crate::buffers::{UNWRITTEN, VirtqBuffers};
use crate::error::Result;
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::Shared;
use crate::rings::{ChainSegment, WRITE};
use crate::scsi::control::{control_type, task_function};
use crate::scsi::{
    CONTROL_QUEUE, EVENT_QUEUE, REPORT_LUNS_UNIT, ScsiHostCommand, ScsiHostCompletion, ScsiHostControl, cdb, response,
    unit_address,
};

/// Time for which a request is written while the device reads it.
const RACE: Duration = Duration::from_millis(200);

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = types();
    all.extend(task_management());
    all.extend(notifications());
    all.extend(raw_control());
    all.extend(event_buffers());
    all.extend(other_queues());
    all.extend(storms());
    all
}

/// Returns what the response to a control request says.
fn judge_response(response: Option<u8>) -> DeviceReaction {
    match response {
        Some(response::OK | response::FUNCTION_SUCCEEDED) => Accepted,
        other => Failed(other.unwrap_or(UNWRITTEN)),
    }
}

/// Case of one control request; the last byte that the device writes is the response.
fn control(name: impl Into<String>, tolerance: Tolerance, out: Vec<u8>, read: u32) -> HostileCase {
    ready_case(name, tolerance, move |fe| {
        let used = fe.run_buffers(CONTROL_QUEUE, &VirtqBuffers::new(&out, read))?;
        Ok(judge_response(used.bytes.last().copied()))
    })
}

fn request(name: impl Into<String>, tolerance: Tolerance, request: ScsiHostControl) -> HostileCase {
    control(name, tolerance, request.out, request.read)
}

fn types() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for kind in [3_u32, 4, 0xFF, 0x100, 0x0001_0000, 0x8000_0000, u32::MAX] {
        for (length, read) in [(4, 1), (16, 5), (24, 1), (4096, 4096)] {
            let mut out = kind.to_le_bytes().to_vec();
            out.resize(length, 0);
            let name = format!("control request of type {kind:#x} with {length} and {read} bytes");
            all.push(control(name, Tolerance::Failure, out, read));
        }
    }
    let query = ScsiHostControl::task_management(task_function::QUERY_TASK_SET, unit_address(0, 0), 0).out;
    for length in [1, 3, 4, 7, 8, 15, 16, 23] {
        let name = format!("task management of {length} bytes");
        all.push(control(name, Tolerance::Failure, query[..length].to_vec(), 1));
    }
    let mut long = query.clone();
    long.resize(4096, 0xFF);
    all.push(control("task management of 4096 bytes", Tolerance::Any, long, 1));
    all.push(control("task management with 4096 bytes to write", Tolerance::Any, query.clone(), 4096));
    all.push(control("task management without a response", Tolerance::Failure, query, 0));
    let ask = ScsiHostControl::query(unit_address(0, 0), u32::MAX).out;
    for length in [1, 4, 12, 15] {
        let name = format!("notification query of {length} bytes");
        all.push(control(name, Tolerance::Failure, ask[..length].to_vec(), 5));
    }
    for read in [0, 1, 4] {
        let name = format!("notification query with {read} bytes to write");
        all.push(control(name, Tolerance::Any, ask.clone(), read));
    }
    all.push(control("notification query with 6 bytes to write", Tolerance::Any, ask, 6));
    all
}

fn task_management() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let unit = unit_address(0, 0);
    for function in [8, 9, 0xFF, 0x100, 0x0001_0000, 0x8000_0000, u32::MAX] {
        let name = format!("task management function {function:#x}");
        all.push(request(name, Tolerance::Failure, ScsiHostControl::task_management(function, unit, 0)));
    }
    let functions = [
        ("ABORT TASK", task_function::ABORT_TASK),
        ("ABORT TASK SET", task_function::ABORT_TASK_SET),
        ("CLEAR ACA", task_function::CLEAR_ACA),
        ("CLEAR TASK SET", task_function::CLEAR_TASK_SET),
        ("LOGICAL UNIT RESET", task_function::LOGICAL_UNIT_RESET),
        ("I_T NEXUS RESET", task_function::I_T_NEXUS_RESET),
        ("QUERY TASK", task_function::QUERY_TASK),
        ("QUERY TASK SET", task_function::QUERY_TASK_SET),
    ];
    for (name, function) in functions {
        let make = |lun, tag| ScsiHostControl::task_management(function, lun, tag);
        // There are no tasks, so there is little to do.
        for tag in [0, 12345, u64::MAX] {
            all.push(request(format!("{name} with identifier {tag:#x}"), Tolerance::Any, make(unit, tag)));
        }
        let addresses = [
            ("of zeroes", [0; 8]),
            ("of ones", [0xFF; 8]),
            ("of target 1", unit_address(1, 0)),
            ("of a unit that is not there", unit_address(0, 0x3FF0)),
            ("in logical unit addressing", [1, 0, 0x80, 0, 0, 0, 0, 0]),
        ];
        for (what, lun) in addresses {
            // A nexus is not of one unit, and CLEAR ACA need not look at it.
            let is_open = [task_function::I_T_NEXUS_RESET, task_function::CLEAR_ACA].contains(&function);
            let tolerance = if is_open { Tolerance::Any } else { Tolerance::Failure };
            all.push(request(format!("{name} at an address {what}"), tolerance, make(lun, 1)));
        }
        all.push(request(format!("{name} at the REPORT LUNS unit"), Tolerance::Any, make(REPORT_LUNS_UNIT, 1)));
    }
    all.push(ready_case("unit that is reset serves", Tolerance::Success, |fe| {
        let reset = ScsiHostControl::task_management(task_function::LOGICAL_UNIT_RESET, unit_address(0, 0), 0);
        for _ in 0..20 {
            let used = fe.run_buffers(CONTROL_QUEUE, &reset.buffers())?;
            let reaction = judge_response(used.bytes.last().copied());
            if reaction != Accepted {
                return Ok(reaction);
            }
            make_ready(fe)?;
        }
        Ok(judge(&run(fe, REQUESTS, &ScsiHostCommand::read(0, SCRATCH_SECTOR, 1))?))
    }));
    all
}

fn notifications() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for notifications in [0, 1, 0x7E, 0x80, u32::MAX] {
        let (query, subscribe) = (ScsiHostControl::query, ScsiHostControl::subscribe);
        let unit = unit_address(0, 0);
        let name = |what: &str| format!("{what} of notifications {notifications:#x}");
        all.push(request(name("query"), Tolerance::Any, query(unit, notifications)));
        all.push(request(name("subscription"), Tolerance::Any, subscribe(unit, notifications)));
        let elsewhere = unit_address(9, 0x3FF0);
        all.push(request(name("query elsewhere"), Tolerance::Failure, query(elsewhere, notifications)));
        all.push(request(name("subscription elsewhere"), Tolerance::Failure, subscribe(elsewhere, notifications)));
    }
    all
}

/// Cases of control requests whose buffers are misplaced.
fn raw_control() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, buffers: fn(&FrontEnd, u64, u64) -> Vec<(u64, u32, u16)>| {
        all.push(ready_case(format!("control request with {name}"), Tolerance::Failure, move |fe| {
            let (header, reply) = (fe.memory.allocate(64, 16)?, fe.memory.allocate(64, 16)?);
            let query = ScsiHostControl::task_management(task_function::QUERY_TASK_SET, unit_address(0, 0), 0);
            fe.memory.write(header, &query.out)?;
            fe.memory.write(reply, &[UNWRITTEN; 64])?;
            let buffers = buffers(fe, header, reply);
            fe.fire_on(CONTROL_QUEUE, &chain(&buffers))?;
            fe.observe_queue(CONTROL_QUEUE, |memory| {
                let mut byte = [0];
                memory.read(reply, &mut byte)?;
                Ok(judge_response(Some(byte[0])))
            })
        }));
    };
    add("a header outside of memory", |_, _, reply| vec![(0x1234_5678_9000, 24, 0), (reply, 1, WRITE)]);
    add("a header that wraps", |_, _, reply| vec![(u64::MAX - 7, 24, 0), (reply, 1, WRITE)]);
    add("a header across the end of memory", |fe, _, reply| vec![(fe.memory.end() - 8, 24, 0), (reply, 1, WRITE)]);
    add("a header that is writable", |_, header, reply| vec![(header, 24, WRITE), (reply, 1, WRITE)]);
    add("a header of length 0", |_, header, reply| vec![(header, 0, 0), (reply, 1, WRITE)]);
    add("a response outside of memory", |_, header, _| vec![(header, 24, 0), (0x1234_5678_9000, 1, WRITE)]);
    add("a response at the end of all addresses", |_, header, _| vec![(header, 24, 0), (u64::MAX, 1, WRITE)]);
    add("a response that is not writable", |_, header, reply| vec![(header, 24, 0), (reply, 1, 0)]);
    add("a response of length 0", |_, header, reply| vec![(header, 24, 0), (reply, 0, WRITE)]);
    add("a response before the header", |_, header, reply| vec![(reply, 1, WRITE), (header, 24, 0)]);
    add("only a response", |_, _, reply| vec![(reply, 1, WRITE)]);
    all
}

/// Case of chains on the event queue, after which commands must be served, or the device must have said that it stops.
fn events(name: impl Into<String>, fill: impl Fn(&mut FrontEnd) -> Result<()> + Send + Sync + 'static) -> HostileCase {
    ready_case(name, Tolerance::Any, move |fe| {
        fill(fe)?;
        let done = run(fe, REQUESTS, &ScsiHostCommand::read(0, SCRATCH_SECTOR, 1))?;
        fe.check_neighbour()?;
        Ok(if fe.queues[EVENT_QUEUE].has_error()? { QueueError } else { judge(&done) })
    })
}

fn event_buffers() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for length in [0, 1, 4, 15, 16, 17, 4096, u32::MAX] {
        all.push(events(format!("event buffer of {length} bytes"), move |fe| {
            let buffer = fe.memory.allocate(4096, 16)?;
            fe.fire_on(EVENT_QUEUE, &chain(&[(buffer, length, WRITE)]))
        }));
    }
    let places: [(&str, fn(&FrontEnd) -> (u64, u32, u16)); 5] = [
        ("outside of memory", |_| (0x1234_5678_9000, 16, WRITE)),
        ("at the end of all addresses", |_| (u64::MAX, 16, WRITE)),
        ("across the end of memory", |fe| (fe.memory.end() - 8, 16, WRITE)),
        ("that is the used ring", |fe| (fe.queues[EVENT_QUEUE].ring.parts().used, 16, WRITE)),
        ("that is not writable", |_| (0, 16, 0)),
    ];
    for (name, place) in places {
        all.push(events(format!("event buffer {name}"), move |fe| {
            let buffer = place(fe);
            fe.fire_on(EVENT_QUEUE, &chain(&[buffer]))
        }));
    }
    all.push(events("event buffer of sixteen single bytes", |fe| {
        let buffer = fe.memory.allocate(16, 16)?;
        let buffers: Vec<_> = (0..16).map(|at| (buffer + at, 1, WRITE)).collect();
        fe.fire_on(EVENT_QUEUE, &chain(&buffers))
    }));
    all.push(events("event buffer with a command", |fe| {
        let command = ScsiHostCommand::read(0, SCRATCH_SECTOR, 1).buffers(SIZES);
        fe.queues[EVENT_QUEUE].submit_buffers(&command)?;
        fe.queues[EVENT_QUEUE].publish()
    }));
    all.push(events("one event buffer sixteen times", |fe| {
        let buffer = fe.memory.allocate(16, 16)?;
        for _ in 0..16 {
            fe.queues[EVENT_QUEUE].ring.add(&[ChainSegment::writable(buffer, 16)])?;
        }
        fe.queues[EVENT_QUEUE].publish()
    }));
    all.push(events("kicks of an event queue without buffers", |fe| {
        for _ in 0..10_000 {
            fe.queues[EVENT_QUEUE].notify()?;
        }
        Ok(())
    }));
    all
}

fn other_queues() -> Vec<HostileCase> {
    let mut all = Vec::new();
    all.push(ready_case("command on the control queue", Tolerance::Failure, |fe| {
        let command = ScsiHostCommand::read(0, SCRATCH_SECTOR, 1).buffers(SIZES);
        let used = fe.run_buffers(CONTROL_QUEUE, &command)?;
        Ok(judge(&ScsiHostCompletion::decode(used, SIZES)))
    }));
    for (name, kind) in [("task management", control_type::TASK_MANAGEMENT), ("query", control_type::ASYNC_QUERY)] {
        all.push(ready_case(format!("{name} on a request queue"), Tolerance::Failure, move |fe| {
            let mut out = kind.to_le_bytes().to_vec();
            out.resize(24, 0);
            let used = fe.run_buffers(REQUESTS, &VirtqBuffers::new(&out, 5))?;
            Ok(judge_response(used.bytes.last().copied()))
        }));
    }
    all.push(case("request queue without the control and event queues", Shared, Tolerance::Any, |fe| {
        let queue = fe.create_queue(REQUESTS as u16)?;
        let base = queue.ring.resume_base();
        fe.queues.push(queue);
        fe.start_queue(0, base)?;
        Ok(judge(&run(fe, 0, &ScsiHostCommand::new(0, cdb::inquiry(None, 36)).reading(36))?))
    }));
    all.push(ready_case("queues that are stopped and started in turn", Tolerance::Success, |fe| {
        let query = ScsiHostControl::task_management(task_function::QUERY_TASK_SET, unit_address(0, 0), 0);
        for round in 0..20 {
            let stopped = [CONTROL_QUEUE, EVENT_QUEUE, REQUESTS, PREPARATIONS][round % 4];
            let base = fe.get_vring_base(stopped as u32)?;
            fe.start_queue(stopped, base)?;
            fe.run_buffers(CONTROL_QUEUE, &query.buffers())?;
            let done = run(fe, REQUESTS, &ScsiHostCommand::read(0, SCRATCH_SECTOR, 1))?;
            if !done.is_good() {
                return Ok(judge(&done));
            }
        }
        Ok(Accepted)
    }));
    all
}

/// Cases of many functions while commands are in flight: each chain has to come back.
fn storms() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let functions = [
        ("ABORT TASK", task_function::ABORT_TASK),
        ("ABORT TASK SET", task_function::ABORT_TASK_SET),
        ("CLEAR TASK SET", task_function::CLEAR_TASK_SET),
        ("LOGICAL UNIT RESET", task_function::LOGICAL_UNIT_RESET),
        ("I_T NEXUS RESET", task_function::I_T_NEXUS_RESET),
        ("QUERY TASK", task_function::QUERY_TASK),
    ];
    for (name, function) in functions {
        let name = format!("{name} while commands are in flight");
        all.push(ready_case(name, Tolerance::Success, move |fe| {
            for round in 0..20_u64 {
                let deadline = Instant::now() + fe.options.patience;
                for tag in 0..5 {
                    let command = ScsiHostCommand::read(0, SCRATCH_SECTOR, 64).tagged(round * 8 + tag);
                    fe.queues[REQUESTS].submit_buffers(&command.buffers(SIZES))?;
                    let request = ScsiHostControl::task_management(function, unit_address(0, 0), round * 8 + 4 - tag);
                    fe.queues[CONTROL_QUEUE].submit_buffers(&request.buffers())?;
                }
                for queue in [REQUESTS, CONTROL_QUEUE] {
                    fe.queues[queue].publish()?;
                }
                for queue in [REQUESTS, CONTROL_QUEUE] {
                    for _ in 0..5 {
                        fe.await_used_buffers(queue, deadline)?;
                    }
                }
            }
            make_ready(fe)?;
            Ok(Accepted)
        }));
    }
    all.push(ready_case("end of the connection with functions and commands in flight", Tolerance::Any, |fe| {
        let write = ScsiHostCommand::write(0, SCRATCH_SECTOR, &[1; 65536]).buffers(SIZES);
        let reset = ScsiHostControl::task_management(task_function::LOGICAL_UNIT_RESET, unit_address(0, 0), 0);
        for _ in 0..5 {
            fe.queues[REQUESTS].submit_buffers(&write)?;
            fe.queues[CONTROL_QUEUE].submit_buffers(&reset.buffers())?;
        }
        fe.queues[REQUESTS].publish()?;
        fe.queues[CONTROL_QUEUE].publish()?;
        fe.reconnect()?;
        Ok(Accepted)
    }));
    all.push(ready_case("control requests that change meanwhile", Tolerance::Any, |fe| {
        let (header, reply) = (fe.memory.allocate(64, 16)?, fe.memory.allocate(64, 16)?);
        let chain = chain(&[(header, 24, 0), (reply, 5, WRITE)]);
        let begun = Instant::now();
        let mut round = 0_u64;
        while begun.elapsed() < RACE {
            round += 1;
            fe.memory.write(header, &(round as u32 % 4).to_le_bytes())?;
            fe.memory.write(header + 4, &(round as u32 % 9).to_le_bytes())?;
            fe.memory.write(header + 8, &unit_address((round % 2) as u8, (round % 3) as u16))?;
            if round.is_multiple_of(16) {
                fe.fire_on(CONTROL_QUEUE, &chain)?;
            }
        }
        fe.get_features()?;
        Ok(Accepted)
    }));
    all
}
