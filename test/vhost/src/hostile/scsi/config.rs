//! Sizes of variable fields that a driver writes to the configuration, and other writes that it may not do.

use std::time::Instant;

use super::super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use super::DeviceReaction::{self, Accepted};
use super::{REQUESTS, case, judge};
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::{Negotiated, Running};
use crate::message::{self, feature, protocol, request};
use crate::scsi::{
    CDB_SIZE_OFFSET, CONFIG_SIZE, SENSE_SIZE_OFFSET, ScsiFieldSizes, ScsiHostCommand, ScsiHostCompletion,
    ScsiHostConfig, cdb, status,
};

/// Maximum size with which a case runs a command.
const SIZE_MAX: u32 = 1 << 16;

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = sizes();
    all.extend(writes());
    all.extend(reads());
    let features = |fe: &mut FrontEnd| {
        if fe.offered & feature::SCSI_T10_PI != 0 {
            return Ok(DeviceReaction::Refused(0));
        }
        fe.set_features(fe.features | feature::SCSI_T10_PI)?;
        Ok(Accepted)
    };
    let case = case("protection information that is not offered", Negotiated, Tolerance::Refusal, features);
    all.push(case.with_protocol(protocol::REPLY_ACK));
    all
}

/// Returns the sizes that the device says are in force.
fn sizes_in_force(fe: &FrontEnd) -> Result<ScsiFieldSizes> {
    Ok(ScsiHostConfig::decode(&fe.get_config(0, CONFIG_SIZE)?).sizes())
}

/// Runs READ CAPACITY (16) and a read with other sizes.
fn serve(fe: &mut FrontEnd, sizes: ScsiFieldSizes) -> Result<DeviceReaction> {
    let deadline = Instant::now() + 5 * fe.options.patience;
    for command in
        [ScsiHostCommand::new(0, cdb::read_capacity16(32)).reading(32), ScsiHostCommand::read(0, SCRATCH_SECTOR, 8)]
    {
        loop {
            let used = fe.run_buffers(REQUESTS, &command.buffers(sizes))?;
            let done = ScsiHostCompletion::decode(used, sizes);
            // Sense data may be cut so short that a unit attention cannot be told from other failures.
            let is_transient = done.is_transient() || sizes.sense < 3 && done.status == status::CHECK_CONDITION;
            if is_transient && Instant::now() < deadline {
                std::thread::yield_now();
                continue;
            }
            if !done.is_good() {
                return Ok(judge(&done));
            }
            break;
        }
    }
    Ok(Accepted)
}

fn sizes() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let fields = [
        (
            "cdb_size",
            CDB_SIZE_OFFSET,
            &[16, 32, 33, 64, 252][..],
            &[0, 1, 5, 15, 65535, 1 << 20, 1 << 31, u32::MAX][..],
        ),
        ("sense_size", SENSE_SIZE_OFFSET, &[18, 96, 97, 252], &[0, 1, 7, 17, 65535, 1 << 20, 1 << 31, u32::MAX]),
    ];
    for (field, offset, useful, others) in fields {
        let sizes = useful.iter().map(|&size| (size, true)).chain(others.iter().map(|&size| (size, false)));
        for (size, is_useful) in sizes {
            let attack = move |fe: &mut FrontEnd| {
                let before = sizes_in_force(fe)?;
                let set = fe.set_config(offset, 0, &u32::to_le_bytes(size));
                let in_force = sizes_in_force(fe)?;
                let asked = match offset {
                    CDB_SIZE_OFFSET => ScsiFieldSizes { cdb: size, ..before },
                    _ => ScsiFieldSizes { sense: size, ..before },
                };
                // Useful sizes must be taken, and any that were refused must not be in force.
                let is_right = match &set {
                    Ok(()) => in_force == asked || !is_useful,
                    Err(_) => in_force == before,
                };
                if !is_right {
                    return Err(FrontEndError::Violation(format!("{set:?} and then {in_force:?}")));
                }
                fe.advance(Negotiated, Running)?;
                let usable = in_force.cdb <= SIZE_MAX && in_force.sense <= SIZE_MAX;
                let reaction = serve(fe, if usable { in_force } else { ScsiFieldSizes::DEFAULT });
                fe.check_neighbour()?;
                reaction
            };
            let tolerance = if is_useful { Tolerance::Success } else { Tolerance::Any };
            let case = case(format!("{field} of {size}"), Negotiated, tolerance, attack);
            all.push(case.with_protocol(protocol::CONFIG | protocol::REPLY_ACK));
        }
        let attack = move |fe: &mut FrontEnd| {
            for size in [64, 0, 20, u32::MAX, 32] {
                let command = ScsiHostCommand::read(0, SCRATCH_SECTOR, 1).buffers(ScsiFieldSizes::DEFAULT);
                fe.queues[REQUESTS].submit_buffers(&command)?;
                fe.queues[REQUESTS].publish()?;
                match fe.set_config(offset, 0, &size.to_le_bytes()) {
                    Ok(()) | Err(FrontEndError::Refused { .. }) => {}
                    Err(error) => return Err(error),
                }
            }
            let deadline = Instant::now() + fe.options.patience;
            for _ in 0..5 {
                fe.await_used_buffers(REQUESTS, deadline)?;
            }
            Ok(Accepted)
        };
        let case = case(format!("{field} that changes while commands are in flight"), Running, Tolerance::Any, attack);
        all.push(case.with_protocol(protocol::CONFIG));
    }
    all
}

fn set(name: &str, tolerance: Tolerance, offset: u32, size: u32, flags: u32, bytes: &[u8]) -> HostileCase {
    let payload = message::config(offset, size, flags, bytes);
    let attack = move |fe: &mut FrontEnd| {
        let before = fe.get_config(0, CONFIG_SIZE)?;
        let reaction = fe.tell(request::SET_CONFIG, &payload, &[]);
        let is_refused = matches!(reaction, Err(FrontEndError::Refused { .. }));
        if is_refused && fe.get_config(0, CONFIG_SIZE)? != before {
            return Err(FrontEndError::Violation("a refused write has changed the configuration".into()));
        }
        reaction.map(|()| Accepted)
    };
    let case = case(format!("set-config {name}"), Negotiated, tolerance, attack);
    case.with_protocol(protocol::CONFIG | protocol::REPLY_ACK)
}

fn writes() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let read_only = [
        ("num_queues", 0, 4),
        ("seg_max", 4, 4),
        ("max_sectors", 8, 4),
        ("cmd_per_lun", 12, 4),
        ("event_info_size", 16, 4),
        ("max_channel", 28, 2),
        ("max_target", 30, 2),
        ("max_lun", 32, 4),
    ];
    for (field, offset, size) in read_only {
        let bytes = vec![0xA5; size as usize];
        all.push(set(&format!("of {field}"), Tolerance::Refusal, offset, size, 0, &bytes));
    }
    let word = 64_u32.to_le_bytes();
    all.push(set("of everything", Tolerance::Refusal, 0, CONFIG_SIZE, 0, &[0xA5; CONFIG_SIZE as usize]));
    all.push(set("of both sizes at once", Tolerance::Any, SENSE_SIZE_OFFSET, 8, 0, &[word, word].concat()));
    all.push(set("of parts of both sizes", Tolerance::Any, SENSE_SIZE_OFFSET + 2, 4, 0, &word));
    all.push(set("of one byte of a size", Tolerance::Any, CDB_SIZE_OFFSET, 1, 0, &[64]));
    all.push(set("of a size and what follows", Tolerance::Refusal, CDB_SIZE_OFFSET, 6, 0, &[0xA5; 6]));
    all.push(set("past the end", Tolerance::Refusal, CONFIG_SIZE, 4, 0, &word));
    all.push(set("far past the end", Tolerance::Refusal, 0x1000, 4, 0, &word));
    all.push(set("at the end of all numbers", Tolerance::Refusal, u32::MAX, 4, 0, &word));
    all.push(set("of a size in more bytes than follow", Tolerance::Refusal, CDB_SIZE_OFFSET, 8, 0, &word));
    all.push(set("of a size with unknown flags", Tolerance::Any, CDB_SIZE_OFFSET, 4, 0xFFFF_FFFE, &word));
    all.push(set("of a size as of a migration", Tolerance::Any, CDB_SIZE_OFFSET, 4, 1, &word));
    all.push(set("of 0 bytes", Tolerance::Any, CDB_SIZE_OFFSET, 0, 0, &[]));
    all
}

fn reads() -> Vec<HostileCase> {
    let gets = [
        ("past the end", 0x1000, 8, Tolerance::Refusal),
        ("across the end", 32, 64, Tolerance::Any),
        ("of 256 bytes", 0, 256, Tolerance::Any),
        ("at the end of all numbers", u32::MAX, 1, Tolerance::Refusal),
        ("that wraps", u32::MAX - 3, 8, Tolerance::Refusal),
        ("of one byte", 35, 1, Tolerance::Success),
    ];
    let get = |(name, offset, size, tolerance): (&str, u32, u32, Tolerance)| {
        let attack = move |fe: &mut FrontEnd| {
            fe.get_config(offset, size)?;
            Ok(Accepted)
        };
        case(format!("get-config {name}"), Negotiated, tolerance, attack).with_protocol(protocol::CONFIG)
    };
    gets.into_iter().map(get).collect()
}
