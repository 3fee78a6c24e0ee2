//! The handshake: carries bytes between the socket and the negotiation, and opens exports for it.

use std::io;

use forebay_block::{BufMut, ErrorKind};
use forebay_reactor::time::Sleep;
use forebay_reactor::{Buf, Stream, now, sleep_until};
use forebay_serve::Interrupted;

use super::{Control, Export, Server};
use crate::session::{Agreed, Ask, ExportInfo, Negotiation, Step, Violation};

/// Bytes received at once.
const RECEIVE: usize = 4096;

/// Why there is no transmission.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("{0}")]
    Violation(#[from] Violation),
    #[error("the socket failed: {0}")]
    Socket(#[from] io::Error),
    #[error("the client closed the connection")]
    Closed,
    #[error("{0}")]
    Interrupted(#[from] Interrupted),
}

impl Ended {
    /// The client is to blame.
    pub(super) fn is_cause(&self) -> bool {
        matches!(self, Ended::Violation(_) | Ended::Interrupted(Interrupted::TooSlow))
    }
}

/// A connection whose client has chosen its export.
pub(super) struct Ready {
    pub(super) export: Export,
    pub(super) info: ExportInfo,
    pub(super) agreed: Agreed,
    /// What came behind the negotiation.
    pub(super) received: Vec<u8>,
}

pub(super) struct Handshake<'a> {
    pub(super) server: &'a Server,
    pub(super) control: &'a Control,
    pub(super) stream: &'a Stream,
}

impl Handshake<'_> {
    /// Negotiates; `None` when the client said goodbye.
    pub(super) async fn run(self) -> Result<Option<Ready>, Ended> {
        let mut patience = sleep_until(now() + self.server.options.handshake_timeout);
        let mut out = Vec::new();
        let mut negotiation = Negotiation::new(&mut out);
        let mut input = Vec::new();
        // What the client looked at last is what it chooses, nearly always.
        let mut opened: Option<(String, Export, ExportInfo)> = None;
        loop {
            let (taken, mut step) = negotiation.feed(&input, &mut out)?;
            input.drain(..taken);
            if let Step::Ask(ask) = &step {
                step = match ask {
                    Ask::List => {
                        let exports = self.server.exports.list();
                        let pairs = exports.iter().map(|export| (export.name.as_str(), export.description.as_str()));
                        negotiation.listed(pairs, &mut out);
                        Step::More
                    }
                    Ask::Export { name, .. } => {
                        let found = self.open(name, &mut opened).await;
                        negotiation.opened(found.as_ref().map(|(_, info)| info), &mut out)?
                    }
                };
                if step == Step::More {
                    // There may be more options behind this one already.
                    self.flush(&mut out, &mut patience).await?;
                    continue;
                }
            }
            self.flush(&mut out, &mut patience).await?;
            match step {
                Step::More => {
                    let buf = BufMut::with_capacity(RECEIVE);
                    let (result, buf) = self.within(&mut patience, self.stream.recv(buf)).await?;
                    if result? == 0 {
                        return Err(Ended::Closed);
                    }
                    input.extend_from_slice(&buf);
                }
                Step::Goodbye => return Ok(None),
                Step::Transmit(agreed) => {
                    let (_, export, info) = opened.expect("an export was opened for transmission");
                    return Ok(Some(Ready { export, info, agreed, received: input }));
                }
                Step::Ask(_) => unreachable!("answered above"),
            }
        }
    }

    /// The export called `name`, from before or opened now; kept in `opened`.
    async fn open(
        &self,
        name: &str,
        opened: &mut Option<(String, Export, ExportInfo)>,
    ) -> forebay_block::Result<(Export, ExportInfo)> {
        if self.control.bell.stopping() {
            return Err(ErrorKind::ShuttingDown.into());
        }
        if opened.as_ref().is_none_or(|(before, ..)| before != name) {
            *opened = None;
            self.control.export.borrow_mut().take();
            let export = loop {
                let detaches = self.server.detaches.get();
                let export = self.server.exports.open(name).await?;
                // One that was detached while it was being opened is not to be had any more.
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

    async fn flush(&self, out: &mut Vec<u8>, patience: &mut Sleep) -> Result<(), Ended> {
        if out.is_empty() {
            return Ok(());
        }
        let bytes = Buf::copy_of(out);
        out.clear();
        Ok(self.within(patience, self.stream.send(bytes)).await??)
    }

    /// What `future` comes to, unless the client is too slow or the server stops.
    async fn within<F: Future>(&self, patience: &mut Sleep, future: F) -> Result<F::Output, Ended> {
        Ok(self.control.bell.within(patience, future).await?)
    }
}
