//! Forwarded volumes.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-forward");
const SIM: Stage = Stage::Sim(&["--forward"], 3000);

const OWNER: &str = "volume/forward/src/session/owner.rs";
const FORWARDER: &str = "volume/forward/src/session/forwarder.rs";
const HOST: &str = "volume/forward/src/host.rs";
const AUTHORITY: &str = "volume/forward/src/authority.rs";
const RESERVE: &str = "volume/forward/src/reserve.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "forward-opens-undrained",
        "A session opens while requests of the former one are being executed",
        OWNER,
        "if self.sessions.values().any(former) {",
        "if self.sessions.is_empty() && self.sessions.values().any(former) {",
        &[SIM],
    ),
    Mutant::new(
        "forward-former-session-open",
        "A session does not end the former one, whose late requests are executed",
        OWNER,
        "self.end_where(|session, _| session.start == start && session.volume == volume);\n        let phase",
        "let phase",
        &[UNIT],
    ),
    Mutant::new(
        "forward-number-used-again",
        "A number names a second session of a connection, of another volume",
        OWNER,
        "if used || newest",
        "if used && newest",
        &[UNIT],
    ),
    Mutant::new(
        "forward-suspends-early",
        "A volume counts as suspended while requests are being executed",
        HOST,
        "self.changed.wait_until(|| !self.sessions.borrow().is_executing(volume)).await;",
        "self.changed.wait_until(|| true).await;",
        &[SIM],
    ),
    Mutant::new(
        "forward-start-ends-early",
        "A start counts as ended while its requests are being executed",
        HOST,
        "self.changed.wait_until(|| !self.sessions.borrow().is_executing_for(&start)).await;",
        "self.changed.wait_until(|| !self.sessions.borrow().is_executing_for(&[0; 16])).await;",
        &[SIM],
    )
    .nth(0),
    Mutant::new(
        "forward-dead-start-told-early",
        "A start that was declared dead fails its requests while one is being executed",
        HOST,
        "if matches!(answer, ForwardAnswer::Refused(ForwardRefusal::StartEnded)) {",
        "if matches!(answer, ForwardAnswer::Refused(ForwardRefusal::Moving)) {",
        &[UNIT],
    ),
    Mutant::new(
        "forward-doubt-times-out",
        "A request that an owner may still execute times out",
        FORWARDER,
        "AttemptEnd::Lost => entry.former = FormerAttempts::InDoubt,",
        "AttemptEnd::Lost => entry.former = FormerAttempts::Over,",
        &[SIM],
    ),
    Mutant::new(
        "forward-compares-again",
        "A compare-and-write that may have been executed is sent again",
        FORWARDER,
        "entry.former = FormerAttempts::Over;\n        }\n        self.phase",
        "entry.former = FormerAttempts::None;\n        }\n        self.phase",
        &[SIM],
    ),
    Mutant::new(
        "forward-former-owner",
        "A session of a former term is used",
        FORWARDER,
        "if term < self.term {",
        "if term + 1 < self.term {",
        &[UNIT],
    ),
    Mutant::new(
        "forward-lease-ignored",
        "An owner executes requests of a session whose lease has run out",
        OWNER,
        "self.end_lapsed(now);\n        let refused",
        "let refused",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "forward-lease-from-arrival",
        "A lease counts from when a renewal has arrived, however late that is",
        OWNER,
        "peer.granted = peer.granted.max(given);",
        "peer.granted = peer.granted.max(given.and(Some(now)));",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "forward-left-over-overtaken",
        "A request overtakes the change that an ended session has left over, and that the host has sent again",
        OWNER,
        "earlier.any(|other| of(other) == of(request) &&",
        "earlier.any(|other| of(other) != of(request) &&",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "forward-given-up-early",
        "Requests of a volume that is given up end while an owner may begin to execute them",
        FORWARDER,
        "let are_over = self.leases_over.is_none_or(|over| now >= over);",
        "let are_over = self.leases_over.is_none_or(|over| over > Instant::default());",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "forward-reservation-unadopted",
        "A reservation action is acknowledged before forwarders have adopted the table",
        AUTHORITY,
        "if self.sessions.borrow().is_adopted(volume, number) {",
        "if true {",
        &[SIM],
    ),
    Mutant::new(
        "forward-reservation-undrained",
        "A session that has ended counts as drained while its accesses are being executed",
        OWNER,
        "SessionPhase::Ended => session.accesses == 0,",
        "SessionPhase::Ended => true,",
        &[UNIT],
    ),
    Mutant::new(
        "forward-reservation-outdated",
        "An access that an older table has admitted is sent in the next session",
        FORWARDER,
        "self.class.is_access() && self.table < table",
        "self.class.is_access() && self.table + 1 < table",
        &[UNIT],
    ),
    Mutant::new(
        "forward-reservation-adopts-early",
        "A forwarder has adopted a table while older ones' accesses are in flight",
        RESERVE,
        "state.session() != Some(session) || state.has_drained(number)",
        "state.session() != Some(session) || state.table() >= number",
        &[SIM],
    ),
    Mutant::new(
        "forward-reservation-lost",
        "Registrations that are not persistent are lost with their owner",
        AUTHORITY,
        "*persist = Some(true),",
        "*persist = persist.or(Some(false)),",
        &[SIM],
    ),
];
