//! Replacement of a device, and the return of one that was away.

use std::path::Path;
use std::rc::Rc;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::{File, OpenOptions, fs, random};

use super::device::{ColumnDevice, ColumnState};
use super::set::ColumnSet;
use crate::features::write_superblock;
use crate::format::BLOCK;
use crate::format::anchor::SLOTS;
use crate::format::devices::{DeviceRecord, RecordedState};
use crate::format::superblock::{DeviceIdentity, SEGMENTS_START, StoreSuperblock};
use crate::init::{erase_signatures, open_or_create, preallocate, reject_occupied};
use crate::recover::read_superblock;

impl ColumnSet {
    /// Begins to replace device `number` with the one at `path`, or takes that device back if it is there. Returns the
    /// number of the device that is filled now.
    ///
    /// # Errors
    /// See [`Store::replace_device`](crate::Store::replace_device).
    pub async fn replace(&self, superblock: &StoreSuperblock, number: u16, path: &Path, force: bool) -> Result<u16> {
        let _permit = self.changing.acquire(1).await;
        let old = self.device(number).filter(|device| device.replaces().is_none());
        let old =
            old.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{} has no device {number}", self.name())))?;
        let is_leaving = self.table.borrow().device(number).is_some_and(|device| device.leaving);
        let busy = |what: &str| Err(Error::new(ErrorKind::Busy, format!("{} is being {what}", old.describe())));
        if self.all_devices().iter().any(|device| device.replaces() == Some(number)) {
            return busy("replaced");
        }
        if old.state() == ColumnState::Filling {
            return busy("filled");
        }
        if let Some(user) = fs::file_user(path) {
            return Err(Error::new(ErrorKind::Busy, format!("{} is in use: {user}", path.display())));
        }
        // The file of a device that is away is still open and locked.
        if old.state() == ColumnState::Away && old.is_at(path) {
            old.close();
        }
        let (file, created) = open_or_create(path, OpenOptions::read_write().direct().lock()).await?;
        if let Ok(found) = read_superblock(&file).await
            && found.superblock.device.map(|identity| identity.id) == Some(old.id)
            && old.state() == ColumnState::Away
        {
            return self.take_back(&old, path, file).await;
        }
        let joined = match is_leaving {
            true => busy("removed; `forebay store remove --cancel` ends that"),
            false => self.join(superblock, &old, path, &file, force).await,
        };
        if joined.is_err() && created {
            // Remove the file that was created for it.
            if let Err(error) = fs::remove_file(path) {
                tracing::warn!(%error, "cannot remove {}", path.display());
            }
        }
        joined
    }

    /// Takes back a device that was away: it is given what it lacks.
    async fn take_back(&self, device: &Rc<ColumnDevice>, path: &Path, file: File) -> Result<u16> {
        let RecordedState::Away { since } = device.recorded() else { return Ok(device.number) };
        device.reopen(path.into(), file);
        let mut table = self.table.borrow().clone();
        if let Some(record) = table.device_mut(device.number) {
            record.state = RecordedState::Filling { since, below: 0 };
            record.path = path.display().to_string();
        }
        self.write_table(table, &[]).await?;
        self.check_joined(device.number, path)
    }

    /// Makes the file or device at `path` a device of the store, which is to replace `old`.
    async fn join(
        &self,
        superblock: &StoreSuperblock,
        old: &ColumnDevice,
        path: &Path,
        file: &File,
        force: bool,
    ) -> Result<u16> {
        let occupied = reject_occupied(file, force).await?;
        let needed = SEGMENTS_START + u64::from(old.slots()) * self.geometry.borrow().column_bytes();
        let device = file.info().block_device;
        let small = |size: u64| {
            let text = format!("{} has {size} bytes, and {} needs {needed}", path.display(), old.describe());
            Error::new(ErrorKind::Invalid, text)
        };
        if device && file.info().size < needed {
            return Err(small(file.info().size));
        }
        let DeviceIdentity { number, id } =
            self.prepare_device(superblock, path, file, needed, occupied.as_deref()).await?;
        let mut table = self.table.borrow().clone();
        let state = RecordedState::Filling { since: 0, below: 0 };
        table.next_number += 1;
        table.devices.push(DeviceRecord {
            number,
            id,
            slots: old.slots(),
            state,
            replaces: Some(old.number),
            leaving: false,
            path: path.display().to_string(),
        });
        let device =
            ColumnDevice::new(number, id, old.slots(), Some(old.number), path.into(), Some(file.clone()), state);
        self.write_table(table, &[Rc::new(device)]).await?;
        self.check_joined(number, path)
    }

    /// Gives a file that is to become a device its length of `size` bytes and its space, erases what a device holds, and
    /// writes anchors and superblocks. Returns the identity of the device, which has the next number.
    pub(super) async fn prepare_device(
        &self,
        superblock: &StoreSuperblock,
        path: &Path,
        file: &File,
        size: u64,
        occupied: Option<&str>,
    ) -> Result<DeviceIdentity> {
        let failed = |error| Error::from_io(error, format!("making {} a device of the store", path.display()));
        let device = file.info().block_device;
        if let Some(found) = occupied {
            tracing::warn!("overwriting {}, which holds {found}", path.display());
        }
        if device {
            erase_signatures(file, file.info().size).await?;
        } else {
            file.set_size(0).map_err(failed)?;
            file.set_size(size).map_err(failed)?;
            match preallocate(file, size, &mut |_, _| {}).await {
                Err(error) if error.kind() == ErrorKind::Unsupported => {}
                done => done?,
            }
        }
        self.copy_anchors(file).await?;
        let number = self.table.borrow().next_number;
        let id: [u8; 16] = [random().to_le_bytes(), random().to_le_bytes()].concat().try_into().expect("16 bytes");
        let identity = DeviceIdentity { number, id };
        write_superblock(file, &StoreSuperblock { device: Some(identity), ..superblock.clone() }).await?;
        if let Some(parent) = path.parent().filter(|_| !device) {
            let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
            fs::sync_dir(parent).map_err(failed)?;
        }
        Ok(identity)
    }

    /// Returns the number of a device that is filled from now on.
    ///
    /// # Errors
    /// `Io` if it failed while the table was written to it, which then took effect without it.
    fn check_joined(&self, number: u16, path: &Path) -> Result<u16> {
        match self.device(number).filter(|device| device.state() == ColumnState::Filling) {
            Some(_) => Ok(number),
            None => {
                Err(Error::new(ErrorKind::Io, format!("{} fails: its device table cannot be written", path.display())))
            }
        }
    }

    /// Copies the anchors of an active device, so that a new one is not taken for one from the past before the next
    /// checkpoint.
    async fn copy_anchors(&self, file: &File) -> Result<()> {
        let failed = |error| Error::from_io(error, format!("copying the anchors to {}", file.path().display()));
        for at in SLOTS.into_iter().flatten() {
            let mut read = None;
            for device in self.all_devices().into_iter().filter(|device| device.state() == ColumnState::Active) {
                read = Some(device.read(BufMut::with_capacity(BLOCK), BLOCK, at).await);
                if matches!(read, Some(Ok(_))) {
                    break;
                }
            }
            if let Some(block) = read {
                let block: Buf = block.map_err(failed)?.freeze();
                file.write_at(block, at).await.map_err(failed)?;
            }
        }
        file.sync_data().await.map_err(failed)
    }
}
