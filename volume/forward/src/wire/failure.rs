//! Errors of an owner's device, as they cross the wire.

use forebay_block::{Error, ErrorKind};
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::TEXT_MAX;
use super::fields::{read_text, write_text};

/// Cause of an error of the owner: the text of its source.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct RemoteCause(pub String);

/// Kinds by their codes, from 1 on.  The payload of `Mismatch` is a field of its own.
const KINDS: [ErrorKind; 16] = [
    ErrorKind::NotFound,
    ErrorKind::Exists,
    ErrorKind::NoSpace,
    ErrorKind::Io,
    ErrorKind::Corrupt,
    ErrorKind::ReadOnly,
    ErrorKind::OutOfRange,
    ErrorKind::Invalid,
    ErrorKind::Busy,
    ErrorKind::Mismatch(0),
    ErrorKind::Guard,
    ErrorKind::TimedOut,
    ErrorKind::Fenced,
    ErrorKind::Unsupported,
    ErrorKind::ShuttingDown,
    ErrorKind::Denied,
];

/// Returns the code of a kind, and its number.
fn code(kind: ErrorKind) -> (u8, u64) {
    match kind {
        ErrorKind::NotFound => (1, 0),
        ErrorKind::Exists => (2, 0),
        ErrorKind::NoSpace => (3, 0),
        ErrorKind::Io => (4, 0),
        ErrorKind::Corrupt => (5, 0),
        ErrorKind::ReadOnly => (6, 0),
        ErrorKind::OutOfRange => (7, 0),
        ErrorKind::Invalid => (8, 0),
        ErrorKind::Busy => (9, 0),
        ErrorKind::Mismatch(at) => (10, at),
        ErrorKind::Guard => (11, 0),
        ErrorKind::TimedOut => (12, 0),
        ErrorKind::Fenced => (13, 0),
        ErrorKind::Unsupported => (14, 0),
        ErrorKind::ShuttingDown => (15, 0),
        ErrorKind::Denied => (16, 0),
    }
}

pub(super) fn write_error(writer: &mut PayloadWriter, error: &Error) {
    let (code, number) = code(error.kind());
    writer.u8(code).u64(number);
    write_text(writer, error.context(), TEXT_MAX);
    let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    write_text(writer, &cause, TEXT_MAX);
}

/// Reads an error; a kind of a later version becomes `Io`.
pub(super) fn read_error(reader: &mut PayloadReader<'_>) -> Result<Error, MalformedPayload> {
    let (code, number) = (reader.u8()?, reader.u64()?);
    let kind = match usize::from(code).checked_sub(1).and_then(|at| KINDS.get(at)) {
        Some(ErrorKind::Mismatch(_)) => ErrorKind::Mismatch(number),
        Some(kind) => *kind,
        None => ErrorKind::Io,
    };
    let error = Error::new(kind, read_text(reader, TEXT_MAX)?);
    let cause = read_text(reader, TEXT_MAX)?;
    Ok(if cause.is_empty() { error } else { error.with_source(RemoteCause(cause)) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_the_code_of_its_place() {
        for (at, kind) in KINDS.into_iter().enumerate() {
            assert_eq!(code(kind), (at as u8 + 1, 0), "{kind:?}");
        }
    }

    #[test]
    fn kinds_of_later_versions_are_io_errors_with_their_text() {
        let mut writer = PayloadWriter::new();
        writer.u8(99).u64(7).blob(b"it happened").blob(b"the moon");
        let error = read_error(&mut PayloadReader::new(&writer.finish(), "an error")).expect("readable");
        assert_eq!((error.kind(), error.context()), (ErrorKind::Io, "it happened"));
        assert_eq!(format!("{error:?}"), "it happened: input/output error (the moon)");
    }
}
