//! Disks and files: names, locks, and the operations in flight on them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use forebay_reactor::driver::{ByteRange, Completion, FileInfo, FileSystemSpace, Handle, Op, OpKey, OpenOptions};

use crate::content::{Content, CrashOdds, Effect};
use crate::core::{Core, Event};
use crate::faults::DiskFaults;
use crate::pages::{PAGE, Piece};
use crate::trace::What;

pub(crate) const EIO: i32 = 5;
const EINVAL: i32 = 22;
const EBADF: i32 = 9;
const ENOSPC: i32 = 28;
const EOPNOTSUPP: i32 = 95;

pub(crate) fn os_error<T>(code: i32) -> io::Result<T> {
    Err(io::Error::from_raw_os_error(code))
}

/// One disk or file.
#[derive(Debug)]
pub(crate) struct Inode {
    pub(crate) content: Content,
    /// Pages that a file has space for without content: allocated, or being written.  Kept where space has an end.
    allocated: BTreeSet<u64>,
    device: bool,
    sector: u32,
    faults: Option<DiskFaults>,
    /// Handles that hold locks, of the whole or of a range.
    locks: Vec<(Handle, Option<ByteRange>)>,
    operations: u64,
    /// Operations in flight since the last call of `take_most_in_flight`, at most.
    most_in_flight: usize,
    /// Sectors that cannot be read until they are written again.
    bad: Vec<u64>,
}

impl Inode {
    /// Returns the bytes of its file system that a file takes.
    fn taken(&self) -> u64 {
        self.content.allocated() + self.allocated.len() as u64 * PAGE
    }

    /// Returns the pages of a run that a file has no space for yet.
    fn missing(&self, offset: u64, len: u64) -> Vec<u64> {
        let lacks = |page: &u64| !self.content.is_stored(*page) && !self.allocated.contains(page);
        (offset / PAGE..(offset + len).div_ceil(PAGE)).filter(lacks).collect()
    }

    /// Notes that pages of a run, which a write had taken, have content now.
    fn filled(&mut self, offset: u64, len: u64) {
        for page in offset / PAGE..(offset + len).div_ceil(PAGE) {
            if self.content.is_stored(page) {
                self.allocated.remove(&page);
            }
        }
    }

    /// Frees the pages of a run that have no content.
    fn free(&mut self, offset: u64, end: u64) {
        self.allocated.retain(|page| !(offset.div_ceil(PAGE)..end / PAGE).contains(page));
    }
}

#[derive(Debug, Clone, Copy)]
struct OpenFile {
    inode: usize,
    write: bool,
    direct: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Good,
    /// Answered, and nothing was done.
    Lost,
    Error(i32),
}

#[derive(Debug)]
struct InFlight {
    key: OpKey,
    op: Op,
    inode: usize,
    outcome: Outcome,
    effect: Option<Effect>,
    sync_mark: u64,
}

/// Disks and files of the world, and the operations in flight.
#[derive(Debug, Default)]
pub(crate) struct Files {
    inodes: Vec<Inode>,
    names: BTreeMap<PathBuf, usize>,
    durable_names: BTreeMap<PathBuf, usize>,
    open: BTreeMap<Handle, OpenFile>,
    in_flight: BTreeMap<u64, InFlight>,
    next: u64,
    /// A file that another process renames, from and to, when an open has not found the new name.
    late: Option<(PathBuf, PathBuf)>,
    /// Places where what is stored is not what was written: inode and offset.
    pub(crate) damage: Vec<(usize, u64)>,
}

impl Files {
    pub(crate) fn add(&mut self, path: &Path, size: u64, sector: u32, device: bool) {
        let inode = self.new_inode(size, sector, device);
        self.names.insert(path.to_owned(), inode);
        self.durable_names.insert(path.to_owned(), inode);
    }

    fn new_inode(&mut self, size: u64, sector: u32, device: bool) -> usize {
        let content = Content::new(size);
        self.inodes.push(Inode {
            content,
            allocated: BTreeSet::new(),
            device,
            sector,
            faults: None,
            locks: Vec::new(),
            operations: 0,
            most_in_flight: 0,
            bad: Vec::new(),
        });
        self.inodes.len() - 1
    }

    pub(crate) fn find(&mut self, path: &Path) -> Option<(usize, &mut Inode)> {
        let inode = *self.names.get(path)?;
        Some((inode, &mut self.inodes[inode]))
    }

    pub(crate) fn rename_late(&mut self, from: &Path, to: &Path) {
        self.late = Some((from.to_owned(), to.to_owned()));
    }

    pub(crate) fn set_faults(&mut self, path: &Path, faults: Option<DiskFaults>) -> bool {
        let found = self.find(path);
        found.map(|(_, inode)| (inode.faults, inode.operations) = (faults, 0)).is_some()
    }

    /// Returns the largest number of operations that were in flight on a file at a time since the last call.
    pub(crate) fn take_most_in_flight(&mut self, path: &Path) -> Option<usize> {
        self.find(path).map(|(_, inode)| std::mem::take(&mut inode.most_in_flight))
    }

    pub(crate) fn set_bad(&mut self, path: &Path, offset: u64) -> bool {
        self.find(path).map(|(_, inode)| inode.bad.push(offset / u64::from(inode.sector))).is_some()
    }

    pub(crate) fn open(
        &mut self,
        core: &mut Core,
        path: &Path,
        options: OpenOptions,
    ) -> io::Result<(Handle, FileInfo)> {
        let inode = match self.names.get(path) {
            Some(_) if options.create_new => return Err(io::ErrorKind::AlreadyExists.into()),
            Some(&inode) => inode,
            None if options.create => {
                const FILE_SECTOR: u32 = 512;
                let inode = self.new_inode(0, FILE_SECTOR, false);
                self.names.insert(path.to_owned(), inode);
                core.point();
                inode
            }
            None => {
                if let Some((from, to)) = self.late.take_if(|(_, to)| to == path)
                    && let Some(inode) = self.names.remove(&from)
                {
                    self.names.insert(to, inode);
                }
                return Err(io::ErrorKind::NotFound.into());
            }
        };
        let handle = core.handle();
        let node = &mut self.inodes[inode];
        if options.lock {
            let collides = |other: &Option<ByteRange>| match (other, &options.lock_range) {
                (Some(one), Some(other)) => one.overlaps(other),
                _ => true,
            };
            if node.locks.iter().any(|(_, other)| collides(other)) {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            node.locks.push((handle, options.lock_range));
        }
        let info = FileInfo {
            size: node.content.size(),
            block_device: node.device,
            sector: node.sector,
            direct: options.direct,
        };
        self.open.insert(handle, OpenFile { inode, write: options.write, direct: options.direct });
        core.log(What::Open, "", [handle.0, inode as u64, info.size]);
        Ok((handle, info))
    }

    pub(crate) fn close(&mut self, handle: Handle) {
        if let Some(file) = self.open.remove(&handle) {
            self.inodes[file.inode].locks.retain(|&(holder, _)| holder != handle);
        }
    }

    pub(crate) fn size(&self, handle: Handle) -> io::Result<u64> {
        let Some(file) = self.open.get(&handle) else { return os_error(EBADF) };
        Ok(self.inodes[file.inode].content.size())
    }

    pub(crate) fn set_size(&mut self, core: &mut Core, handle: Handle, size: u64) -> io::Result<()> {
        let Some(file) = self.open.get(&handle).filter(|file| file.write) else { return os_error(EBADF) };
        let node = &mut self.inodes[file.inode];
        if node.device {
            return os_error(EINVAL);
        }
        core.log(What::Resize, "", [handle.0, node.content.size(), size]);
        node.content.land(Effect::Resize(size), false);
        node.free(size, u64::MAX);
        core.point();
        Ok(())
    }

    pub(crate) fn allocated_size(&self, handle: Handle) -> io::Result<Option<u64>> {
        let Some(file) = self.open.get(&handle) else { return os_error(EBADF) };
        let node = &self.inodes[file.inode];
        Ok((!node.device).then(|| node.taken()))
    }

    pub(crate) fn next_data(&self, handle: Handle, from: u64) -> io::Result<Option<u64>> {
        let Some(file) = self.open.get(&handle) else { return os_error(EBADF) };
        let node = &self.inodes[file.inode];
        // A device knows no holes.
        Ok(if node.device { Some(from) } else { node.content.next_data(from) })
    }

    pub(crate) fn next_hole(&self, handle: Handle, from: u64) -> io::Result<Option<u64>> {
        let Some(file) = self.open.get(&handle) else { return os_error(EBADF) };
        let node = &self.inodes[file.inode];
        Ok(if node.device { None } else { node.content.next_hole(from) })
    }

    /// Returns the space of the file system that all files lie on, if it says.
    pub(crate) fn space(&self, core: &Core) -> Option<FileSystemSpace> {
        let total = core.faults.files_capacity.filter(|_| core.faults.files_space_known)?;
        Some(FileSystemSpace { total, available: total.saturating_sub(self.taken()) })
    }

    fn taken(&self) -> u64 {
        self.inodes.iter().filter(|inode| !inode.device).map(Inode::taken).sum()
    }

    pub(crate) fn remove(&mut self, core: &mut Core, path: &Path) -> io::Result<()> {
        let inode = self.names.remove(path).ok_or(io::ErrorKind::NotFound)?;
        core.log(What::RemoveFile, "", [inode as u64, 0, 0]);
        core.point();
        Ok(())
    }

    pub(crate) fn sync_dir(&mut self, core: &mut Core, dir: &Path) {
        let within = |path: &Path| path.parent() == Some(dir);
        self.durable_names.retain(|path, inode| !within(path) || self.names.get(path) == Some(inode));
        for (path, &inode) in self.names.iter().filter(|(path, _)| within(path)) {
            self.durable_names.insert(path.clone(), inode);
        }
        core.log(What::SyncDir, "", [0; 3]);
        core.point();
    }

    /// Starts an operation, and draws its outcome.
    pub(crate) fn submit(&mut self, core: &mut Core, key: OpKey, op: Op) {
        let handle = match &op {
            Op::Read { file, .. } | Op::Write { file, .. } | Op::Sync { file } => *file,
            Op::Punch { file, .. } | Op::Allocate { file, .. } => *file,
            _ => unreachable!("not an operation on a file: {op:?}"),
        };
        let Some(&file) = self.open.get(&handle) else {
            core.done.push(Completion { key, result: os_error(EBADF), op, peer: None });
            return;
        };
        let left = core.faults.files_capacity.map(|capacity| capacity.saturating_sub(self.taken()));
        let node = &mut self.inodes[file.inode];
        node.operations += 1;
        let faults = node.faults.as_ref().unwrap_or(&core.faults.disk);
        let rng = &mut core.rng;
        let (label, numbers, latency) = match &op {
            Op::Read { offset, buf, .. } => ("read", [*offset, buf.spare() as u64], &faults.read_latency),
            Op::Write { offset, bufs, durable: false, .. } => {
                ("write", [*offset, bufs.len() as u64], &faults.write_latency)
            }
            Op::Write { offset, bufs, .. } => ("write durable", [*offset, bufs.len() as u64], &faults.write_latency),
            Op::Punch { offset, len, .. } => ("punch", [*offset, *len], &faults.write_latency),
            Op::Allocate { offset, len, .. } => ("allocate", [*offset, *len], &faults.write_latency),
            _ => ("sync", [0, 0], &faults.sync_latency),
        };
        let mut delay = rng.range(latency.clone());
        if rng.ppm(faults.stall_ppm) {
            delay += rng.range(faults.stall.clone());
        }
        let (error_ppm, changes) = match &op {
            Op::Read { .. } => (faults.read_error_ppm, false),
            Op::Sync { .. } => (faults.sync_error_ppm, true),
            _ => (faults.write_error_ppm, true),
        };
        let mut effect = None;
        let left = left.filter(|_| !node.device);
        let mut taken = left.map_or_else(Vec::new, |_| pages_taken(&op, node));
        let mut outcome = check(&op, file, node);
        if outcome == Outcome::Good && left.is_some_and(|left| taken.len() as u64 * PAGE > left) {
            outcome = Outcome::Error(ENOSPC);
            // What was allocated before the space ended stays, as it does on ext4 and XFS.
            taken.truncate(if matches!(op, Op::Allocate { .. }) { (left.unwrap_or(0) / PAGE) as usize } else { 0 });
            node.allocated.extend(std::mem::take(&mut taken));
        }
        if outcome == Outcome::Good {
            if faults.life.is_some_and(|life| node.operations > life) || rng.ppm(error_ppm) {
                outcome = Outcome::Error(EIO);
            } else if matches!(op, Op::Write { .. }) {
                if rng.ppm(faults.no_space_ppm) {
                    outcome = Outcome::Error(ENOSPC);
                } else if rng.ppm(faults.lost_write_ppm) {
                    outcome = Outcome::Lost;
                }
            }
            match &op {
                Op::Write { offset, bufs, .. } => {
                    let mut offset = *offset;
                    let end = offset + bufs.len() as u64;
                    if rng.ppm(faults.misdirected_write_ppm) && node.content.size() > bufs.len() as u64 {
                        let sector = u64::from(node.sector);
                        let elsewhere = rng.below((node.content.size() - bufs.len() as u64) / sector + 1) * sector;
                        self.damage.extend([(file.inode, offset), (file.inode, elsewhere)]);
                        core.trace.event(core.now, What::Fault, "misdirected", [offset, elsewhere, end]);
                        offset = elsewhere;
                    }
                    effect = Some(Effect::Write(Piece::cut(offset, bufs)));
                }
                Op::Punch { offset, len, .. } => {
                    effect = Some(punch(node, *offset, *len, rng));
                }
                _ => {}
            }
        }
        if outcome == Outcome::Good {
            node.allocated.extend(taken);
        }
        let number = self.next;
        self.next += 1;
        core.log(What::Submit, label, [number, numbers[0], numbers[1]]);
        if outcome != Outcome::Good {
            let code = if let Outcome::Error(code) = outcome { code as u64 } else { 0 };
            core.log(What::Fault, "will fail or be lost", [number, code, 0]);
        }
        let sync_mark = node.content.sync_mark();
        self.in_flight.insert(number, InFlight { key, op, inode: file.inode, outcome, effect, sync_mark });
        let in_flight = self.in_flight.values().filter(|other| other.inode == file.inode).count();
        let node = &mut self.inodes[file.inode];
        node.most_in_flight = node.most_in_flight.max(in_flight);
        core.schedule(delay, Event::Disk(number));
        if changes {
            core.point();
        }
    }

    /// An operation ends.
    pub(crate) fn finish(&mut self, core: &mut Core, number: u64) {
        let Some(mut flight) = self.in_flight.remove(&number) else { return };
        let node = &mut self.inodes[flight.inode];
        let sector = u64::from(node.sector);
        let result = match (flight.outcome, &mut flight.op) {
            (Outcome::Error(code), _) => {
                if let Some(effect) = &flight.effect
                    && code == EIO
                {
                    node.content.land_torn(effect, sector, &mut core.rng);
                }
                os_error(code)
            }
            (Outcome::Lost, op) => {
                if let Op::Write { offset, .. } = op {
                    self.damage.push((flight.inode, *offset));
                }
                Ok(op_len(op))
            }
            (Outcome::Good, Op::Read { offset, buf, .. }) => {
                let len = (buf.spare() as u64).min(node.content.size().saturating_sub(*offset));
                let sectors = *offset / sector..(*offset + len).div_ceil(sector);
                if node.bad.iter().any(|bad| sectors.contains(bad)) {
                    os_error(EIO)
                } else {
                    let out = &mut buf.spare_mut()[..len as usize];
                    node.content.read(*offset, out);
                    let others = self.in_flight.values();
                    let landing = others.filter(|other| (other.inode, other.outcome) == (flight.inode, Outcome::Good));
                    for effect in landing.filter_map(|other| other.effect.as_ref()) {
                        effect.show_through(*offset, out, sector, &mut core.rng);
                    }
                    let faults = node.faults.as_ref().unwrap_or(&core.faults.disk);
                    if len > 0 && core.rng.ppm(faults.read_flip_ppm) {
                        let at = core.rng.below(len);
                        out[at as usize] ^= 1 << core.rng.below(8);
                        core.log(What::Fault, "bit flipped in a read", [number, *offset + at, 0]);
                        self.damage.push((flight.inode, *offset + at));
                    }
                    let filled = buf.len() + len as usize;
                    buf.set_len(filled);
                    Ok(len)
                }
            }
            (Outcome::Good, Op::Sync { .. }) => {
                node.content.sync(flight.sync_mark);
                Ok(0)
            }
            (Outcome::Good, op) => {
                let durable = matches!(op, Op::Write { durable: true, .. });
                if let Some(effect) = flight.effect.take() {
                    node.content.land(effect, durable);
                }
                match op {
                    Op::Punch { offset, len, .. } => node.free(*offset, *offset + *len),
                    Op::Write { offset, bufs, .. } => node.filled(*offset, bufs.len() as u64),
                    _ => {}
                }
                if let Op::Write { offset, bufs, .. } = op {
                    let (offset, len) = (*offset, bufs.len() as u64);
                    let sectors = offset.div_ceil(sector)..(offset + len) / sector;
                    node.bad.retain(|bad| !sectors.contains(bad));
                    let faults = node.faults.as_ref().unwrap_or(&core.faults.disk);
                    if len > 0 && core.rng.ppm(faults.write_flip_ppm) {
                        let at = offset + core.rng.below(len);
                        node.content.flip(at, core.rng.below(8) as u8);
                        core.log(What::Fault, "bit flipped in what was written", [number, at, 0]);
                        self.damage.push((flight.inode, at));
                    }
                }
                Ok(op_len(op))
            }
        };
        let what = if result.is_ok() { What::Complete } else { What::Failed };
        core.log(what, "disk", [number, *result.as_ref().unwrap_or(&0), 0]);
        let changes = !matches!(flight.op, Op::Read { .. });
        core.done.push(Completion { key: flight.key, result, op: flight.op, peer: None });
        if changes {
            core.point();
        }
    }

    /// The machine with this disk dies, or the process that has it open: its handles are of no use any more, and what is in
    /// flight fares as in a crash of the world.
    pub(crate) fn lose(&mut self, core: &mut Core, path: &Path, kill: bool) -> bool {
        let Some(&inode) = self.names.get(path) else { return false };
        let odds = CrashOdds::draw(core.faults.crash, &mut core.rng);
        let mut effects = Vec::new();
        for flight in self.in_flight.values_mut().filter(|flight| flight.inode == inode) {
            if let (Some(effect), Outcome::Good) = (flight.effect.take(), flight.outcome) {
                effects.push(effect);
            }
            flight.outcome = Outcome::Error(EIO);
        }
        let node = &mut self.inodes[inode];
        let sector = u64::from(node.sector);
        match kill {
            true => node.content.kill(effects, odds, sector, &mut core.rng),
            false => node.content.crash(effects, odds, sector, &mut core.rng),
        }
        node.locks.clear();
        self.open.retain(|_, file| file.inode != inode);
        core.log(if kill { What::Kill } else { What::Crash }, "one disk", [inode as u64, 0, 0]);
        core.point();
        true
    }

    /// The power fails (or, with `kill`, only the process dies): handles, locks and operations in flight are gone.
    pub(crate) fn crash(&mut self, core: &mut Core, kill: bool) {
        let odds = CrashOdds::draw(core.faults.crash, &mut core.rng);
        let mut effects: Vec<Vec<Effect>> = self.inodes.iter().map(|_| Vec::new()).collect();
        for (_, flight) in std::mem::take(&mut self.in_flight) {
            if let (Some(effect), Outcome::Good) = (flight.effect, flight.outcome) {
                effects[flight.inode].push(effect);
            }
        }
        for (node, effects) in self.inodes.iter_mut().zip(effects) {
            node.locks.clear();
            let sector = u64::from(node.sector);
            if kill {
                node.content.kill(effects, odds, sector, &mut core.rng);
            } else {
                node.content.crash(effects, odds, sector, &mut core.rng);
            }
            node.allocated.retain(|&page| !node.content.is_stored(page));
        }
        self.open.clear();
        if kill {
            return;
        }
        // A name that was made or removed without a sync of its directory may be there or not.
        let mut names = self.durable_names.clone();
        let all: Vec<PathBuf> = self.names.keys().chain(self.durable_names.keys()).cloned().collect();
        for path in all {
            let (now, durable) = (self.names.get(&path), self.durable_names.get(&path));
            if now != durable && core.rng.coin() {
                match now {
                    Some(&inode) => names.insert(path, inode),
                    None => names.remove(&path),
                };
            }
        }
        // What has no name any more takes no space either.
        for (inode, node) in self.inodes.iter_mut().enumerate() {
            if !names.values().any(|&named| named == inode) {
                node.allocated.clear();
            }
        }
        self.names.clone_from(&names);
        self.durable_names = names;
    }
}

/// Checks an operation for errors that do not depend on fault injection.
fn check(op: &Op, file: OpenFile, node: &Inode) -> Outcome {
    let sector = u64::from(node.sector);
    let odd = |offset: u64, len: u64| file.direct && !(offset.is_multiple_of(sector) && len.is_multiple_of(sector));
    match op {
        Op::Read { offset, buf, .. } if odd(*offset, buf.spare() as u64) => return Outcome::Error(EINVAL),
        Op::Write { offset, bufs, .. } => {
            let len = bufs.len() as u64;
            if !file.write {
                return Outcome::Error(EBADF);
            }
            if odd(*offset, len) || bufs.parts().iter().any(|part| file.direct && !part.is_aligned(sector as usize)) {
                return Outcome::Error(EINVAL);
            }
            if node.device && offset.checked_add(len).is_none_or(|end| end > node.content.size()) {
                return Outcome::Error(ENOSPC);
            }
        }
        Op::Punch { offset, len, .. } => {
            if !file.write {
                return Outcome::Error(EBADF);
            }
            if *len == 0 || offset.checked_add(*len).is_none() || (node.device && odd(*offset, *len)) {
                return Outcome::Error(EINVAL);
            }
        }
        Op::Allocate { .. } if !file.write => return Outcome::Error(EBADF),
        Op::Allocate { .. } if node.device => return Outcome::Error(EOPNOTSUPP),
        _ => {}
    }
    Outcome::Good
}

/// Returns the pages of its file system that an operation on a file takes.
fn pages_taken(op: &Op, node: &Inode) -> Vec<u64> {
    match op {
        Op::Write { offset, bufs, .. } => node.missing(*offset, bufs.len() as u64),
        Op::Allocate { offset, len, .. } => node.missing(*offset, *len),
        _ => Vec::new(),
    }
}

/// A hole in a file reads as zeroes; what a device gives back after a discard is its own affair.
fn punch(node: &Inode, offset: u64, len: u64, rng: &mut crate::Rng) -> Effect {
    let whole = offset..offset + len;
    if !node.device {
        return Effect::zero(whole);
    }
    match rng.below(3) {
        0 => Effect::zero(whole),
        1 => Effect::Write(Vec::new()),
        _ => {
            let pages = node.content.stored_pages();
            let inside = pages.iter().map(|page| page * PAGE).filter(|&at| at >= whole.start && at + PAGE <= whole.end);
            let junk: crate::pages::Bytes = vec![rng.bits() as u8; PAGE as usize].into();
            Effect::Write(inside.map(|offset| Piece { offset, data: junk.clone() }).collect())
        }
    }
}

fn op_len(op: &Op) -> u64 {
    if let Op::Write { bufs, .. } = op { bufs.len() as u64 } else { 0 }
}
