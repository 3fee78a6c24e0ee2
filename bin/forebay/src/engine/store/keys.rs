//! Keys of encrypted images in the embedded store.

use crate::api::{RotateKeyRequest, StoreKeys};
use crate::engine::Engine;
use crate::failure::{Failure, Result};
use crate::master_key::MasterKeySource;

impl Engine {
    /// Returns the state of the keys of encrypted images.
    pub fn store_keys(&self) -> Result<StoreKeys> {
        Ok(self.opened_store()?.key_status().into())
    }

    /// Wraps the keys of encrypted images by the master key of another source.
    ///
    /// # Errors
    /// When the source has no key; when the store was opened without its current one.
    pub async fn rotate_master_key(&self, request: &RotateKeyRequest) -> Result<StoreKeys> {
        let source: MasterKeySource = request.to.parse().map_err(Failure::invalid)?;
        if let MasterKeySource::Env(name) = &source {
            let text = format!("{source}: a running daemon does not see a new value of {name}");
            return Err(Failure::invalid(text).hint("name a file or a command: file:PATH, command:COMMAND"));
        }
        let status = self.opened_store()?.rotate_master_key(&source.load()?).await.map_err(Failure::from)?;
        tracing::info!(%source, images = status.keys, "the master key was rotated");
        Ok(status.into())
    }
}
