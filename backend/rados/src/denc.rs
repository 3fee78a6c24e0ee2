//! What Ceph's encodings have besides integers and byte strings: text, counted collections, times, versions.

use forebay_messenger::wire::{Malformed, Reader, Writer};

/// More ways to read a payload.
pub(crate) trait ReaderExt<'a> {
    /// Eight bytes, signed.
    fn i64(&mut self) -> Result<i64, Malformed>;
    /// One byte: zero or not.
    fn flag(&mut self) -> Result<bool, Malformed>;
    /// Text, which must be UTF-8.
    fn text(&mut self) -> Result<String, Malformed>;
    /// A count of things of at least `least` bytes each: no more than can be there.
    fn count(&mut self, least: usize) -> Result<usize, Malformed>;
    /// A counted collection, each element read by `read` and given to `keep`.
    fn map<T>(
        &mut self,
        read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>,
        keep: impl FnMut(T),
    ) -> Result<(), Malformed>;
    /// A counted collection.
    fn vec<T>(&mut self, read: impl FnMut(&mut Reader<'a>) -> Result<T, Malformed>) -> Result<Vec<T>, Malformed>;
    /// A part with a version of its own that may be any newer one which this can still read; the part's version.
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
        // Whatever it is, it has at least a byte.
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

/// More ways to write a payload.
pub(crate) trait WriterExt {
    /// Appends text.
    fn text(&mut self, text: &str) -> &mut Self;
    /// Appends eight bytes, signed.
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
