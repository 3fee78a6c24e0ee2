//! Accepting side: admission of peers, handshakes, and session lookup.

use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_reactor::{random, sleep, spawn, timeout};

use super::client::expire;
use super::drive;
use super::stream::Transmission;
use crate::connection::{Conn, Connection, ConnectionState, Identity, Reason, Route};
use crate::messenger::Inner;
use crate::session::{Answer, Asked, Link, Policy, Progress, Resume, ServerConfig, Session, Violation};
use crate::transport::{Acceptor, Address, Channel};
use crate::wire::EntityAddr;
use crate::wire::control::{ClientIdent, FLAG_LOSSY, Reconnect, ServerIdent};

/// Delay after a failed accept, which happens for example when file descriptors run out.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Returns the output of `future`, or `None` if the messenger is stopped first.
async fn unless_stopped<F: Future>(messenger: &Inner, future: F) -> Option<F::Output> {
    let mut future = std::pin::pin!(future);
    let mut stopped = std::pin::pin!(messenger.changed.wait_until(|| messenger.stopping.get()));
    std::future::poll_fn(|cx| {
        if stopped.as_mut().poll(cx).is_ready() {
            return Poll::Ready(None);
        }
        future.as_mut().poll(cx).map(Some)
    })
    .await
}

/// Accepts connections until the messenger stops.
pub(crate) async fn accept(messenger: Rc<Inner>, acceptor: Acceptor) {
    while let Some(accepted) = unless_stopped(&messenger, acceptor.accept()).await {
        let (pending, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                unless_stopped(&messenger, sleep(ACCEPT_REST)).await;
                continue;
            }
        };
        let waiting = messenger.handshakes.get();
        let rejection = if !messenger.may_connect(&peer) {
            Some(Reason::NotAllowed(peer.to_string()))
        } else if waiting >= messenger.options.handshakes_max {
            Some(Reason::TooMany(waiting))
        } else {
            None
        };
        let admitted = match rejection {
            Some(reason) => Err(reason),
            None => pending.admit().map_err(Reason::from),
        };
        let channel = match admitted {
            Ok(channel) => channel,
            Err(reason) => {
                tracing::warn!(%peer, %reason, "connection rejected");
                messenger.handler.refused(&peer, &reason);
                continue;
            }
        };
        messenger.handshakes.set(waiting + 1);
        let place = Place(messenger.clone());
        drop(spawn(serve(messenger.clone(), channel, peer, place)));
    }
}

/// Guard of a handshake slot: counts one incoming connection that has not identified itself yet.
struct Place(Rc<Inner>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.handshakes.set(self.0.handshakes.get() - 1);
    }
}

/// Serves an accepted stream until it ends.
async fn serve(messenger: Rc<Inner>, channel: Channel, peer: Address, place: Place) {
    let options = &messenger.options;
    let config = ServerConfig {
        entity: options.entity,
        peer: EntityAddr::msgr2(peer.socket(), 0),
        modes: options.modes(peer.is_local()),
        checksum: options.checksum && !channel.is_sound(),
    };
    let mut link = Link::server(config, options.auth.server(), messenger.core.pools.clone());
    let handshake = timeout(options.handshake_timeout, handshake(&messenger, &mut link, &channel, &peer));
    let result = unless_stopped(&messenger, handshake).await;
    drop(place);
    let (conn, epoch) = match result {
        Some(Ok(Ok(found))) => found,
        other => {
            channel.shutdown();
            let reason = match other {
                Some(Ok(Err(reason))) => reason,
                Some(Err(_)) => Reason::Handshake(link.state()),
                _ => return,
            };
            match link.refused() {
                Some(refused) => tracing::warn!(%peer, %reason, %refused, "cannot authenticate a peer"),
                None => tracing::warn!(%peer, %reason, "handshake failed"),
            }
            messenger.handler.refused(&peer, &reason);
            return;
        }
    };
    tracing::debug!(%peer, name = conn.identity.name(), mode = link.mode(), "stream open");
    conn.lifecycle.open(channel.name());
    let connection = Connection::new(conn.clone());
    conn.handler().opened(&connection);
    let reason = Transmission::new(conn.clone(), epoch, channel.clone(), link).run().await;
    channel.shutdown();
    if !conn.lifecycle.is_current(epoch) {
        return;
    }
    if conn.send_queue.session().is_lossy() {
        tracing::info!(%peer, name = conn.identity.name(), %reason, "connection ended");
        conn.lose(&reason);
        return;
    }
    tracing::debug!(%peer, name = conn.identity.name(), %reason, "stream lost; waiting for the client to reconnect");
    let epoch = conn.take_over();
    conn.lifecycle.disconnect(ConnectionState::Standby, reason.clone());
    conn.handler().interrupted(&connection, &reason);
    drop(spawn(expire(conn, epoch)));
}

/// Identifies the peer and looks up its session.
async fn handshake(
    messenger: &Rc<Inner>,
    link: &mut Link,
    channel: &Channel,
    peer: &Address,
) -> Result<(Rc<Conn>, u64), Reason> {
    let mut state = "";
    loop {
        let Progress::Asked(asked) = drive(link, channel, &mut state).await? else {
            unreachable!("only clients establish")
        };
        let (answer, found) = match asked {
            Asked::Ident(ident) => ident_asked(messenger, link, peer, &ident)?,
            Asked::Reconnect(reconnect) => reconnect_asked(messenger, link, &reconnect),
        };
        // The answer is sent ahead of the session's messages.
        if link.answer(&answer)? {
            return Ok(found.expect("a session was found or made"));
        }
    }
}

type Found = (Answer, Option<(Rc<Conn>, u64)>);

fn ident_asked(messenger: &Rc<Inner>, link: &Link, peer: &Address, ident: &ClientIdent) -> Result<Found, Reason> {
    let options = &messenger.options;
    let missing = options.required & !ident.supported;
    if missing != 0 {
        return Ok((Answer::Missing(missing), None));
    }
    if ident.target.nonce != 0 && ident.target.nonce != messenger.nonce {
        let found = messenger.own_addr(None).to_string();
        return Err(Violation::WrongPeer { target: ident.target.to_string(), found }.into());
    }
    let lossy = ident.flags & FLAG_LOSSY != 0 || options.accept.is_lossy();
    let key = (link.client_name().to_owned(), ident.addrs.first().copied().unwrap_or_default());
    let before = messenger.sessions.borrow().get(&key).cloned();
    let mut kept = None;
    if let Some(before) = before {
        let resume = before.send_queue.session().resume();
        if before.lifecycle.peer_global_seq() > ident.global_seq && resume.client_cookie == ident.cookie {
            // A delayed connection attempt, older than the current one.
            return Err(Reason::Replaced);
        }
        // The client has never seen the session that it asked for: the session continues from its beginning.
        let unheard = !lossy && resume.client_cookie == ident.cookie && resume.in_seq == 0;
        if unheard && before.send_queue.resumed(0).is_ok() {
            kept = Some(before);
        } else {
            tracing::info!(%peer, name = before.identity.name(), "client began a new session; dropping the previous one");
            before.lose(&Reason::Reset);
        }
    }
    let conn = match kept {
        Some(conn) => conn,
        None => {
            if messenger.count() >= options.connections_max {
                return Err(Reason::TooMany(messenger.count()));
            }
            let server_cookie = if lossy { 0 } else { random().max(1) };
            let resume = Resume { client_cookie: ident.cookie, server_cookie, ..Resume::default() };
            let policy = if lossy { Policy::StatelessServer } else { Policy::LosslessPeer };
            let identity = Identity::new(peer.clone(), key.0.clone());
            let session = Session::new(lossy, resume);
            let conn = Conn::new(messenger.clone(), identity, (policy, Route::Remote), session);
            messenger.remember(&conn);
            if !lossy {
                messenger.sessions.borrow_mut().insert(key, conn.clone());
            }
            conn
        }
    };
    conn.identity.identify(link.peer_entity(), link.own_addr());
    conn.lifecycle.set_peer_global_seq(ident.global_seq);
    let epoch = conn.take_over();
    let answer = ServerIdent {
        addrs: vec![messenger.own_addr(Some(ident.target))],
        gid: options.gid,
        global_seq: messenger.next_global_seq(0),
        supported: options.supported,
        required: options.required,
        flags: if lossy { FLAG_LOSSY } else { 0 },
        cookie: conn.send_queue.session().resume().server_cookie,
    };
    Ok((Answer::Ident(answer), Some((conn, epoch))))
}

fn reconnect_asked(messenger: &Rc<Inner>, link: &Link, reconnect: &Reconnect) -> Found {
    let key = (link.client_name().to_owned(), reconnect.addrs.first().copied().unwrap_or_default());
    let Some(conn) = messenger.sessions.borrow().get(&key).cloned() else { return (Answer::Reset, None) };
    let resume = conn.send_queue.session().resume();
    if (resume.client_cookie, resume.server_cookie) != (reconnect.client_cookie, reconnect.server_cookie) {
        return (Answer::Reset, None);
    }
    let seen = conn.lifecycle.peer_global_seq();
    if seen > reconnect.global_seq {
        return (Answer::RetryGlobal(seen), None);
    }
    if resume.connect_seq > reconnect.connect_seq {
        return (Answer::Retry(resume.connect_seq), None);
    }
    if let Err(violation) = conn.send_queue.resumed(reconnect.msg_seq) {
        // The two sides disagree on what was sent: the session cannot be resumed.
        tracing::warn!(name = conn.identity.name(), %violation, "cannot resume a session; dropping it");
        conn.lose(&Reason::Reset);
        return (Answer::Reset, None);
    }
    conn.send_queue.session_mut().set_resume(Resume { connect_seq: reconnect.connect_seq, ..resume });
    conn.lifecycle.set_peer_global_seq(reconnect.global_seq);
    let epoch = conn.take_over();
    let in_seq = conn.send_queue.session().resume().in_seq;
    (Answer::ReconnectOk(in_seq), Some((conn, epoch)))
}
