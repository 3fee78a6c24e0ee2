//! Key-value maps of objects, and markers of keys whose values were lost.
//!
//! A long value is stored in the payload of a batch until a checkpoint writes it to the tree.  If it is damaged there
//! although the log records that it was durable, replay cannot restore it, and must not treat the key as never set. The
//! tree then gets a marker instead of the value, and reading the key fails until it is set or removed.

use forebay_block::{Error, ErrorKind, Result};

use crate::index::MetadataIndex;
use crate::keys;

/// Keys looked up at a time.
const KV_PAGE: usize = 512;

fn lost(oid: u64, key: &[u8]) -> Error {
    let key = String::from_utf8_lossy(key);
    Error::new(ErrorKind::Corrupt, format!("the value of key {key:?} of object {oid} was damaged in the log"))
}

impl MetadataIndex {
    /// Returns the value of a key of an object's head or clone.
    pub async fn kv(&self, oid: u64, of: u64, key: &[u8]) -> Result<Option<Vec<u8>>> {
        let value = self.lookup(&keys::kv(oid, of, key)).await?;
        if value.is_none() && self.has_lost_keys() && self.lookup(&keys::kv_lost(oid, of, key)).await?.is_some() {
            return Err(lost(oid, key));
        }
        Ok(value)
    }

    /// Returns an error if the value of a key in `from..to`, as encoded by [`keys::kv`], is lost.
    pub async fn check_none_lost(&self, from: &[u8], to: &[u8]) -> Result<()> {
        if !self.has_lost_keys() || from >= to {
            return Ok(());
        }
        let [mut from, mut to] = [from.to_vec(), to.to_vec()];
        (from[0], to[0]) = (b'x', b'x');
        let found = self.lookup_range(&from, &to, 1).await?;
        let prefix = keys::kv(0, 0, &[]).len();
        found.first().map_or(Ok(()), |(key, _)| {
            let oid = key.get(1..9).map_or(0, |bytes| u64::from_be_bytes(bytes.try_into().expect("8 bytes")));
            Err(lost(oid, key.get(prefix..).unwrap_or_default()))
        })
    }

    /// Returns all keys and values of an object's head or clone.
    pub async fn all_kv(&self, oid: u64, of: u64) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let prefix = keys::kv(oid, of, &[]);
        self.check_none_lost(&prefix, &keys::after(&prefix)).await?;
        self.pairs_of(prefix).await
    }

    /// Returns all keys of an object's head or clone, including those whose values are lost.
    pub async fn all_keys(&self, oid: u64, of: u64) -> Result<Vec<Vec<u8>>> {
        let mut found = self.pairs_of(keys::kv(oid, of, &[])).await?;
        if self.has_lost_keys() {
            found.extend(self.pairs_of(keys::kv_lost(oid, of, &[])).await?);
        }
        Ok(found.into_iter().map(|(key, _)| key).collect())
    }

    /// Returns all pairs whose keys begin with `prefix`, with the prefix removed.
    async fn pairs_of(&self, prefix: Vec<u8>) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let (mut from, to) = (prefix.clone(), keys::after(&prefix));
        let mut out = Vec::new();
        loop {
            let page = self.lookup_range(&from, &to, KV_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(out) };
            from.clone_from(last);
            from.push(0);
            out.extend(page.into_iter().map(|(key, value)| (key[prefix.len()..].to_vec(), value)));
        }
    }

    /// Sets a key, or removes it.
    pub fn put_kv(&self, oid: u64, of: u64, key: &[u8], value: Option<Vec<u8>>) {
        self.put(keys::kv(oid, of, key), value);
        if self.has_lost_keys() {
            self.put(keys::kv_lost(oid, of, key), None);
        }
    }

    /// Records that a key was set but its value is lost.
    pub fn put_lost(&self, oid: u64, of: u64, key: &[u8]) {
        self.note_lost_keys();
        self.put(keys::kv(oid, of, key), None);
        self.put(keys::kv_lost(oid, of, key), Some(Vec::new()));
    }

    /// Detects whether there are keys whose values are lost; if that cannot be determined, assumes so.
    pub async fn look_for_lost_keys(&self) {
        let found = self.lookup_range(b"x", &keys::after(b"x"), 1).await;
        if !matches!(found, Ok(found) if found.is_empty()) {
            self.note_lost_keys();
        }
    }
}
