//! Ceph encodings beyond integers and byte strings: text, counted collections, versioned parts.

use forebay_messenger::wire::{Malformed, Reader, Writer};

/// Extension methods for decoding payloads.
pub(crate) trait ReaderExt<'a> {
    /// Reads a signed 64-bit integer.
    fn i64(&mut self) -> Result<i64, Malformed>;
    /// Reads a boolean byte: zero or nonzero.
    fn flag(&mut self) -> Result<bool, Malformed>;
    /// Reads text, which must be UTF-8.
    fn text(&mut self) -> Result<String, Malformed>;
    /// Reads an element count. Rejects counts that exceed the remaining bytes at `least` bytes per element.
    fn count(&mut self, least: usize) -> Result<usize, Malformed>;
    /// Reads a counted collection: each element is decoded by `read` and passed to `keep`.
    fn map<T>(
        &mut self,
        read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>,
        keep: impl FnMut(T),
    ) -> Result<(), Malformed>;
    /// Reads a counted collection into a vector.
    fn vec<T>(&mut self, read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>) -> Result<Vec<T>, Malformed>;
    /// Reads a part with its own version, which may be newer than `known` if still compatible. Returns the part's
    /// version and its content.
    fn part(&mut self, known: u8) -> Result<(u8, Reader<'a>), Malformed>;
}

impl<'a> ReaderExt<'a> for Reader<'a> {
    fn i64(&mut self) -> Result<i64, Malformed> {
        Ok(self.u64()? as i64)
    }

    fn flag(&mut self) -> Result<bool, Malformed> {
        Ok(self.u8()? != 0)
    }

    fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.blob()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.malformed())
    }

    fn count(&mut self, least: usize) -> Result<usize, Malformed> {
        let count = self.u32()? as usize;
        if count > self.rest().len() / least.max(1) { Err(self.malformed()) } else { Ok(count) }
    }

    fn map<T>(
        &mut self,
        mut read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>,
        mut keep: impl FnMut(T),
    ) -> Result<(), Malformed> {
        // Every element has at least one byte.
        for _ in 0..self.count(1)? {
            keep(read(self)?);
        }
        Ok(())
    }

    fn vec<T>(&mut self, read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>) -> Result<Vec<T>, Malformed> {
        let mut all = Vec::new();
        self.map(read, |one| all.push(one))?;
        Ok(all)
    }

    fn part(&mut self, known: u8) -> Result<(u8, Reader<'a>), Malformed> {
        self.versioned(known)
    }
}

/// Extension methods for encoding payloads.
pub(crate) trait WriterExt {
    /// Appends text.
    fn text(&mut self, text: &str) -> &mut Self;
    /// Appends a signed 64-bit integer.
    fn i64(&mut self, value: i64) -> &mut Self;
}

impl WriterExt for Writer {
    fn text(&mut self, text: &str) -> &mut Self {
        self.blob(text.as_bytes())
    }

    fn i64(&mut self, value: i64) -> &mut Self {
        self.u64(value as u64)
    }
}
