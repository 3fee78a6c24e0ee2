//! Protocol of an image's exclusive lock, without I/O: reactions to notifications, and the handling of a lock held by
//! another client.
//!
//! ```text
//!           a write               got it             caught up
//! Unlocked ----------> Acquiring ---------> Opening -----------> Locked
//!    ^                     | failed            | failed             | another client requests it; the image is closed
//!    |<--------------------+<------------------+                    v
//!    +----------------------------------------------------------- Releasing
//!                         given up, or lost
//! ```

use forebay_block::Watcher;

use crate::wire::lock::{LockInfo, Locker, TAG, watch_of};
use crate::wire::notify::{ClientId, NotifyMessage, encode_response};

/// Response "not released" (EROFS): the same as that of a librbd client configured to keep its lock.
const KEPT: i32 = -30;
/// Response "not now" (EBUSY): the client asks again. To EROFS it would fail its write.
const KEPT_BRIEFLY: i32 = -16;

/// Refusal to release a lock on request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keeping {
    /// Lasts as long as this client uses the image.
    Lasting,
    /// Ends soon.
    Brief,
}

/// Returns whether a client that was refused with this response may ask again.
pub(crate) fn is_brief(refusal: i32) -> bool {
    matches!(refusal, KEPT_BRIEFLY | -11)
}

/// Phase of this client's exclusive lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Lock not held.
    Unlocked,
    /// Lock being acquired.
    Acquiring,
    /// Lock held; catching up with changes by former owners.
    Opening,
    /// Lock held; writes admitted.
    Locked,
    /// In-flight writes drain and new ones wait; the lock is then released.
    Releasing,
}

/// Action that follows a notification, after the response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// No action.
    Nothing,
    /// Release of the lock.
    Release,
    /// Refresh of the header, before the response.
    Refresh,
    /// Wake-up of the waiters for the lock, which may be free now.
    Retry,
    /// Refresh of the reservations, before the response.
    Reservations,
    /// Operation for another client.
    Operate,
    /// Delivery to the request of this client that it is about.
    Deliver,
}

/// Returns the response to a notification, and the action that follows. With `kept`, the lock is not released on
/// request.
pub(crate) fn react(
    phase: Phase,
    kept: Option<Keeping>,
    me: ClientId,
    message: Option<&NotifyMessage>,
) -> (Vec<u8>, Then) {
    let silent = (Vec::new(), Then::Nothing);
    match message {
        Some(NotifyMessage::HeaderUpdate) => (Vec::new(), Then::Refresh),
        Some(NotifyMessage::Reservations(client)) if *client != me => (Vec::new(), Then::Reservations),
        Some(NotifyMessage::ReleasedLock(client)) if *client != me => (Vec::new(), Then::Retry),
        Some(NotifyMessage::RequestLock { client, .. }) if *client != me => match phase {
            Phase::Opening | Phase::Locked => match kept {
                Some(Keeping::Lasting) => (encode_response(KEPT), Then::Nothing),
                Some(Keeping::Brief) => (encode_response(KEPT_BRIEFLY), Then::Nothing),
                None => (encode_response(0), Then::Release),
            },
            Phase::Releasing => (encode_response(0), Then::Nothing),
            Phase::Unlocked | Phase::Acquiring => silent,
        },
        // While the lock is taken over or released there is no response: the client asks again.
        Some(NotifyMessage::Operation(_)) if phase == Phase::Locked => (Vec::new(), Then::Operate),
        Some(NotifyMessage::Progress { .. } | NotifyMessage::Completed { .. }) => (Vec::new(), Then::Deliver),
        _ => silent,
    }
}

/// Verdict on a lock that could not be acquired.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LockVerdict {
    /// Lock is free by now: retry.
    Free,
    /// Owner is alive: request the lock.
    Ask,
    /// Owner is dead: fence it, and break its lock.
    Break(Locker),
    /// Lock was not acquired automatically by an RBD client: leave it alone.
    Foreign(String),
}

/// Judges a lock by the watchers of the header: its owner is alive as long as the watch named by its cookie exists.
pub(crate) fn judge(info: &LockInfo, watchers: &[Watcher]) -> LockVerdict {
    let Some(locker) = info.lockers.first() else { return LockVerdict::Free };
    let who = || owner_name(locker);
    if info.tag != TAG {
        return LockVerdict::Foreign(format!("locked by hand, with the tag '{}', by {}", info.tag, who()));
    }
    if !info.exclusive {
        return LockVerdict::Foreign(format!("locked for sharing by {}", who()));
    }
    let Some(watch) = watch_of(&locker.cookie) else {
        return LockVerdict::Foreign(format!("locked with the cookie '{}' by {}", locker.cookie, who()));
    };
    if watchers.iter().any(|watcher| watcher.address == locker.address && watcher.cookie == watch) {
        return LockVerdict::Ask;
    }
    if locker.address.is_empty() || locker.client().is_none() {
        return LockVerdict::Foreign(format!("locked by {}, which cannot be fenced", who()));
    }
    LockVerdict::Break(locker.clone())
}

/// Returns the owner of a lock for log messages: `client.4123 at 10.0.0.7:0/1`.
pub(crate) fn owner_name(locker: &Locker) -> String {
    format!("{}.{} at {}", kind_name(locker.entity.0), locker.entity.1, locker.address)
}

pub(crate) fn kind_name(kind: u8) -> &'static str {
    match kind {
        1 => "mon",
        2 => "mds",
        4 => "osd",
        8 => "client",
        16 => "mgr",
        _ => "entity",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::owner::OwnerOperation;
    use crate::wire::lock::cookie_of;
    use crate::wire::notify::{OwnerRequest, decode_response};

    const ME: ClientId = ClientId { number: 7, watch: 70 };
    const OTHER: ClientId = ClientId { number: 8, watch: 80 };

    #[test]
    fn who_has_the_lock_answers_for_it() {
        let request = NotifyMessage::RequestLock { client: OTHER, force: false };
        for (phase, answer, then) in [
            (Phase::Unlocked, None, Then::Nothing),
            (Phase::Acquiring, None, Then::Nothing),
            (Phase::Opening, Some(0), Then::Release),
            (Phase::Locked, Some(0), Then::Release),
            (Phase::Releasing, Some(0), Then::Nothing),
        ] {
            let (answered, next) = react(phase, None, ME, Some(&request));
            assert_eq!((decode_response(&answered), next), (answer, then), "{phase:?}");
        }
        let (answered, next) = react(Phase::Locked, Some(Keeping::Lasting), ME, Some(&request));
        assert_eq!((decode_response(&answered), next), (Some(-30), Then::Nothing), "it is kept");
        let own = NotifyMessage::RequestLock { client: ME, force: false };
        let (answered, next) = react(Phase::Locked, Some(Keeping::Brief), ME, Some(&request));
        let refusal = decode_response(&answered).expect("a response");
        assert!(next == Then::Nothing && refusal < 0 && is_brief(refusal) && !is_brief(KEPT), "it may be asked again");
        assert_eq!(react(Phase::Locked, None, ME, Some(&own)), (Vec::new(), Then::Nothing));
        let operation = NotifyMessage::Operation(OwnerRequest { id: None, operation: Some(OwnerOperation::Flatten) });
        for (phase, next) in [
            (Phase::Unlocked, Then::Nothing),
            (Phase::Acquiring, Then::Nothing),
            (Phase::Opening, Then::Nothing),
            (Phase::Locked, Then::Operate),
            (Phase::Releasing, Then::Nothing),
        ] {
            assert_eq!(react(phase, None, ME, Some(&operation)), (Vec::new(), next), "{phase:?}");
        }
        assert_eq!(react(Phase::Unlocked, None, ME, Some(&NotifyMessage::ReleasedLock(OTHER))).1, Then::Retry);
        assert_eq!(react(Phase::Locked, None, ME, Some(&NotifyMessage::HeaderUpdate)).1, Then::Refresh);
        assert_eq!(react(Phase::Unlocked, None, ME, Some(&NotifyMessage::Reservations(OTHER))).1, Then::Reservations);
        assert_eq!(react(Phase::Unlocked, None, ME, Some(&NotifyMessage::Reservations(ME))).1, Then::Nothing);
        assert_eq!(react(Phase::Locked, None, ME, None), (Vec::new(), Then::Nothing), "what cannot be read");
    }

    #[test]
    fn an_owner_lives_as_long_as_its_watch() {
        let locker = Locker {
            entity: (8, 8),
            cookie: cookie_of(80),
            address: "127.0.0.1:0/80".into(),
            description: String::new(),
        };
        let info = LockInfo { exclusive: true, tag: TAG.into(), lockers: vec![locker.clone()] };
        let watcher = |cookie, address: &str| Watcher { client: 8, cookie, address: address.into() };
        assert_eq!(judge(&info, &[watcher(80, "127.0.0.1:0/80")]), LockVerdict::Ask);
        for watchers in [vec![], vec![watcher(81, "127.0.0.1:0/80")], vec![watcher(80, "127.0.0.1:0/81")]] {
            assert_eq!(judge(&info, &watchers), LockVerdict::Break(locker.clone()));
        }
        assert_eq!(judge(&LockInfo { lockers: vec![], ..info.clone() }, &[]), LockVerdict::Free);
        let foreign = |info: &LockInfo| matches!(judge(info, &[]), LockVerdict::Foreign(_));
        assert!(foreign(&LockInfo { tag: "mine".into(), ..info.clone() }));
        assert!(foreign(&LockInfo { exclusive: false, ..info.clone() }));
        let by_hand = Locker { cookie: "x".into(), ..locker.clone() };
        assert!(foreign(&LockInfo { lockers: vec![by_hand], ..info.clone() }));
        let nowhere = Locker { address: String::new(), ..locker };
        assert!(foreign(&LockInfo { lockers: vec![nowhere], ..info }));
    }
}
