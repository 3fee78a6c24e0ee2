//! Key table: the keys of encrypted volumes, wrapped by the master key, in two places of every device.

use aws_lc_rs::digest::{Context, SHA256};

use super::{BLOCK, MalformedStore, Put, StoreReader, is_sealed, malformed, seal};

/// Byte offsets of the two places. The table with the higher generation counts; both are written, one after the other.
pub const KEY_PLACES: [u64; 2] = [512 << 10, 768 << 10];
/// Size of a place in bytes.
pub const KEY_TABLE_LEN: usize = 256 << 10;
/// Length of a wrapped secret, with nonce and tag.
pub const WRAPPED_LEN: usize = 60;
/// Maximum number of keys.
pub const KEYS_MAX: usize = (KEY_TABLE_LEN - FIXED) / ENTRY;

const MAGIC: &[u8; 8] = b"FBKEYTAB";
const CRC_AT: usize = 8;
const FIXED: usize = 64;
const ENTRY: usize = 88;
/// Method of wrapping: AES-256-GCM.
const METHOD: u16 = 1;

/// Key of one volume, wrapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrappedKey {
    /// Number of the key, which is never used again.
    pub number: u64,
    /// Identifier of the objects that it is for: see [`prefix_id`].
    pub prefix: [u8; 16],
    /// Nonce, wrapped secret and tag.
    pub wrapped: [u8; WRAPPED_LEN],
}

/// Keys of a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyTable {
    /// Generation, one more with each write; 0: there is no table yet.
    pub generation: u64,
    /// Number of the next key.
    pub next_number: u64,
    /// Value by which the master key is recognized.
    pub master_check: [u8; 16],
    /// Keys, their numbers ascending.
    pub keys: Vec<WrappedKey>,
}

impl KeyTable {
    /// Encodes the table of a store to the content of one place. What is behind the keys is zero, so that no earlier key is
    /// left there.
    pub fn encode(&self, store: u64) -> Vec<u8> {
        assert!(self.keys.len() <= KEYS_MAX, "more keys than a table holds");
        let mut out = Vec::with_capacity(KEY_TABLE_LEN);
        out.put(MAGIC);
        out.put_u32(0);
        out.put_u32((FIXED + ENTRY * self.keys.len()) as u32);
        out.put_u64(store);
        out.put_u64(self.generation);
        out.put_u16(METHOD);
        out.put_u16(0);
        out.put_u32(self.keys.len() as u32);
        out.put_u64(self.next_number);
        out.put(&self.master_check);
        for key in &self.keys {
            out.put_u64(key.number);
            out.put(&key.prefix);
            out.put(&key.wrapped);
            out.put_u32(0);
        }
        seal(&mut out, CRC_AT);
        out.resize(KEY_TABLE_LEN, 0);
        out
    }

    /// Decodes the table of store number `store`; `None` if there is none.
    ///
    /// # Errors
    /// Description of the damage.
    pub fn decode(bytes: &[u8], store: u64) -> Result<Option<Self>, MalformedStore> {
        let mut r = StoreReader::new(bytes, "key table");
        if r.bytes(MAGIC.len())? != MAGIC {
            return Ok(None);
        }
        let _crc = r.u32()?;
        let len = r.u32()? as usize;
        if !(FIXED..=KEY_TABLE_LEN).contains(&len) || bytes.get(..len).is_none_or(|table| !is_sealed(table, CRC_AT)) {
            return malformed("key table: wrong checksum");
        }
        // That of a store which was on the device before.
        if r.u64()? != store {
            return Ok(None);
        }
        let generation = r.u64()?;
        let (method, zero, count) = (r.u16()?, r.u16()?, r.u32()? as usize);
        if (method, zero) != (METHOD, 0) || len != FIXED + ENTRY * count || generation == 0 {
            return malformed(format!("key table: method {method}, {count} keys in {len} bytes"));
        }
        let next_number = r.u64()?;
        let master_check = r.bytes(16)?.try_into().expect("sixteen bytes");
        let keys = (0..count).map(|_| decode_key(&mut r)).collect::<Result<Vec<_>, _>>()?;
        let ascends = keys.windows(2).all(|pair| pair[0].number < pair[1].number);
        if !ascends || keys.last().is_some_and(|key| key.number >= next_number) {
            return malformed("key table: numbers out of order");
        }
        Ok(Some(Self { generation, next_number, master_check, keys }))
    }

    /// Returns whether a block looks like the beginning of the table of store number `store`.
    pub fn resembles(block: &[u8], store: u64) -> bool {
        block.starts_with(MAGIC) && block.get(16..24) == Some(&store.to_le_bytes()[..])
    }

    /// Returns a key.
    pub fn get(&self, number: u64) -> Option<&WrappedKey> {
        self.keys.iter().find(|key| key.number == number)
    }

    /// Returns the key of the objects with an identifier.
    pub fn of_prefix(&self, prefix: [u8; 16]) -> Option<&WrappedKey> {
        self.keys.iter().find(|key| key.prefix == prefix)
    }
}

fn decode_key(r: &mut StoreReader<'_>) -> Result<WrappedKey, MalformedStore> {
    let number = r.u64()?;
    let prefix = r.bytes(16)?.try_into().expect("sixteen bytes");
    let wrapped = r.bytes(WRAPPED_LEN)?.try_into().expect("as long");
    let flags = r.u32()?;
    if number == 0 || flags != 0 {
        return malformed(format!("key table: key {number} with flags {flags:#x}"));
    }
    Ok(WrappedKey { number, prefix, wrapped })
}

/// Returns the identifier of the objects whose names begin with `prefix`: the beginning of the SHA-256 of namespace, a zero
/// byte, and prefix.
pub fn prefix_id(namespace: &str, prefix: &str) -> [u8; 16] {
    let mut hash = Context::new(&SHA256);
    hash.update(namespace.as_bytes());
    hash.update(&[0]);
    hash.update(prefix.as_bytes());
    hash.finish().as_ref()[..16].try_into().expect("32 bytes")
}

const _: () = assert!(KEY_TABLE_LEN.is_multiple_of(BLOCK) && ENTRY == 28 + WRAPPED_LEN);

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) fn sample() -> KeyTable {
        let key = |number: u64| WrappedKey {
            number,
            prefix: prefix_id("", &format!("rbd_data.{number}.")),
            wrapped: [number as u8; WRAPPED_LEN],
        };
        KeyTable { generation: 7, next_number: 5, master_check: *b"0123456789abcdef", keys: vec![key(1), key(4)] }
    }

    #[test]
    fn round_trip() {
        let table = sample();
        let bytes = table.encode(77);
        assert_eq!((bytes.len(), KeyTable::decode(&bytes, 77)), (KEY_TABLE_LEN, Ok(Some(table.clone()))));
        assert_eq!(KeyTable::decode(&bytes, 78), Ok(None), "another store's");
        assert_eq!(KeyTable::decode(&vec![0; KEY_TABLE_LEN], 77), Ok(None));
        for at in 8..FIXED + 2 * ENTRY {
            let mut bad = bytes.clone();
            bad[at] ^= 1;
            assert!(KeyTable::decode(&bad, 77).is_err(), "byte {at}");
        }
        for len in 0..FIXED + 2 * ENTRY {
            assert!(KeyTable::decode(&bytes[..len], 77).is_err(), "{len} bytes");
        }
        let full = KeyTable {
            keys: (1..=KEYS_MAX as u64).map(|number| WrappedKey { number, ..table.keys[0].clone() }).collect(),
            next_number: KEYS_MAX as u64 + 1,
            ..table
        };
        assert_eq!(KeyTable::decode(&full.encode(1), 1), Ok(Some(full)));
    }
}
