//! Several requests in one message, and their answers in one.

use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::{ReplicaAnswer, ReplicaRequest};

/// Message type of several requests.
pub const KIND_GROUP: u16 = 0x0105;
/// Message type of their answers.
pub const KIND_GROUP_ANSWER: u16 = 0x0106;
/// Maximum number of requests in a message.
pub const GROUP_REQUESTS_MAX: usize = 1024;
/// Bytes of data from which on a message gets no further request.
pub const GROUP_DATA_MAX: usize = 1 << 20;

/// Encodes requests and the lengths of their data.
pub fn encode_group(requests: &[(&ReplicaRequest, usize)]) -> Vec<u8> {
    let mut writer = PayloadWriter::new();
    writer.u16(requests.len() as u16);
    for (request, len) in requests {
        writer.blob(&request.encode()).u32(*len as u32);
    }
    writer.finish()
}

/// Decodes requests and the lengths of their data, which has `data` bytes in all.
///
/// # Errors
/// If they are malformed, or the lengths are not those of the data.
pub fn decode_group(bytes: &[u8], data: usize) -> Result<Vec<(ReplicaRequest, usize)>, MalformedPayload> {
    let mut reader = PayloadReader::new(bytes, "requests to a replica of a write log");
    let count = usize::from(reader.u16()?);
    if count > GROUP_REQUESTS_MAX {
        return Err(reader.malformed());
    }
    let mut requests = Vec::with_capacity(count);
    let mut rest = data;
    for _ in 0..count {
        let (request, len) = (ReplicaRequest::decode(reader.blob()?)?, reader.u32()? as usize);
        rest = rest.checked_sub(len).ok_or(reader.malformed())?;
        requests.push((request, len));
    }
    if rest > 0 || !reader.rest().is_empty() {
        return Err(reader.malformed());
    }
    Ok(requests)
}

/// Encodes the answers to the requests of a message, in their order.
pub fn encode_answers(answers: &[ReplicaAnswer]) -> Vec<u8> {
    let mut writer = PayloadWriter::new();
    writer.u16(answers.len() as u16);
    for answer in answers {
        writer.blob(&answer.encode());
    }
    writer.finish()
}

/// Decodes the answers to the requests of a message.
///
/// # Errors
/// If they are malformed.
pub fn decode_answers(bytes: &[u8]) -> Result<Vec<ReplicaAnswer>, MalformedPayload> {
    let mut reader = PayloadReader::new(bytes, "answers of a replica of a write log");
    let count = usize::from(reader.u16()?);
    if count > GROUP_REQUESTS_MAX {
        return Err(reader.malformed());
    }
    let answers = (0..count).map(|_| ReplicaAnswer::decode(reader.blob()?)).collect::<Result<_, _>>()?;
    if !reader.rest().is_empty() {
        return Err(reader.malformed());
    }
    Ok(answers)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::ReplicaAction;
    use super::*;

    proptest! {
        #[test]
        fn requests_of_a_message_are_read_as_they_were_written(
            tails in prop::collection::vec((any::<[u8; 16]>(), any::<u32>(), 0..1_u64 << 47, 0..9000_usize), 0..20)
        ) {
            let requests: Vec<(ReplicaRequest, usize)> = tails
                .into_iter()
                .map(|(log, term, tail, len)| (ReplicaRequest { log, term, action: ReplicaAction::Retire { tail } }, len))
                .collect();
            let data: usize = requests.iter().map(|(_, len)| len).sum();
            let parts: Vec<_> = requests.iter().map(|(request, len)| (request, *len)).collect();
            let bytes = encode_group(&parts);
            prop_assert_eq!(decode_group(&bytes, data), Ok(requests));
            prop_assert!(decode_group(&bytes, data + 1).is_err(), "data of no request");
            prop_assert!(data == 0 || decode_group(&bytes, data - 1).is_err(), "data that is missing");
            prop_assert!((0..bytes.len()).all(|end| decode_group(&bytes[..end], data).is_err()));
        }

        #[test]
        fn answers_of_a_message_are_read_as_they_were_written(copies in prop::collection::vec(any::<[u8; 16]>(), 0..20)) {
            let answers: Vec<_> = copies.into_iter().map(ReplicaAnswer::Created).collect();
            let bytes = encode_answers(&answers);
            prop_assert_eq!(decode_answers(&bytes), Ok(answers));
            prop_assert!((0..bytes.len()).all(|end| decode_answers(&bytes[..end]).is_err()));
        }
    }

    #[test]
    fn too_many_requests_are_refused() {
        let many = (GROUP_REQUESTS_MAX as u16 + 1).to_le_bytes();
        assert!(decode_group(&many, 0).is_err() && decode_answers(&many).is_err());
    }
}
