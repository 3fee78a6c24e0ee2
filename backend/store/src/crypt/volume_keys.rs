//! Keys of encrypted volumes: the key table on the device, and the ciphers in memory.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use forebay_block::{Buf, DataKey, Error, ErrorKind, ObjectName, Result};
use forebay_reactor::sync::Semaphore;
use zeroize::Zeroizing;

use super::cipher::BlockCipher;
use super::master::{KeyWrapper, MasterKey, SECRET_LEN, derive, random_bytes};
use crate::core::{Core, corrupt};
use crate::format::BLOCK;
use crate::format::key_table::{KEY_PLACES, KEY_TABLE_LEN, KEYS_MAX, KeyTable, WrappedKey, prefix_id};
use crate::format::superblock::{FEATURE_ENCRYPTION, StoreSuperblock};
use crate::keys;
use crate::object::StoreObject;

/// State of the keys of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KeyStatus {
    /// Number of encrypted volumes.
    pub keys: usize,
    /// Value by which the master key is recognized; `None` if there is no key yet.
    pub master: Option<[u8; 16]>,
    /// Set if the store has keys and was opened without the master key: encrypted data can be neither read nor written.
    pub locked: bool,
}

/// Keys of a store, in memory.
///
/// # Invariants
/// 1. A key is durable in both places of every device that is used before anything is encrypted with it.
/// 2. A key that was destroyed is in none of them.
pub struct VolumeKeys {
    store: u64,
    uuid: [u8; 16],
    table: RefCell<KeyTable>,
    wrapper: RefCell<Option<KeyWrapper>>,
    ciphers: RefCell<HashMap<u64, Rc<BlockCipher>>>,
    /// Permit to change the table.
    changing: Semaphore,
}

impl VolumeKeys {
    /// Returns the keys of a store before they are loaded: none.
    pub fn new(superblock: &StoreSuperblock) -> Self {
        Self {
            store: superblock.store_number(),
            uuid: superblock.uuid,
            table: RefCell::default(),
            wrapper: RefCell::default(),
            ciphers: RefCell::default(),
            changing: Semaphore::new(1),
        }
    }

    /// Returns the state of the keys.
    pub fn status(&self) -> KeyStatus {
        let table = self.table.borrow();
        let keys = table.keys.len();
        KeyStatus {
            keys,
            master: (table.generation > 0).then_some(table.master_check),
            locked: keys > 0 && self.wrapper.borrow().is_none(),
        }
    }

    /// Returns the number of the key of new objects with this name; 0 if they are not encrypted.
    pub fn number_for(&self, object: &ObjectName) -> u64 {
        let table = self.table.borrow();
        if table.keys.is_empty() {
            return 0;
        }
        let name = object.name();
        let prefix = name.rfind('.').map(|dot| prefix_id(object.namespace(), &name[..=dot]));
        prefix.and_then(|prefix| table.of_prefix(prefix)).map_or(0, |key| key.number)
    }

    fn of_prefix(&self, prefix: &ObjectName) -> Option<u64> {
        let id = prefix_id(prefix.namespace(), prefix.name());
        self.table.borrow().of_prefix(id).map(|key| key.number)
    }

    /// Returns whether objects whose names begin with `prefix` are encrypted.
    pub fn has(&self, prefix: &ObjectName) -> bool {
        self.of_prefix(prefix).is_some()
    }

    /// Returns whether a key was destroyed.
    fn is_destroyed(&self, number: u64) -> bool {
        let table = self.table.borrow();
        number < table.next_number && table.get(number).is_none()
    }

    fn secret(&self, number: u64) -> Result<Zeroizing<[u8; SECRET_LEN]>> {
        let table = self.table.borrow();
        let key = table.get(number).ok_or_else(|| match self.is_destroyed(number) {
            true => Error::new(ErrorKind::Denied, format!("key {number} of the store was destroyed with its volume")),
            false => corrupt(format!("key {number} is not in the store's key table")),
        })?;
        let wrapper = self.wrapper.borrow();
        let wrapper = wrapper.as_ref().ok_or_else(locked)?;
        wrapper.unwrap(self.store, number, &key.wrapped)
    }

    /// Returns the cipher of a key; `None` for key 0, which means that data is not encrypted.
    ///
    /// # Errors
    /// `Denied` if the key was destroyed, or the store was opened without its master key; `Corrupt` if the key is damaged.
    pub fn cipher(&self, number: u64) -> Result<Option<Rc<BlockCipher>>> {
        if number == 0 {
            return Ok(None);
        }
        if let Some(cipher) = self.ciphers.borrow().get(&number) {
            return Ok(Some(cipher.clone()));
        }
        let cipher = Rc::new(BlockCipher::new(&*self.secret(number)?));
        self.ciphers.borrow_mut().insert(number, cipher.clone());
        Ok(Some(cipher))
    }
}

fn locked() -> Error {
    let text = "the data is encrypted, and the store was opened without its master key (`--master-key`)";
    Error::new(ErrorKind::Denied, text)
}

/// Returns the first eight digits of a check value, for people.
fn shown(check: [u8; 16]) -> String {
    check[..4].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Copies of the key table in one place.
struct Copies {
    /// Number of devices.
    devices: usize,
    /// Tables that can be read.
    tables: Vec<KeyTable>,
    /// Number of devices that can be read and have none.
    none: usize,
}

impl Copies {
    /// Returns the number of copies that are damaged or cannot be read.
    fn unreadable(&self) -> usize {
        self.devices - self.tables.len() - self.none
    }
}

/// Returns the newest table; `None` if the store has no key yet, also if some copies cannot be read: a key is on every
/// device that is used before anything is encrypted with it, and at most `parity` of them may be wrong.
///
/// # Errors
/// Number of copies that cannot be read, if a table with keys may be among them.
fn newest_table(places: &[Copies; 2], parity: usize) -> std::result::Result<Option<KeyTable>, usize> {
    let tables = places.iter().flat_map(|copies| &copies.tables);
    if let Some(newest) = tables.max_by_key(|table| table.generation) {
        return Ok(Some(newest.clone()));
    }
    let unreadable: usize = places.iter().map(Copies::unreadable).sum();
    match unreadable == 0 || places.iter().all(|copies| copies.none > parity) {
        true => Ok(None),
        false => Err(unreadable),
    }
}

impl Core {
    /// Returns the cipher of an object's data; `None` if it is not encrypted.
    ///
    /// # Errors
    /// See [`VolumeKeys::cipher`].
    pub fn cipher_of(&self, object: &StoreObject) -> Result<Option<Rc<BlockCipher>>> {
        self.volume_keys.cipher(object.key)
    }

    /// Returns the cipher for moving an object's data; `None` also if the key was destroyed, so that nobody can read it
    /// again and it may be moved as it is.
    pub fn cipher_to_move(&self, object: &StoreObject) -> Result<Option<Rc<BlockCipher>>> {
        if object.key != 0 && self.volume_keys.is_destroyed(object.key) {
            return Ok(None);
        }
        self.cipher_of(object)
    }

    /// Loads the keys, and verifies that `master` is their master key. Damaged or missing copies are written again.
    ///
    /// # Errors
    /// `Denied` if `master` is another key, or none while there are keys, unless `without`; `Corrupt` if no copy is whole.
    pub async fn load_keys(&self, master: Option<&MasterKey>, without: bool) -> Result<()> {
        let keys = &self.volume_keys;
        let name = self.media.device.name();
        let mut outdated = false;
        if self.has_key_table().await {
            let places = self.read_all_keys().await;
            let parity = self.media.device.columns().map_or(0, |set| set.parity_columns());
            match newest_table(&places, parity) {
                Ok(Some(table)) => *keys.table.borrow_mut() = table,
                // A crash came before the first key.
                Ok(None) => {}
                Err(unreadable) => {
                    return Err(corrupt(format!(
                        "{name}: no copy of the key table can be read ({unreadable} are damaged or fail); without one, \
                         encrypted data is lost"
                    )));
                }
            }
            outdated = !self.read_only && !keys.are_copied(&places);
        }
        let table = keys.table.borrow().clone();
        match master {
            Some(master) => {
                let wrapper = master.wrapper(&keys.uuid);
                if !table.keys.is_empty() && wrapper.check != table.master_check {
                    let (is, should) = (shown(wrapper.check), shown(table.master_check));
                    let text = format!(
                        "{name}: wrong master key: its keys are wrapped by the one that shows as {should}, and this one shows as {is}"
                    );
                    return Err(Error::new(ErrorKind::Denied, text));
                }
                *keys.wrapper.borrow_mut() = Some(wrapper);
            }
            None if !table.keys.is_empty() && !without && !self.read_only => {
                let text = format!(
                    "{name} has {} encrypted volumes, and no master key was given: name it with `--master-key`, or open the \
                     store with `--without-master-key`, so that they can be neither read nor written",
                    table.keys.len()
                );
                return Err(Error::new(ErrorKind::Denied, text));
            }
            None => {}
        }
        // Only now: an opening that is refused writes nothing.
        if outdated {
            tracing::warn!("{name}: copies of the key table are damaged or missing; they are written again");
            self.write_keys(table).await?;
        }
        Ok(())
    }

    /// Returns whether the store may have keys. A superblock that was rebuilt from an older record does not say so.
    async fn has_key_table(&self) -> bool {
        if self.superblock.features & FEATURE_ENCRYPTION != 0 {
            return true;
        }
        for place in KEY_PLACES {
            let copies = self.media.device.read_copies(place, BLOCK).await;
            if copies.iter().flatten().any(|bytes| KeyTable::resembles(bytes, self.volume_keys.store)) {
                self.features.note_encryption();
                return true;
            }
        }
        false
    }

    async fn read_all_keys(&self) -> [Copies; 2] {
        let [first, second] = KEY_PLACES;
        [self.read_keys(first).await, self.read_keys(second).await]
    }

    async fn read_keys(&self, place: u64) -> Copies {
        let read = self.media.device.read_copies(place, KEY_TABLE_LEN).await;
        let mut copies = Copies { devices: read.len(), tables: Vec::new(), none: 0 };
        for copy in read {
            match copy.ok().map(|bytes| KeyTable::decode(&bytes, self.volume_keys.store)) {
                Some(Ok(Some(table))) => copies.tables.push(table),
                // One device may have none while others have one.
                Some(Ok(None)) => copies.none += 1,
                Some(Err(_)) | None => {}
            }
        }
        copies
    }

    /// Writes a table to both places of every device that is used, durably, one place after the other. The caller holds
    /// the permit, or is the only one.
    async fn write_keys(&self, mut table: KeyTable) -> Result<()> {
        table.generation = self.volume_keys.table.borrow().generation.max(table.generation);
        for _ in KEY_PLACES {
            table.generation += 1;
            let bytes = Buf::copy_of(&table.encode(self.volume_keys.store));
            let place = KEY_PLACES[(table.generation % 2) as usize];
            self.media.device.write_copies(&bytes, place).await?;
            *self.volume_keys.table.borrow_mut() = table.clone();
        }
        Ok(())
    }

    /// Writes the key table again if a copy of it is damaged or missing. Returns the number of places where that was so.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn renew_keys(&self) -> Result<u64> {
        let _permit = self.volume_keys.changing.acquire(1).await;
        if self.volume_keys.table.borrow().generation == 0 {
            return Ok(0);
        }
        let places = self.read_all_keys().await;
        if self.volume_keys.are_copied(&places) {
            return Ok(0);
        }
        let table = self.volume_keys.table.borrow().clone();
        self.write_keys(table).await?;
        Ok(1)
    }

    /// Encrypts the objects whose names begin with `prefix`, which are none yet, with a new key of their own.
    ///
    /// # Errors
    /// `Invalid` without a master key, or for an empty prefix; `Exists` if there are such objects; `NoSpace` if the table is
    /// full.
    pub async fn add_key(&self, prefix: &ObjectName) -> Result<()> {
        self.refuse_writes()?;
        let keys = &self.volume_keys;
        let _permit = keys.changing.acquire(1).await;
        if keys.has(prefix) {
            return Ok(());
        }
        if !prefix.name().ends_with('.') {
            return Err(Error::new(ErrorKind::Invalid, "only the data objects of a volume can be encrypted"));
        }
        if self.has_objects(prefix).await? {
            let text = format!("{prefix}*: there are objects already, and they are not encrypted");
            return Err(Error::new(ErrorKind::Exists, text));
        }
        let mut table = keys.table.borrow().clone();
        if table.keys.len() >= KEYS_MAX {
            return Err(Error::new(ErrorKind::NoSpace, format!("a store has at most {KEYS_MAX} encrypted volumes")));
        }
        let number = table.next_number.max(1);
        let secret = Zeroizing::new(random_bytes::<SECRET_LEN>());
        {
            let wrapper = keys.wrapper.borrow();
            let wrapper = wrapper.as_ref().ok_or_else(|| {
                let text = "encryption needs a master key; start the daemon with `--master-key`";
                Error::new(ErrorKind::Invalid, text)
            })?;
            table.master_check = wrapper.check;
            table.keys.push(WrappedKey {
                number,
                prefix: prefix_id(prefix.namespace(), prefix.name()),
                wrapped: wrapper.wrap(keys.store, number, &secret),
            });
        }
        table.next_number = number + 1;
        self.enable_encryption().await?;
        self.write_keys(table).await
    }

    /// Returns whether an object exists whose name begins with `prefix`.
    async fn has_objects(&self, prefix: &ObjectName) -> Result<bool> {
        let from = keys::name(prefix);
        let found = self.index.lookup_range(&from, &keys::after(&from), 1).await?;
        Ok(!found.is_empty())
    }

    /// Destroys the key of the objects whose names begin with `prefix`. What is left of them cannot be read any more.
    ///
    /// # Errors
    /// Errors of the device.
    pub async fn destroy_key(&self, prefix: &ObjectName) -> Result<()> {
        let keys = &self.volume_keys;
        let _permit = keys.changing.acquire(1).await;
        let Some(number) = keys.of_prefix(prefix) else { return Ok(()) };
        self.refuse_writes()?;
        let mut table = keys.table.borrow().clone();
        table.keys.retain(|key| key.number != number);
        self.write_keys(table).await?;
        keys.ciphers.borrow_mut().remove(&number);
        Ok(())
    }

    /// Wraps all keys by another master key, durably. Data is not written again.
    ///
    /// # Errors
    /// `Denied` without the current master key; errors of the device.
    pub async fn rotate_master_key(&self, master: &MasterKey) -> Result<KeyStatus> {
        self.refuse_writes()?;
        let keys = &self.volume_keys;
        let _permit = keys.changing.acquire(1).await;
        let wrapper = master.wrapper(&keys.uuid);
        let mut table = keys.table.borrow().clone();
        for key in &mut table.keys {
            let secret = keys.secret(key.number)?;
            key.wrapped = wrapper.wrap(keys.store, key.number, &secret);
        }
        table.master_check = wrapper.check;
        if !table.keys.is_empty() {
            self.write_keys(table).await?;
        }
        *keys.wrapper.borrow_mut() = Some(wrapper);
        Ok(keys.status())
    }

    /// Returns the key for the write log of the objects whose names begin with `prefix`, derived from their own; `None` if
    /// they are not encrypted.
    ///
    /// # Errors
    /// See [`VolumeKeys::cipher`].
    pub fn log_key(&self, prefix: &ObjectName) -> Result<Option<DataKey>> {
        let Some(number) = self.volume_keys.of_prefix(prefix) else { return Ok(None) };
        let secret = self.volume_keys.secret(number)?;
        let mut out = Zeroizing::new([0; 64]);
        derive(&[], &secret[..], b"forebay write log", &mut out[..]);
        Ok(Some(DataKey::from_bytes(&out)))
    }
}

impl VolumeKeys {
    /// Returns whether every copy is whole and current: the newer place has the table's generation, the other one that
    /// before it, with the same keys.
    fn are_copied(&self, places: &[Copies]) -> bool {
        let table = self.table.borrow();
        let is_current = |copy: &KeyTable| {
            let before = KeyTable { generation: copy.generation, ..table.clone() };
            table.generation - copy.generation.min(table.generation) <= 1 && *copy == before
        };
        let whole = |copies: &Copies| copies.tables.len() == copies.devices && copies.tables.iter().all(is_current);
        table.generation == 0 || places.iter().all(whole)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(devices: usize, generations: &[u64], none: usize) -> Copies {
        let table = |&generation: &u64| KeyTable { generation, ..KeyTable::default() };
        Copies { devices, tables: generations.iter().map(table).collect(), none }
    }

    #[test]
    fn one_failed_read_does_not_lose_keys_that_never_were() {
        let newest =
            |first, second, parity| newest_table(&[first, second], parity).map(|table| table.map(|t| t.generation));
        // Three of four devices say that no key was ever written.
        assert_eq!(newest(place(4, &[], 3), place(4, &[], 4), 1), Ok(None));
        // So few may be wrong, or have been away as the first key was written.
        assert_eq!(newest(place(4, &[], 1), place(4, &[], 4), 1), Err(3));
        assert_eq!(newest(place(4, &[], 4), place(4, &[], 1), 1), Err(3));
        assert_eq!(newest(place(1, &[], 1), place(1, &[], 0), 0), Err(1));
        assert_eq!(newest(place(1, &[], 1), place(1, &[], 1), 0), Ok(None));
        // One copy is enough, and the newest counts.
        assert_eq!(newest(place(4, &[], 0), place(4, &[3], 0), 1), Ok(Some(3)));
        assert_eq!(newest(place(4, &[2, 4], 0), place(4, &[3, 3, 3, 3], 0), 1), Ok(Some(4)));
    }
}
