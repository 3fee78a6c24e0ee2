//! Control API types for the devices of the embedded store.

use std::path::PathBuf;

use forebay_store::{ColumnCounters, ColumnMoves, ColumnState, DeviceStatus, KeyStatus, ScrubStatus};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Device of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreDeviceInfo {
    /// Number in the store; never used again.
    pub number: u16,
    /// Identity, as hexadecimal digits.
    pub id: String,
    /// Path at which it was opened last.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// State: `active`, `away` or `filling`.
    pub state: String,
    /// Set if it cannot be opened.
    pub missing: bool,
    /// Reason why it is away.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Number of the device that it replaces once it is filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaces: Option<u16>,
    /// Bytes for data and parity.
    pub size: u64,
    /// Bytes of it that segments occupy, free ones included.
    #[serde(default)]
    pub allocated: u64,
    /// Set while it is being removed.
    #[serde(default)]
    pub leaving: bool,
    /// Segments that are complete on it.
    pub filled: u32,
    /// Failed reads since the store was opened.
    pub read_errors: u64,
    /// Failed writes and flushes since the store was opened.
    pub write_errors: u64,
    /// Blocks with wrong content found since the store was opened.
    pub wrong_blocks: u64,
}

impl From<DeviceStatus> for StoreDeviceInfo {
    fn from(device: DeviceStatus) -> Self {
        let state = match device.state {
            ColumnState::Active => "active",
            ColumnState::Away => "away",
            ColumnState::Filling => "filling",
        };
        Self {
            number: device.number,
            id: device.id.iter().map(|byte| format!("{byte:02x}")).collect(),
            path: device.path,
            state: state.into(),
            missing: device.missing,
            reason: Some(device.reason).filter(|reason| !reason.is_empty()),
            replaces: device.replaces,
            size: device.size,
            allocated: device.allocated,
            leaving: device.leaving,
            filled: device.filled,
            read_errors: device.read_errors,
            write_errors: device.write_errors,
            wrong_blocks: device.wrong_blocks,
        }
    }
}

/// Moves of columns between the devices of the store.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MovesInfo {
    /// Set while devices are being removed, or columns moved so that added devices are used.
    pub pending: bool,
    /// Bytes of columns that are to be moved.
    pub bytes_left: u64,
    /// Bytes of columns moved since the store was opened.
    pub bytes_moved: u64,
    /// Segments that are to be emptied before, since the devices that stay have no space for them.
    pub segments_left: u32,
    /// Reason why nothing can be moved at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocked: Option<String>,
}

impl From<ColumnMoves> for MovesInfo {
    fn from(moves: ColumnMoves) -> Self {
        let ColumnMoves { pending, columns_left, moved, segments_left, column_size, blocked } = moves;
        Self {
            pending,
            bytes_left: columns_left * column_size,
            bytes_moved: moved * column_size,
            segments_left,
            blocked: Some(blocked).filter(|why| !why.is_empty()),
        }
    }
}

/// Devices of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreDevices {
    /// Data columns (k).
    pub data: usize,
    /// Parity columns (m), or additional copies: devices that may be lost.
    pub parity: usize,
    /// Number of segments.
    pub segments: u32,
    /// Devices, with those that are to replace others.
    pub devices: Vec<StoreDeviceInfo>,
    /// Sentence about devices that are away or being filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub degraded: Option<String>,
    /// Reads of a column that were reconstructed from others, since the store was opened.
    pub degraded_reads: u64,
    /// Reads that a device answered late, so that the column was also reconstructed.
    pub late_reads: u64,
    /// Blocks with wrong content that were reconstructed.
    pub reconstructed_blocks: u64,
    /// Blocks that were written again where they had been wrong.
    pub mended_blocks: u64,
    /// Moves of columns between the devices.
    #[serde(default)]
    pub moves: MovesInfo,
}

impl StoreDevices {
    /// Describes the devices of a store with `columns` data and parity columns.
    pub fn of(
        columns: (usize, usize),
        segments: u32,
        devices: Vec<DeviceStatus>,
        degraded: Option<String>,
        counters: ColumnCounters,
        moves: ColumnMoves,
    ) -> Self {
        Self {
            data: columns.0,
            parity: columns.1,
            segments,
            devices: devices.into_iter().map(StoreDeviceInfo::from).collect(),
            degraded,
            degraded_reads: counters.degraded_reads,
            late_reads: counters.late_reads,
            reconstructed_blocks: counters.reconstructed_blocks,
            mended_blocks: counters.mended_blocks,
            moves: moves.into(),
        }
    }
}

/// Request to replace a device of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceDeviceRequest {
    /// Device to replace: its path or number.
    pub old: String,
    /// File or device that replaces it; the same path takes back a device that was away.
    #[schema(value_type = String)]
    pub new: PathBuf,
    /// Set to overwrite what the new one holds.
    #[serde(default)]
    pub force: bool,
    /// Set to respond only once it is filled.
    #[serde(default)]
    pub wait: bool,
}

/// Request to make the store use more of its file or device, or of its devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GrowStoreRequest {
    /// Devices of a store on several: paths or numbers; empty for all.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Size that each file is to have, in bytes; 0 for its present size, or that of the device.
    #[serde(default)]
    pub size: u64,
}

/// Request to add devices to the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AddDevicesRequest {
    /// Files or devices.
    #[schema(value_type = Vec<String>)]
    pub devices: Vec<PathBuf>,
    /// Size that each file is to have, in bytes; 0 for its present size, or that of the device.
    #[serde(default)]
    pub size: u64,
    /// Set to overwrite what they hold.
    #[serde(default)]
    pub force: bool,
    /// Set to respond only once columns have been moved to them.
    #[serde(default)]
    pub wait: bool,
}

/// Request to remove devices from the store, or to keep those that are being removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RemoveDevicesRequest {
    /// Devices: paths or numbers. With `cancel`, none means all that are being removed.
    #[serde(default)]
    pub devices: Vec<String>,
    /// Set to keep them.
    #[serde(default)]
    pub cancel: bool,
    /// Set to respond only once they are no devices of the store any more.
    #[serde(default)]
    pub wait: bool,
}

/// Progress and results of a scrub of the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubInfo {
    /// Set while it runs.
    pub running: bool,
    /// Segments done.
    pub segment: u32,
    /// Segments in total.
    pub segments: u32,
    /// Bytes read and verified.
    pub bytes: u64,
    /// Blocks that were wrong, and were written again: data, metadata or parity.
    pub mended: u64,
    /// Blocks in use that are wrong and cannot be reconstructed.
    pub lost: u64,
    /// Descriptions of the first of them.
    #[serde(default)]
    pub losses: Vec<String>,
    /// Time of the end of the last complete scrub: seconds since 1970; 0 if there was none.
    pub completed_s: u64,
}

impl From<ScrubStatus> for ScrubInfo {
    fn from(status: ScrubStatus) -> Self {
        let ScrubStatus { running, segment, segments, bytes, mended, lost, losses, completed_s } = status;
        Self { running, segment, segments, bytes, mended, lost, losses, completed_s }
    }
}

/// Keys of encrypted images in the store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StoreKeys {
    /// Number of encrypted images.
    pub images: usize,
    /// First digits of the value by which the master key is recognized, if there are any keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub master_key: Option<String>,
    /// Set if the store was opened without the master key: encrypted images can be neither read nor written.
    pub locked: bool,
}

impl From<KeyStatus> for StoreKeys {
    fn from(status: KeyStatus) -> Self {
        let shown = |check: [u8; 16]| check[..4].iter().map(|byte| format!("{byte:02x}")).collect();
        Self { images: status.keys, master_key: status.master.map(shown), locked: status.locked }
    }
}

/// Request to wrap the keys of encrypted images by another master key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = RotateMasterKey)]
pub struct RotateKeyRequest {
    /// Source of the new master key, which the daemon reads: `file:PATH` or `command:COMMAND`.
    pub to: String,
}
