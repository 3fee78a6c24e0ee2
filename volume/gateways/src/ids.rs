//! Ids of members and of their starts, and names of volumes.

use std::fmt;
use std::rc::Rc;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Id of 16 bytes, written as 32 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("an id has 32 hexadecimal digits")]
pub struct MalformedId;

fn write_hex(f: &mut fmt::Formatter<'_>, id: &[u8; 16]) -> fmt::Result {
    id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

fn read_hex(text: &str) -> Result<[u8; 16], MalformedId> {
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(MalformedId);
    }
    let mut id = [0; 16];
    for (at, byte) in id.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| MalformedId)?;
    }
    Ok(id)
}

macro_rules! hex_id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub [u8; 16]);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, &self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write_hex(f, &self.0)
            }
        }

        impl FromStr for $name {
            type Err = MalformedId;

            fn from_str(text: &str) -> Result<Self, MalformedId> {
                read_hex(text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hex_id! {
    /// Id of a gateway group, drawn when it is created.
    GatewayGroupId
}
hex_id! {
    /// Id of a member: of the data directory of its daemon.
    MemberId
}
hex_id! {
    /// Id of one start of a member, drawn when its daemon starts, and again after it was fenced.
    StartId
}

/// Name of a volume in the group: `POOL[/NAMESPACE]/IMAGE`.  Cheap to clone.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VolumeName(Rc<str>);

impl VolumeName {
    /// Creates a name.
    pub fn new(name: impl AsRef<str>) -> Self {
        Self(name.as_ref().into())
    }

    /// Returns the name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for VolumeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = MemberId(*b"0123456789abcdef");
        assert_eq!(id.to_string().parse(), Ok(id));
        assert_eq!(serde_json::from_str::<MemberId>(&serde_json::to_string(&id).unwrap()).unwrap(), id);
        for wrong in [
            "",
            "00",
            "0000000000000000000000000000000g",
            "é00000000000000000000000000000",
            "000000000000000000000000000000000",
        ] {
            assert_eq!(wrong.parse::<StartId>(), Err(MalformedId), "{wrong}");
        }
    }
}
