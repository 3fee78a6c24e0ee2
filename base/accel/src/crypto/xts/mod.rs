//! AES-XTS (IEEE 1619): a sector at a time, told apart by its number.
//!
//! The mode is ours, over the processor's AES instructions: the libraries at hand take one sector a call and set up
//! each one separately, and aws-lc has no AES-128-XTS at all.  Here the tweaks of many sectors are encrypted together,
//! and 32 blocks are in flight at once.  Where the processor has no such instructions, aws-lc's AES serves, a block a
//! call.

#[cfg(target_arch = "x86_64")]
mod keys;
mod plain;
pub(super) mod shapes;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod vaes256;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

#[cfg(target_arch = "x86_64")]
use self::keys::Schedules;
use self::plain::PlainKeys;
use self::shapes::Shapes;
pub(crate) use self::shapes::XtsShape;
use super::CipherKeyError;
use crate::tier::Tier;

/// Size of an encrypted sector: a change of one byte changes the sixteen around it, under a tweak specific to the
/// sector and the position.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SectorSize {
    /// Sectors of 512 bytes.
    Bytes512,
    /// Sectors of 4096 bytes.
    Bytes4096,
}

impl SectorSize {
    /// Returns the size in bytes.
    pub const fn get(self) -> usize {
        match self {
            SectorSize::Bytes512 => 512,
            SectorSize::Bytes4096 => 4096,
        }
    }
}

/// Key for AES-128-XTS or AES-256-XTS, with its schedules expanded for both directions.
///
/// Can be shared by threads; its memory is erased when it is dropped.
pub struct Xts {
    keys: Keys,
    bits: u16,
    shapes: Shapes,
}

/// Schedules of a key, in the form of the instructions that do the work.
#[derive(Clone)]
enum Keys {
    Plain(Box<PlainKeys>),
    /// AES-NI: 128 bits at a time.
    #[cfg(target_arch = "x86_64")]
    AesNi(Box<Schedules>),
    /// VAES: 256 bits at a time.
    #[cfg(target_arch = "x86_64")]
    Vaes256(Box<Schedules>),
    /// VAES: 512 bits at a time.
    #[cfg(target_arch = "x86_64")]
    Vaes(Box<Schedules>),
}

/// Implementation of the cipher, the plainest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Implementation {
    /// The library's AES, a block a call.
    Plain,
    /// AES-NI instructions.
    AesNi,
    /// VAES on 256-bit vectors.
    Vaes256,
    /// VAES on 512-bit vectors.
    Vaes,
}

impl Implementation {
    /// Returns the implementation for a tier. `aes` says whether the processor has the AES instructions, and `vaes` whether
    /// it has them and carry-less products on 256-bit vectors as well; no tier below [`Tier::Gfni`] includes either.
    fn of(tier: Tier, aes: bool, vaes: bool) -> Self {
        if tier >= Tier::Gfni {
            Implementation::Vaes
        } else if tier >= Tier::Avx2 && aes && vaes {
            Implementation::Vaes256
        } else if tier >= Tier::Sse && aes {
            Implementation::AesNi
        } else {
            Implementation::Plain
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Encrypt,
    Decrypt,
}

/// Number of a sector, 128 bits: the tweak of IEEE 1619 section 5.1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct SectorNumber {
    /// Lower half. It counts from one sector to the next, and must not pass 2^64.
    pub low: u64,
    /// Upper half, the same for all sectors of a call.
    pub high: u64,
}

impl From<u64> for SectorNumber {
    fn from(low: u64) -> Self {
        Self { low, high: 0 }
    }
}

/// Run of sectors: source, destination and numbers.
#[derive(Clone, Copy)]
struct Run {
    size: usize,
    first: u64,
    /// Upper half of all numbers.
    high: u64,
    from: *const u8,
    to: *mut u8,
    length: usize,
}

impl Xts {
    /// Makes a cipher of a key of 32 bytes (AES-128) or 64 bytes (AES-256), the half for the data first.
    ///
    /// Does not erase the caller's copy of the key.
    ///
    /// # Errors
    /// The key has another length, or equal halves.
    pub fn new(key: &[u8]) -> Result<Self, CipherKeyError> {
        Self::with_shapes(key, Tier::current(), Shapes::chosen())
    }

    /// Makes a cipher with the instructions of `tier`, which must be available, or plainer ones, and the default loops.
    #[cfg(test)]
    pub(crate) fn with_tier(key: &[u8], tier: Tier) -> Result<Self, CipherKeyError> {
        Self::with_shapes(key, tier, Shapes::default())
    }

    /// Makes a cipher with one loop for all sectors.
    pub(crate) fn with_shape(key: &[u8], tier: Tier, shape: XtsShape) -> Result<Self, CipherKeyError> {
        Self::with_shapes(key, tier, Shapes::both(shape))
    }

    fn with_shapes(key: &[u8], tier: Tier, shapes: Shapes) -> Result<Self, CipherKeyError> {
        let bits = match key.len() {
            32 => 128,
            64 => 256,
            length => return Err(CipherKeyError::Length(length, "32 or 64")),
        };
        let (data, tweak) = key.split_at(key.len() / 2);
        // All bytes are looked at, wherever they begin to differ.
        if data.iter().zip(tweak).fold(0, |differ, (left, right)| differ | (left ^ right)) == 0 {
            return Err(CipherKeyError::HalvesEqual);
        }
        Ok(Self { keys: Keys::new(data, tweak, tier), bits, shapes })
    }

    /// Encrypts whole sectors in place; the first has number `sector`, those behind it the numbers that follow.
    ///
    /// # Panics
    /// When the data is no whole number of sectors, or the numbers pass 2^64.
    pub fn encrypt_in_place(&self, size: SectorSize, sector: impl Into<SectorNumber>, data: &mut [u8]) {
        self.in_place(Direction::Encrypt, size, sector.into(), data);
    }

    /// Decrypts whole sectors in place.
    ///
    /// # Panics
    /// As [`encrypt_in_place`](Self::encrypt_in_place).
    pub fn decrypt_in_place(&self, size: SectorSize, sector: impl Into<SectorNumber>, data: &mut [u8]) {
        self.in_place(Direction::Decrypt, size, sector.into(), data);
    }

    /// Encrypts whole sectors from one place to another.
    ///
    /// # Panics
    /// As [`encrypt_in_place`](Self::encrypt_in_place), and when the lengths differ.
    pub fn encrypt(&self, size: SectorSize, sector: impl Into<SectorNumber>, from: &[u8], to: &mut [u8]) {
        self.across(Direction::Encrypt, size, sector.into(), from, to);
    }

    /// Decrypts whole sectors from one place to another.
    ///
    /// # Panics
    /// As [`encrypt`](Self::encrypt).
    pub fn decrypt(&self, size: SectorSize, sector: impl Into<SectorNumber>, from: &[u8], to: &mut [u8]) {
        self.across(Direction::Decrypt, size, sector.into(), from, to);
    }

    /// Returns the name of the implementation, for tables.
    pub fn implementation(&self) -> &'static str {
        match self.keys {
            Keys::Plain(_) => "aws-lc",
            #[cfg(target_arch = "x86_64")]
            Keys::AesNi(_) => "aes-ni",
            #[cfg(target_arch = "x86_64")]
            Keys::Vaes256(_) => "vaes-256",
            #[cfg(target_arch = "x86_64")]
            Keys::Vaes(_) => "vaes",
        }
    }

    /// Returns true if the implementation has several loops.
    pub(crate) fn has_shapes(&self) -> bool {
        !matches!(self.keys, Keys::Plain(_))
    }

    fn in_place(&self, direction: Direction, size: SectorSize, sector: SectorNumber, data: &mut [u8]) {
        check(size, sector.low, data.len());
        let at = data.as_mut_ptr();
        let SectorNumber { low: first, high } = sector;
        let run = Run { size: size.get(), first, high, from: at, to: at, length: data.len() };
        // SAFETY: source and destination are the same memory, which is ours alone, and a whole number of sectors.
        unsafe { self.keys.run(direction, run, self.shapes.of(size)) };
    }

    fn across(&self, direction: Direction, size: SectorSize, sector: SectorNumber, from: &[u8], to: &mut [u8]) {
        assert_eq!(from.len(), to.len(), "source and destination must have the same length");
        check(size, sector.low, from.len());
        let (from, length) = (from.as_ptr(), from.len());
        let SectorNumber { low: first, high } = sector;
        let run = Run { size: size.get(), first, high, from, to: to.as_mut_ptr(), length };
        // SAFETY: two pieces of memory of the same length, which do not overlap, and a whole number of sectors.
        unsafe { self.keys.run(direction, run, self.shapes.of(size)) };
    }
}

/// Copies the schedules; each copy is erased when it is dropped.
impl Clone for Xts {
    fn clone(&self) -> Self {
        Self { keys: self.keys.clone(), bits: self.bits, shapes: self.shapes }
    }
}

impl fmt::Debug for Xts {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "Xts(AES-{}, key hidden)", self.bits)
    }
}

impl Keys {
    fn new(data: &[u8], tweak: &[u8], tier: Tier) -> Self {
        #[cfg(target_arch = "x86_64")]
        let (aes, vaes) = {
            use std::arch::is_x86_feature_detected as has;
            (has!("aes"), has!("vaes") && has!("vpclmulqdq"))
        };
        #[cfg(not(target_arch = "x86_64"))]
        let (aes, vaes) = (false, false);
        match Implementation::of(tier, aes, vaes) {
            // SAFETY: the tier has VAES, and with it the AES instructions.
            #[cfg(target_arch = "x86_64")]
            Implementation::Vaes => Keys::Vaes(unsafe { Schedules::new(data, tweak) }),
            // SAFETY: asked for just now.
            #[cfg(target_arch = "x86_64")]
            Implementation::Vaes256 => Keys::Vaes256(unsafe { Schedules::new(data, tweak) }),
            // SAFETY: asked for just now.
            #[cfg(target_arch = "x86_64")]
            Implementation::AesNi => Keys::AesNi(unsafe { Schedules::new(data, tweak) }),
            _ => Keys::Plain(Box::new(PlainKeys::new(data, tweak))),
        }
    }

    /// # Safety
    /// `run.length` is a multiple of `run.size` (512 or 4096), that many bytes can be read at `run.from` and written
    /// at `run.to`, and the two are the same place or do not overlap.
    unsafe fn run(&self, direction: Direction, run: Run, shape: XtsShape) {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = shape;
        // SAFETY: the memory is the caller's word; each kind of key is made only where its instructions are.
        unsafe {
            match self {
                Keys::Plain(keys) => plain::run(keys, direction, run),
                #[cfg(target_arch = "x86_64")]
                Keys::AesNi(keys) => x86::run_aes_ni(keys, direction, run, shape),
                #[cfg(target_arch = "x86_64")]
                Keys::Vaes256(keys) => vaes256::run(keys, direction, run, shape),
                #[cfg(target_arch = "x86_64")]
                Keys::Vaes(keys) => x86::run_vaes(keys, direction, run, shape),
            }
        }
    }
}

fn check(size: SectorSize, sector: u64, length: usize) {
    assert!(length.is_multiple_of(size.get()), "{length} bytes are no whole number of {size:?} sectors");
    let count = (length / size.get()) as u64;
    assert!(count == 0 || sector.checked_add(count - 1).is_some(), "sector numbers pass 2^64");
}
