//! TLS session: one side of a connection.

use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::task::{Poll, Waker};

use s2n_tls::callbacks::{ClientHelloCallback, ConnectionFuture, VerifyHostNameCallback};
use s2n_tls::config::Config;
use s2n_tls::connection::Connection;
use s2n_tls::enums::{Blinding, ClientAuthType, PskHmac};
use s2n_tls::error::{Error, ErrorType};
use s2n_tls::security::Policy;

use crate::hello::offered;
use crate::pipe::{Pipe, receive, send};
use crate::{Certificate, CertificateSubject, Psk, PskHash, PskLookup, ServerCertificate};

/// Security policy of s2n-tls with TLS 1.3 only, the two allowed suites only, and the curves secp256r1, secp384r1 and
/// secp521r1.
const POLICY: &str = "ELBSecurityPolicy-TLS13-1-3-FIPS-2023-04";
/// Maximum plaintext bytes of a record (RFC 8446, section 5.1).
const RECORD: usize = 1 << 14;
/// Overhead of a record in bytes: header, content type and tag.
const RECORD_EXTRA: usize = 5 + 1 + 16;
/// Bytes of a KeyUpdate, which may precede data.
const KEY_UPDATE: usize = 5 + RECORD_EXTRA;
/// Maximum bytes of a peer's handshake: a ClientHello twice, and the messages that end the handshake.
const HANDSHAKE_MAX: usize = 16 << 10;
/// Content type of handshake records: the first byte of every handshake.
const HANDSHAKE: u8 = 22;

/// Alerts (RFC 8446, section 6) that are sent while nothing is encrypted.
pub mod alert {
    /// Unexpected message.
    pub const UNEXPECTED_MESSAGE: u8 = 10;
    /// No acceptable parameters in common.
    pub const HANDSHAKE_FAILURE: u8 = 40;
    /// Message could not be decoded.
    pub const DECODE_ERROR: u8 = 50;
    /// Cryptographic verification failed.
    pub const DECRYPT_ERROR: u8 = 51;
    /// Unsupported protocol version.
    pub const PROTOCOL_VERSION: u8 = 70;
    /// Internal error of this side.
    pub const INTERNAL_ERROR: u8 = 80;
    /// Unknown pre-shared key identity.
    pub const UNKNOWN_PSK_IDENTITY: u8 = 115;

    /// Returns the record of a fatal alert before anything is encrypted.
    pub const fn record(code: u8) -> [u8; 7] {
        [21, 3, 3, 0, 2, 2, code]
    }
}

/// Returns the maximum encrypted length of `plain` bytes.
pub fn sealed_len(plain: usize) -> usize {
    plain + plain.div_ceil(RECORD) * RECORD_EXTRA + KEY_UPDATE
}

/// Negotiated cipher suite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Suite {
    /// TLS_AES_128_GCM_SHA256 cipher suite.
    Aes128Gcm,
    /// TLS_AES_256_GCM_SHA384 cipher suite.
    Aes256Gcm,
}

impl Suite {
    /// Returns the registered name of the suite.
    pub fn name(self) -> &'static str {
        match self {
            Suite::Aes128Gcm => "TLS_AES_128_GCM_SHA256",
            Suite::Aes256Gcm => "TLS_AES_256_GCM_SHA384",
        }
    }
}

/// Failure of a handshake or of a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsFailure {
    /// Peer does not speak TLS.
    #[error("the peer does not speak TLS")]
    Plain,
    /// Peer offers no pre-shared key.
    #[error("the peer offers no pre-shared key")]
    NoKey,
    /// Peer offers only unknown keys; the identity of the first.
    #[error("unknown pre-shared key identity '{0}'")]
    UnknownIdentity(String),
    /// Peer does not have the key of the identity that it offers.
    #[error("the peer does not have the key of the identity that it offers (binder mismatch)")]
    WrongKey,
    /// Peer must show a certificate, and does not.
    #[error("the peer sent no certificate")]
    NoCertificate,
    /// Handshake exceeds the maximum length.
    #[error("the handshake exceeds {HANDSHAKE_MAX} bytes")]
    TooLong,
    /// Peer has ended the session with an alert.
    #[error("the peer has ended the session with an alert")]
    Alert,
    /// Violation of the protocol, or of this crate's restrictions.
    #[error("{0}")]
    Protocol(&'static str),
    /// Internal failure of the library.
    #[error("{0}")]
    Library(&'static str),
}

impl TlsFailure {
    fn of(error: &Error) -> Self {
        match error.kind() {
            ErrorType::Alert => TlsFailure::Alert,
            // S2N_ERR_SAFETY is the library's error for a binder of another length, computed with another hash.
            _ if ["S2N_ERR_BAD_PSK_BINDER", "S2N_ERR_SAFETY"].contains(&error.name()) => TlsFailure::WrongKey,
            _ if error.name() == "S2N_ERR_MISSING_CLIENT_CERT" => TlsFailure::NoCertificate,
            ErrorType::ProtocolError => TlsFailure::Protocol(error.message()),
            _ => TlsFailure::Library(error.message()),
        }
    }

    /// Returns the alert for the peer; `None` when it has sent one itself.
    fn alert(&self) -> Option<u8> {
        Some(match self {
            TlsFailure::Plain => alert::UNEXPECTED_MESSAGE,
            TlsFailure::NoKey | TlsFailure::NoCertificate => alert::HANDSHAKE_FAILURE,
            TlsFailure::UnknownIdentity(_) => alert::UNKNOWN_PSK_IDENTITY,
            TlsFailure::WrongKey => alert::DECRYPT_ERROR,
            TlsFailure::TooLong => alert::DECODE_ERROR,
            TlsFailure::Protocol(text) if text.contains("version") => alert::PROTOCOL_VERSION,
            TlsFailure::Protocol(_) => alert::HANDSHAKE_FAILURE,
            TlsFailure::Library(_) => alert::INTERNAL_ERROR,
            TlsFailure::Alert => return None,
        })
    }
}

/// Result of the lookup of a ClientHello's keys.
#[derive(Debug, Default)]
struct Offer {
    /// Number of keys tried before.
    tried: usize,
    /// Lookup result: whether there is another key, or the failure.
    found: OnceLock<Result<bool, TlsFailure>>,
}

/// Maximum keys tried for a ClientHello: each costs a few hashes before the peer is authenticated.
const TRIES_MAX: usize = 16;

/// Callback that finds a ClientHello's key before the library processes it.
struct Finder {
    keys: Arc<dyn PskLookup>,
    /// True if a client that offers no key is shown a certificate.
    has_certificate: bool,
}

impl Finder {
    /// Returns the next key after those tried, and whether there is another; no key where a certificate replaces it.
    fn look(&self, connection: &Connection, tried: usize) -> Result<(Option<Psk>, bool), TlsFailure> {
        let hello = connection.client_hello().and_then(|hello| hello.raw_message());
        let hello = hello.map_err(|error| TlsFailure::of(&error))?;
        let identities = offered(&hello).ok_or(TlsFailure::Protocol("a damaged ClientHello"))?;
        let first = match identities.first() {
            Some(first) => first,
            None if self.has_certificate => return Ok((None, false)),
            None => return Err(TlsFailure::NoKey),
        };
        let mut distinct: Vec<&[u8]> = Vec::new();
        let mut known: Vec<Psk> = Vec::new();
        for &identity in &identities {
            if distinct.contains(&identity) {
                continue;
            }
            distinct.push(identity);
            for psk in self.keys.find(identity) {
                if known.len() < TRIES_MAX && !known.contains(&psk) {
                    known.push(psk);
                }
            }
        }
        let mut found = known.into_iter().skip(tried);
        found
            .next()
            .map(|psk| (Some(psk), found.next().is_some()))
            .ok_or_else(|| TlsFailure::UnknownIdentity(first.escape_ascii().to_string()))
    }
}

impl ClientHelloCallback for Finder {
    fn on_client_hello(&self, connection: &mut Connection) -> Result<Option<Pin<Box<dyn ConnectionFuture>>>, Error> {
        let tried = connection.application_context::<Offer>().map_or(0, |offer| offer.tried);
        let found = self.look(connection, tried);
        let known = match &found {
            Ok((Some(psk), _)) => append(connection, psk),
            Ok((None, _)) => Ok(()),
            Err(failure) => Err(Error::application(Box::new(failure.clone()))),
        };
        if let Some(offer) = connection.application_context::<Offer>() {
            // Called once per connection.
            let _ = offer.found.set(found.map(|(_, more)| more));
        }
        known.map(|()| None)
    }
}

fn append(connection: &mut Connection, psk: &Psk) -> Result<(), Error> {
    let mut builder = s2n_tls::psk::Psk::builder()?;
    builder.set_identity(&psk.identity)?.set_secret(&psk.secret)?;
    builder.set_hmac(match psk.hash {
        PskHash::Sha256 => PskHmac::SHA256,
        PskHash::Sha384 => PskHmac::SHA384,
    })?;
    connection.append_psk(&builder.build()?)
}

/// Returns a configuration with the policy of every session.
fn builder() -> Result<s2n_tls::config::Builder, Error> {
    let mut builder = Config::builder();
    builder.with_system_certs(false)?;
    builder.set_security_policy(&Policy::from_version(POLICY)?)?;
    Ok(builder)
}

/// Hostname check that accepts a client's certificate with any name: its subject is checked against access lists later.
struct AnyName;

impl VerifyHostNameCallback for AnyName {
    fn verify_host_name(&self, _: &str) -> bool {
        true
    }
}

/// Empty set of keys.
struct NoKeys;

impl PskLookup for NoKeys {
    fn find(&self, _: &[u8]) -> Vec<Psk> {
        Vec::new()
    }
}

/// Configuration shared by the sessions of a server.
#[derive(Clone)]
pub struct Acceptor {
    config: Config,
    /// Demands on clients without a pre-shared key; `None` refuses them.
    certificate: Option<ClientCertificate>,
}

/// Demand on clients that are shown a certificate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ClientCertificate {
    Required,
    Ignored,
}

impl Acceptor {
    /// Creates a configuration for peers with a key from `keys`.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn new(keys: Arc<dyn PskLookup>) -> Result<Self, TlsFailure> {
        Self::with_certificate(Some(keys), None)
    }

    /// Creates a configuration for peers with a key from `keys`, or without a key if there is a certificate to show.  A
    /// peer that offers a key must have a known one: it does not fall back to certificates.
    ///
    /// # Errors
    /// When the certificate or its key cannot be used; otherwise errors of the library.
    pub fn with_certificate(
        keys: Option<Arc<dyn PskLookup>>,
        certificate: Option<&ServerCertificate>,
    ) -> Result<Self, TlsFailure> {
        let keys = keys.unwrap_or_else(|| Arc::new(NoKeys));
        let asked = certificate.map(|shown| match shown.client_authorities {
            Some(_) => ClientCertificate::Required,
            None => ClientCertificate::Ignored,
        });
        let config = || {
            let mut builder = builder()?;
            builder.set_client_hello_callback(Finder { keys, has_certificate: certificate.is_some() })?;
            if let Some(shown) = certificate {
                builder.load_pem(&shown.certificate.chain, &shown.certificate.key)?;
                if let Some(authorities) = &shown.client_authorities {
                    builder.trust_pem(authorities)?;
                    builder.set_client_auth_type(ClientAuthType::Required)?;
                    builder.set_verify_host_callback(AnyName)?;
                }
            }
            builder.build()
        };
        let config = config().map_err(|error| TlsFailure::of(&error))?;
        Ok(Self { config, certificate: asked })
    }
}

impl std::fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Acceptor")
    }
}

/// Result of [`TlsSession::read`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// Number of decrypted bytes.
    Data(usize),
    /// Incomplete record: the peer must send more.
    NeedInput,
    /// End of data: the peer has sent its closing alert.
    Closed,
}

/// TLS session: one side of a connection.
pub struct TlsSession {
    /// Declared before the pipe, so that it is dropped first.
    connection: Connection,
    pipe: Pipe,
    /// Bytes of the peer that the handshake has consumed.
    taken: usize,
    server: bool,
    /// On a server until its first reply: its configuration and the bytes consumed, to restart with another key.
    first: Option<(Acceptor, Vec<u8>)>,
    /// Read failure behind data that was returned first.
    failed: Option<TlsFailure>,
    /// Demand on a peer without a pre-shared key; `None` refuses it.
    certificate: Option<ClientCertificate>,
}

/// Proven identity of a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerIdentity {
    /// Holder of the pre-shared key with this identity.
    Key(Vec<u8>),
    /// Subject of a certificate that an authority has signed.
    Certificate(CertificateSubject),
    /// Peer was not asked for an identity.
    Anonymous,
}

impl TlsSession {
    /// Creates a server session, which waits for a ClientHello.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn accept(acceptor: &Acceptor) -> Result<Self, TlsFailure> {
        Self::accept_after(acceptor, 0)
    }

    /// Creates a server session that skips the first `tried` keys.
    fn accept_after(acceptor: &Acceptor, tried: usize) -> Result<Self, TlsFailure> {
        let mut session = Self::new(Connection::new_server(), acceptor.config.clone(), true)?;
        session.certificate = acceptor.certificate;
        session.connection.set_application_context(Offer { tried, ..Offer::default() });
        session.first = Some((acceptor.clone(), Vec::new()));
        Ok(session)
    }

    /// Creates a client session that offers these keys.
    ///
    /// # Errors
    /// Errors of the library; a key that is too short.
    pub fn connect(psks: &[Psk]) -> Result<Self, TlsFailure> {
        let config = builder().and_then(|builder| builder.build()).map_err(|error| TlsFailure::of(&error))?;
        let mut session = Self::new(Connection::new_client(), config, false)?;
        psks.iter().try_for_each(|psk| append(&mut session.connection, psk)).map_err(|error| TlsFailure::of(&error))?;
        Ok(session)
    }

    /// Creates a client session that requires the certificate of `server`, signed by one of the authorities (PEM).  It
    /// shows the certificate `own`, if there is one.
    ///
    /// # Errors
    /// Errors of the library; certificates that cannot be used.
    pub fn connect_to(server: &str, authorities: &[u8], own: Option<&Certificate>) -> Result<Self, TlsFailure> {
        let config = || {
            let mut builder = builder()?;
            builder.trust_pem(authorities)?;
            if let Some(own) = own {
                builder.load_pem(&own.chain, &own.key)?;
                builder.set_client_auth_type(ClientAuthType::Optional)?;
            }
            builder.build()
        };
        let config = config().map_err(|error| TlsFailure::of(&error))?;
        let mut session = Self::new(Connection::new_client(), config, false)?;
        session.connection.set_server_name(server).map_err(|error| TlsFailure::of(&error))?;
        session.certificate = Some(ClientCertificate::Ignored);
        Ok(session)
    }

    fn new(mut connection: Connection, config: Config, server: bool) -> Result<Self, TlsFailure> {
        let pipe = Pipe::new();
        let set = || -> Result<(), Error> {
            connection.set_config(config)?;
            // No delay on bad records: these suites have no padding oracle to hide.
            connection.set_blinding(Blinding::SelfService)?;
            connection.prefer_throughput()?;
            connection.set_receive_callback(Some(receive))?;
            connection.set_send_callback(Some(send))?;
            // SAFETY: the pipe lives as long as the connection, and its address does not change.
            unsafe { connection.set_receive_context(pipe.context())? };
            // SAFETY: the same.
            unsafe { connection.set_send_context(pipe.context())? };
            // The callback never waits, but the library requires a waker.
            connection.set_waker(Some(Waker::noop()))?;
            Ok(())
        };
        set().map_err(|error| TlsFailure::of(&error))?;
        Ok(Self { connection, pipe, taken: 0, server, first: None, failed: None, certificate: None })
    }

    /// Continues the handshake: consumes bytes of the peer from `input`, and appends bytes for the peer to `output`,
    /// also on failure.  Returns true when the handshake is complete; the rest of the input is data then.
    ///
    /// # Errors
    /// Reason for which there will be no session.
    pub fn handshake(&mut self, input: &mut &[u8], output: &mut Vec<u8>) -> Result<bool, TlsFailure> {
        let whole = *input;
        let result = self.negotiate(input);
        if let Some((acceptor, mut taken)) = self.first.take()
            && self.pipe.written() == 0
        {
            taken.extend_from_slice(&whole[..whole.len() - input.len()]);
            if result == Err(TlsFailure::WrongKey) && self.has_another() {
                // Nothing was sent yet, so the handshake can restart.
                let tried = self.connection.application_context::<Offer>().map_or(0, |offer| offer.tried);
                *self = Self::accept_after(&acceptor, tried + 1)?;
                let mut again = &taken[..];
                // The consumed bytes are one ClientHello, and all of it is consumed again.
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

    fn negotiate(&mut self, input: &mut &[u8]) -> Result<bool, TlsFailure> {
        if self.server && self.taken == 0 && input.first().is_some_and(|first| *first != HANDSHAKE) {
            return Err(TlsFailure::Plain);
        }
        let before = input.len();
        let Self { connection, pipe, .. } = self;
        let (polled, _) = pipe.lend(input, &mut [], || connection.poll_negotiate().map_ok(drop));
        self.taken += before - input.len();
        match polled {
            Poll::Ready(Ok(())) => self.agreed().map(|_| true),
            Poll::Ready(Err(error)) => Err(self.refusal().unwrap_or_else(|| TlsFailure::of(&error))),
            Poll::Pending if self.taken > HANDSHAKE_MAX => Err(TlsFailure::TooLong),
            Poll::Pending => Ok(false),
        }
    }

    /// Returns the reason for which the offered keys were refused, if that failed the handshake.
    fn refusal(&self) -> Option<TlsFailure> {
        self.connection.application_context::<Offer>()?.found.get()?.as_ref().err().cloned()
    }

    /// Returns whether there is another key to try for this ClientHello.
    fn has_another(&self) -> bool {
        let offer = self.connection.application_context::<Offer>();
        offer.is_some_and(|offer| matches!(offer.found.get(), Some(Ok(true))))
    }

    /// Returns the negotiated suite and the proven identity of the peer.
    ///
    /// # Errors
    /// When the negotiated parameters are not allowed here.
    fn agreed(&self) -> Result<(Suite, PeerIdentity), TlsFailure> {
        let suite = self.suite().ok_or(TlsFailure::Protocol("the negotiated cipher suite is not allowed"))?;
        let len = self.connection.negotiated_psk_identity_length().map_err(|error| TlsFailure::of(&error))?;
        let mut identity = vec![0; len];
        self.connection.negotiated_psk_identity(&mut identity).map_err(|error| TlsFailure::of(&error))?;
        let peer = match self.certificate {
            _ if !identity.is_empty() => PeerIdentity::Key(identity),
            None => return Err(TlsFailure::NoKey),
            // On a client, the library has checked the server's name already.
            Some(ClientCertificate::Ignored) => PeerIdentity::Anonymous,
            Some(ClientCertificate::Required) => PeerIdentity::Certificate(self.peer_subject()?),
        };
        Ok((suite, peer))
    }

    /// Returns the subject of the certificate that the peer has shown.
    fn peer_subject(&self) -> Result<CertificateSubject, TlsFailure> {
        if !self.connection.client_cert_used() {
            return Err(TlsFailure::NoCertificate);
        }
        let chain = self.connection.peer_cert_chain().map_err(|error| TlsFailure::of(&error))?;
        let first = chain.iter().next().ok_or(TlsFailure::NoCertificate)?.map_err(|error| TlsFailure::of(&error))?;
        let der = first.der().map_err(|error| TlsFailure::of(&error))?;
        CertificateSubject::of_certificate(der)
            .ok_or(TlsFailure::Protocol("malformed subject in the peer's certificate"))
    }

    /// Returns the proven identity of the peer; `None` before the handshake is over.
    pub fn peer(&self) -> Option<PeerIdentity> {
        self.connection.handshake_complete().then(|| self.agreed().ok().map(|(_, peer)| peer)).flatten()
    }

    /// Returns the negotiated suite.
    pub fn suite(&self) -> Option<Suite> {
        let name = self.connection.cipher_suite().ok()?;
        [Suite::Aes128Gcm, Suite::Aes256Gcm].into_iter().find(|suite| suite.name() == name)
    }

    /// Returns the identity of the negotiated key; empty before the handshake is complete, and without a key.
    pub fn identity(&self) -> Vec<u8> {
        match self.agreed() {
            Ok((_, PeerIdentity::Key(identity))) => identity,
            _ => Vec::new(),
        }
    }

    /// Decrypts records of the peer from `input` into `out`.
    ///
    /// # Errors
    /// When the session cannot continue.
    pub fn read(&mut self, input: &mut &[u8], out: &mut [u8]) -> Result<Read, TlsFailure> {
        if let Some(failure) = self.failed.take() {
            return Err(failure);
        }
        let Self { connection, pipe, failed, .. } = self;
        let (polled, _) = pipe.lend(input, &mut [], || {
            let mut filled = 0;
            // The library decrypts one record per call; the input often contains more.
            while filled < out.len() {
                match connection.poll_recv(&mut out[filled..]) {
                    Poll::Ready(Ok(0)) if filled == 0 => return Ok(Read::Closed),
                    Poll::Ready(Ok(0)) | Poll::Pending => break,
                    Poll::Ready(Ok(len)) => filled += len,
                    Poll::Ready(Err(error)) if filled > 0 => {
                        *failed = Some(TlsFailure::of(&error));
                        break;
                    }
                    Poll::Ready(Err(error)) => return Err(TlsFailure::of(&error)),
                }
            }
            Ok(if filled == 0 { Read::NeedInput } else { Read::Data(filled) })
        });
        polled
    }

    /// Encrypts `plain` into `out`, which must have space for [`sealed_len`] bytes; returns the bytes written.
    ///
    /// # Errors
    /// When the session has ended.
    pub fn write(&mut self, plain: &[u8], out: &mut [u8]) -> Result<usize, TlsFailure> {
        let Self { connection, pipe, .. } = self;
        let (polled, len) = pipe.lend(&mut &[][..], out, || connection.poll_send(plain));
        match polled {
            Poll::Ready(Ok(taken)) if taken == plain.len() && self.pipe.overflow().is_empty() => Ok(len),
            Poll::Ready(Err(error)) => Err(TlsFailure::of(&error)),
            _ => Err(TlsFailure::Library("a TLS record exceeds the maximum length")),
        }
    }

    /// Schedules a KeyUpdate of the send keys with the next data; the peer is not asked to update its own.
    ///
    /// # Errors
    /// Errors of the library.
    pub fn update_keys(&mut self) -> Result<(), TlsFailure> {
        use s2n_tls::enums::PeerKeyUpdate;
        let asked = self.connection.request_key_update(PeerKeyUpdate::KeyUpdateNotRequested);
        asked.map(drop).map_err(|error| TlsFailure::of(&error))
    }

    /// Releases the library's record buffers if they are empty.
    pub fn rest(&mut self) {
        // Refused while part of a record is buffered, as intended.
        let _ = self.connection.release_buffers();
    }

    /// Returns the closing alert as a record.
    pub fn close(&mut self) -> Vec<u8> {
        let Self { connection, pipe, .. } = self;
        let _ = pipe.lend(&mut &[][..], &mut [], || connection.poll_shutdown_send().map_ok(drop));
        self.pipe.overflow()
    }
}

impl std::fmt::Debug for TlsSession {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TlsSession({})", if self.server { "server" } else { "client" })
    }
}
