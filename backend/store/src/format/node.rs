//! Tree node: sorted keys with their values (leaf) or with locations of children (inner node).

use super::{BlobPtr, MalformedStore, Put, StoreReader, malformed};

/// Maximum level; far more than any store needs.
pub const LEVEL_MAX: u8 = 12;

/// Content of a tree node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Node {
    /// Leaf, at level 0: keys and values.
    Leaf(Vec<(Box<[u8]>, Box<[u8]>)>),
    /// Inner node: the smallest key of each child (that of the first child may be smaller than any existing key) and
    /// its location.
    Inner {
        /// Level; 1 for parents of leaves.
        level: u8,
        /// Child nodes.
        children: Vec<(Box<[u8]>, BlobPtr)>,
    },
}

impl Node {
    /// Returns the level; 0 for a leaf.
    pub fn level(&self) -> u8 {
        match self {
            Node::Leaf(_) => 0,
            Node::Inner { level, .. } => *level,
        }
    }

    /// Returns the smallest key.
    pub fn first_key(&self) -> &[u8] {
        match self {
            Node::Leaf(pairs) => pairs.first().map_or(&[], |(key, _)| key),
            Node::Inner { children, .. } => children.first().map_or(&[], |(key, _)| key),
        }
    }

    /// Returns the approximate memory use, in bytes.
    pub fn weight(&self) -> usize {
        match self {
            Node::Leaf(pairs) => pairs.iter().map(|(key, value)| key.len() + value.len() + 64).sum(),
            Node::Inner { children, .. } => children.iter().map(|(key, _)| key.len() + 48).sum(),
        }
    }

    /// Encodes the node.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.put_u8(1);
        out.put_u8(self.level());
        match self {
            Node::Leaf(pairs) => {
                out.put_u16(pairs.len() as u16);
                for (key, value) in pairs {
                    out.put_u16(key.len() as u16);
                    out.put_u32(value.len() as u32);
                    out.put(key);
                    out.put(value);
                }
            }
            Node::Inner { children, .. } => {
                out.put_u16(children.len() as u16);
                for (key, ptr) in children {
                    out.put_u16(key.len() as u16);
                    out.put(key);
                    out.put_ptr(*ptr);
                }
            }
        }
        out
    }

    /// Decodes a node.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedStore> {
        let mut r = StoreReader::new(bytes, "tree node");
        let version = r.u8()?;
        let level = r.u8()?;
        let count = usize::from(r.u16()?);
        if version != 1 || level > LEVEL_MAX {
            return malformed(format!("tree node: version {version}, level {level}"));
        }
        let node = if level == 0 {
            let mut pairs = Vec::with_capacity(count.min(bytes.len() / 6));
            for _ in 0..count {
                let (key, value) = (usize::from(r.u16()?), r.u32()? as usize);
                pairs.push((r.bytes(key)?.into(), r.bytes(value)?.into()));
            }
            in_order(pairs.iter().map(|(key, _): &(Box<[u8]>, Box<[u8]>)| &key[..]))?;
            Node::Leaf(pairs)
        } else {
            let mut children = Vec::with_capacity(count.min(bytes.len() / 18));
            for _ in 0..count {
                let key = usize::from(r.u16()?);
                children.push((r.bytes(key)?.into(), r.ptr()?));
            }
            if children.is_empty() {
                return malformed("tree node: no children");
            }
            in_order(children.iter().map(|(key, _): &(Box<[u8]>, BlobPtr)| &key[..]))?;
            Node::Inner { level, children }
        };
        r.end()?;
        Ok(node)
    }
}

fn in_order<'a>(keys: impl Iterator<Item = &'a [u8]>) -> Result<(), MalformedStore> {
    let mut before: Option<&[u8]> = None;
    for key in keys {
        if before.is_some_and(|before| before >= key) {
            return malformed("tree node: keys out of order");
        }
        before = Some(key);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let leaf = Node::Leaf(vec![(b"a"[..].into(), b"1"[..].into()), (b"b"[..].into(), b""[..].into())]);
        let ptr = BlobPtr { addr: 9, len: 8, crc: 7 };
        let inner = Node::Inner { level: 2, children: vec![(b""[..].into(), ptr), (b"x"[..].into(), ptr)] };
        for node in [leaf, inner, Node::Leaf(vec![])] {
            let bytes = node.encode();
            assert_eq!(Node::decode(&bytes), Ok(node));
            for len in 0..bytes.len() {
                assert!(Node::decode(&bytes[..len]).is_err());
            }
        }
        let disorder = Node::Leaf(vec![(b"b"[..].into(), b""[..].into()), (b"a"[..].into(), b""[..].into())]);
        assert!(Node::decode(&disorder.encode()).is_err());
    }
}
