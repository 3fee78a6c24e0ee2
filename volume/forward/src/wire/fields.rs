//! Fields that several messages have.

use std::time::Duration;

use forebay_block::{Advice, Extent, Geometry};
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::LEASES;

/// Advice flags in the order of their bits on the wire.
const ADVICE: [Advice; 5] =
    [Advice::RANDOM, Advice::SEQUENTIAL, Advice::WILL_NEED, Advice::DONT_NEED, Advice::NO_CACHE];

/// Reads a text of at most `max` bytes.
pub(super) fn read_text(reader: &mut PayloadReader<'_>, max: usize) -> Result<String, MalformedPayload> {
    let bytes = reader.blob()?;
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= max);
    text.map(str::to_owned).ok_or(reader.malformed())
}

/// Writes a text, cut to `max` bytes.
pub(super) fn write_text(writer: &mut PayloadWriter, text: &str, max: usize) {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    writer.blob(&text.as_bytes()[..end]);
}

pub(super) fn read_flag(reader: &mut PayloadReader<'_>) -> Result<bool, MalformedPayload> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(reader.malformed()),
    }
}

/// Reads an extent whose end does not overflow.
pub(super) fn read_extent(reader: &mut PayloadReader<'_>) -> Result<Extent, MalformedPayload> {
    let extent = Extent::new(reader.u64()?, reader.u64()?);
    extent.checked_end().map(|_| extent).ok_or(reader.malformed())
}

pub(super) fn write_extent(writer: &mut PayloadWriter, extent: Extent) {
    writer.u64(extent.offset).u64(extent.len);
}

pub(super) fn read_geometry(reader: &mut PayloadReader<'_>) -> Result<Geometry, MalformedPayload> {
    let (size, block_size, preferred_io) = (reader.u64()?, reader.u32()?, reader.u32()?);
    let (transfer_max, read_only) = (reader.u32()?, read_flag(reader)?);
    if block_size == 0 || preferred_io == 0 || transfer_max < block_size {
        return Err(reader.malformed());
    }
    Ok(Geometry { size, block_size, preferred_io, transfer_max, read_only })
}

pub(super) fn write_geometry(writer: &mut PayloadWriter, geometry: &Geometry) {
    writer.u64(geometry.size).u32(geometry.block_size).u32(geometry.preferred_io);
    writer.u32(geometry.transfer_max).u8(u8::from(geometry.read_only));
}

/// Reads advice.  Flags of later versions are ignored, as advice changes no result.
pub(super) fn read_advice(reader: &mut PayloadReader<'_>) -> Result<Advice, MalformedPayload> {
    let bits = reader.u8()?;
    let set = ADVICE.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1);
    Ok(set.fold(Advice::NONE, |all, (_, advice)| all | *advice))
}

pub(super) fn write_advice(writer: &mut PayloadWriter, advice: Advice) {
    let set = ADVICE.iter().enumerate().filter(|(_, flag)| advice.has(**flag));
    writer.u8(set.fold(0, |bits, (bit, _)| bits | 1 << bit));
}

/// Reads a lease, which must be one that sessions may have.
pub(super) fn read_lease(reader: &mut PayloadReader<'_>) -> Result<Duration, MalformedPayload> {
    let lease = Duration::from_millis(u64::from(reader.u32()?));
    if LEASES.contains(&lease) { Ok(lease) } else { Err(reader.malformed()) }
}

/// Writes a lease, in milliseconds.
pub(super) fn write_lease(writer: &mut PayloadWriter, lease: Duration) {
    writer.u32(lease.clamp(*LEASES.start(), *LEASES.end()).as_millis() as u32);
}

/// Requires that all bytes have been read.
pub(super) fn read_end(reader: &PayloadReader<'_>) -> Result<(), MalformedPayload> {
    if reader.rest().is_empty() { Ok(()) } else { Err(reader.malformed()) }
}
