//! Transport of a host: a plain stream, or TLS.

use std::cell::RefCell;
use std::io;

use forebay_reactor::{Buf, BufMut, Stream};
use forebay_tls::{Psk, Read, Suite, TlsSession, sealed_len};

/// Connection with its TLS session, if any.
pub struct Wire {
    stream: Stream,
    session: Option<RefCell<TlsSession>>,
    /// Bytes received and not decrypted yet.
    input: RefCell<Vec<u8>>,
}

fn broken(why: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("TLS: {why}"))
}

impl Wire {
    /// Creates a transport without TLS.
    pub fn plain(stream: Stream) -> Self {
        Self { stream, session: None, input: RefCell::default() }
    }

    /// Runs a TLS handshake with one of these keys.
    ///
    /// # Errors
    /// When the handshake fails; `UnexpectedEof` when the other end closes the connection without an alert.
    pub async fn secure(stream: Stream, psks: &[Psk]) -> io::Result<Self> {
        let mut session = TlsSession::connect(psks).map_err(broken)?;
        let (mut input, mut output) = (Vec::new(), Vec::new());
        loop {
            let mut left = &input[..];
            let result = session.handshake(&mut left, &mut output);
            let taken = input.len() - left.len();
            input.drain(..taken);
            if !output.is_empty() {
                stream.send(Buf::copy_of(&output)).await?;
                output.clear();
            }
            if result.map_err(broken)? {
                return Ok(Self { stream, session: Some(session.into()), input: input.into() });
            }
            let (got, buf) = stream.recv(BufMut::with_capacity(4096)).await;
            if got? == 0 {
                return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed during the handshake"));
            }
            input.extend_from_slice(&buf);
        }
    }

    /// Returns the negotiated cipher suite.
    pub fn suite(&self) -> Option<Suite> {
        self.session.as_ref()?.borrow().suite()
    }

    /// Updates the TLS traffic keys with the next send.
    ///
    /// # Panics
    /// Without TLS.
    pub fn update_keys(&self) {
        self.session.as_ref().expect("TLS").borrow_mut().update_keys().expect("new keys");
    }

    /// Receives some bytes; empty at the end of the stream.
    pub async fn receive(&self) -> io::Result<Vec<u8>> {
        loop {
            if let Some(session) = &self.session {
                let mut out = vec![0; 64 << 10];
                let mut input = self.input.borrow_mut();
                let mut left = &input[..];
                let read = session.borrow_mut().read(&mut left, &mut out).map_err(broken)?;
                let taken = input.len() - left.len();
                input.drain(..taken);
                match read {
                    Read::Data(len) => {
                        out.truncate(len);
                        return Ok(out);
                    }
                    Read::Closed => return Ok(Vec::new()),
                    Read::NeedInput => {}
                }
            }
            let (got, buf) = self.stream.recv(BufMut::with_capacity(64 << 10)).await;
            got?;
            match &self.session {
                Some(_) if !buf.is_empty() => self.input.borrow_mut().extend_from_slice(&buf),
                Some(_) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "closed without close_notify")),
                None => return Ok(buf.to_vec()),
            }
        }
    }

    /// Sends bytes.
    pub async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        let Some(session) = &self.session else { return self.stream.send(Buf::copy_of(bytes)).await };
        let mut out = vec![0; sealed_len(bytes.len())];
        let len = session.borrow_mut().write(bytes, &mut out).map_err(broken)?;
        self.stream.send(Buf::copy_of(&out[..len])).await
    }

    /// Sends raw bytes, bypassing TLS.
    pub async fn send_raw(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.send(Buf::copy_of(bytes)).await
    }

    /// Announces the end of the sent data.
    pub async fn close(&self) -> io::Result<()> {
        let Some(session) = &self.session else { return Ok(()) };
        let closing = session.borrow_mut().close();
        self.stream.send(Buf::copy_of(&closing)).await
    }

    /// Ends the connection.
    pub fn shutdown(&self) {
        self.stream.shutdown();
    }
}
