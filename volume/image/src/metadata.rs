//! Metadata values of an image, as listed by `rbd image-meta`.

use forebay_block::{Error, ErrorKind, ObjectOp, Result, Transaction};

use crate::format::metadata_key;
use crate::image::Image;

/// Longest value in bytes.
pub const METADATA_VALUE_MAX: usize = 1 << 20;

impl Image {
    /// Returns the value of a key, if it is set.
    pub async fn metadata(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let shared = self.shared();
        shared.check_there()?;
        let mut values = shared.backend().kv_get(&shared.header_object(), vec![metadata_key(key)]).await?;
        Ok(values.pop().flatten())
    }

    /// Sets the value of a key, durably; `None` removes it.
    ///
    /// Fails with `ReadOnly` on a read-only handle, and with `Invalid` for more than [`METADATA_VALUE_MAX`] bytes.
    pub async fn set_metadata(&self, key: &str, value: Option<Vec<u8>>) -> Result<()> {
        self.change_metadata(key, Vec::new(), value).await
    }

    /// Replaces the value of a key, durably, if it is `expected` (`None`: if it is not set). Returns whether it was.
    ///
    /// Fails as [`set_metadata`](Self::set_metadata). After another error it is unknown whether it was replaced.
    pub async fn replace_metadata(&self, key: &str, expected: Option<Vec<u8>>, value: Option<Vec<u8>>) -> Result<bool> {
        let guard = ObjectOp::KvCompare { key: metadata_key(key), value: expected };
        match self.change_metadata(key, vec![guard], value).await {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Guard => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn change_metadata(&self, key: &str, guards: Vec<ObjectOp>, value: Option<Vec<u8>>) -> Result<()> {
        let shared = self.shared();
        shared.check_there()?;
        if self.is_read_only() {
            let what = format!("image {} is open for reading only", self.name());
            return Err(Error::new(ErrorKind::ReadOnly, what));
        }
        let key = metadata_key(key);
        let change = match value {
            Some(value) if value.len() > METADATA_VALUE_MAX => {
                let what = format!("image {}: a value of {} bytes", self.name(), value.len());
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            Some(value) => ObjectOp::KvSet { pairs: vec![(key, value)] },
            None => ObjectOp::KvRemove { keys: vec![key] },
        };
        // A removed header must not be recreated with only this key.
        let ops = [vec![ObjectOp::AssertExists], guards, vec![change]].concat();
        let change = Transaction::new(ops).durable();
        shared.backend().submit(&shared.header_object(), change).await.map(drop)
    }
}
