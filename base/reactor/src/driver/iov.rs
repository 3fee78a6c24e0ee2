//! Rest of a partial transfer, in the form of an iovec array.

use crate::buf::BufList;
use crate::driver::os::{IOV_MAX, RW_MAX};

/// Next piece of a list of buffers to pass to the kernel.
pub(crate) enum IovPiece {
    /// Contiguous memory.
    One(*const u8, usize),
    /// Several parts, stored in the vector that was passed in.
    Many,
}

/// Returns the bytes after the first `done` bytes of `bufs`, limited to what one system call takes.  `done` must be
/// less than the list's length.
pub(crate) fn remaining(bufs: &BufList, done: usize, iovecs: &mut Vec<libc::iovec>) -> IovPiece {
    iovecs.clear();
    let mut skip = done;
    let mut room = RW_MAX;
    for part in bufs.parts() {
        if skip >= part.len() {
            skip -= part.len();
            continue;
        }
        let rest = &part[skip..];
        skip = 0;
        let len = rest.len().min(room);
        iovecs.push(libc::iovec { iov_base: rest.as_ptr().cast_mut().cast(), iov_len: len });
        room -= len;
        if room == 0 || iovecs.len() == IOV_MAX {
            break;
        }
    }
    match iovecs[..] {
        [one] => IovPiece::One(one.iov_base.cast_const().cast(), one.iov_len),
        _ => IovPiece::Many,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buf::Buf;

    #[test]
    fn resumes_in_the_middle_of_a_part() {
        let list: BufList = [&b"abc"[..], b"defg", b"h"].into_iter().map(Buf::copy_of).collect();
        let mut iovecs = Vec::new();
        assert!(matches!(remaining(&list, 4, &mut iovecs), IovPiece::Many));
        assert_eq!(iovecs.iter().map(|iov| iov.iov_len).collect::<Vec<_>>(), [3, 1]);
        assert!(matches!(remaining(&list, 7, &mut iovecs), IovPiece::One(_, 1)));
    }

    #[test]
    fn never_more_parts_than_one_call_takes() {
        let byte = Buf::zeroed(1);
        let list: BufList = std::iter::repeat_n(byte, 2 * IOV_MAX + 1).collect();
        let mut iovecs = Vec::new();
        for (done, parts) in [(0, IOV_MAX), (IOV_MAX, IOV_MAX), (IOV_MAX + 1, IOV_MAX)] {
            assert!(matches!(remaining(&list, done, &mut iovecs), IovPiece::Many));
            assert_eq!(iovecs.len(), parts);
        }
        assert!(matches!(remaining(&list, 2 * IOV_MAX, &mut iovecs), IovPiece::One(_, 1)));
    }
}
