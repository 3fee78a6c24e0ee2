//! Device of a store: one file or block device, or several with columns.

use std::rc::Rc;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::File;

use crate::columns::ColumnSet;

/// Device of a store.  Addresses are those of one linear device.
#[derive(Clone)]
pub enum StoreDevice {
    /// One file or block device.
    Single(File),
    /// Several devices.
    Columns(Rc<ColumnSet>),
}

impl StoreDevice {
    /// Returns the name of the device in messages.
    pub fn name(&self) -> String {
        match self {
            Self::Single(file) => file.path().display().to_string(),
            Self::Columns(set) => set.name().to_owned(),
        }
    }

    /// Returns the file, if it is one file or block device.
    pub fn file(&self) -> Option<&File> {
        match self {
            Self::Single(file) => Some(file),
            Self::Columns(_) => None,
        }
    }

    /// Returns the set of devices, if there are several.
    pub fn columns(&self) -> Option<&Rc<ColumnSet>> {
        match self {
            Self::Single(_) => None,
            Self::Columns(set) => Some(set),
        }
    }

    /// Returns the number of blocks of which batches have a multiple: the data columns of a line.
    pub fn line_blocks(&self) -> u32 {
        self.columns().map_or(1, |set| set.data_columns() as u32)
    }

    /// Reads `len` bytes at `addr` into a buffer with space for them, both whole blocks of one segment.
    ///
    /// # Errors
    /// Errors of the device; `Corrupt` if it ends before.
    pub async fn read(&self, addr: u64, buf: BufMut, len: usize) -> Result<BufMut> {
        let file = match self {
            Self::Single(file) => file,
            Self::Columns(set) => return set.read(addr, buf, len).await,
        };
        // A pooled buffer may be larger than the read.
        let (result, part) = file.read_at(buf.limited(len), addr).await;
        let what = || format!("reading {len} bytes at byte {addr} of {}", file.path().display());
        let got = result.map_err(|error| Error::from_io(error, what()))?;
        if got < len {
            return Err(Error::new(ErrorKind::Corrupt, format!("{}: the device ends after {got}", what())));
        }
        Ok(part)
    }

    /// Writes an anchor durably, one copy after the other. `flush_failed` receives an error after which the state of a
    /// device's cache is unknown.
    ///
    /// # Errors
    /// Errors of the device, or of more devices than parity allows.
    pub async fn write_anchor(&self, block: &Buf, places: [u64; 2], flush_failed: impl Fn(Error)) -> Result<()> {
        let failed = |error| Error::from_io(error, format!("writing an anchor of {}", self.name()));
        for at in places {
            match self {
                Self::Single(file) => {
                    file.write_at(block.clone(), at).await.map_err(failed)?;
                    file.sync_data().await.map_err(failed).inspect_err(|error| flush_failed(error.clone()))?;
                }
                Self::Columns(set) => {
                    set.write_everywhere(block, at).await.inspect_err(|error| flush_failed(error.clone()))?;
                }
            }
        }
        Ok(())
    }

    /// Makes everything written durable.
    ///
    /// # Errors
    /// Errors of the device, or of more devices than parity allows. What is durable is unknown then.
    pub async fn sync(&self) -> Result<()> {
        match self {
            Self::Single(file) => {
                file.sync_data().await.map_err(|error| Error::from_io(error, "flushing the store's device"))
            }
            Self::Columns(set) => set.sync().await,
        }
    }

    /// Returns the content of a block that `is_right` accepts, reconstructed from other devices, and mends it; `None` if
    /// there is none.
    pub async fn mend_block(&self, block: u64, is_right: impl Fn(&[u8]) -> bool) -> Option<Buf> {
        match self {
            Self::Single(_) => None,
            Self::Columns(set) => set.mend_block(block, is_right).await,
        }
    }

    /// Returns bytes `range`, counted from the beginning of a block, of consecutive blocks of one segment like
    /// [`mend_block`](Self::mend_block).
    pub async fn mend_range(
        &self,
        block: u64,
        range: std::ops::Range<usize>,
        is_right: impl Fn(&[u8]) -> bool,
    ) -> Option<Vec<u8>> {
        match self {
            Self::Single(_) => None,
            Self::Columns(set) => set.mend_range(block, range, is_right).await,
        }
    }

    /// Reads a structure of which every device has a copy at byte `at`, from each device that is used.
    pub async fn read_copies(&self, at: u64, len: usize) -> Vec<Result<Buf>> {
        let failed = |error| Error::from_io(error, format!("reading byte {at} of {}", self.name()));
        match self {
            Self::Single(file) => {
                let (result, bytes) = file.read_at(BufMut::with_capacity(len), at).await;
                vec![result.map(|_| bytes.freeze()).map_err(failed)]
            }
            Self::Columns(set) => {
                let mut out = Vec::new();
                for device in set.written_devices() {
                    let read = device.read(BufMut::with_capacity(len), len, at).await;
                    out.push(read.map(BufMut::freeze).map_err(failed));
                }
                out
            }
        }
    }

    /// Writes a structure of which every device has a copy at byte `at`, durably.
    ///
    /// # Errors
    /// Errors of the device, or of more devices than parity allows.
    pub async fn write_copies(&self, bytes: &Buf, at: u64) -> Result<()> {
        let failed = |error| Error::from_io(error, format!("writing byte {at} of {}", self.name()));
        match self {
            Self::Single(file) => {
                file.write_at(bytes.clone(), at).await.map_err(failed)?;
                file.sync_data().await.map_err(failed)
            }
            Self::Columns(set) => set.write_everywhere(bytes, at).await,
        }
    }
}
