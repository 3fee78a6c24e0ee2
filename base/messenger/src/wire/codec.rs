//! Reading and writing integers, byte strings and counted lists, as Ceph encodes them.

use std::fmt;

/// Malformed payload: truncated, with an impossible length, or with a part that only later releases can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedPayload {
    /// Name of the payload.
    pub what: &'static str,
    /// Versions of the part, if it requires a later release.
    pub newer: Option<NewerEncoding>,
}

/// Versions of a part that requires a later decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewerEncoding {
    /// Version of the encoding.
    pub version: u8,
    /// Oldest decoder version that can read it.
    pub compat: u8,
    /// Newest version supported here.
    pub known: u8,
}

impl fmt::Display for MalformedPayload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(NewerEncoding { version, compat, known }) = self.newer else {
            return write!(f, "{} is malformed", self.what);
        };
        write!(
            f,
            "{} is from a release newer than this build understands: a part of it is encoded in version {version} for \
             readers of version {compat} and later, and {known} is the newest known here",
            self.what
        )
    }
}

impl std::error::Error for MalformedPayload {}

/// Payload reader, from the first byte to the last.
#[derive(Debug, Clone, Copy)]
pub struct PayloadReader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> PayloadReader<'a> {
    /// Creates a reader of `bytes`, which `what` names in errors.
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    /// Returns the error for this payload.
    pub fn malformed(&self) -> MalformedPayload {
        MalformedPayload { what: self.what, newer: None }
    }

    /// Returns the unread bytes.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// Reads `len` bytes.
    #[inline]
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], MalformedPayload> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(self.malformed())?;
        self.rest = rest;
        Ok(head)
    }

    /// Reads `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], MalformedPayload> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(self.malformed())?;
        self.rest = rest;
        Ok(*head)
    }

    /// Reads one byte.
    #[inline]
    pub fn u8(&mut self) -> Result<u8, MalformedPayload> {
        Ok(self.array::<1>()?[0])
    }

    /// Reads a 16-bit integer.
    #[inline]
    pub fn u16(&mut self) -> Result<u16, MalformedPayload> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Reads a 32-bit integer.
    #[inline]
    pub fn u32(&mut self) -> Result<u32, MalformedPayload> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Reads a signed 32-bit integer.
    #[inline]
    pub fn i32(&mut self) -> Result<i32, MalformedPayload> {
        Ok(i32::from_le_bytes(self.array()?))
    }

    /// Reads a 64-bit integer.
    #[inline]
    pub fn u64(&mut self) -> Result<u64, MalformedPayload> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// Reads a byte string: a 32-bit length, then the bytes.
    #[inline]
    pub fn blob(&mut self) -> Result<&'a [u8], MalformedPayload> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    /// Reads a list of 32-bit integers: a 32-bit count, then the integers.
    pub fn list(&mut self) -> Result<Vec<u32>, MalformedPayload> {
        let count = self.u32()? as usize;
        // Checks that all integers are present before memory is allocated for them.
        if count > self.rest.len() / 4 {
            return Err(self.malformed());
        }
        (0..count).map(|_| self.u32()).collect()
    }

    /// Reads a part with a version of its own (`ENCODE_START`): returns its version and a reader of just that part.
    /// Fields appended by a newer version are skipped.
    pub fn versioned(&mut self, known: u8) -> Result<(u8, PayloadReader<'a>), MalformedPayload> {
        let (version, compat, len) = (self.u8()?, self.u8()?, self.u32()?);
        if compat > known {
            let newer = Some(NewerEncoding { version, compat, known });
            return Err(MalformedPayload { newer, ..self.malformed() });
        }
        Ok((version, PayloadReader { rest: self.take(len as usize)?, what: self.what }))
    }
}

/// Payload writer.
#[derive(Debug, Clone, Default)]
pub struct PayloadWriter(Vec<u8>);

impl PayloadWriter {
    /// Creates an empty writer.
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an empty writer with a capacity of `len` bytes.
    pub fn with_capacity(len: usize) -> Self {
        Self(Vec::with_capacity(len))
    }

    /// Returns the bytes.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    /// Returns the number of bytes written.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if no bytes were written.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends bytes as they are.
    #[inline]
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends one byte.
    #[inline]
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.raw(&[value])
    }

    /// Appends a 16-bit integer.
    #[inline]
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends a 32-bit integer.
    #[inline]
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends a signed 32-bit integer.
    #[inline]
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends a 64-bit integer.
    #[inline]
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends a byte string behind its 32-bit length.
    ///
    /// # Panics
    /// When it is longer than a 32-bit length can state.
    #[inline]
    pub fn blob(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).expect("a byte string below 4 GiB")).raw(bytes)
    }

    /// Appends a list of 32-bit integers behind its count.
    pub fn list(&mut self, numbers: &[u32]) -> &mut Self {
        self.u32(numbers.len() as u32);
        for &number in numbers {
            self.u32(number);
        }
        self
    }

    /// Appends a part with a version of its own.
    ///
    /// # Panics
    /// When it is longer than a 32-bit length can state.
    pub fn versioned(&mut self, version: u8, compat: u8, part: impl FnOnce(&mut PayloadWriter)) -> &mut Self {
        self.u8(version).u8(compat).u32(0);
        let begin = self.0.len();
        part(self);
        let len = u32::try_from(self.0.len() - begin).expect("a part below 4 GiB");
        self.0[begin - 4..begin].copy_from_slice(&len.to_le_bytes());
        self
    }
}
