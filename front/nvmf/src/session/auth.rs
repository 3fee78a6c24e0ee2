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
//! The host sends with Authentication Send and asks for what the controller says with Authentication Receive.  It may
//! begin anew at any time.  Whatever goes wrong leads to `Failing`, where the next Receive gets AUTH_Failure1 and the
//! connection ends.

use std::fmt;
use std::sync::Arc;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use forebay_accel::crypto::dh;
use zeroize::Zeroizing;

use super::secret::{Hash, Secret};
use crate::wire::Status;
use crate::wire::auth::{self, Content, Message, Reason};

/// The number of the group without Diffie-Hellman.
const NO_GROUP: u8 = 0;

/// What a host has to show, and what is shown to it.
#[derive(Clone, PartialEq, Eq)]
pub struct Keys {
    /// What the host knows.
    pub host: Secret,
    /// What this end knows, for a host that asks.
    pub controller: Option<Secret>,
    /// Hashes that are taken, the best first.
    pub hashes: Vec<Hash>,
    /// Groups that are taken, the best first; `None` is the exchange without Diffie-Hellman.
    pub groups: Vec<Option<dh::Group>>,
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.controller.is_some() { "Keys(of both)" } else { "Keys(of the host)" })
    }
}

/// The number of a group in messages.
pub fn group_number(group: Option<dh::Group>) -> u8 {
    group.map_or(NO_GROUP, |group| 1 + dh::Group::ALL.iter().position(|each| *each == group).unwrap_or(0) as u8)
}

/// The name of a group in a configuration.
pub fn group_name(group: Option<dh::Group>) -> String {
    group.map_or_else(|| "null".into(), |group| format!("ffdhe{}", group.len() * 8))
}

/// What a message has come to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// There is more to say.
    On,
    /// The host has shown who it is, and has been shown who this is if it wanted.
    Done,
    /// It has failed, and the host knows: the connection ends.
    Failed(Reason),
}

#[derive(Debug)]
enum State {
    /// Nothing has begun.
    Idle,
    /// A challenge is to be given.
    Challenge { hash: Hash, group: Option<dh::Group> },
    /// It was given.
    Reply { hash: Hash, exchange: Option<dh::Exchange>, challenge: Vec<u8>, number: u32 },
    /// The host has shown who it is; what it is answered, if it has asked who this is.
    Success1 { hash: Hash, response: Option<Zeroizing<Vec<u8>>> },
    /// The host has to say whether it believes.
    Success2,
    /// The host is to be told that it has failed.
    Failing(Reason),
}

/// A queue's authentication.
#[derive(Debug)]
pub struct Exchange {
    keys: Arc<Keys>,
    /// Name of the host.
    host: String,
    /// Name of the subsystem.
    subsystem: String,
    transaction: u16,
    state: State,
    done: bool,
}

impl Exchange {
    /// Nothing was said yet.
    pub fn new(keys: Arc<Keys>, host: &str, subsystem: &str) -> Self {
        let (host, subsystem) = (host.to_owned(), subsystem.to_owned());
        Self { keys, host, subsystem, transaction: 0, state: State::Idle, done: false }
    }

    /// The host has shown who it is, at least once, and other commands are taken.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Something has begun and has not come to its end.
    pub fn is_under_way(&self) -> bool {
        !matches!(self.state, State::Idle)
    }

    /// The host is to be told that it has failed.
    pub fn is_failing(&self) -> bool {
        matches!(self.state, State::Failing(_))
    }

    /// Takes a message of the host.
    pub fn take(&mut self, bytes: &[u8]) -> Progress {
        let message = match Message::decode(bytes) {
            Ok(message) => message,
            Err((transaction, reason)) => {
                self.transaction = transaction.unwrap_or(self.transaction);
                return self.fail(reason);
            }
        };
        let state = std::mem::replace(&mut self.state, State::Failing(Reason::Message));
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
            return self.fail(Reason::Payload);
        }
        match (state, message.content) {
            (_, Content::Failure2(_)) => Progress::Failed(Reason::Failed),
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
                Progress::Done
            }
            _ => self.fail(Reason::Message),
        }
    }

    /// What the host is told now, in `room` bytes, and what that comes to.
    ///
    /// # Errors
    /// The status of the command: there is nothing to tell, or no room for it.
    pub fn give(&mut self, room: usize, random: &mut dyn FnMut() -> u64) -> Result<(Vec<u8>, Progress), Status> {
        let fits = |message: Vec<u8>| {
            if message.len() <= room { Ok(message) } else { Err(Status::INVALID_FIELD.final_()) }
        };
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Challenge { hash, group } => {
                let challenge = bytes_of(hash.len(), random);
                // The number 0 says something else.
                let number = (random() as u32).max(1);
                let exchange = group.map(|group| {
                    let exponent = Zeroizing::new(bytes_of(group.exponent_len(), random));
                    dh::Exchange::new(group, &exponent)
                });
                let value = exchange.as_ref().map(dh::Exchange::public).unwrap_or_default();
                let message =
                    auth::challenge(self.transaction, hash as u8, group_number(group), number, &challenge, &value);
                self.state = State::Reply { hash, exchange, challenge, number };
                Ok((fits(message)?, Progress::On))
            }
            State::Success1 { hash, response } => {
                let message = auth::success1(self.transaction, hash.len(), response.as_ref().map(|bytes| &bytes[..]));
                let progress = if response.is_some() { Progress::On } else { Progress::Done };
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
                Ok((fits(auth::failure1(self.transaction, reason))?, Progress::Failed(reason)))
            }
            state @ (State::Idle | State::Reply { .. } | State::Success2) => {
                self.state = state;
                Err(Status::SEQUENCE.final_())
            }
        }
    }

    fn to(&mut self, state: State) -> Progress {
        self.state = state;
        Progress::On
    }

    fn fail(&mut self, reason: Reason) -> Progress {
        self.to(State::Failing(reason))
    }

    fn negotiate(&self, secure_channel: bool, lists: Option<(Vec<u8>, Vec<u8>)>) -> Result<State, Reason> {
        if secure_channel {
            return Err(Reason::Concatenation);
        }
        let (hashes, groups) = lists.ok_or(Reason::Protocol)?;
        let hash = self.keys.hashes.iter().find(|&&hash| hashes.contains(&(hash as u8))).ok_or(Reason::Hash)?;
        let group = self.keys.groups.iter().find(|&&group| groups.contains(&group_number(group)));
        Ok(State::Challenge { hash: *hash, group: *group.ok_or(Reason::Group)? })
    }

    fn reply(
        &self,
        offer: Offer,
        response: &[u8],
        theirs: Option<(u32, Vec<u8>)>,
        value: &[u8],
    ) -> Result<State, Reason> {
        let Offer { hash, exchange, challenge, number } = offer;
        if response.len() != hash.len() {
            return Err(Reason::Payload);
        }
        let shared = match &exchange {
            None if value.is_empty() => None,
            None => return Err(Reason::Payload),
            Some(exchange) => Some(exchange.agree(value).map_err(|_| Reason::Payload)?),
        };
        let respond = |key: &[u8], challenge: &[u8], number: u32, [role, first, second]: [&str; 3]| {
            let augmented = match &shared {
                None => Zeroizing::new(challenge.to_vec()),
                Some(shared) => hash.hmac(&hash.digest(shared), &[challenge]),
            };
            let (number, transaction) = (number.to_le_bytes(), self.transaction.to_le_bytes());
            let names = [role.as_bytes(), first.as_bytes(), &[0], second.as_bytes()].concat();
            // No secure channel.
            hash.hmac(key, &[&augmented, &number, &transaction, &[0], &names])
        };
        let key = self.keys.host.key_of(&self.host);
        let want = respond(&key, &challenge, number, ["HostHost", &self.host, &self.subsystem]);
        verify_slices_are_equal(&want, response).map_err(|_| Reason::Failed)?;
        let response = match theirs {
            None => None,
            // Who gives back our own challenge would have us answer it for somebody else.
            Some((_, theirs)) if theirs == challenge => return Err(Reason::Failed),
            Some((number, theirs)) => {
                let secret = self.keys.controller.as_ref().ok_or(Reason::Failed)?;
                let key = secret.key_of(&self.subsystem);
                Some(respond(&key, &theirs, number, ["Controller", &self.subsystem, &self.host]))
            }
        };
        Ok(State::Success1 { hash, response })
    }
}

/// What a host was challenged with.
struct Offer {
    hash: Hash,
    exchange: Option<dh::Exchange>,
    challenge: Vec<u8>,
    number: u32,
}

fn bytes_of(len: usize, random: &mut dyn FnMut() -> u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()[..chunk.len()]));
    bytes
}
