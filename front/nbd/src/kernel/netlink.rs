//! Generic netlink: headers and attributes of messages, in the byte order of this machine (netlink(7)).

use thiserror::Error;

/// Bytes of the header of a netlink message.
const HEADER_LEN: usize = 16;
/// Bytes of the header of generic netlink, after that of netlink.
const GENERIC_HEADER_LEN: usize = 4;
/// Bytes of the header of an attribute.
const ATTRIBUTE_HEADER_LEN: usize = 4;
/// Alignment of messages and attributes in bytes.
const ALIGNMENT: usize = 4;

/// Message types below those of families.
const TYPE_ERROR: u16 = 2;
const TYPE_DONE: u16 = 3;
/// Message flags: a request; a request whose end is acknowledged.
const FLAG_REQUEST: u16 = 1;
const FLAG_ACK: u16 = 4;
/// Bits of an attribute's type that are flags.
const ATTRIBUTE_FLAGS: u16 = 0xc000;

/// Message from the kernel that does not follow the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("malformed netlink message")]
pub struct MalformedMessage;

/// Attributes of a request, encoded.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NetlinkAttributes(Vec<u8>);

impl NetlinkAttributes {
    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an attribute.
    ///
    /// # Panics
    /// If the value is longer than an attribute can be, which is 64 KiB: values are those of this machine.
    pub fn bytes(mut self, kind: u16, value: &[u8]) -> Self {
        let len = u16::try_from(ATTRIBUTE_HEADER_LEN + value.len()).expect("an attribute of less than 64 KiB");
        self.0.extend(len.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(ALIGNMENT), 0);
        self
    }

    /// Adds an attribute of 32 bits.
    pub fn u32(self, kind: u16, value: u32) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds an attribute of 64 bits.
    pub fn u64(self, kind: u16, value: u64) -> Self {
        self.bytes(kind, &value.to_ne_bytes())
    }

    /// Adds a string, which ends with a zero byte in the message.
    pub fn string(self, kind: u16, value: &str) -> Self {
        self.bytes(kind, &[value.as_bytes(), &[0]].concat())
    }

    /// Adds an attribute that consists of attributes.
    pub fn nested(self, kind: u16, inner: &NetlinkAttributes) -> Self {
        self.bytes(kind, &inner.0)
    }
}

/// Returns a request to a family that the kernel acknowledges.
pub fn request(family: u16, command: u8, version: u8, sequence: u32, attributes: &NetlinkAttributes) -> Vec<u8> {
    let len = HEADER_LEN + GENERIC_HEADER_LEN + attributes.0.len();
    let mut message = Vec::with_capacity(len);
    message.extend(u32::try_from(len).expect("a request of less than 4 GiB").to_ne_bytes());
    message.extend(family.to_ne_bytes());
    message.extend((FLAG_REQUEST | FLAG_ACK).to_ne_bytes());
    message.extend(sequence.to_ne_bytes());
    // The kernel fills in the port of the sender.
    message.extend([0; 4]);
    message.extend([command, version, 0, 0]);
    message.extend(&attributes.0);
    message
}

/// Message from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetlinkMessage<'a> {
    /// End of a request: acknowledged with 0, or failed with an error number of the system.
    End {
        /// Sequence number of the request.
        sequence: u32,
        /// Error number; 0 for success.
        error: i32,
    },
    /// Message of a family.
    Generic {
        /// Family number.
        family: u16,
        /// Sequence number of the request; 0 in a notification.
        sequence: u32,
        /// Command of the family.
        command: u8,
        /// Attributes, encoded.
        attributes: &'a [u8],
    },
}

/// Iterator over the messages of a datagram.
#[derive(Debug, Clone)]
pub struct NetlinkMessages<'a>(&'a [u8]);

/// Returns the messages of a datagram.
pub fn messages(datagram: &[u8]) -> NetlinkMessages<'_> {
    NetlinkMessages(datagram)
}

impl<'a> Iterator for NetlinkMessages<'a> {
    type Item = Result<NetlinkMessage<'a>, MalformedMessage>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let parsed = split_message(self.0);
        // Nothing after a malformed message can be found.
        self.0 = parsed.map_or(&[], |(_, rest)| rest);
        Some(parsed.map(|(message, _)| message).ok_or(MalformedMessage))
    }
}

/// Returns the first message, and the bytes after it.
fn split_message(bytes: &[u8]) -> Option<(NetlinkMessage<'_>, &[u8])> {
    let len = usize::try_from(u32_at(bytes, 0)?).ok()?;
    if len < HEADER_LEN {
        return None;
    }
    let (message, kind, sequence) = (bytes.get(..len)?, u16_at(bytes, 4)?, u32_at(bytes, 8)?);
    let body = &message[HEADER_LEN..];
    let message = match kind {
        TYPE_ERROR => NetlinkMessage::End { sequence, error: i32_at(body, 0)?.checked_neg()? },
        TYPE_DONE => NetlinkMessage::End { sequence, error: 0 },
        family => NetlinkMessage::Generic {
            family,
            sequence,
            command: *body.first()?,
            attributes: body.get(GENERIC_HEADER_LEN..)?,
        },
    };
    // The last message of a datagram may lack its padding.
    let rest = bytes.get(len.checked_next_multiple_of(ALIGNMENT)?..).unwrap_or_default();
    Some((message, rest))
}

/// Iterator over attributes: their types and values.
#[derive(Debug, Clone)]
pub struct AttributeIter<'a>(&'a [u8]);

/// Returns the attributes of a message or of an attribute.
pub fn attributes(bytes: &[u8]) -> AttributeIter<'_> {
    AttributeIter(bytes)
}

impl<'a> Iterator for AttributeIter<'a> {
    type Item = Result<(u16, &'a [u8]), MalformedMessage>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let parsed = split_attribute(self.0);
        self.0 = parsed.map_or(&[], |(_, rest)| rest);
        Some(parsed.map(|(attribute, _)| attribute).ok_or(MalformedMessage))
    }
}

/// Returns the first attribute, and the bytes after it.
fn split_attribute(bytes: &[u8]) -> Option<((u16, &[u8]), &[u8])> {
    let (len, kind) = (usize::from(u16_at(bytes, 0)?), u16_at(bytes, 2)?);
    let value = bytes.get(ATTRIBUTE_HEADER_LEN..len)?;
    let rest = bytes.get(len.next_multiple_of(ALIGNMENT)..).unwrap_or_default();
    Some(((kind & !ATTRIBUTE_FLAGS, value), rest))
}

/// Finds an attribute by its type.
///
/// # Errors
/// If there is none, or an attribute before it is malformed.
pub fn find(bytes: &[u8], kind: u16) -> Result<&[u8], MalformedMessage> {
    for attribute in attributes(bytes) {
        let (found, value) = attribute?;
        if found == kind {
            return Ok(value);
        }
    }
    Err(MalformedMessage)
}

/// Reads a number of 16 bits at the start of a value.
///
/// # Errors
/// If the value is shorter.
pub fn read_u16(value: &[u8]) -> Result<u16, MalformedMessage> {
    u16_at(value, 0).ok_or(MalformedMessage)
}

/// Reads a number of 32 bits at the start of a value.
///
/// # Errors
/// If the value is shorter.
pub fn read_u32(value: &[u8]) -> Result<u32, MalformedMessage> {
    u32_at(value, 0).ok_or(MalformedMessage)
}

/// Reads a string, which may end with a zero byte.
///
/// # Errors
/// If it is not UTF-8.
pub fn read_string(value: &[u8]) -> Result<&str, MalformedMessage> {
    let len = value.iter().position(|&byte| byte == 0).unwrap_or(value.len());
    std::str::from_utf8(&value[..len]).map_err(|_| MalformedMessage)
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|&chunk| u16::from_ne_bytes(chunk))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|&chunk| u32::from_ne_bytes(chunk))
}

fn i32_at(bytes: &[u8], at: usize) -> Option<i32> {
    bytes.get(at..)?.first_chunk().map(|&chunk| i32::from_ne_bytes(chunk))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_is_what_netlink_7_says() {
        let attributes = NetlinkAttributes::new().string(2, "nbd").u32(1, 7);
        let message = request(16, 3, 1, 9, &attributes);
        assert_eq!(message.len(), 16 + 4 + 8 + 8);
        let parsed: Vec<_> = messages(&message).collect();
        let [Ok(NetlinkMessage::Generic { family: 16, sequence: 9, command: 3, attributes })] = parsed[..] else {
            panic!("{parsed:?}");
        };
        assert_eq!(find(attributes, 2).and_then(read_string), Ok("nbd"));
        assert_eq!(find(attributes, 1).and_then(read_u32), Ok(7));
        assert_eq!(find(attributes, 3), Err(MalformedMessage));
    }

    #[test]
    fn the_end_of_a_request_has_its_error() {
        let mut datagram = Vec::new();
        datagram.extend(20_u32.to_ne_bytes());
        datagram.extend(TYPE_ERROR.to_ne_bytes());
        datagram.extend([0; 2]);
        datagram.extend(5_u32.to_ne_bytes());
        datagram.extend([0; 4]);
        datagram.extend((-2_i32).to_ne_bytes());
        let parsed: Vec<_> = messages(&datagram).collect();
        assert_eq!(parsed, [Ok(NetlinkMessage::End { sequence: 5, error: 2 })]);
        datagram.pop();
        assert_eq!(messages(&datagram).collect::<Vec<_>>(), [Err(MalformedMessage)]);
    }

    fn walk(bytes: &[u8], depth: usize) -> usize {
        attributes(bytes).flatten().map(|(_, value)| 1 + if depth > 0 { walk(value, depth - 1) } else { 0 }).sum()
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for message in messages(&bytes) {
                if let Ok(NetlinkMessage::Generic { attributes, .. }) = message {
                    walk(attributes, 3);
                }
            }
            walk(&bytes, 3);
        }

        #[test]
        fn what_is_encoded_is_parsed(values in proptest::collection::vec((0_u16..100, proptest::collection::vec(any::<u8>(), 0..40)), 0..8)) {
            let encoded = values.iter().fold(NetlinkAttributes::new(), |list, (kind, value)| list.bytes(*kind, value));
            let nested = NetlinkAttributes::new().nested(3, &encoded);
            let inner = find(&nested.0, 3).expect("there");
            let parsed: Vec<_> = attributes(inner).map(|each| each.expect("good")).map(|(kind, value)| (kind, value.to_vec())).collect();
            prop_assert_eq!(parsed, values);
        }
    }
}
