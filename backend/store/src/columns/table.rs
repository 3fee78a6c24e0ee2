//! Changes of the device table: durable on every device that is used before they take effect.

use std::rc::Rc;

use forebay_block::{Buf, Error, ErrorKind, Result};
use forebay_reactor::sync::join_all;

use super::device::{ColumnDevice, ColumnState};
use super::geometry::RowGeometry;
use super::set::ColumnSet;
use crate::format::devices::{DeviceTable, PLACES, RecordedState};

/// Reason why a change of the table failed on a device.
struct TableFailure {
    number: u16,
    error: std::io::Error,
}

impl ColumnSet {
    /// Stops using a device: it is recorded as away before anything counts without it.  A device that is to replace
    /// another one is forgotten.
    ///
    /// # Errors
    /// When parity does not allow another device to be away, or the table cannot be written.
    pub async fn drop_device(&self, number: u16, reason: &str) -> Result<()> {
        if self.read_only {
            return Err(Error::new(ErrorKind::ReadOnly, "the store is open read-only"));
        }
        let _permit = self.changing.acquire(1).await;
        let Some(device) = self.device(number) else { return Ok(()) };
        if !device.is_written() {
            return Ok(());
        }
        let mut table = self.table.borrow().clone();
        self.record_away(&mut table, number, reason)?;
        self.write_table(table, &[]).await?;
        device.set_reason(reason.to_owned());
        match device.replaces() {
            Some(old) => {
                tracing::error!("{}, which was to replace device {old}, is given up: {reason}", device.describe())
            }
            None => tracing::error!(
                "{} of {} is not used any more: {reason}; `forebay store replace` gives its content to another one",
                device.describe(),
                self.name()
            ),
        }
        Ok(())
    }

    /// Records in a table that a device is away.
    fn record_away(&self, table: &mut DeviceTable, number: u16, reason: &str) -> Result<()> {
        let since = self.durable_seq.get() + 1;
        let away = table.members().filter(|device| device.number != number && device.state != RecordedState::Active);
        let (others, parity) = (away.count(), usize::from(table.parity));
        let Some(device) = table.device_mut(number) else { return Ok(()) };
        if device.replaces.is_some() {
            table.devices.retain(|device| device.number != number);
            return Ok(());
        }
        if others + 1 > parity {
            let text = format!(
                "device {number} ({}) of {} cannot be used: {reason}; {others} others are not complete, and parity \
                 allows {parity} in all",
                device.path,
                self.name()
            );
            return Err(Error::new(ErrorKind::Io, text));
        }
        device.state = match device.state {
            RecordedState::Active => RecordedState::Away { since },
            RecordedState::Away { since } | RecordedState::Filling { since, .. } => RecordedState::Away { since },
        };
        Ok(())
    }

    /// Writes a changed table to every device that it uses, and to `joining`, which are not devices of the set yet;
    /// then it takes effect. The caller holds the permit.
    ///
    /// Devices that fail are recorded as away in it, too.
    pub(super) async fn write_table(&self, mut table: DeviceTable, joining: &[Rc<ColumnDevice>]) -> Result<()> {
        loop {
            table.generation = self.table.borrow().generation.max(table.generation) + 1;
            let bytes = table.encode().map_err(|error| Error::new(ErrorKind::Invalid, error.0))?;
            let targets: Vec<Rc<ColumnDevice>> = self
                .all_devices()
                .into_iter()
                .chain(joining.iter().cloned())
                .filter(|device| {
                    let record = table.device(device.number);
                    let used = record.is_some_and(|record| !matches!(record.state, RecordedState::Away { .. }));
                    used && device.file().is_some()
                })
                .collect();
            let place = PLACES[(table.generation % 2) as usize];
            let bytes = Buf::copy_of(&bytes);
            let writes = targets.iter().map(|device| {
                let bytes = bytes.clone();
                Box::pin(async move {
                    let written = match device.write(bytes.into(), place).await {
                        Ok(()) => device.sync().await,
                        Err(error) => Err(error),
                    };
                    written.map_err(|error| TableFailure { number: device.number, error })
                })
            });
            let failures: Vec<TableFailure> =
                join_all(writes).await.into_iter().filter_map(|done| done.err()).collect();
            if failures.is_empty() {
                self.apply_table(table, joining);
                return Ok(());
            }
            for failure in failures {
                let reason = format!("its device table cannot be written: {}", failure.error);
                if let Some(device) = self.device(failure.number) {
                    device.set_reason(reason.clone());
                    tracing::error!("{}: {reason}", device.describe());
                }
                self.record_away(&mut table, failure.number, &reason)?;
            }
        }
    }

    /// Writes a table that is the newest on some device to all others that it uses. Devices that fail are left to the next
    /// change of the table.
    pub(super) async fn spread_table(&self, table: &DeviceTable) {
        let Ok(bytes) = table.encode() else { return };
        let place = PLACES[(table.generation % 2) as usize];
        let is_used = |number| table.device(number).is_some_and(|record| record.state == RecordedState::Active);
        self.spread(&Buf::copy_of(&bytes), place, is_used).await;
    }

    /// Writes bytes durably to one place of the active devices that `is_target` selects by their numbers. One from the
    /// past is not active: it must not look as if it were current.
    pub(super) async fn spread(&self, bytes: &Buf, place: u64, is_target: impl Fn(u16) -> bool) {
        let is_current = |device: &Rc<ColumnDevice>| device.state() == ColumnState::Active && device.file().is_some();
        let targets: Vec<Rc<ColumnDevice>> =
            self.all_devices().into_iter().filter(|device| is_target(device.number) && is_current(device)).collect();
        let writes = targets.iter().map(|device| {
            let bytes = bytes.clone();
            Box::pin(async move {
                match device.write(bytes.into(), place).await {
                    Ok(()) => device.sync().await,
                    Err(error) => Err(error),
                }
            })
        });
        for (device, result) in targets.iter().zip(join_all(writes).await) {
            if let Err(error) = result {
                tracing::warn!(%error, "cannot write byte {place} of {}", device.describe());
            }
        }
    }

    /// Makes a durable table effective.
    fn apply_table(&self, table: DeviceTable, joining: &[Rc<ColumnDevice>]) {
        let mut devices = self.devices.borrow_mut();
        devices.extend(joining.iter().cloned());
        devices.retain(|device| table.device(device.number).is_some());
        for device in devices.iter_mut() {
            let record = table.device(device.number).expect("retained");
            device.set_state(record.state);
            device.set_replaces(record.replaces);
            device.set_slots(record.slots);
        }
        *self.geometry.borrow_mut() = RowGeometry::of(&table);
        *self.table.borrow_mut() = table;
    }

    /// Changes the table with `change`, durably.
    pub(super) async fn change_table(&self, change: impl FnOnce(&mut DeviceTable)) -> Result<()> {
        self.change_table_if(|table| {
            change(table);
            true
        })
        .await
    }

    /// Changes the table with `change`, durably, if that returns true.
    pub(super) async fn change_table_if(&self, change: impl FnOnce(&mut DeviceTable) -> bool) -> Result<()> {
        let _permit = self.changing.acquire(1).await;
        let mut table = self.table.borrow().clone();
        match change(&mut table) {
            true => self.write_table(table, &[]).await,
            false => Ok(()),
        }
    }
}
