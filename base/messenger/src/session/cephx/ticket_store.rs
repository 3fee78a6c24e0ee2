//! Client credentials kept across connections: global ID and tickets; and the authorizer that presents a ticket to its
//! service.

use std::cell::RefCell;
use std::rc::Rc;

use super::{CephxSecret, ServiceTicket, WHAT, read_tickets};
use crate::session::auth::{AUTHORIZER, AuthClient, AuthError, SessionKeys};
use crate::wire::codec::{PayloadReader, PayloadWriter};
use crate::wire::control::{method, mode};
use crate::wire::entity;

const GET_PRINCIPAL_SESSION_KEY: u16 = 0x0200;

/// Identity of the client in the cluster, and its tickets.
#[derive(Default)]
struct Credentials {
    global_id: u64,
    tickets: Vec<ServiceTicket>,
}

/// Global ID and tickets of a client, shared by its connections to monitors, which fill it, and to services, which use
/// it.
///
/// It preserves the client's identity in the cluster across re-authentication: locks, watches and the detection of
/// repeated writes depend on the global ID.
#[derive(Default)]
pub struct TicketStore(RefCell<Credentials>);

impl std::fmt::Debug for TicketStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Tickets are kept out of logs.
        write!(f, "TicketStore(client.{})", self.global_id())
    }
}

impl TicketStore {
    /// Creates an empty store: the next authentication assigns a new global ID.
    pub fn new() -> Rc<Self> {
        Rc::default()
    }

    /// Returns the global ID; zero before the first authentication.
    pub fn global_id(&self) -> u64 {
        self.0.borrow().global_id
    }

    /// Returns the ticket for a service, of [`entity`].
    pub fn ticket(&self, service: u32) -> Option<ServiceTicket> {
        self.0.borrow().tickets.iter().find(|ticket| ticket.service == service).cloned()
    }

    /// Drops all content, once the cluster no longer accepts this client's old identity.
    pub fn clear(&self) {
        *self.0.borrow_mut() = Credentials::default();
    }

    pub(super) fn tickets(&self) -> Vec<ServiceTicket> {
        self.0.borrow().tickets.clone()
    }

    pub(super) fn fill(&self, tickets: &[ServiceTicket]) {
        self.0.borrow_mut().tickets = tickets.to_vec();
    }

    pub(in crate::session) fn set_global_id(&self, global_id: u64) {
        self.0.borrow_mut().global_id = global_id;
    }

    /// Builds the payload that requests new tickets of `services` (bit mask of [`entity`]) from a monitor on an open
    /// connection; `None` before the first authentication.
    pub fn renewal(&self, services: u32, nonce: u64) -> Option<Vec<u8>> {
        let ticket = self.ticket(u32::from(entity::AUTH))?;
        let mut out = PayloadWriter::new();
        out.u16(GET_PRINCIPAL_SESSION_KEY);
        out.raw(&authorizer(self.global_id(), &ticket, nonce, None));
        out.u8(1).u32(services);
        Some(out.finish())
    }

    /// Stores the tickets of the monitor's answer to a [`renewal`](Self::renewal).
    pub fn renewed(&self, payload: &[u8]) -> Result<(), AuthError> {
        let mut reader = PayloadReader::new(payload, WHAT);
        let kind = reader.u16()?;
        let status = reader.i32()?;
        if status != 0 {
            return Err(AuthError::Refused(status));
        }
        if kind != GET_PRINCIPAL_SESSION_KEY {
            return Err(reader.malformed().into());
        }
        let session = self.ticket(u32::from(entity::AUTH)).ok_or(AuthError::OutOfTurn)?.session;
        let mut tickets = self.tickets();
        read_tickets(&mut tickets, &session, &mut reader)?;
        self.fill(&tickets);
        Ok(())
    }
}

/// Builds a ticket with the proof of possession of its key; a second authorizer answers the service's challenge.
fn authorizer(global_id: u64, ticket: &ServiceTicket, nonce: u64, challenge: Option<u64>) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u8(AUTHORIZER).u64(global_id).u32(ticket.service).raw(&ticket.blob);
    let mut proof = PayloadWriter::new();
    proof.u8(2).u64(nonce).u8(u8::from(challenge.is_some()));
    proof.u64(challenge.map_or(0, |challenge| challenge.wrapping_add(1)));
    ticket.session.seal(&proof.finish(), &mut out);
    out.finish()
}

/// Client side of a connection to a service, such as an OSD.
#[derive(Debug)]
pub struct Authorizer {
    ticket_store: Rc<TicketStore>,
    service: u32,
    /// Ticket presented on this connection, and the nonce of the proof.
    shown: Option<(ServiceTicket, u64)>,
    challenged: bool,
}

impl Authorizer {
    /// Creates an authorizer with the ticket for `service`, of [`entity`].
    pub fn new(ticket_store: Rc<TicketStore>, service: u32) -> Self {
        Self { ticket_store, service, shown: None, challenged: false }
    }

    fn session(&self) -> Result<(&CephxSecret, u64), AuthError> {
        self.shown.as_ref().map(|(ticket, nonce)| (&ticket.session, *nonce)).ok_or(AuthError::OutOfTurn)
    }
}

impl AuthClient for Authorizer {
    fn method(&self) -> u32 {
        method::CEPHX
    }

    fn begin(&mut self, _modes: &[u32], random: &mut dyn FnMut() -> u64) -> Vec<u8> {
        self.challenged = false;
        // Without a ticket the service rejects this client, with an error.
        self.shown = self.ticket_store.ticket(self.service).map(|ticket| (ticket, random()));
        let Some((ticket, nonce)) = &self.shown else { return vec![AUTHORIZER] };
        authorizer(self.ticket_store.global_id(), ticket, *nonce, None)
    }

    fn more(&mut self, payload: &[u8], _random: &mut dyn FnMut() -> u64) -> Result<Vec<u8>, AuthError> {
        if std::mem::replace(&mut self.challenged, true) {
            return Err(AuthError::OutOfTurn);
        }
        let Some((ticket, nonce)) = &self.shown else { return Err(AuthError::OutOfTurn) };
        // Unlike all other ciphertexts, the challenge has no length prefix.
        let content = ticket.session.decrypt(payload)?;
        let mut reader = PayloadReader::new(&content, WHAT);
        reader.u8()?;
        Ok(authorizer(self.ticket_store.global_id(), ticket, *nonce, Some(reader.u64()?)))
    }

    fn done(&mut self, chosen: u32, payload: &[u8]) -> Result<SessionKeys, AuthError> {
        let (session, nonce) = self.session()?;
        let content = session.open(&mut PayloadReader::new(payload, WHAT))?;
        let mut reader = PayloadReader::new(&content, WHAT);
        let version = reader.u8()?;
        // A peer that returns the nonce plus one has decrypted the proof, so it is the service.
        if reader.u64()? != nonce.wrapping_add(1) {
            return Err(AuthError::Decrypt);
        }
        let connection = if version >= 2 { reader.blob()?.to_vec() } else { Vec::new() };
        if connection.is_empty() && chosen == mode::SECURE {
            return Err(AuthError::Decrypt);
        }
        Ok(SessionKeys { session: session.0.to_vec(), connection, ..SessionKeys::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ticket_store() -> Rc<TicketStore> {
        let ticket_store = TicketStore::new();
        let ticket = |service: u8, key: u8| ServiceTicket {
            service: u32::from(service),
            session: CephxSecret([key; 16]),
            valid_seconds: 3600,
            blob: vec![1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        };
        ticket_store.set_global_id(4711);
        ticket_store.fill(&[ticket(entity::AUTH, 3), ticket(entity::OSD, 4)]);
        ticket_store
    }

    /// Decodes an authorizer as a service does: the nonce, and the challenge's answer if there is one.
    fn open(bytes: &[u8], key: &CephxSecret) -> (u64, Option<u64>) {
        let mut reader = PayloadReader::new(bytes, WHAT);
        assert_eq!((reader.u8(), reader.u64()), (Ok(1), Ok(4711)));
        reader.u32().expect("a service");
        reader.take(13).expect("the ticket");
        let content = key.open(&mut reader).expect("sealed with the ticket's key");
        let mut proof = PayloadReader::new(&content, WHAT);
        assert_eq!(proof.u8(), Ok(2));
        let nonce = proof.u64().expect("a nonce");
        let answered = proof.u8().expect("a flag") != 0;
        (nonce, answered.then(|| proof.u64().expect("an answer")))
    }

    fn sealed(key: &CephxSecret, content: impl FnOnce(&mut PayloadWriter)) -> Vec<u8> {
        let (mut plain, mut out) = (PayloadWriter::new(), PayloadWriter::new());
        content(&mut plain);
        key.seal(&plain.finish(), &mut out);
        out.finish()
    }

    #[test]
    fn a_service_is_shown_the_ticket_and_answered() {
        let key = CephxSecret([4; 16]);
        let mut client = Authorizer::new(ticket_store(), entity::OSD.into());
        assert_eq!(open(&client.begin(&[mode::SECURE], &mut || 99), &key), (99, None));
        let challenge = sealed(&key, |out| {
            out.u8(1).u64(41);
        });
        let more = client.more(&challenge[4..], &mut || 0).expect("answered");
        assert_eq!(open(&more, &key), (99, Some(42)));
        assert_eq!(client.more(&challenge[4..], &mut || 0), Err(AuthError::OutOfTurn));
        let done = sealed(&key, |out| {
            out.u8(2).u64(100).blob(&[5; 64]);
        });
        let keys = client.done(mode::SECURE, &done).expect("keys");
        assert_eq!((keys.session, keys.connection), (vec![4; 16], vec![5; 64]));
    }

    #[test]
    fn who_cannot_open_the_proof_is_not_the_service() {
        let key = CephxSecret([4; 16]);
        let begun = || {
            let mut client = Authorizer::new(ticket_store(), entity::OSD.into());
            client.begin(&[mode::CRC], &mut || 99);
            client
        };
        let wrong_number = sealed(&key, |out| {
            out.u8(2).u64(99).blob(&[5; 64]);
        });
        assert_eq!(begun().done(mode::CRC, &wrong_number), Err(AuthError::Decrypt));
        let wrong_key = sealed(&CephxSecret([6; 16]), |out| {
            out.u8(2).u64(100).blob(&[5; 64]);
        });
        assert!(begun().done(mode::CRC, &wrong_key).is_err());
        let no_secret = sealed(&key, |out| {
            out.u8(1).u64(100);
        });
        assert!(begun().done(mode::CRC, &no_secret).is_ok());
        assert_eq!(begun().done(mode::SECURE, &no_secret), Err(AuthError::Decrypt));
        let mut nobody = Authorizer::new(TicketStore::new(), entity::OSD.into());
        nobody.begin(&[mode::CRC], &mut || 99);
        assert_eq!(nobody.done(mode::CRC, &no_secret), Err(AuthError::OutOfTurn));
    }

    #[test]
    fn tickets_are_renewed() {
        let ticket_store = ticket_store();
        let request = ticket_store.renewal(u32::from(entity::OSD), 7).expect("we have a ticket of the monitors");
        assert_eq!(request[..2], GET_PRINCIPAL_SESSION_KEY.to_le_bytes());
        assert_eq!(open(&request[2..], &CephxSecret([3; 16])).0, 7);
        let mut reply = PayloadWriter::new();
        reply.u16(GET_PRINCIPAL_SESSION_KEY).i32(0).u8(1).u32(1).u32(entity::OSD.into()).u8(1);
        let content = sealed(&CephxSecret([3; 16]), |out| {
            out.u8(1).u16(1).u64(0).u16(16).raw(&[9; 16]).u32(60).u32(0);
        });
        reply.raw(&content).u8(0).blob(b"newer");
        let reply = reply.finish();
        for len in 0..reply.len() {
            assert!(ticket_store.renewed(&reply[..len]).is_err(), "{len} bytes");
        }
        ticket_store.renewed(&reply).expect("renewed");
        let ticket = ticket_store.ticket(entity::OSD.into()).expect("a ticket");
        assert_eq!((ticket.session, ticket.blob, ticket.valid_seconds), (CephxSecret([9; 16]), b"newer".to_vec(), 60));
        assert!(TicketStore::new().renewal(4, 7).is_none());
        assert!(TicketStore::new().renewed(&reply).is_err());
    }
}
