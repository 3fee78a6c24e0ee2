//! DH-HMAC-CHAP on the host's side, after the figures of the base specification 2.0, section 8.13.

use std::io;

use aws_lc_rs::{digest, hmac};
use forebay_accel::crypto::dh;
use forebay_reactor::random;

use crate::client::{Client, Done};
use crate::codec;

/// Host identity and its authentication settings.
#[derive(Debug, Clone)]
pub struct Identity {
    /// Host NQN.
    pub host: String,
    /// Subsystem NQN.
    pub subsystem: String,
    /// Transformed key of the host, used for responses.
    pub key: Vec<u8>,
    /// Key of the controller, if bidirectional authentication is requested.
    pub controller_key: Option<Vec<u8>>,
    /// Hash identifiers to offer.
    pub hashes: Vec<u8>,
    /// Diffie-Hellman group identifiers to offer.
    pub groups: Vec<u8>,
}

/// Outcome of authentication.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// Authentication succeeded.
    Authenticated,
    /// Controller refused, with this reason code explanation.
    Refused(u8),
    /// Controller failed to prove that it knows its secret.
    Impostor,
}

/// Computes an HMAC with hash identifier 1 to 3.
pub fn mac(hash: u8, key: &[u8], text: &[u8]) -> Vec<u8> {
    let algorithm = [hmac::HMAC_SHA256, hmac::HMAC_SHA384, hmac::HMAC_SHA512][usize::from(hash) - 1];
    hmac::sign(&hmac::Key::new(algorithm, key), text).as_ref().to_vec()
}

/// Transforms a secret into a key, with the given hash.
pub fn transformed(hash: u8, secret: &[u8], nqn: &str) -> Vec<u8> {
    mac(hash, secret, format!("{nqn}NVMe-over-Fabrics").as_bytes())
}

fn hashed(hash: u8, bytes: &[u8]) -> Vec<u8> {
    let algorithm = [&digest::SHA256, &digest::SHA384, &digest::SHA512][usize::from(hash) - 1];
    digest::digest(algorithm, bytes).as_ref().to_vec()
}

fn le16(bytes: &[u8], at: usize) -> usize {
    usize::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

/// Builds an Authentication Send or Receive command.
pub fn command(send: bool, len: usize) -> codec::Sqe {
    let mut sqe = codec::sqe(0x7F, 0);
    sqe[4] = if send { 5 } else { 6 };
    (sqe[41], sqe[42], sqe[43]) = (1, 1, 0xE9);
    sqe[44..48].copy_from_slice(&(len as u32).to_le_bytes());
    sqe
}

/// Builds AUTH_Negotiate.
pub fn negotiate(transaction: u16, hashes: &[u8], groups: &[u8]) -> Vec<u8> {
    let mut message = vec![0; 72];
    message[4..6].copy_from_slice(&transaction.to_le_bytes());
    (message[7], message[8]) = (1, 1);
    (message[10], message[11]) = (hashes.len() as u8, groups.len() as u8);
    message[12..12 + hashes.len()].copy_from_slice(hashes);
    message[42..42 + groups.len()].copy_from_slice(groups);
    message
}

impl Client {
    /// Sends an authentication message.
    pub async fn auth_send(&mut self, message: &[u8]) -> io::Result<Done> {
        self.run(command(true, message.len()), message, 0).await
    }

    /// Receives an authentication message from the controller.
    pub async fn auth_receive(&mut self) -> io::Result<Done> {
        self.run(command(false, 2048), &[], 2048).await
    }

    /// Authenticates this queue.
    pub async fn authenticate(&mut self, identity: &Identity) -> io::Result<Outcome> {
        let transaction = random() as u16;
        self.auth_send(&negotiate(transaction, &identity.hashes, &identity.groups)).await?.ok();
        let challenge = self.auth_receive().await?.ok();
        if challenge[1] == 0xF1 {
            return Ok(Outcome::Refused(challenge[7]));
        }
        assert_eq!((challenge[0], challenge[1], le16(&challenge, 4)), (1, 1, usize::from(transaction)));
        let (hash_len, hash, group, value_len) =
            (usize::from(challenge[6]), challenge[8], challenge[9], le16(&challenge, 10));
        assert!(identity.hashes.contains(&hash) && identity.groups.contains(&group), "what was offered");
        let number = &challenge[12..16];
        let (theirs, value) = (&challenge[16..16 + hash_len], &challenge[16 + hash_len..16 + hash_len + value_len]);
        let (mut ours, mut shared) = (Vec::new(), None);
        if group > 0 {
            let group = dh::DhGroup::ALL[usize::from(group) - 1];
            let exponent: Vec<u8> = (0..group.exponent_len()).map(|_| random() as u8).collect();
            let exchange = dh::DhExchange::new(group, &exponent);
            shared = Some(exchange.agree(value).expect("the controller's value is in the group"));
            ours = exchange.public();
        }
        let respond = |key: &[u8], challenge: &[u8], number: &[u8], role: &str, first: &str, second: &str| {
            let augmented = match &shared {
                None => challenge.to_vec(),
                Some(shared) => mac(hash, &hashed(hash, shared), challenge),
            };
            let names = [role.as_bytes(), first.as_bytes(), &[0], second.as_bytes()].concat();
            mac(hash, key, &[&augmented[..], number, &transaction.to_le_bytes(), &[0], &names].concat())
        };
        let Identity { host, subsystem, .. } = identity;
        let response = respond(&identity.key, theirs, number, "HostHost", host, subsystem);
        let asks = identity.controller_key.is_some();
        let mine: Vec<u8> = (0..hash_len).map(|_| random() as u8).collect();
        let my_number = u32::from(asks) * (random() as u32 | 1);
        let mut reply = vec![1, 2, 0, 0];
        reply.extend(transaction.to_le_bytes());
        reply.extend([hash_len as u8, 0, asks.into(), 0]);
        reply.extend((ours.len() as u16).to_le_bytes());
        reply.extend(my_number.to_le_bytes());
        reply.extend(response);
        reply.extend(&mine);
        reply.extend(ours);
        self.auth_send(&reply).await?.ok();
        let success = self.auth_receive().await?.ok();
        if success[1] == 0xF1 {
            return Ok(Outcome::Refused(success[7]));
        }
        assert_eq!((success[0], success[1], success[8] & 1), (1, 3, asks.into()));
        let Some(key) = &identity.controller_key else { return Ok(Outcome::Authenticated) };
        let want = respond(key, &mine, &my_number.to_le_bytes(), "Controller", subsystem, host);
        let believed = success[16..16 + hash_len] == want;
        let mut last = if believed { vec![1, 4, 0, 0] } else { vec![0, 0xF0, 0, 0] };
        last.extend(transaction.to_le_bytes());
        last.extend(if believed { [0, 0] } else { [1, 1] });
        last.resize(16, 0);
        self.auth_send(&last).await?.ok();
        Ok(if believed { Outcome::Authenticated } else { Outcome::Impostor })
    }
}
