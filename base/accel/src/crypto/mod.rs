//! Encryption: XTS for what is stored, GCM for what travels.
