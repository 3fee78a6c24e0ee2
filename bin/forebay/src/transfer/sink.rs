//! Destination of an export: a new file, a block device, or a stream.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;

use super::source::nonzero_runs;
use super::stream_file::Replacement;
use crate::failure::{Failure, FailureKind, Result};
use crate::units::Size;

/// Destination of an image's content.
pub enum ImageSink {
    /// A file of its own: what is not written reads as zeroes.  Removed again unless the export is finished.
    File {
        /// Open file.
        file: File,
        /// Path of the file.
        path: PathBuf,
        /// Existing file that it replaces when the export is complete.
        replaces: Option<PathBuf>,
        /// Set once the export is complete.
        finished: bool,
    },
    /// A device that holds old data: zeroes must be written too.
    Device {
        /// Open device.
        file: File,
        /// Offset up to which it is written, in bytes.
        at: u64,
    },
    /// Bytes in order.
    Stream {
        /// Output stream.
        writer: Box<dyn Write + Send>,
        /// Offset up to which it is written, in bytes.
        at: u64,
    },
}

impl ImageSink {
    /// Standard output for `-`, otherwise a new file (or, with `force`, in place of an old one) or a block device.
    pub fn open(path: &Path, force: bool) -> Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(ImageSink::Stream { writer: Box::new(io::stdout()), at: 0 });
        }
        let fail = |error| Failure::io(error, format_args!("opening {}", path.display()));
        let kind = std::fs::metadata(path).map(|meta| meta.file_type());
        match kind {
            Ok(kind) if kind.is_block_device() => {
                Ok(ImageSink::Device { file: OpenOptions::new().write(true).open(path).map_err(fail)?, at: 0 })
            }
            Ok(kind) if kind.is_fifo() || kind.is_char_device() => {
                let writer = Box::new(OpenOptions::new().write(true).open(path).map_err(fail)?);
                Ok(ImageSink::Stream { writer, at: 0 })
            }
            Ok(kind) if kind.is_file() && force => {
                let Replacement { file, path, old } = Replacement::open(path)?;
                Ok(ImageSink::File { file, path, replaces: Some(old), finished: false })
            }
            Ok(_) => {
                let what = format!("{} is there already", path.display());
                Err(Failure::new(FailureKind::Exists, what).hint("name another file, or replace it with --force"))
            }
            Err(_) => {
                let file = OpenOptions::new().write(true).create_new(true).open(path).map_err(fail)?;
                Ok(ImageSink::File { file, path: path.into(), replaces: None, finished: false })
            }
        }
    }

    /// The image has this size.
    pub fn size(&mut self, size: u64) -> Result<()> {
        match self {
            ImageSink::File { file, path, .. } => {
                file.set_len(size).map_err(|error| Failure::io(error, format_args!("sizing {}", path.display())))
            }
            ImageSink::Device { file, .. } => {
                let room = rustix::fs::seek(&*file, rustix::fs::SeekFrom::End(0))
                    .map_err(|error| Failure::io(error.into(), "reading the device's size"))?;
                if room < size {
                    let what = format!("the device has {}, the image needs {}", Size(room), Size(size));
                    return Err(Failure::new(FailureKind::NoSpace, what).hint("name a larger device"));
                }
                Ok(())
            }
            ImageSink::Stream { .. } => Ok(()),
        }
    }

    /// Bytes at an offset; offsets only grow.
    pub fn data(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        match self {
            ImageSink::File { file, .. } => {
                for run in nonzero_runs(offset, data) {
                    file.write_all_at(&data[run.clone()], offset + run.start as u64)?;
                }
                Ok(())
            }
            ImageSink::Device { file, at } => {
                zero_device(file, *at, offset)?;
                *at = offset + data.len() as u64;
                file.write_all_at(data, offset)
            }
            ImageSink::Stream { writer, at } => {
                zero_stream(writer, *at, offset)?;
                *at = offset + data.len() as u64;
                writer.write_all(data)
            }
        }
    }

    /// Everything has come; makes it durable.
    pub fn finish(&mut self, size: u64) -> io::Result<()> {
        match self {
            ImageSink::File { file, path, replaces, finished } => {
                file.sync_all()?;
                if let Some(old) = replaces {
                    std::fs::rename(path, old)?;
                }
                *finished = true;
                Ok(())
            }
            ImageSink::Device { file, at } => {
                zero_device(file, *at, size)?;
                file.sync_all()
            }
            ImageSink::Stream { writer, at } => {
                zero_stream(writer, *at, size)?;
                writer.flush()
            }
        }
    }
}

impl Drop for ImageSink {
    fn drop(&mut self) {
        if let ImageSink::File { path, finished: false, .. } = self {
            // Half an image under the name of a whole one would be taken for it.
            let _ = std::fs::remove_file(path);
        }
    }
}

fn zero_device(file: &File, from: u64, to: u64) -> io::Result<()> {
    if from >= to {
        return Ok(());
    }
    // The device may know how to be zero without being written.
    let mode = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
    if rustix::fs::fallocate(file, mode, from, to - from).is_ok() {
        return Ok(());
    }
    let zeroes = [0; 64 * 1024];
    let mut at = from;
    while at < to {
        let len = (to - at).min(zeroes.len() as u64);
        file.write_all_at(&zeroes[..len as usize], at)?;
        at += len;
    }
    Ok(())
}

fn zero_stream(writer: &mut dyn Write, from: u64, to: u64) -> io::Result<()> {
    let zeroes = [0; 64 * 1024];
    let mut at = from;
    while at < to {
        let len = (to - at).min(zeroes.len() as u64);
        writer.write_all(&zeroes[..len as usize])?;
        at += len;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_file_has_holes_where_the_image_has_zeroes() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("out");
        let mut sink = ImageSink::open(&path, false).expect("a sink");
        sink.size(16 << 20).expect("sized");
        sink.data(1 << 20, &vec![0; 1 << 20]).expect("zeroes");
        sink.data(8 << 20, b"data").expect("data");
        sink.finish(16 << 20).expect("finished");
        drop(sink);
        let meta = std::fs::metadata(&path).expect("the file");
        assert_eq!(meta.len(), 16 << 20);
        assert!(meta.blocks() * 512 < 1 << 20, "{} blocks", meta.blocks());
        let failure = ImageSink::open(&path, false).err().expect("there already");
        assert_eq!(failure.kind, FailureKind::Exists);
        assert!(ImageSink::open(&path, true).is_ok());
    }

    #[test]
    fn half_an_export_is_not_left_behind() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("out");
        let mut sink = ImageSink::open(&path, false).expect("a sink");
        sink.size(1 << 20).expect("sized");
        drop(sink);
        assert!(!path.exists());
    }

    #[test]
    fn a_stream_has_every_byte() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("out");
        let file = File::create(&path).expect("a file");
        let mut sink = ImageSink::Stream { writer: Box::new(file), at: 0 };
        sink.size(300_000).expect("sized");
        sink.data(5, b"abc").expect("data");
        sink.data(200_000, b"d").expect("data");
        sink.finish(300_000).expect("finished");
        let mut want = vec![0; 300_000];
        want[5..8].copy_from_slice(b"abc");
        want[200_000] = b'd';
        assert_eq!(std::fs::read(&path).expect("the file"), want);
    }
}
