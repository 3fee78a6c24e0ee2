//! Files that streams are written to and read from.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, FailureKind, Result};

/// New file with a stream, or standard output.  Removed again unless it is finished.
pub struct StreamFile {
    writer: Box<dyn Write>,
    /// File to make durable, and its path to remove.
    file: Option<(File, PathBuf)>,
    /// Name for messages.
    shown: String,
}

impl StreamFile {
    /// Opens standard output for `-`, otherwise a new file, or with `force` an existing one.
    pub fn create(path: &Path, force: bool) -> Result<Self> {
        if path.as_os_str() == "-" {
            let writer = Box::new(BufWriter::new(io::stdout()));
            return Ok(Self { writer, file: None, shown: "standard output".into() });
        }
        let shown = path.display().to_string();
        let mut options = OpenOptions::new();
        options.write(true);
        // A device or a pipe is there already, and stays.
        let special = std::fs::metadata(path).is_ok_and(|meta| !meta.is_file());
        match force || special {
            true => options.create(true).truncate(true),
            false => options.create_new(true),
        };
        let file = options.open(path).map_err(|error| match error.kind() {
            io::ErrorKind::AlreadyExists => Failure::new(FailureKind::Exists, format!("{shown} is there already"))
                .hint("name another file, or replace it with --force"),
            _ => Failure::io(error, format_args!("opening {shown}")),
        })?;
        let own = match special {
            true => None,
            false => Some((file.try_clone().map_err(|error| Failure::io(error, &shown))?, path.to_owned())),
        };
        Ok(Self { writer: Box::new(BufWriter::with_capacity(1 << 20, file)), file: own, shown })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(|error| Failure::io(error, format_args!("writing {}", self.shown)))
    }

    /// Ends the stream, and makes it durable.
    pub fn finish(mut self) -> Result<()> {
        let synced = self.writer.flush().and_then(|()| match &self.file {
            Some((file, _)) => file.sync_all(),
            None => Ok(()),
        });
        synced.map_err(|error| Failure::io(error, format_args!("writing {}", self.shown)))?;
        self.file = None;
        Ok(())
    }
}

impl Drop for StreamFile {
    fn drop(&mut self) {
        if let Some((_, path)) = &self.file {
            // Part of a stream under the name of a whole one would be taken for it.
            let _ = std::fs::remove_file(path);
        }
    }
}

/// File with a stream, or standard input.
pub struct StreamSource {
    reader: Box<dyn Read + Send>,
    /// Length in bytes, if it is known.
    pub len: Option<u64>,
    /// Number of bytes read.
    pub position: u64,
    /// Name for messages.
    pub shown: String,
}

impl StreamSource {
    /// Opens standard input for `-`, otherwise a file.
    pub fn open(path: &Path) -> Result<Self> {
        if path.as_os_str() == "-" {
            let shown = "standard input".to_owned();
            return Ok(Self { reader: Box::new(io::stdin()), len: None, position: 0, shown });
        }
        let shown = path.display().to_string();
        let opening = |error| Failure::io(error, format_args!("opening {shown}"));
        let file = File::open(path).map_err(opening)?;
        let meta = file.metadata().map_err(opening)?;
        if meta.is_dir() {
            return Err(
                Failure::invalid(format!("{shown} is a directory")).hint("name a file, or - for standard input")
            );
        }
        Ok(Self { reader: Box::new(file), len: meta.is_file().then_some(meta.len()), position: 0, shown })
    }

    /// Reads the next bytes into `buf`; 0 at the end.
    pub fn read(&mut self, buf: &mut [u8]) -> Result<usize> {
        loop {
            match self.reader.read(buf) {
                Ok(got) => {
                    self.position += got as u64;
                    return Ok(got);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Failure::io(error, format_args!("reading {}", self.shown))),
            }
        }
    }
}
