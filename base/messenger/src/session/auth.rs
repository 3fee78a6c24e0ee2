//! Authentication as the handshake sees it: a method's steps, and the keys that come of it.

use std::rc::Rc;

use aws_lc_rs::hmac;

use super::cephx::Wallet;
use crate::wire::codec::{Malformed, Writer};
use crate::wire::control::method;
use crate::wire::entity;

/// What a request for authentication begins with: to a monitor ...
pub(super) const AUTH_MODE_MON: u8 = 10;
/// ... and where an authorizer is shown, its version.
const AUTHORIZER: u8 = 1;

/// Why a peer was not believed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// A payload of the method is malformed.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The proof is wrong, or the name is not known; which of the two is not told apart.
    #[error("the proof of '{0}' is wrong, or nobody of that name is known")]
    Proof(String),
    /// The method is not taken here.
    #[error("method {0:#x} is not taken here")]
    Method(u32),
    /// The server has answered with an error number.
    #[error("the server answers with error {0}")]
    Refused(i32),
    /// A step that the method does not have.
    #[error("a step too many")]
    OutOfTurn,
    /// What the server sent cannot be decrypted with our key.
    #[error("what the server sent is not for our key")]
    Decrypt,
}

/// What authentication brings.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Keys {
    /// Signs what was said before; empty when the method has none.
    pub session: Vec<u8>,
    /// For secure mode; empty in crc mode, or when the method has none.
    pub connection: Vec<u8>,
    /// Our number in the cluster, from the server.
    pub global_id: u64,
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets are not for logs.
        write!(f, "Keys({} and {} bytes)", self.session.len(), self.connection.len())
    }
}

impl Keys {
    /// The HMAC by which a side shows what it received before authentication.
    pub(super) fn sign(&self, transcript: &[u8]) -> [u8; 32] {
        if self.session.is_empty() { [0; 32] } else { hmac_sha256(&self.session, &[transcript]) }
    }
}

/// HMAC-SHA256 of the parts, one behind the other.
pub(super) fn hmac_sha256(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign().as_ref().try_into().expect("32 bytes")
}

/// Compares without telling by its time where the two differ.
pub(super) fn same(one: &[u8], other: &[u8]) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(one, other).is_ok()
}

/// The client's side of a method, for one connection.
pub trait AuthClient {
    /// Which method.
    fn method(&self) -> u32;

    /// The first payload, given the modes that are offered; `random` brings numbers that nobody can guess.
    fn begin(&mut self, modes: &[u32], random: &mut dyn FnMut() -> u64) -> Vec<u8>;

    /// The server wants more: the next payload.
    fn more(&mut self, payload: &[u8], random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError>;

    /// The server is done: checks that it is who it should be.
    fn done(&mut self, mode: u32, payload: &[u8]) -> Result<Keys, AuthError>;

    /// The server has given us this number.
    fn numbered(&mut self, _global_id: u64) {}
}

/// What the server's side of a method comes to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerStep {
    /// The client is to say more.
    More(Vec<u8>),
    /// It is who it says it is.
    Done {
        /// The last payload.
        payload: Vec<u8>,
        /// What came of it.
        keys: Keys,
        /// Its name.
        name: String,
    },
}

/// The server's side of a method, for one connection.
pub trait AuthServer {
    /// Methods that are taken.
    fn methods(&self) -> Vec<u32>;

    /// The client's request, in the mode that was picked of those that it offers.
    fn begin(
        &mut self,
        request: &crate::wire::control::AuthRequest,
        mode: u32,
        random: &mut dyn FnMut() -> u64,
    ) -> Result<ServerStep, AuthError>;

    /// The client's next step.
    fn more(&mut self, payload: &[u8]) -> Result<ServerStep, AuthError>;
}

/// No authentication, on both sides: Ceph's method `none`.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoAuth;

impl AuthClient for NoAuth {
    fn method(&self) -> u32 {
        method::NONE
    }

    fn begin(&mut self, _modes: &[u32], _random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        // The mode of an authorizer, the name `client.` and no number.
        let mut out = Writer::new();
        out.u8(AUTHORIZER).u32(u32::from(entity::CLIENT)).blob(b"").u64(0);
        out.finish()
    }

    fn more(&mut self, _payload: &[u8], _random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        Err(AuthError::OutOfTurn)
    }

    fn done(&mut self, _mode: u32, _payload: &[u8]) -> Result<Keys, AuthError> {
        Ok(Keys::default())
    }
}

/// To a Ceph cluster that asks nobody for proof (`auth client required = none`): we say who we are, and are believed.
#[derive(Debug)]
pub struct Named {
    id: String,
    wallet: Rc<Wallet>,
    to_monitor: bool,
}

impl Named {
    /// Who we are: the part of the name behind `client.`.  The number that a monitor gives us goes into `wallet`; other
    /// daemons are told it.
    pub fn new(id: impl Into<String>, wallet: Rc<Wallet>, to_monitor: bool) -> Self {
        Self { id: id.into(), wallet, to_monitor }
    }
}

impl AuthClient for Named {
    fn method(&self) -> u32 {
        method::NONE
    }

    fn begin(&mut self, _modes: &[u32], _random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        // The mode of a monitor's client, or the version of an authorizer.
        let first = if self.to_monitor { AUTH_MODE_MON } else { AUTHORIZER };
        let mut out = Writer::new();
        out.u8(first).u32(u32::from(entity::CLIENT)).blob(self.id.as_bytes()).u64(self.wallet.global_id());
        out.finish()
    }

    fn more(&mut self, _payload: &[u8], _random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        Err(AuthError::OutOfTurn)
    }

    fn done(&mut self, _mode: u32, _payload: &[u8]) -> Result<Keys, AuthError> {
        Ok(Keys::default())
    }

    fn numbered(&mut self, global_id: u64) {
        if self.to_monitor {
            self.wallet.set_global_id(global_id);
        }
    }
}

impl AuthServer for NoAuth {
    fn methods(&self) -> Vec<u32> {
        vec![method::NONE]
    }

    fn begin(
        &mut self,
        request: &crate::wire::control::AuthRequest,
        _mode: u32,
        _random: &mut dyn FnMut() -> u64,
    ) -> Result<ServerStep, AuthError> {
        if request.method != method::NONE {
            return Err(AuthError::Method(request.method));
        }
        Ok(ServerStep::Done { payload: Vec::new(), keys: Keys::default(), name: String::new() })
    }

    fn more(&mut self, _payload: &[u8]) -> Result<ServerStep, AuthError> {
        Err(AuthError::OutOfTurn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_without_proof_as_ceph_encodes_it() {
        let wallet = Wallet::new();
        let payload = |to_monitor| Named::new("ab", wallet.clone(), to_monitor).begin(&[], &mut || 0);
        assert_eq!(payload(true), [10, 8, 0, 0, 0, 2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0, 0, 0, 0, 0]);
        // An OSD's number for us is the one that we have told it.
        Named::new("ab", wallet.clone(), false).numbered(7);
        assert_eq!(wallet.global_id(), 0);
        Named::new("ab", wallet.clone(), true).numbered(0x0102);
        assert_eq!(payload(false), [1, 8, 0, 0, 0, 2, 0, 0, 0, b'a', b'b', 2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Named::new("ab", wallet, true).more(&[], &mut || 0), Err(AuthError::OutOfTurn));
    }
}
