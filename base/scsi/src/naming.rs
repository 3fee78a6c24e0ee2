//! SCSI names of targets and of their ports, by transport (SPC-4, section 7.8.6 and annex C).

use std::sync::Arc;

/// Form of the names of a target, and the transport protocol that they are of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScsiNaming {
    /// iSCSI name of the target.  Its ports are named `NAME,t,0xGROUP` (RFC 7143, section 4.4.1).
    Iscsi(Arc<str>),
    /// Locally assigned NAA identifier of the target, in the forms of SAS.  Hosts of emulated controllers expect them:
    /// virtio has no protocol identifier of its own.  A port's identifier is the target's with the relative port
    /// identifier added to its last two bytes.
    Naa([u8; 8]),
}

/// Designator of a target or of its port, without its header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NameDesignator {
    pub(crate) code_set: u8,
    pub(crate) kind: u8,
    pub(crate) name: Vec<u8>,
}

/// Maximum length of a designator in bytes, a multiple of four.
pub(crate) const DESIGNATOR_MAX: usize = 252;

impl ScsiNaming {
    /// Creates an NAA identifier from 16 bytes that are unique, such as a UUID: locally assigned (type 3), 60 bits.
    pub fn naa(unique: &[u8; 16]) -> [u8; 8] {
        let mut name: [u8; 8] = unique[..8].try_into().expect("eight bytes");
        // Both halves contribute, so that neither half has to be random.
        name.iter_mut().zip(&unique[8..]).for_each(|(byte, other)| *byte ^= other.rotate_left(3));
        name[0] = 0x30 | name[0] & 0x0f;
        name
    }

    /// Returns the protocol identifier (SPC-4, section 7.6.1).
    pub fn protocol(&self) -> u8 {
        match self {
            ScsiNaming::Iscsi(_) => 5,
            ScsiNaming::Naa(_) => 6,
        }
    }

    /// Returns the version descriptor of the transport in the standard INQUIRY data, if it claims conformance.
    pub(crate) fn version(&self) -> Option<u16> {
        match self {
            ScsiNaming::Iscsi(_) => Some(0x0960),
            ScsiNaming::Naa(_) => None,
        }
    }

    /// Returns the name of the port with this group and relative identifier.
    pub(crate) fn port(&self, group: u16, relative_id: u16) -> NameDesignator {
        match self {
            ScsiNaming::Iscsi(name) => text(format!("{name},t,0x{group:04x}")),
            ScsiNaming::Naa(target) => {
                let mut port = *target;
                let low = u16::from_be_bytes([port[6], port[7]]).wrapping_add(relative_id);
                port[6..].copy_from_slice(&low.to_be_bytes());
                identifier(port)
            }
        }
    }

    /// Returns the name of the target.
    pub(crate) fn target(&self) -> NameDesignator {
        match self {
            ScsiNaming::Iscsi(name) => text(name.to_string()),
            ScsiNaming::Naa(target) => identifier(*target),
        }
    }
}

fn identifier(naa: [u8; 8]) -> NameDesignator {
    NameDesignator { code_set: 1, kind: 3, name: naa.to_vec() }
}

/// Encodes a SCSI name string: null-terminated, padded to a multiple of four bytes.
fn text(text: String) -> NameDesignator {
    let mut name = text.into_bytes();
    name.push(0);
    let len = name.len().next_multiple_of(4);
    crate::pad(&mut name, len);
    // Node names are shorter.
    name.truncate(DESIGNATOR_MAX);
    NameDesignator { code_set: 3, kind: 8, name }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_and_targets_have_names_of_their_own() {
        let naming = ScsiNaming::Iscsi("iqn.x:y".into());
        assert_eq!(naming.target().name, b"iqn.x:y\0");
        assert_eq!(naming.port(0x12, 1).name, b"iqn.x:y,t,0x0012\0\0\0\0");
        let target = ScsiNaming::naa(&[0x12; 16]);
        let naming = ScsiNaming::Naa(target);
        assert_eq!((target[0] >> 4, naming.target().name.as_slice()), (3, &target[..]));
        let ports = [1, 2, u16::MAX].map(|relative_id| naming.port(1, relative_id).name);
        assert!(ports.iter().all(|port| port[..6] == target[..6] && port[..] != target[..]), "{ports:x?}");
        assert_ne!(ports[0], ports[1]);
    }
}
