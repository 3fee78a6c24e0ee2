//! Host of a virtio-scsi device: its queues, and what is in flight on them.

use std::path::Path;
use std::time::{Duration, Instant};

use super::control::EVENT_SIZE;
use super::{
    CDB_SIZE_OFFSET, CONTROL_QUEUE, EVENT_QUEUE, FIRST_REQUEST_QUEUE, SENSE_SIZE_OFFSET, ScsiFieldSizes,
    ScsiHostCommand, ScsiHostCompletion, ScsiHostConfig, ScsiHostControl, ScsiHostControlReply, ScsiHostEvent,
    VirtioScsiLun,
};
use crate::buffers::{UsedBuffers, VirtqBuffers};
use crate::error::{FrontEndError, Result};
use crate::front_end::{FrontEnd, FrontEndOptions, FrontEndStage};

/// Number of event buffers that a host posts.
const EVENT_BUFFERS: u16 = 8;

/// Command in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SubmittedScsiCommand {
    /// Number of the chain.
    pub id: u16,
    /// Identifier of the command.
    pub tag: u64,
}

/// Driver of a virtio-scsi device on a front-end whose queues run.
#[derive(Debug)]
pub struct ScsiHost {
    /// Front-end; its queues are the control queue, the event queue, and the request queues.
    pub front_end: FrontEnd,
    /// Device configuration at the time of negotiation.
    pub config: ScsiHostConfig,
    /// Sizes of variable fields, in force for commands to come; those in flight must have the same.
    pub sizes: ScsiFieldSizes,
    /// Commands that a former device has completed, found when the host resumed: request queue and completion.
    pub completed: Vec<(usize, ScsiHostCompletion)>,
    /// Replies of a former device, found when the host resumed.
    pub replied: Vec<ScsiHostControlReply>,
    events: Vec<ScsiHostEvent>,
    event_length: u32,
    next_tag: u64,
}

impl ScsiHost {
    /// Connects to a listening device, starts its queues, and posts event buffers.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn connect(path: &Path, options: &FrontEndOptions) -> Result<Self> {
        let mut host = Self::over(FrontEnd::attach(path, options, FrontEndStage::Running)?)?;
        host.post_events(EVENT_BUFFERS, EVENT_SIZE)?;
        Ok(host)
    }

    /// Uses a front-end whose queues run; posts no event buffers.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when it has no request queue.
    pub fn over(front_end: FrontEnd) -> Result<Self> {
        if front_end.queues.len() <= FIRST_REQUEST_QUEUE {
            return Err(FrontEndError::Violation(format!("only {} queues", front_end.queues.len())));
        }
        let config = ScsiHostConfig::decode(&front_end.config_bytes);
        // Without a configuration, sizes are those that a device begins with.
        let sizes = if front_end.config_bytes.is_empty() { ScsiFieldSizes::DEFAULT } else { config.sizes() };
        let (completed, replied, events) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { front_end, config, sizes, completed, replied, events, event_length: EVENT_SIZE, next_tag: 1 })
    }

    /// Returns the number of request queues.
    pub fn request_queues(&self) -> usize {
        self.front_end.queues.len() - FIRST_REQUEST_QUEUE
    }

    /// Returns the number of commands and control requests in flight.
    pub fn in_flight(&self) -> usize {
        let queues = self.front_end.queues.iter().enumerate();
        queues.filter(|(index, _)| *index != EVENT_QUEUE).map(|(_, queue)| queue.in_flight()).sum()
    }

    /// Returns the time at which patience with what begins now ends.
    pub fn deadline(&self) -> Instant {
        Instant::now() + self.front_end.options.patience
    }

    /// Adds a command to a request queue, counted from 0; the device sees it after [`publish`](Self::publish).
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn submit(&mut self, queue: usize, command: &ScsiHostCommand) -> Result<SubmittedScsiCommand> {
        let tag = command.tag.unwrap_or(self.next_tag);
        self.next_tag = self.next_tag.max(tag.saturating_add(1));
        let buffers = command.clone().tagged(tag).buffers(self.sizes);
        let id = self.front_end.queues[FIRST_REQUEST_QUEUE + queue].submit_buffers(&buffers)?;
        Ok(SubmittedScsiCommand { id, tag })
    }

    /// Makes added commands available, and notifies the device if it wants that.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn publish(&mut self, queue: usize) -> Result<()> {
        self.front_end.queues[FIRST_REQUEST_QUEUE + queue].publish()
    }

    /// Adds commands to a request queue, publishes them, and notifies the device.
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn submit_all(&mut self, queue: usize, commands: &[ScsiHostCommand]) -> Result<Vec<SubmittedScsiCommand>> {
        let submitted = commands.iter().map(|command| self.submit(queue, command)).collect::<Result<_>>()?;
        self.publish(queue)?;
        Ok(submitted)
    }

    /// Takes the next completed command of a request queue.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn completion(&mut self, queue: usize) -> Result<Option<ScsiHostCompletion>> {
        let used = self.front_end.queues[FIRST_REQUEST_QUEUE + queue].used_buffers()?;
        Ok(used.map(|used| ScsiHostCompletion::decode(used, self.sizes)))
    }

    /// Waits for the next completed command of a request queue.
    ///
    /// # Errors
    /// As of [`FrontEndQueue::await_used`](crate::FrontEndQueue::await_used).
    pub fn await_completion(&mut self, queue: usize, deadline: Instant) -> Result<ScsiHostCompletion> {
        let used = self.front_end.await_used_buffers(FIRST_REQUEST_QUEUE + queue, deadline)?;
        Ok(ScsiHostCompletion::decode(used, self.sizes))
    }

    /// Runs one command on a request queue.
    ///
    /// # Errors
    /// As of [`await_completion`](Self::await_completion).
    pub fn run(&mut self, queue: usize, command: &ScsiHostCommand) -> Result<ScsiHostCompletion> {
        self.run_all(queue, std::slice::from_ref(command))?.pop().ok_or(FrontEndError::QueueFull)
    }

    /// Runs commands at the same time; returns their completions in the order of the commands.
    ///
    /// # Errors
    /// As of [`await_completion`](Self::await_completion).
    pub fn run_all(&mut self, queue: usize, commands: &[ScsiHostCommand]) -> Result<Vec<ScsiHostCompletion>> {
        let deadline = self.deadline();
        let submitted = self.submit_all(queue, commands)?;
        let mut done = Vec::new();
        while done.len() < submitted.len() {
            done.push(self.await_completion(queue, deadline)?);
        }
        done.sort_by_key(|completion| submitted.iter().position(|command| command.id == completion.id));
        Ok(done)
    }

    /// Runs a command on the first request queue, and repeats it after unit attentions and while the device is busy.
    ///
    /// # Errors
    /// As of [`await_completion`](Self::await_completion).
    pub fn settle(&mut self, command: &ScsiHostCommand) -> Result<ScsiHostCompletion> {
        let deadline = self.deadline();
        loop {
            let done = self.run(0, command)?;
            if !done.is_transient() || Instant::now() >= deadline {
                return Ok(done);
            }
            std::thread::yield_now();
        }
    }

    /// Adds a control request, and publishes it; returns the number of its chain.
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn submit_control(&mut self, request: &ScsiHostControl) -> Result<u16> {
        let queue = &mut self.front_end.queues[CONTROL_QUEUE];
        let id = queue.submit_buffers(&request.buffers())?;
        queue.publish()?;
        Ok(id)
    }

    /// Takes the next reply to a control request.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn control_reply(&mut self) -> Result<Option<ScsiHostControlReply>> {
        let used = self.front_end.queues[CONTROL_QUEUE].used_buffers()?;
        Ok(used.map(|used| ScsiHostControlReply::decode(used.id, &used.bytes)))
    }

    /// Waits for the next reply to a control request.
    ///
    /// # Errors
    /// As of [`await_completion`](Self::await_completion).
    pub fn await_control_reply(&mut self, deadline: Instant) -> Result<ScsiHostControlReply> {
        let UsedBuffers { id, bytes, .. } = self.front_end.await_used_buffers(CONTROL_QUEUE, deadline)?;
        Ok(ScsiHostControlReply::decode(id, &bytes))
    }

    /// Runs a control request while no other is in flight.
    ///
    /// # Errors
    /// As of [`FrontEnd::run_buffers`].
    pub fn control(&mut self, request: &ScsiHostControl) -> Result<ScsiHostControlReply> {
        let UsedBuffers { id, bytes, .. } = self.front_end.run_buffers(CONTROL_QUEUE, &request.buffers())?;
        Ok(ScsiHostControlReply::decode(id, &bytes))
    }

    /// Runs a task management function; returns its response.
    ///
    /// # Errors
    /// As of [`control`](Self::control).
    pub fn manage(&mut self, function: u32, lun: VirtioScsiLun, tag: u64) -> Result<u8> {
        Ok(self.control(&ScsiHostControl::task_management(function, lun, tag))?.response)
    }

    /// Posts event buffers of any length.
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn post_events(&mut self, count: u16, length: u32) -> Result<()> {
        self.event_length = length;
        let queue = &mut self.front_end.queues[EVENT_QUEUE];
        for _ in 0..count {
            queue.submit_buffers(&VirtqBuffers::new(&[], length))?;
        }
        queue.publish()
    }

    /// Takes the next event, and posts its buffer again.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] for an event that is shorter than its buffer should be.
    pub fn take_event(&mut self) -> Result<Option<ScsiHostEvent>> {
        if !self.events.is_empty() {
            return Ok(Some(self.events.remove(0)));
        }
        match self.front_end.queues[EVENT_QUEUE].used_buffers()? {
            Some(used) => self.renew_event(used).map(Some),
            None => Ok(None),
        }
    }

    /// Waits for the next event, and posts its buffer again.
    ///
    /// # Errors
    /// As of [`await_completion`](Self::await_completion), and of [`take_event`](Self::take_event).
    pub fn await_event(&mut self, patience: Duration) -> Result<ScsiHostEvent> {
        if let Some(event) = self.take_event()? {
            return Ok(event);
        }
        let used = self.front_end.await_used_buffers(EVENT_QUEUE, Instant::now() + patience)?;
        self.renew_event(used)
    }

    fn renew_event(&mut self, used: UsedBuffers) -> Result<ScsiHostEvent> {
        self.post_events(1, self.event_length)?;
        decode_event(&used)
    }

    /// Writes the sizes of variable fields to the configuration, and uses them from now on.
    ///
    /// # Errors
    /// [`FrontEndError::Refused`] when the device refuses them.
    pub fn set_sizes(&mut self, sizes: ScsiFieldSizes) -> Result<()> {
        for (offset, size) in [(SENSE_SIZE_OFFSET, sizes.sense), (CDB_SIZE_OFFSET, sizes.cdb)] {
            self.front_end.set_config(offset, 0, &size.to_le_bytes())?;
        }
        self.sizes = sizes;
        Ok(())
    }

    /// Takes what the former device has completed, connects again, and continues all queues.
    ///
    /// # Errors
    /// As of [`FrontEnd::resume`].
    pub fn resume(&mut self, path: &Path) -> Result<()> {
        for queue in 0..self.request_queues() {
            while let Some(done) = self.completion(queue)? {
                self.completed.push((queue, done));
            }
        }
        while let Some(reply) = self.control_reply()? {
            self.replied.push(reply);
        }
        let mut taken = 0;
        while let Some(used) = self.front_end.queues[EVENT_QUEUE].used_buffers()? {
            self.events.push(decode_event(&used)?);
            taken += 1;
        }
        self.front_end.resume(path)?;
        self.config = ScsiHostConfig::decode(&self.front_end.config_bytes);
        if !self.front_end.config_bytes.is_empty() && self.config.sizes() != self.sizes {
            self.set_sizes(self.sizes)?;
        }
        self.post_events(taken, self.event_length)
    }
}

fn decode_event(used: &UsedBuffers) -> Result<ScsiHostEvent> {
    let short = || FrontEndError::Violation(format!("event buffer of {} bytes", used.bytes.len()));
    let event = ScsiHostEvent::decode(&used.bytes).ok_or_else(short)?;
    match used.written {
        Some(written) if written < EVENT_SIZE => Err(FrontEndError::Violation(format!("event of {written} bytes"))),
        _ => Ok(event),
    }
}
