//! Volumes over the NBD protocol.
