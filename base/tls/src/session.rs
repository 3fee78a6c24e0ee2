//! One side of a connection.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};

use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture};
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, PskHmac};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::security::Policy;

use crate::hello::offered;
use crate::pipe::{Pipe, receive, send};
use crate::{Hash, Keys, Psk};

/// The library's list of what may be agreed on that has TLS 1.3 only, the two suites that we want only, and the curves
/// secp256r1, secp384r1 and secp521r1.
const POLICY: &str = "ELBSecurityPolicy-TLS13-1-3-FIPS-2023-04";
/// Plain bytes of a record, at most (RFC 8446, section 5.1).
const RECORD: usize = 1 << 14;
/// What a record has beside them: its header, the kind of content, and the tag.
const RECORD_EXTRA: usize = 5 + 1 + 16;
/// What may come before data of its own accord: a KeyUpdate.
const KEY_UPDATE: usize = 5 + RECORD_EXTRA;
/// Bytes that a handshake may take from a peer: a ClientHello twice, and what ends the handshake.
const HANDSHAKE_MAX: usize = 16 << 10;
/// The first byte of every handshake.
const HANDSHAKE: u8 = 22;

/// Alerts (RFC 8446, section 6) that are sent while nothing is encrypted.
pub mod alert {
    /// Something that may not come now.
    pub const UNEXPECTED_MESSAGE: u8 = 10;
    /// There is nothing to agree on.
    pub const HANDSHAKE_FAILURE: u8 = 40;
    /// It makes no sense.
    pub const DECODE_ERROR: u8 = 50;
    /// A proof is wrong.
    pub const DECRYPT_ERROR: u8 = 51;
    /// Another version.
    pub const PROTOCOL_VERSION: u8 = 70;
    /// The fault is this side's.
    pub const INTERNAL_ERROR: u8 = 80;
    /// No key with this identity is known.
    pub const UNKNOWN_PSK_IDENTITY: u8 = 115;

    /// The record of a fatal alert before anything is encrypted.
    pub const fn record(code: u8) -> [u8; 7] {
        [21, 3, 3, 0, 2, 2, code]
    }
}

/// Bytes that `plain` bytes may take once they are sealed.
pub fn sealed_len(plain: usize) -> usize {
    plain + plain.div_ceil(RECORD) * RECORD_EXTRA + KEY_UPDATE
}

/// What was agreed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Suite {
    /// TLS_AES_128_GCM_SHA256.
    Aes128Gcm,
    /// TLS_AES_256_GCM_SHA384.
    Aes256Gcm,
}

impl Suite {
    /// Its name as it is registered.
    pub fn name(self) -> &'static str {
        match self {
            Suite::Aes128Gcm => "TLS_AES_128_GCM_SHA256",
            Suite::Aes256Gcm => "TLS_AES_256_GCM_SHA384",
        }
    }
}

/// Why there is no session, or not any more.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The peer does not speak TLS.
    #[error("the peer does not speak TLS")]
    Plain,
    /// It offers no pre-shared key.
    #[error("the peer offers no pre-shared key")]
    NoKey,
    /// It offers keys of which none is known, the first with this identity.
    #[error("no key with the identity '{0}' is known")]
    UnknownIdentity(String),
    /// It does not have the key of the identity that it offers.
    #[error("the peer does not have the key of the identity that it offers")]
    WrongKey,
    /// Its handshake goes on and on.
    #[error("a handshake of more than {HANDSHAKE_MAX} bytes")]
    TooLong,
    /// It has ended the session with an alert.
    #[error("the peer has ended the session with an alert")]
    Alert,
    /// Something that the protocol does not allow, or that we do not.
    #[error("{0}")]
    Protocol(&'static str),
    /// The library has failed.
    #[error("{0}")]
    Library(&'static str),
}

impl Failure {
    fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorType::Alert => Failure::Alert,
            // The second is how the library puts a proof of another length: one by another hash.
            _ if ["S2N_ERR_BAD_PSK_BINDER", "S2N_ERR_SAFETY"].contains(&error.name()) => Failure::WrongKey,
            ErrorType::ProtocolError => Failure::Protocol(error.message()),
            _ => Failure::Library(error.message()),
        }
    }

    /// What the peer is told.
    fn alert(&self) -> Option<u8> {
        Some(match self {
            Failure::Plain => alert::UNEXPECTED_MESSAGE,
            Failure::NoKey => alert::HANDSHAKE_FAILURE,
            Failure::UnknownIdentity(_) => alert::UNKNOWN_PSK_IDENTITY,
            Failure::WrongKey => alert::DECRYPT_ERROR,
            Failure::TooLong => alert::DECODE_ERROR,
            Failure::Protocol(text) if text.contains("version") => alert::PROTOCOL_VERSION,
            Failure::Protocol(_) => alert::HANDSHAKE_FAILURE,
            Failure::Library(_) => alert::INTERNAL_ERROR,
            Failure::Alert => return None,
        })
    }
}

/// What came of looking at the keys that a ClientHello offers.
#[derive(Debug, Default)]
struct Offer {
    /// Keys of the identity that were tried before.
    tried: usize,
    /// What was found, and whether there is another.
    found: OnceLock<Result<bool, Failure>>,
}

/// Finds the key that a ClientHello asks for, before the library looks at it.
struct Finder(Arc<dyn Keys>);

impl Finder {
    /// The key after those that were tried, and whether there is another.
    fn look(&self, connection: &Connection, tried: usize) -> Result<(Psk, bool), Failure> {
        let hello = connection.client_hello().and_then(|hello| hello.raw_message());
        let hello = hello.map_err(|error| Failure::of(&error))?;
        let identities = offered(&hello).ok_or(Failure::Protocol("a damaged ClientHello"))?;
        let first = identities.first().ok_or(Failure::NoKey)?;
        let mut found = identities.iter().flat_map(|identity| self.0.find(identity)).skip(tried);
        found
            .next()
            .map(|psk| (psk, found.next().is_some()))
            .ok_or_else(|| Failure::UnknownIdentity(first.escape_ascii().to_string()))
    }
}

impl ClientHelloCallback for Finder {
    fn on_client_hello(&self, connection: &mut Connection) -> Result<Option<Pin<Box<dyn ConnectionFuture>>>, Error> {
        let tried = connection.application_context::<Offer>().map_or(0, |offer| offer.tried);
        let found = self.look(connection, tried);
        let known = match &found {
            Ok((psk, _)) => append(connection, psk),
            Err(failure) => Err(Error::application(Box::new(failure.clone()))),
        };
        if let Some(offer) = connection.application_context::<Offer>() {
            // It is called once a connection.
            let _ = offer.found.set(found.map(|(_, more)| more));
        }
        known.map(|()| None)
    }
}

fn append(connection: &mut Connection, psk: &Psk) -> Result<(), Error> {
    let mut builder = s2n_tls::psk::Psk::builder()?;
    builder.set_identity(&psk.identity)?.set_secret(&psk.secret)?;
    builder.set_hmac(match psk.hash {
        Hash::Sha256 => PskHmac::SHA256,
        Hash::Sha384 => PskHmac::SHA384,
    })?;
    connection.append_psk(&builder.build()?)
}

fn configuration(keys: Option<Arc<dyn Keys>>) -> Result<Config, Error> {
    let mut builder = Config::builder();
    builder.with_system_certs(false)?;
    builder.set_security_policy(&Policy::from_version(POLICY)?)?;
    if let Some(keys) = keys {
        builder.set_client_hello_callback(Finder(keys))?;
    }
    builder.build()
}

/// What the sessions of a server share.
#[derive(Clone)]
pub struct Acceptor(Config);

impl Acceptor {
    /// One whose peers have keys out of `keys`.
    ///
    /// # Errors
    /// Of the library.
    pub fn new(keys: Arc<dyn Keys>) -> Result<Self, Failure> {
        configuration(Some(keys)).map(Self).map_err(|error| Failure::of(&error))
    }
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

/// What [`Session::read`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// So many bytes of data.
    Data(usize),
    /// The peer has to send more.
    Hungry,
    /// The peer has said that it sends no more.
    Closed,
}

/// One side of a connection.
pub struct Session {
    /// Before the pipe, so that it is dropped first.
    connection: Connection,
    pipe: Pipe,
    /// Bytes of the peer that the handshake has taken.
    taken: usize,
    server: bool,
    /// Of a server until its first answer: how it began, and what it has taken, to begin anew with another key.
    first: Option<(Acceptor, Vec<u8>)>,
    /// A read failed behind data that was given out first.
    failed: Option<Failure>,
}

impl Session {
    /// The side that waits for a ClientHello.
    ///
    /// # Errors
    /// Of the library.
    pub fn accept(acceptor: &Acceptor) -> Result<Self, Failure> {
        Self::accept_after(acceptor, 0)
    }

    /// The same with another key, after so many were tried.
    fn accept_after(acceptor: &Acceptor, tried: usize) -> Result<Self, Failure> {
        let mut session = Self::new(Connection::new_server(), acceptor.0.clone(), true)?;
        session.connection.set_application_context(Offer { tried, ..Offer::default() });
        session.first = Some((acceptor.clone(), Vec::new()));
        Ok(session)
    }

    /// The side that begins, and offers these keys.
    ///
    /// # Errors
    /// Of the library; a key that is too short.
    pub fn connect(psks: &[Psk]) -> Result<Self, Failure> {
        let config = configuration(None).map_err(|error| Failure::of(&error))?;
        let mut session = Self::new(Connection::new_client(), config, false)?;
        psks.iter().try_for_each(|psk| append(&mut session.connection, psk)).map_err(|error| Failure::of(&error))?;
        Ok(session)
    }

    fn new(mut connection: Connection, config: Config, server: bool) -> Result<Self, Failure> {
        let pipe = Pipe::new();
        let set = || -> Result<(), Error> {
            connection.set_config(config)?;
            // Nobody waits here for whoever sends nonsense: there is no padding to guess at in these suites.
            connection.set_blinding(Blinding::SelfService)?;
            connection.prefer_throughput()?;
            connection.set_receive_callback(Some(receive))?;
            connection.set_send_callback(Some(send))?;
            // SAFETY: the pipe lives as long as the connection, and its address does not change.
            unsafe { connection.set_receive_context(pipe.context())? };
            // SAFETY: the same.
            unsafe { connection.set_send_context(pipe.context())? };
            // Our callback never waits, but the library wants to be able to.
            connection.set_waker(Some(Waker::noop()))?;
            Ok(())
        };
        set().map_err(|error| Failure::of(&error))?;
        Ok(Self { connection, pipe, taken: 0, server, first: None, failed: None })
    }

    /// Goes on with the handshake: takes bytes of the peer from `input`, and adds to `output` what it is to be sent, after a
    /// failure too.  True when the handshake is over; what is left of the input is then data.
    ///
    /// # Errors
    /// Why there will be no session.
    pub fn handshake(&mut self, input: &mut &[u8], output: &mut Vec<u8>) -> Result<bool, Failure> {
        let whole = *input;
        let result = self.negotiate(input);
        if let Some((acceptor, mut taken)) = self.first.take()
            && self.pipe.written() == 0
        {
            taken.extend_from_slice(&whole[..whole.len() - input.len()]);
            if result == Err(Failure::WrongKey) && self.has_another() {
                // Nothing was said yet, so that it can be heard anew.
                let tried = self.connection.application_context::<Offer>().map_or(0, |offer| offer.tried);
                *self = Self::accept_after(&acceptor, tried + 1)?;
                let mut again = &taken[..];
                // What was taken is one ClientHello, and all of it is taken again.
                return self.handshake(&mut again, output);
            }
            self.first = Some((acceptor, taken));
        }
        output.append(&mut self.pipe.overflow());
        if let Err(failure) = &result
            && self.server
            && self.pipe.written() == 0
            && let Some(code) = failure.alert()
        {
            output.extend_from_slice(&alert::record(code));
        }
        result
    }

    fn negotiate(&mut self, input: &mut &[u8]) -> Result<bool, Failure> {
        if self.server && self.taken == 0 && input.first().is_some_and(|first| *first != HANDSHAKE) {
            return Err(Failure::Plain);
        }
        let before = input.len();
        let Self { connection, pipe, .. } = self;
        let (polled, _) = pipe.lend(input, &mut [], || connection.poll_negotiate().map_ok(drop));
        self.taken += before - input.len();
        match polled {
            Poll::Ready(Ok(())) => self.agreed().map(|_| true),
            Poll::Ready(Err(error)) => Err(self.refusal().unwrap_or_else(|| Failure::of(&error))),
            Poll::Pending if self.taken > HANDSHAKE_MAX => Err(Failure::TooLong),
            Poll::Pending => Ok(false),
        }
    }

    /// Why the offered keys were refused, where that is why there is no session.
    fn refusal(&self) -> Option<Failure> {
        self.connection.application_context::<Offer>()?.found.get()?.as_ref().err().cloned()
    }

    /// There is another key with the identity that the peer offers.
    fn has_another(&self) -> bool {
        let offer = self.connection.application_context::<Offer>();
        offer.is_some_and(|offer| matches!(offer.found.get(), Some(Ok(true))))
    }

    /// The suite and the identity of the key that were agreed on.
    ///
    /// # Errors
    /// When a handshake has not come to what we allow.
    fn agreed(&self) -> Result<(Suite, Vec<u8>), Failure> {
        let suite = self.suite().ok_or(Failure::Protocol("a suite that is not allowed"))?;
        let len = self.connection.negotiated_psk_identity_length().map_err(|error| Failure::of(&error))?;
        let mut identity = vec![0; len];
        self.connection.negotiated_psk_identity(&mut identity).map_err(|error| Failure::of(&error))?;
        if identity.is_empty() {
            return Err(Failure::NoKey);
        }
        Ok((suite, identity))
    }

    /// The suite that was agreed on.
    pub fn suite(&self) -> Option<Suite> {
        let name = self.connection.cipher_suite().ok()?;
        [Suite::Aes128Gcm, Suite::Aes256Gcm].into_iter().find(|suite| suite.name() == name)
    }

    /// The identity of the key that was agreed on; empty before that.
    pub fn identity(&self) -> Vec<u8> {
        self.agreed().map(|(_, identity)| identity).unwrap_or_default()
    }

    /// Opens records of the peer from `input`, and puts what was in them into `out`.
    ///
    /// # Errors
    /// When the session cannot go on.
    pub fn read(&mut self, input: &mut &[u8], out: &mut [u8]) -> Result<Read, Failure> {
        if let Some(failure) = self.failed.take() {
            return Err(failure);
        }
        let Self { connection, pipe, failed, .. } = self;
        let (polled, _) = pipe.lend(input, &mut [], || {
            let mut filled = 0;
            // One record a call; there is more in the input often.
            while filled < out.len() {
                match connection.poll_recv(&mut out[filled..]) {
                    Poll::Ready(Ok(0)) if filled == 0 => return Ok(Read::Closed),
                    Poll::Ready(Ok(0)) | Poll::Pending => break,
                    Poll::Ready(Ok(len)) => filled += len,
                    Poll::Ready(Err(error)) if filled > 0 => {
                        *failed = Some(Failure::of(&error));
                        break;
                    }
                    Poll::Ready(Err(error)) => return Err(Failure::of(&error)),
                }
            }
            Ok(if filled == 0 { Read::Hungry } else { Read::Data(filled) })
        });
        polled
    }

    /// Seals `plain` into `out`, which has room for [`sealed_len`] bytes; says how many it took.
    ///
    /// # Errors
    /// When the session has ended.
    pub fn write(&mut self, plain: &[u8], out: &mut [u8]) -> Result<usize, Failure> {
        let Self { connection, pipe, .. } = self;
        let (polled, len) = pipe.lend(&mut &[][..], out, || connection.poll_send(plain));
        match polled {
            Poll::Ready(Ok(taken)) if taken == plain.len() && self.pipe.overflow().is_empty() => Ok(len),
            Poll::Ready(Err(error)) => Err(Failure::of(&error)),
            _ => Err(Failure::Library("a record is longer than it can be")),
        }
    }

    /// Has the keys of what is sent changed with the next data, and asks the peer for the same.
    ///
    /// # Errors
    /// Of the library.
    pub fn update_keys(&mut self) -> Result<(), Failure> {
        use s2n_tls::enums::PeerKeyUpdate;
        let asked = self.connection.request_key_update(PeerKeyUpdate::KeyUpdateNotRequested);
        asked.map(drop).map_err(|error| Failure::of(&error))
    }

    /// Gives back what the library keeps for its next record, if there is nothing in it.
    pub fn rest(&mut self) {
        // It refuses while a part of a record is there, which is what we want.
        let _ = self.connection.release_buffers();
    }

    /// The record that says that nothing follows.
    pub fn close(&mut self) -> Vec<u8> {
        let Self { connection, pipe, .. } = self;
        let _ = pipe.lend(&mut &[][..], &mut [], || connection.poll_shutdown_send().map_ok(drop));
        self.pipe.overflow()
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Session({})", if self.server { "server" } else { "client" })
    }
}
