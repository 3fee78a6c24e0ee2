//! Accepting side: admission of peers, handshakes, and session lookup.

use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{random, sleep, spawn, timeout};

use super::client::expire;
use super::drive;
use super::stream::OpenStream;
use crate::connection::{Conn, Connection, ConnectionIdentity, ConnectionState, DisconnectReason, PeerRoute};
use crate::endpoint::{HandshakeGuard, MessengerEndpoint};
use crate::session::{
    HandshakeProgress, MessengerHandshake, MessengerSession, Policy, Resume, ServerConfig, SessionReply,
    SessionRequest, SessionViolation,
};
use crate::transport::{Acceptor, Address, Channel};
use crate::wire::EntityAddr;
use crate::wire::control::{ClientIdent, FLAG_LOSSY, Reconnect, ServerIdent};

/// Delay after a failed accept, which happens for example when file descriptors run out.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Accepts connections until the messenger stops.
pub(crate) async fn accept(endpoint: Rc<MessengerEndpoint>, acceptor: Acceptor) {
    while let Some(accepted) = endpoint.stop.unless_sent(acceptor.accept()).await {
        let (pending, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                endpoint.stop.unless_sent(sleep(ACCEPT_REST)).await;
                continue;
            }
        };
        let waiting = endpoint.handshakes.count();
        let rejection = if !endpoint.may_connect(&peer) {
            Some(DisconnectReason::NotAllowed(peer.to_string()))
        } else if waiting >= endpoint.options.handshakes_max {
            Some(DisconnectReason::TooMany(waiting))
        } else {
            None
        };
        let admitted = match rejection {
            Some(reason) => Err(reason),
            None => pending.admit().map_err(DisconnectReason::from),
        };
        let channel = match admitted {
            Ok(channel) => channel,
            Err(reason) => {
                tracing::warn!(%peer, %reason, "connection rejected");
                endpoint.handler.refused(&peer, &reason);
                continue;
            }
        };
        let guard = endpoint.handshakes.begin();
        drop(spawn(serve(endpoint.clone(), channel, peer, guard)));
    }
}

/// Serves an accepted stream until it ends.
async fn serve(endpoint: Rc<MessengerEndpoint>, channel: Channel, peer: Address, guard: HandshakeGuard) {
    let options = &endpoint.options;
    let config = ServerConfig {
        entity: options.entity,
        peer: EntityAddr::msgr2(peer.socket(), 0),
        modes: options.modes(peer.is_local()),
        checksum: options.checksum && !channel.is_sound(),
    };
    let mut handshake = MessengerHandshake::server(config, options.auth.server(), endpoint.core.pools.clone());
    let identified = timeout(options.handshake_timeout, identify(&endpoint, &mut handshake, &channel, &peer));
    let result = endpoint.stop.unless_sent(identified).await;
    drop(guard);
    let (conn, epoch) = match result {
        Some(Ok(Ok(found))) => found,
        other => {
            channel.shutdown();
            let reason = match other {
                Some(Ok(Err(reason))) => reason,
                Some(Err(_)) => DisconnectReason::Handshake(handshake.state()),
                _ => return,
            };
            match handshake.refused() {
                Some(refused) => tracing::warn!(%peer, %reason, %refused, "cannot authenticate a peer"),
                None => tracing::warn!(%peer, %reason, "handshake failed"),
            }
            endpoint.handler.refused(&peer, &reason);
            return;
        }
    };
    tracing::debug!(%peer, name = conn.identity.name(), mode = handshake.mode(), "stream open");
    conn.lifecycle.open(channel.name());
    let connection = Connection::new(conn.clone());
    conn.handler().opened(&connection);
    let reason = OpenStream::new(conn.clone(), epoch, channel.clone(), handshake).run().await;
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
async fn identify(
    endpoint: &Rc<MessengerEndpoint>,
    handshake: &mut MessengerHandshake,
    channel: &Channel,
    peer: &Address,
) -> Result<(Rc<Conn>, u64), DisconnectReason> {
    let mut state = "";
    loop {
        let HandshakeProgress::SessionRequest(asked) = drive(handshake, channel, &mut state).await? else {
            unreachable!("only clients establish")
        };
        let (answer, found) = match asked {
            SessionRequest::Ident(ident) => ident_asked(endpoint, handshake, peer, &ident)?,
            SessionRequest::Reconnect(reconnect) => reconnect_asked(endpoint, handshake, &reconnect),
        };
        // The answer is sent ahead of the session's messages.
        if handshake.answer(&answer)? {
            return Ok(found.expect("a session was found or made"));
        }
    }
}

type Found = (SessionReply, Option<(Rc<Conn>, u64)>);

fn ident_asked(
    endpoint: &Rc<MessengerEndpoint>,
    handshake: &MessengerHandshake,
    peer: &Address,
    ident: &ClientIdent,
) -> Result<Found, DisconnectReason> {
    let options = &endpoint.options;
    let missing = options.required & !ident.supported;
    if missing != 0 {
        return Ok((SessionReply::Missing(missing), None));
    }
    if ident.target.nonce != 0 && ident.target.nonce != endpoint.nonce {
        let found = endpoint.own_addr(None).to_string();
        return Err(SessionViolation::WrongPeer { target: ident.target.to_string(), found }.into());
    }
    let lossy = ident.flags & FLAG_LOSSY != 0 || options.accept.is_lossy();
    let key = (handshake.client_name().to_owned(), ident.addrs.first().copied().unwrap_or_default());
    let before = endpoint.connections.session(&key);
    let mut kept = None;
    if let Some(before) = before {
        let resume = before.send_queue.session().resume();
        if before.lifecycle.peer_global_seq() > ident.global_seq && resume.client_cookie == ident.cookie {
            // A delayed connection attempt, older than the current one.
            return Err(DisconnectReason::Replaced);
        }
        // The client has never seen the session that it asked for: the session continues from its beginning.
        let unheard = !lossy && resume.client_cookie == ident.cookie && resume.in_seq == 0;
        if unheard && before.send_queue.resumed(0).is_ok() {
            kept = Some(before);
        } else {
            tracing::info!(%peer, name = before.identity.name(), "client began a new session; dropping the previous one");
            before.lose(&DisconnectReason::Reset);
        }
    }
    let conn = match kept {
        Some(conn) => conn,
        None => {
            if endpoint.connections.count() >= options.connections_max {
                return Err(DisconnectReason::TooMany(endpoint.connections.count()));
            }
            let server_cookie = if lossy { 0 } else { random().max(1) };
            let resume = Resume { client_cookie: ident.cookie, server_cookie, ..Resume::default() };
            let policy = if lossy { Policy::StatelessServer } else { Policy::LosslessPeer };
            let identity = ConnectionIdentity::new(peer.clone(), key.0.clone());
            let session = MessengerSession::new(lossy, resume);
            let conn = Conn::new(endpoint.clone(), identity, (policy, PeerRoute::Remote), session);
            endpoint.connections.add(&conn);
            if !lossy {
                endpoint.connections.add_session(key, &conn);
            }
            conn
        }
    };
    conn.identity.identify(handshake.peer_entity(), handshake.own_addr());
    conn.lifecycle.set_peer_global_seq(ident.global_seq);
    let epoch = conn.take_over();
    let answer = ServerIdent {
        addrs: vec![endpoint.own_addr(Some(ident.target))],
        gid: options.gid,
        global_seq: endpoint.numbers.next_global_seq(0),
        supported: options.supported,
        required: options.required,
        flags: if lossy { FLAG_LOSSY } else { 0 },
        cookie: conn.send_queue.session().resume().server_cookie,
    };
    Ok((SessionReply::Ident(answer), Some((conn, epoch))))
}

fn reconnect_asked(endpoint: &Rc<MessengerEndpoint>, handshake: &MessengerHandshake, reconnect: &Reconnect) -> Found {
    let key = (handshake.client_name().to_owned(), reconnect.addrs.first().copied().unwrap_or_default());
    let Some(conn) = endpoint.connections.session(&key) else { return (SessionReply::Reset, None) };
    let resume = conn.send_queue.session().resume();
    if (resume.client_cookie, resume.server_cookie) != (reconnect.client_cookie, reconnect.server_cookie) {
        return (SessionReply::Reset, None);
    }
    let seen = conn.lifecycle.peer_global_seq();
    if seen > reconnect.global_seq {
        return (SessionReply::RetryGlobal(seen), None);
    }
    if resume.connect_seq > reconnect.connect_seq {
        return (SessionReply::Retry(resume.connect_seq), None);
    }
    if let Err(violation) = conn.send_queue.resumed(reconnect.msg_seq) {
        // The two sides disagree on what was sent: the session cannot be resumed.
        tracing::warn!(name = conn.identity.name(), %violation, "cannot resume a session; dropping it");
        conn.lose(&DisconnectReason::Reset);
        return (SessionReply::Reset, None);
    }
    conn.send_queue.session_mut().set_resume(Resume { connect_seq: reconnect.connect_seq, ..resume });
    conn.lifecycle.set_peer_global_seq(reconnect.global_seq);
    let epoch = conn.take_over();
    let in_seq = conn.send_queue.session().resume().in_seq;
    (SessionReply::ReconnectOk(in_seq), Some((conn, epoch)))
}
