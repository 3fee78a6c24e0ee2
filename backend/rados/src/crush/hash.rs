//! Robert Jenkins' 32-bit hash as used by CRUSH, and the hashes of object names.

const SEED: u32 = 1_315_423_911;
const X: u32 = 231_232;
const Y: u32 = 1232;

fn mix(a: &mut u32, b: &mut u32, c: &mut u32) {
    for [down_a, up_b, down_c] in [[13, 8, 13], [12, 16, 5], [3, 10, 15]] {
        *a = a.wrapping_sub(*b).wrapping_sub(*c) ^ (*c >> down_a);
        *b = b.wrapping_sub(*c).wrapping_sub(*a) ^ (*a << up_b);
        *c = c.wrapping_sub(*a).wrapping_sub(*b) ^ (*b >> down_c);
    }
}

/// Hashes two numbers.
pub fn hash2(mut a: u32, mut b: u32) -> u32 {
    let (mut x, mut y) = (X, Y);
    let mut hash = SEED ^ a ^ b;
    mix(&mut a, &mut b, &mut hash);
    mix(&mut x, &mut a, &mut hash);
    mix(&mut b, &mut y, &mut hash);
    hash
}

/// Hashes three numbers.
pub fn hash3(mut a: u32, mut b: u32, mut c: u32) -> u32 {
    let (mut x, mut y) = (X, Y);
    let mut hash = SEED ^ a ^ b ^ c;
    mix(&mut a, &mut b, &mut hash);
    mix(&mut c, &mut x, &mut hash);
    mix(&mut y, &mut a, &mut hash);
    mix(&mut b, &mut x, &mut hash);
    mix(&mut y, &mut c, &mut hash);
    hash
}

/// Hashes four numbers.
pub fn hash4(mut a: u32, mut b: u32, mut c: u32, mut d: u32) -> u32 {
    let (mut x, mut y) = (X, Y);
    let mut hash = SEED ^ a ^ b ^ c ^ d;
    mix(&mut a, &mut b, &mut hash);
    mix(&mut c, &mut d, &mut hash);
    mix(&mut a, &mut x, &mut hash);
    mix(&mut y, &mut b, &mut hash);
    mix(&mut c, &mut x, &mut hash);
    mix(&mut y, &mut d, &mut hash);
    hash
}

/// Hash functions for object names: `object_hash` of a pool.
pub mod name {
    /// Hash of the Linux dentry cache.
    pub const LINUX: u8 = 1;
    /// Robert Jenkins' hash; the default.
    pub const RJENKINS: u8 = 2;
}

/// Hashes an object name, or a locator key.  Returns `None` for an unknown hash function.
pub fn hash_name(kind: u8, text: &[u8]) -> Option<u32> {
    match kind {
        name::RJENKINS => Some(rjenkins(text)),
        name::LINUX => Some(text.iter().fold(0u32, |hash, &byte| {
            let byte = u32::from(byte);
            hash.wrapping_add(byte << 4).wrapping_add(byte >> 4).wrapping_mul(11)
        })),
        _ => None,
    }
}

fn rjenkins(text: &[u8]) -> u32 {
    let (mut a, mut b, mut c) = (0x9e37_79b9_u32, 0x9e37_79b9_u32, 0u32);
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
    let (chunks, rest) = text.as_chunks::<12>();
    for chunk in chunks {
        a = a.wrapping_add(word(&chunk[..4]));
        b = b.wrapping_add(word(&chunk[4..8]));
        c = c.wrapping_add(word(&chunk[8..]));
        mix(&mut a, &mut b, &mut c);
    }
    // The lowest byte of the last word is reserved for the length.
    let mut last = [0; 12];
    let tail = rest.len().min(8);
    last[..tail].copy_from_slice(&rest[..tail]);
    last[9..9 + rest.len() - tail].copy_from_slice(&rest[tail..]);
    a = a.wrapping_add(word(&last[..4]));
    b = b.wrapping_add(word(&last[4..8]));
    c = c.wrapping_add(word(&last[8..])).wrapping_add(text.len() as u32);
    mix(&mut a, &mut b, &mut c);
    c
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_hash_as_ceph_says() {
        // Values printed by `ceph osd map POOL NAME`.
        let names = [
            ("foo", 0x7fc1_f406),
            ("bar", 0xefe6_384b),
            ("abcdefghijkl", 0x0b1b_3ea5),
            ("rbd_directory", 0x30a9_8c1c),
            ("rbd_data.10226b8b4567.0000000000000000", 0x87bd_7b9a),
        ];
        for (name, hash) in names {
            assert_eq!(hash_name(2, name.as_bytes()), Some(hash), "{name}");
        }
        assert_eq!(hash_name(0, b"x"), None);
        assert_eq!(hash_name(9, b"x"), None);
    }
}
