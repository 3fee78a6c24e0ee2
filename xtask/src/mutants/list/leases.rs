//! Replicated write logs: leases, media that fail, minimum numbers of replicas.

use super::Mutant;
use crate::mutants::stage::Stage;

const TESTS: Stage = Stage::Test("forebay-writelog", "replication");
const SIM: Stage = Stage::Sim(&["--replication"], 400);

const SET: &str = "volume/writelog/src/replication/set.rs";
const MEMBER: &str = "volume/writelog/src/replication/member.rs";
const CONTROL: &str = "volume/writelog/src/replication/control.rs";
const OPEN: &str = "volume/writelog/src/replication/open.rs";
const OPEN_COPY: &str = "volume/writelog/src/replication/open_copy.rs";
const PROMISES: &str = "volume/writelog/src/replication/promises.rs";
const MEMBERS: &str = "volume/writelog/src/media/members.rs";
const APPEND: &str = "volume/writelog/src/append.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "lease-read-without",
        "A primary reads although its replicas may have taken over",
        SET,
        "        if self.has_lease() && self.stopped().is_none() {\n",
        "        if self.stopped().is_none() {\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "lease-promise-broken",
        "A replica takes over although it has promised not to",
        OPEN,
        "                keeper.promise_over().await;\n",
        "",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "lease-promise-not-extended",
        "A request of the primary does not extend the promise of a replica",
        OPEN_COPY,
        "                self.promise.extend();\n",
        "",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "lease-promise-forgotten",
        "A process that was started again knows of no promise of the one before it",
        PROMISES,
        "LeasePromise::after_start(self.clock.millis_up(self.started), promised(lease.as_millis() as u64))",
        "LeasePromise::after_start(self.clock.millis_up(self.started), 0 * promised(lease.as_millis() as u64))",
        &[TESTS],
    ),
    Mutant::new(
        "lease-no-heartbeat",
        "A primary that writes nothing asks for no promise",
        MEMBER,
        "    if due && !link.beating.replace(true) {\n",
        "    if due && !link.beating.replace(true) && link.automatic.get() != automatic {\n",
        &[TESTS],
    ),
    Mutant::new(
        "lease-silent-replica-kept",
        "A replica that answers nothing is kept as long as nothing is written",
        CONTROL,
        ".or_else(|| silence.silent_member(&set));",
        ".or_else(|| silence.silent_member(&set).filter(|_| false));",
        &[TESTS],
    ),
    Mutant::new(
        "media-following-is-progress",
        "A replica whose medium fails is kept, since it follows its primary again and again",
        MEMBER,
        "            if link.progress.get() != before {\n",
        "            if link.progress.get() == link.progress.get() {\n",
        &[TESTS],
    ),
    Mutant::new(
        "media-own-copy-kept",
        "A primary whose medium has failed stays a complete member",
        CONTROL,
        "let lost = lost_own(&set).or_else(",
        "let lost = None::<PeerId>.or_else(",
        &[TESTS],
    ),
    Mutant::new(
        "media-read-not-elsewhere",
        "A read that fails at the primary is not tried at a replica",
        MEMBERS,
        "                Err(error) => set.read_replica(&entry, error).await,\n",
        "                Err(error) => set.read_replica(&entry, error.clone()).await.and(Err(error)),\n",
        &[TESTS],
    ),
    Mutant::new(
        "stall-ignored",
        "A write is acknowledged although too few replicas are complete",
        SET,
        "        if !self.is_stalled() {\n",
        "        if !self.is_stalled() || self.term > 0 {\n",
        &[TESTS],
    ),
    Mutant::new(
        "stall-counts-primary",
        "The primary's own copy counts as a replica",
        SET,
        "complete <= self.replicas_min() as usize\n",
        "complete < self.replicas_min() as usize\n",
        &[TESTS],
    ),
    Mutant::new(
        "stall-without-end",
        "A log that is closed waits for replicas",
        APPEND,
        "until(permitted, ending).await.unwrap_or_else(|| Err(closed()))",
        "until(permitted, ending).await.unwrap_or(Ok(()))",
        &[TESTS],
    ),
];
