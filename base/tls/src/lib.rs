//! TLS 1.3 (RFC 8446) with pre-shared keys and nothing else, as a state machine over bytes.
//!
//! A [`Session`] never touches a socket: bytes of the peer go in, bytes for the peer come out, so that the same code runs
//! over every driver of the reactor and in the simulator.  The protocol is s2n-tls; what is ours is which of it is
//! used: keys that are exchanged beforehand together with an exchange of ephemeral ones (`psk_dhe_ke`), the suites
//! `TLS_AES_128_GCM_SHA256` and `TLS_AES_256_GCM_SHA384`, no certificates, no tickets, no early data.
//! Why this library is in `docs/decisions/0019-tls.md`.

mod hello;
mod pipe;
mod session;

pub use hello::offered;
pub use session::{Acceptor, Failure, Read, Session, Suite, alert, sealed_len};

use zeroize::Zeroizing;

/// The hash of a pre-shared key, and with it the suites that it is good for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Hash {
    /// SHA-256, with AES-128 in GCM.
    Sha256,
    /// SHA-384, with AES-256 in GCM.
    Sha384,
}

/// A pre-shared key.  It is erased when dropped, and `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct Psk {
    /// What names it, in the clear.
    pub identity: Vec<u8>,
    /// The key, at least 16 bytes.
    pub secret: Zeroizing<Vec<u8>>,
    /// Its hash.
    pub hash: Hash,
}

impl std::fmt::Debug for Psk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Psk({}, {:?})", self.identity.escape_ascii(), self.hash)
    }
}

/// Where a server finds its keys.
pub trait Keys: Send + Sync + 'static {
    /// The keys with this identity, mostly one.  Where there are several, the one is taken that the peer has.
    fn find(&self, identity: &[u8]) -> Vec<Psk>;
}
