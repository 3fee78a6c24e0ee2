//! Connection of a front-end: its messages, one after the other, and the queues that they start and stop.

use std::cell::Cell;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::io;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::SizeWatch;
use forebay_reactor::{Buf, GuardedMapping, Stream, timeout};
use forebay_serve::ConnectionStopSignal;

use super::backend_channel::BackendChannel;
use super::device::{InflightRegion, VhostDevice};
use super::device_copy::{ControlChange, DeviceChange, DeviceCopy};
use super::incoming::{IncomingMessage, ReceivedMessage, SocketReceive};
use super::queue::QueueOrder;
use super::queue_slot::QueueSlot;
use super::ring_owner::RingClaim;
use crate::dirty_log::DirtyLog;
use crate::memory::{GuestMemory, GuestRegion, RegionPlace};
use crate::session::{DeviceOffer, StepOutcome, VhostSession, VhostStep, VhostViolation};
use crate::stats::{VhostDriverInfo, VhostStatsEntry};
use crate::wire::{SharedFileRange, VhostHeader, feature};

/// Alignment in bytes of regions within their files: the smallest page.
const PAGE: u64 = 4096;
/// Maximum time for requests in flight to complete when their connection ends.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Reason for which a connection ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum VhostEndReason {
    /// Front-end closed it between two messages.
    #[error("the front-end closed the connection")]
    Closed,
    /// Front-end closed it within a message.
    #[error("the front-end closed the connection within a message")]
    Broken,
    /// Server or export ends.
    #[error("the export ends")]
    Stopped,
    /// Error of the socket.
    #[error("socket: {0}")]
    Socket(io::Error),
    /// Violation of the protocol.
    #[error("protocol violation: {0}")]
    Violation(#[from] VhostViolation),
    /// Request that failed, of a front-end that wants no acknowledgement.
    #[error("request {request} failed: {why}")]
    Request {
        /// Number of the request.
        request: u32,
        /// Reason of the failure.
        why: String,
    },
    /// Guest or monitor that broke a rule of the device.
    #[error("{0}")]
    Device(String),
}

impl VhostEndReason {
    /// Returns whether the front-end or its guest is to blame.
    pub(super) fn is_fault(&self) -> bool {
        !matches!(self, Self::Closed | Self::Stopped)
    }
}

/// Next event of a connection.
enum VhostEvent {
    Received(SocketReceive),
    Resized,
    Ended(VhostEndReason),
}

/// Connection of a front-end.
pub(super) struct VhostConnection {
    stream: Stream,
    device: Rc<VhostDevice>,
    session: VhostSession,
    queues: Vec<QueueSlot>,
    regions: Vec<GuestRegion>,
    claim: Rc<RingClaim>,
    stats: Rc<VhostStatsEntry>,
    /// Copies of the device on other cores.
    copies: Vec<Rc<DeviceCopy>>,
}

impl VhostConnection {
    /// Creates the connection of a device.  Its queues are on the cores of `copies`, in turn, of which this core has none.
    pub(super) fn new(
        stream: Stream,
        device: Rc<VhostDevice>,
        copies: Vec<Option<Rc<DeviceCopy>>>,
        claim: RingClaim,
        stats: Rc<VhostStatsEntry>,
    ) -> Self {
        // The control and the event queue of a virtio-scsi device come before those for requests.
        let queues = device.export.queues + device.extra_queues();
        let offer = DeviceOffer { features: device.model_features(), queues };
        let mut in_turn = copies.iter().cycle();
        let slot = |index| QueueSlot::new(index, in_turn.next().cloned().flatten());
        let slots = (0..queues.into()).map(slot).collect();
        let (session, regions, claim) = (VhostSession::new(offer), Vec::new(), Rc::new(claim));
        let copies = copies.into_iter().flatten().collect();
        Self { stream, device, session, queues: slots, regions, claim, stats, copies }
    }

    /// Serves the front-end until the connection ends, and then waits for its requests in flight.  Returns the reason, and the
    /// copies of the device that are to be ended.
    pub(super) async fn serve(mut self, stop_signal: &ConnectionStopSignal) -> (VhostEndReason, Vec<Rc<DeviceCopy>>) {
        let reason = match self.exchange(stop_signal).await {
            Ok(never) => never,
            Err(reason) => reason,
        };
        self.stream.shutdown();
        self.device.phase.set_ended();
        for slot in &self.queues {
            slot.order(QueueOrder::Abandon);
        }
        let drained = timeout(DRAIN_TIMEOUT, async {
            for slot in &mut self.queues {
                _ = slot.end().await;
            }
        });
        let drained = drained.await;
        self.device.phase.set_over();
        if drained.is_err() {
            // Their tasks go on, and keep the right to run rings until then.
            let export = &self.device.export.name;
            tracing::warn!(
                export,
                "a vhost-user connection ended with requests in flight that the volume does not complete"
            );
            self.copies.clear();
        }
        (reason, self.copies)
    }

    async fn exchange(&mut self, stop_signal: &ConnectionStopSignal) -> Result<VhostEndReason, VhostEndReason> {
        let sizes = self.device.size_watch();
        let mut incoming = IncomingMessage::new(self.stream.clone());
        loop {
            match self.next_event(&mut incoming, stop_signal, sizes.as_ref()).await {
                VhostEvent::Ended(reason) => return Err(reason),
                VhostEvent::Resized => self.device.resized(),
                VhostEvent::Received(received) => {
                    if let Some(message) = incoming.add(received)? {
                        self.carry_out_unless_ended(message, &mut incoming, stop_signal).await?;
                        // The size may have changed while nothing waited for that.
                        self.device.resized();
                    }
                }
            }
        }
    }

    /// Waits for the next event.  A receive that has not completed loses nothing when another event comes first.
    async fn next_event(
        &mut self,
        incoming: &mut IncomingMessage,
        stop_signal: &ConnectionStopSignal,
        sizes: Option<&Rc<SizeWatch>>,
    ) -> VhostEvent {
        let mut resized = pin!(async {
            match sizes {
                Some(sizes) => sizes.changed().await,
                None => std::future::pending().await,
            }
        });
        let mut ended = pin!(ended(self.device.clone(), stop_signal));
        poll_fn(|cx| {
            if let Poll::Ready(reason) = ended.as_mut().poll(cx) {
                return Poll::Ready(VhostEvent::Ended(reason));
            }
            if resized.as_mut().poll(cx).is_ready() {
                return Poll::Ready(VhostEvent::Resized);
            }
            incoming.poll_receive(cx).map(VhostEvent::Received)
        })
        .await
    }

    /// Carries a request out, unless the export, the device or the connection ends before: a ring that is being stopped may
    /// wait for requests that never complete.
    async fn carry_out_unless_ended(
        &mut self,
        message: ReceivedMessage,
        incoming: &mut IncomingMessage,
        stop_signal: &ConnectionStopSignal,
    ) -> Result<(), VhostEndReason> {
        let ReceivedMessage { header, payload, descriptors } = message;
        let mut ended = pin!(ended(self.device.clone(), stop_signal));
        let mut carried_out = pin!(self.carry_out(header, &payload, descriptors));
        poll_fn(|cx| {
            if let Poll::Ready(result) = carried_out.as_mut().poll(cx) {
                return Poll::Ready(result);
            }
            if let Poll::Ready(reason) = ended.as_mut().poll(cx) {
                return Poll::Ready(Err(reason));
            }
            incoming.poll_closed(cx).map(|()| Err(VhostEndReason::Closed))
        })
        .await
    }

    async fn carry_out(
        &mut self,
        header: VhostHeader,
        payload: &[u8],
        descriptors: Vec<OwnedFd>,
    ) -> Result<(), VhostEndReason> {
        let step = self.session.receive(header, payload, descriptors.len())?;
        let mut attached = Vec::new();
        let outcome = match self.step_everywhere(step, descriptors.into(), &mut attached).await {
            Ok(outcome) => outcome,
            Err(why) => {
                let (export, request) = (&self.device.export.name, header.request);
                tracing::warn!(export, request, error = why, "a request of a vhost-user front-end failed");
                StepOutcome::Failed(why)
            }
        };
        let failed = |why| VhostEndReason::Request { request: header.request, why };
        let reply = self.session.finish(outcome).map_err(failed)?;
        self.device_features();
        self.reconcile().await.map_err(VhostEndReason::Device)?;
        self.settle().await.map_err(VhostEndReason::Device)?;
        if let Some(reply) = reply {
            let sent = self.stream.send_message(Buf::copy_of(&reply), attached).await;
            sent.map_err(VhostEndReason::Socket)?;
        }
        Ok(())
    }

    fn device_features(&self) {
        if self.device.features.get() != self.session.features() {
            let features = self.session.features();
            self.device.set_features(features);
            self.tell(|| DeviceChange::Features(features));
        }
    }

    /// Tells the copies of the device of a change.
    fn tell(&self, change: impl Fn() -> DeviceChange) {
        self.copies.iter().for_each(|copy| copy.change(change()));
    }

    /// Waits until the copies of the device have adopted all changes.
    async fn settle(&self) -> Result<(), String> {
        for copy in &self.copies {
            copy.settle().await?;
        }
        Ok(())
    }

    /// Carries out a step on all cores; descriptors for the reply are added to `attached`.
    async fn step_everywhere(
        &mut self,
        step: VhostStep,
        descriptors: VecDeque<OwnedFd>,
        attached: &mut Vec<OwnedFd>,
    ) -> Result<StepOutcome, String> {
        let outcome = self.step(step, descriptors, attached).await?;
        self.settle().await?;
        Ok(outcome)
    }

    /// Carries out a step, and tells the copies of the device.
    async fn step(
        &mut self,
        step: VhostStep,
        mut descriptors: VecDeque<OwnedFd>,
        attached: &mut Vec<OwnedFd>,
    ) -> Result<StepOutcome, String> {
        let mut next = || descriptors.pop_front();
        match step {
            VhostStep::Nothing => {}
            VhostStep::SetMemory(places) => {
                let mut regions = Vec::with_capacity(places.len());
                for place in places {
                    regions.push(map_region(place, next())?);
                }
                self.set_regions(regions)?;
            }
            VhostStep::AddRegion(place) => {
                let region = map_region(place, next())?;
                let regions = self.regions.iter().cloned().chain([region]).collect();
                self.set_regions(regions)?;
            }
            VhostStep::RemoveRegion(place) => {
                let regions = self.regions.iter().filter(|region| *region.place() != place).cloned().collect();
                self.set_regions(regions)?;
            }
            VhostStep::SetLog(range) => {
                let mapping = map_range(range, next()).map_err(|why| format!("dirty log: {why}"))?;
                let log = DirtyLog::new(mapping);
                self.device.set_log(Some(log.clone()));
                self.tell(|| DeviceChange::Log(log.share()));
            }
            VhostStep::SetKick { index } => {
                self.queues[index].change(ControlChange::Kick(next()))?;
            }
            VhostStep::SetCall { index } => {
                self.queues[index].change(ControlChange::Call(next()))?;
            }
            VhostStep::SetErr { index } => {
                self.queues[index].change(ControlChange::Err(next()))?;
            }
            VhostStep::StopRing { index } => return self.stop_ring(index).await.map(StepOutcome::RingBase),
            VhostStep::SetBackendChannel => {
                let socket = next().ok_or("no descriptor")?;
                let channel = BackendChannel::adopt(socket).map_err(|error| format!("back-end channel: {error}"))?;
                self.device.set_channel(channel);
            }
            VhostStep::Iotlb(change) => {
                self.device.translate(change)?;
                self.tell(|| DeviceChange::Translation(change));
            }
            VhostStep::ReadConfig { offset, len } => {
                return Ok(StepOutcome::Config(self.device.read_config(offset, len)));
            }
            VhostStep::WriteConfig { offset, is_migration, content } => {
                self.device.change_config(offset, &content, is_migration)?;
                self.tell(|| DeviceChange::Config { offset, is_migration, content: content.clone() });
            }
            VhostStep::CreateInflight { queues } => {
                let len = InflightRegion::len(queues);
                let created = GuardedMapping::create(len).map_err(|error| format!("in-flight region: {error}"))?;
                attached.push(created.1);
                return Ok(StepOutcome::Inflight(SharedFileRange { len, offset: 0 }));
            }
            VhostStep::SetInflight { range, queues } => {
                if !range.offset.is_multiple_of(InflightRegion::ALIGN) {
                    let (offset, align) = (range.offset, InflightRegion::ALIGN);
                    return Err(format!(
                        "in-flight region at offset {offset} of its file, which is no multiple of {align}"
                    ));
                }
                let mapping = map_range(range, next()).map_err(|why| format!("in-flight region: {why}"))?;
                self.tell(|| DeviceChange::Inflight(mapping.share(), queues));
                self.device.set_inflight(InflightRegion::new(mapping, queues));
            }
            VhostStep::Reset => {
                for index in 0..self.queues.len() {
                    self.stop_ring(index).await?;
                    // Its position is forgotten with all else.
                    self.session.set_base(index, 0);
                    self.queues[index].reset();
                }
                self.device.reset();
                self.tell(|| DeviceChange::Reset);
            }
            VhostStep::Refuse(why) => return Err(why),
        }
        Ok(StepOutcome::Done)
    }

    fn set_regions(&mut self, regions: Vec<GuestRegion>) -> Result<(), String> {
        self.device.set_memory(GuestMemory::new(regions.clone())?);
        self.tell(|| DeviceChange::Memory(regions.iter().map(GuestRegion::share).collect()));
        self.regions = regions;
        Ok(())
    }

    /// Stops a ring after its requests in flight; returns its position.
    async fn stop_ring(&mut self, index: usize) -> Result<u32, String> {
        let slot = &mut self.queues[index];
        if !slot.is_running() {
            return Ok(self.session.ring(index).base);
        }
        slot.order(QueueOrder::Stop);
        let base = slot.end().await.expect("it runs")?;
        self.session.set_base(index, base);
        self.describe();
        Ok(base)
    }

    /// Starts the rings that are to run, and stops those that are not.
    async fn reconcile(&mut self) -> Result<(), String> {
        for index in 0..self.queues.len() {
            let (wanted, runs) = (self.session.is_runnable(index), self.queues[index].is_running());
            if runs && !wanted {
                self.stop_ring(index).await?;
            }
            if wanted && !runs {
                if self.session.features() & feature::VERSION_1 == 0 {
                    return Err("the guest's driver is a legacy one; VIRTIO 1 is required".to_owned());
                }
                let ring = self.session.ring(index).clone();
                self.queues[index].start(ring, &self.device, &self.claim, &self.stats);
                self.describe();
            }
        }
        Ok(())
    }

    /// Tells the statistics which rings run.
    fn describe(&self) {
        let ring_format = if self.session.has(feature::RING_PACKED) { "packed" } else { "split" };
        let queues = self.queues.iter().filter(|slot| slot.is_running()).count() as u16;
        self.stats.set_driver(VhostDriverInfo { ring_format, queues });
    }
}

/// Waits until a connection is to end, because its export stops or its device has broken a rule.
async fn ended(device: Rc<VhostDevice>, stop_signal: &ConnectionStopSignal) -> VhostEndReason {
    let mut faulted = pin!(device.faulted.wait_until(|| device.fault().is_some()));
    poll_fn(|cx| {
        stop_signal.set_task(cx.waker());
        if stop_signal.stopping() {
            return Poll::Ready(VhostEndReason::Stopped);
        }
        faulted.as_mut().poll(cx).map(|()| VhostEndReason::Device(device.fault().unwrap_or_default()))
    })
    .await
}

fn map_region(place: RegionPlace, file: Option<OwnedFd>) -> Result<GuestRegion, String> {
    if !place.file_offset.is_multiple_of(PAGE) {
        return Err(format!(
            "memory region at offset {} of its file, which is no multiple of {PAGE}",
            place.file_offset
        ));
    }
    let mapping = map_range(SharedFileRange { len: place.len, offset: place.file_offset }, file);
    mapping.map(|mapping| GuestRegion::new(place, mapping)).map_err(|why| format!("memory region: {why}"))
}

fn map_range(range: SharedFileRange, file: Option<OwnedFd>) -> Result<Rc<GuardedMapping>, String> {
    use std::os::fd::AsFd;
    let file = file.ok_or("no descriptor")?;
    let mapping = GuardedMapping::map(file.as_fd(), range.offset, range.len).map_err(|error| error.to_string())?;
    Ok(Rc::new(mapping))
}

/// Number of the next connection of a core.
#[derive(Default)]
pub(super) struct ConnectionNumbers(Cell<u64>);

impl ConnectionNumbers {
    /// Returns a number that no other connection has.
    pub(super) fn next(&self) -> u64 {
        self.0.replace(self.0.get() + 1)
    }
}
