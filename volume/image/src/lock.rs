//! The exclusive lock of an image, without doing anything: what a notification asks of us, and what is to be done
//! about somebody else's lock.
//!
//! ```text
//!           a write               got it             caught up
//! Unlocked ----------> Acquiring ---------> Opening -----------> Locked
//!    ^                     | failed            | failed             | somebody asks; the image is closed
//!    |<--------------------+<------------------+                    v
//!    +----------------------------------------------------------- Releasing
//!                         given up, or lost
//! ```

use forebay_block::Watcher;

use crate::wire::lock::{LockInfo, Locker, TAG, watch_of};
use crate::wire::notify::{Client, Message, encode_response};

/// Not supported (EOPNOTSUPP): librbd then asks for the lock, and does it itself.
const UNSUPPORTED: i32 = -95;

/// Not given up (EROFS): what librbd answers, too, when it was told to keep a lock.
const KEPT: i32 = -30;

/// Where we are with the lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    /// We do not have it.
    Unlocked,
    /// We are taking it.
    Acquiring,
    /// We have it, and catch up with what others did before.
    Opening,
    /// Writes may go.
    Locked,
    /// Writes under way end, new ones wait; then it is given up.
    Releasing,
}

/// What a notification leads to, after it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Then {
    /// Nothing.
    Nothing,
    /// Give up the lock.
    Release,
    /// Read the header anew, before it is answered.
    Refresh,
    /// The lock may be free: those who wait for it look again.
    Look,
    /// Read the reservations anew, before it is answered.
    Reservations,
}

/// What to answer to a notification, and what to do then.  With `kept`, the lock is not given up when somebody asks.
pub(crate) fn react(phase: Phase, kept: bool, me: Client, message: Option<&Message>) -> (Vec<u8>, Then) {
    let silent = (Vec::new(), Then::Nothing);
    match message {
        Some(Message::HeaderUpdate) => (Vec::new(), Then::Refresh),
        Some(Message::Reservations(client)) if *client != me => (Vec::new(), Then::Reservations),
        Some(Message::ReleasedLock(client)) if *client != me => (Vec::new(), Then::Look),
        Some(Message::RequestLock { client, .. }) if *client != me => match phase {
            Phase::Opening | Phase::Locked if kept => (encode_response(KEPT), Then::Nothing),
            Phase::Opening | Phase::Locked => (encode_response(0), Then::Release),
            Phase::Releasing => (encode_response(0), Then::Nothing),
            Phase::Unlocked | Phase::Acquiring => silent,
        },
        Some(Message::Operation(_)) if !matches!(phase, Phase::Unlocked | Phase::Acquiring) => {
            (encode_response(UNSUPPORTED), Then::Nothing)
        }
        _ => silent,
    }
}

/// What is to be done about a lock that we did not get.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Nobody has it by now: try again.
    Free,
    /// Its owner lives: ask.
    Ask,
    /// Its owner is gone: fence it, and break its lock.
    Break(Locker),
    /// It is none that RBD's clients take by themselves: leave it alone.
    Foreign(String),
}

/// Judges a lock by who watches the header: its owner lives as long as the watch that its cookie names.
pub(crate) fn judge(info: &LockInfo, watchers: &[Watcher]) -> Verdict {
    let Some(locker) = info.lockers.first() else { return Verdict::Free };
    let who = || format!("{}.{} at {}", kind_name(locker.entity.0), locker.entity.1, locker.address);
    if info.tag != TAG {
        return Verdict::Foreign(format!("locked by hand, with the tag '{}', by {}", info.tag, who()));
    }
    if !info.exclusive {
        return Verdict::Foreign(format!("locked for sharing by {}", who()));
    }
    let Some(watch) = watch_of(&locker.cookie) else {
        return Verdict::Foreign(format!("locked with the cookie '{}' by {}", locker.cookie, who()));
    };
    if watchers.iter().any(|watcher| watcher.address == locker.address && watcher.cookie == watch) {
        return Verdict::Ask;
    }
    if locker.address.is_empty() || locker.client().is_none() {
        return Verdict::Foreign(format!("locked by {}, which cannot be fenced", who()));
    }
    Verdict::Break(locker.clone())
}

fn kind_name(kind: u8) -> &'static str {
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
    use crate::wire::lock::cookie_of;
    use crate::wire::notify::decode_response;

    const ME: Client = Client { number: 7, watch: 70 };
    const OTHER: Client = Client { number: 8, watch: 80 };

    #[test]
    fn who_has_the_lock_answers_for_it() {
        let request = Message::RequestLock { client: OTHER, force: false };
        for (phase, answer, then) in [
            (Phase::Unlocked, None, Then::Nothing),
            (Phase::Acquiring, None, Then::Nothing),
            (Phase::Opening, Some(0), Then::Release),
            (Phase::Locked, Some(0), Then::Release),
            (Phase::Releasing, Some(0), Then::Nothing),
        ] {
            let (answered, next) = react(phase, false, ME, Some(&request));
            assert_eq!((decode_response(&answered), next), (answer, then), "{phase:?}");
        }
        let (answered, next) = react(Phase::Locked, true, ME, Some(&request));
        assert_eq!((decode_response(&answered), next), (Some(-30), Then::Nothing), "it is kept");
        let own = Message::RequestLock { client: ME, force: false };
        assert_eq!(react(Phase::Locked, false, ME, Some(&own)), (Vec::new(), Then::Nothing));
        let (answered, next) = react(Phase::Locked, false, ME, Some(&Message::Operation(8)));
        assert_eq!((decode_response(&answered), next), (Some(UNSUPPORTED), Then::Nothing));
        assert_eq!(react(Phase::Unlocked, false, ME, Some(&Message::Operation(8))).0, []);
        assert_eq!(react(Phase::Unlocked, false, ME, Some(&Message::ReleasedLock(OTHER))).1, Then::Look);
        assert_eq!(react(Phase::Locked, false, ME, Some(&Message::HeaderUpdate)).1, Then::Refresh);
        assert_eq!(react(Phase::Unlocked, false, ME, Some(&Message::Reservations(OTHER))).1, Then::Reservations);
        assert_eq!(react(Phase::Unlocked, false, ME, Some(&Message::Reservations(ME))).1, Then::Nothing);
        assert_eq!(react(Phase::Locked, false, ME, None), (Vec::new(), Then::Nothing), "what cannot be read");
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
        assert_eq!(judge(&info, &[watcher(80, "127.0.0.1:0/80")]), Verdict::Ask);
        for watchers in [vec![], vec![watcher(81, "127.0.0.1:0/80")], vec![watcher(80, "127.0.0.1:0/81")]] {
            assert_eq!(judge(&info, &watchers), Verdict::Break(locker.clone()));
        }
        assert_eq!(judge(&LockInfo { lockers: vec![], ..info.clone() }, &[]), Verdict::Free);
        let foreign = |info: &LockInfo| matches!(judge(info, &[]), Verdict::Foreign(_));
        assert!(foreign(&LockInfo { tag: "mine".into(), ..info.clone() }));
        assert!(foreign(&LockInfo { exclusive: false, ..info.clone() }));
        let by_hand = Locker { cookie: "x".into(), ..locker.clone() };
        assert!(foreign(&LockInfo { lockers: vec![by_hand], ..info.clone() }));
        let nowhere = Locker { address: String::new(), ..locker };
        assert!(foreign(&LockInfo { lockers: vec![nowhere], ..info }));
    }
}
