//! Chunks in parts: walks scattered chunks side by side, in runs over which all of them are contiguous.

use super::code::CodeError;

/// Chunk to read, walked part by part.
struct Reader<'a> {
    parts: std::slice::Iter<'a, &'a [u8]>,
    rest: &'a [u8],
}

/// Chunk to write, walked part by part.
struct Writer<'a, 'b> {
    parts: std::slice::IterMut<'a, &'b mut [u8]>,
    at: *mut u8,
    left: usize,
}

/// Returns the length of every chunk, which must be the same for all.
pub(crate) fn common_len(mut lens: impl Iterator<Item = usize>) -> Result<usize, CodeError> {
    let len = lens.next().unwrap_or(0);
    match lens.find(|&other| other != len) {
        Some(other) => Err(CodeError::Length { expected: len, found: other }),
        None => Ok(len),
    }
}

/// Returns the number of bytes in all parts of a chunk.
pub(crate) fn parts_len<P: std::ops::Deref<Target = [u8]>>(parts: &[P]) -> usize {
    parts.iter().map(|part| part.len()).sum()
}

/// Calls `run` with pointers to each chunk's next bytes, as many as are contiguous in all of them, to their end.
///
/// Requires chunks of the same length.  The pointers passed to `run` are valid for the number of bytes passed with
/// them, and the written ones overlap nothing else, since they come from exclusive references.
pub(crate) fn walk<'a, 'b: 'a>(
    sources: impl Iterator<Item = &'a [&'a [u8]]>,
    outputs: impl Iterator<Item = &'a mut [&'b mut [u8]]>,
    mut run: impl FnMut(&[*const u8], &[*mut u8], usize),
) {
    let mut readers: Vec<Reader<'_>> = sources.map(|parts| Reader { parts: parts.iter(), rest: &[] }).collect();
    let mut writers: Vec<Writer<'_, '_>> =
        outputs.map(|parts| Writer { parts: parts.iter_mut(), at: std::ptr::null_mut(), left: 0 }).collect();
    let mut inputs = vec![std::ptr::null(); readers.len()];
    let mut targets = vec![std::ptr::null_mut(); writers.len()];
    loop {
        let mut count = usize::MAX;
        for (reader, input) in readers.iter_mut().zip(&mut inputs) {
            while reader.rest.is_empty() {
                let Some(part) = reader.parts.next() else { return };
                reader.rest = part;
            }
            *input = reader.rest.as_ptr();
            count = count.min(reader.rest.len());
        }
        for (writer, target) in writers.iter_mut().zip(&mut targets) {
            while writer.left == 0 {
                let Some(part) = writer.parts.next() else { return };
                (writer.at, writer.left) = (part.as_mut_ptr(), part.len());
            }
            *target = writer.at;
            count = count.min(writer.left);
        }
        run(&inputs, &targets, count);
        for reader in &mut readers {
            reader.rest = &reader.rest[count..];
        }
        for writer in &mut writers {
            writer.at = writer.at.wrapping_add(count);
            writer.left -= count;
        }
    }
}
