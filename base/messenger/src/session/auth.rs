//! Authentication in the handshake: the steps of a method, and the keys that it yields.

use std::rc::Rc;

use aws_lc_rs::hmac;

use super::cephx::TicketStore;
use crate::wire::codec::{MalformedPayload, PayloadWriter};
use crate::wire::control::method;
use crate::wire::entity;

/// First byte of an authentication request: this mode for a monitor ...
pub(super) const AUTH_MODE_MON: u8 = 10;
/// ... and the version of an authorizer for other daemons.
pub(super) const AUTHORIZER: u8 = 1;

/// Authentication error.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    /// A payload of the method is malformed.
    #[error(transparent)]
    Malformed(#[from] MalformedPayload),
    /// Wrong proof or unknown name; deliberately indistinguishable.
    #[error("wrong key for '{0}', or unknown name")]
    Proof(String),
    /// Authentication method that is not accepted.
    #[error("authentication method {0:#x} is not accepted")]
    Method(u32),
    /// Error number returned by the server.
    #[error("the server rejects authentication with error {0}")]
    Refused(i32),
    /// Message of a step that the method does not have.
    #[error("unexpected authentication step")]
    OutOfTurn,
    /// Server payload that cannot be decrypted with this client's key.
    #[error("cannot decrypt the server's reply with the key of this client")]
    Decrypt,
}

/// Keys and ID established by authentication.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct SessionKeys {
    /// Session key, which signs the handshake; empty when the method has none.
    pub session: Vec<u8>,
    /// Connection secret for secure mode; empty in crc mode, or when the method has none.
    pub connection: Vec<u8>,
    /// Global ID of this client in the cluster, assigned by the server.
    pub global_id: u64,
}

impl std::fmt::Debug for SessionKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Secrets are kept out of logs.
        write!(f, "SessionKeys({} and {} bytes)", self.session.len(), self.connection.len())
    }
}

impl SessionKeys {
    /// Computes the HMAC by which a side proves what it received before authentication.
    pub(super) fn sign(&self, transcript: &[u8]) -> [u8; 32] {
        if self.session.is_empty() { [0; 32] } else { hmac_sha256(&self.session, &[transcript]) }
    }
}

/// Computes the HMAC-SHA256 of the concatenated parts.
pub(super) fn hmac_sha256(key: &[u8], parts: &[&[u8]]) -> [u8; 32] {
    let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, key));
    parts.iter().for_each(|part| context.update(part));
    context.sign().as_ref().try_into().expect("32 bytes")
}

/// Compares in constant time.
pub(super) fn same(one: &[u8], other: &[u8]) -> bool {
    aws_lc_rs::constant_time::verify_slices_are_equal(one, other).is_ok()
}

/// Client side of an authentication method, for one connection.
pub trait AuthClient {
    /// Returns the number of the method.
    fn method(&self) -> u32;

    /// Returns the first payload, given the offered modes; `random` must return unpredictable numbers.
    fn begin(&mut self, modes: &[u32], random: &mut dyn FnMut() -> u64) -> Vec<u8>;

    /// Processes a payload of the server, and returns the next one to send.
    fn more(&mut self, payload: &[u8], random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError>;

    /// Processes the server's final payload, verifies the server's proof, and returns the keys.
    fn done(&mut self, mode: u32, payload: &[u8]) -> Result<SessionKeys, AuthError>;

    /// Records the global ID that the server has assigned.
    fn numbered(&mut self, _global_id: u64) {}
}

/// Result of a step on the server side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServerStep {
    /// Payload to send; the client must continue.
    More(Vec<u8>),
    /// Authentication succeeded.
    Done {
        /// Final payload.
        payload: Vec<u8>,
        /// Keys established.
        keys: SessionKeys,
        /// Name of the client.
        name: String,
    },
}

/// Server side of an authentication method, for one connection.
pub trait AuthServer {
    /// Returns the methods that are accepted.
    fn methods(&self) -> Vec<u32>;

    /// Processes the client's request, in the mode that was picked from those it offers.
    fn begin(
        &mut self,
        request: &crate::wire::control::AuthRequest,
        mode: u32,
        random: &mut dyn FnMut() -> u64,
    ) -> Result<ServerStep, AuthError>;

    /// Processes the client's next payload.
    fn more(&mut self, payload: &[u8]) -> Result<ServerStep, AuthError>;
}

/// Ceph's method `none`: no authentication, on either side.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoAuth;

impl AuthClient for NoAuth {
    fn method(&self) -> u32 {
        method::NONE
    }

    fn begin(&mut self, _modes: &[u32], _random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        // Mode of an authorizer, the name `client.`, and no global ID.
        let mut out = PayloadWriter::new();
        out.u8(AUTHORIZER).u32(u32::from(entity::CLIENT)).blob(b"").u64(0);
        out.finish()
    }

    fn more(&mut self, _payload: &[u8], _random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        Err(AuthError::OutOfTurn)
    }

    fn done(&mut self, _mode: u32, _payload: &[u8]) -> Result<SessionKeys, AuthError> {
        Ok(SessionKeys::default())
    }
}

/// Named client of a Ceph cluster without authentication (`auth client required = none`): the cluster trusts the stated
/// name.
#[derive(Debug)]
pub struct Named {
    id: String,
    ticket_store: Rc<TicketStore>,
    to_monitor: bool,
}

impl Named {
    /// Creates a client with this entity ID: the part of the name after `client.`.  A monitor assigns the global ID,
    /// which is stored in `ticket_store`; other daemons are sent it.
    pub fn new(id: impl Into<String>, ticket_store: Rc<TicketStore>, to_monitor: bool) -> Self {
        Self { id: id.into(), ticket_store, to_monitor }
    }
}

impl AuthClient for Named {
    fn method(&self) -> u32 {
        method::NONE
    }

    fn begin(&mut self, _modes: &[u32], _random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        // First byte: the mode of a monitor's client, or the version of an authorizer.
        let first = if self.to_monitor { AUTH_MODE_MON } else { AUTHORIZER };
        let mut out = PayloadWriter::new();
        out.u8(first).u32(u32::from(entity::CLIENT)).blob(self.id.as_bytes()).u64(self.ticket_store.global_id());
        out.finish()
    }

    fn more(&mut self, _payload: &[u8], _random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        Err(AuthError::OutOfTurn)
    }

    fn done(&mut self, _mode: u32, _payload: &[u8]) -> Result<SessionKeys, AuthError> {
        Ok(SessionKeys::default())
    }

    fn numbered(&mut self, global_id: u64) {
        if self.to_monitor {
            self.ticket_store.set_global_id(global_id);
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
        Ok(ServerStep::Done { payload: Vec::new(), keys: SessionKeys::default(), name: String::new() })
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
        let ticket_store = TicketStore::new();
        let payload = |to_monitor| Named::new("ab", ticket_store.clone(), to_monitor).begin(&[], &mut || 0);
        assert_eq!(payload(true), [10, 8, 0, 0, 0, 2, 0, 0, 0, b'a', b'b', 0, 0, 0, 0, 0, 0, 0, 0]);
        // The ID that an OSD returns is the one that this client has sent.
        Named::new("ab", ticket_store.clone(), false).numbered(7);
        assert_eq!(ticket_store.global_id(), 0);
        Named::new("ab", ticket_store.clone(), true).numbered(0x0102);
        assert_eq!(payload(false), [1, 8, 0, 0, 0, 2, 0, 0, 0, b'a', b'b', 2, 1, 0, 0, 0, 0, 0, 0]);
        assert_eq!(Named::new("ab", ticket_store, true).more(&[], &mut || 0), Err(AuthError::OutOfTurn));
    }
}
