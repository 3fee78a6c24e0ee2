//! Device under test, together with its driver: it dies, resumes and stops, and finds each chain as it must.

use crate::memory::{AddressSpace, GuestArea};
use crate::rings::store::{die_after, is_dead};
use crate::rings::{Chain, ChainHead, Virtq};

use super::model::{ChainForm, ModelBuffer, ModelDriver, ModelOptions};

/// Device under test, and what it must do.
pub struct ModelDevice {
    pub driver: ModelDriver,
    pub virtq: Option<Virtq>,
    orphans: Vec<ChainHead>,
    /// Chains that are being executed, and their serials.
    pub executing: Vec<(u64, Chain)>,
    /// Serial of the next chain that the device finds.
    next: u64,
    /// Entries or descriptors for which the device was last asked for an interrupt.
    asked: u64,
    /// Set if any chain may have been returned without an interrupt.
    first: bool,
    /// Times that the device has died.
    pub deaths: u32,
    /// Stores after which the recovery from the next death dies, too; 0 for none.
    pub recovery_steps: u64,
}

impl ModelDevice {
    pub fn new(options: ModelOptions) -> Self {
        Self::of_driver(ModelDriver::new(options))
    }

    pub fn with_region(options: ModelOptions, region: Option<GuestArea>) -> Self {
        let mut driver = ModelDriver::new(options);
        driver.region = region;
        Self::of_driver(driver)
    }

    fn of_driver(driver: ModelDriver) -> Self {
        die_after(u64::MAX);
        let virtq = Some(driver.start());
        let asked = driver.returned();
        Self {
            driver,
            virtq,
            orphans: Vec::new(),
            executing: Vec::new(),
            next: 0,
            asked,
            first: true,
            deaths: 0,
            recovery_steps: 0,
        }
    }

    fn virtq(&mut self) -> &mut Virtq {
        self.virtq.as_mut().expect("a queue")
    }

    /// Finds the next chain, which must be the oldest one that was not found.
    pub fn fetch(&mut self) {
        let memory = self.driver.guest.memory.clone();
        let space = AddressSpace::plain(&memory);
        let chain = self.virtq().next(&space).expect("a driver that keeps the rules");
        if is_dead() {
            return self.crash();
        }
        let Some(chain) = chain else {
            let left = self.driver.outstanding().into_iter().find(|serial| *serial >= self.next);
            assert_eq!(left, None, "a chain that is available is found");
            return;
        };
        let serial = self.driver.serial_of(&chain);
        assert_eq!(serial, self.next);
        self.next += 1;
        self.executing.push((serial, chain));
    }

    pub fn resume(&mut self, which: usize) {
        if self.orphans.is_empty() {
            return self.fetch();
        }
        let head = self.orphans.remove(which % self.orphans.len());
        let memory = self.driver.guest.memory.clone();
        let space = AddressSpace::plain(&memory);
        let chain = self.virtq().resume(head, &space).expect("a chain to resume");
        assert!(self.virtq().resume(head, &space).is_err(), "a chain is resumed once");
        self.executing.push((self.driver.serial_of(&chain), chain));
    }

    /// Returns the number of bytes that the device writes to a chain.
    fn written(serial: u64) -> u32 {
        (serial % 3) as u32 * 1000 + serial as u32
    }

    pub fn complete(&mut self, which: usize) {
        if self.executing.is_empty() {
            return;
        }
        let (serial, chain) = self.executing.remove(which % self.executing.len());
        let Chain { token, readable, writable } = chain;
        self.virtq().complete(token, Self::written(serial), None);
        self.virtq().recycle(readable);
        self.virtq().recycle(writable);
        if is_dead() {
            self.crash();
        }
    }

    pub fn interrupt(&mut self) {
        let lost = self.first && self.virtq().interrupt_lost;
        let (old, new) = (self.asked, self.driver.returned());
        self.asked = new;
        let due = if self.first && (lost || new > old) {
            self.first = false;
            Some(self.driver.interrupts)
        } else {
            self.driver.interrupt_due(old, new)
        };
        let wants = self.virtq().needs_interrupt();
        if let Some(due) = due {
            assert_eq!(wants, due, "event {} in {old}..{new}", self.driver.event);
        }
    }

    pub fn submit(&mut self, buffers: &[ModelBuffer], form: ChainForm) {
        self.driver.submit(buffers, form);
        if let Some(virtq) = &self.virtq
            && self.driver.outstanding().last().is_some_and(|serial| *serial >= self.next)
        {
            assert!(virtq.has_available());
        }
    }

    /// Enables kicks, as a device does that has nothing to do: the next chain is kicked for.
    pub fn sleep(&mut self, buffers: &[ModelBuffer], form: ChainForm) {
        let found = self.virtq().enable_kicks(None);
        if is_dead() {
            return self.crash();
        }
        let available = self.driver.outstanding().last().is_some_and(|serial| *serial >= self.next);
        assert_eq!(found, available);
        let old = self.driver.submitted();
        if !found && self.driver.submit(buffers, form).is_some() {
            assert!(self.driver.kicks(old), "kick after {old}");
        }
        self.virtq().disable_kicks(None);
        if is_dead() {
            return self.crash();
        }
        if !self.driver.options.event_index || self.driver.options.packed {
            assert!(!self.driver.kicks(old));
        }
    }

    pub fn reap(&mut self) {
        while let Some((serial, written)) = self.driver.reap() {
            assert_eq!(written, Self::written(serial));
        }
    }

    /// Ends the device in an orderly way once nothing is in flight, and starts its successor.
    pub fn stop(&mut self) {
        while !self.orphans.is_empty() {
            self.resume(0);
        }
        while let Some(virtq) = &self.virtq
            && virtq.in_flight() > 0
            && !self.executing.is_empty()
        {
            self.complete(0);
        }
        let number = self.driver.returned();
        let Some(virtq) = self.virtq.take() else { return };
        assert_eq!(virtq.in_flight() as usize, self.executing.len() + self.orphans.len());
        if virtq.in_flight() > 0 {
            // Died on the way.
            self.virtq = Some(virtq);
            return;
        }
        assert_eq!(virtq.base(), self.driver.base(number));
        // The front-end gets the base, or it is as if the device died before it stopped.
        die_after(u64::MAX);
        let base = virtq.stop();
        self.start(base, 0);
        assert!(self.orphans.is_empty());
        assert!(!self.virtq().interrupt_lost);
    }

    /// Starts a device after one that was killed.
    pub fn crash(&mut self) {
        die_after(u64::MAX);
        self.deaths += 1;
        let base = self.driver.crash_base();
        let steps = std::mem::take(&mut self.recovery_steps);
        self.start(base, steps);
    }

    fn start(&mut self, base: u32, steps: u64) {
        self.executing.clear();
        if steps > 0 {
            // The successor dies while it recovers.
            die_after(steps);
            Virtq::start(self.driver.setup(), base).expect("a queue");
            die_after(u64::MAX);
        }
        let (virtq, orphans) = Virtq::start(self.driver.setup(), base).expect("a queue");
        self.first = true;
        self.asked = self.driver.returned();
        self.reap();
        // Those in flight are the oldest ones that the driver lacks, oldest first, and the device goes on behind them.
        let outstanding = self.driver.outstanding();
        let found: Vec<u16> = orphans.iter().map(|head| head.id).collect();
        let serials: Vec<u64> = found.iter().map(|id| self.driver.serial_by_id(*id)).collect();
        assert_eq!(serials, outstanding[..serials.len()]);
        assert_eq!(virtq.in_flight() as usize, orphans.len());
        self.next = outstanding.get(serials.len()).copied().unwrap_or(self.driver.next_serial());
        self.virtq = Some(virtq);
        self.orphans = orphans;
    }

    /// Kills the device after the next `steps` stores.
    pub fn kill(&mut self, steps: u64) {
        die_after(steps);
        if steps == 0 {
            self.crash();
        }
    }

    /// Kills the device, and its successor after some stores of its recovery.
    pub fn kill_twice(&mut self, steps: u64) {
        self.recovery_steps = steps;
        self.crash();
    }

    /// Completes all that was submitted; the driver gets each chain back.
    pub fn finish(&mut self) {
        die_after(u64::MAX);
        for _ in 0..4 * usize::from(self.driver.options.size) {
            self.resume(0);
            self.complete(0);
            self.reap();
            if self.driver.outstanding().is_empty() {
                break;
            }
        }
        assert_eq!(self.driver.outstanding(), []);
        assert_eq!(self.virtq().in_flight(), 0);
    }
}
