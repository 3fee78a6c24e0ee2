//! Queue of a front-end: a ring, its eventfds, and the requests on it.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;

use crate::buffers::PendingBuffers;
use crate::error::{FrontEndError, Result};
use crate::memory::GuestMemory;
use crate::rings::{DriverRing, DriverRingOptions, UsedChain};
use crate::socket::first_readable;

/// Event that ended the wait for a used chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QueueEvent {
    /// The device has notified the driver.
    Notified,
    /// The device has signalled the error descriptor.
    Error,
    /// The socket has something to read, or has ended.
    Socket,
    /// Timeout without an event.
    TimedOut,
}

/// Queue of a running device.
#[derive(Debug)]
pub struct FrontEndQueue {
    /// Index of the queue.
    pub index: u16,
    /// Driver side of the virtqueue.
    pub ring: DriverRing,
    /// Guest memory.
    pub memory: GuestMemory,
    kick: OwnedFd,
    call: Option<OwnedFd>,
    error: OwnedFd,
    pub(crate) pending: BTreeMap<u16, PendingBuffers>,
}

impl FrontEndQueue {
    /// Creates a queue; with `is_polled` it has no descriptor for the device's notifications.
    ///
    /// # Errors
    /// When guest memory has no space.
    pub fn create(
        memory: &GuestMemory,
        index: u16,
        size: u16,
        is_packed: bool,
        options: DriverRingOptions,
        is_polled: bool,
    ) -> Result<Self> {
        let mut ring = DriverRing::create(memory, size, is_packed, options)?;
        if is_polled {
            // Some devices end the connection when they have nothing to notify with.
            ring.set_notifications(false)?;
        }
        let call = (!is_polled).then(event).transpose()?;
        let (memory, pending) = (memory.clone(), BTreeMap::new());
        Ok(Self { index, ring, memory, kick: event()?, call, error: event()?, pending })
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.pending.len()
    }

    /// Returns the descriptor that notifies the device.
    pub fn kick(&self) -> BorrowedFd<'_> {
        self.kick.as_fd()
    }

    /// Returns the descriptor with which the device notifies the driver.
    pub fn call(&self) -> Option<BorrowedFd<'_>> {
        self.call.as_ref().map(AsFd::as_fd)
    }

    /// Returns the descriptor with which the device reports an error.
    pub fn error(&self) -> BorrowedFd<'_> {
        self.error.as_fd()
    }

    /// Notifies the device.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn notify(&self) -> Result<()> {
        match rustix::io::write(&self.kick, &1_u64.to_ne_bytes()) {
            // The counter is full, so the device has been notified.
            Ok(_) | Err(Errno::AGAIN) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Makes added chains available, and notifies the device if it wants that.
    ///
    /// # Errors
    /// As of [`DriverRing::publish`].
    pub fn publish(&mut self) -> Result<()> {
        if self.ring.publish()? { self.notify() } else { Ok(()) }
    }

    /// Returns whether the device has reported an error.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn has_error(&self) -> Result<bool> {
        drain(self.error.as_fd())
    }

    /// Clears the device's notifications; returns whether there were any.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn take_notifications(&self) -> Result<bool> {
        self.call.as_ref().map_or(Ok(false), |call| drain(call.as_fd()))
    }

    /// Waits for a notification, an error, or the socket; without a notification descriptor only a moment.
    ///
    /// # Errors
    /// Of the operating system.
    pub fn wait(&self, socket: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<QueueEvent> {
        let mut watched = vec![self.error.as_fd()];
        watched.extend(socket);
        let Some(call) = &self.call else {
            std::thread::yield_now();
            let is_over = Instant::now() >= deadline;
            return Ok(match first_readable(&watched, Instant::now())? {
                Some(0) => QueueEvent::Error,
                Some(_) => QueueEvent::Socket,
                None if is_over => QueueEvent::TimedOut,
                None => QueueEvent::Notified,
            });
        };
        watched.insert(0, call.as_fd());
        Ok(match first_readable(&watched, deadline)? {
            Some(0) => {
                drain(call.as_fd())?;
                QueueEvent::Notified
            }
            Some(1) => QueueEvent::Error,
            Some(_) => QueueEvent::Socket,
            None => QueueEvent::TimedOut,
        })
    }

    /// Waits for the next used chain.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] when the socket has ended, [`FrontEndError::QueueError`] when the device reports an error,
    /// [`FrontEndError::TimedOut`] at the deadline.
    pub fn await_used(&mut self, socket: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<UsedChain> {
        let begun = Instant::now();
        loop {
            if let Some(used) = self.ring.take_used()? {
                return Ok(used);
            }
            self.ring.set_notifications(self.call.is_some())?;
            if let Some(used) = self.ring.take_used()? {
                return Ok(used);
            }
            match self.wait(socket, deadline)? {
                QueueEvent::Notified => {}
                QueueEvent::Error => return Err(FrontEndError::QueueError(self.index)),
                QueueEvent::TimedOut => return Err(FrontEndError::timed_out("used chain", begun.elapsed())),
                QueueEvent::Socket => {
                    // What was used before the connection ended counts.
                    return self.ring.take_used()?.ok_or(FrontEndError::Ended);
                }
            }
        }
    }
}

fn event() -> Result<OwnedFd> {
    Ok(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)
}

fn drain(event: BorrowedFd<'_>) -> Result<bool> {
    match rustix::io::read(event, &mut [0; 8]) {
        Ok(_) => Ok(true),
        Err(Errno::AGAIN) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}
