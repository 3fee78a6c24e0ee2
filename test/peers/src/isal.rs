//! The newest ISA-L, as its own dispatcher picks it and held on one tier.

use std::ffi::c_int;

// Only linked; its bindings cover another part of the library.
use isal_sys as _;

use forebay_accel::Tier;

/// Declares the functions that encode, which differ in nothing but the tier.
macro_rules! encoders {
    ($($name:ident),*) => {
        unsafe extern "C" {
            $(fn $name(
                len: c_int,
                k: c_int,
                rows: c_int,
                tables: *const u8,
                data: *const *const u8,
                coding: *const *mut u8,
            );)*
        }
    };
}

encoders!(ec_encode_data, ec_encode_data_sse, ec_encode_data_avx2, ec_encode_data_avx512);

type Encode = unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8);

unsafe extern "C" {
    fn ec_init_tables(k: c_int, rows: c_int, matrix: *const u8, tables: *mut u8);
    fn ec_init_tables_base(k: c_int, rows: c_int, matrix: *const u8, tables: *mut u8);
    fn crc32_iscsi(data: *const u8, len: c_int, init: u32) -> u32;
}

/// An encoder: tables, and the function that takes them.
pub struct Encoder {
    tables: Vec<u8>,
    function: Encode,
}

impl Encoder {
    /// For a matrix of `rows.len() / k` rows, on the tier that ISA-L picks.
    pub fn new(k: usize, rows: &[u8]) -> Self {
        Self::with(k, rows, ec_init_tables, ec_encode_data)
    }

    /// The same on a certain tier; `None` where ISA-L has none of that name.
    pub fn on(tier: Tier, k: usize, rows: &[u8]) -> Option<Self> {
        let function: Encode = match tier {
            Tier::Sse => ec_encode_data_sse,
            Tier::Avx2 => ec_encode_data_avx2,
            Tier::Avx512 => ec_encode_data_avx512,
            Tier::Gfni => return Some(Self::new(k, rows)),
            Tier::Portable | Tier::Neon => return None,
        };
        Some(Self::with(k, rows, ec_init_tables_base, function))
    }

    fn with(
        k: usize,
        rows: &[u8],
        init: unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8),
        function: Encode,
    ) -> Self {
        let mut tables = vec![0; 32 * rows.len()];
        // SAFETY: a table of 32 bytes for each coefficient.
        unsafe { init(k as c_int, (rows.len() / k) as c_int, rows.as_ptr(), tables.as_mut_ptr()) };
        Self { tables, function }
    }

    /// Makes the rows' chunks of `data`.
    ///
    /// # Safety
    /// The pointers are good for `len` bytes, and their numbers are those of the matrix.
    pub unsafe fn encode(&self, len: usize, data: &[*const u8], coding: &[*mut u8]) {
        let (k, rows) = (data.len() as c_int, coding.len() as c_int);
        // SAFETY: passed on.
        unsafe { (self.function)(len as c_int, k, rows, self.tables.as_ptr(), data.as_ptr(), coding.as_ptr()) }
    }
}

/// `crc32_iscsi` with the inversions of CRC32C.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    // SAFETY: the bytes are a slice.
    !unsafe { crc32_iscsi(data.as_ptr(), data.len() as c_int, !0) }
}
