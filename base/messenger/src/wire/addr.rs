//! Entity addresses: `entity_addr_t` and `entity_addrvec_t`.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use super::codec::{MalformedPayload, PayloadReader, PayloadWriter};

/// Entity types, as a hello states them.
pub mod entity {
    /// Entity type of monitors.
    pub const MON: u8 = 0x01;
    /// Metadata server.
    pub const MDS: u8 = 0x02;
    /// Object storage daemon.
    pub const OSD: u8 = 0x04;
    /// Entity type of clients.
    pub const CLIENT: u8 = 0x08;
    /// Entity type of managers.
    pub const MGR: u8 = 0x10;
    /// Ticket service of the monitors; never a peer, but a name in cephx.
    pub const AUTH: u8 = 0x20;
    /// Forebay process.  The value is undefined in Ceph, whose daemons never see it.
    pub const FOREBAY: u8 = 0x40;
}

/// Maximum number of addresses in a vector.
const VECTOR_MAX: usize = 16;
const AF_INET: u16 = 2;
const AF_INET6: u16 = 10;

/// Address type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum AddrKind {
    /// Blank address.
    #[default]
    None,
    /// Messenger v1 address.
    Legacy,
    /// Messenger v2 address.
    Msgr2,
    /// Address of either protocol version.
    Any,
    /// Network in CIDR notation, not an address.
    Network,
}

impl AddrKind {
    fn code(self) -> u32 {
        self as u32
    }

    fn from_code(code: u32) -> Option<Self> {
        [Self::None, Self::Legacy, Self::Msgr2, Self::Any, Self::Network].into_iter().find(|kind| kind.code() == code)
    }
}

/// Address of an entity.  The nonce distinguishes process instances at the same socket address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct EntityAddr {
    /// Address type.
    pub kind: AddrKind,
    /// Nonce that distinguishes instances at the same socket address.
    pub nonce: u32,
    /// Socket address; `None` for a peer that cannot be reached this way.
    pub socket: Option<SocketAddr>,
}

impl EntityAddr {
    /// Creates an address of this protocol.
    pub fn msgr2(socket: Option<SocketAddr>, nonce: u32) -> Self {
        Self { kind: AddrKind::Msgr2, nonce, socket }
    }

    /// Appends the encoding for peers with the feature `MSG_ADDR2` (every msgr2 peer has it).
    pub fn encode(&self, out: &mut PayloadWriter) {
        out.u8(1).versioned(1, 1, |out| {
            out.u32(self.kind.code()).u32(self.nonce);
            match self.socket {
                None => {
                    out.u32(0);
                }
                Some(SocketAddr::V4(v4)) => {
                    // `sockaddr_in`: port and address are big-endian, the family is not.
                    out.u32(16).u16(AF_INET).raw(&v4.port().to_be_bytes()).raw(&v4.ip().octets()).raw(&[0; 8]);
                }
                Some(SocketAddr::V6(v6)) => {
                    out.u32(28).u16(AF_INET6).raw(&v6.port().to_be_bytes()).u32(v6.flowinfo());
                    out.raw(&v6.ip().octets()).u32(v6.scope_id());
                }
            }
        });
    }

    /// Decodes an address in either encoding.
    pub fn decode(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        match from.u8()? {
            1 => {}
            // Legacy encoding, with a messenger v1 address in a `sockaddr_storage`.
            0 => {
                from.take(3)?;
                let nonce = from.u32()?;
                let storage = from.array::<128>()?;
                let family = u16::from_be_bytes([storage[0], storage[1]]);
                return Ok(Self { kind: AddrKind::Legacy, nonce, socket: socket(family, &storage[2..]) });
            }
            _ => return Err(from.malformed()),
        }
        let (_, mut part) = from.versioned(1)?;
        let kind = AddrKind::from_code(part.u32()?).ok_or(part.malformed())?;
        let nonce = part.u32()?;
        let len = part.u32()? as usize;
        let bytes = part.take(len)?;
        let socket = match bytes {
            [a, b, rest @ ..] => socket(u16::from_le_bytes([*a, *b]), rest),
            _ => None,
        };
        Ok(Self { kind, nonce, socket })
    }

    /// Appends a vector of addresses.
    pub fn encode_vector(addrs: &[Self], out: &mut PayloadWriter) {
        out.u8(2).u32(addrs.len() as u32);
        addrs.iter().for_each(|addr| addr.encode(out));
    }

    /// Decodes a vector of at most 16 addresses.
    pub fn decode_vector(from: &mut PayloadReader<'_>) -> Result<Vec<Self>, MalformedPayload> {
        match from.rest().first() {
            Some(2) => {
                from.u8()?;
                let count = from.u32()? as usize;
                if count > VECTOR_MAX {
                    return Err(from.malformed());
                }
                (0..count).map(|_| Self::decode(from)).collect()
            }
            // Single address.
            _ => Ok(vec![Self::decode(from)?]),
        }
    }

    /// Returns true if `self`, an address known for a peer, matches `other`, as that peer knows itself: same socket
    /// address, and same nonce unless that of `self` is zero.
    pub fn means(&self, other: &Self) -> bool {
        self.socket == other.socket && (self.nonce == 0 || self.nonce == other.nonce)
    }
}

fn socket(family: u16, rest: &[u8]) -> Option<SocketAddr> {
    match family {
        AF_INET => {
            let (port, rest) = rest.split_first_chunk::<2>()?;
            let ip = *rest.first_chunk::<4>()?;
            Some(SocketAddr::new(IpAddr::from(ip), u16::from_be_bytes(*port)))
        }
        AF_INET6 => {
            let (port, rest) = rest.split_first_chunk::<2>()?;
            let ip = *rest.get(4..)?.first_chunk::<16>()?;
            Some(SocketAddr::new(IpAddr::from(ip), u16::from_be_bytes(*port)))
        }
        _ => None,
    }
}

impl fmt::Display for EntityAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.socket {
            Some(socket) => write!(f, "{socket}/{}", self.nonce),
            None => write!(f, "-/{}", self.nonce),
        }
    }
}
