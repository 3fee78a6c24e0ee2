//! Source of an import: a file, a block device, or a stream; holes and zeroes are skipped.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use forebay_block::is_zero;
use rustix::fs::SeekFrom;

use super::container::HEAD_LEN;
use crate::engine::transfer::CHUNK_LEN_MAX;
use crate::failure::{Failure, FailureKind, Result};

/// The unit in which runs of zeroes are looked for, in bytes.
pub const ZERO_UNIT: usize = 4096;

/// Source of an image's content.
pub enum Source {
    /// A file or block device: its length is known, and holes may be.
    File {
        /// Open file.
        file: File,
        /// Its length in bytes.
        len: u64,
        /// Offset of the next read.
        at: u64,
        /// End of the range that is known to be data.
        data_end: u64,
    },
    /// Bytes that come in order until they end.
    Stream {
        /// Reader of the bytes.
        reader: Box<dyn Read + Send>,
        /// Number of bytes read.
        at: u64,
    },
}

impl Source {
    /// Standard input for `-`, otherwise the file.
    pub fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Source::Stream { reader: Box::new(io::stdin()), at: 0 });
        }
        let fail = |error| Failure::io(error, format_args!("opening {}", path.display()));
        let file = File::open(path).map_err(fail)?;
        let kind = file.metadata().map_err(fail)?.file_type();
        if kind.is_dir() {
            let what = format!("{} is a directory", path.display());
            return Err(Failure::new(FailureKind::Invalid, what).hint("name a file, a block device or -"));
        }
        if kind.is_file() || kind.is_block_device() {
            // A block device's length is where its end is; a file's too.
            let len = rustix::fs::seek(&file, SeekFrom::End(0)).map_err(|error| fail(error.into()))?;
            return Ok(Source::File { file, len, at: 0, data_end: 0 });
        }
        Ok(Source::Stream { reader: Box::new(file), at: 0 })
    }

    /// Returns how it begins, and goes on at the beginning.
    pub fn peek(&mut self) -> io::Result<Vec<u8>> {
        let mut head = vec![0; HEAD_LEN];
        let got = match self {
            Source::File { file, len, .. } => {
                let there = usize::try_from(*len).unwrap_or(HEAD_LEN).min(HEAD_LEN);
                file.read_exact_at(&mut head[..there], 0)?;
                there
            }
            Source::Stream { reader, .. } => {
                let got = read_full(reader, &mut head)?;
                let rest = std::mem::replace(reader, Box::new(io::empty()));
                *reader = Box::new(io::Cursor::new(head[..got].to_vec()).chain(rest));
                got
            }
        };
        head.truncate(got);
        Ok(head)
    }

    /// Its length in bytes, if that is known.
    pub fn len(&self) -> Option<u64> {
        match self {
            Source::File { len, .. } => Some(*len),
            Source::Stream { .. } => None,
        }
    }

    /// Returns the offset up to which it was read, including holes.
    pub fn position(&self) -> u64 {
        match self {
            Source::File { at, .. } | Source::Stream { at, .. } => *at,
        }
    }

    /// Reads what comes next into `buf` (which holds [`CHUNK_LEN_MAX`] bytes): where it is, and how long.  `None` at
    /// the end.
    pub fn next(&mut self, buf: &mut [u8]) -> io::Result<Option<(u64, usize)>> {
        match self {
            Source::Stream { reader, at } => {
                let got = read_full(reader, buf)?;
                let offset = *at;
                *at += got as u64;
                Ok((got > 0).then_some((offset, got)))
            }
            Source::File { file, len, at, data_end } => {
                if *at >= *data_end && !find_data(file, *len, at, data_end)? {
                    *at = *len;
                    return Ok(None);
                }
                let left = (*data_end).min(*len) - *at;
                // Chunks end on their own boundary, so that each falls into one place of the image.
                let room = CHUNK_LEN_MAX - (*at % CHUNK_LEN_MAX as u64) as usize;
                let want = room.min(buf.len()).min(usize::try_from(left).unwrap_or(usize::MAX));
                file.read_exact_at(&mut buf[..want], *at)?;
                let offset = *at;
                *at += want as u64;
                Ok(Some((offset, want)))
            }
        }
    }
}

/// Moves to the next run of data; false when there is none.
fn find_data(file: &File, len: u64, at: &mut u64, data_end: &mut u64) -> io::Result<bool> {
    if *at >= len {
        return Ok(false);
    }
    match rustix::fs::seek(file, SeekFrom::Data(*at)) {
        Ok(data) => *at = data,
        // Nothing but a hole up to the end.
        Err(rustix::io::Errno::NXIO) => return Ok(false),
        // A block device, or a file system that knows no holes: everything is data.
        Err(_) => {
            *data_end = len;
            return Ok(true);
        }
    }
    *data_end = rustix::fs::seek(file, SeekFrom::Hole(*at)).unwrap_or(len);
    Ok(*at < len)
}

/// Reads until `buf` is full or the stream ends.
fn read_full(reader: &mut impl Read, buf: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buf.len() {
        match reader.read(&mut buf[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}

/// The runs of `data` (at `offset` of the image) that are not zero, in [`ZERO_UNIT`] steps of the image.
pub fn nonzero_runs(offset: u64, data: &[u8]) -> Vec<std::ops::Range<usize>> {
    let mut runs: Vec<std::ops::Range<usize>> = Vec::new();
    let mut at = 0;
    while at < data.len() {
        let unit_left = ZERO_UNIT - ((offset + at as u64) % ZERO_UNIT as u64) as usize;
        let end = (at + unit_left).min(data.len());
        if !is_zero(&data[at..end]) {
            match runs.last_mut() {
                Some(last) if last.end == at => last.end = end,
                _ => runs.push(at..end),
            }
        }
        at = end;
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, Write};

    use super::*;

    #[test]
    fn zeroes_are_found_in_units_of_the_image() {
        let mut data = vec![0; 3 * ZERO_UNIT];
        assert!(nonzero_runs(0, &data).is_empty());
        data[ZERO_UNIT] = 1;
        assert_eq!(nonzero_runs(0, &data), vec![ZERO_UNIT..2 * ZERO_UNIT]);
        // Half a unit further on in the image the same byte lies in another unit.
        assert_eq!(nonzero_runs(ZERO_UNIT as u64 / 2, &data), vec![ZERO_UNIT / 2..ZERO_UNIT * 3 / 2]);
        data[ZERO_UNIT - 1] = 1;
        assert_eq!(nonzero_runs(0, &data), vec![0..2 * ZERO_UNIT]);
        assert_eq!(nonzero_runs(0, &[1]), vec![0..1]);
    }

    #[test]
    fn holes_of_a_file_are_skipped() {
        let mut file = tempfile::NamedTempFile::new().expect("a file");
        let len = 3 * CHUNK_LEN_MAX as u64 + 17;
        file.as_file().set_len(len).expect("a hole");
        file.seek(io::SeekFrom::Start(CHUNK_LEN_MAX as u64 + 5)).expect("within");
        file.write_all(b"data").expect("written");
        let mut source = Source::open(file.path()).expect("a source");
        assert_eq!(source.len(), Some(len));
        let mut buf = vec![0; CHUNK_LEN_MAX];
        let mut content = vec![0; len as usize];
        let mut read = 0;
        while let Some((offset, got)) = source.next(&mut buf).expect("read") {
            content[offset as usize..offset as usize + got].copy_from_slice(&buf[..got]);
            read += got;
        }
        assert_eq!(source.position(), len);
        assert_eq!(content, std::fs::read(file.path()).expect("the file"));
        assert!(read < content.len(), "the hole was read: {read} bytes");
    }

    #[test]
    fn a_stream_is_read_in_full_chunks() {
        let bytes = vec![7; CHUNK_LEN_MAX + 3];
        let mut source = Source::Stream { reader: Box::new(io::Cursor::new(bytes)), at: 0 };
        let mut buf = vec![0; CHUNK_LEN_MAX];
        assert_eq!(source.next(&mut buf).expect("read"), Some((0, CHUNK_LEN_MAX)));
        assert_eq!(source.next(&mut buf).expect("read"), Some((CHUNK_LEN_MAX as u64, 3)));
        assert_eq!(source.next(&mut buf).expect("read"), None);
    }
}
