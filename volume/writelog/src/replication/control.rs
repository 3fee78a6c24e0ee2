//! Control loop of a primary: drops members that fail, adds those that are missing, completes those that are filled.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::{Instant, now, spawn, timeout};

use super::MemberState;
use super::copies_watch::CopiesWatch;
use super::keeper::{LogMembers, PeerId, RecordChange};
use super::member::{self, MemberLink};
use super::set::PrimarySet;
use crate::format::LogId;

/// Changes the record as members come and go, until this primary stops.
pub(super) async fn control(set: Rc<PrimarySet>) {
    let mut attempts = Attempts::default();
    let mut silence = Silence::new(&set);
    let mut copies = CopiesWatch::new(now(), 10 * set.options.patience);
    let creation = Rc::new(CopyCreation::default());
    while !set.is_over() {
        follow_members(&set);
        set.look_at_mirror();
        copies.look(&set);
        silence.look(&set);
        let lost = lost_own(&set).or_else(|| failed_member(&set)).or_else(|| silence.silent_member(&set));
        // The last complete copy is waited for: it is dropped by nobody.
        if let Some(peer) = lost.filter(|_| set.record().complete().count() > 1) {
            drop_member(&set, peer).await;
        } else if let Some(peer) = filled_member(&set) {
            complete_member(&set, peer).await;
        } else if let Some(peer) = unwanted_member(&set) {
            remove_member(&set, peer).await;
        } else if let Some((peer, created)) = creation.take_ended() {
            let added = add_member(&set, peer, created).await;
            attempts.note(peer, added, set.options.retry);
        } else {
            if creation.is_idle()
                && let Some(peer) = missing_member(&set, &attempts)
            {
                creation.start(&set, peer);
            }

            let _ = timeout(silence.interval, set.attention.wait()).await;
        }
    }
    set.links.borrow().values().for_each(|link| link.end());
}

/// Attempts to create copies at peers that failed.
#[derive(Default)]
struct Attempts(BTreeMap<PeerId, (Instant, Duration)>);

impl Attempts {
    /// Notes an attempt.  After one that failed, the next has to wait, the longer the more have failed.
    fn note(&mut self, peer: PeerId, succeeded: bool, retry: Duration) {
        if succeeded {
            self.0.remove(&peer);
            return;
        }
        let wait = self.0.get(&peer).map_or(10 * retry, |(_, wait)| (2 * *wait).min(600 * retry));
        self.0.insert(peer, (now(), wait));
    }

    /// Returns whether a peer may be asked now.
    fn may_ask(&self, peer: PeerId) -> bool {
        self.0.get(&peer).is_none_or(|(at, wait)| at.elapsed() > *wait)
    }
}

/// Silence of replicas: none is heard of for a time, although it is asked for its promise again and again.
struct Silence {
    interval: Duration,
    looked: Instant,
    counts: BTreeMap<PeerId, u32>,
}

/// Returns the longest time between two turns of the control loop.
fn look_interval(set: &PrimarySet) -> Duration {
    set.options.retry.min(set.lease_length / 8)
}

impl Silence {
    fn new(set: &PrimarySet) -> Self {
        Self { interval: look_interval(set), looked: now(), counts: BTreeMap::new() }
    }

    /// Counts the replicas that were not heard of, once per interval.
    fn look(&mut self, set: &PrimarySet) {
        if self.looked.elapsed() >= self.interval {
            self.looked = now();
            let links = set.links.borrow();
            self.counts = links.iter().map(|(peer, link)| (*peer, link.count_silence())).collect();
        }
    }

    /// Returns a complete member that was silent for too long.  Where replicas take over by themselves, it is dropped before
    /// its promise is over: otherwise every failure of a network between the two would end in a takeover.
    fn silent_member(&self, set: &PrimarySet) -> Option<PeerId> {
        let (links, automatic) = (set.links.borrow(), set.keeper.policy().automatic);
        let is_silent = |peer: &PeerId| {
            // One that has promised nothing yet takes over from a former primary at most, and may have to open its copy.
            let promised = links.get(peer).is_some_and(|link| link.has_promised());
            let limit = if automatic && promised { set.lease_length * 5 / 8 } else { set.options.patience };
            self.counts.get(peer).is_some_and(|count| self.interval * *count >= limit)
        };
        set.replicas().into_iter().find(is_silent)
    }
}

/// Starts a link to each member that has none, and ends those of peers that are no members any more.
fn follow_members(set: &Rc<PrimarySet>) {
    let record = set.record();
    let mut links = set.links.borrow_mut();
    links.retain(|peer, link| {
        let kept = record.copy(*peer) == Some(link.copy);
        if !kept {
            link.end();
        }
        kept
    });
    for (peer, entry) in record.members().filter(|(peer, _)| *peer != set.own) {
        links.entry(peer).or_insert_with(|| {
            let link = Rc::new(MemberLink::new(peer, entry.copy));
            drop(spawn(member::run(set.clone(), link.clone())));
            link
        });
    }
}

/// Returns the primary itself if its medium has failed, and a complete replica has made progress since: one whose medium
/// has failed as well must not be the last copy.
fn lost_own(set: &PrimarySet) -> Option<PeerId> {
    let lost = set.local_lost_at().filter(|_| set.record().state(set.own).is_some())?;
    let links = set.links.borrow();
    let lives = |peer: PeerId| links.get(&peer).is_some_and(|link| link.progressed_since(lost));
    set.replicas().into_iter().any(lives).then_some(set.own)
}

/// Returns a complete member that has made no progress for too long, or whose copy is lost.
fn failed_member(set: &PrimarySet) -> Option<PeerId> {
    let links = set.links.borrow();
    let failed = |peer: &PeerId| {
        links.get(peer).is_some_and(|link| {
            let waits = link.waits_since(set).is_some_and(|since| since.elapsed() > set.options.patience);
            link.is_lost() || waits
        })
    };
    set.replicas().into_iter().find(failed)
}

/// Returns a member that has been filled.
fn filled_member(set: &PrimarySet) -> Option<PeerId> {
    let links = set.links.borrow();
    let record = set.record();
    record
        .members()
        .filter(|(_, entry)| entry.state == MemberState::Filling)
        .map(|(peer, _)| peer)
        .find(|peer| links.get(peer).is_some_and(|link| link.has_caught_up(set)))
}

/// Returns a peer that is to have a copy and has none, or has lost it, if it can be reached and was not asked recently.
fn missing_member(set: &PrimarySet, attempts: &Attempts) -> Option<PeerId> {
    // A log in memory that has lost its last replica is given up.
    if !set.progress.borrow().serves() || set.mirror.is_lost() {
        return None;
    }
    let record = set.record();
    let links = set.links.borrow();
    let lacks = |peer: &PeerId| match record.state(*peer) {
        None => true,
        Some(MemberState::Filling) => links.get(peer).is_some_and(|link| link.is_lost()),
        Some(MemberState::Complete) => false,
    };
    let may = |peer: &PeerId| {
        *peer != set.own && lacks(peer) && attempts.may_ask(*peer) && set.keeper.connection(*peer).is_some()
    };
    set.keeper.wanted().into_iter().find(may)
}

/// Returns a replica that is not to have a copy any more.  It is kept while a wanted one is being filled.
fn unwanted_member(set: &PrimarySet) -> Option<PeerId> {
    if !set.progress.borrow().serves() {
        return None;
    }
    let (record, wanted) = (set.record(), set.keeper.wanted());
    let filled = wanted.iter().all(|peer| *peer == set.own || record.state(*peer) == Some(MemberState::Complete));
    let unwanted = |peer: &PeerId| *peer != set.own && !wanted.contains(peer);
    let is_filling = |peer: &PeerId| record.state(*peer) == Some(MemberState::Filling);
    record.members().map(|(peer, _)| peer).find(|peer| unwanted(peer) && (filled || is_filling(peer)))
}

async fn remove_member(set: &Rc<PrimarySet>, peer: PeerId) {
    tracing::info!(peer = %peer, log = crate::id_text(&set.identity.log), "removing a replica that is not wanted any more");
    let proposed = set.progress.borrow_mut().propose_without(peer).cloned();
    match proposed {
        Ok(next) => {
            change(set, next).await;
            if set.record().state(peer).is_none() && set.stopped().is_none() {
                follow_members(set);
                set.discard_copy(peer).await;
            }
        }
        Err(error) => tracing::error!(%error, "cannot remove a replica of a write log"),
    }
}

async fn drop_member(set: &Rc<PrimarySet>, peer: PeerId) {
    let why = if peer == set.own { "its medium has failed" } else { "it does not answer" };
    tracing::warn!(%peer, log = crate::id_text(&set.identity.log), why, "dropping a copy of a write log");
    let proposed = set.progress.borrow_mut().propose_without(peer).cloned();
    match proposed {
        Ok(next) => change(set, next).await,
        Err(error) => tracing::error!(%error, "cannot drop a replica of a write log"),
    }
}

async fn complete_member(set: &Rc<PrimarySet>, peer: PeerId) {
    // Entries that were appended since are on their way to it, and are not acknowledged without it from here on.
    let proposed = set.progress.borrow_mut().propose_complete(peer).cloned();
    match proposed {
        Ok(next) => {
            tracing::info!(peer = %peer, log = crate::id_text(&set.identity.log), "a replica has all of the write log");
            change(set, next).await;
        }
        Err(_) => {
            let _ = timeout(look_interval(set), set.attention.wait()).await;
        }
    }
}

/// Creation of a copy at a peer, which may take long: members are watched meanwhile.
#[derive(Default)]
struct CopyCreation(RefCell<Option<(PeerId, Option<Result<LogId>>)>>);

impl CopyCreation {
    fn is_idle(&self) -> bool {
        self.0.borrow().is_none()
    }

    fn start(self: &Rc<Self>, set: &Rc<PrimarySet>, peer: PeerId) {
        self.0.replace(Some((peer, None)));
        let (creation, set) = (self.clone(), set.clone());
        drop(spawn(async move {
            let created = match timeout(10 * set.options.patience, member::create(&set, peer)).await {
                Ok(created) => created,
                Err(_) => Err(Error::new(ErrorKind::TimedOut, "no answer")),
            };
            creation.0.replace(Some((peer, Some(created))));
            set.attention.notify_all();
        }));
    }

    /// Returns the outcome of a creation that has ended, once.
    fn take_ended(&self) -> Option<(PeerId, Result<LogId>)> {
        let mut creation = self.0.borrow_mut();
        match creation.take() {
            Some((peer, Some(created))) => Some((peer, created)),
            other => {
                *creation = other;
                None
            }
        }
    }
}

/// Adds a peer whose copy was created as a member that is being filled; returns whether that has succeeded.
async fn add_member(set: &Rc<PrimarySet>, peer: PeerId, created: Result<LogId>) -> bool {
    match created {
        Ok(copy) => {
            // The peers that are to have copies may have changed meanwhile.
            if set.record().state(peer) == Some(MemberState::Complete) || !set.keeper.wanted().contains(&peer) {
                return true;
            }
            tracing::info!(%peer, log = crate::id_text(&set.identity.log), "filling a copy of a write log at a peer");
            let next = set.progress.borrow_mut().propose_filling(peer, copy).clone();
            change(set, next).await;
            true
        }
        Err(error) if error.kind() == ErrorKind::Fenced => {
            set.stop(error);
            false
        }
        Err(error) => {
            tracing::warn!(peer = %peer, %error, "cannot create a copy of a write log at a peer; trying again");
            false
        }
    }
}

/// Stores a proposed record, until it is known whether it was stored.
async fn change(set: &Rc<PrimarySet>, next: LogMembers) {
    let mut backoff = set.options.retry;
    while set.stopped().is_none() {
        match set.keeper.change(set.record(), next.clone()).await {
            Ok(RecordChange::Changed) => {
                set.learn(&next);
                return;
            }
            // An earlier attempt may have been stored although it seemed to fail.
            Ok(RecordChange::Other(Some(record))) if record == next => {
                set.learn(&next);
                return;
            }
            Ok(RecordChange::Other(Some(record))) => {
                if set.learn(&record) {
                    tracing::error!("the members of a write log were changed by another program");
                }
                return;
            }
            Ok(RecordChange::Other(None)) => {
                set.stop(Error::new(ErrorKind::Fenced, "the record of the image names this write log no more"));
                return;
            }
            Err(error) if error.kind() == ErrorKind::Fenced => {
                // A takeover, or another image of this client: either way nothing of it reaches the backend any more.
                set.stop(error);
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot store the members of a write log, trying again");
                let _ = timeout(backoff, set.changed.wait_until(|| set.stopped().is_some())).await;
                backoff = (2 * backoff).min(10 * set.options.retry);
            }
        }
    }
}
