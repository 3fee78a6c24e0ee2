//! CHAP, one-way and mutual (RFC 7143, section 12.1.3; RFC 1994).

use std::fmt;

use aws_lc_rs::constant_time::verify_slices_are_equal;
use aws_lc_rs::digest::{self, SHA1_FOR_LEGACY_USE_ONLY, SHA3_256, SHA256};
use md5::{Digest, Md5};

/// Shortest secret in bytes: what the RFC asks of secrets that people choose.
pub const SECRET_MIN: usize = 12;
/// Longest secret in bytes.
pub const SECRET_MAX: usize = 255;
/// Maximum length of a received challenge, in bytes.
pub const CHALLENGE_MAX: usize = 1024;
/// Length of a sent challenge, in bytes.
pub const CHALLENGE_LEN: usize = 32;

/// CHAP name and secret.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// CHAP name.
    pub name: String,
    /// CHAP secret.
    pub secret: Vec<u8>,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({}, a secret)", self.name)
    }
}

/// CHAP settings: credential of the initiator, and of the target for mutual CHAP.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chap {
    /// Credential that the initiator has to prove.
    pub initiator: Credential,
    /// Credential that the target proves if the initiator requests mutual CHAP.
    pub target: Option<Credential>,
}

/// CHAP hash algorithm, by its number in `CHAP_A`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Algorithm {
    /// MD5, number 5; supported by every initiator.
    Md5,
    /// SHA-1, number 6.
    Sha1,
    /// SHA-256, number 7.
    Sha256,
    /// SHA3-256, number 8.
    Sha3,
}

impl Algorithm {
    /// Chooses the first known algorithm of a list, which is in the initiator's order of preference.
    pub fn choose(list: &str) -> Option<Self> {
        list.split(',').find_map(|number| match number {
            "5" => Some(Algorithm::Md5),
            "6" => Some(Algorithm::Sha1),
            "7" => Some(Algorithm::Sha256),
            "8" => Some(Algorithm::Sha3),
            _ => None,
        })
    }

    /// Returns its number in `CHAP_A`.
    pub fn number(self) -> &'static str {
        match self {
            Algorithm::Md5 => "5",
            Algorithm::Sha1 => "6",
            Algorithm::Sha256 => "7",
            Algorithm::Sha3 => "8",
        }
    }

    /// Computes the response to a challenge.
    pub fn response(self, id: u8, secret: &[u8], challenge: &[u8]) -> Vec<u8> {
        let all = [&[id], secret, challenge].concat();
        match self {
            Algorithm::Md5 => Md5::digest(&all).to_vec(),
            Algorithm::Sha1 => digest::digest(&SHA1_FOR_LEGACY_USE_ONLY, &all).as_ref().to_vec(),
            Algorithm::Sha256 => digest::digest(&SHA256, &all).as_ref().to_vec(),
            Algorithm::Sha3 => digest::digest(&SHA3_256, &all).as_ref().to_vec(),
        }
    }
}

/// Challenge that was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Challenge {
    /// Hash algorithm of the response.
    pub algorithm: Algorithm,
    /// Challenge identifier (`CHAP_I`).
    pub id: u8,
    /// Challenge value (`CHAP_C`).
    pub bytes: [u8; CHALLENGE_LEN],
}

impl Challenge {
    /// Verifies a name and a response against the expected credential.
    pub fn is_met(&self, expected: &Credential, name: &str, response: &[u8]) -> bool {
        let right = self.algorithm.response(self.id, &expected.secret, &self.bytes);
        // The hash is compared in constant time, even when the name is wrong.
        let same = verify_slices_are_equal(&right, response).is_ok();
        same && name == expected.name
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_are_those_of_rfc_1994() {
        // Values as printed by md5sum and sha1sum for the byte 01 and "secretchallenge".
        let hex = |algorithm: Algorithm| super::super::text::to_hex(&algorithm.response(1, b"secret", b"challenge"));
        assert_eq!(hex(Algorithm::Md5), "0x46e47770030e2b4e26a0db72a7efec00");
        assert_eq!(Algorithm::Sha256.response(1, b"s", b"c").len(), 32);
        assert_eq!(Algorithm::Sha1.response(1, b"s", b"c").len(), 20);
    }

    #[test]
    fn only_the_right_name_and_secret_do() {
        let expected = Credential { name: "host".into(), secret: b"a long secret".to_vec() };
        for algorithm in ["5", "6", "7", "8"] {
            let algorithm = Algorithm::choose(algorithm).expect("known");
            let challenge = Challenge { algorithm, id: 7, bytes: [3; CHALLENGE_LEN] };
            let response = algorithm.response(7, b"a long secret", &challenge.bytes);
            assert!(challenge.is_met(&expected, "host", &response));
            assert!(!challenge.is_met(&expected, "other", &response));
            assert!(!challenge.is_met(&expected, "host", &response[1..]));
            assert!(!challenge.is_met(&expected, "host", &algorithm.response(7, b"another secret", &challenge.bytes)));
        }
        assert_eq!(Algorithm::choose("1,9"), None);
        assert_eq!(Algorithm::choose("9,7,5"), Some(Algorithm::Sha256));
        assert!(!format!("{expected:?}").contains("long"));
    }
}
