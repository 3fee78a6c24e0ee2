//! Growth of an open store: space of larger files and devices, or of added devices, becomes segments.
//!
//! The order makes it safe to stop anywhere: files are extended first; then both copies of the superblock, or the device
//! table, have the new number of segments durably; and the segments are used after the next checkpoint, whose table and
//! record are the first ones that know of them.

use std::path::Path;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::{File, yield_now};

use crate::columns::DeviceGrowth;
use crate::core::Core;
use crate::device::StoreDevice;
use crate::format::superblock::SEGMENTS_START;
use crate::init::{ALLOCATE_STEP, check_file_system, free_behind};
use crate::store::Store;

/// Extends a file durably from `from` to `to` bytes. With `allocate`, its new space is allocated.
///
/// # Errors
/// `NoSpace` if the file system has too little; the file keeps its length then.
async fn extend(file: &File, from: u64, to: u64, allocate: bool, mut progress: impl FnMut(u64)) -> Result<()> {
    let shown = file.path().display();
    let failed = |error| Error::from_io(error, format!("extending {shown} to {to} bytes"));
    if allocate {
        check_file_system(file, to - from)?;
    }
    let mut at = from;
    while allocate && at < to {
        let len = ALLOCATE_STEP.min(to - at);
        match file.allocate(at, len).await {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::Unsupported => break,
            Err(error) => {
                if let Err(error) = free_behind(file, from, at + len - from).await {
                    tracing::warn!(%error, "cannot free the space that was allocated for {shown}");
                }
                return Err(failed(error));
            }
        }
        at += len;
        progress(at - from);
        yield_now().await;
    }
    file.set_size(to).map_err(failed)?;
    file.sync_data().await.map_err(failed)
}

impl Store {
    /// Makes the store use all of its file or device, or of its devices with the given numbers (all if there are none).
    /// Files are extended to `size` bytes each; with 0, they keep their sizes.  Calls `progress` with (bytes allocated,
    /// bytes in total). Returns the number of segments before and after.
    ///
    /// # Errors
    /// `Invalid` for a size that is smaller than the store, larger than a block device, or more than segments of this size
    /// allow; `NoSpace` if a file system has too little; `Busy` while a device is being replaced; errors of the devices. A
    /// rejected request changes nothing, but files may have been extended.
    pub async fn grow(&self, devices: &[u16], size: u64, mut progress: impl FnMut(u64, u64)) -> Result<(u32, u32)> {
        let core = &self.core;
        core.refuse_writes()?;
        let _permit = core.resizing.acquire(1).await;
        let before = core.segments.borrow().geometry.segment_count;
        match &core.media.device {
            StoreDevice::Single(_) if !devices.is_empty() => {
                let text = format!("{} is on one device; name none", core.media.device.name());
                return Err(Error::new(ErrorKind::Invalid, text));
            }
            StoreDevice::Single(file) => core.grow_file(file, size, &mut progress).await?,
            StoreDevice::Columns(set) => {
                core.refuse_while_removing(set)?;
                let growths = set.growths(devices, size)?;
                let most = core.superblock.segments_max();
                if growths.is_empty() && set.segments_with(&growths, most) == before {
                    return Ok((before, before));
                }
                let total: u64 = growths.iter().map(|growth| growth.to - growth.from).sum();
                let mut done = 0;
                for DeviceGrowth { file, from, to, .. } in &growths {
                    if to > from {
                        // Sparse files would fail one by one when their file system is full.
                        extend(file, *from, *to, true, |at| progress(done + at, total)).await?;
                    }
                    done += to - from;
                }
                core.features.note_segments(set.segments_with(&growths, most));
                core.store_features().await?;
                let count = set.grow(&growths, most).await?;
                core.use_segments(count).await?;
                // More are possible when columns have been moved.
                core.maintenance.want_repair();
            }
        }
        let after = core.segments.borrow().geometry.segment_count;
        tracing::info!("{} has grown from {before} to {after} segments", core.media.device.name());
        Ok((before, after))
    }

    /// Adds the file or device at `path` to a store on several devices. A file gets `size` bytes; with 0, it keeps its size.
    /// Its space is used as far as other devices have free slots, and entirely when columns have been moved to it in the
    /// background.  Returns its number.
    ///
    /// # Errors
    /// `Unsupported` on one device; those of [`replace_device`](Self::replace_device).
    pub async fn add_device(&self, path: &Path, size: u64, force: bool) -> Result<u16> {
        let core = &self.core;
        let set = core.media.device.columns().ok_or_else(|| {
            let text = format!("{} is on one device, and cannot have more", core.media.device.name());
            Error::new(ErrorKind::Unsupported, text)
        })?;
        core.refuse_writes()?;
        let _permit = core.resizing.acquire(1).await;
        core.refuse_while_removing(set)?;
        let number = set.add(&core.current_superblock(), path, size, force).await?;
        core.renew_keys().await?;
        // Anchors that were written while those before were copied to it are on it, too, before it has columns: otherwise it
        // would look like a device from the past.
        core.take_requested_checkpoint().await?;
        core.add_segments(set).await?;
        // More are possible when columns have been moved to it.
        core.maintenance.want_repair();
        Ok(number)
    }
}

impl Core {
    /// Makes the store in a file or on a block device use `size` bytes; with 0, all of them.
    async fn grow_file(&self, file: &File, size: u64, progress: &mut impl FnMut(u64, u64)) -> Result<()> {
        let shown = file.path().display();
        let superblock = self.current_superblock();
        let used = superblock.device_size();
        let from = file.size().map_err(|error| Error::from_io(error, format!("growing {shown}")))?;
        let wanted = if size == 0 { from } else { size };
        let invalid = |text: String| Err(Error::new(ErrorKind::Invalid, text));
        if wanted < used {
            return invalid(format!(
                "{shown}: its store has {used} bytes, and cannot be made smaller ({wanted} bytes)"
            ));
        }
        if file.info().block_device && wanted > from {
            return invalid(format!("{shown} has {from} bytes, not {wanted}"));
        }
        let segment_size = u64::from(superblock.segment_size);
        let (count, most) = ((wanted - SEGMENTS_START) / segment_size, superblock.segments_max());
        if count > u64::from(most) {
            let largest = SEGMENTS_START + u64::from(most) * segment_size;
            return invalid(format!(
                "{shown}: a store with segments of {segment_size} bytes has {largest} bytes at most, not {wanted}"
            ));
        }
        let count = count as u32;
        if count == superblock.segment_count {
            return Ok(());
        }
        let end = SEGMENTS_START + u64::from(count) * segment_size;
        let host = self.space.host();
        let allocate = host.is_some_and(|host| host.is_whole());
        if end > from {
            let extended = extend(file, from, end, allocate, |at| progress(at, end - from)).await;
            if let (Err(error), Some(host)) = (&extended, host) {
                tracing::debug!(%error, "renewing the reserve behind the store");
                host.grow(used, true).await;
            }
            extended?;
        }
        if let Some(host) = host {
            host.grow(end, allocate && from <= used).await;
        }
        self.features.note_segments(count);
        self.store_features().await?;
        self.use_segments(count).await
    }

    /// Makes segments of the free slots of the devices.
    pub(crate) async fn add_segments(&self, set: &crate::columns::ColumnSet) -> Result<()> {
        let (before, most) = (self.segments.borrow().geometry.segment_count, self.superblock.segments_max());
        let count = set.segments_with(&[], most);
        if count == before {
            return Ok(());
        }
        self.features.note_segments(count);
        self.store_features().await?;
        let count = set.grow(&[], most).await?;
        self.use_segments(count).await
    }

    /// Adds segments that are durably a part of the store, up to `count` in total, and returns once they can be used.
    ///
    /// # Errors
    /// When the store fails or closes before that; they are a part of the store nevertheless.
    pub(crate) async fn use_segments(&self, count: u32) -> Result<()> {
        self.segments.borrow_mut().grow(count);
        self.checkpoints.resize(&self.segments.borrow().geometry);
        self.take_requested_checkpoint().await?;
        debug_assert!(!self.segments.borrow().has_added());
        self.gc.resume(self.counters.user_bytes());
        self.maintenance.notify_writers();
        Ok(())
    }

    /// Waits for a checkpoint that begins after this call to be durable.
    ///
    /// # Errors
    /// When the store fails or closes before that.
    pub(crate) async fn take_requested_checkpoint(&self) -> Result<()> {
        self.checkpoints.request();
        self.maintenance.wake();
        loop {
            let changed = self.maintenance.next_change();
            if !self.checkpoints.is_requested() {
                return Ok(());
            }
            self.refuse_writes()?;
            changed.await;
        }
    }
}
