//! RBD's notifications between clients and metadata encodings, byte for byte: `docs/formats/rbd-image.md`.
//!
//! Decoders are pure functions of untrusted bytes, and allocate no more memory than their input occupies.

pub(crate) mod bitmap;
pub(crate) mod children;
pub mod diff;
pub(crate) mod group;
pub mod image_stream;
pub(crate) mod lock;
pub(crate) mod notify;
pub(crate) mod snapshot;
pub(crate) mod trash;

use std::time::Duration;

/// Decoder of Ceph's encodings: little-endian integers, length-prefixed strings, and structures with a version, the
/// oldest version that can read them, and their length.
#[derive(Clone, Copy)]
pub(crate) struct CephReader<'a> {
    rest: &'a [u8],
}

/// Versioned structure.
pub(crate) struct Versioned<'a> {
    pub(crate) version: u8,
    /// Oldest version that can decode it.
    pub(crate) compat: u8,
    /// Contents, including newer fields at the end.
    pub(crate) body: CephReader<'a>,
}

impl<'a> CephReader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(crate) fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len)?;
        self.rest = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array().map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    pub(crate) fn i64(&mut self) -> Option<i64> {
        self.array().map(i64::from_le_bytes)
    }

    pub(crate) fn bytes(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.take(usize::try_from(len).ok()?)
    }

    pub(crate) fn string(&mut self) -> Option<String> {
        String::from_utf8(self.bytes()?.to_vec()).ok()
    }

    /// Reads a time since 1970-01-01T00:00:00Z.
    pub(crate) fn time(&mut self) -> Option<Duration> {
        let (seconds, nanos) = (self.u32()?, self.u32()?);
        Some(Duration::from_secs(seconds.into()) + Duration::from_nanos(nanos.into()))
    }

    /// Reads an optional value.
    pub(crate) fn optional<T>(&mut self, read: impl FnOnce(&mut Self) -> Option<T>) -> Option<Option<T>> {
        match self.u8()? {
            0 => Some(None),
            _ => read(self).map(Some),
        }
    }

    /// Reads a versioned structure; `None` if its `compat` exceeds `known`.
    pub(crate) fn versioned(&mut self, known: u8) -> Option<Versioned<'a>> {
        let (version, compat) = (self.u8()?, self.u8()?);
        let body = self.bytes()?;
        (compat <= known).then_some(Versioned { version, compat, body: CephReader::new(body) })
    }

    /// Returns the remaining bytes.
    pub(crate) fn rest(&self) -> &'a [u8] {
        self.rest
    }
}

/// Encoder of Ceph's encodings.
#[derive(Default)]
pub(crate) struct CephWriter {
    out: Vec<u8>,
}

impl CephWriter {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn u8(mut self, value: u8) -> Self {
        self.out.push(value);
        self
    }

    pub(crate) fn u32(mut self, value: u32) -> Self {
        self.out.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn u64(mut self, value: u64) -> Self {
        self.out.extend(value.to_le_bytes());
        self
    }

    pub(crate) fn i64(self, value: i64) -> Self {
        self.u64(value as u64)
    }

    pub(crate) fn bytes(mut self, value: &[u8]) -> Self {
        self.out.extend((value.len() as u32).to_le_bytes());
        self.out.extend_from_slice(value);
        self
    }

    pub(crate) fn string(self, value: &str) -> Self {
        self.bytes(value.as_bytes())
    }

    /// Writes a time since 1970-01-01T00:00:00Z; seconds are good until 2106.
    pub(crate) fn time(self, time: Duration) -> Self {
        self.u32(u32::try_from(time.as_secs()).unwrap_or(u32::MAX)).u32(time.subsec_nanos())
    }

    /// Writes a structure with its version, the oldest version that can decode it, and its length.
    pub(crate) fn versioned(self, version: u8, compat: u8, body: CephWriter) -> Self {
        self.u8(version).u8(compat).bytes(&body.out)
    }

    /// Appends bytes without their length.
    pub(crate) fn raw(mut self, bytes: &[u8]) -> Self {
        self.out.extend_from_slice(bytes);
        self
    }

    /// Appends what another encoder has written.
    pub(crate) fn append(self, other: CephWriter) -> Self {
        self.raw(&other.out)
    }

    pub(crate) fn done(self) -> Vec<u8> {
        self.out
    }
}

#[cfg(test)]
pub(crate) fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|byte| !byte.is_ascii_whitespace()).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("text"), 16).expect("hex"))
        .collect()
}
