//! `store ranges`: named ranges of one device, for several stores.

use std::path::PathBuf;

use forebay_block::ErrorKind;
use forebay_store::{NewRange, Occupant, RangedDevice, create_range, list_ranges, remove_range};
use serde::Serialize;

use super::store::on_reactor;
use crate::cli::StoreRangesCommand;
use crate::config::absolute;
use crate::failure::{Failure, Result};
use crate::output::{Output, fields, table};
use crate::units::Size;

/// Range as it is printed.
#[derive(Debug, Serialize)]
struct RangeInfo {
    name: String,
    /// Path that opens it.
    path: String,
    /// Offset on the device in bytes.
    offset: u64,
    /// Size in bytes.
    size: u64,
    /// Share of the device's queue.
    share: u16,
    /// Maximum number of requests in flight.
    requests: usize,
    /// Set if a process has it open.
    in_use: bool,
    /// Content: `nothing`, or a description.
    holds: String,
}

/// Ranges of a device as they are printed.
#[derive(Debug, Serialize)]
struct RangeList {
    device: PathBuf,
    /// UUID of the range table, as hexadecimal digits.
    id: String,
    /// Size of the device in bytes.
    size: u64,
    /// Bytes that no range has.
    unused: u64,
    /// Requests in flight that ranges share.
    queue_depth: u32,
    ranges: Vec<RangeInfo>,
}

impl RangeList {
    fn of(device: PathBuf, found: RangedDevice) -> Self {
        let range = |range: forebay_store::RangeStatus| RangeInfo {
            path: format!("{}#{}", device.display(), range.record.name),
            name: range.record.name,
            offset: range.record.offset,
            size: range.record.len,
            share: range.record.share,
            requests: range.requests,
            in_use: range.in_use,
            holds: match range.content {
                Occupant::Nothing => "nothing".into(),
                Occupant::Store => "a Forebay store".into(),
                Occupant::DamagedStore(why) => format!("a damaged Forebay store ({why})"),
                Occupant::Foreign(what) => what.join(", "),
            },
        };
        let ranges = found.ranges.into_iter().map(range).collect();
        let id = found.uuid.iter().map(|byte| format!("{byte:02x}")).collect();
        Self { device, id, size: found.size, unused: found.unused, queue_depth: found.queue_depth, ranges }
    }

    fn show(&self) -> String {
        let row = |range: &RangeInfo| {
            vec![
                range.name.clone(),
                Size(range.offset).to_string(),
                Size(range.size).to_string(),
                range.share.to_string(),
                range.requests.to_string(),
                if range.in_use { "in use" } else { "-" }.into(),
                range.holds.clone(),
            ]
        };
        let header = ["NAME", "OFFSET", "SIZE", "SHARE", "REQUESTS", "STATE", "HOLDS"];
        let mut text = table(&header, &[1, 2, 3, 4], self.ranges.iter().map(row));
        text.push('\n');
        text.push_str(&fields(&[
            ("device", format!("{} ({})", self.device.display(), Size(self.size))),
            ("unused", Size(self.unused).to_string()),
            ("queue depth", self.queue_depth.to_string()),
        ]));
        text
    }
}

/// Runs a command on the ranges of a device.
pub fn run(output: Output, command: StoreRangesCommand) -> Result<()> {
    match command {
        StoreRangesCommand::Create { device, name, size, share, force } => {
            let device = absolute(&device)?;
            let has_size = size.is_some();
            let options = NewRange { name, size: size.map(|Size(size)| size), share, force };
            let record = on_reactor(create_range(&device, &options))?.map_err(|error| match error.kind() {
                ErrorKind::Exists | ErrorKind::Corrupt if !force => Failure::from(error)
                    .hint("name another range; --force overwrites what a device without ranges holds"),
                ErrorKind::NoSpace if !has_size => Failure::from(error).hint("say how large the range is to be"),
                ErrorKind::NoSpace => Failure::from(error).hint("'forebay store ranges list DEV' shows the ranges"),
                _ => Failure::from(error),
            })?;
            let path = format!("{}#{}", device.display(), record.name);
            let made = serde_json::json!({ "path": path, "offset": record.offset, "size": record.len });
            output.print(&made, |_| format!("made {path} with {}", Size(record.len)))
        }
        StoreRangesCommand::List { device } => {
            let device = absolute(&device)?;
            let found = on_reactor(list_ranges(&device))?.map_err(|error| match error.kind() {
                ErrorKind::Invalid => {
                    Failure::from(error).hint("'forebay store ranges create DEV NAME SIZE' makes one")
                }
                _ => Failure::from(error),
            })?;
            output.print(&RangeList::of(device, found), RangeList::show)
        }
        StoreRangesCommand::Remove { device, name, force } => {
            let device = absolute(&device)?;
            on_reactor(remove_range(&device, &name, force))?.map_err(|error| match error.kind() {
                ErrorKind::Exists => Failure::from(error).hint("--force removes it with all that it holds"),
                ErrorKind::Corrupt if !force => Failure::from(error).hint("--force removes it with all that it holds"),
                ErrorKind::Busy => Failure::from(error).hint("stop the daemon that has it first"),
                _ => Failure::from(error),
            })?;
            let path = format!("{}#{name}", device.display());
            output.print(&serde_json::json!({ "removed": path }), |_| format!("removed {path}"))
        }
    }
}
