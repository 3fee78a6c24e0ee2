//! Key for stored data.

use std::fmt;

use zeroize::Zeroize;

/// Length of a key in bytes: two keys of 256 bits, as AES-256-XTS takes.
pub const DATA_KEY_LEN: usize = 64;

/// Key for the data of one volume in one place, such as its write log.
///
/// Its bytes are in one allocation, which is erased when the key is dropped; moving a key does not copy them. `Debug`
/// does not print them.
#[derive(Clone)]
pub struct DataKey(Box<[u8; DATA_KEY_LEN]>);

impl DataKey {
    /// Returns a key of these bytes. Does not erase the caller's copy.
    pub fn from_bytes(bytes: &[u8; DATA_KEY_LEN]) -> Self {
        let mut key = Box::new([0; DATA_KEY_LEN]);
        key.copy_from_slice(bytes);
        Self(key)
    }

    /// Returns the bytes.
    pub fn bytes(&self) -> &[u8; DATA_KEY_LEN] {
        &self.0
    }
}

impl Drop for DataKey {
    fn drop(&mut self) {
        self.0.zeroize();
    }
}

impl fmt::Debug for DataKey {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("DataKey(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_has_the_bytes_that_it_was_made_of_and_does_not_show_them() {
        let bytes = std::array::from_fn(|at| at as u8 ^ 0x5a);
        let key = DataKey::from_bytes(&bytes);
        assert_eq!(key.bytes(), &bytes);
        assert_eq!(key.clone().bytes(), &bytes);
        assert_eq!(format!("{key:?}"), "DataKey(hidden)");
    }
}
