//! Reading and writing integers, byte strings and counted lists, as Ceph encodes them.

/// A payload that ends too early or states an impossible length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} is malformed")]
pub struct Malformed {
    /// What was being read.
    pub what: &'static str,
}

/// Reads a payload from its first byte to its last.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Reader<'a> {
    /// Reads `bytes`, which are a `what`.
    pub fn new(bytes: &'a [u8], what: &'static str) -> Self {
        Self { rest: bytes, what }
    }

    /// The error for this payload.
    pub fn malformed(&self) -> Malformed {
        Malformed { what: self.what }
    }

    /// What is left.
    #[inline]
    pub fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// The next `len` bytes.
    #[inline]
    pub fn take(&mut self, len: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.rest.split_at_checked(len).ok_or(self.malformed())?;
        self.rest = rest;
        Ok(head)
    }

    /// The next `N` bytes.
    #[inline]
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.rest.split_first_chunk::<N>().ok_or(self.malformed())?;
        self.rest = rest;
        Ok(*head)
    }

    /// One byte.
    #[inline]
    pub fn u8(&mut self) -> Result<u8, Malformed> {
        Ok(self.array::<1>()?[0])
    }

    /// Two bytes.
    #[inline]
    pub fn u16(&mut self) -> Result<u16, Malformed> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    /// Four bytes.
    #[inline]
    pub fn u32(&mut self) -> Result<u32, Malformed> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    /// Four bytes, signed.
    #[inline]
    pub fn i32(&mut self) -> Result<i32, Malformed> {
        Ok(i32::from_le_bytes(self.array()?))
    }

    /// Eight bytes.
    #[inline]
    pub fn u64(&mut self) -> Result<u64, Malformed> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    /// A byte string: its length in four bytes, then the bytes.
    #[inline]
    pub fn blob(&mut self) -> Result<&'a [u8], Malformed> {
        let len = self.u32()?;
        self.take(len as usize)
    }

    /// A list of 32-bit numbers: how many in four bytes, then the numbers.
    pub fn list(&mut self) -> Result<Vec<u32>, Malformed> {
        let count = self.u32()? as usize;
        // The numbers must all be there before room is made for them.
        if count > self.rest.len() / 4 {
            return Err(self.malformed());
        }
        (0..count).map(|_| self.u32()).collect()
    }

    /// A part with a version of its own (`ENCODE_START`): its version and a reader of just that part.  What a newer
    /// version appends is passed over.
    pub fn versioned(&mut self, known: u8) -> Result<(u8, Reader<'a>), Malformed> {
        let (version, compat, len) = (self.u8()?, self.u8()?, self.u32()?);
        if compat > known {
            return Err(self.malformed());
        }
        Ok((version, Reader { rest: self.take(len as usize)?, what: self.what }))
    }
}

/// Writes a payload.
#[derive(Debug, Clone, Default)]
pub struct Writer(Vec<u8>);

impl Writer {
    /// Nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Nothing yet, with room for so many bytes.
    pub fn with_capacity(len: usize) -> Self {
        Self(Vec::with_capacity(len))
    }

    /// The bytes.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }

    /// Bytes so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Nothing yet.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends bytes as they are.
    #[inline]
    pub fn raw(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend_from_slice(bytes);
        self
    }

    /// Appends a byte.
    #[inline]
    pub fn u8(&mut self, value: u8) -> &mut Self {
        self.raw(&[value])
    }

    /// Appends two bytes.
    #[inline]
    pub fn u16(&mut self, value: u16) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends four bytes.
    #[inline]
    pub fn u32(&mut self, value: u32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends four bytes, signed.
    #[inline]
    pub fn i32(&mut self, value: i32) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends eight bytes.
    #[inline]
    pub fn u64(&mut self, value: u64) -> &mut Self {
        self.raw(&value.to_le_bytes())
    }

    /// Appends a byte string with its length.
    ///
    /// # Panics
    /// When it is longer than the four bytes of its length can say.
    #[inline]
    pub fn blob(&mut self, bytes: &[u8]) -> &mut Self {
        self.u32(u32::try_from(bytes.len()).expect("a byte string below 4 GiB")).raw(bytes)
    }

    /// Appends a list of numbers with its length.
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
    /// When it is longer than the four bytes of its length can say.
    pub fn versioned(&mut self, version: u8, compat: u8, part: impl FnOnce(&mut Writer)) -> &mut Self {
        self.u8(version).u8(compat).u32(0);
        let begin = self.0.len();
        part(self);
        let len = u32::try_from(self.0.len() - begin).expect("a part below 4 GiB");
        self.0[begin - 4..begin].copy_from_slice(&len.to_le_bytes());
        self
    }
}
