//! DH-HMAC-CHAP of a queue, on the controller's side (base 8.13.5).
//!
//! ```text
//! host                      controller
//! AUTH_Negotiate        ->              Idle      -> Challenge
//!                       <-  Challenge   Challenge -> Reply
//! Reply                 ->              Reply     -> Success1
//!                       <-  Success1    Success1  -> Success2 when the host has given a challenge, or Idle
//! Success2              ->              Success2  -> Idle
//! ```
//!
//! The host sends messages with Authentication Send and fetches those of the controller with Authentication
//! Receive.  It may start over with AUTH_Negotiate at any time, except in `Failing`.  Any error leads to
//! `Failing`: the next Authentication Receive gets AUTH_Failure1, and the connection ends.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use forebay_accel::crypto::dh;
use zeroize::Zeroizing;

use super::secret::{DhChapHash, DhChapSecret};
use crate::wire::NvmeStatus;
use crate::wire::auth::{self, AuthFailureReason, AuthMessage, Content};

/// Identifier of the NULL DH group: no Diffie-Hellman exchange.
const NO_GROUP: u8 = 0;

/// Secrets and parameters of authentication between a host and a subsystem.
#[derive(Clone, PartialEq, Eq)]
pub struct AuthSecrets {
    /// Secret of the host.
    pub host: DhChapSecret,
    /// Secret of the controller, for bidirectional authentication.
    pub controller: Option<DhChapSecret>,
    /// Accepted hashes, in order of preference.
    pub hashes: Vec<DhChapHash>,
    /// Accepted DH groups, in order of preference; `None` is the exchange without Diffie-Hellman.
    pub groups: Vec<Option<dh::DhGroup>>,
}

impl fmt::Debug for AuthSecrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.controller.is_some() { "AuthSecrets(of both)" } else { "AuthSecrets(of the host)" })
    }
}

/// Returns the identifier of a DH group in messages.
pub fn group_number(group: Option<dh::DhGroup>) -> u8 {
    group.map_or(NO_GROUP, |group| 1 + dh::DhGroup::ALL.iter().position(|each| *each == group).unwrap_or(0) as u8)
}

/// Returns the name of a DH group in the configuration.
pub fn group_name(group: Option<dh::DhGroup>) -> String {
    group.map_or_else(|| "null".into(), |group| format!("ffdhe{}", group.len() * 8))
}

/// Outcome of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AuthProgress {
    /// Authentication continues.
    On,
    /// Host authenticated, and controller too if the host asked for it.
    Done,
    /// Authentication failed and the host was told, or the host reported a failure; the connection ends.
    Failed(AuthFailureReason),
}

#[derive(Debug)]
enum State {
    /// No authentication in progress.
    Idle,
    /// DH-HMAC-CHAP_Challenge due to be sent.
    Challenge { hash: DhChapHash, group: Option<dh::DhGroup> },
    /// Challenge sent, DH-HMAC-CHAP_Reply due from the host.
    Reply { hash: DhChapHash, exchange: Option<dh::DhExchange>, challenge: Vec<u8>, number: u32 },
    /// Host authenticated, DH-HMAC-CHAP_Success1 due to be sent; with the response to the host's challenge, if any.
    Success1 { hash: DhChapHash, response: Option<Zeroizing<Vec<u8>>> },
    /// DH-HMAC-CHAP_Success2 or AUTH_Failure2 due from the host.
    Success2,
    /// AUTH_Failure1 due to be sent.
    Failing(AuthFailureReason),
}

/// Authentication exchange of a queue, on the controller's side.
#[derive(Debug)]
pub struct AuthExchange {
    keys: Arc<AuthSecrets>,
    /// NQN of the host.
    host: String,
    /// NQN of the subsystem.
    subsystem: String,
    transaction: u16,
    state: State,
    done: bool,
}

impl AuthExchange {
    /// Creates an exchange that waits for AUTH_Negotiate.
    pub fn new(keys: Arc<AuthSecrets>, host: &str, subsystem: &str) -> Self {
        let (host, subsystem) = (host.to_owned(), subsystem.to_owned());
        Self { keys, host, subsystem, transaction: 0, state: State::Idle, done: false }
    }

    /// Returns whether the host has authenticated at least once, so that other commands are accepted.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Returns whether an authentication is in progress.
    pub fn is_in_progress(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// Returns whether AUTH_Failure1 is due to be sent.
    pub fn is_failing(&self) -> bool {
        matches!(self.state, State::Failing(_))
    }

    /// Processes a message of the host.
    pub fn take(&mut self, bytes: &[u8]) -> AuthProgress {
        let message = match AuthMessage::decode(bytes) {
            Ok(message) => message,
            Err((transaction, reason)) => {
                self.transaction = transaction.unwrap_or(self.transaction);
                return self.fail(reason);
            }
        };
        let state = std::mem::replace(&mut self.state, State::Failing(AuthFailureReason::Message));
        if let State::Failing(reason) = state {
            return self.fail(reason);
        }
        if let Content::Negotiate { secure_channel, lists } = message.content {
            self.transaction = message.transaction;
            return match self.negotiate(secure_channel, lists) {
                Ok(state) => self.to(state),
                Err(reason) => self.fail(reason),
            };
        }
        if message.transaction != self.transaction {
            return self.fail(AuthFailureReason::Payload);
        }
        match (state, message.content) {
            (_, Content::Failure2(_)) => AuthProgress::Failed(AuthFailureReason::Failed),
            (
                State::Reply { hash, exchange, challenge, number },
                Content::Reply { response, challenge: theirs, value },
            ) => {
                let host = Offer { hash, exchange, challenge, number };
                match self.reply(host, &response, theirs, &value) {
                    Ok(state) => self.to(state),
                    Err(reason) => self.fail(reason),
                }
            }
            (State::Success2, Content::Success2) => {
                self.state = State::Idle;
                self.done = true;
                AuthProgress::Done
            }
            _ => self.fail(AuthFailureReason::Message),
        }
    }

    /// Returns the next message to the host, in at most `room` bytes, and the progress it makes.
    ///
    /// # Errors
    /// The status of the command: no message is due, or it does not fit.
    pub fn give(
        &mut self,
        room: usize,
        random: &mut dyn FnMut() -> u64,
    ) -> Result<(Vec<u8>, AuthProgress), NvmeStatus> {
        let fits = |message: Vec<u8>| {
            if message.len() <= room { Ok(message) } else { Err(NvmeStatus::INVALID_FIELD.final_()) }
        };
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Challenge { hash, group } => {
                let challenge = bytes_of(hash.len(), random);
                // The sequence number 0 is reserved.
                let number = (random() as u32).max(1);
                let exchange = group.map(|group| {
                    let exponent = Zeroizing::new(bytes_of(group.exponent_len(), random));
                    dh::DhExchange::new(group, &exponent)
                });
                let value = exchange.as_ref().map(dh::DhExchange::public).unwrap_or_default();
                let message =
                    auth::challenge(self.transaction, hash as u8, group_number(group), number, &challenge, &value);
                self.state = State::Reply { hash, exchange, challenge, number };
                Ok((fits(message)?, AuthProgress::On))
            }
            State::Success1 { hash, response } => {
                let message = auth::success1(self.transaction, hash.len(), response.as_ref().map(|bytes| &bytes[..]));
                let progress = if response.is_some() { AuthProgress::On } else { AuthProgress::Done };
                let message = fits(message)?;
                if response.is_some() {
                    self.state = State::Success2;
                } else {
                    self.done = true;
                }
                Ok((message, progress))
            }
            State::Failing(reason) => {
                self.state = State::Failing(reason);
                Ok((fits(auth::failure1(self.transaction, reason))?, AuthProgress::Failed(reason)))
            }
            state @ (State::Idle | State::Reply { .. } | State::Success2) => {
                self.state = state;
                Err(NvmeStatus::SEQUENCE.final_())
            }
        }
    }

    fn to(&mut self, state: State) -> AuthProgress {
        self.state = state;
        AuthProgress::On
    }

    fn fail(&mut self, reason: AuthFailureReason) -> AuthProgress {
        self.to(State::Failing(reason))
    }

    fn negotiate(&self, secure_channel: bool, lists: Option<(Vec<u8>, Vec<u8>)>) -> Result<State, AuthFailureReason> {
        if secure_channel {
            return Err(AuthFailureReason::Concatenation);
        }
        let (hashes, groups) = lists.ok_or(AuthFailureReason::Protocol)?;
        let hash =
            self.keys.hashes.iter().find(|&&hash| hashes.contains(&(hash as u8))).ok_or(AuthFailureReason::Hash)?;
        let group = self.keys.groups.iter().find(|&&group| groups.contains(&group_number(group)));
        Ok(State::Challenge { hash: *hash, group: *group.ok_or(AuthFailureReason::Group)? })
    }

    fn reply(
        &self,
        offer: Offer,
        response: &[u8],
        theirs: Option<(u32, Vec<u8>)>,
        value: &[u8],
    ) -> Result<State, AuthFailureReason> {
        let Offer { hash, exchange, challenge, number } = offer;
        if response.len() != hash.len() {
            return Err(AuthFailureReason::Payload);
        }
        let shared = match &exchange {
            None if value.is_empty() => None,
            None => return Err(AuthFailureReason::Payload),
            Some(exchange) => Some(exchange.agree(value).map_err(|_| AuthFailureReason::Payload)?),
        };
        let respond = |key: &[u8], challenge: &[u8], number: u32, [role, first, second]: [&str; 3]| {
            let augmented = match &shared {
                None => Zeroizing::new(challenge.to_vec()),
                Some(shared) => hash.hmac(&hash.digest(shared), &[challenge]),
            };
            let (number, transaction) = (number.to_le_bytes(), self.transaction.to_le_bytes());
            let names = [role.as_bytes(), first.as_bytes(), &[0], second.as_bytes()].concat();
            // The zero byte is SC_C: no secure channel.
            hash.hmac(key, &[&augmented, &number, &transaction, &[0], &names])
        };
        let key = self.keys.host.key_of(&self.host);
        let want = respond(&key, &challenge, number, ["HostHost", &self.host, &self.subsystem]);
        verify_slices_are_equal(&want, response).map_err(|_| AuthFailureReason::Failed)?;
        let response = match theirs {
            None => None,
            // A reflected challenge would make the controller compute a response for an impostor.
            Some((_, theirs)) if theirs == challenge => return Err(AuthFailureReason::Failed),
            Some((number, theirs)) => {
                let secret = self.keys.controller.as_ref().ok_or(AuthFailureReason::Failed)?;
                let key = secret.key_of(&self.subsystem);
                Some(respond(&key, &theirs, number, ["Controller", &self.subsystem, &self.host]))
            }
        };
        Ok(State::Success1 { hash, response })
    }
}

/// Challenge that was sent to a host.
struct Offer {
    hash: DhChapHash,
    exchange: Option<dh::DhExchange>,
    challenge: Vec<u8>,
    number: u32,
}

fn bytes_of(len: usize, random: &mut dyn FnMut() -> u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()[..chunk.len()]));
    bytes
}
