//! Devices of the embedded store: the file that lists them, and operations on them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_block::ErrorKind;
use forebay_reactor::sleep;
use forebay_store::{ColumnState, DeviceSetOptions, Store};
use serde::{Deserialize, Serialize};

use crate::api::{
    AddDevicesRequest, GrowStoreRequest, RemoveDevicesRequest, ReplaceDeviceRequest, ScrubInfo, StoreDevices,
    StoreSpace,
};
use crate::engine::Engine;
use crate::engine::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;

/// Name of the file that lists the devices of a store, in the data directory.
pub const DEVICE_LIST: &str = "store-devices.json";
/// Interval at which progress is looked at.
const LOOK_AFTER: Duration = Duration::from_millis(200);

/// Devices of a store: its UUID, and the paths where they were last.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceList {
    /// UUID of the store, as hexadecimal digits.
    store: String,
    /// Paths of its devices, in any order.
    pub devices: Vec<PathBuf>,
}

impl DeviceList {
    /// Creates the list of a store.
    pub fn new(uuid: [u8; 16], devices: Vec<PathBuf>) -> Self {
        Self { store: uuid.iter().map(|byte| format!("{byte:02x}")).collect(), devices }
    }

    /// Returns whether a store's path is that of such a list.
    pub fn is_list(path: &Path) -> bool {
        path.extension().is_some_and(|extension| extension == "json")
    }

    /// Reads the list at a path.
    ///
    /// # Errors
    /// When it cannot be read, or is no such list.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::io(error, format_args!("reading the store's devices in {}", path.display())))?;
        let list: Self = serde_json::from_str(&text).map_err(|error| {
            Failure::invalid(format!("{} does not list the devices of a store: {error}", path.display()))
                .hint(r#"it is {"store": "UUID", "devices": ["PATH", ...]}"#)
        })?;
        list.uuid().map(|_| list.clone()).ok_or_else(|| {
            Failure::invalid(format!("{}: '{}' is no UUID of 32 hexadecimal digits", path.display(), list.store))
        })
    }

    /// Writes the list.
    ///
    /// # Errors
    /// Errors of the file system.
    pub fn save(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("plain data becomes JSON") + "\n";
        replace_file(path, text.as_bytes())
            .map_err(|error| Failure::io(error, format_args!("writing the store's devices to {}", path.display())))
    }

    /// Returns the UUID of the store.
    pub fn uuid(&self) -> Option<[u8; 16]> {
        let digits = self.store.as_bytes();
        if digits.len() != 32 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return None;
        }
        let byte = |i: usize| u8::from_str_radix(&self.store[2 * i..2 * i + 2], 16).ok();
        let bytes: Option<Vec<u8>> = (0..16).map(byte).collect();
        bytes?.try_into().ok()
    }
}

/// Creates a store on several devices, and the file that lists them at `list`.
///
/// # Errors
/// Those of [`Store::init_devices`], and of writing the list.
pub async fn init_devices(
    list: &Path,
    paths: &[PathBuf],
    options: &DeviceSetOptions,
    progress: ProgressSink,
) -> Result<()> {
    let made = Store::init_devices(paths, options, |done, total| progress.report(done, total)).await;
    let uuid = made.map_err(|error| match error.kind() {
        ErrorKind::Exists | ErrorKind::Corrupt => Failure::from(error).hint("--force overwrites all that is there"),
        ErrorKind::Invalid if options.size == 0 => {
            Failure::from(error).hint("say how large each file is to be with --size, for example --size 100G")
        }
        ErrorKind::Busy => Failure::from(error).hint("end that first; --force does not change it"),
        _ => Failure::from(error),
    })?;
    DeviceList::new(uuid, paths.to_vec()).save(list)
}

/// Rewrites the list at `path` with the places where the devices of an open store are.
pub fn update_list(path: &Path, store: &Store) -> Result<()> {
    let list = DeviceList::new(store.uuid(), store.devices().into_iter().map(|device| device.path).collect());
    if DeviceList::load(path)? == list {
        return Ok(());
    }
    list.save(path)
}

/// Waits until columns have been moved, and devices that are being removed are no devices of the store any more.
async fn wait_moved(store: &Store, progress: &ProgressSink) -> Result<()> {
    let mut total = 0;
    loop {
        let moves = store.column_moves();
        if !moves.pending {
            return Ok(());
        }
        if !moves.blocked.is_empty() {
            return Err(Failure::failed(format!("columns cannot be moved: {}", moves.blocked))
                .hint("it is tried again in the background; 'forebay store devices' shows the progress"));
        }
        let left = moves.columns_left + u64::from(moves.segments_left);
        total = left.max(total);
        progress.report(total - left, total);
        sleep(LOOK_AFTER).await;
    }
}

impl Engine {
    pub(super) fn opened_store(&self) -> Result<&Store> {
        self.store.as_deref().ok_or_else(|| self.no_store())
    }

    /// Lists the devices of the store.
    pub fn store_devices(&self) -> Result<StoreDevices> {
        let store = self.opened_store()?;
        let columns = store.columns().ok_or_else(|| {
            let path = self.options.store.display();
            Failure::new(FailureKind::Unsupported, format!("the store {path} is on one file or device"))
                .hint("'forebay store init --ec K+M DEV...' makes one on several")
        })?;
        let segments = store.stats().segments;
        let (devices, degraded) = (store.devices(), store.degraded());
        Ok(StoreDevices::of(columns, segments, devices, degraded, store.column_counters(), store.column_moves()))
    }

    /// Replaces a device of the store, or takes one back that was away; with `wait`, until it is filled.
    pub async fn replace_store_device(
        &self,
        request: ReplaceDeviceRequest,
        progress: ProgressSink,
    ) -> Result<StoreDevices> {
        let ReplaceDeviceRequest { old, new, force, wait } = request;
        let number = self.device_number(&old)?;
        let list = self.name_device(&new)?;
        let store = self.opened_store()?;
        let replaced = store.replace_device(number, &new, force).await;
        if let (Err(_), Some(list)) = (&replaced, list) {
            update_list(list, store)?;
        }
        let filled = replaced.map_err(|error| match error.kind() {
            ErrorKind::Exists | ErrorKind::Corrupt => Failure::from(error).hint("--force overwrites all that is there"),
            _ => Failure::from(error),
        })?;
        if wait {
            self.wait_filled(store, filled, &new, &progress).await?;
        }
        if let Some(list) = list.filter(|_| wait) {
            update_list(list, store)?;
        }
        self.store_devices()
    }

    /// Returns the number of a device that is given by its path or number.
    fn device_number(&self, given: &str) -> Result<u16> {
        let is_meant = |device: &&crate::api::StoreDeviceInfo| {
            device.replaces.is_none() && (device.path == Path::new(given) || device.number.to_string() == given)
        };
        self.store_devices()?.devices.iter().find(is_meant).map(|device| device.number).ok_or_else(|| {
            Failure::new(FailureKind::NotFound, format!("the store has no device '{given}'"))
                .hint("'forebay store devices' lists paths and numbers")
        })
    }

    /// Adds the path of a new device to the file that lists them, and returns that file, if the store has one.
    fn name_device(&self, new: &Path) -> Result<Option<&PathBuf>> {
        if !new.is_absolute() {
            return Err(Failure::invalid(format!("'{}' is not an absolute path", new.display())));
        }
        let list = DeviceList::is_list(&self.options.store).then_some(&self.options.store);
        if let Some(list) = list {
            // Named before it is used: a crash must not leave a device that no list has.
            let mut named = DeviceList::load(list)?;
            if !named.devices.iter().any(|device| device == new) {
                named.devices.push(new.to_owned());
                named.save(list)?;
            }
        }
        Ok(list)
    }

    /// Makes the store use more of its file or device, or of its devices.
    pub async fn grow_store(&self, request: GrowStoreRequest, progress: ProgressSink) -> Result<StoreSpace> {
        let GrowStoreRequest { devices, size } = request;
        let store = self.opened_store()?;
        if !devices.is_empty() && store.columns().is_none() {
            let path = self.options.store.display();
            return Err(Failure::invalid(format!("the store {path} is on one file or device"))
                .hint("leave out DEV; --size says how large a file is to be"));
        }
        let numbers = devices.iter().map(|device| self.device_number(device)).collect::<Result<Vec<u16>>>()?;
        let grown = store.grow(&numbers, size, |done, total| progress.report(done, total)).await;
        grown.map_err(|error| match error.kind() {
            ErrorKind::NoSpace => Failure::from(error).hint("free space in that file system, or name a smaller --size"),
            _ => Failure::from(error),
        })?;
        self.store_space().await
    }

    /// Adds devices to the store, one after the other.
    pub async fn add_store_devices(&self, request: AddDevicesRequest, progress: ProgressSink) -> Result<StoreDevices> {
        let AddDevicesRequest { devices, size, force, wait } = request;
        self.store_devices()?;
        let store = self.opened_store()?;
        for (done, device) in devices.iter().enumerate() {
            progress.report(done as u64, devices.len() as u64);
            let list = self.name_device(device)?;
            let added = store.add_device(device, size, force).await;
            if let Some(list) = list {
                update_list(list, store)?;
            }
            added.map_err(|error| match error.kind() {
                ErrorKind::Exists | ErrorKind::Corrupt => {
                    Failure::from(error).hint("--force overwrites all that is there")
                }
                ErrorKind::Invalid if size == 0 => {
                    Failure::from(error).hint("say how large a file is to be with --size")
                }
                _ => Failure::from(error),
            })?;
        }
        progress.report(devices.len() as u64, devices.len() as u64);
        if wait {
            wait_moved(store, &progress).await?;
        }
        self.store_devices()
    }

    /// Begins to remove devices from the store, or keeps them; with `wait`, until they are no devices of it any more.
    pub async fn remove_store_devices(
        &self,
        request: RemoveDevicesRequest,
        progress: ProgressSink,
    ) -> Result<StoreDevices> {
        let RemoveDevicesRequest { devices, cancel, wait } = request;
        self.store_devices()?;
        let store = self.opened_store()?;
        let numbers = devices.iter().map(|device| self.device_number(device)).collect::<Result<Vec<u16>>>()?;
        if cancel {
            store.cancel_removal(&numbers).await?;
            return self.store_devices();
        }
        if numbers.is_empty() {
            return Err(Failure::invalid("no device is named").hint("'forebay store devices' lists them"));
        }
        store.remove_devices(&numbers).await.map_err(|error| match error.kind() {
            ErrorKind::NoSpace => Failure::from(error).hint("remove images or snapshots, or add a device first"),
            _ => Failure::from(error),
        })?;
        if wait {
            wait_moved(store, &progress).await?;
            if DeviceList::is_list(&self.options.store) {
                update_list(&self.options.store, store)?;
            }
        }
        self.store_devices()
    }

    /// Waits until device `number`, at `path`, is filled.
    async fn wait_filled(&self, store: &Store, number: u16, path: &Path, progress: &ProgressSink) -> Result<()> {
        loop {
            let Some(device) = store.devices().into_iter().find(|device| device.number == number) else {
                return Err(Failure::failed(format!("{} was given up; see the log", path.display())));
            };
            progress.report(device.filled.into(), store.stats().segments.into());
            match device.state {
                ColumnState::Filling => sleep(LOOK_AFTER).await,
                ColumnState::Active => return Ok(()),
                ColumnState::Away => {
                    return Err(Failure::failed(format!("{} failed: {}", path.display(), device.reason)));
                }
            }
        }
    }

    /// Returns the state of the scrub of the store.
    pub fn scrub_status(&self) -> Result<ScrubInfo> {
        Ok(self.opened_store()?.scrub_status().into())
    }

    /// Starts a scrub of the store, or goes on with one; with `wait`, until it is complete.
    pub async fn start_scrub(&self, wait: bool, progress: ProgressSink) -> Result<ScrubInfo> {
        let store = self.opened_store()?;
        store.start_scrub().map_err(Failure::from)?;
        loop {
            let status = store.scrub_status();
            progress.report(status.segment.into(), status.segments.into());
            if !wait || !status.running {
                return Ok(status.into());
            }
            if let Some(error) = store.refuses_writes() {
                return Err(Failure::from(error));
            }
            sleep(LOOK_AFTER).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_as_they_were_written_and_anything_else_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join(DEVICE_LIST);
        let list = DeviceList::new(*b"0123456789abcdef", vec!["/dev/a".into(), "/dev/b".into()]);
        list.save(&path).expect("saved");
        assert_eq!(DeviceList::load(&path).expect("loaded"), list);
        assert_eq!(list.uuid(), Some(*b"0123456789abcdef"));
        assert!(DeviceList::is_list(&path) && !DeviceList::is_list(Path::new("/srv/store.img")));
        for wrong in ["", "{}", r#"{"store": "12", "devices": []}"#, r#"{"store": "zz", "devices": [], "more": 1}"#] {
            std::fs::write(&path, wrong).expect("written");
            assert_eq!(DeviceList::load(&path).expect_err(wrong).kind, FailureKind::Invalid, "{wrong}");
        }
    }
}
