//! Cipher of secure mode: AES-128-GCM with counter nonces, one key per connection and one nonce sequence per direction.
//!
//! The counter authenticates the order: a frame that is replayed, left out or reordered fails to decrypt.  The cipher
//! is implemented in `forebay_accel`.

use forebay_accel::crypto::Gcm;

use super::WireError;
use super::frame::TAG_LEN;

/// Length of the cipher key in bytes.
pub const KEY_LEN: usize = 16;
/// Length of a nonce in bytes: a fixed part of 4, and a counter of 8.
pub const NONCE_LEN: usize = 12;
/// Length of the connection secret for secure mode in bytes: a key, and a nonce for each direction.
pub const SECRET_LEN: usize = KEY_LEN + 2 * NONCE_LEN;

/// Connection secret that is too short for secure mode; its length in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("connection secret of {0} bytes is too short for secure mode")]
pub struct SecretTooShort(pub usize);

fn cipher(key: &[u8; KEY_LEN]) -> Gcm {
    Gcm::new(key).expect("a key of a length that the cipher takes")
}

/// One direction of a connection in secure mode.
pub struct Direction {
    cipher: Gcm,
    fixed: [u8; 4],
    counter: u64,
    first: u64,
    used: bool,
}

impl Direction {
    /// Creates a direction with its first nonce.
    pub fn new(cipher: Gcm, nonce: [u8; NONCE_LEN]) -> Self {
        let (fixed, counter) = nonce.split_at(4);
        let counter = u64::from_le_bytes(counter.try_into().expect("8 bytes"));
        Self { cipher, fixed: fixed.try_into().expect("4 bytes"), counter, first: counter, used: false }
    }

    /// Creates both directions of a connection, `(receive, send)`, for its client or its server.
    pub fn pair(secret: &[u8], client: bool) -> Result<(Self, Self), SecretTooShort> {
        let secret = secret.first_chunk::<SECRET_LEN>().ok_or(SecretTooShort(secret.len()))?;
        let (key, nonces) = secret.split_first_chunk::<KEY_LEN>().expect("a key");
        let (to_client, rest) = nonces.split_first_chunk::<NONCE_LEN>().expect("a nonce");
        let to_server = rest.first_chunk::<NONCE_LEN>().expect("a nonce");
        let (receive, send) = if client { (to_client, to_server) } else { (to_server, to_client) };
        let direction = |nonce: &[u8; NONCE_LEN]| Self::new(cipher(key), *nonce);
        Ok((direction(receive), direction(send)))
    }

    fn next_nonce(&mut self) -> Result<[u8; NONCE_LEN], WireError> {
        // A wrap-around would reuse a nonce, which reveals the key.
        if self.used && self.counter == self.first {
            return Err(WireError::NonceUsedUp);
        }
        self.used = true;
        let mut nonce = [0; NONCE_LEN];
        nonce[..4].copy_from_slice(&self.fixed);
        nonce[4..].copy_from_slice(&self.counter.to_le_bytes());
        self.counter = self.counter.wrapping_add(1);
        Ok(nonce)
    }

    /// Encrypts all of `data` but its last 16 bytes, which become the tag.
    pub fn seal(&mut self, data: &mut [u8]) -> Result<(), WireError> {
        let nonce = self.next_nonce()?;
        let (text, tag) = data.split_last_chunk_mut::<TAG_LEN>().expect("room for the tag");
        *tag = self.cipher.seal(&nonce, &[], text);
        Ok(())
    }

    /// Decrypts all of `data` but its last 16 bytes, which are the tag.
    pub fn open(&mut self, data: &mut [u8]) -> Result<(), WireError> {
        let nonce = self.next_nonce()?;
        let (text, tag) = data.split_last_chunk_mut::<TAG_LEN>().ok_or(WireError::BadTag)?;
        self.cipher.open(&nonce, &[], text, tag).map_err(|_| WireError::BadTag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cipher_is_aes_128_gcm() {
        // Test cases 1 and 2 of McGrew and Viega, "The Galois/Counter Mode of Operation", appendix B.
        let cipher = cipher(&[0; 16]);
        let empty = cipher.seal(&[0; 12], &[], &mut []);
        assert_eq!(empty[..8], [0x58, 0xe2, 0xfc, 0xce, 0xfa, 0x7e, 0x30, 0x61]);
        let mut block = [0; 16];
        let tag = cipher.seal(&[0; 12], &[], &mut block);
        assert_eq!(block[..4], [0x03, 0x88, 0xda, 0xce]);
        assert_eq!(tag[..4], [0xab, 0x6e, 0x47, 0xd4]);
    }

    #[test]
    fn what_is_replayed_reordered_or_changed_does_not_open() {
        let secret: Vec<u8> = (0..40).collect();
        let (_, mut send) = Direction::pair(&secret, true).expect("long enough");
        let mut sealed = Vec::new();
        for at in 0..3u8 {
            let mut data = vec![at; 20 + TAG_LEN];
            send.seal(&mut data).expect("sealed");
            sealed.push(data);
        }
        let receiver = || Direction::pair(&secret, false).expect("long enough").0;
        let mut receive = receiver();
        for (at, data) in sealed.iter().enumerate() {
            let mut data = data.clone();
            receive.open(&mut data).expect("opened");
            assert_eq!(data[..20], [at as u8; 20]);
        }
        assert_eq!(receive.open(&mut sealed[2].clone()), Err(WireError::BadTag), "replayed");
        assert_eq!(receiver().open(&mut sealed[1].clone()), Err(WireError::BadTag), "one was left out");
        for at in 0..sealed[0].len() {
            let mut data = sealed[0].clone();
            data[at] ^= 0x10;
            assert_eq!(receiver().open(&mut data), Err(WireError::BadTag), "byte {at} changed");
        }
        assert_eq!(receiver().open(&mut [0; 15]), Err(WireError::BadTag), "shorter than a tag");
    }

    #[test]
    fn a_nonce_is_never_used_twice() {
        let mut direction = Direction::new(cipher(&[7; 16]), [0xff; 12]);
        assert_eq!(direction.next_nonce().map(|nonce| nonce[4..].to_vec()), Ok(vec![0xff; 8]));
        assert_eq!(direction.next_nonce().map(|nonce| nonce[4..].to_vec()), Ok(vec![0; 8]));
        direction.counter = direction.first;
        assert_eq!(direction.next_nonce(), Err(WireError::NonceUsedUp));
    }

    #[test]
    fn short_secrets_are_refused() {
        assert!(matches!(Direction::pair(&[0; 39], true), Err(SecretTooShort(39))));
    }
}
