//! Master key: what wraps the keys of volumes, and is never stored.

use std::fmt;

use aws_lc_rs::hkdf::{HKDF_SHA256, KeyType, Salt};
use forebay_accel::crypto::{Gcm, NONCE_LEN, TAG_LEN};
use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::random;
use zeroize::{Zeroize, Zeroizing};

use crate::format::key_table::WRAPPED_LEN;

/// Length of a secret in bytes: of the master key, and of the secret of a volume.
pub const SECRET_LEN: usize = 32;

/// Master key of a store: 32 bytes, erased when it is dropped.
#[derive(Clone)]
pub struct MasterKey(Zeroizing<[u8; SECRET_LEN]>);

/// Text that is no master key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a master key has 32 bytes: as they are, or as 64 hexadecimal digits")]
pub struct MasterKeyError;

impl MasterKey {
    /// Returns the key with these bytes.
    pub fn from_bytes(mut bytes: [u8; SECRET_LEN]) -> Self {
        let key = Self(Zeroizing::new(bytes));
        bytes.zeroize();
        key
    }

    /// Parses a key: 32 bytes, or 64 hexadecimal digits with white space around them.
    ///
    /// # Errors
    /// When it is neither.
    pub fn parse(content: &[u8]) -> std::result::Result<Self, MasterKeyError> {
        if let Ok(bytes) = <[u8; SECRET_LEN]>::try_from(content) {
            return Ok(Self::from_bytes(bytes));
        }
        let digits = content.trim_ascii();
        if digits.len() != 2 * SECRET_LEN {
            return Err(MasterKeyError);
        }
        let mut bytes = Zeroizing::new([0; SECRET_LEN]);
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |at: usize| char::from(pair[at]).to_digit(16).ok_or(MasterKeyError);
            *byte = (digit(0)? << 4 | digit(1)?) as u8;
        }
        Ok(Self(bytes))
    }

    /// Returns the wrapper of the keys of the store with this UUID.
    pub(super) fn wrapper(&self, store: &[u8; 16]) -> KeyWrapper {
        let mut key = Zeroizing::new([0; 32]);
        derive(store, &self.0[..], b"forebay wrap", &mut key[..]);
        let mut check = [0; 16];
        derive(store, &self.0[..], b"forebay check", &mut check);
        KeyWrapper { gcm: Gcm::new(&key[..]).expect("32 bytes"), check }
    }
}

impl fmt::Debug for MasterKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("MasterKey(hidden)")
    }
}

/// Wrapper of the secrets of volumes: AES-256-GCM under a key derived from the master key and the store.
pub(super) struct KeyWrapper {
    gcm: Gcm,
    /// Value by which the master key is recognized.
    pub check: [u8; 16],
}

impl KeyWrapper {
    /// Wraps the secret of key `number` with a random nonce.
    pub fn wrap(&self, store: u64, number: u64, secret: &[u8; SECRET_LEN]) -> [u8; WRAPPED_LEN] {
        let random = random_bytes::<16>();
        let nonce: [u8; NONCE_LEN] = random[..NONCE_LEN].try_into().expect("shorter");
        let mut out = [0; WRAPPED_LEN];
        out[..NONCE_LEN].copy_from_slice(&nonce);
        out[NONCE_LEN..][..SECRET_LEN].copy_from_slice(secret);
        let tag = self.gcm.seal(&nonce, &beside(store, number), &mut out[NONCE_LEN..][..SECRET_LEN]);
        out[NONCE_LEN + SECRET_LEN..].copy_from_slice(&tag);
        out
    }

    /// Unwraps the secret of key `number`.
    ///
    /// # Errors
    /// `Corrupt` if it was wrapped otherwise, or is damaged.
    pub fn unwrap(&self, store: u64, number: u64, wrapped: &[u8; WRAPPED_LEN]) -> Result<Zeroizing<[u8; SECRET_LEN]>> {
        let nonce: &[u8; NONCE_LEN] = wrapped[..NONCE_LEN].try_into().expect("as long");
        let tag: &[u8; TAG_LEN] = wrapped[NONCE_LEN + SECRET_LEN..].try_into().expect("as long");
        let mut secret = Zeroizing::new([0; SECRET_LEN]);
        secret.copy_from_slice(&wrapped[NONCE_LEN..][..SECRET_LEN]);
        let opened = self.gcm.open(nonce, &beside(store, number), &mut secret[..], tag);
        let damaged = |_| Error::new(ErrorKind::Corrupt, format!("key {number} of the store cannot be unwrapped"));
        opened.map(|()| secret).map_err(damaged)
    }
}

/// Returns the data that a wrapped key is bound to.
fn beside(store: u64, number: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..8].copy_from_slice(&store.to_le_bytes());
    out[8..].copy_from_slice(&number.to_le_bytes());
    out
}

/// Returns random bytes, from the system or from the simulation's seed.
pub(super) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut out = [0; N];
    out.chunks_mut(8).for_each(|chunk| chunk.copy_from_slice(&random().to_le_bytes()[..chunk.len()]));
    out
}

/// Length of derived bytes.
struct Bytes(usize);

impl KeyType for Bytes {
    fn len(&self) -> usize {
        self.0
    }
}

/// Derives bytes from a secret by HKDF with SHA-256 (RFC 5869).
pub(super) fn derive(salt: &[u8], secret: &[u8], label: &[u8], out: &mut [u8]) {
    let extracted = Salt::new(HKDF_SHA256, salt).extract(secret);
    let info = [label];
    let expanded = extracted.expand(&info, Bytes(out.len())).expect("a short output");
    expanded.fill(out).expect("as long as was asked for");
}

#[cfg(test)]
mod tests {
    use forebay_sim::{Faults, World};

    use super::*;

    #[test]
    fn keys_are_parsed_as_bytes_or_digits_and_not_shown() {
        let digits = "00112233445566778899aabbccddeeff".repeat(2);
        let key = MasterKey::parse(format!(" {digits}\n").as_bytes()).expect("digits");
        assert_eq!(key.0[..3], [0x00, 0x11, 0x22]);
        let same = MasterKey::parse(&key.0[..]).expect("bytes");
        assert_eq!(*same.0, *key.0);
        for bad in ["", "0011", &digits[1..], &format!("{}zz", &digits[2..]), &format!("{digits}00")] {
            assert_eq!(MasterKey::parse(bad.as_bytes()).err(), Some(MasterKeyError), "{bad}");
        }
        assert_eq!(format!("{key:?}"), "MasterKey(hidden)");
    }

    #[test]
    fn a_wrapped_key_is_bound_to_master_store_and_number() {
        let world = World::new(1, Faults::default());
        let done = world.run(&world.reactor(), async {
            let master = MasterKey::from_bytes([3; SECRET_LEN]);
            let wrapper = master.wrapper(&[1; 16]);
            let wrapped = wrapper.wrap(5, 9, &[42; SECRET_LEN]);
            assert_eq!(wrapper.unwrap(5, 9, &wrapped).map(|secret| *secret).ok(), Some([42; SECRET_LEN]));
            assert_ne!(wrapper.wrap(5, 9, &[42; SECRET_LEN]), wrapped, "each with a nonce of its own");
            assert!(!wrapped.windows(4).any(|part| part == [42; 4]));
            let others = [
                (MasterKey::from_bytes([4; SECRET_LEN]).wrapper(&[1; 16]), 5, 9),
                (master.wrapper(&[2; 16]), 5, 9),
                (master.wrapper(&[1; 16]), 6, 9),
                (master.wrapper(&[1; 16]), 5, 8),
            ];
            for (other, store, number) in others {
                assert_eq!(other.unwrap(store, number, &wrapped).err().map(|e| e.kind()), Some(ErrorKind::Corrupt));
            }
        });
        assert!(done.is_ok());
    }
}
