//! vhost-user: rings, the record of requests in flight, the guest's memory, the protocol, and both devices.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-vhost");
const SERVING: Stage = Stage::Test("forebay-vhost-host", "ours");
const BEHIND_IOMMU: Stage = Stage::Test("forebay-vhost-host", "iommu");
const CHANGES: Stage = Stage::Test("forebay-vhost-host", "changes");
const SCSI_SERVING: Stage = Stage::Test("forebay-vhost-host", "scsi");
const FENCED: Stage = Stage::Test("forebay-vhost-host", "fenced");

const SPLIT: &str = "front/vhost/src/rings/split.rs";
const PACKED: &str = "front/vhost/src/rings/packed.rs";
const ORDER: &str = "front/vhost/src/rings/in_order.rs";
const SPLIT_RECORD: &str = "front/vhost/src/inflight/split.rs";
const PACKED_RECORD: &str = "front/vhost/src/inflight/packed.rs";
const RINGS: &str = "front/vhost/src/rings.rs";
const MEMORY: &str = "front/vhost/src/memory.rs";
const IOTLB: &str = "front/vhost/src/iotlb.rs";
const LOG: &str = "front/vhost/src/dirty_log.rs";
const EXECUTE: &str = "front/vhost/src/block/execute.rs";
const SESSION: &str = "front/vhost/src/session.rs";
const RING_STATE: &str = "front/vhost/src/session/ring_state.rs";
const QUEUE: &str = "front/vhost/src/serve/queue.rs";
const CONNECTION: &str = "front/vhost/src/serve/connection.rs";
const SERVER: &str = "front/vhost/src/serve.rs";
const DEVICE: &str = "front/vhost/src/serve/device.rs";
const OWNER: &str = "front/vhost/src/serve/ring_owner.rs";
const QUEUE_BLOCK: &str = "front/vhost/src/serve/queue/block.rs";
const QUEUE_SCSI: &str = "front/vhost/src/serve/queue/scsi.rs";
const REQUEST: &str = "front/vhost/src/block/request.rs";
const EVENTS: &str = "front/vhost/src/scsi/events.rs";
const SCSI_REQUEST: &str = "front/vhost/src/scsi/request.rs";
const REPLY: &str = "front/vhost/src/scsi/reply.rs";
const NEXUS: &str = "front/vhost/src/serve/scsi_nexus.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "vhost-used-slot",
        "The used entry of a split ring is written one slot further than the used index says",
        SPLIT,
        "let at = ENTRIES + 8 * self.slot(self.used_index);",
        "let at = ENTRIES + 8 * self.slot(self.used_index.wrapping_add(1));",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-event-index-passed",
        "No interrupt is due if the driver waits for another entry of a batch than the last",
        SPLIT,
        "u32::from(self.used_index.wrapping_sub(event).wrapping_sub(1)) < returned",
        "self.used_index.wrapping_sub(event) == 1 && returned > 0",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-used-ring-unlogged",
        "The used entries of a split ring are missing from the dirty log",
        SPLIT,
        "        self.mark(log, at, 8);\n",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-available-runs-away",
        "An available index further ahead than the ring has entries is followed",
        SPLIT,
        "if index.wrapping_sub(self.last_available) > self.size {",
        "if index.wrapping_sub(self.last_available) > 2 * self.size {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-head-twice",
        "A head that is in flight may be submitted again",
        SPLIT,
        "ChainState::Orphaned | ChainState::InFlight => return Err(VirtqViolation::InFlight(head).into()),",
        "ChainState::Orphaned | ChainState::InFlight => {}",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-wrap-counter-stays",
        "The wrap counter of a packed ring is not flipped at its end",
        PACKED,
        "Some(index) => Self { index: index as u16, wrap: !self.wrap },",
        "Some(index) => Self { index: index as u16, wrap: self.wrap },",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-packed-overrun",
        "Only the descriptors of one chain are bounded by the size of a packed ring, not those in flight",
        PACKED,
        "if self.descriptors + count > u32::from(self.size) {",
        "if count > u32::from(self.size) {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-packed-event-ahead",
        "A driver that waits for the next position of a packed ring is interrupted at once",
        PACKED,
        "let behind = if behind == 0 { positions } else { behind };",
        "let behind = if behind == positions { 0 } else { behind };",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-in-order-overtaken",
        "In order, a chain is returned with an earlier one although it is not complete",
        ORDER,
        "let written = written?;",
        "let written = written.unwrap_or(0);",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-inflight-unrecorded",
        "A chain that is taken from a split ring is not recorded as in flight",
        SPLIT_RECORD,
        "        self.put_u16(at(head, 0), u16::from_ne_bytes([1, 0]));\n",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-inflight-idle-early",
        "A chain of a split ring counts as idle before the driver sees it as used",
        SPLIT_RECORD,
        "        self.put_u16(at(head, NEXT), self.batch);\n",
        "        self.put_u16(at(head, NEXT), self.batch);\n        self.put_u16(at(head, 0), 0);\n",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-inflight-order-lost",
        "Chains of a killed device are resumed by their heads instead of the order of submission",
        SPLIT_RECORD,
        "        heads.sort_unstable();\n",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-packed-record-wrap",
        "The old used position of a packed record has the wrap counter of the new one",
        PACKED_RECORD,
        "let wraps = u16::from_ne_bytes([u8::from(used.wrap), u8::from(self.used.wrap)]);",
        "let wraps = u16::from_ne_bytes([u8::from(used.wrap), u8::from(used.wrap)]);",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-record-outlives-stop",
        "The record of a queue that was stopped overrides the next base",
        RINGS,
        "if self.in_flight == 0 {",
        "if self.in_flight == u32::MAX {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-part-past-region",
        "A buffer that spans two regions is found as one that ends past the first",
        MEMORY,
        "let part = (end - next).min(region.place.len - at);",
        "let part = end - next;",
        &[UNIT],
    )
    .nth(0),
    Mutant::new(
        "vhost-user-addresses-overlap",
        "Regions that share user addresses are accepted",
        MEMORY,
        "|| meet(self.user, other.user, other.len)",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-iotlb-permission",
        "A buffer is written through a translation that allows only reads",
        IOTLB,
        "if at >= translation.len || !allowed {",
        "if at >= translation.len {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-log-first-page-only",
        "Only the first page of a write is logged",
        LOG,
        "guest.saturating_add(len) / PAGE)",
        "guest.saturating_add(0 * len) / PAGE)",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-data-unlogged",
        "The data of a read is missing from the dirty log",
        EXECUTE,
        "        log.mark_parts(writable, written);\n",
        "",
        &[UNIT, SERVING],
    ),
    Mutant::new(
        "vhost-postcopy-accepted",
        "A migration by page faults is accepted",
        SESSION,
        "return not_now(\"migration by page faults (postcopy) is not supported; use precopy\");",
        "VhostStep::Nothing",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-base-of-running-ring",
        "A ring goes on after it has told its base",
        SESSION,
        "                self.rings[index].kicked = false;\n",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-failed-step-counts",
        "A region or kick descriptor that was refused stays in the state of the connection",
        SESSION,
        "if !matches!(outcome, StepOutcome::Failed(_)) {",
        "if pending.is_some() {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-areas-moved",
        "The areas of a ring are moved while it runs",
        RING_STATE,
        "if runs && self.addresses != Some(addresses) {",
        "if runs && self.addresses.is_none() {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-stop-without-drain",
        "The base is told while requests of the ring are in flight",
        QUEUE,
        "ordered && self.work.is_empty()",
        "ordered",
        &[SERVING],
    ),
    Mutant::new(
        "vhost-two-owners",
        "Two front-ends run rings of an export at the same time",
        OWNER,
        "self.holder.get().is_none_or(|holder| holder == connection)",
        "self.holder.get().is_none_or(|_| connection < u64::MAX)",
        &[SERVING],
    ),
    Mutant::new(
        "vhost-owner-freed-early",
        "Another front-end may run rings while one of the former is still running",
        OWNER,
        "if rings == 0 {",
        "if rings <= 1 {",
        &[SERVING],
    ),
    Mutant::new(
        "vhost-fenced-answered",
        "A request that another daemon will execute is answered with an error when its connection ends",
        QUEUE_BLOCK,
        "Some(ErrorKind::Fenced) => device.phase.has_ended(),",
        "Some(ErrorKind::Fenced) => false,",
        &[FENCED],
    ),
    Mutant::new(
        "vhost-closing-answered",
        "A request to a volume that ends with its daemon is answered with an error",
        QUEUE_BLOCK,
        "Some(ErrorKind::ShuttingDown) if self.possible => {",
        "Some(ErrorKind::ShuttingDown) if self.possible && self.closing => {",
        &[SERVING],
    ),
    Mutant::new(
        "vhost-base-with-requests-left",
        "The base is told while requests are left to the next daemon",
        QUEUE,
        "QueueOrder::Stop => !self.work.is_closing(),",
        "QueueOrder::Stop => true,",
        &[FENCED],
    ),
    Mutant::new(
        "vhost-broken-undrained",
        "A successor's rings begin while requests of a broken ring are in flight",
        QUEUE,
        "queue.drain().await;\n                return Err(why);",
        "drop(queue.drain());\n                return Err(why);",
        &[FENCED],
    ),
    Mutant::new(
        "vhost-owner-per-export",
        "Rings of an export begin while requests of an ended export of its name are at the volume",
        SERVER,
        "owners.get(name).and_then(Weak::upgrade)",
        "None::<Rc<RingOwner>>",
        &[FENCED],
    ),
    Mutant::new(
        "vhost-left-out-of-order",
        "A request is left in a split ring without a record, where later ones may have been used",
        QUEUE,
        "device.has(feature::IN_ORDER) && !device.has(feature::RING_PACKED)",
        "!device.has(feature::RING_PACKED)",
        &[FENCED],
    ),
    Mutant::new(
        "vhost-used-ring-stale",
        "A request is returned to a ring whose translation was taken away",
        QUEUE,
        "(self.is_found() && self.complete_all() > 0)",
        "self.complete_all() > 0",
        &[BEHIND_IOMMU],
    ),
    Mutant::new(
        "vhost-reset-keeps-position",
        "A ring begins where it was before the reset of its device",
        CONNECTION,
        "self.session.set_base(index, 0);",
        "",
        &[CHANGES],
    ),
    Mutant::new(
        "vhost-reset-keeps-record",
        "Requests are recorded in a region from before the reset of the device",
        DEVICE,
        "self.inflight.replace(None);",
        "",
        &[CHANGES],
    ),
    Mutant::new(
        "vhost-copy-untold",
        "Translations do not reach the queues on other cores",
        CONNECTION,
        "self.tell(|| DeviceChange::Translation(change));",
        "let _ = &change;",
        &[BEHIND_IOMMU],
    ),
    Mutant::new(
        "vhost-copy-config-untold",
        "A write cache that is turned off is on for the queues on other cores",
        CONNECTION,
        "self.tell(|| DeviceChange::Config { offset, is_migration, content: content.clone() });",
        "let _ = &content;",
        &[CHANGES],
    ),
    Mutant::new(
        "vhost-copy-reset-untold",
        "A reset does not reach the queues on other cores",
        CONNECTION,
        "self.tell(|| DeviceChange::Reset);",
        "",
        &[CHANGES],
    ),
    Mutant::new(
        "vhost-hang-up-unnoticed",
        "A front-end that closes while its ring is being stopped is not noticed",
        CONNECTION,
        "incoming.poll_closed(cx).map(|()| Err(VhostEndReason::Closed))",
        "Poll::Pending",
        &[FENCED],
    ),
    Mutant::new(
        "vhost-copy-ahead",
        "A reply is sent before the queues on other cores have adopted the change",
        CONNECTION,
        "copy.settle().await?;",
        "drop(copy.settle());",
        &[SERVING],
    ),
    Mutant::new(
        "vhost-read-only-written",
        "A volume that is read-only is written",
        REQUEST,
        "if self.read_only || self.geometry.read_only {",
        "if self.read_only && !self.geometry.read_only {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-past-the-end",
        "A request past the end of the volume is passed on",
        REQUEST,
        "Some(end) if end <= capacity(&self.geometry) => Ok(extent),",
        "Some(_) => Ok(extent),",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-long-range",
        "A range of a discard longer than announced is passed on",
        REQUEST,
        "if sectors > RANGE_SECTORS_MAX {",
        "if sectors == u32::MAX {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-write-through-lost",
        "Writes of a driver that cannot flush are acknowledged before they are durable",
        REQUEST,
        "!self.has(feature::FLUSH) || (self.has(feature::CONFIG_WCE) && !self.writeback)",
        "self.has(feature::CONFIG_WCE) && !self.writeback",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-short-read-passed",
        "A device that returns fewer bytes than were read goes unnoticed",
        EXECUTE,
        "if data.len() as u64 == len {",
        "if data.len() as u64 <= len {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-scsi-late-response",
        "A command that ends long after its connection changes the guest's memory",
        QUEUE_SCSI,
        "if self.device.phase.is_over() {",
        "if self.bytes == u64::MAX {",
        &[SCSI_SERVING],
    ),
    Mutant::new(
        "vhost-scsi-missed-untold",
        "A guest is not told that events were missed",
        EVENTS,
        "let missed = if std::mem::take(&mut self.missed) { EVENTS_MISSED } else { 0 };",
        "let missed = if std::mem::take(&mut self.missed) { 0 } else { 0 };",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-scsi-overrun-executed",
        "A write is executed although its data is shorter than the CDB says",
        SCSI_REQUEST,
        "if command.takes().unwrap_or(0) > data_out || command.read_bytes() as u64 > data_in {",
        "if command.read_bytes() as u64 > data_in {",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-scsi-residual",
        "The residual of a command that failed counts its data as transferred",
        REPLY,
        "let transferred = if outcome.is_good() { self.taken + written } else { 0 };",
        "let transferred = self.taken + written;",
        &[UNIT],
    ),
    Mutant::new(
        "vhost-scsi-initiators-alike",
        "Reservations of one guest are taken for those of all",
        NEXUS,
        "host: naa_host(initiator),",
        "host: naa_host([0x50; 8]),",
        &[SCSI_SERVING],
    ),
    Mutant::new(
        "vhost-scsi-executed-twice",
        "COMPARE AND WRITE that was in flight when the daemon was killed is executed again",
        QUEUE_SCSI,
        "if is_in_doubt { Err",
        "if is_in_doubt && self.bytes == u64::MAX { Err",
        &[SCSI_SERVING],
    ),
    Mutant::new(
        "vhost-scsi-source-keeps-units",
        "A guest that was migrated finds its units busy until the source's monitor disconnects",
        NEXUS,
        "if let Some(former) = owner.session() {",
        "if let Some(former) = owner.session().filter(|_| false) {",
        &[SCSI_SERVING],
    ),
    Mutant::new(
        "vhost-scsi-session-not-resumed",
        "A guest whose migration was cancelled goes on with the session that has ended",
        NEXUS,
        "self.nexus.borrow().as_ref().is_some_and(|nexus| !nexus.ended.get())",
        "self.nexus.borrow().is_some()",
        &[SCSI_SERVING],
    ),
];
