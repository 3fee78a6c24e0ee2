//! TLS 1.3 (RFC 8446) with pre-shared keys or certificates, as a state machine over bytes.
//!
//! A [`TlsSession`] never touches a socket: bytes of the peer are input, bytes for the peer are output, so that the
//! same code runs over every driver of the reactor and in the simulator.  The implementation is s2n-tls; this crate
//! restricts it to pre-shared keys together with an exchange of ephemeral keys (`psk_dhe_ke`), or certificates (X.509)
//! of the server and, where it asks for them, of its clients; the suites `TLS_AES_128_GCM_SHA256` and
//! `TLS_AES_256_GCM_SHA384`, no tickets, no early data.  The choice of this library is `docs/decisions/0019-tls.md`,
//! that for certificates `0026-nbd-tls.md`.

mod hello;
mod pipe;
mod session;
mod subject;

pub use hello::offered;
pub use session::{Acceptor, PeerIdentity, Read, Suite, TlsFailure, TlsSession, alert, sealed_len};
pub use subject::CertificateSubject;

use zeroize::Zeroizing;

/// Hash of a pre-shared key, which also determines the suites that the key is valid for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PskHash {
    /// SHA-256, with AES-128-GCM.
    Sha256,
    /// SHA-384, with AES-256-GCM.
    Sha384,
}

/// Pre-shared key.  It is erased when dropped, and `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Psk {
    /// Identity of the key, sent in the clear.
    pub identity: Vec<u8>,
    /// Secret, at least 16 bytes.
    pub secret: Zeroizing<Vec<u8>>,
    /// Hash of the key.
    pub hash: PskHash,
}

impl std::fmt::Debug for Psk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Psk({}, {:?})", self.identity.escape_ascii(), self.hash)
    }
}

/// Key lookup of a server.
pub trait PskLookup: Send + Sync + 'static {
    /// Returns the keys with this identity, usually one.  With several, the one that the peer has is used.
    fn find(&self, identity: &[u8]) -> Vec<Psk>;
}

/// Certificate and its private key, both in PEM.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificate {
    /// Certificate, with the intermediate certificates up to its authority.
    pub chain: Vec<u8>,
    /// Private key, unencrypted.
    pub key: Zeroizing<Vec<u8>>,
}

impl std::fmt::Debug for Certificate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Certificate({} bytes)", self.chain.len())
    }
}

/// Certificate of a server for clients that offer no pre-shared key, and the authorities of client certificates.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerCertificate {
    /// Certificate of the server.
    pub certificate: Certificate,
    /// Authorities (PEM), one of which must have signed a client's certificate; clients need none if left out.
    pub client_authorities: Option<Vec<u8>>,
}
