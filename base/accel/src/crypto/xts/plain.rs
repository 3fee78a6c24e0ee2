//! XTS as IEEE 1619 section 5.3 writes it down, a block at a time, over aws-lc's AES.

use std::mem::MaybeUninit;

use aws_lc_sys as aws;

use super::{Direction, Run};

/// Function of the library that turns a block of 16 bytes into another, under a schedule.
type Cipher = unsafe extern "C" fn(*const u8, *mut u8, *const aws::AES_KEY);

/// Schedules, as the library keeps them.
#[derive(Clone)]
pub(super) struct PlainKeys {
    encrypt: aws::AES_KEY,
    decrypt: aws::AES_KEY,
    tweak: aws::AES_KEY,
}

impl PlainKeys {
    /// Both keys have 16 or 32 bytes.
    pub(super) fn new(data: &[u8], tweak: &[u8]) -> Self {
        let schedule = |key: &[u8], decrypt: bool| {
            let mut schedule = MaybeUninit::zeroed();
            let set = if decrypt { aws::AES_set_decrypt_key } else { aws::AES_set_encrypt_key };
            // SAFETY: the key has the length that is given in bits, and zeroes are a schedule's legal content.
            unsafe {
                let done = set(key.as_ptr(), key.len() as u32 * 8, schedule.as_mut_ptr());
                assert_eq!(done, 0, "a key of a legal length is taken");
                schedule.assume_init()
            }
        };
        Self { encrypt: schedule(data, false), decrypt: schedule(data, true), tweak: schedule(tweak, false) }
    }
}

impl Drop for PlainKeys {
    fn drop(&mut self) {
        for key in [&mut self.encrypt, &mut self.decrypt, &mut self.tweak] {
            // SAFETY: the schedule is ours, and zeroes are a legal content.
            unsafe { aws::OPENSSL_cleanse(std::ptr::from_mut(key).cast(), size_of::<aws::AES_KEY>()) };
        }
    }
}

/// # Safety
/// That of [`Keys::run`](super::Keys::run).
pub(super) unsafe fn run(keys: &PlainKeys, direction: Direction, run: Run) {
    let (cipher, schedule): (Cipher, &aws::AES_KEY) = match direction {
        Direction::Encrypt => (aws::AES_encrypt, &keys.encrypt),
        Direction::Decrypt => (aws::AES_decrypt, &keys.decrypt),
    };
    let block = |cipher: Cipher, key: &aws::AES_KEY, value: u128| {
        let (from, mut to) = (value.to_le_bytes(), [0u8; 16]);
        // SAFETY: both blocks have 16 bytes, and the schedule is one of this cipher's.
        unsafe { cipher(from.as_ptr(), to.as_mut_ptr(), key) };
        u128::from_le_bytes(to)
    };
    let mut tweak = 0u128;
    for at in (0..run.length).step_by(16) {
        if at % run.size == 0 {
            // The sector's number, lowest byte first (section 5.1).
            let sector = run.first + (at / run.size) as u64;
            tweak = block(aws::AES_encrypt, &keys.tweak, u128::from(run.high) << 64 | u128::from(sector));
        }
        // SAFETY: the block lies in the memory that the caller speaks for.
        unsafe {
            let plain = u128::from_le_bytes(run.from.add(at).cast::<[u8; 16]>().read_unaligned());
            let sealed = block(cipher, schedule, plain ^ tweak) ^ tweak;
            run.to.add(at).cast::<[u8; 16]>().write_unaligned(sealed.to_le_bytes());
        }
        // Times x, modulo x^128 + x^7 + x^2 + x + 1; without a branch on what is secret.
        tweak = tweak << 1 ^ (0x87 & 0u128.wrapping_sub(tweak >> 127));
    }
}
