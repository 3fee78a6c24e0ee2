//! Encryption of payloads: AES-256-XTS with keys of the log's runs.
//!
//! | invariant | |
//! |---|---|
//! | E1 | payloads leave the memory of the primary encrypted only: to its medium, and to other members |
//! | E2 | no key and tweak encrypt two different contents |
//!
//! The key of a run follows from the log's key, the log's id, the run (or term), and a salt that is drawn when the log is
//! opened; the number of a sector from the sequence number of its entry and its place in the payload. A run is never
//! opened twice, and in one run a sequence number is never given twice. The salt keeps runs apart where a superblock was
//! damaged, or the whole medium was replaced by an older copy.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_accel::crypto::{SectorSize, Xts, hmac_sha256};
use forebay_block::{Buf, BufList, BufMut, DATA_KEY_LEN, DataKey, Error, ErrorKind, Result};
use forebay_reactor::random;
use zeroize::Zeroizing;

use crate::entries::{CIPHER_BLOCK, stored_len};
use crate::format::{EntryRecord, KeyCheck, LogId};
use crate::media::{Medium, Recovered, corrupt};
use crate::shelf::id_text;

/// Unit of encryption in bytes.
const SECTOR: usize = SectorSize::Bytes512.get();
/// Bits of a sector's number that are its place in the payload: 64 KiB have 128 sectors.
const SECTOR_BITS: u32 = 7;
/// Number of keys of former runs that are kept expanded.
const KEYS_KEPT: usize = 4;

/// Returns the check value of a key for a log.
pub(crate) fn key_check(key: &DataKey, log: &LogId) -> KeyCheck {
    let code = hmac_sha256(key.bytes(), &[b"forebay write log: check", log]);
    std::array::from_fn(|at| code[at])
}

/// Fails unless a log whose superblock has the check value `known` may be opened with `key`; the log is `what`.  A log that
/// is not encrypted may be opened with a key as far as this is concerned.
///
/// # Errors
/// [`ErrorKind::Denied`].
pub(crate) fn require_key(known: Option<&KeyCheck>, key: Option<&DataKey>, log: &LogId, what: &str) -> Result<()> {
    let text = match (known, key) {
        (None, _) => return Ok(()),
        (Some(_), None) => format!("{what} is encrypted, and no key was given: open it as the log of its volume"),
        (Some(known), Some(key)) if key_check(key, log) == *known => return Ok(()),
        (Some(_), Some(_)) => format!("{what} is encrypted with another key"),
    };
    Err(Error::new(ErrorKind::Denied, text))
}

/// Fails unless a log of `entries` entries that the backend may lack, and are not encrypted, may become an encrypted one.
///
/// # Errors
/// [`ErrorKind::Denied`].
pub(crate) fn require_empty(entries: usize, what: &str) -> Result<()> {
    match entries {
        0 => Ok(()),
        _ => {
            let text = format!(
                "{what} is not encrypted and holds {entries} entries: open it without a key and write it back, or detach it"
            );
            Err(Error::new(ErrorKind::Denied, text))
        }
    }
}

/// Returns the cipher of a log that was opened with `key` for run `run`, and makes its medium use it; `None` without a key.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if some entries that were found are encrypted and others are not.
pub(crate) fn open_cipher(
    medium: &dyn Medium,
    key: Option<&DataKey>,
    log: &LogId,
    run: u32,
    found: &Recovered,
) -> Result<Option<Rc<PayloadCipher>>> {
    check_entries(&found.entries, key.is_some())?;
    let Some(key) = key else { return Ok(None) };
    let first_seq = found.tail_seq + found.entries.len() as u64;
    let cipher = Rc::new(PayloadCipher::new(key, log, run, &found.entries, first_seq)?);
    medium.encrypt_with(cipher.clone());
    Ok(Some(cipher))
}

/// Fails unless the payloads of all entries are encrypted, or none is.
///
/// # Errors
/// [`ErrorKind::Corrupt`].
fn check_entries(entries: &[EntryRecord], encrypted: bool) -> Result<()> {
    match entries.iter().find(|entry| entry.salt.is_some() != encrypted) {
        None => Ok(()),
        Some(entry) if encrypted => {
            Err(corrupt(format_args!("entry {} of an encrypted log is not encrypted", entry.seq)))
        }
        Some(entry) => Err(corrupt(format_args!("entry {} is encrypted, and its log is not", entry.seq))),
    }
}

/// Run of a log, as its key follows from it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CipherRun {
    /// Run; the term where the log has members.
    run: u32,
    salt: u32,
}

/// Cipher of an open log.
pub(crate) struct PayloadCipher {
    key: DataKey,
    log: LogId,
    own: CipherRun,
    own_key: Rc<Xts>,
    /// Number of the first entry of this run.
    first_seq: u64,
    /// Former runs of which there are entries, each with the number of its first one.
    former: Vec<(u64, CipherRun)>,
    /// Keys of former runs that were used last, the newest at the end.
    keys: RefCell<Vec<(CipherRun, Rc<Xts>)>>,
}

impl PayloadCipher {
    /// Returns the cipher of a log that was opened for run `run`, with the entries `found`; the next one is `first_seq`.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`] for a key that cannot be used.
    pub(crate) fn new(key: &DataKey, log: &LogId, run: u32, found: &[EntryRecord], first_seq: u64) -> Result<Self> {
        let own = CipherRun { run, salt: random() as u32 };
        let mut former: Vec<(u64, CipherRun)> = Vec::new();
        for entry in found {
            let Some(salt) = entry.salt else { continue };
            let run = CipherRun { run: entry.term, salt };
            if former.last().is_none_or(|(_, last)| *last != run) {
                former.push((entry.seq, run));
            }
        }
        let own_key = Rc::new(Self::expand(key, log, own)?);
        Ok(Self { key: key.clone(), log: *log, own, own_key, first_seq, former, keys: RefCell::default() })
    }

    /// Derives the key of a run.
    fn expand(key: &DataKey, log: &LogId, CipherRun { run, salt }: CipherRun) -> Result<Xts> {
        let number = [run.to_le_bytes(), salt.to_le_bytes()].concat();
        let half = |label: &[u8]| Zeroizing::new(hmac_sha256(key.bytes(), &[label, log, &number]));
        let (data, tweak) = (half(b"forebay write log: data"), half(b"forebay write log: tweak"));
        let mut derived = Zeroizing::new([0; DATA_KEY_LEN]);
        derived[..data.len()].copy_from_slice(&*data);
        derived[data.len()..].copy_from_slice(&*tweak);
        Xts::new(&*derived)
            .map_err(|error| Error::new(ErrorKind::Invalid, format!("the key of write log {}: {error}", id_text(log))))
    }

    /// Returns the run of the entries that are appended now.
    pub(crate) fn run(&self) -> u32 {
        self.own.run
    }

    /// Returns the salt of the entries that are appended now.
    pub(crate) fn salt(&self) -> u32 {
        self.own.salt
    }

    /// Encrypts the payload of entry `seq`, which is appended now, into whole units of `unit` bytes. Its stored length is
    /// encrypted; zeroes follow.
    pub(crate) fn seal(&self, seq: u64, payload: &BufList, unit: usize) -> Buf {
        debug_assert!(unit.is_multiple_of(CIPHER_BLOCK as usize) && seq >= self.first_seq);
        let len = payload.len();
        let stored = stored_len(len as u32, true) as usize;
        let mut out = BufMut::zeroed(len.next_multiple_of(unit));
        let whole = len - len % SECTOR;
        #[cfg(any(test, feature = "record-tweaks"))]
        crate::tweaks::note(&self.log, (self.own.run, self.own.salt), seq, payload);
        match payload.parts() {
            [one] => {
                self.own_key.encrypt(SectorSize::Bytes512, number(seq, 0), &one[..whole], &mut out[..whole]);
                out[whole..len].copy_from_slice(&one[whole..]);
            }
            _ => {
                payload.copy_to(&mut out[..len]);
                self.own_key.encrypt_in_place(SectorSize::Bytes512, number(seq, 0), &mut out[..whole]);
            }
        }
        if whole < len {
            // Each block of a sector depends on its own content only: the beginning of a sector is enough.
            let mut last = [0; SECTOR];
            last[..stored - whole].copy_from_slice(&out[whole..stored]);
            self.own_key.encrypt_in_place(SectorSize::Bytes512, number(seq, whole / SECTOR), &mut last);
            out[whole..stored].copy_from_slice(&last[..stored - whole]);
        }
        out.freeze()
    }

    /// Decrypts the payload of entry `seq`, of `len` bytes, from its stored bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] if there are fewer bytes than the entry has.
    pub(crate) fn open(&self, seq: u64, stored: &[u8], len: usize) -> Result<Buf> {
        let key = self.key_of(seq)?;
        let Some(stored) = stored.get(..stored_len(len as u32, true) as usize) else {
            return Err(corrupt(format_args!("entry {seq}: {} bytes of a payload of {len}", stored.len())));
        };
        let mut out = BufMut::zeroed(len);
        let whole = len - len % SECTOR;
        key.decrypt(SectorSize::Bytes512, number(seq, 0), &stored[..whole], &mut out[..whole]);
        if whole < len {
            let mut last = [0; SECTOR];
            last[..stored.len() - whole].copy_from_slice(&stored[whole..]);
            key.decrypt_in_place(SectorSize::Bytes512, number(seq, whole / SECTOR), &mut last);
            out[whole..].copy_from_slice(&last[..len - whole]);
        }
        Ok(out.freeze())
    }

    /// Returns the key of the run of an entry.
    fn key_of(&self, seq: u64) -> Result<Rc<Xts>> {
        if seq >= self.first_seq {
            return Ok(self.own_key.clone());
        }
        let at = self.former.partition_point(|(first, _)| *first <= seq);
        let Some(&(_, run)) = at.checked_sub(1).and_then(|at| self.former.get(at)) else {
            return Err(corrupt(format_args!("entry {seq} is of no known run")));
        };
        let mut keys = self.keys.borrow_mut();
        if let Some(at) = keys.iter().position(|(known, _)| *known == run) {
            let found = keys.remove(at);
            let key = found.1.clone();
            keys.push(found);
            return Ok(key);
        }
        let key = Rc::new(Self::expand(&self.key, &self.log, run)?);
        if keys.len() == KEYS_KEPT {
            keys.remove(0);
        }
        keys.push((run, key.clone()));
        Ok(key)
    }
}

/// Returns the number of a sector of an entry's payload.
fn number(seq: u64, index: usize) -> u64 {
    debug_assert!(seq < 1 << 47 && index < 1 << SECTOR_BITS);
    seq << SECTOR_BITS | index as u64
}

#[cfg(test)]
mod tests;
