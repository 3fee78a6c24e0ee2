//! ISA-L and jerasure as Debian ships them, opened at run time, so that nothing has to be there to build.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Once;

/// A shared library that stays open.
#[derive(Clone, Copy)]
pub(crate) struct Library(*mut c_void);

impl Library {
    pub(crate) fn open(name: &CStr, package: &str) -> Result<Self, String> {
        // SAFETY: the name is a C string; the libraries' initialisers do nothing of note.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            return Err(format!(
                "{} is missing: install Debian's package {package} (scripts/setup test)",
                name.to_string_lossy()
            ));
        }
        Ok(Self(handle))
    }

    /// # Safety
    /// `F` is the function's type.
    pub(crate) unsafe fn function<F: Copy>(self, name: &CStr) -> Result<F, String> {
        assert_eq!(size_of::<F>(), size_of::<*mut c_void>());
        // SAFETY: the handle is open, the name a C string.
        let address = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if address.is_null() {
            return Err(format!("no function {}", name.to_string_lossy()));
        }
        // SAFETY: a function pointer has the size of the address, and the caller knows its type.
        Ok(unsafe { std::mem::transmute_copy(&address) })
    }
}

type Generate = unsafe extern "C" fn(*mut u8, c_int, c_int);
type InitTables = unsafe extern "C" fn(c_int, c_int, *const u8, *mut u8);
type Encode = unsafe extern "C" fn(c_int, c_int, c_int, *const u8, *const *const u8, *const *mut u8);
type Crc = unsafe extern "C" fn(*const u8, c_int, u32) -> u32;

/// Debian's libisal2, version 2.30.
pub struct Isal {
    rs: Generate,
    cauchy: Generate,
    init: InitTables,
    encode: Encode,
    crc: Crc,
}

impl Isal {
    /// Opens it.
    ///
    /// # Errors
    /// What is missing, and the package that has it.
    pub fn open() -> Result<Self, String> {
        let library = Library::open(c"libisal.so.2", "libisal2")?;
        // SAFETY: the types are those of isa-l.h.
        unsafe {
            Ok(Self {
                rs: library.function(c"gf_gen_rs_matrix")?,
                cauchy: library.function(c"gf_gen_cauchy1_matrix")?,
                init: library.function(c"ec_init_tables")?,
                encode: library.function(c"ec_encode_data")?,
                crc: library.function(c"crc32_iscsi")?,
            })
        }
    }

    /// The rows that `gf_gen_rs_matrix` or `gf_gen_cauchy1_matrix` makes for parity.
    pub fn parity_matrix(&self, cauchy: bool, k: usize, m: usize) -> Vec<u8> {
        let mut matrix = vec![0; (k + m) * k];
        let generate = if cauchy { self.cauchy } else { self.rs };
        // SAFETY: the matrix has room for k + m rows.
        unsafe { generate(matrix.as_mut_ptr(), (k + m) as c_int, k as c_int) };
        matrix.split_off(k * k)
    }

    /// The tables that [`Isal::encode`] wants for a matrix of `rows.len() / k` rows.
    pub fn tables(&self, k: usize, rows: &[u8]) -> Vec<u8> {
        let mut tables = vec![0; 32 * rows.len()];
        // SAFETY: a table of 32 bytes for each coefficient.
        unsafe { (self.init)(k as c_int, (rows.len() / k) as c_int, rows.as_ptr(), tables.as_mut_ptr()) };
        tables
    }

    /// Calls `ec_encode_data`.
    ///
    /// # Safety
    /// The pointers are good for `len` bytes, and the tables fit their number.
    pub unsafe fn encode(&self, len: usize, tables: &[u8], data: &[*const u8], parity: &[*mut u8]) {
        let (k, m) = (data.len() as c_int, parity.len() as c_int);
        // SAFETY: passed on.
        unsafe { (self.encode)(len as c_int, k, m, tables.as_ptr(), data.as_ptr(), parity.as_ptr()) }
    }

    /// `crc32_iscsi` with the inversions of CRC32C.
    pub fn crc32c(&self, data: &[u8]) -> u32 {
        // SAFETY: the bytes are a slice.
        !unsafe { (self.crc)(data.as_ptr(), data.len() as c_int, !0) }
    }
}

type CodingMatrix = unsafe extern "C" fn(c_int, c_int, c_int) -> *mut c_int;
type MatrixEncode =
    unsafe extern "C" fn(c_int, c_int, c_int, *mut c_int, *const *const c_char, *const *mut c_char, c_int);

/// Debian's libjerasure2, version 2.0.
pub struct Jerasure {
    matrix: CodingMatrix,
    encode: MatrixEncode,
}

impl Jerasure {
    /// Opens it.
    ///
    /// # Errors
    /// What is missing, and the package that has it.
    pub fn open() -> Result<Self, String> {
        let library = Library::open(c"libJerasure.so.2", "libjerasure2")?;
        // SAFETY: the types are those of reed_sol.h and jerasure.h.
        let this = unsafe {
            Self {
                matrix: library.function(c"reed_sol_vandermonde_coding_matrix")?,
                encode: library.function(c"jerasure_matrix_encode")?,
            }
        };
        // It makes the tables of its field when they are first needed, and threads that need them then get in each
        // other's way.
        static TABLES: Once = Once::new();
        TABLES.call_once(|| drop(this.parity_matrix(2, 2)));
        Ok(this)
    }

    /// Returns the matrix of `reed_sol_vandermonde_coding_matrix` for w=8.
    pub fn parity_matrix(&self, k: usize, m: usize) -> Vec<i32> {
        // SAFETY: it returns k * m integers from malloc.
        unsafe {
            let matrix = (self.matrix)(k as c_int, m as c_int, 8);
            let entries = std::slice::from_raw_parts(matrix, k * m).to_vec();
            libc::free(matrix.cast());
            entries
        }
    }

    /// `jerasure_matrix_encode` for w=8.
    ///
    /// # Safety
    /// The pointers are good for `len` bytes, a multiple of 8, and the matrix fits their number.
    pub unsafe fn encode(&self, len: usize, matrix: &mut [i32], data: &[*const u8], parity: &[*mut u8]) {
        let (k, m) = (data.len() as c_int, parity.len() as c_int);
        // SAFETY: passed on.
        unsafe {
            (self.encode)(k, m, 8, matrix.as_mut_ptr(), data.as_ptr().cast(), parity.as_ptr().cast(), len as c_int)
        }
    }
}
