//! Ceph's advisory locks (`cls_lock`), as used by RBD for images and for object maps.

use super::{CephReader, CephWriter};

/// Lock name, on an image's header and on its object map.
pub(crate) const LOCK: &str = "rbd_lock";
/// Tag of RBD's automatic locks on a header. A lock with another tag was taken manually (`rbd lock add`).
pub(crate) const TAG: &str = "internal";
const EXCLUSIVE: u8 = 1;
const SHARED: u8 = 2;
/// Entity type `client.`.
const CLIENT: u8 = 8;
const COOKIE_PREFIX: &str = "auto ";

/// Holder of a lock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Locker {
    /// Entity type and number.
    pub(crate) entity: (u8, i64),
    pub(crate) cookie: String,
    /// Address, in the form of [`forebay_block::ClientIdentity::address`]; empty for a blank one.
    pub(crate) address: String,
    pub(crate) description: String,
}

impl Locker {
    /// Returns the number of the client that holds the lock; `None` if the holder is not a client.
    pub(crate) fn client(&self) -> Option<u64> {
        (self.entity.0 == CLIENT).then(|| u64::try_from(self.entity.1).ok()).flatten()
    }
}

/// Lock state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LockInfo {
    pub(crate) exclusive: bool,
    pub(crate) tag: String,
    pub(crate) lockers: Vec<Locker>,
}

/// Returns the cookie of a lock bound to a watch.
pub(crate) fn cookie_of(watch: u64) -> String {
    format!("{COOKIE_PREFIX}{watch}")
}

/// Returns the watch to which a lock with this cookie is bound.
pub(crate) fn watch_of(cookie: &str) -> Option<u64> {
    cookie.strip_prefix(COOKIE_PREFIX)?.parse().ok()
}

/// Encodes the input of `lock.lock`, for an exclusive lock.
pub(crate) fn encode_lock(cookie: &str, tag: &str) -> Vec<u8> {
    encode_lock_of_kind(EXCLUSIVE, cookie, tag)
}

/// Encodes the input of `lock.lock`, for a lock that clients with the same tag share.
pub(crate) fn encode_lock_shared(cookie: &str, tag: &str) -> Vec<u8> {
    encode_lock_of_kind(SHARED, cookie, tag)
}

fn encode_lock_of_kind(kind: u8, cookie: &str, tag: &str) -> Vec<u8> {
    let body = CephWriter::new().string(LOCK).u8(kind).string(cookie).string(tag).string("");
    // No expiry, no flags.
    CephWriter::new().versioned(1, 1, body.u32(0).u32(0).u8(0)).done()
}

/// Encodes the input of `lock.unlock`.
pub(crate) fn encode_unlock(cookie: &str) -> Vec<u8> {
    CephWriter::new().versioned(1, 1, CephWriter::new().string(LOCK).string(cookie)).done()
}

/// Encodes the input of `lock.break_lock`.
pub(crate) fn encode_break(locker: &Locker) -> Vec<u8> {
    let body = CephWriter::new().string(LOCK).u8(locker.entity.0).i64(locker.entity.1).string(&locker.cookie);
    CephWriter::new().versioned(1, 1, body).done()
}

/// Encodes the input of `lock.assert_locked`: this client holds the lock exclusively.
pub(crate) fn encode_assert(cookie: &str, tag: &str) -> Vec<u8> {
    let body = CephWriter::new().string(LOCK).u8(EXCLUSIVE).string(cookie).string(tag);
    CephWriter::new().versioned(1, 1, body).done()
}

/// Encodes the input of `lock.set_cookie`.
pub(crate) fn encode_set_cookie(cookie: &str, tag: &str, new: &str) -> Vec<u8> {
    let body = CephWriter::new().string(LOCK).u8(EXCLUSIVE).string(cookie).string(tag).string(new);
    CephWriter::new().versioned(1, 1, body).done()
}

/// Encodes the input of `lock.get_info`.
pub(crate) fn encode_get_info() -> Vec<u8> {
    CephWriter::new().versioned(1, 1, CephWriter::new().string(LOCK)).done()
}

/// Decodes the output of `lock.get_info`; `None` if it is malformed.
pub(crate) fn decode_info(bytes: &[u8]) -> Option<LockInfo> {
    let mut body = CephReader::new(bytes).versioned(1)?.body;
    let count = body.u32()?;
    let mut lockers = Vec::new();
    for _ in 0..count {
        let mut id = body.versioned(1)?.body;
        let entity = (id.u8()?, id.i64()?);
        let cookie = id.string()?;
        let mut info = body.versioned(1)?.body;
        info.u64()?;
        let address = decode_address(&mut info)?;
        lockers.push(Locker { entity, cookie, address, description: info.string()? });
    }
    let kind = body.u8()?;
    // Type 1 (Pacific) is exclusive; later versions add type 3, an exclusive lock removed with its last locker.
    Some(LockInfo { exclusive: matches!(kind, 1 | 3), tag: body.string()?, lockers })
}

/// Decodes an address in either of Ceph's two encodings, as `IP:PORT/NONCE`; empty for a blank one.
fn decode_address(reader: &mut CephReader<'_>) -> Option<String> {
    // The legacy encoding begins with 4 zero bytes, the nonce, and the socket address at its full length of 128
    // bytes.
    if reader.u8()? == 0 {
        reader.take(3)?;
        let nonce = reader.u32()?;
        let socket = reader.take(128)?;
        // The address family is big-endian here.
        let family = u16::from_be_bytes([socket[0], socket[1]]);
        return format_address(family, &socket[2..], nonce);
    }
    let mut body = reader.versioned(1)?.body;
    // Address type (messenger version), which the result omits.
    body.u32()?;
    let nonce = body.u32()?;
    let len = body.u32()?;
    let mut socket = CephReader::new(body.take(usize::try_from(len).ok()?)?);
    if len == 0 {
        return Some(String::new());
    }
    let family = socket.u16()?;
    format_address(family, socket.rest(), nonce)
}

fn format_address(family: u16, rest: &[u8], nonce: u32) -> Option<String> {
    let mut reader = CephReader::new(rest);
    match family {
        0 => Some(String::new()),
        2 => {
            let port = u16::from_be_bytes(reader.take(2)?.try_into().ok()?);
            let ip: [u8; 4] = reader.take(4)?.try_into().ok()?;
            Some(format!("{}:{port}/{nonce}", std::net::Ipv4Addr::from(ip)))
        }
        10 => {
            let port = u16::from_be_bytes(reader.take(2)?.try_into().ok()?);
            reader.take(4)?;
            let ip: [u8; 16] = reader.take(16)?.try_into().ok()?;
            Some(format!("[{}]:{port}/{nonce}", std::net::Ipv6Addr::from(ip)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    #[test]
    fn cookies_name_a_watch() {
        assert_eq!(cookie_of(94), "auto 94");
        assert_eq!(watch_of("auto 94"), Some(94));
        for other in ["", "auto", "auto x", "manual 3", "auto 99999999999999999999"] {
            assert_eq!(watch_of(other), None);
        }
    }

    #[test]
    fn a_lock_that_nobody_holds() {
        // Stored by the OSD for a header after rbd has released the lock.
        let info = decode_info(&unhex("0101 11000000 00000000 01 08000000 696e7465726e616c")).expect("readable");
        assert_eq!(info, LockInfo { exclusive: true, tag: TAG.into(), lockers: Vec::new() });
    }

    /// Golden bytes: returned by an OSD 16.2 while fio held the lock through librbd.
    #[test]
    fn a_lock_that_librbd_holds() {
        let bytes = unhex(
            "0101 6d000000 01000000 0101 21000000 08 3910000000000000 14000000 6175746f20313430313937383636303635323830
             0101 2f000000 0000000000000000 01 0101 1c000000 01000000 fcae2396 10000000 0200 0000 7f000001 0000000000000000
             00000000 01 08000000 696e7465726e616c",
        );
        let info = decode_info(&bytes).expect("readable");
        assert_eq!((info.exclusive, &info.tag[..], info.lockers.len()), (true, TAG, 1));
        let locker = &info.lockers[0];
        assert_eq!(locker.address, "127.0.0.1:0/2518920956", "as the list of watchers says it");
        assert_eq!((locker.client(), watch_of(&locker.cookie)), (Some(4153), Some(140_197_866_065_280)));
        for at in 0..bytes.len() {
            assert_eq!(decode_info(&bytes[..at]), None);
        }
        let older = [&[0; 4][..], &7u32.to_le_bytes(), &[0, 2, 0x1a, 0x0a, 10, 0, 0, 1], &[0; 120]].concat();
        assert_eq!(decode_address(&mut CephReader::new(&older)).as_deref(), Some("10.0.0.1:6666/7"));
    }

    #[test]
    fn inputs_byte_for_byte() {
        let text = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let name = "08000000 7262645f6c6f636b";
        let hex = |hex: &str| hex.replace(' ', "");
        assert_eq!(
            text(encode_lock("auto 7", TAG)),
            hex(&format!(
                "0101 30000000 {name} 01 06000000 6175746f2037 08000000 696e7465726e616c 00000000 {} 00",
                "00".repeat(8)
            ))
        );
        assert_eq!(
            text(encode_lock_shared("a", "t")),
            hex(&format!("0101 24000000 {name} 02 01000000 61 01000000 74 00000000 {} 00", "00".repeat(8)))
        );
        assert_eq!(text(encode_assert("", "")), hex(&format!("0101 15000000 {name} 01 00000000 00000000")));
        let locker =
            Locker { entity: (8, 4123), cookie: "auto 7".into(), address: String::new(), description: String::new() };
        assert_eq!(locker.client(), Some(4123));
        assert_eq!(
            text(encode_break(&locker)),
            hex(&format!("0101 1f000000 {name} 08 1b10000000000000 06000000 6175746f2037"))
        );
    }
}
