//! Handshake: transfers bytes between the socket and the negotiation, opens exports for it, and upgrades to TLS.

use std::io;
use std::rc::Rc;

use forebay_block::{BufMut, Error, ErrorKind};
use forebay_reactor::time::Sleep;
use forebay_reactor::{Buf, Stream, now, sleep_until};
use forebay_serve::secure::{HandshakeError, SealBuffers, SecureStream, handshake};
use forebay_serve::{Interrupted, ReceiveRequest};
use forebay_tls::{TlsFailure, TlsSession};

use super::{NbdConnectionControl, NbdExport, NbdServer};
use crate::access::{HostName, NbdHost};
use crate::session::{
    ExportInfo, NbdParameters, NbdPools, NbdViolation, Negotiation, NegotiationQuery, NegotiationStep, Tls,
};

/// Bytes received at once.
const RECEIVE: usize = 4096;

/// Reason why a handshake did not lead to transmission.
#[derive(Debug, thiserror::Error)]
pub(super) enum NbdHandshakeEnd {
    #[error("{0}")]
    Violation(#[from] NbdViolation),
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error("the client closed the connection")]
    Closed,
    #[error("TLS: {0}")]
    Tls(HandshakeError),
    #[error("the host is refused")]
    Refused,
    #[error("{0}")]
    Interrupted(#[from] Interrupted),
}

impl NbdHandshakeEnd {
    /// Returns whether the client caused the end, by a protocol error or a timeout.
    pub(super) fn is_cause(&self) -> bool {
        matches!(self, NbdHandshakeEnd::Violation(_) | NbdHandshakeEnd::Interrupted(Interrupted::TooSlow))
    }
}

/// Connection whose client has chosen its export.
pub(super) struct Negotiated {
    pub(super) export: NbdExport,
    pub(super) info: ExportInfo,
    pub(super) agreed: NbdParameters,
    /// Bytes received after the negotiation.
    pub(super) received: Vec<u8>,
}

/// Transport of a connection: a socket, or TLS on one.
#[derive(Clone)]
pub(super) enum NbdStream {
    Plain(Stream),
    Secure(Rc<SecureStream<NbdPools>>),
}

impl NbdStream {
    async fn receive(&self, buf: BufMut) -> (io::Result<usize>, BufMut) {
        match self {
            NbdStream::Plain(stream) => stream.recv(buf).await,
            NbdStream::Secure(stream) => stream.clone().receive(ReceiveRequest { buf, all: false }).await,
        }
    }

    async fn send(&self, bytes: Buf) -> io::Result<()> {
        match self {
            NbdStream::Plain(stream) => stream.send(bytes).await,
            NbdStream::Secure(stream) => stream.clone().send(bytes.into()).await,
        }
    }

    /// Sends TLS's closing alert, if TLS is in force.
    pub(super) async fn close(&self) {
        if let NbdStream::Secure(stream) = self {
            stream.close().await;
        }
    }
}

pub(super) struct NbdHandshake<'a> {
    pub(super) server: &'a NbdServer,
    pub(super) control: &'a NbdConnectionControl,
    pub(super) tls: Tls,
    pub(super) channel: NbdStream,
    pub(super) host: NbdHost,
    /// Set once a refused export was logged for this connection.
    pub(super) refused: bool,
}

impl NbdHandshake<'_> {
    /// Negotiates; returns `None` if the client ended the negotiation.
    pub(super) async fn run(&mut self) -> Result<Option<Negotiated>, NbdHandshakeEnd> {
        let mut patience = sleep_until(now() + self.server.options.handshake_timeout);
        let mut out = Vec::new();
        let mut negotiation = Negotiation::new(self.tls, &mut out);
        let mut input = Vec::new();
        // Clients nearly always choose the export that they queried last.
        let mut opened: Option<(String, NbdExport, ExportInfo)> = None;
        loop {
            let (taken, mut step) = negotiation.feed(&input, &mut out)?;
            input.drain(..taken);
            if let NegotiationStep::Query(ask) = &step {
                step = match ask {
                    NegotiationQuery::List => {
                        let exports = self.server.exports.list(&self.host);
                        let pairs = exports.iter().map(|export| (export.name.as_str(), export.description.as_str()));
                        negotiation.listed(pairs, &mut out);
                        NegotiationStep::More
                    }
                    NegotiationQuery::Export { name, .. } => {
                        let found = self.open(name, &mut opened).await;
                        negotiation.opened(found.as_ref().map(|(_, info)| info), &mut out)?
                    }
                };
                if step == NegotiationStep::More {
                    // Another option may be in the input already.
                    self.flush(&mut out, &mut patience).await?;
                    continue;
                }
            }
            self.flush(&mut out, &mut patience).await?;
            match step {
                NegotiationStep::More => {
                    let buf = BufMut::with_capacity(RECEIVE);
                    let (result, buf) = self.within(&mut patience, self.channel.receive(buf)).await?;
                    if result? == 0 {
                        return Err(NbdHandshakeEnd::Closed);
                    }
                    input.extend_from_slice(&buf);
                }
                NegotiationStep::StartTls => {
                    self.secure(std::mem::take(&mut input), &mut patience).await?;
                    negotiation.secured();
                    // The export may belong to another host under the proved name.
                    opened = None;
                    self.control.export.borrow_mut().take();
                }
                NegotiationStep::Goodbye => return Ok(None),
                NegotiationStep::Transmit(agreed) => {
                    let (_, export, info) = opened.expect("an export was opened for transmission");
                    return Ok(Some(Negotiated { export, info, agreed, received: input }));
                }
                NegotiationStep::Query(_) => unreachable!("answered above"),
            }
        }
    }

    /// Upgrades to TLS.  `received` are the bytes after the option `NBD_OPT_STARTTLS`, which belong to TLS.
    async fn secure(&mut self, received: Vec<u8>, patience: &mut Sleep) -> Result<(), NbdHandshakeEnd> {
        let NbdStream::Plain(stream) = &self.channel else { unreachable!("TLS is not begun twice") };
        let refused = |failure| NbdHandshakeEnd::Tls(HandshakeError::Refused(failure));
        let access = self.server.access.get();
        let acceptor =
            access.tls.as_ref().ok_or_else(|| refused(TlsFailure::Library("no certificate or key is set")))?;
        let mut session = TlsSession::accept(acceptor).map_err(refused)?;
        let pools = &self.server.pools;
        let buf = match received.len() {
            0 => pools.sealed(false),
            _ => BufMut::copy_of(&received),
        };
        let left = self.within(patience, handshake(stream, &mut session, buf, |_, _| None)).await?;
        let left = left.map_err(NbdHandshakeEnd::Tls)?;
        self.host.name = session.peer().and_then(HostName::of);
        let secured = SecureStream::new(stream.clone(), session, left, pools.clone(), self.server.record.clone());
        self.channel = NbdStream::Secure(Rc::new(secured));
        // The order matters: a list that changes meanwhile is seen here, or `expel` finds the name.
        self.control.secured(self.host.name.clone());
        if let Some(reason) = self.server.access.get().refuses_name(self.host.name.as_ref()) {
            self.server.host_refused(&self.host, None, reason);
            return Err(NbdHandshakeEnd::Refused);
        }
        Ok(())
    }

    /// Returns the export called `name`, from the cache in `opened` or newly opened.
    async fn open(
        &mut self,
        name: &str,
        opened: &mut Option<(String, NbdExport, ExportInfo)>,
    ) -> forebay_block::Result<(NbdExport, ExportInfo)> {
        if self.control.stop_signal.stopping() {
            return Err(ErrorKind::ShuttingDown.into());
        }
        if opened.as_ref().is_none_or(|(before, ..)| before != name) {
            *opened = None;
            self.control.export.borrow_mut().take();
            let export = loop {
                let detaches = self.server.detaches.get();
                let found = self.server.exports.open(name, &self.host).await;
                let export = found.map_err(|error| self.hidden(name, error))?;
                // An export that was detached while it was being opened must be opened again.
                if self.server.detaches.get() == detaches {
                    break export;
                }
            };
            // From here on a detach ends this connection, too.
            *self.control.export.borrow_mut() = Some(export.name.clone());
            let info = export.info(&self.server.options)?;
            *opened = Some((name.to_owned(), export, info));
        }
        let (_, export, info) = opened.as_ref().expect("opened above");
        Ok((export.clone(), info.clone()))
    }

    /// Replaces the error for a denied export with that of a missing one, and logs the refusal once.
    fn hidden(&mut self, name: &str, error: Error) -> Error {
        if error.kind() != ErrorKind::Denied {
            return error;
        }
        if !std::mem::replace(&mut self.refused, true) {
            self.server.host_refused(&self.host, Some(name), error.context());
        }
        Error::new(ErrorKind::NotFound, format!("no image is exported as '{name}'"))
    }

    async fn flush(&self, out: &mut Vec<u8>, patience: &mut Sleep) -> Result<(), NbdHandshakeEnd> {
        if out.is_empty() {
            return Ok(());
        }
        let bytes = Buf::copy_of(out);
        out.clear();
        Ok(self.within(patience, self.channel.send(bytes)).await??)
    }

    /// Awaits `future`, unless the handshake times out or the connection is stopped.
    async fn within<F: Future>(&self, patience: &mut Sleep, future: F) -> Result<F::Output, NbdHandshakeEnd> {
        Ok(self.control.stop_signal.within(patience, future).await?)
    }
}
