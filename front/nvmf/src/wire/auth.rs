//! Authentication Send and Receive, and the DH-HMAC-CHAP messages in them (base 8.13).

use super::{DataStructure, Sqe, u16_at, u32_at};

/// Security protocol of NVMe (base 6.4).
const PROTOCOL: u8 = 0xE9;
/// SPSP0 and SPSP1 of authentication.
const SPECIFIC: [u8; 2] = [1, 1];
/// Maximum bytes of a message.  A reply with a DH value of 8,192 bits is 1,168 bytes long.
pub const MESSAGE_MAX: usize = 4096;
/// Bytes of the fixed part of a DH-HMAC-CHAP message.
const HEADER: usize = 16;
/// Bytes of a failure message.
pub const FAILURE_LEN: usize = 8;
/// Bytes of a protocol descriptor in a negotiation.
const DESCRIPTOR: usize = 64;
/// Maximum number of identifiers per list in a descriptor.
const LIST_MAX: usize = 30;

/// Authentication message types.
mod kind {
    pub(super) const COMMON: u8 = 0;
    pub(super) const DHCHAP: u8 = 1;
}

/// Message identifiers.
pub mod id {
    /// AUTH_Negotiate message.
    pub const NEGOTIATE: u8 = 0x00;
    /// DH-HMAC-CHAP_Challenge message.
    pub const CHALLENGE: u8 = 0x01;
    /// DH-HMAC-CHAP_Reply message.
    pub const REPLY: u8 = 0x02;
    /// DH-HMAC-CHAP_Success1 message.
    pub const SUCCESS1: u8 = 0x03;
    /// DH-HMAC-CHAP_Success2 message.
    pub const SUCCESS2: u8 = 0x04;
    /// AUTH_Failure2 message.
    pub const FAILURE2: u8 = 0xF0;
    /// AUTH_Failure1 message.
    pub const FAILURE1: u8 = 0xF1;
}

/// Reason of a failed authentication (base figure 470); the reason code is always 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum AuthFailureReason {
    /// Wrong response: the other side does not know the secret.
    #[error("the secrets differ")]
    Failed = 1,
    /// No common authentication protocol.
    #[error("no authentication protocol in common")]
    Protocol = 2,
    /// Secure channel concatenation requested, which is not supported.
    #[error("secure channel concatenation is not supported")]
    Concatenation = 3,
    /// No common hash.
    #[error("no hash in common")]
    Hash = 4,
    /// No common DH group.
    #[error("no Diffie-Hellman group in common")]
    Group = 5,
    /// Malformed message.
    #[error("malformed authentication message")]
    Payload = 6,
    /// Unexpected message.
    #[error("unexpected authentication message")]
    Message = 7,
}

/// Returns the transfer or allocation length of an authentication command; `None` if it is 0 or the security
/// protocol differs.
pub fn length(sqe: &Sqe) -> Option<u32> {
    let fits = sqe.0[43] == PROTOCOL && [sqe.0[41], sqe.0[42]] == SPECIFIC;
    fits.then(|| u32_at(&sqe.0, 44)).filter(|&len| len > 0)
}

/// Authentication message of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuthMessage {
    /// Transaction identifier.
    pub transaction: u16,
    /// Content of the message.
    pub content: Content,
}

/// Content of a host's message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// AUTH_Negotiate message.
    Negotiate {
        /// Secure channel concatenation requested.
        secure_channel: bool,
        /// Hash and DH group identifiers offered for DH-HMAC-CHAP, in the host's order; `None` if the host does not
        /// offer it.
        lists: Option<(Vec<u8>, Vec<u8>)>,
    },
    /// DH-HMAC-CHAP_Reply message.
    Reply {
        /// Response to the controller's challenge.
        response: Vec<u8>,
        /// Challenge for the controller: a sequence number other than 0, and the challenge value.
        challenge: Option<(u32, Vec<u8>)>,
        /// Diffie-Hellman public value; empty without Diffie-Hellman.
        value: Vec<u8>,
    },
    /// DH-HMAC-CHAP_Success2: the host has verified the controller's response.
    Success2,
    /// AUTH_Failure2, with the reason code explanation.
    Failure2(u8),
}

impl AuthMessage {
    /// Decodes a message.
    ///
    /// # Errors
    /// The reason of the failure, and the transaction identifier if it is known.
    pub fn decode(bytes: &[u8]) -> Result<Self, (Option<u16>, AuthFailureReason)> {
        if bytes.len() < FAILURE_LEN {
            return Err((None, AuthFailureReason::Payload));
        }
        let transaction = u16_at(bytes, 4);
        let wrong = |reason| (Some(transaction), reason);
        let content = match (bytes[0], bytes[1]) {
            (kind::COMMON, id::NEGOTIATE) => negotiate(bytes),
            (kind::COMMON, id::FAILURE2) => Some(Content::Failure2(bytes[7])),
            (kind::DHCHAP, id::REPLY) => reply(bytes),
            (kind::DHCHAP, id::SUCCESS2) => (bytes.len() >= HEADER).then_some(Content::Success2),
            _ => return Err(wrong(AuthFailureReason::Message)),
        };
        Ok(Self { transaction, content: content.ok_or(wrong(AuthFailureReason::Payload))? })
    }
}

fn negotiate(bytes: &[u8]) -> Option<Content> {
    let (secure_channel, count) = (bytes[6] != 0, usize::from(bytes[7]));
    let descriptors = bytes.get(FAILURE_LEN..FAILURE_LEN + count * DESCRIPTOR)?;
    let mut lists = None;
    for descriptor in descriptors.chunks_exact(DESCRIPTOR).filter(|descriptor| descriptor[0] == kind::DHCHAP) {
        let (hashes, groups) = (usize::from(descriptor[2]), usize::from(descriptor[3]));
        if hashes > LIST_MAX || groups > LIST_MAX {
            return None;
        }
        let ids = &descriptor[4..];
        lists = lists.or_else(|| Some((ids[..hashes].to_vec(), ids[LIST_MAX..LIST_MAX + groups].to_vec())));
    }
    Some(Content::Negotiate { secure_channel, lists })
}

fn reply(bytes: &[u8]) -> Option<Content> {
    if bytes.len() < HEADER {
        return None;
    }
    let (hash, challenged) = (usize::from(bytes[6]), bytes[8] & 1 != 0);
    let (value, number) = (usize::from(u16_at(bytes, 10)), u32_at(bytes, 12));
    let rest = &bytes[HEADER..];
    // The challenge field is present even if it is not valid.
    let (response, rest) = rest.split_at_checked(hash)?;
    let (challenge, rest) = rest.split_at_checked(hash)?;
    let value = rest.get(..value)?.to_vec();
    // The sequence number 0 is reserved for secure channels.
    if challenged && number == 0 {
        return None;
    }
    let challenge = challenged.then(|| (number, challenge.to_vec()));
    Some(Content::Reply { response: response.to_vec(), challenge, value })
}

fn header(kind: u8, id: u8, transaction: u16, len: usize) -> DataStructure {
    let mut page = DataStructure::new(len);
    page.u8(0, kind).u8(1, id).u16(4, transaction);
    page
}

/// Encodes DH-HMAC-CHAP_Challenge.
pub fn challenge(transaction: u16, hash: u8, group: u8, number: u32, challenge: &[u8], value: &[u8]) -> Vec<u8> {
    let mut page = header(kind::DHCHAP, id::CHALLENGE, transaction, HEADER);
    page.u8(6, challenge.len() as u8).u8(8, hash).u8(9, group).u16(10, value.len() as u16).u32(12, number);
    page.extend(challenge).extend(value);
    page.finish()
}

/// Encodes DH-HMAC-CHAP_Success1, with the response to the host's challenge if there was one.
pub fn success1(transaction: u16, hash_len: usize, response: Option<&[u8]>) -> Vec<u8> {
    let mut page = header(kind::DHCHAP, id::SUCCESS1, transaction, HEADER);
    page.u8(6, hash_len as u8).u8(8, response.is_some().into());
    match response {
        Some(response) => page.extend(response),
        None => page.extend(&vec![0; hash_len]),
    };
    page.finish()
}

/// Encodes AUTH_Failure1.
pub fn failure1(transaction: u16, reason: AuthFailureReason) -> Vec<u8> {
    let mut page = header(kind::COMMON, id::FAILURE1, transaction, FAILURE_LEN);
    page.u8(6, 1).u8(7, reason as u8);
    page.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_negotiation_may_name_protocols_that_are_not_known() {
        let mut bytes = vec![0, 0, 0, 0, 7, 0, 0, 2];
        bytes.resize(8 + 2 * 64, 0);
        bytes[8] = 9;
        bytes[72..76].copy_from_slice(&[1, 0, 2, 1]);
        bytes[76..78].copy_from_slice(&[3, 1]);
        bytes[76 + 30] = 2;
        let message = AuthMessage::decode(&bytes).expect("a negotiation");
        let lists = Some((vec![3, 1], vec![2]));
        assert_eq!(
            message,
            AuthMessage { transaction: 7, content: Content::Negotiate { secure_channel: false, lists } }
        );
        bytes[72] = 8;
        let none = Content::Negotiate { secure_channel: false, lists: None };
        assert_eq!(AuthMessage::decode(&bytes).expect("a negotiation").content, none);
        assert_eq!(AuthMessage::decode(&bytes[..100]), Err((Some(7), AuthFailureReason::Payload)));
        assert_eq!(AuthMessage::decode(&bytes[..7]), Err((None, AuthFailureReason::Payload)));
    }
}
