//! Front-ends that break the rules, and what a device may do about it.
//!
//! A device may refuse a message, report an error of a queue, fail a request, or end the connection.  In each case its
//! process goes on, other devices of the process go on meanwhile, and the next front-end finds the device as it was.

mod layouts;
mod messages;
mod misuse;
mod regions;
mod requests;
mod rings;
mod scsi;

use std::os::fd::AsFd;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::block::{OK, SECTOR, UNWRITTEN};
use crate::device::DeviceUnderTest;
use crate::error::{FrontEndError, Result};
use crate::front_end::{FrontEnd, FrontEndOptions, FrontEndStage, VirtioDeviceType};
use crate::memory::{GuestMemory, MemoryLayout};
use crate::message::protocol;
use crate::queue::QueueEvent;

/// Time in which a device must react.
pub const REACTION: Duration = Duration::from_secs(2);
/// Cases in a row after which a device that does not serve is given up.
const UNSERVED_MAX: u32 = 2;
/// First sector that cases may write.
pub const SCRATCH_SECTOR: u64 = 1024;
/// Sectors whose contents no case may change.
const CANARY: std::ops::Range<u64> = 0..64;
/// First sector that is written and read after each case.
const PROBE_SECTOR: u64 = 128;

/// Reaction of a device to a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeviceReaction {
    /// The device has closed the connection.
    Ended,
    /// The device has replied with an error.
    Refused(u64),
    /// The device has signalled the error descriptor of a queue, or set DEVICE_NEEDS_RESET.
    QueueError,
    /// The device has completed a request with this status; [`UNWRITTEN`] if it wrote none.
    Failed(u8),
    /// The device did not react in time.
    Ignored,
    /// The device did what was asked.
    Accepted,
}

/// Reactions that a case allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tolerance {
    /// The device must refuse, report an error, or end the connection.
    Refusal,
    /// Refusal, or failure of the request.
    Failure,
    /// The case is unusual and valid: the device must do what is asked.
    Success,
    /// The specification leaves it to the device.
    Any,
}

impl Tolerance {
    /// Returns whether a reaction is allowed.
    pub fn allows(self, reaction: DeviceReaction) -> bool {
        use DeviceReaction::{Accepted, Ended, Failed, Ignored, QueueError, Refused};
        match (self, reaction) {
            (Self::Any, _) => true,
            (Self::Refusal | Self::Failure, Ended | Refused(_) | QueueError) => true,
            (Self::Failure, Failed(_)) => true,
            (Self::Success, Accepted) => true,
            (_, Accepted | Ignored | Failed(_) | Ended | Refused(_) | QueueError) => false,
        }
    }
}

type Attack = Box<dyn Fn(&mut FrontEnd) -> Result<DeviceReaction> + Send + Sync>;

/// Case of misbehaviour.
pub struct HostileCase {
    /// Name, unique among all cases.
    pub name: String,
    /// Stage at which the misbehaviour begins.
    pub stage: FrontEndStage,
    /// Options of the front-end.
    pub options: FrontEndOptions,
    /// Features without which the case is not possible.
    pub needs: u64,
    /// Protocol features without which the case is not possible.
    pub needs_protocol: u64,
    /// Reactions that are allowed.
    pub tolerance: Tolerance,
    attack: Attack,
}

impl HostileCase {
    fn new(
        name: impl Into<String>,
        stage: FrontEndStage,
        tolerance: Tolerance,
        attack: impl Fn(&mut FrontEnd) -> Result<DeviceReaction> + Send + Sync + 'static,
    ) -> Self {
        let attack = Box::new(attack);
        Self { name: name.into(), stage, options: options(), needs: 0, needs_protocol: 0, tolerance, attack }
    }

    fn with(mut self, features: u64) -> Self {
        self.options = self.options.with(features);
        self.needs |= features;
        self
    }

    fn with_protocol(mut self, features: u64) -> Self {
        self.needs_protocol |= features;
        self
    }

    fn with_memory(mut self, memory: MemoryLayout) -> Self {
        self.options.memory = memory;
        self
    }

    /// Runs the case on a front-end at its stage.
    ///
    /// # Errors
    /// When the case itself cannot go on; what the device does is a reaction.
    pub fn run(&self, front_end: &mut FrontEnd) -> Result<DeviceReaction> {
        reaction((self.attack)(front_end))
    }
}

/// Returns the options of cases: small memory and a small queue, so that their ends are near.
fn options() -> FrontEndOptions {
    FrontEndOptions {
        memory: MemoryLayout::split(2, 4 << 20, true),
        queue_size: 16,
        patience: REACTION,
        ..FrontEndOptions::default()
    }
}

/// Returns what an error says about the device.
fn reaction(result: Result<DeviceReaction>) -> Result<DeviceReaction> {
    match result {
        Err(FrontEndError::Ended) => Ok(DeviceReaction::Ended),
        Err(FrontEndError::Refused { value, .. }) => Ok(DeviceReaction::Refused(value)),
        Err(FrontEndError::QueueError(_)) => Ok(DeviceReaction::QueueError),
        Err(FrontEndError::TimedOut { .. }) => Ok(DeviceReaction::Ignored),
        other => other,
    }
}

/// Returns all cases.
pub fn cases() -> Vec<HostileCase> {
    let mut all = messages::cases();
    all.extend(misuse::cases());
    all.extend(regions::cases());
    all.extend(layouts::cases());
    for is_packed in [false, true] {
        all.extend(rings::cases(is_packed));
        all.extend(requests::cases(is_packed));
    }
    all
}

/// Returns all cases for a virtio-scsi device, which has two request queues and a unit 0 with blocks of 512 bytes.
pub fn scsi_cases() -> Vec<HostileCase> {
    [false, true].into_iter().flat_map(scsi::cases).collect()
}

/// Verdict on one case.
#[derive(Debug)]
pub struct HostileVerdict {
    /// Name of the case.
    pub name: String,
    /// Reaction; `None` if the device does not offer what the case needs.
    pub reaction: Option<DeviceReaction>,
    /// Fault of the device, if there is one.
    pub fault: Option<String>,
}

/// Verdicts on cases.
#[derive(Debug, Default)]
pub struct HostileReport {
    /// Verdicts, in the order of the cases.
    pub verdicts: Vec<HostileVerdict>,
}

impl HostileReport {
    /// Returns the verdicts with a fault.
    pub fn faults(&self) -> Vec<&HostileVerdict> {
        self.verdicts.iter().filter(|verdict| verdict.fault.is_some()).collect()
    }

    /// Returns the names of cases that the device does not offer what they need.
    pub fn not_offered(&self) -> Vec<&str> {
        let is_left_out = |verdict: &&HostileVerdict| verdict.reaction.is_none() && verdict.fault.is_none();
        self.verdicts.iter().filter(is_left_out).map(|verdict| verdict.name.as_str()).collect()
    }

    /// Passes if there are no faults.
    ///
    /// # Panics
    /// With a list of the faults.
    pub fn assert(&self) {
        let faults: Vec<String> = self
            .faults()
            .iter()
            .map(|verdict| format!("{}: {}", verdict.name, verdict.fault.as_deref().unwrap_or_default()))
            .collect();
        assert!(faults.is_empty(), "{} of {} cases:\n{}", faults.len(), self.verdicts.len(), faults.join("\n"));
    }
}

/// Runs all cases against a device.
pub fn run_all(device: &dyn DeviceUnderTest) -> HostileReport {
    run_cases(device, &cases())
}

/// Runs all cases against a virtio-scsi device.
pub fn run_all_scsi(device: &dyn DeviceUnderTest) -> HostileReport {
    run_cases(device, &scsi_cases())
}

/// Runs cases, all for one type of device, against a device, until its process ends or no longer serves.
pub fn run_cases(device: &dyn DeviceUnderTest, cases: &[HostileCase]) -> HostileReport {
    let mut report = HostileReport::default();
    let mut fault = |name: &str, fault: String| {
        report.verdicts.push(HostileVerdict { name: name.into(), reaction: None, fault: Some(fault) });
    };
    let kind = cases.first().map_or(VirtioDeviceType::Block, |case| case.options.device);
    let sockets: Vec<_> = std::iter::once(device.socket()).chain(device.other_socket()).collect();
    for socket in &sockets {
        if let Err(error) = write_canary(kind, socket, device.patience()) {
            fault("well-behaved front-end", format!("{}: {error}", socket.display()));
            return report;
        }
    }
    let before = device.holdings();
    let mut unserved = 0;
    for (number, case) in cases.iter().enumerate() {
        let (reaction, mut fault) = match run_case(device, case) {
            Ok(reaction) => (reaction, None),
            Err(error) => (None, Some(format!("the case cannot go on: {error}"))),
        };
        if let Some(reaction) = reaction.filter(|reaction| !case.tolerance.allows(*reaction)) {
            fault = Some(format!("{reaction:?} where {:?} was expected", case.tolerance));
        }
        let (mut is_alive, mut is_served) = (device.is_alive(), true);
        for socket in sockets.iter().filter(|_| is_alive) {
            if let Err(error) = check_device(kind, socket, number as u64, device.patience()) {
                fault = Some(format!("afterwards, {} does not serve: {error}", socket.display()));
                is_served = false;
            }
        }
        unserved = if is_served { 0 } else { unserved + 1 };
        is_alive &= device.is_alive();
        if !is_alive {
            fault = Some("the process has ended".into());
        }
        report.verdicts.push(HostileVerdict { name: case.name.clone(), reaction, fault });
        if !is_alive || unserved == UNSERVED_MAX {
            return report;
        }
    }
    if let Some(fault) = before.and_then(|before| leaks(device, before)) {
        report.verdicts.push(HostileVerdict { name: "resources".into(), reaction: None, fault: Some(fault) });
    }
    report
}

fn run_case(device: &dyn DeviceUnderTest, case: &HostileCase) -> Result<Option<DeviceReaction>> {
    let (socket, patience) = (device.socket(), device.patience());
    if case.needs != 0 || case.needs_protocol != 0 {
        let asked = attach(&socket, &case.options, FrontEndStage::Negotiated, patience)?;
        let is_offered = |has: u64, needs: u64| has & needs == needs;
        if !is_offered(asked.features, case.needs) || !is_offered(asked.protocol_features, case.needs_protocol) {
            return Ok(None);
        }
    }
    let mut front_end = attach(&socket, &case.options, case.stage, patience)?;
    front_end.neighbour = device.other_socket();
    case.run(&mut front_end).map(Some)
}

/// Connects; the device may still have to notice that the last front-end is gone.
fn attach(socket: &Path, options: &FrontEndOptions, stage: FrontEndStage, patience: Duration) -> Result<FrontEnd> {
    let deadline = Instant::now() + patience;
    loop {
        match FrontEnd::attach(socket, options, stage) {
            Err(_) if Instant::now() < deadline => std::thread::yield_now(),
            other => return other,
        }
    }
}

/// Writes what no case may change.
fn write_canary(kind: VirtioDeviceType, socket: &Path, patience: Duration) -> Result<()> {
    if kind == VirtioDeviceType::Scsi {
        return scsi::write_canary(socket, patience);
    }
    let mut front_end = attach(socket, &options(), FrontEndStage::Running, patience)?;
    front_end.write_sectors(CANARY.start, &pattern(CANARY.start, CANARY.end - CANARY.start, 0))?;
    front_end.flush()
}

/// Checks a device of either type with a well-behaved front-end.
fn check_device(kind: VirtioDeviceType, socket: &Path, number: u64, patience: Duration) -> Result<()> {
    match kind {
        VirtioDeviceType::Block => check(socket, number, patience),
        VirtioDeviceType::Scsi => scsi::check(socket, number, patience),
    }
}

/// Checks with a well-behaved front-end that a virtio-blk device still has its data, and that it reads and writes.
///
/// # Errors
/// When it does not.
pub fn check(socket: &Path, number: u64, patience: Duration) -> Result<()> {
    let options = FrontEndOptions { patience, ..options() };
    let mut front_end = attach(socket, &options, FrontEndStage::Running, patience)?;
    let count = CANARY.end - CANARY.start;
    let found = front_end.read_sectors(CANARY.start, (count * SECTOR) as u32)?;
    same("the first part of the device", found == pattern(CANARY.start, count, 0))?;
    let written = pattern(PROBE_SECTOR, 8, number + 1);
    front_end.write_sectors(PROBE_SECTOR, &written)?;
    same("what was written", front_end.read_sectors(PROBE_SECTOR, 4096)? == written)
}

fn same(what: &str, is_same: bool) -> Result<()> {
    if is_same { Ok(()) } else { Err(FrontEndError::Violation(format!("{what} has other data"))) }
}

/// Returns the data of sectors, different for each sector and version.
pub fn pattern(sector: u64, count: u64, version: u64) -> Vec<u8> {
    let words = SECTOR / 8;
    let word = |at: u64| (sector * words + at).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(17) ^ version;
    (0..count * words).flat_map(|at| word(at).to_le_bytes()).collect()
}

/// Returns a text about descriptors that the process holds on to.
fn leaks(device: &dyn DeviceUnderTest, before: (u64, usize)) -> Option<String> {
    let deadline = Instant::now() + device.patience();
    loop {
        let (memory, files) = device.holdings()?;
        if files <= before.1 && memory <= before.0 + (64 << 20) {
            return None;
        }
        if Instant::now() >= deadline {
            let mib = |bytes: u64| bytes >> 20;
            return Some(format!(
                "{files} descriptors and {} MiB, {} and {} MiB before",
                mib(memory),
                before.1,
                mib(before.0)
            ));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

impl FrontEnd {
    /// Checks that the other device of the process serves meanwhile.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_neighbour(&self) -> Result<()> {
        match &self.neighbour {
            Some(neighbour) => check_device(self.options.device, neighbour, 0, 5 * REACTION).map_err(|error| {
                FrontEndError::Violation(format!("meanwhile, {} does not serve: {error}", neighbour.display()))
            }),
            None => Ok(()),
        }
    }

    /// Waits for the end of the connection.
    fn ends(&self) -> Result<DeviceReaction> {
        self.socket.await_end(self.options.patience)?;
        Ok(DeviceReaction::Ended)
    }

    /// Waits for what the device does about a chain on queue 0 whose status byte is at a guest address.
    fn observe(&mut self, status: u64) -> Result<DeviceReaction> {
        self.observe_queue(0, |memory| {
            let mut byte = [UNWRITTEN];
            memory.read(status, &mut byte)?;
            Ok(if byte[0] == OK { DeviceReaction::Accepted } else { DeviceReaction::Failed(byte[0]) })
        })
    }

    /// Waits for what the device does about a chain on a queue; `judge` tells what a used one means.
    fn observe_queue(
        &mut self,
        queue: usize,
        judge: impl Fn(&GuestMemory) -> Result<DeviceReaction>,
    ) -> Result<DeviceReaction> {
        let deadline = Instant::now() + self.options.patience;
        loop {
            if self.queues[queue].ring.is_used()? {
                return judge(&self.memory);
            }
            match self.queues[queue].wait(Some(self.socket.stream().as_fd()), deadline)? {
                QueueEvent::Notified => {}
                QueueEvent::Error => return Ok(DeviceReaction::QueueError),
                QueueEvent::Socket => return Ok(DeviceReaction::Ended),
                QueueEvent::TimedOut if self.needs_reset() => return Ok(DeviceReaction::QueueError),
                QueueEvent::TimedOut => return Ok(DeviceReaction::Ignored),
            }
        }
    }

    fn needs_reset(&self) -> bool {
        self.has_protocol(protocol::STATUS) && self.get_status().is_ok_and(|status| status & 0x40 != 0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn cases_have_names_of_their_own() {
        for (all, least) in [(cases(), 150), (scsi_cases(), 300)] {
            let mut names = BTreeSet::new();
            assert!(all.iter().all(|case| names.insert(&case.name) || panic!("{} twice", case.name)));
            assert!(all.len() >= least, "{}", all.len());
            assert!(all.iter().all(|case| case.options.device == all[0].options.device), "{}", all[0].name);
        }
    }

    #[test]
    fn silence_is_no_refusal() {
        assert!(!Tolerance::Refusal.allows(DeviceReaction::Ignored));
        assert!(
            !Tolerance::Refusal.allows(DeviceReaction::Failed(1)) && Tolerance::Failure.allows(DeviceReaction::Ended)
        );
        assert!(!Tolerance::Success.allows(DeviceReaction::Ended) && Tolerance::Any.allows(DeviceReaction::Ignored));
    }

    #[test]
    fn versions_of_a_pattern_differ() {
        assert_eq!(pattern(7, 2, 1)[512..], pattern(8, 1, 1)[..]);
        assert_ne!(pattern(7, 1, 1), pattern(7, 1, 2));
    }
}
