//! Files that streams are written to and read from.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, FailureKind, Result};

/// New file with a stream, or standard output.  Removed again unless it is finished.
pub struct StreamFile {
    writer: Box<dyn Write>,
    /// File to make durable, and its path.
    file: Option<(File, PathBuf)>,
    /// Existing file that the new one replaces when it is finished.
    replaces: Option<PathBuf>,
    /// Name for messages.
    shown: String,
}

impl StreamFile {
    /// Opens standard output for `-`, otherwise a new file, or with `force` an existing one.
    pub fn create(path: &Path, force: bool) -> Result<Self> {
        if path.as_os_str() == "-" {
            let writer = Box::new(BufWriter::new(io::stdout()));
            return Ok(Self { writer, file: None, replaces: None, shown: "standard output".into() });
        }
        let shown = path.display().to_string();
        // A device or a pipe is there already, and stays.
        let kind = std::fs::metadata(path).map(|meta| meta.is_file());
        let special = kind.as_ref().is_ok_and(|is_file| !is_file);
        let (file, path, replaces) = match kind {
            Ok(true) if force => {
                let Replacement { file, path, old } = Replacement::open(path)?;
                (file, path, Some(old))
            }
            _ => {
                let opened = OpenOptions::new().write(true).create_new(!special).open(path);
                let file = opened.map_err(|error| match error.kind() {
                    io::ErrorKind::AlreadyExists => {
                        Failure::new(FailureKind::Exists, format!("{shown} is there already"))
                            .hint("name another file, or replace it with --force")
                    }
                    _ => Failure::io(error, format_args!("opening {shown}")),
                })?;
                (file, path.to_owned(), None)
            }
        };
        let own = match special {
            true => None,
            false => Some((file.try_clone().map_err(|error| Failure::io(error, &shown))?, path)),
        };
        Ok(Self { writer: Box::new(BufWriter::with_capacity(1 << 20, file)), file: own, replaces, shown })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write_all(bytes).map_err(|error| Failure::io(error, format_args!("writing {}", self.shown)))
    }

    /// Ends the stream, and makes it durable.
    pub fn finish(mut self) -> Result<()> {
        let synced = self.writer.flush().and_then(|()| match &self.file {
            Some((file, path)) => file.sync_all().and_then(|()| match &self.replaces {
                Some(old) => std::fs::rename(path, old),
                None => Ok(()),
            }),
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

/// New file beside an existing one, which it replaces when it is complete. Until then the old content stays: it may be an input
/// of the same command, and is the only copy if that fails.
pub(super) struct Replacement {
    pub(super) file: File,
    /// Path of the new file.
    pub(super) path: PathBuf,
    /// Path of the existing one: that which a symbolic link leads to.
    pub(super) old: PathBuf,
}

impl Replacement {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let opened = std::fs::canonicalize(path).and_then(|old| {
            let name = old.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let path = old.with_file_name(format!(".{name}.{}.new", std::process::id()));
            let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
            file.set_permissions(std::fs::metadata(&old)?.permissions())?;
            Ok(Self { file, path, old })
        });
        opened.map_err(|error| Failure::io(error, format_args!("replacing {}", path.display())))
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
