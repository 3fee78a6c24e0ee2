//! Debian's OpenSSL, and ISA-L's crypto library where one is installed, opened at run time.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use crate::debian::Library;

type New = unsafe extern "C" fn() -> *mut c_void;
type Cipher = unsafe extern "C" fn() -> *const c_void;
type Init = unsafe extern "C" fn(*mut c_void, *const c_void, *const c_void, *const u8, *const u8) -> c_int;
type Update = unsafe extern "C" fn(*mut c_void, *mut u8, *mut c_int, *const u8, c_int) -> c_int;
type Control = unsafe extern "C" fn(*mut c_void, c_int, c_int, *mut c_void) -> c_int;
type Free = unsafe extern "C" fn(*mut c_void);
type Text = unsafe extern "C" fn(c_int) -> *const c_char;

/// OpenSSL's control code for reading a tag.
const GET_TAG: c_int = 0x10;

/// One cipher of OpenSSL's with its key, as programs use it: the key once, a vector a message.
pub struct OpenSsl {
    context: *mut c_void,
    init: Init,
    update: Update,
    last: unsafe extern "C" fn(*mut c_void, *mut u8, *mut c_int) -> c_int,
    control: Control,
    free: Free,
}

impl OpenSsl {
    /// A cipher by the name of its function, such as `EVP_aes_256_xts`.
    ///
    /// # Errors
    /// OpenSSL 3 is missing.
    pub fn new(cipher: &std::ffi::CStr, key: &[u8]) -> Result<Self, String> {
        let library = Library::open(c"libcrypto.so.3", "libssl3")?;
        // SAFETY: the types are those of evp.h, and the key has the length that the cipher wants.
        unsafe {
            let new: New = library.function(c"EVP_CIPHER_CTX_new")?;
            let cipher: Cipher = library.function(cipher)?;
            let all = Self {
                context: new(),
                init: library.function(c"EVP_EncryptInit_ex")?,
                update: library.function(c"EVP_EncryptUpdate")?,
                last: library.function(c"EVP_EncryptFinal_ex")?,
                control: library.function(c"EVP_CIPHER_CTX_ctrl")?,
                free: library.function(c"EVP_CIPHER_CTX_free")?,
            };
            assert_eq!((all.init)(all.context, cipher(), ptr::null(), key.as_ptr(), ptr::null()), 1);
            Ok(all)
        }
    }

    /// Returns the version that the library reports.
    pub fn version() -> Option<String> {
        let library = Library::open(c"libcrypto.so.3", "libssl3").ok()?;
        // SAFETY: the function gives a C string that lives as long as the library.
        unsafe {
            let text: Text = library.function(c"OpenSSL_version").ok()?;
            Some(std::ffi::CStr::from_ptr(text(0)).to_string_lossy().into_owned())
        }
    }

    /// Encrypts sectors in place, one call each: there is none for many.
    pub fn xts(&mut self, size: usize, first: u64, data: &mut [u8]) {
        for (number, sector) in data.chunks_exact_mut(size).enumerate() {
            let tweak = u128::from(first + number as u64).to_le_bytes();
            let mut length = 0;
            // SAFETY: the context has its key; the vector has 16 bytes, and the sector its length.
            unsafe {
                (self.init)(self.context, ptr::null(), ptr::null(), ptr::null(), tweak.as_ptr());
                (self.update)(self.context, sector.as_mut_ptr(), &mut length, sector.as_ptr(), size as c_int);
            }
        }
    }

    /// Seals a message in place; the tag.
    pub fn gcm(&mut self, nonce: &[u8; 12], data: &mut [u8]) -> [u8; 16] {
        let (mut length, mut tag) = (0, [0; 16]);
        // SAFETY: as above; GCM writes nothing at its end but the tag that is asked for.
        unsafe {
            (self.init)(self.context, ptr::null(), ptr::null(), ptr::null(), nonce.as_ptr());
            (self.update)(self.context, data.as_mut_ptr(), &mut length, data.as_ptr(), data.len() as c_int);
            (self.last)(self.context, tag.as_mut_ptr(), &mut length);
            (self.control)(self.context, GET_TAG, 16, tag.as_mut_ptr().cast());
        }
        tag
    }
}

impl Drop for OpenSsl {
    fn drop(&mut self) {
        // SAFETY: it is alive, and there is no other reference to it.
        unsafe { (self.free)(self.context) };
    }
}

type Expanded = unsafe extern "C" fn(*mut u8, *mut u8, *mut u8, u64, *const u8, *mut u8) -> c_int;
type Expand = unsafe extern "C" fn(*const u8, *mut u8, *mut u8) -> c_int;

/// ISA-L crypto's AES-256-XTS with keys expanded beforehand.
pub struct IsalCrypto {
    encrypt: Expanded,
    data: [u8; 240],
    tweak: [u8; 240],
}

impl IsalCrypto {
    /// With a key of 64 bytes; `None` where the library is not installed (Debian has no package of it).
    pub fn new(key: &[u8]) -> Option<Self> {
        assert_eq!(key.len(), 64);
        let library = Library::open(c"libisal_crypto.so.2", "none in Debian").ok()?;
        // SAFETY: the types are those of aes_xts.h and aes_keyexp.h.
        unsafe {
            let expand: Expand = library.function(c"isal_aes_keyexp_256").ok()?;
            let encrypt = library.function(c"isal_aes_xts_enc_256_expanded_key").ok()?;
            let (mut data, mut tweak, mut unused) = ([0; 240], [0; 240], [0; 240]);
            expand(key.as_ptr(), data.as_mut_ptr(), unused.as_mut_ptr());
            expand(key[32..].as_ptr(), tweak.as_mut_ptr(), unused.as_mut_ptr());
            Some(Self { encrypt, data, tweak })
        }
    }

    /// Encrypts sectors in place, one call each.
    pub fn xts(&mut self, size: usize, first: u64, data: &mut [u8]) {
        for (number, sector) in data.chunks_exact_mut(size).enumerate() {
            let mut tweak = u128::from(first + number as u64).to_le_bytes();
            // SAFETY: both schedules have fifteen round keys, the vector 16 bytes, and the sector its length.
            unsafe {
                (self.encrypt)(
                    self.tweak.as_mut_ptr(),
                    self.data.as_mut_ptr(),
                    tweak.as_mut_ptr(),
                    size as u64,
                    sector.as_ptr(),
                    sector.as_mut_ptr(),
                );
            }
        }
    }
}
