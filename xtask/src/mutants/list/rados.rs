//! The RADOS client, and the messenger below it.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-rados");
const MESSENGER: Stage = Stage::Lib("forebay-messenger");
const HOSTILE: Stage = Stage::Test("forebay-messenger", "hostile");
const TRANSPORTS: Stage = Stage::Test("forebay-messenger", "transports");
const SIM: Stage = Stage::Sim(&["--messenger"], 1000);

const DISPATCH: &str = "backend/rados/src/osd/dispatch.rs";
const GUARD: &str = "backend/rados/src/pool/guard.rs";
const WRITE: &str = "backend/rados/src/pool/write.rs";
const PLACE: &str = "backend/rados/src/map/place.rs";
const SESSION: &str = "base/messenger/src/session/state.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "rados-same-device-twice",
        "CRUSH chooses the same device twice",
        "backend/rados/src/crush/choose.rs",
        "collides = out.contains(&item);",
        "collides = out.len() > 1000;",
        &[UNIT],
    ),
    Mutant::new(
        "rados-groups-modulo",
        "Placement groups are numbered by a plain modulo",
        PLACE,
        "if x & mask < b { x & mask } else { x & (mask >> 1) }",
        "x % b + (mask & 0)",
        &[UNIT],
    ),
    Mutant::new(
        "rados-namespace-unseparated",
        "A namespace is hashed without the byte that separates it from the name",
        PLACE,
        "text.push(NAMESPACE_SEPARATOR);",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "rados-down-primary",
        "Requests go to an OSD of a temporary placement that is down",
        PLACE,
        "self.keep(pool, &mut acting, |osd| self.is_up(osd));",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "rados-map-out-of-order",
        "A change of the OSD map is applied to a map that it does not follow",
        "backend/rados/src/map/incremental.rs",
        "if change.epoch != self.epoch.wrapping_add(1) {",
        "if change.epoch == 0 {",
        &[UNIT],
    ),
    Mutant::new(
        "rados-object-order",
        "Objects are ordered by their hash and not by its reversed bits",
        "backend/rados/src/osd/hobject.rs",
        "self.hash.reverse_bits().cmp(&other.hash.reverse_bits())",
        "self.hash.cmp(&other.hash)",
        &[UNIT],
    ),
    Mutant::new(
        "rados-backoff-one-more",
        "A backoff holds back the object behind its range, too",
        "backend/rados/src/osd/session.rs",
        "*object < backoff.end",
        "*object <= backoff.end",
        &[UNIT],
    ),
    Mutant::new(
        "rados-old-attempt",
        "The answer to an attempt that was given up is taken for that of the request",
        DISPATCH,
        "if !ours || (reply.attempt >= 0 && reply.attempt != op.attempts - 1) {",
        "if !ours {",
        &[UNIT],
    ),
    Mutant::new(
        "rados-other-osd",
        "An answer of an OSD counts that has not the request any more",
        DISPATCH,
        "let ours = op.sent && op.target.as_ref().is_some_and(|target| target.mapping.primary == osd);",
        "let ours = op.sent;",
        &[UNIT],
    ),
    Mutant::new(
        "rados-fenced-goes-on",
        "A client on the blocklist goes on sending",
        DISPATCH,
        "self.fenced.set(true);",
        "self.fenced.set(false);",
        &[UNIT],
    ),
    Mutant::new(
        "rados-not-resent",
        "Requests are not sent again although the pool asks for it",
        "backend/rados/src/osd/maps.rs",
        "**before == unforced && after.force_resend <= op.sent_epoch",
        "**before == unforced",
        &[UNIT],
    ),
    Mutant::new(
        "rados-absence-unconditional",
        "A transaction that was planned for an object that is not there is sent without that condition",
        GUARD,
        "vec![create, OsdOp::new(code::DELETE)]",
        "Vec::new()",
        &[UNIT],
    ),
    Mutant::new(
        "rados-zero-cuts",
        "Zeroing the end of an object changes its size",
        GUARD,
        "if exists && (end == size || extent.offset >= end) {",
        "if exists && extent.offset >= end {",
        &[UNIT],
    ),
    Mutant::new(
        "rados-first-value-wins",
        "Of a key that a transaction sets twice, the first value stays",
        WRITE,
        "sorted.reverse();",
        "",
        &[UNIT],
    ),
    Mutant::new(
        "rados-version-zero",
        "A guard by the version 0 is no guard",
        WRITE,
        "ObjectOp::AssertVersion(0) => OsdOp::assert_version(u64::MAX),",
        "ObjectOp::AssertVersion(0) => OsdOp::assert_version(0),",
        &[UNIT],
    ),
    Mutant::new(
        "messenger-duplicates",
        "A message that comes again after a reconnect is delivered twice",
        SESSION,
        "if seq < expected {",
        "if seq + 1 < expected {",
        &[MESSENGER, SIM],
    ),
    Mutant::new(
        "messenger-replay-lost",
        "What was still to be sent again is lost when the connection is lost once more",
        SESSION,
        "again.append(&mut self.replay);",
        "",
        &[MESSENGER, SIM],
    ),
    Mutant::new(
        "messenger-replay-acknowledged",
        "After a reconnect, messages are sent again that the peer has received",
        SESSION,
        "while self.replay.front().is_some_and(|(number, _)| *number <= seq) {",
        "while self.replay.front().is_some_and(|(number, _)| *number < seq) {",
        &[MESSENGER, SIM],
    ),
    Mutant::new(
        "messenger-signature-ignored",
        "The peer's signature of the handshake is not verified",
        "base/messenger/src/session/handshake.rs",
        "if !same(&signature.signature, &self.expected) {",
        "if !same(&signature.signature, &self.expected) && self.mode == u32::MAX {",
        &[MESSENGER, HOSTILE],
    ),
    Mutant::new(
        "messenger-nonce-again",
        "Secure mode uses a nonce twice",
        "base/messenger/src/wire/crypto.rs",
        "self.counter = self.counter.wrapping_add(1);",
        "",
        &[MESSENGER],
    ),
    Mutant::new(
        "messenger-whole-unbounded",
        "What all peers together may hold is not bounded",
        "base/messenger/src/throttle.rs",
        "self.has_room(bytes) && self.whole.as_ref().is_none_or(|whole| whole.has_room(bytes))",
        "self.has_room(bytes)",
        &[MESSENGER, TRANSPORTS, HOSTILE],
    ),
];
