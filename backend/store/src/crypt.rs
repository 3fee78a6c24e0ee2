//! Encryption of data: the master key, the keys of volumes, and the cipher of blocks bound to their places.

mod cipher;
mod master;
#[cfg(test)]
mod tests;
mod volume_keys;

pub use cipher::{BlockCipher, UsePlace};
pub use master::{MasterKey, MasterKeyError};
pub use volume_keys::{KeyStatus, VolumeKeys};
