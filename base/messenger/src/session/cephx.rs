//! Client side of cephx, as far as a monitor requires it ("Authentication"; Ceph's `doc/dev/cephx_protocol.rst`).
//!
//! The monitor sends a challenge; the client answers with a number that only the key's holder can compute; the monitor
//! sends a ticket with a session key, and in secure mode a connection secret, both encrypted.  Tickets for other
//! services go into a [`TicketStore`], for the connections to those.

mod ticket_store;

use std::rc::Rc;

use aws_lc_rs::cipher::{
    AES_128, DecryptionContext, EncryptionContext, PaddedBlockDecryptingKey, PaddedBlockEncryptingKey, UnboundCipherKey,
};
use aws_lc_rs::iv::FixedLength;
use forebay_accel::crypto::base64;

pub use ticket_store::{Authorizer, TicketStore};

use super::auth::{AUTH_MODE_MON, AuthClient, AuthError, SessionKeys};
use crate::wire::codec::{PayloadReader, PayloadWriter};
use crate::wire::control::{method, mode};
use crate::wire::entity;

const GET_AUTH_SESSION_KEY: u16 = 0x0100;
const CRYPTO_AES: u16 = 1;
const KEY_LEN: usize = 16;
/// Initialization vector of all cephx encryption.
const IV: &[u8; 16] = b"cephsageyudagreg";
/// Magic number at the start of encrypted content.
const MAGIC: u64 = 0xff00_9cad_8826_aa55;
const WHAT: &str = "a step of cephx";
/// Maximum number of tickets in a reply.
const TICKETS_MAX: u32 = 32;

/// Cephx key: AES-128.
#[derive(Clone, PartialEq, Eq)]
pub struct CephxSecret(pub(super) [u8; KEY_LEN]);

impl std::fmt::Debug for CephxSecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CephxSecret(..)")
    }
}

impl CephxSecret {
    /// Parses the text of a keyring: `key = AQ...==`.  Returns `None` if it is malformed or not AES-128.
    pub fn from_base64(text: &str) -> Option<Self> {
        let bytes = base64::decode(text.trim())?;
        Self::read(&mut PayloadReader::new(&bytes, WHAT)).ok()
    }

    /// Returns the type of a key, from the text of a keyring; [`from_base64`](Self::from_base64) accepts type 1 only,
    /// AES-128.
    pub fn kind_of(text: &str) -> Option<u16> {
        PayloadReader::new(&base64::decode(text.trim())?, WHAT).u16().ok()
    }

    fn read(from: &mut PayloadReader<'_>) -> Result<Self, AuthError> {
        let kind = from.u16()?;
        // The creation time is ignored.
        from.take(8)?;
        let len = usize::from(from.u16()?);
        let bytes = from.take(len)?;
        match bytes.try_into() {
            Ok(bytes) if kind == CRYPTO_AES => Ok(Self(bytes)),
            _ => Err(from.malformed().into()),
        }
    }

    fn key(&self) -> UnboundCipherKey {
        UnboundCipherKey::new(&AES_128, &self.0).expect("a key of the right length")
    }

    /// Encrypts `content` behind the version and magic number of cephx; the result is preceded by its length.
    fn seal(&self, content: &[u8], out: &mut PayloadWriter) {
        let mut plain = PayloadWriter::new();
        plain.u8(1).u64(MAGIC).raw(content);
        let mut data = plain.finish();
        let context = EncryptionContext::Iv128(FixedLength::from(IV));
        let cipher = PaddedBlockEncryptingKey::cbc_pkcs7(self.key()).expect("AES in CBC mode");
        cipher.less_safe_encrypt(&mut data, context).expect("a few bytes are encrypted");
        out.blob(&data);
    }

    /// Decrypts a length-prefixed ciphertext.
    fn open(&self, from: &mut PayloadReader<'_>) -> Result<Vec<u8>, AuthError> {
        self.decrypt(from.blob()?)
    }

    fn decrypt(&self, bytes: &[u8]) -> Result<Vec<u8>, AuthError> {
        let mut data = bytes.to_vec();
        let cipher = PaddedBlockDecryptingKey::cbc_pkcs7(self.key()).expect("AES in CBC mode");
        let context = DecryptionContext::Iv128(FixedLength::from(IV));
        let plain = cipher.decrypt(&mut data, context).map_err(|_| AuthError::Decrypt)?;
        let mut reader = PayloadReader::new(plain, WHAT);
        reader.u8()?;
        if reader.u64()? != MAGIC {
            return Err(AuthError::Decrypt);
        }
        Ok(reader.rest().to_vec())
    }

    /// Computes the number that proves possession of the key.
    fn answer(&self, server_challenge: u64, client_challenge: u64) -> u64 {
        let mut challenges = PayloadWriter::new();
        challenges.u64(server_challenge).u64(client_challenge);
        let mut sealed = PayloadWriter::new();
        self.seal(&challenges.finish(), &mut sealed);
        let words = sealed.finish();
        words.chunks_exact(8).fold(0, |sum, word| sum ^ u64::from_le_bytes(word.try_into().expect("8 bytes")))
    }
}

/// Service ticket, opaque to its holder, and its session key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceTicket {
    /// Service, of [`entity`].
    pub service: u32,
    /// Session key shared with the service.
    pub session: CephxSecret,
    /// Validity in seconds.
    pub valid_seconds: u32,
    /// Opaque ticket, to be presented to the service.
    pub blob: Vec<u8>,
}

/// Client side of cephx, for one connection to a monitor.
#[derive(Debug)]
pub struct CephxClient {
    /// Entity ID: the part of the name after `client.`.
    id: String,
    secret: CephxSecret,
    /// Bit mask of the services to request tickets for, of [`entity`].
    services: u32,
    challenged: bool,
    tickets: Vec<ServiceTicket>,
    ticket_store: Rc<TicketStore>,
}

impl CephxClient {
    /// Creates the client `client.ID` with its `secret`; tickets for `services` (bit mask of [`entity`]) go into
    /// `ticket_store`.  If the store is not empty, the client keeps its global ID.
    pub fn new(id: impl Into<String>, secret: CephxSecret, services: u32, ticket_store: Rc<TicketStore>) -> Self {
        Self { id: id.into(), secret, services, challenged: false, tickets: ticket_store.tickets(), ticket_store }
    }

    /// Returns the tickets obtained by authentication.
    pub fn tickets(&self) -> &[ServiceTicket] {
        &self.tickets
    }
}

fn session_of(tickets: &[ServiceTicket], service: u32) -> Option<CephxSecret> {
    tickets.iter().find(|ticket| ticket.service == service).map(|ticket| ticket.session.clone())
}

/// Reads tickets whose keys are encrypted with `secret`; each replaces the previous ticket of its service.
fn read_tickets(
    tickets: &mut Vec<ServiceTicket>,
    secret: &CephxSecret,
    from: &mut PayloadReader<'_>,
) -> Result<(), AuthError> {
    from.u8()?;
    let count = from.u32()?;
    if count > TICKETS_MAX {
        return Err(from.malformed().into());
    }
    for _ in 0..count {
        let service = from.u32()?;
        from.u8()?;
        let content = secret.open(from)?;
        let mut inner = PayloadReader::new(&content, WHAT);
        inner.u8()?;
        let session = CephxSecret::read(&mut inner)?;
        let valid_seconds = inner.u32()?;
        let encrypted = from.u8()? != 0;
        // A ticket that replaces another one is also encrypted with the session key of the old one.
        let blob = match (encrypted, session_of(tickets, service)) {
            (false, _) => from.blob()?.to_vec(),
            (true, Some(before)) => PayloadReader::new(&before.open(from)?, WHAT).blob()?.to_vec(),
            (true, None) => return Err(AuthError::Decrypt),
        };
        tickets.retain(|ticket| ticket.service != service);
        tickets.push(ServiceTicket { service, session, valid_seconds, blob });
    }
    Ok(())
}

impl AuthClient for CephxClient {
    fn method(&self) -> u32 {
        method::CEPHX
    }

    fn begin(&mut self, _modes: &[u32], _random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        self.challenged = false;
        self.tickets = self.ticket_store.tickets();
        let mut out = PayloadWriter::new();
        out.u8(AUTH_MODE_MON)
            .u32(u32::from(entity::CLIENT))
            .blob(self.id.as_bytes())
            .u64(self.ticket_store.global_id());
        out.finish()
    }

    fn more(&mut self, payload: &[u8], random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        if std::mem::replace(&mut self.challenged, true) {
            return Err(AuthError::OutOfTurn);
        }
        let mut reader = PayloadReader::new(payload, WHAT);
        reader.u8()?;
        let server_challenge = reader.u64()?;
        let client_challenge = random();
        let mut out = PayloadWriter::new();
        out.u16(GET_AUTH_SESSION_KEY).u8(3).u64(client_challenge);
        out.u64(self.secret.answer(server_challenge, client_challenge));
        // The old ticket proves ownership of the global ID.
        match self.ticket_store.ticket(u32::from(entity::AUTH)) {
            Some(old) => out.raw(&old.blob),
            None => out.u8(1).u64(0).blob(b""),
        };
        out.u32(u32::from(entity::AUTH) | self.services);
        Ok(out.finish())
    }

    fn done(&mut self, chosen: u32, payload: &[u8]) -> Result<SessionKeys, AuthError> {
        if !self.challenged {
            return Err(AuthError::OutOfTurn);
        }
        let mut reader = PayloadReader::new(payload, WHAT);
        let kind = reader.u16()?;
        let status = reader.i32()?;
        if status != 0 {
            return Err(AuthError::Refused(status));
        }
        if kind != GET_AUTH_SESSION_KEY {
            return Err(reader.malformed().into());
        }
        // Encryption with this client's key proves that the peer is the monitor.
        let secret = self.secret.clone();
        read_tickets(&mut self.tickets, &secret, &mut reader)?;
        let session = session_of(&self.tickets, u32::from(entity::AUTH)).ok_or(AuthError::Decrypt)?;
        let connection = reader.blob()?;
        let more = reader.blob()?;
        let mut keys = SessionKeys { session: session.0.to_vec(), ..SessionKeys::default() };
        if !connection.is_empty() {
            let content = session.open(&mut PayloadReader::new(connection, WHAT))?;
            keys.connection = PayloadReader::new(&content, WHAT).blob()?.to_vec();
        } else if chosen == mode::SECURE {
            return Err(AuthError::Decrypt);
        }
        if !more.is_empty() {
            read_tickets(&mut self.tickets, &session, &mut PayloadReader::new(more, WHAT))?;
        }
        self.ticket_store.fill(&self.tickets);
        Ok(keys)
    }

    fn numbered(&mut self, global_id: u64) {
        self.ticket_store.set_global_id(global_id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_come_out_of_a_keyring() {
        // Type 1, created at 0, 16 bytes of 7.
        let text = "AQAAAAAAAAAAABAABwcHBwcHBwcHBwcHBwcHBw==";
        assert_eq!(CephxSecret::from_base64(text), Some(CephxSecret([7; 16])));
        for text in ["", "AQ", "AQAAAAAAAAAAABAABwcHBw==", "A!==", "===="] {
            assert_eq!(CephxSecret::from_base64(text), None, "{text}");
        }
    }

    #[test]
    fn what_is_sealed_opens_with_its_key_only() {
        let secret = CephxSecret([7; 16]);
        for len in [0, 1, 6, 7, 8, 100] {
            let content = vec![9; len];
            let mut out = PayloadWriter::new();
            secret.seal(&content, &mut out);
            let bytes = out.finish();
            assert_eq!(secret.open(&mut PayloadReader::new(&bytes, WHAT)), Ok(content));
            assert!(CephxSecret([8; 16]).open(&mut PayloadReader::new(&bytes, WHAT)).is_err());
        }
    }

    /// Builds the reply of a monitor.
    fn reply(secret: &CephxSecret, session: &CephxSecret, connection: Option<&[u8]>) -> Vec<u8> {
        let mut ticket = PayloadWriter::new();
        ticket.u8(1).u16(CRYPTO_AES).u64(0).u16(16).raw(&session.0).u32(3600).u32(0);
        let mut out = PayloadWriter::new();
        out.u16(GET_AUTH_SESSION_KEY).i32(0).u8(1).u32(1).u32(u32::from(entity::AUTH)).u8(1);
        secret.seal(&ticket.finish(), &mut out);
        out.u8(0).blob(b"ticket");
        let mut sealed = PayloadWriter::new();
        if let Some(connection) = connection {
            let mut content = PayloadWriter::new();
            content.blob(connection);
            session.seal(&content.finish(), &mut sealed);
        }
        out.blob(&sealed.finish()).blob(b"");
        out.finish()
    }

    fn challenged() -> CephxClient {
        let mut client = CephxClient::new("admin", CephxSecret([7; 16]), 0, TicketStore::new());
        client.begin(&[2], &mut || 0);
        let mut challenge = PayloadWriter::new();
        challenge.u8(1).u64(0x1234);
        client.more(&challenge.finish(), &mut || 5).expect("answered");
        client
    }

    #[test]
    fn a_ticket_brings_the_keys() {
        let session = CephxSecret([3; 16]);
        let keys =
            challenged().done(mode::SECURE, &reply(&CephxSecret([7; 16]), &session, Some(&[4; 64]))).expect("keys");
        assert_eq!((keys.session, keys.connection), (vec![3; 16], vec![4; 64]));
        let mut client = challenged();
        client.done(mode::CRC, &reply(&CephxSecret([7; 16]), &session, None)).expect("keys");
        assert_eq!(client.tickets()[0].blob, b"ticket");
    }

    #[test]
    fn a_monitor_without_our_key_is_not_believed() {
        let session = CephxSecret([3; 16]);
        let reply = reply(&CephxSecret([6; 16]), &session, None);
        assert!(challenged().done(mode::CRC, &reply).is_err());
    }

    #[test]
    fn secure_mode_without_a_secret_is_refused() {
        let reply = reply(&CephxSecret([7; 16]), &CephxSecret([3; 16]), None);
        assert_eq!(challenged().done(mode::SECURE, &reply), Err(AuthError::Decrypt));
    }

    #[test]
    fn truncated_replies_are_errors() {
        let whole = reply(&CephxSecret([7; 16]), &CephxSecret([3; 16]), Some(&[4; 64]));
        for len in 0..whole.len() {
            assert!(challenged().done(mode::SECURE, &whole[..len]).is_err(), "{len} bytes");
        }
    }
}
