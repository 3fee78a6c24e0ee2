//! Write logs in front of the images of a family.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, ErrorKind, LocalFuture, Result};
use forebay_image::{Image, Images};
use forebay_writelog::{DirtyLimits, LogId, LogOptions, LogOwner, MediumKind, Persist, Shelf, ShelfOptions, WriteLog};

use super::open;
use crate::rng::Rng;
use crate::world::World;

/// Disk with the logs.
const SHELF: &str = "/family-logs";
/// Bytes of a log: a few writes fill it.
const LOG_SIZE: u64 = 256 << 10;
/// Logs on the disk at a time.
const LOGS_MAX: u64 = 4;

/// Log of an image, as it is recorded: crashes do not change it.
struct KnownLog {
    id: LogId,
    record: Rc<EpochRecord>,
}

/// Record of a log, which is kept with its image.
#[derive(Default)]
struct EpochRecord(Cell<u64>);

impl LogOwner for EpochRecord {
    fn release(&self) -> LocalFuture<Result<()>> {
        self.0.set(self.0.get() + 1);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Log that is open, in front of its image.
#[derive(Clone)]
pub(super) struct LoggedMember {
    pub(super) log: Rc<WriteLog>,
    pub(super) image: Rc<Image>,
}

/// Write logs of a family.
pub(super) struct FamilyLogs {
    options: LogOptions,
    recorded: BTreeMap<usize, KnownLog>,
    shelf: Option<Rc<Shelf>>,
    open: BTreeMap<usize, LoggedMember>,
}

impl FamilyLogs {
    /// Draws the options of the logs, and adds their disk.
    pub(super) fn draw(world: &World, rng: &mut Rng) -> Self {
        world.add_disk(SHELF, (1 << 20) + 2 * LOGS_MAX * LOG_SIZE, *rng.pick(&[512, 4096]));
        let age_max = *rng.pick(&[Duration::ZERO, Duration::from_millis(5), Duration::from_secs(1000)]);
        let options = LogOptions {
            persist: *rng.pick(&[Persist::OnWrite, Persist::OnFlush]),
            limits: DirtyLimits { age_max, ..DirtyLimits::default() },
            direct_min: *rng.pick(&[None, Some(32 << 10)]),
            batch_entries: *rng.pick(&[1, 4, 64]),
            parallel: *rng.pick(&[1, 4, 64]),
            ..LogOptions::default()
        };
        Self { options, recorded: BTreeMap::new(), shelf: None, open: BTreeMap::new() }
    }

    /// Opens the logs that there are, at the beginning of a life; those of removed images are discarded. `name` returns the
    /// name of an image, by its number.
    pub(super) async fn begin(&mut self, images: &Rc<Images>, name: impl Fn(usize) -> Option<String>) -> Result<()> {
        let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(SHELF), options).await?;
        self.shelf = Some(shelf.clone());
        self.recorded.retain(|number, _| name(*number).is_some());
        for id in shelf.ids() {
            // One whose creation, or whose discarding, a crash has cut short.
            if !self.recorded.values().any(|recorded| recorded.id == id) {
                shelf.discard(&id).await?;
            }
        }
        let numbers: Vec<usize> = self.recorded.keys().copied().collect();
        for number in numbers {
            self.open_log(images, number, &name(number).unwrap_or_default()).await?;
        }
        Ok(())
    }

    async fn open_log(&mut self, images: &Rc<Images>, number: usize, name: &str) -> Result<()> {
        let (Some(shelf), Some(KnownLog { id, record })) = (&self.shelf, self.recorded.get(&number)) else {
            return Ok(());
        };
        let image = open(images, name).await?;
        let opened = shelf.open_log(id, &volume(number), record.0.get()).await?;
        let log = WriteLog::new(image.clone(), opened, record.clone(), self.options.clone());
        log.acquired().await?;
        self.open.insert(number, LoggedMember { log, image });
        Ok(())
    }

    /// Creates the log of an image, unless there is no space for it.
    pub(super) async fn create(&mut self, world: &World, images: &Rc<Images>, number: usize, name: &str) -> Result<()> {
        let Some(shelf) = self.shelf.clone().filter(|_| self.recorded.len() < LOGS_MAX as usize) else { return Ok(()) };
        let record = Rc::new(EpochRecord::default());
        let id = match shelf.create(&volume(number), name, LOG_SIZE, 0).await {
            Err(error) if error.kind() == ErrorKind::NoSpace => return Ok(()),
            created => created?,
        };
        if world.is_off() {
            return Ok(());
        }
        self.recorded.insert(number, KnownLog { id, record });
        self.open_log(images, number, name).await
    }

    /// Returns the log of an image, if it has one.
    pub(super) fn of(&self, number: usize) -> Option<LoggedMember> {
        self.open.get(&number).cloned()
    }

    /// Returns the log in front of a handle's image, if it has one.
    pub(super) fn of_name(&self, name: &str) -> Option<LoggedMember> {
        self.open.values().find(|logged| logged.image.name() == name).cloned()
    }

    /// Makes what was written through all logs durable.
    pub(super) async fn flush(&self) -> Result<()> {
        for LoggedMember { log, .. } in self.open.values() {
            log.submit(BlockRequest::Flush).await?;
        }
        Ok(())
    }

    /// Writes the log of an image back, and discards it.
    pub(super) async fn end(&mut self, number: usize) -> Result<()> {
        let Some(LoggedMember { log, image }) = self.open.remove(&number) else { return Ok(()) };
        log.close(true).await?;
        log.gone().await;
        image.close().await;
        let recorded = self.recorded.remove(&number);
        match (&self.shelf, recorded) {
            (Some(shelf), Some(recorded)) => shelf.discard(&recorded.id).await,
            _ => Ok(()),
        }
    }

    /// Ends all logs.
    pub(super) async fn end_all(&mut self) -> Result<()> {
        while let Some(&number) = self.open.keys().next() {
            self.end(number).await?;
        }
        self.shelf = None;
        Ok(())
    }

    /// Closes all logs, written back or as they are.
    pub(super) async fn close(&mut self, write_back: bool) -> Result<()> {
        while let Some((_, LoggedMember { log, image })) = self.open.pop_first() {
            log.close(write_back).await?;
            log.gone().await;
            image.close().await;
        }
        self.shelf = None;
        Ok(())
    }

    /// Forgets what a life had open, after a crash.
    pub(super) fn forget(&mut self) {
        self.open.clear();
        self.shelf = None;
    }
}

fn volume(number: usize) -> String {
    format!("family-{number}")
}
