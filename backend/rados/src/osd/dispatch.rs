//! Dispatch of requests to OSDs, and handling of replies.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, Result};
use forebay_messenger::Message;
use forebay_reactor::{Buf, BufList, wall_clock};

use super::placement::{PgTarget, hobject};
use super::session::OsdSession;
use super::wire::{self, Envelope, OsdReply, flag, kind};
use super::{InFlightOp, Objecter, blocklisted};
use crate::error::errno;
use crate::map::{Epoch, OsdMap};
use crate::monitor::FEATURES;

/// Message priority of client operations, as used by Ceph's clients.
const PRIORITY: u16 = 63;
/// Maximum number of redirects per request.
const REDIRECTS_MAX: u32 = 8;

/// Meaning of a reply to the current attempt of a request.
enum Taken {
    /// Reply for the caller; the request's object and pool.
    Answer(ObjectName, i64),
    /// Request to be sent to another target.
    Redirected,
    /// Request with more redirects than allowed; its object.
    RedirectLoop(ObjectName),
}

impl Objecter {
    /// Locates the OSD of an unsent request, and sends it if possible.
    pub(super) fn dispatch(self: &Rc<Self>, tid: u64) {
        let Some(map) = self.map() else { return };
        let Some(located) = self.ops.with_mut(tid, |op| self.locate(&map, op)) else { return };
        match located {
            Err(error) => self.answer(tid, Err(error)),
            Ok(Some(osd)) => self.send(&map, tid, osd),
            Ok(None) => {}
        }
    }

    /// Sends a request on the session of its OSD, if that can accept it now.
    pub(super) fn send(self: &Rc<Self>, map: &OsdMap, tid: u64, osd: i32) {
        let mut sessions = self.sessions.borrow_mut();
        let session = sessions.entry(osd).or_insert_with(|| OsdSession::open(self, map, osd));
        if !session.takes() {
            return;
        }
        self.ops.with_mut(tid, |op| {
            let Some(target) = op.target.clone() else { return };
            if session.holds_back(&target, || hobject(op, &target)) {
                return;
            }
            op.attempts += 1;
            op.sent_epoch = map.epoch;
            let message = self.message(map.epoch, tid, op, &target);
            op.sent = session.post(self, osd, message);
        });
    }

    pub(super) fn message(&self, epoch: Epoch, tid: u64, op: &InFlightOp, target: &PgTarget) -> Message {
        let request = &op.request;
        let mut flags = request.flags | flag::ON_DISK;
        if op.attempts > 1 {
            flags |= flag::RETRY;
        }
        let (namespace, name, key) = match &op.redirect {
            None => (request.object.namespace(), request.object.name(), ""),
            Some(to) => {
                flags |= flag::REDIRECTED | flag::IGNORE_CACHE | flag::IGNORE_OVERLAY;
                (to.namespace.as_str(), to.name_or(request.object.name()), to.key.as_str())
            }
        };
        let time = wall_clock();
        let snaps: Vec<u64>;
        let (snap_seq, snaps) = match &request.snapc {
            Some(snapc) => {
                snaps = snapc.snaps.iter().map(|snap| snap.0).collect();
                (snapc.seq, snaps.as_slice())
            }
            None => (0, [].as_slice()),
        };
        let envelope = Envelope {
            pg: target.pg,
            shard: target.shard,
            hash: op.hash,
            epoch,
            flags,
            client: self.ticket_store.global_id(),
            tid,
            time: if flags & flag::WRITE == 0 { (0, 0) } else { (time.as_secs() as u32, time.subsec_nanos()) },
            pool: target.pg.pool,
            namespace,
            name,
            key,
            snap: request.snap,
            snap_seq,
            snaps,
            attempt: op.attempts - 1,
            features: FEATURES,
        };
        let front = wire::request(&envelope, &request.ops);
        let mut data = BufList::new();
        for op in &request.ops {
            if !op.data.is_empty() {
                data.append(op.data.clone());
            }
        }
        let mut message = Message::new(kind::OSD_OP).front(Buf::copy_of(&front)).data(data).priority(PRIORITY);
        (message.version, message.compat_version) = (8, 3);
        message.tid = tid;
        message
    }

    pub(super) fn answer(&self, tid: u64, result: Result<OsdReply>) {
        if let Some(op) = self.ops.remove(tid) {
            op.answer.send(result);
        }
    }

    /// Handles a reply of an OSD.
    pub(super) fn take_reply(self: &Rc<Self>, osd: i32, tid: u64, reply: OsdReply) {
        let taken = self.ops.with_mut(tid, |op| {
            let ours = op.sent && op.target.as_ref().is_some_and(|target| target.mapping.primary == osd);
            if !ours || (reply.attempt >= 0 && reply.attempt != op.attempts - 1) {
                // Reply to an abandoned attempt; the reply to the current one is still to come.
                return None;
            }
            let Some(to) = reply.redirect.clone() else {
                return Some(Taken::Answer(op.request.object.clone(), op.request.pool));
            };
            op.redirects += 1;
            if op.redirects > REDIRECTS_MAX {
                return Some(Taken::RedirectLoop(op.request.object.clone()));
            }
            tracing::debug!(osd, pool = to.pool, object = %op.request.object, "a request is redirected");
            (op.redirect, op.sent) = (Some(to), false);
            Some(Taken::Redirected)
        });
        let (object, pool) = match taken.flatten() {
            Some(Taken::Answer(object, pool)) => (object, pool),
            Some(Taken::Redirected) => return self.dispatch(tid),
            Some(Taken::RedirectLoop(object)) => {
                let text = format!("object {object}: more than {REDIRECTS_MAX} redirects");
                return self.answer(tid, Err(Error::new(ErrorKind::Io, text)));
            }
            None => return,
        };
        self.rejections.mark_in_use(pool);
        if reply.result == -errno::ESHUTDOWN {
            self.fenced.set(true);
            self.changed.notify_all();
            self.answer(tid, Err(blocklisted(&object)));
            return;
        }
        self.answer(tid, Ok(reply));
    }

    /// Sends unsent requests in order, of all OSDs or of one.
    pub(super) fn send_waiting(self: &Rc<Self>, osd: Option<i32>) {
        let waits = |op: &InFlightOp| {
            let primary = op.target.as_ref().map(|target| target.mapping.primary);
            !op.sent && (osd.is_none() || osd == primary)
        };
        for tid in self.ops.filter_map(|tid, op| waits(op).then_some(tid)) {
            self.dispatch(tid);
        }
    }

    /// Marks requests sent to an OSD as unsent, so that they are resent.
    pub(super) fn unsend(&self, osd: i32, which: impl Fn(&InFlightOp, &PgTarget) -> bool) {
        self.ops.for_each_mut(|op| {
            if let Some(target) = &op.target
                && target.mapping.primary == osd
                && which(op, target)
            {
                op.sent = false;
            }
        });
    }
}
