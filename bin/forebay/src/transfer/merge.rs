//! Two successive diffs as one, as `rbd merge-diff` makes it.

use forebay_image::diff::{DiffDecoder, DiffError, DiffEvent, DiffVersion};

use super::stream_file::{StreamFile, StreamSource};
use crate::failure::{Failure, Result};

/// Bytes read at once from each of the diffs.
const BUFFER_LEN: usize = 1 << 20;

/// Head of a diff: what comes before its ranges.
#[derive(Debug, Default)]
struct DiffHead {
    from: Option<String>,
    to: Option<String>,
    size: Option<u64>,
}

/// Range of a diff, or what is left of it.
#[derive(Debug, Clone, Copy)]
struct DiffRange {
    offset: u64,
    len: u64,
    /// Set if it has data; otherwise it reads as zeroes.
    data: bool,
}

/// Part of a diff.
enum DiffPart {
    Range(DiffRange),
    End,
}

/// Diff that is read range by range, each cut where the reader's buffer ends.
struct DiffReader {
    source: StreamSource,
    decoder: DiffDecoder,
    buf: Vec<u8>,
    /// Undecoded bytes of the buffer.
    unread: std::ops::Range<usize>,
    head: DiffHead,
    size: u64,
    /// Current range; empty when the next is to be read.
    range: DiffRange,
    /// Data of the range that was read last; that of the current range begins at `used`.
    data: Vec<u8>,
    used: usize,
    /// Set once the end record is read.
    exhausted: bool,
    /// Range to add at the end.
    tail: Option<DiffRange>,
    /// Set once there is no current range, and none will follow.
    ended: bool,
    /// First part after the head.
    first: Option<DiffPart>,
}

impl DiffReader {
    /// Opens a diff and reads its head.
    fn open(source: StreamSource) -> Result<Self> {
        let range = DiffRange { offset: 0, len: 0, data: false };
        let mut reader = Self {
            source,
            decoder: DiffDecoder::new(),
            buf: vec![0; BUFFER_LEN],
            unread: 0..0,
            head: DiffHead::default(),
            size: 0,
            range,
            data: Vec::new(),
            used: 0,
            exhausted: false,
            tail: None,
            ended: false,
            first: None,
        };
        reader.first = Some(reader.part()?);
        let what = format!("{}: the diff does not say the size of the image before its ranges", reader.source.shown);
        reader.size = reader.head.size.ok_or_else(|| Failure::invalid(what))?;
        Ok(reader)
    }

    fn malformed(&self, error: &DiffError) -> Failure {
        let failure = Failure::invalid(format!("{}: {error} (at byte {})", self.source.shown, self.source.position));
        match error {
            DiffError::Truncated => failure.hint("it was cut off when it was written or copied; make it again"),
            DiffError::Magic => failure.hint("'forebay export-diff' and 'rbd export-diff' write diffs"),
            _ => failure,
        }
    }

    /// Reads the next range into `self.data`, or the end; what else comes goes to the head.
    fn part(&mut self) -> Result<DiffPart> {
        loop {
            let mut input = &self.buf[self.unread.clone()];
            let event = self.decoder.next(&mut input);
            let left = input.len();
            let decoded = match event {
                Ok(Some(DiffEvent::Data(offset, bytes))) => {
                    self.data.clear();
                    self.data.extend_from_slice(bytes);
                    self.used = 0;
                    Ok(Some(DiffPart::Range(DiffRange { offset, len: bytes.len() as u64, data: true })))
                }
                Ok(Some(DiffEvent::Zero(offset, len))) if len > 0 => {
                    Ok(Some(DiffPart::Range(DiffRange { offset, len, data: false })))
                }
                Ok(Some(DiffEvent::Zero(..) | DiffEvent::Protected(_))) => Ok(None),
                Ok(Some(DiffEvent::End)) => Ok(Some(DiffPart::End)),
                Ok(Some(DiffEvent::From(name))) => {
                    self.head.from = Some(name);
                    Ok(None)
                }
                Ok(Some(DiffEvent::To(name))) => {
                    self.head.to = Some(name);
                    Ok(None)
                }
                Ok(Some(DiffEvent::Size(size))) => {
                    self.head.size = Some(size);
                    Ok(None)
                }
                Ok(Some(DiffEvent::Changed(..) | DiffEvent::Failure(_))) => Err(DiffError::Truncated),
                Ok(None) => {
                    let got = self.source.read(&mut self.buf)?;
                    self.unread = 0..got;
                    match got {
                        0 => Err(DiffError::Truncated),
                        _ => continue,
                    }
                }
                Err(error) => Err(error),
            };
            self.unread.start = self.unread.end - left;
            match decoded {
                Ok(Some(part)) => return Ok(part),
                Ok(None) => {}
                Err(error) => return Err(self.malformed(&error)),
            }
        }
    }

    /// Makes the next range the current one, if that is used up.
    fn advance(&mut self) -> Result<()> {
        if self.ended || self.range.len > 0 {
            return Ok(());
        }
        if self.exhausted {
            match self.tail.take() {
                Some(tail) => self.range = tail,
                None => self.ended = true,
            }
            return Ok(());
        }
        let part = match self.first.take() {
            Some(part) => part,
            None => self.part()?,
        };
        match part {
            DiffPart::End => {
                self.exhausted = true;
                return self.advance();
            }
            DiffPart::Range(range) => {
                let end = range.offset.checked_add(range.len).filter(|&end| end <= self.size);
                if end.is_none() {
                    let what =
                        format!("{} bytes at {}, past the image's end at {}", range.len, range.offset, self.size);
                    return Err(Failure::invalid(format!("{}: the diff has {what}", self.source.shown)));
                }
                if range.offset < self.range.offset {
                    let what = format!("{} after {}", range.offset, self.range.offset);
                    return Err(Failure::invalid(format!(
                        "{}: the ranges are not in order: {what}",
                        self.source.shown
                    ))
                    .hint("'forebay export-diff' writes them in order"));
                }
                self.range = range;
            }
        }
        Ok(())
    }

    /// Uses up the first bytes of the current range.
    fn skip(&mut self, len: u64) {
        if self.range.data {
            self.used += len as usize;
        }
        self.range.offset += len;
        self.range.len -= len;
    }

    /// Writes the first bytes of the current range, and uses them up.
    fn copy(&mut self, len: u64, out: &mut StreamFile) -> Result<()> {
        let mut head = Vec::new();
        match self.range.data {
            true => {
                DiffVersion::V1.put_data_head(&mut head, self.range.offset, len);
                out.write(&head)?;
                out.write(&self.data[self.used..][..len as usize])?;
            }
            false => {
                DiffVersion::V1.put_zero(&mut head, self.range.offset, len);
                out.write(&head)?;
            }
        }
        self.skip(len);
        Ok(())
    }
}

/// Merges two diffs, of which the second begins where the first ends; `progress` is called with the bytes that were read.
pub fn merge(
    first: StreamSource,
    second: StreamSource,
    out: impl FnOnce() -> Result<StreamFile>,
    mut progress: impl FnMut(u64),
) -> Result<()> {
    let (mut first, mut second) = (DiffReader::open(first)?, DiffReader::open(second)?);
    if first.head.to != second.head.from {
        let name = |name: &Option<String>| name.as_ref().map_or("no snapshot".to_owned(), |name| format!("'{name}'"));
        let what = format!(
            "the first diff leads to {}, and the second begins at {}",
            name(&first.head.to),
            name(&second.head.from)
        );
        return Err(Failure::invalid(what).hint("name them in the order in which they were made, without a gap"));
    }
    let mut out = out()?;
    let mut head = DiffVersion::V1.magic().to_vec();
    if let Some(name) = &first.head.from {
        DiffVersion::V1.put_from(&mut head, name);
    }
    if let Some(name) = &second.head.to {
        DiffVersion::V1.put_to(&mut head, name);
    }
    DiffVersion::V1.put_size(&mut head, second.size);
    out.write(&head)?;
    // What the image lost between both diffs, and got again, reads as zeroes.
    let lost = DiffRange { offset: first.size, len: second.size.saturating_sub(first.size), data: false };
    first.tail = Some(lost).filter(|lost| lost.len > 0);
    loop {
        first.advance()?;
        second.advance()?;
        progress(first.source.position + second.source.position);
        // Nothing of the first is left past the end of the image.
        let (start, end) = match second.ended {
            true => (second.size, u64::MAX),
            false => (second.range.offset, second.range.offset + second.range.len),
        };
        if !first.ended && first.range.offset < end {
            let len = match first.range.offset < start {
                true => {
                    let len = first.range.len.min(start - first.range.offset);
                    first.copy(len, &mut out)?;
                    continue;
                }
                // The second has these bytes.
                false => first.range.len.min(end - first.range.offset),
            };
            first.skip(len);
            continue;
        }
        if second.ended {
            break;
        }
        second.copy(second.range.len, &mut out)?;
    }
    out.write(b"e")?;
    out.finish()
}
