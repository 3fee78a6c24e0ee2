//! Connecting side: establishes the stream, and re-establishes it when it is lost.

use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{now, random, sleep, timeout};

use super::drive;
use super::stream::OpenStream;
use crate::connection::{Conn, Connection, ConnectionState, DisconnectReason};
use crate::session::{ClientConfig, HandshakeProgress, MessengerHandshake, SessionOrigin, SessionViolation};
use crate::transport::Channel;

/// Runs an outgoing connection, with reconnects, until it ends.
pub(crate) async fn client(conn: Rc<Conn>) {
    let options = conn.endpoint.options.clone();
    let connection = Connection::new(conn.clone());
    let mut backoff = options.backoff_min;
    let mut down_since = now();
    let mut established = false;
    while !conn.is_closed() {
        let mut state = "connecting";
        let reason = match timeout(options.handshake_timeout, attempt(&conn, &mut state)).await {
            Ok(Ok((channel, transmission))) => {
                established = true;
                backoff = options.backoff_min;
                let reason = transmission.run().await;
                channel.shutdown();
                down_since = now();
                reason
            }
            Ok(Err(reason)) => reason,
            Err(_) => DisconnectReason::Handshake(state),
        };
        if conn.is_closed() {
            return;
        }
        let lossy = conn.send_queue.session().is_lossy();
        let hopeless = !established && is_final(&reason);
        if lossy || hopeless || options.give_up.is_some_and(|limit| down_since.elapsed() >= limit) {
            tracing::info!(peer = %conn.identity.address(), %reason, "connection ended");
            conn.lose(&reason);
            return;
        }
        tracing::debug!(peer = %conn.identity.address(), %reason, ?backoff, "stream lost; reconnecting");
        let interrupted = conn.lifecycle.state() == ConnectionState::Open;
        conn.take_over();
        conn.lifecycle.disconnect(ConnectionState::Connecting, reason.clone());
        if interrupted {
            conn.handler().interrupted(&connection, &reason);
        }
        // Jitter keeps clients of the same lost peer from reconnecting in the same moment.
        let rest = backoff / 2 + Duration::from_nanos(random() % (backoff.as_nanos() as u64 / 2).max(1));
        // Woken early only when the connection was closed.
        let _ = timeout(rest, conn.lifecycle.closed()).await;
        backoff = (backoff * 2).min(options.backoff_max);
    }
}

/// Returns true if a retry cannot succeed.
fn is_final(reason: &DisconnectReason) -> bool {
    let DisconnectReason::Violation(violation) = reason else { return false };
    matches!(
        violation,
        SessionViolation::MethodRefused { .. }
            | SessionViolation::ModesDiffer { .. }
            | SessionViolation::Features { .. }
            | SessionViolation::MessageFeatures(_)
            | SessionViolation::FeaturesRequired(_)
            | SessionViolation::ModeNotOffered(_)
            | SessionViolation::WrongPeer { .. }
            | SessionViolation::Auth(_)
            | SessionViolation::Secret(_)
            | SessionViolation::Wire(_)
    )
}

/// Connects a stream and establishes the session on it.
async fn attempt(conn: &Rc<Conn>, state: &mut &'static str) -> Result<(Channel, OpenStream), DisconnectReason> {
    let endpoint = &conn.endpoint;
    let options = &endpoint.options;
    let channel = Channel::connect(conn.identity.address(), options.transport()).await?;
    let mut resume = conn.send_queue.session().resume();
    resume.global_seq = endpoint.numbers.next_global_seq(0);
    if resume.server_cookie != 0 {
        // A server may have stated the highest number.
        resume.connect_seq = resume.connect_seq.saturating_add(1);
    }
    conn.send_queue.session_mut().set_resume(resume);
    let config = ClientConfig {
        entity: options.entity,
        peer_entity: options.peer_entity,
        addrs: vec![endpoint.client_addr(conn.identity.nonce())],
        target: conn.identity.target(),
        gid: options.gid,
        modes: options.modes(conn.identity.address().is_local()),
        supported: options.supported,
        required: options.required,
        lossy: conn.policy.is_lossy(),
        checksum: options.checksum && !channel.is_sound(),
    };
    let pools = endpoint.core.pools.clone();
    let mut handshake = MessengerHandshake::client(config, options.auth.client(), resume, pools);
    let progress = drive(&mut handshake, &channel, state).await?;
    let HandshakeProgress::Established(agreed) = progress else { unreachable!("only servers are asked") };
    if conn.is_closed() {
        return Err(DisconnectReason::Closed);
    }
    endpoint.numbers.next_global_seq(agreed.resume.global_seq);
    conn.identity.identify(handshake.peer_entity(), handshake.own_addr());
    let epoch = conn.take_over();
    let connection = Connection::new(conn.clone());
    if let Some(full) = agreed.reset {
        tracing::info!(peer = %conn.identity.address(), full, "the peer has reset the session");
        if full {
            conn.fail(&DisconnectReason::Reset);
        } else {
            conn.send_queue.session_mut().reset(false);
        }
    }
    conn.send_queue.session_mut().agree(agreed.resume, agreed.lossy);
    if let SessionOrigin::Resumed(seq) = agreed.outcome {
        conn.send_queue.resumed(seq)?;
    }
    tracing::debug!(peer = %conn.identity.address(), mode = handshake.mode(), outcome = ?agreed.outcome, "stream open");
    conn.lifecycle.open(channel.name());
    if agreed.reset.is_some() {
        conn.handler().reset(&connection);
    }
    conn.handler().opened(&connection);
    let transmission = OpenStream::new(conn.clone(), epoch, channel.clone(), handshake);
    Ok((channel, transmission))
}

/// Ends a server's session if its client does not reconnect within `session_timeout`.
pub(super) async fn expire(conn: Rc<Conn>, epoch: u64) {
    sleep(conn.endpoint.options.session_timeout).await;
    if conn.lifecycle.is_current(epoch) && conn.lifecycle.state() == ConnectionState::Standby {
        tracing::info!(peer = %conn.identity.address(), name = conn.identity.name(), "session expired: the client did not reconnect");
        conn.lose(&DisconnectReason::Expired);
    }
}
