//! Front-end that outlives its device: it connects again and resumes with the same queues and the same region of requests
//! in flight, as QEMU does with `reconnect`.

use std::path::Path;

use crate::block::BlockCompletion;
use crate::error::{FrontEndError, Result};
use crate::front_end::{FrontEnd, FrontEndOptions, FrontEndStage};
use crate::message::{feature, protocol};
use crate::socket::FrontEndSocket;

/// Front-end whose requests survive the device.
#[derive(Debug)]
pub struct ResumableFrontEnd {
    /// Front-end; its requests in flight are kept when it resumes.
    pub front_end: FrontEnd,
    /// Requests that a former device has completed, found when the front-end resumed: queue and completion.
    pub completed: Vec<(usize, BlockCompletion)>,
}

impl ResumableFrontEnd {
    /// Connects and starts, with a region of requests in flight.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn connect(path: &Path, options: &FrontEndOptions) -> Result<Self> {
        let options = FrontEndOptions { inflight: true, ..options.clone() };
        let front_end = FrontEnd::attach(path, &options, FrontEndStage::Running)?;
        Ok(Self { front_end, completed: Vec::new() })
    }

    /// Takes what the former device has completed, connects again, and continues all queues.
    ///
    /// # Errors
    /// As of [`FrontEnd::resume`].
    pub fn resume(&mut self, path: &Path) -> Result<()> {
        for (number, queue) in self.front_end.queues.iter_mut().enumerate() {
            while let Some(completion) = queue.completion()? {
                self.completed.push((number, completion));
            }
        }
        self.front_end.resume(path)
    }

    /// Returns whether the queues are packed.
    pub fn is_packed(&self) -> bool {
        self.front_end.features & feature::RING_PACKED != 0
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> usize {
        self.front_end.queues.iter().map(|queue| queue.pending.len()).sum()
    }
}

impl FrontEnd {
    /// Connects again, negotiates the same features, and continues all queues where the device has left them.  Requests
    /// in flight are for the device to find, in the region.
    ///
    /// The device goes on from the position up to which it has used chains: the caller takes those first.
    ///
    /// # Errors
    /// When the device refuses something, or no longer offers a feature.
    pub fn resume(&mut self, path: &Path) -> Result<()> {
        self.socket = FrontEndSocket::connect(path)?;
        self.channel = None;
        let (features, protocol_features) = (self.features, self.protocol_features);
        self.protocol_features = 0;
        self.options.features = features;
        self.options.protocol_features = protocol_features;
        self.negotiate()?;
        if (self.features, self.protocol_features) != (features, protocol_features) {
            return Err(FrontEndError::Violation(format!("features {:#x} were {features:#x}", self.features)));
        }
        if self.has_protocol(protocol::INFLIGHT_SHMFD) {
            self.set_inflight()?;
        }
        self.share_memory()?;
        for queue in 0..self.queues.len() {
            let base = self.queues[queue].ring.resume_base();
            self.start_queue(queue, base)?;
        }
        if self.has_protocol(protocol::STATUS) {
            self.set_status(15)?;
        }
        Ok(())
    }
}
