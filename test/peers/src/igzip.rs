//! ISA-L's igzip, the newest, on the instructions it picks by itself.

use std::mem::MaybeUninit;

use isal_sys::igzip_lib as isal;

/// A compressor of one of its levels, from 0 to 3.
pub struct Igzip {
    level: u32,
    memory: Vec<u8>,
}

impl Igzip {
    /// With the memory that the level wants.
    pub fn new(level: u32) -> Self {
        Self { level, memory: vec![0; 512 << 10] }
    }

    /// Compresses a whole block to raw DEFLATE; its length.
    ///
    /// # Panics
    /// When the output is too short.
    pub fn deflate(&mut self, input: &[u8], output: &mut [u8]) -> usize {
        let mut stream = MaybeUninit::<isal::isal_zstream>::zeroed();
        // SAFETY: the initialiser fills the stream; the pointers go with their lengths, and the input is only read.
        unsafe {
            isal::isal_deflate_init(stream.as_mut_ptr());
            let stream = &mut *stream.as_mut_ptr();
            stream.level = self.level;
            stream.level_buf = self.memory.as_mut_ptr();
            stream.level_buf_size = self.memory.len() as u32;
            stream.end_of_stream = 1;
            stream.next_in = input.as_ptr().cast_mut();
            stream.avail_in = input.len() as u32;
            stream.next_out = output.as_mut_ptr();
            stream.avail_out = output.len() as u32;
            assert_eq!(isal::isal_deflate(stream), 0);
            assert_eq!(stream.avail_in, 0);
            stream.total_out as usize
        }
    }

    /// Expands a whole raw DEFLATE stream; its length.
    ///
    /// # Panics
    /// When the output is too short, or the stream is corrupt.
    pub fn inflate(input: &[u8], output: &mut [u8]) -> usize {
        let mut state = Box::<isal::inflate_state>::new_zeroed();
        // SAFETY: as above.
        unsafe {
            isal::isal_inflate_init(state.as_mut_ptr());
            let mut state = state.assume_init();
            state.next_in = input.as_ptr().cast_mut();
            state.avail_in = input.len() as u32;
            state.next_out = output.as_mut_ptr();
            state.avail_out = output.len() as u32;
            assert_eq!(isal::isal_inflate_stateless(&mut *state), 0);
            state.total_out as usize
        }
    }
}
