//! Ceph encodings beyond integers and byte strings: text, counted collections, versioned parts.

use forebay_messenger::wire::{MalformedPayload, PayloadReader, PayloadWriter};

/// Extension methods for decoding payloads.
pub(crate) trait ReaderExt<'a> {
    /// Reads a signed 64-bit integer.
    fn i64(&mut self) -> Result<i64, MalformedPayload>;
    /// Reads a boolean byte: zero or nonzero.
    fn flag(&mut self) -> Result<bool, MalformedPayload>;
    /// Reads text, which must be UTF-8.
    fn text(&mut self) -> Result<String, MalformedPayload>;
    /// Reads an element count. Rejects counts that exceed the remaining bytes at `least` bytes per element.
    fn count(&mut self, least: usize) -> Result<usize, MalformedPayload>;
    /// Reads a counted collection: each element is decoded by `read` and passed to `keep`.
    fn map<T>(
        &mut self,
        read: impl FnMut(&mut PayloadReader<'a>) -> Result<T, MalformedPayload>,
        keep: impl FnMut(T),
    ) -> Result<(), MalformedPayload>;
    /// Reads a counted collection into a vector.
    fn vec<T>(
        &mut self,
        read: impl FnMut(&mut PayloadReader<'a>) -> Result<T, MalformedPayload>,
    ) -> Result<Vec<T>, MalformedPayload>;
    /// Reads a part with its own version, which may be newer than `known` if still compatible. Returns the part's
    /// version and its content.
    fn part(&mut self, known: u8) -> Result<(u8, PayloadReader<'a>), MalformedPayload>;
}

impl<'a> ReaderExt<'a> for PayloadReader<'a> {
    fn i64(&mut self) -> Result<i64, MalformedPayload> {
        Ok(self.u64()? as i64)
    }

    fn flag(&mut self) -> Result<bool, MalformedPayload> {
        Ok(self.u8()? != 0)
    }

    fn text(&mut self) -> Result<String, MalformedPayload> {
        let bytes = self.blob()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| self.malformed())
    }

    fn count(&mut self, least: usize) -> Result<usize, MalformedPayload> {
        let count = self.u32()? as usize;
        if count > self.rest().len() / least.max(1) { Err(self.malformed()) } else { Ok(count) }
    }

    fn map<T>(
        &mut self,
        mut read: impl FnMut(&mut PayloadReader<'a>) -> Result<T, MalformedPayload>,
        mut keep: impl FnMut(T),
    ) -> Result<(), MalformedPayload> {
        // Every element has at least one byte.
        for _ in 0..self.count(1)? {
            keep(read(self)?);
        }
        Ok(())
    }

    fn vec<T>(
        &mut self,
        read: impl FnMut(&mut PayloadReader<'a>) -> Result<T, MalformedPayload>,
    ) -> Result<Vec<T>, MalformedPayload> {
        let mut all = Vec::new();
        self.map(read, |one| all.push(one))?;
        Ok(all)
    }

    fn part(&mut self, known: u8) -> Result<(u8, PayloadReader<'a>), MalformedPayload> {
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

impl WriterExt for PayloadWriter {
    fn text(&mut self, text: &str) -> &mut Self {
        self.blob(text.as_bytes())
    }

    fn i64(&mut self, value: i64) -> &mut Self {
        self.u64(value as u64)
    }
}
