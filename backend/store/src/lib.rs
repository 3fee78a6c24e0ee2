//! The embedded object store: log-structured, checksummed.
