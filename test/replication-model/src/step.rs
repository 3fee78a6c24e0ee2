//! Events that may happen in a state, and the states that follow.

use forebay_writelog::replication::{LeasePromise, MemberState, PrimaryLease, PrimaryProgress};

use crate::backend::{BackendOp, NOBODY, Record};
use crate::model::{LEASE, ModelAction, ModelState, Omission, ReplicationModel, is_complete};
use crate::peer::{Disk, Message, Opening, PeerRole, PeerState, Serving};

/// Lists what may happen.
pub(crate) fn actions(model: &ReplicationModel, state: &ModelState, actions: &mut Vec<ModelAction>) {
    use ModelAction::*;
    let limits = &model.limits;
    let record = &state.backend.record;
    let may_change = |epoch| limits.may_change(epoch);
    match state.pending {
        Some((peer, number)) => {
            match &state.peers[peer as usize].role {
                PeerRole::Primary(serving) if number < acknowledgeable(model, serving, &state.peers[peer as usize]) => {
                    actions.push(Acknowledge);
                }
                _ => {}
            }
            if !state.is_current(peer) {
                actions.push(GiveUp);
            }
        }
        None if state.next <= limits.writes => {
            actions.extend((0..limits.peers).filter(|peer| serves(model, &state.peers[*peer as usize])).map(Write));
        }
        None => {}
    }
    actions.extend(state.messages.iter().cloned().map(Deliver));
    actions.extend(state.backend.ops.iter().cloned().map(Apply));
    if state.now < limits.time {
        actions.push(Tick);
    }
    for (at, peer) in state.peers.iter().enumerate() {
        let at = at as u8;
        if state.media < limits.media && peer.role == PeerRole::Idle && record.copy(at) == Some(peer.disk.copy.id()) {
            actions.push(MediumFails(at));
        }
        if state.crashes < limits.crashes && peer.role != PeerRole::Idle {
            actions.push(Crash(at));
        }
        match &peer.role {
            PeerRole::Idle if may_change(record.epoch()) && opened(model, record, peer, at).is_some() => {
                let promised = model.omission != Some(Omission::PromiseBroken) && !peer.promise.is_over(state.now);
                if !peer.disk.failed && (record.primary() == at || !promised) {
                    actions.push(Open(at));
                }
            }
            PeerRole::Idle => {}
            PeerRole::Opening(opening) => {
                if state.backend.fenced.contains(&(at, peer.starts)) {
                    actions.push(NoticeFence(at));
                }
                match (opening.fenced, opening.sent) {
                    (false, _) => actions.push(Fence(at)),
                    (true, false) => actions.push(SendOpening(at)),
                    (true, true) => {}
                }
                if record.epoch() > opening.seen.epoch() {
                    actions.push(ReadRecord(at));
                }
            }
            PeerRole::Primary(serving) => {
                let own = &serving.progress;
                if state.backend.fenced.contains(&(at, peer.starts)) {
                    actions.push(NoticeFence(at));
                }
                if limits.time > 0 {
                    actions.push(AskLease(at));
                    let others = own.record().complete().filter(|member| *member != at);
                    if serves(model, peer) && serving.lease.is_valid(state.now, others) {
                        actions.push(Read(at));
                    }
                }
                if !peer.disk.failed && peer.disk.copy.log().head() < serving.log.head() {
                    actions.push(Persist(at));
                }
                if record.epoch() > own.record().epoch() {
                    actions.push(ReadRecord(at));
                }
                if own.proposed().is_none() && may_change(own.record().epoch()) {
                    for other in (0..limits.peers).filter(|other| *other != at || peer.disk.failed) {
                        match own.record().state(other) {
                            Some(MemberState::Complete) => actions.push(Drop(at, other)),
                            Some(MemberState::Filling) => actions.push(Complete(at, other)),
                            None if other != at => actions.push(Fill(at, other)),
                            None => {}
                        }
                    }
                }
                let is_write =
                    |op: &BackendOp| matches!(op, BackendOp::Write { client, .. } if *client == (at, peer.starts));
                let written = !state.backend.ops.iter().any(is_write);
                if state.closes < limits.closes
                    && may_change(own.record().epoch())
                    && own.serves()
                    && own.proposed().is_none()
                    && (written || model.omission == Some(Omission::ClosedBeforeWritten))
                {
                    actions.push(Close(at));
                }
                if serving.writing.is_none() && serving.written < serving.log.head() {
                    actions.push(WriteBack(at));
                }
                if !peer.disk.failed && peer.disk.copy.log().tail() < serving.written {
                    actions.push(Retire(at));
                }
                if state.media < limits.media && !peer.disk.failed && own.serves() {
                    actions.push(MediumFails(at));
                }
            }
        }
    }
}

/// Applies what happens; `None` where it makes no difference.
pub(crate) fn apply(model: &ReplicationModel, state: &mut ModelState, action: ModelAction) -> Option<()> {
    match action {
        ModelAction::Write(peer) => {
            let value = state.next;
            state.next += 1;
            let serving = primary(state, peer)?;
            let number = serving.log.head();
            serving.log.push(serving.progress.record().term(), 1);
            serving.values.push(value);
            state.pending = Some((peer, number));
            send_entries(state, peer, None, number);
        }
        ModelAction::GiveUp => state.pending = None,
        ModelAction::Acknowledge => {
            let (peer, number) = state.pending.take()?;
            let value = primary(state, peer)?.values[number as usize];
            state.known = state.known.max(value);
        }
        ModelAction::Persist(peer) => persist(state, peer)?,
        ModelAction::Deliver(message) => deliver(model, state, message)?,
        ModelAction::Apply(op) => apply_op(model, state, op)?,
        ModelAction::Crash(peer) => {
            state.crashes += 1;
            let time = model.limits.time > 0;
            let promise = if time { LeasePromise::after_start(state.now, LEASE) } else { LeasePromise::default() };
            let peer = &mut state.peers[peer as usize];
            peer.starts += 1;
            (peer.role, peer.promise) = (PeerRole::Idle, promise);
        }
        ModelAction::NoticeFence(peer) => {
            let peer = &mut state.peers[peer as usize];
            peer.starts += u8::from(model.omission != Some(Omission::FencedForGood));
            peer.role = PeerRole::Idle;
        }
        ModelAction::Tick => state.now += 1,
        ModelAction::AskLease(peer) => {
            let sent = state.now;
            let serving = primary(state, peer)?;
            let term = serving.progress.record().term();
            for to in others(serving, peer) {
                state.messages.insert(Message::AskLease { to, term, sent });
            }
        }
        ModelAction::Read(peer) => {
            let serving = primary(state, peer)?;
            let newest =
                serving.progress.published().checked_sub(1).map_or(0, |number| serving.values[number as usize]);
            let found = newest.max(state.backend.value);
            if newest < state.known && state.backend.value < state.known {
                state.violation = Some("a read does not see what was acknowledged");
            }
            state.known = state.known.max(found);
        }
        ModelAction::MediumFails(peer) => {
            state.media += 1;
            match primary(state, peer) {
                Some(serving) => {
                    serving.progress.lost(peer);
                    state.peers[peer as usize].disk.failed = true;
                }
                None => state.peers[peer as usize].disk = Disk::blank(100 + state.media),
            }
        }
        ModelAction::Open(peer) => {
            let seen = state.backend.record.clone();
            state.peers[peer as usize].role = PeerRole::Opening(Opening { seen, fenced: false, sent: false });
        }
        ModelAction::Fence(peer) => {
            let fences = model.omission != Some(Omission::NotFenced);
            let PeerRole::Opening(opening) = &mut state.peers[peer as usize].role else { return None };
            opening.fenced = true;
            if fences {
                let client = *opening.seen.client();
                state.backend.fenced.insert(client);
            }
        }
        ModelAction::SendOpening(peer) => {
            let client = (peer, state.peers[peer as usize].starts);
            let PeerRole::Opening(opening) = &state.peers[peer as usize].role else { return None };
            let (expected, seen) = (opening.seen.epoch(), opening.seen.clone());
            let record = opened(model, &seen, &state.peers[peer as usize], peer)?;
            let PeerRole::Opening(opening) = &mut state.peers[peer as usize].role else { return None };
            opening.sent = true;
            state.backend.ops.insert(BackendOp::Change { client, expected, record });
        }
        ModelAction::ReadRecord(peer) => read_record(state, peer)?,
        ModelAction::Drop(peer, member) => {
            let early = model.omission == Some(Omission::DroppedBeforeRecord);
            let progress = &mut primary(state, peer)?.progress;
            let record = progress.propose_without(member).ok()?.clone();
            if early {
                progress.learned(&record);
            }
            send_change(state, peer, record);
        }
        ModelAction::Fill(peer, other) => {
            let copy = state.peers[other as usize].disk.copy.id();
            let record = primary(state, peer)?.progress.propose_filling(other, copy).clone();
            send_change(state, peer, record);
        }
        ModelAction::Complete(peer, other) => {
            let early = model.omission == Some(Omission::CompleteBeforeFilled);
            let progress = &mut primary(state, peer)?.progress;
            let record = match early {
                true => progress.record().with_complete(other).ok()?,
                false => progress.propose_complete(other).ok()?.clone(),
            };
            send_change(state, peer, record);
        }
        ModelAction::Close(peer) => {
            state.closes += 1;
            let record = primary(state, peer)?.progress.record().closed(NOBODY);
            send_change(state, peer, record);
            state.peers[peer as usize].role = PeerRole::Idle;
        }
        ModelAction::WriteBack(peer) => {
            let waits = model.omission != Some(Omission::RetirementNotAwaited);
            let client = (peer, state.peers[peer as usize].starts);
            let serves = serves(model, &state.peers[peer as usize]);
            let serving = primary(state, peer)?;
            let number = serving.written;
            let allowed = match waits {
                true => serves && serving.progress.may_write_back(number, number + 1),
                false => serves && number < serving.progress.published(),
            };
            if !allowed {
                return None;
            }
            serving.writing = Some(number);
            let (term, value) = (serving.progress.record().term(), serving.values[number as usize]);
            state.backend.ops.insert(BackendOp::Write { client, term, number, value });
        }
        ModelAction::Retire(peer) => {
            let serving = primary(state, peer)?;
            let (term, tail) = (serving.progress.record().term(), serving.written);
            let disk = &mut state.peers[peer as usize].disk;
            disk.copy.retire(term, tail).ok()?;
            let (copy, head) = (disk.copy.id(), disk.copy.log().head());
            let serving = primary(state, peer)?;
            serving.log.retire(tail);
            serving.progress.persisted(peer, copy, head, tail);
            for to in others(serving, peer) {
                state.messages.insert(Message::Retire { to, term, tail });
            }
        }
    }
    Some(())
}

/// Returns the number of the first entry that must not be acknowledged.
fn acknowledgeable(model: &ReplicationModel, serving: &Serving, peer: &PeerState) -> u64 {
    match model.omission {
        Some(Omission::AcknowledgedByPrimaryAlone) => peer.disk.copy.log().head(),
        _ => serving.progress.published(),
    }
}

/// Returns whether a peer serves hosts.
fn serves(model: &ReplicationModel, peer: &PeerState) -> bool {
    let PeerRole::Primary(serving) = &peer.role else { return false };
    serving.progress.serves() || model.omission == Some(Omission::ServedBeforeReconciled)
}

/// Returns the record after a peer has opened the log or taken it over, where it may.
fn opened(model: &ReplicationModel, record: &Record, state: &PeerState, peer: u8) -> Option<Record> {
    let client = (peer, state.starts);
    let copy = match model.omission {
        Some(Omission::BlankMediumTrusted) => record.copy(peer).unwrap_or_default(),
        _ => state.disk.copy.id(),
    };
    if record.primary() == peer {
        return record.opened(peer, copy, client).ok();
    }
    let taken = match model.omission {
        Some(Omission::TakenOverByAnyone) if !is_complete(record, peer) => {
            let filled = record.with_filling(peer, copy).with_complete(peer);
            filled.and_then(|record| record.taken_over(peer, copy, client))
        }
        _ => record.taken_over(peer, copy, client),
    };
    taken.ok()
}

fn primary(state: &mut ModelState, peer: u8) -> Option<&mut Serving> {
    match &mut state.peers[peer as usize].role {
        PeerRole::Primary(serving) => Some(serving),
        _ => None,
    }
}

/// Returns the peers that a primary sends entries to.
fn others(serving: &Serving, peer: u8) -> Vec<u8> {
    serving.progress.record().members().map(|(member, _)| member).filter(|member| *member != peer).collect()
}

/// Sends a change of the record to the backend.
fn send_change(state: &mut ModelState, peer: u8, record: Record) {
    let client = (peer, state.peers[peer as usize].starts);
    let expected = record.epoch() - 1;
    state.backend.ops.insert(BackendOp::Change { client, expected, record });
}

/// Asks all members to follow a primary.
fn send_adopt(state: &mut ModelState, peer: u8) -> Option<()> {
    let serving = primary(state, peer)?;
    let (term, base) = (serving.progress.record().term(), serving.log.clone());
    let members: Vec<_> = serving.progress.record().members().filter(|(to, _)| *to != peer).collect();
    for (to, member) in members {
        state.messages.insert(Message::Adopt { to, term, copy: member.copy, base: base.clone() });
    }
    Some(())
}

/// Sends the entries from a number on, to one peer or to all.
fn send_entries(state: &mut ModelState, peer: u8, to: Option<u8>, from: u64) -> Option<()> {
    let serving = primary(state, peer)?;
    let term = serving.progress.record().term();
    let mut messages = Vec::new();
    for to in others(serving, peer).into_iter().filter(|other| to.is_none_or(|to| to == *other)) {
        for number in from.max(serving.log.tail())..serving.log.head() {
            let entry_term = serving.log.term_of(number).expect("between tail and head");
            messages.push(Message::Append { to, term, number, entry_term, value: serving.values[number as usize] });
        }
    }
    state.messages.extend(messages);
    Some(())
}

/// Makes one more entry durable on the primary's own medium.
fn persist(state: &mut ModelState, at: u8) -> Option<()> {
    let PeerState { disk, role: PeerRole::Primary(serving), .. } = &mut state.peers[at as usize] else { return None };
    let (term, number) = (serving.progress.record().term(), disk.copy.log().head());
    disk.copy.append(term, number, serving.log.term_of(number)?, 1).ok()?;
    disk.values.push(serving.values[number as usize]);
    serving.progress.persisted(at, disk.copy.id(), number + 1, disk.copy.log().tail());
    Some(())
}

/// Takes what the record says now.
fn read_record(state: &mut ModelState, at: u8) -> Option<()> {
    let record = state.backend.record.clone();
    let peer = &mut state.peers[at as usize];
    let client = (at, peer.starts);
    match &mut peer.role {
        PeerRole::Opening(opening) if opening.sent && record.primary() == at && *record.client() == client => {
            // The term is durable before anybody is asked to follow.
            let own = peer.disk.copy.log().clone();
            peer.disk.copy.adopt(record.term(), peer.disk.copy.id(), &own).ok()?;
            let (log, values) = (own.clone(), peer.disk.values.clone());
            let written = own.tail();
            let progress = PrimaryProgress::new(record, own);
            let lease = PrimaryLease::new(LEASE);
            let serving = Serving { progress, log, values, writing: None, written, lease };
            peer.role = PeerRole::Primary(Box::new(serving));
            send_adopt(state, at)
        }
        PeerRole::Opening(_) => {
            peer.role = PeerRole::Idle;
            Some(())
        }
        PeerRole::Primary(serving) => {
            if !serving.progress.learned(&record) {
                peer.role = PeerRole::Idle;
                return Some(());
            }
            send_adopt(state, at)
        }
        PeerRole::Idle => None,
    }
}

/// Delivers a message.
fn deliver(model: &ReplicationModel, state: &mut ModelState, message: Message) -> Option<()> {
    match message {
        Message::Holds { from, term, copy, head, tail } => {
            let to = primary_of(state, term)?;
            let serving = primary(state, to)?;
            serving.progress.persisted(from, copy, head, tail);
            send_entries(state, to, Some(from), head);
        }
        Message::AskLease { to, term, sent } => {
            let now = state.now;
            let peer = follower(state, to, term)?;
            if peer.disk.copy.term() != term {
                return None;
            }
            peer.promise.extend(now, LEASE);
            state.messages.insert(Message::GrantLease { from: to, term, sent });
        }
        Message::GrantLease { from, term, sent } => {
            let to = primary_of(state, term)?;
            primary(state, to)?.lease.granted(from, sent);
        }
        Message::Adopt { to, term, copy, ref base } => {
            let peer = follower(state, to, term)?;
            let trusted = model.omission == Some(Omission::BlankMediumTrusted);
            let copy = if trusted { peer.disk.copy.id() } else { copy };
            peer.disk.copy.adopt(term, copy, base).ok()?;
            peer.disk.cut();
            answer(state, to, term);
        }
        Message::Append { to, term, number, entry_term, value } => {
            let accepts_former = model.omission == Some(Omission::FormerTermAccepted);
            let peer = follower(state, to, term)?;
            let term_now = if accepts_former { peer.disk.copy.term() } else { term };
            if peer.disk.copy.append(term_now, number, entry_term, 1).ok()? > 0 {
                return None;
            }
            peer.disk.values.push(value);
            answer(state, to, term);
        }
        Message::Retire { to, term, tail } => {
            let peer = follower(state, to, term)?;
            peer.disk.copy.retire(term, tail).ok()?;
            answer(state, to, term);
        }
    }
    Some(())
}

/// Returns the primary of a term, while its process runs.
fn primary_of(state: &ModelState, term: u64) -> Option<u8> {
    let is_primary = |peer: &PeerState| match &peer.role {
        PeerRole::Primary(serving) => serving.progress.record().term() == term,
        _ => false,
    };
    state.peers.iter().position(is_primary).map(|at| at as u8)
}

/// Returns a peer that takes messages of a primary; a primary of an earlier term stops with the first of them.
fn follower(state: &mut ModelState, to: u8, term: u64) -> Option<&mut PeerState> {
    let peer = &mut state.peers[to as usize];
    match &peer.role {
        PeerRole::Idle => {}
        PeerRole::Primary(serving) if serving.progress.record().term() < term => peer.role = PeerRole::Idle,
        _ => return None,
    }
    (!peer.disk.failed).then_some(peer)
}

fn answer(state: &mut ModelState, from: u8, term: u64) {
    let log = state.peers[from as usize].disk.copy.log();
    let (copy, head, tail) = (state.peers[from as usize].disk.copy.id(), log.head(), log.tail());
    state.messages.insert(Message::Holds { from, term, copy, head, tail });
}

/// Applies an operation at the backend.
fn apply_op(model: &ReplicationModel, state: &mut ModelState, op: BackendOp) -> Option<()> {
    state.backend.ops.remove(&op);
    if state.backend.fenced.contains(&op.client()) {
        return Some(());
    }
    match op {
        BackendOp::Change { expected, record, .. } => {
            let unconditional = model.omission == Some(Omission::RecordSetUnconditionally);
            if state.backend.record.epoch() == expected || unconditional {
                state.backend.record = record;
            }
        }
        BackendOp::Write { client, term, number, value } => {
            if term != state.backend.record.term() {
                state.violation = Some("a primary of a former term writes to the backend");
            } else if value < state.backend.value {
                state.violation = Some("the backend goes back in time");
            }
            state.backend.value = value;
            let peer = &mut state.peers[client.0 as usize];
            if let PeerRole::Primary(serving) = &mut peer.role
                && peer.starts == client.1
                && serving.writing == Some(number)
            {
                serving.writing = None;
                serving.written = number + 1;
            }
        }
    }
    Some(())
}
