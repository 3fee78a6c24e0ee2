//! TLS beneath a connection: the handshake, and the check of a Connect against the key in use.

use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use forebay_serve::secure::{HandshakeError, RecordBuffer, SealBuffers, SecureStream, drain, handshake};
use forebay_tls::{Acceptor, Psk, PskLookup, Suite, TlsFailure, TlsSession};

use super::connect::host_refused;
use super::connection::NvmeConnection;
use super::ending::{LINGER, NvmeEndReason};
use crate::session::{Fatal, NvmePools, psk};
use crate::subsystem::{ConnectRefusal, Subsystems};
use crate::wire::NvmeStatus;
use crate::wire::fabrics::{Connect, DISCOVERY_NQN, connect_field};
use crate::wire::pdu::{Fes, kind};

/// TLS state shared by the connections of a core.
#[derive(Debug)]
pub(super) struct TlsContext {
    acceptor: Acceptor,
    record: RecordBuffer,
}

/// Key lookup, against the keys configured at the time of a handshake.
struct KeyLookup(Subsystems);

impl PskLookup for KeyLookup {
    fn find(&self, identity: &[u8]) -> Vec<Psk> {
        self.0.tls_keys(identity)
    }
}

impl TlsContext {
    pub(super) fn new(subsystems: &Subsystems) -> Result<Self, TlsFailure> {
        let acceptor = Acceptor::new(std::sync::Arc::new(KeyLookup(subsystems.clone())))?;
        Ok(Self { acceptor, record: RecordBuffer::default() })
    }
}

/// TLS session of a connection.
pub(super) struct TlsChannel {
    pub(super) stream: Rc<SecureStream<NvmePools>>,
    pub(super) suite: Suite,
    host: String,
    subsystem: String,
}

/// Returns the C2HTermReq for a peer that speaks NVMe/TCP instead of TLS; `None` for any other failure.
fn plaintext_reply(failure: &TlsFailure, received: &[u8]) -> Option<Vec<u8>> {
    let speaks_nvme = *failure == TlsFailure::Plain && received[0] == kind::IC_REQ;
    let head = &received[..received.len().min(8)];
    speaks_nvme.then(|| Fatal::new(Fes::Unsupported, 0, head, "TLS is required").encode())
}

impl NvmeConnection {
    /// Performs the TLS handshake before any PDU, within the handshake timeout of the connection.
    pub(super) async fn secure(&mut self) -> Result<Rc<TlsChannel>, NvmeEndReason> {
        let shared = self.server.tls().map_err(|failure| self.insecure(&failure))?;
        let mut session = TlsSession::accept(&shared.acceptor).map_err(|failure| self.insecure(&failure))?;
        let (stream, pools) = (self.stream.clone(), self.server.pools.clone());
        let shaken = {
            let mut shaking = pin!(handshake(&stream, &mut session, pools.sealed(false), plaintext_reply));
            std::future::poll_fn(|cx| {
                self.control.set_task(cx.waker());
                if self.control.stopping() {
                    return Poll::Ready(Err(NvmeEndReason::Stopped));
                }
                if let Poll::Ready(shaken) = shaking.as_mut().poll(cx) {
                    return Poll::Ready(Ok(shaken));
                }
                self.ending.poll_handshake(cx).map(|()| Err(NvmeEndReason::TooSlow))
            })
            .await
        };
        let left = match shaken? {
            Ok(left) => left,
            Err(HandshakeError::Stream(error)) => return Err(NvmeEndReason::Socket(error)),
            Err(HandshakeError::Refused(failure)) => {
                let end = self.insecure(&failure);
                drain(&stream, pools.sealed(false), LINGER).await;
                return Err(end);
            }
        };
        let identity = session.identity();
        let (Some(parties), Some(suite)) = (psk::parties(&identity), session.suite()) else {
            return Err(self.insecure(&TlsFailure::NoKey));
        };
        let (host, subsystem) = (parties.host, parties.subsystem);
        tracing::debug!(peer = %self.peer, host, subsystem, suite = suite.name(), "TLS established");
        let (host, subsystem) = (host.to_owned(), subsystem.to_owned());
        let secured = SecureStream::new(stream, session, left, pools, shared.record.clone());
        Ok(Rc::new(TlsChannel { stream: Rc::new(secured), suite, host, subsystem }))
    }

    fn insecure(&self, failure: &TlsFailure) -> NvmeEndReason {
        self.server.subsystems.stats().count(|counts| counts.tls_failures += 1);
        host_refused(&self.peer, None, format_args!("TLS failed: {failure}"));
        NvmeEndReason::Insecure
    }

    /// Returns the refusal of a Connect that does not match the TLS session, or that lacks required TLS.
    pub(super) fn channel_refuses(&self, connect: &Connect) -> Option<ConnectRefusal> {
        let discovers = connect.subsystem == DISCOVERY_NQN;
        match &self.channel {
            // The TLS key belongs to one host.
            Some(channel) if channel.host != connect.host => Some(ConnectRefusal::parameter(connect_field::HOST)),
            // The TLS key also belongs to one subsystem.  Discovery is exempt: it reveals nothing that its controllers
            // do not.
            Some(channel) if channel.subsystem != connect.subsystem && !discovers => {
                Some(ConnectRefusal::parameter(connect_field::SUBSYSTEM))
            }
            // Otherwise anyone who claims this host's name could omit TLS.
            None if !discovers && self.server.subsystems.needs_tls(&connect.subsystem, &connect.host) => {
                Some(ConnectRefusal::status(NvmeStatus::CONNECT_HOST.final_()))
            }
            _ => None,
        }
    }
}
