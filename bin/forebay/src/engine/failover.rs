//! Takeovers by this daemon itself, of logs whose primary is lost.
//!
//! A replica hears of its primary all the time: entries, or heartbeats.  When its promise not to take over has run out, the
//! record decides: this daemon's copy is complete, the log is open, and its members' order names this daemon next.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_reactor::{sleep, spawn, timeout};
use forebay_writelog::replication::{LogMembers, PeerId};
use forebay_writelog::{LogId, id_text};

use super::Engine;
use super::log_keeper::load_record;
use super::replicas::TakeoverRequest;
use crate::api;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Time that primaries have after the start of this daemon until they count as lost.
const AFTER_START: Duration = Duration::from_secs(10);
/// Maximum time until the end of the engine is noticed.
const LOOK: Duration = Duration::from_secs(1);
/// Time after the first attempt to take a log over that has failed, and the longest time between two.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(8));

/// Logs that are being taken over.
#[derive(Default)]
struct Attempts(RefCell<BTreeSet<LogId>>);

/// Watches the primaries of all logs that this daemon has copies of, until the engine ends.
pub fn watch(engine: &Rc<Engine>) {
    let attempts: Rc<Attempts> = Rc::default();
    drop(spawn(watch_leases(Rc::downgrade(engine), attempts.clone())));
    drop(spawn(watch_start(Rc::downgrade(engine), attempts)));
}

async fn watch_leases(engine: Weak<Engine>, attempts: Rc<Attempts>) {
    while let Some(running) = engine.upgrade().filter(|engine| !engine.closing.get()) {
        let replicas = running.peers.replicas().clone();
        drop(running);
        let Ok(due) = timeout(LOOK, replicas.due()).await else { continue };
        // This process may have been suspended: requests that have arrived meanwhile are handled first.
        sleep(Duration::from_millis(20)).await;
        let Some(running) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
        for log in due.into_iter().filter(|log| replicas.is_due(log)) {
            attempts.start(&running, log);
        }
        drop(running);
        // Those that are being attempted are still due.
        sleep(Duration::from_millis(50)).await;
    }
}

/// Looks at the logs whose primary was not heard of since this daemon has started: all may have lost power at once.
async fn watch_start(engine: Weak<Engine>, attempts: Rc<Attempts>) {
    sleep(AFTER_START).await;
    let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
    for log in engine.peers.replicas().unheard() {
        attempts.start(&engine, log);
    }
}

impl Attempts {
    /// Attempts to take a log over, unless that is being attempted.
    fn start(self: &Rc<Self>, engine: &Rc<Engine>, log: LogId) {
        if !self.0.borrow_mut().insert(log) {
            return;
        }
        tracing::debug!(log = id_text(&log), "the primary of a log is silent");
        let (attempts, engine) = (self.clone(), Rc::downgrade(engine));
        drop(spawn(async move {
            let mut backoff = RETRY.0;
            while let Some(engine) = engine.upgrade().filter(|engine| engine.may_take_over(&log)) {
                if engine.take_over_due(&log).await {
                    break;
                }
                drop(engine);
                sleep(backoff).await;
                backoff = (2 * backoff).min(RETRY.1);
            }
            attempts.0.borrow_mut().remove(&log);
        }));
    }
}

/// Decision about a log whose primary was not heard of.
#[derive(Debug, PartialEq, Eq)]
enum TakeoverDecision {
    /// Leave it: the log is closed, or another daemon's to take over.
    Leave(&'static str),
    /// Take it over from the primary of this term, after the daemons that come first had their time.
    After(Duration, u64),
}

/// Decides about a log, as its record has it.  `own` is this daemon, and `followed` the term of its copy; it `is_served` here
/// or not; `connected` are the peers that this daemon reaches.
fn decide(
    place: &api::LogPlace,
    members: &LogMembers,
    (own, followed): (PeerId, u64),
    is_served: bool,
    connected: impl Fn(PeerId) -> bool,
) -> TakeoverDecision {
    use TakeoverDecision::{After, Leave};
    if place.takeover != Some(api::TakeoverMode::Auto) {
        return Leave("it is taken over by command");
    }
    if members.client().is_empty() {
        return Leave("its primary has closed it");
    }
    if members.primary() == own {
        // Otherwise an attempt to take over has failed after the record was stored.
        return if is_served { Leave("this daemon serves it") } else { After(Duration::ZERO, members.term()) };
    }
    let order = succession(place, members);
    let Some(rank) = order.iter().position(|peer| *peer == own) else {
        return Leave("this daemon has no complete copy");
    };
    // One that is lost as well is not waited for.
    let before = order[..rank].iter().filter(|peer| connected(**peer)).count() as u32;
    // A primary that has just opened the log is about to be heard of: the silent one was its predecessor.
    let is_new = u32::from(members.term() > followed);
    After(2 * (before + is_new) * place.policy().lease, members.term())
}

/// Returns the complete replicas in the order in which they take over: as the operator has named them, then the others.
fn succession(place: &api::LogPlace, members: &LogMembers) -> Vec<PeerId> {
    let named = place.replica_ids();
    let mut order: Vec<PeerId> = members.complete().filter(|peer| *peer != members.primary()).collect();
    order.sort_by_key(|peer| (named.iter().position(|name| name == peer).unwrap_or(usize::MAX), *peer));
    order
}

impl Engine {
    /// Returns whether the primary of a log is still silent, and this daemon runs.
    pub(super) fn may_take_over(&self, log: &LogId) -> bool {
        let replicas = self.peers.replicas();
        !self.closing.get() && (replicas.is_due(log) || replicas.unheard().contains(log))
    }

    /// Takes a log over whose primary was not heard of, if its record says so.  Returns whether there is nothing more to do.
    async fn take_over_due(&self, log: &LogId) -> bool {
        match self.try_take_over(log).await {
            Ok(None) => true,
            Ok(Some(why)) => {
                tracing::debug!(log = id_text(log), why, "not taking over a log whose primary is silent");
                // Its primary may have been heard of meanwhile.
                if self.may_take_over(log) {
                    self.peers.replicas().dismiss(log);
                }
                true
            }
            Err((_, failure)) if failure.kind == FailureKind::NotFound => {
                tracing::debug!(log = id_text(log), error = %failure.message, "a copy of a log without an image is left");
                self.peers.replicas().dismiss(log);
                true
            }
            Err((spec, failure)) => {
                tracing::warn!(
                    log = id_text(log), image = spec.map(|spec| spec.to_string()), error = %failure.message,
                    "cannot take over a log whose primary is silent; trying again while it is"
                );
                false
            }
        }
    }

    /// Takes a log over; returns why not if it is to be left.
    async fn try_take_over(
        &self,
        log: &LogId,
    ) -> std::result::Result<Option<&'static str>, (Option<ImageSpec>, Failure)> {
        let Some(spec) = self.image_of_copy(log).await.map_err(|failure| (None, failure))? else {
            return Ok(Some("its copy is gone, or no image's record names it"));
        };
        let failed = |failure| (Some(spec.clone()), failure);
        let mut waited_for = None;
        loop {
            let decision = self.decide_takeover(&spec, log).await.map_err(failed)?;
            tracing::debug!(image = %spec, ?decision, "decided about a log whose primary is silent");
            match decision {
                TakeoverDecision::Leave(why) => return Ok(Some(why)),
                TakeoverDecision::After(delay, term) if !delay.is_zero() && waited_for != Some(term) => {
                    sleep(delay).await;
                    waited_for = Some(term);
                    if !self.may_take_over(log) {
                        // Another one has taken over, or the primary is back.
                        return Ok(None);
                    }
                }
                TakeoverDecision::After(_, term) => {
                    tracing::warn!(image = %spec, term, "the primary of a write log is silent: taking the log over");
                    let request =
                        TakeoverRequest { force: true, silent: Some((*log, term)), ..TakeoverRequest::default() };
                    return self.take_over_log(&spec, request).await.map(|_| None).map_err(failed);
                }
            }
        }
    }

    /// Returns the image whose record names a log that this daemon has a copy of.  The copy has the name that the image had
    /// when the log was created, and the image may have been renamed since.
    async fn image_of_copy(&self, log: &LogId) -> Result<Option<ImageSpec>> {
        let Some(shelf) = self.peers.replicas().shelf_of(log) else { return Ok(None) };
        let info = shelf.inspect(log).await.map_err(Failure::from)?;
        let created: ImageSpec = info.name.parse().map_err(Failure::invalid)?;
        if self.is_log_of(&created, log).await? {
            return Ok(Some(created));
        }
        let mut unread = None;
        for spec in self.images_of(&created.pool).await? {
            match self.is_log_of(&spec, log).await {
                Ok(true) => return Ok(Some(spec)),
                Ok(false) => {}
                Err(failure) => unread = Some(failure),
            }
        }
        // One that cannot be read may be the one.
        unread.map_or(Ok(None), Err)
    }

    /// Returns whether the record of an image names a log; one that does not exist has none.
    async fn is_log_of(&self, spec: &ImageSpec, log: &LogId) -> Result<bool> {
        let image = match self.open_image(spec).await {
            Err(failure) if failure.kind == FailureKind::NotFound => return Ok(false),
            opened => opened?,
        };
        let record = load_record(&image).await.map_err(Failure::from)?;
        Ok(record.log.is_some_and(|named| named.id == *log))
    }

    async fn decide_takeover(&self, spec: &ImageSpec, log: &LogId) -> Result<TakeoverDecision> {
        let image = self.open_image(spec).await?;
        let record = load_record(&image).await.map_err(Failure::from)?;
        let Some(named) = record.log.filter(|named| named.id == *log) else {
            return Ok(TakeoverDecision::Leave("the image's record names it no more"));
        };
        let Some(members) = &named.members else { return Ok(TakeoverDecision::Leave("it has no replicas")) };
        let known = self.peers.known();
        let followed = match self.peers.replicas().shelf_of(log) {
            Some(shelf) => shelf.copy_of(log).await.map_err(Failure::from)?.1,
            None => return Ok(TakeoverDecision::Leave("its copy is gone")),
        };
        let connected = |peer| known.connection(peer).is_some();
        let is_served = self.volumes.find(spec).is_some_and(|volume| volume.log().is_some());
        Ok(decide(&named.place, members, (known.own(), followed.into()), is_served, connected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(number: u8) -> PeerId {
        PeerId([number; 16])
    }

    /// Returns the place and the members of a log whose primary is 1, with complete copies at 2 and 3 and a filling one at 4.
    fn log(options: &str, order: &[u8]) -> (api::LogPlace, LogMembers) {
        let place: api::LogPlace = format!("ssd:/l:16M{options}").parse().expect("a place");
        let order = order.iter().map(|number| peer(*number).to_string()).collect();
        let members = LogMembers::created(peer(1), [1; 16], "client.1 a".into());
        let with = |members: LogMembers, number: u8| members.with_filling(peer(number), [number; 16]);
        let members = with(with(with(members, 2), 3), 4);
        let members = members.with_complete(peer(2)).and_then(|members| members.with_complete(peer(3)));
        (api::LogPlace { replicas: Some(order), ..place }, members.expect("filled"))
    }

    #[test]
    fn the_first_complete_replica_that_is_reached_takes_over() {
        let (place, members) = log(":takeover=auto", &[3, 2, 4]);
        let term = members.term();
        let at = |number, connected: bool| decide(&place, &members, (peer(number), term), true, |_| connected);
        assert_eq!(at(3, true), TakeoverDecision::After(Duration::ZERO, term));
        assert_eq!(at(2, true), TakeoverDecision::After(Duration::from_secs(1), term), "two leases");
        assert_eq!(at(2, false), TakeoverDecision::After(Duration::ZERO, term), "the first is lost as well");
        // Another one has just opened the log.
        let later = members.taken_over(peer(2), [2; 16], "client.2 b".into()).expect("complete");
        let next = decide(&place, &later, (peer(3), term), true, |_| true);
        assert_eq!(next, TakeoverDecision::After(Duration::from_secs(1), later.term()));
        assert!(matches!(at(4, true), TakeoverDecision::Leave(_)), "its copy lacks writes");
        assert!(matches!(at(1, true), TakeoverDecision::Leave(_)));
        let again = decide(&place, &members, (peer(1), term), false, |_| true);
        assert_eq!(again, TakeoverDecision::After(Duration::ZERO, term), "it failed to open it");
        assert!(matches!(at(9, true), TakeoverDecision::Leave(_)));
    }

    #[test]
    fn a_log_that_is_closed_or_taken_over_by_command_is_left() {
        let (place, members) = log("", &[2]);
        assert!(matches!(decide(&place, &members, (peer(2), 1), true, |_| true), TakeoverDecision::Leave(_)));
        let (place, members) = log(":takeover=auto", &[2]);
        let closed = members.closed(String::new());
        assert!(matches!(decide(&place, &closed, (peer(2), 1), true, |_| true), TakeoverDecision::Leave(_)));
    }
}
