//! Secrets of hosts and controllers, in the format of `nvme gen-dhchap-key`.

use std::fmt;

use aws_lc_rs::{digest, hmac};
use forebay_accel::crypto::base64;
use zeroize::Zeroizing;

/// Prefix of the text of a secret.
const PREFIX: &str = "DHHC-1:";
/// String hashed after the NQN when a secret is transformed (base 8.13.5.7).
const PURPOSE: &[u8] = b"NVMe-over-Fabrics";

/// Hash function of DH-HMAC-CHAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum DhChapHash {
    /// SHA-256 hash.
    Sha256 = 1,
    /// SHA-384 hash.
    Sha384 = 2,
    /// SHA-512 hash.
    Sha512 = 3,
}

impl DhChapHash {
    /// Supported hashes, the shortest first.
    pub const ALL: [DhChapHash; 3] = [DhChapHash::Sha256, DhChapHash::Sha384, DhChapHash::Sha512];

    /// Returns the hash with an identifier in messages; `None` if it is unknown.
    pub fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|hash| *hash as u8 == number)
    }

    /// Returns the name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            DhChapHash::Sha256 => "sha256",
            DhChapHash::Sha384 => "sha384",
            DhChapHash::Sha512 => "sha512",
        }
    }

    /// Returns the digest length in bytes.
    pub fn len(self) -> usize {
        self.algorithm().output_len()
    }

    /// Returns false.
    pub fn is_empty(self) -> bool {
        false
    }

    fn algorithm(self) -> &'static digest::Algorithm {
        match self {
            DhChapHash::Sha256 => &digest::SHA256,
            DhChapHash::Sha384 => &digest::SHA384,
            DhChapHash::Sha512 => &digest::SHA512,
        }
    }

    /// Computes the hash of some bytes.
    pub fn digest(self, bytes: &[u8]) -> Zeroizing<Vec<u8>> {
        Zeroizing::new(digest::digest(self.algorithm(), bytes).as_ref().to_vec())
    }

    /// Computes the HMAC of the concatenated parts.
    pub fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Zeroizing<Vec<u8>> {
        let algorithm = match self {
            DhChapHash::Sha256 => hmac::HMAC_SHA256,
            DhChapHash::Sha384 => hmac::HMAC_SHA384,
            DhChapHash::Sha512 => hmac::HMAC_SHA512,
        };
        let mut context = hmac::Context::with_key(&hmac::Key::new(algorithm, key));
        parts.iter().for_each(|part| context.update(part));
        Zeroizing::new(context.sign().as_ref().to_vec())
    }
}

/// Error in the text of a secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SecretError {
    /// Not in the expected format.
    #[error("it does not have the form DHHC-1:00:...:, as 'nvme gen-dhchap-key' makes it")]
    Form,
    /// Length other than 32, 48 or 64 bytes.
    #[error("the secret has {0} bytes; it must have 32, 48 or 64")]
    Length(usize),
    /// Checksum mismatch.
    #[error("checksum mismatch: a character is wrong")]
    Checksum,
}

/// DH-HMAC-CHAP secret.  Erased when dropped, and not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct DhChapSecret {
    /// Hash of the key transformation; `None` if the key is used as it is.
    transform: Option<DhChapHash>,
    key: Zeroizing<Vec<u8>>,
}

impl DhChapSecret {
    /// Parses the text of a secret: `DHHC-1:`, the transformation, and base64 of the key and its CRC-32.
    ///
    /// # Errors
    /// The [`SecretError`] in the text.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let rest = text.trim().strip_prefix(PREFIX).ok_or(SecretError::Form)?;
        let (transform, base64) = rest.split_once(':').ok_or(SecretError::Form)?;
        let transform = match transform {
            "00" => None,
            "01" => Some(DhChapHash::Sha256),
            "02" => Some(DhChapHash::Sha384),
            "03" => Some(DhChapHash::Sha512),
            _ => return Err(SecretError::Form),
        };
        let base64 = base64.strip_suffix(':').unwrap_or(base64);
        let bytes = Zeroizing::new(base64::decode(base64).ok_or(SecretError::Form)?);
        let (key, checksum) = bytes.split_last_chunk::<4>().ok_or(SecretError::Form)?;
        if ![32, 48, 64].contains(&key.len()) {
            return Err(SecretError::Length(key.len()));
        }
        if crc32(key).to_le_bytes() != *checksum {
            return Err(SecretError::Checksum);
        }
        Ok(Self { transform, key: Zeroizing::new(key.to_vec()) })
    }

    /// Returns the transformed key, with which the owner of `nqn` computes its responses.
    pub fn key_of(&self, nqn: &str) -> Zeroizing<Vec<u8>> {
        match self.transform {
            None => self.key.clone(),
            Some(hash) => hash.hmac(&self.key, &[nqn.as_bytes(), PURPOSE]),
        }
    }
}

impl fmt::Debug for DhChapSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DhChapSecret({} bytes)", self.key.len())
    }
}

/// Computes the CRC-32 of Ethernet, bit by bit.  Speed does not matter for a line of a configuration.
pub(super) fn crc32(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0_u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| (crc >> 1) ^ if crc & 1 != 0 { 0xEDB8_8320 } else { 0 })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Secrets made by nvme-cli 2.3: `nvme gen-dhchap-key --hmac=H`.
    const MADE: &[(&str, usize)] = &[
        ("DHHC-1:00:IwtNfQh/g40PNAxa3nbIYCHkRcC/ZQqHegC7NP5ynMfj9HeR:", 32),
        ("DHHC-1:01:lyZICQpw10TSDU2/vycqpoDznmOxABOZzH0YZzSUXsTrP13F:", 32),
        ("DHHC-1:02:UjUpCd6Kzjx6TIqb1h53dLKJaadT3ZUDIf1uqk5N0ct2DhapRv9nBlWeWG36etP9TTSiRQ==:", 48),
        ("DHHC-1:03:umVDTD5dCS5LxnUhjx5Q04v6H7sZN+lFx37NPog0qEowMxq35V8trQcD8HxyTMafEjGjzqUm8fTyEu/2qhiPbT8emyQ=:", 64),
    ];

    #[test]
    fn secrets_of_nvme_cli_are_read() {
        for (text, len) in MADE {
            let secret = DhChapSecret::parse(text).expect(text);
            assert_eq!(secret.key.len(), *len, "{text}");
            assert!(!format!("{secret:?}").contains(&text[10..20]));
        }
    }

    #[test]
    fn the_transformation_is_that_of_nvme_cli() {
        // nvme-cli prints the transformed key, here of the bytes 00 to 1F and an NQN.
        let after =
            DhChapSecret::parse("DHHC-1:01:FhXoXPF+ovGxR4N4qNveH5uIlAXP+Z95qQ3v1D/lb+OvFjzD:").expect("a secret");
        let before = DhChapSecret { transform: Some(DhChapHash::Sha256), key: Zeroizing::new((0..32).collect()) };
        assert_eq!(before.key_of("nqn.2014-08.org.example:h"), after.key);
        let plain = DhChapSecret { transform: None, ..before };
        assert_eq!(plain.key_of("nqn.2014-08.org.example:h"), plain.key);
    }

    #[test]
    fn what_is_no_secret_is_named() {
        let good = MADE[0].0;
        for (text, why) in [
            ("", SecretError::Form),
            ("DHHC-1", SecretError::Form),
            ("DHHC-1:04:AAAA:", SecretError::Form),
            ("DHHC-1:00:AAAAAAAA:", SecretError::Length(2)),
            ("DHHC-1:00:AA", SecretError::Form),
            (&good.replacen("DHHC-1:00:", "DHHC-1:00:!", 1), SecretError::Form),
        ] {
            assert_eq!(DhChapSecret::parse(text).expect_err(text), why, "{text}");
        }
        let at = good.len() - 20;
        let other = if good.as_bytes()[at] == b'A' { "B" } else { "A" };
        let mut damaged = good.to_owned();
        damaged.replace_range(at..=at, other);
        assert_eq!(DhChapSecret::parse(&damaged), Err(SecretError::Checksum));
    }
}
