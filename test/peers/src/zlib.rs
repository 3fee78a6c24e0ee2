//! Debian's zlib, opened at run time, as programs use it: one state, reset for each block.

use std::ffi::{c_char, c_int, c_uint, c_ulong, c_void};

use crate::debian::Library;

/// zlib's `z_stream`, as zlib.h lays it out on 64-bit machines.
#[repr(C)]
struct Stream {
    next_in: *const u8,
    avail_in: c_uint,
    total_in: c_ulong,
    next_out: *mut u8,
    avail_out: c_uint,
    total_out: c_ulong,
    message: *const c_char,
    state: *mut c_void,
    alloc: *mut c_void,
    free: *mut c_void,
    opaque: *mut c_void,
    data_type: c_int,
    adler: c_ulong,
    reserved: c_ulong,
}

type Version = unsafe extern "C" fn() -> *const c_char;
type DeflateInit = unsafe extern "C" fn(*mut Stream, c_int, c_int, c_int, c_int, c_int, *const c_char, c_int) -> c_int;
type InflateInit = unsafe extern "C" fn(*mut Stream, c_int, *const c_char, c_int) -> c_int;
type Step = unsafe extern "C" fn(*mut Stream, c_int) -> c_int;
type Call = unsafe extern "C" fn(*mut Stream) -> c_int;

const FINISH: c_int = 4;
const STREAM_END: c_int = 1;

/// One state of zlib's, for raw DEFLATE; either way.
pub struct Zlib {
    stream: Box<Stream>,
    step: Step,
    reset: Call,
    end: Call,
}

impl Zlib {
    /// A compressor of this level.
    ///
    /// # Errors
    /// zlib is missing.
    pub fn deflate(level: i32) -> Result<Self, String> {
        let library = Library::open(c"libz.so.1", "zlib1g")?;
        // SAFETY: the types are those of zlib.h; the stream is zeroed, which picks zlib's own allocator.
        unsafe {
            let init: DeflateInit = library.function(c"deflateInit2_")?;
            let version: Version = library.function(c"zlibVersion")?;
            let mut stream = Self::empty();
            let done = init(&mut *stream, level, 8, -15, 8, 0, version(), size_of::<Stream>() as c_int);
            assert_eq!(done, 0);
            let (step, reset, end) =
                (library.function(c"deflate")?, library.function(c"deflateReset")?, library.function(c"deflateEnd")?);
            Ok(Self { stream, step, reset, end })
        }
    }

    /// A decompressor.
    ///
    /// # Errors
    /// zlib is missing.
    pub fn inflate() -> Result<Self, String> {
        let library = Library::open(c"libz.so.1", "zlib1g")?;
        // SAFETY: as above.
        unsafe {
            let init: InflateInit = library.function(c"inflateInit2_")?;
            let version: Version = library.function(c"zlibVersion")?;
            let mut stream = Self::empty();
            assert_eq!(init(&mut *stream, -15, version(), size_of::<Stream>() as c_int), 0);
            let (step, reset, end) =
                (library.function(c"inflate")?, library.function(c"inflateReset")?, library.function(c"inflateEnd")?);
            Ok(Self { stream, step, reset, end })
        }
    }

    fn empty() -> Box<Stream> {
        // SAFETY: pointers and numbers only.
        Box::new(unsafe { std::mem::zeroed() })
    }

    /// Goes over a whole block; the length of what came of it.
    ///
    /// # Panics
    /// When the output is too short.
    pub fn run(&mut self, input: &[u8], output: &mut [u8]) -> usize {
        // SAFETY: the stream is initialised, and the pointers go with their lengths.
        unsafe {
            (self.reset)(&mut *self.stream);
            (self.stream.next_in, self.stream.avail_in) = (input.as_ptr(), input.len() as c_uint);
            (self.stream.next_out, self.stream.avail_out) = (output.as_mut_ptr(), output.len() as c_uint);
            assert_eq!((self.step)(&mut *self.stream, FINISH), STREAM_END);
        }
        self.stream.total_out as usize
    }
}

impl Drop for Zlib {
    fn drop(&mut self) {
        // SAFETY: the stream is initialised.
        unsafe { (self.end)(&mut *self.stream) };
    }
}
