//! Pre-shared key identities of a ClientHello (RFC 8446, sections 4.1.2 and 4.2.11).

/// Number of the extension `pre_shared_key`.
const PRE_SHARED_KEY: usize = 41;
/// Maximum identities of a ClientHello that are examined; a client that offers more has put the wrong ones first.
const IDENTITIES_MAX: usize = 16;

/// Splits off the first `len` bytes.
fn take<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (first, others) = rest.split_at_checked(len)?;
    *rest = others;
    Some(first)
}

fn number(rest: &mut &[u8], len: usize) -> Option<usize> {
    Some(take(rest, len)?.iter().fold(0, |number, &byte| number << 8 | usize::from(byte)))
}

fn vector<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let len = number(rest, len)?;
    take(rest, len)
}

/// Parses the identities that a ClientHello (without its four-byte header) offers, in its order, at most 16; `None`
/// when it is damaged, and an empty list when it offers none.
pub fn offered(hello: &[u8]) -> Option<Vec<&[u8]>> {
    let mut rest = hello;
    // Version and random.
    take(&mut rest, 2 + 32)?;
    // Session, suites, compression.
    for len in [1, 2, 1] {
        vector(&mut rest, len)?;
    }
    if rest.is_empty() {
        return Some(Vec::new());
    }
    let mut extensions = vector(&mut rest, 2)?;
    while !extensions.is_empty() {
        let kind = number(&mut extensions, 2)?;
        let mut body = vector(&mut extensions, 2)?;
        if kind != PRE_SHARED_KEY {
            continue;
        }
        let mut list = vector(&mut body, 2)?;
        let mut found = Vec::new();
        while !list.is_empty() && found.len() < IDENTITIES_MAX {
            found.push(vector(&mut list, 2)?);
            // Obfuscated ticket age; tickets are not used.
            take(&mut list, 4)?;
        }
        return Some(found);
    }
    Some(Vec::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello(extensions: &[u8]) -> Vec<u8> {
        let mut out = vec![3, 3];
        out.extend_from_slice(&[7; 32]);
        out.extend_from_slice(&[2, 1, 1, 0, 2, 0x13, 1, 1, 0]);
        out.extend_from_slice(&(extensions.len() as u16).to_be_bytes());
        out.extend_from_slice(extensions);
        out
    }

    fn keys(identities: &[&[u8]]) -> Vec<u8> {
        let mut list = Vec::new();
        for identity in identities {
            list.extend_from_slice(&(identity.len() as u16).to_be_bytes());
            list.extend_from_slice(identity);
            list.extend_from_slice(&[0; 4]);
        }
        let mut body = (list.len() as u16).to_be_bytes().to_vec();
        body.extend_from_slice(&list);
        body.extend_from_slice(&[0, 1, 0]);
        let mut out = vec![0, 41];
        out.extend_from_slice(&(body.len() as u16).to_be_bytes());
        out.extend_from_slice(&body);
        out
    }

    #[test]
    fn identities_come_in_their_order() {
        let other = [0, 10, 0, 2, 0, 0];
        let whole = hello(&[&other[..], &keys(&[b"one", b"two"])].concat());
        assert_eq!(offered(&whole), Some(vec![&b"one"[..], b"two"]));
        assert_eq!(offered(&hello(&other)), Some(vec![]));
        assert_eq!(offered(&hello(&[])[..hello(&[]).len() - 2]), Some(vec![]), "no extensions at all");
        let many: Vec<&[u8]> = vec![b"x"; 100];
        assert_eq!(offered(&hello(&keys(&many))).map(|found| found.len()), Some(16));
    }

    #[test]
    fn damage_is_noticed_wherever_it_is() {
        let whole = hello(&keys(&[b"one", b"two"]));
        // Without any extension it is complete as well, and bytes after the identities are not parsed.
        let bare = hello(&[]).len() - 2;
        for len in (0..whole.len()).filter(|&len| len != bare) {
            assert_eq!(offered(&whole[..len]), None, "{len} bytes");
        }
    }
}
