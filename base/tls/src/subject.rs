//! Subject of a certificate (RFC 5280, section 4.1.2.6), in the form of RFC 4514.

/// Tag of a SEQUENCE.
const SEQUENCE: u8 = 0x30;
/// Tag of a SET.
const SET: u8 = 0x31;
/// Tag of an OBJECT IDENTIFIER.
const OBJECT_IDENTIFIER: u8 = 0x06;
/// Tag of the version of a certificate, absent in version 1.
const VERSION: u8 = 0xA0;
/// Fields between the version and the subject: serial number, signature algorithm, issuer, validity.
const FIELDS_BEFORE: usize = 4;
/// Object identifier of `id-at-commonName`.
const COMMON_NAME: &[u8] = &[0x55, 4, 3];
/// Attribute types with a short name (RFC 4514, section 3).
const SHORT_NAMES: [(&[u8], &str); 9] = [
    (COMMON_NAME, "CN"),
    (&[0x55, 4, 7], "L"),
    (&[0x55, 4, 8], "ST"),
    (&[0x55, 4, 10], "O"),
    (&[0x55, 4, 11], "OU"),
    (&[0x55, 4, 6], "C"),
    (&[0x55, 4, 9], "STREET"),
    (&[0x09, 0x92, 0x26, 0x89, 0x93, 0xF2, 0x2C, 0x64, 1, 25], "DC"),
    (&[0x09, 0x92, 0x26, 0x89, 0x93, 0xF2, 0x2C, 0x64, 1, 1], "UID"),
];

/// Subject of a certificate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CertificateSubject {
    /// Distinguished name in the form of RFC 4514, the most specific part first: `CN=host1,O=Example,C=DE`.
    pub distinguished_name: String,
    /// Common name, the most specific one where there are several.
    pub common_name: Option<String>,
}

/// Splits off the first element: its tag and its content.
fn element<'a>(rest: &mut &'a [u8]) -> Option<(u8, &'a [u8])> {
    let (&[tag, first], after) = rest.split_first_chunk()?;
    let (len, after) = match first {
        0..=0x7F => (usize::from(first), after),
        0x81..=0x83 => {
            let (bytes, after) = after.split_at_checked(usize::from(first & 0x7F))?;
            (bytes.iter().fold(0, |len, &byte| len << 8 | usize::from(byte)), after)
        }
        _ => return None,
    };
    let (content, after) = after.split_at_checked(len)?;
    *rest = after;
    Some((tag, content))
}

/// Splits off the first element, which must have this tag.
fn expect<'a>(rest: &mut &'a [u8], tag: u8) -> Option<&'a [u8]> {
    element(rest).filter(|found| found.0 == tag).map(|found| found.1)
}

/// Returns the text of a string; `None` for unsupported string types.
fn text(tag: u8, content: &[u8]) -> Option<String> {
    match tag {
        // UTF8String, PrintableString, IA5String.
        0x0C | 0x13 | 0x16 => std::str::from_utf8(content).ok().map(str::to_owned),
        _ => None,
    }
}

/// Appends an attribute's value (RFC 4514, section 2.4).
fn push_escaped(out: &mut String, value: &str) {
    let last = value.chars().count().saturating_sub(1);
    for (at, c) in value.chars().enumerate() {
        let special = matches!(c, '"' | '+' | ',' | ';' | '<' | '>' | '\\')
            || (at == 0 && matches!(c, ' ' | '#'))
            || (at == last && c == ' ');
        match c {
            c if c.is_ascii_control() => out.push_str(&format!("\\{:02X}", c as u32)),
            c if special => out.extend(['\\', c]),
            c => out.push(c),
        }
    }
}

/// Appends an attribute: its type, and its value as text, or as DER where the type or the string type is unsupported.
fn push_attribute(out: &mut String, kind: &[u8], tag: u8, content: &[u8]) {
    let name = SHORT_NAMES.iter().find(|(known, _)| *known == kind).map(|(_, name)| *name);
    match (name, text(tag, content)) {
        (Some(name), Some(value)) => {
            out.push_str(name);
            out.push('=');
            push_escaped(out, &value);
        }
        (name, _) => {
            match name {
                Some(name) => out.push_str(name),
                None => out.push_str(&dotted(kind)),
            }
            out.push_str("=#");
            // Values of certificates are far shorter than the 64 KiB limit of a two-byte length.
            let head = match content.len() {
                len @ 0..0x80 => vec![tag, len as u8],
                len => vec![tag, 0x82, (len >> 8) as u8, len as u8],
            };
            head.iter().chain(content).for_each(|byte| out.push_str(&format!("{byte:02x}")));
        }
    }
}

/// Writes an object identifier in its dotted form.
fn dotted(kind: &[u8]) -> String {
    let mut arcs: Vec<u64> = Vec::new();
    let mut arc = 0_u64;
    for &byte in kind {
        arc = arc << 7 | u64::from(byte & 0x7F);
        if byte & 0x80 == 0 {
            arcs.push(arc);
            arc = 0;
        }
    }
    if let Some(&first) = arcs.first() {
        let top = (first / 40).min(2);
        arcs.splice(..1, [top, first - top * 40]);
    }
    arcs.iter().map(u64::to_string).collect::<Vec<_>>().join(".")
}

impl CertificateSubject {
    /// Parses the subject of a certificate in DER; `None` when it is damaged.
    pub fn of_certificate(der: &[u8]) -> Option<Self> {
        let mut rest = der;
        let mut certificate = expect(&mut rest, SEQUENCE)?;
        let mut fields = expect(&mut certificate, SEQUENCE)?;
        if fields.first() == Some(&VERSION) {
            element(&mut fields)?;
        }
        for _ in 0..FIELDS_BEFORE {
            element(&mut fields)?;
        }
        let mut subject = expect(&mut fields, SEQUENCE)?;
        let mut parts = Vec::new();
        let mut common_name = None;
        while !subject.is_empty() {
            let mut part = expect(&mut subject, SET)?;
            let mut out = String::new();
            while !part.is_empty() {
                let mut attribute = expect(&mut part, SEQUENCE)?;
                let kind = expect(&mut attribute, OBJECT_IDENTIFIER)?;
                let (tag, content) = element(&mut attribute)?;
                if !out.is_empty() {
                    out.push('+');
                }
                push_attribute(&mut out, kind, tag, content);
                if kind == COMMON_NAME {
                    common_name = text(tag, content);
                }
            }
            parts.push(out);
        }
        parts.reverse();
        Some(Self { distinguished_name: parts.join(","), common_name })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn der(tag: u8, content: &[u8]) -> Vec<u8> {
        let len = content.len();
        let head = if len < 0x80 { vec![tag, len as u8] } else { vec![tag, 0x82, (len >> 8) as u8, len as u8] };
        [&head[..], content].concat()
    }

    fn attribute(kind: &[u8], tag: u8, value: &[u8]) -> Vec<u8> {
        der(SEQUENCE, &[der(OBJECT_IDENTIFIER, kind), der(tag, value)].concat())
    }

    fn certificate(parts: &[Vec<Vec<u8>>]) -> Vec<u8> {
        let subject: Vec<u8> = parts.iter().flat_map(|part| der(SET, &part.concat())).collect();
        let fields = [
            der(VERSION, &[2, 1, 2]),
            der(2, &[1]),
            der(SEQUENCE, &[]),
            der(SEQUENCE, &[]),
            der(SEQUENCE, &[0; 300]),
            der(SEQUENCE, &subject),
        ];
        der(SEQUENCE, &der(SEQUENCE, &fields.concat()))
    }

    #[test]
    fn names_are_written_as_rfc_4514_does() {
        let of = |parts: &[Vec<Vec<u8>>]| CertificateSubject::of_certificate(&certificate(parts)).expect("whole");
        let plain = of(&[
            vec![attribute(&[0x55, 4, 6], 0x13, b"DE")],
            vec![attribute(&[0x55, 4, 10], 0x0C, b"Forebay, tests")],
            vec![attribute(&[0x55, 4, 11], 0x0C, b"a+b"), attribute(&[0x55, 4, 7], 0x0C, b" #x ")],
            vec![attribute(COMMON_NAME, 0x0C, b"host one")],
        ]);
        assert_eq!(plain.distinguished_name, "CN=host one,OU=a\\+b+L=\\ #x\\ ,O=Forebay\\, tests,C=DE");
        assert_eq!(plain.common_name.as_deref(), Some("host one"));
        // A type without a short name, and a string of an unsupported type (BMPString).
        let odd = of(&[
            vec![attribute(&[0x2A, 0x86, 0x48, 0x86, 0xF7, 0x0D, 1, 9, 1], 0x16, b"a@b")],
            vec![attribute(COMMON_NAME, 0x1E, &[0, 65])],
        ]);
        assert_eq!(odd.distinguished_name, "CN=#1e020041,1.2.840.113549.1.9.1=#1603614062");
        assert_eq!(odd.common_name, None);
        assert_eq!(of(&[]), CertificateSubject { distinguished_name: String::new(), common_name: None });
        let control = of(&[vec![attribute(COMMON_NAME, 0x0C, b"a\n\0")]]);
        assert_eq!(control.distinguished_name, "CN=a\\0A\\00");
    }

    #[test]
    fn damage_is_noticed() {
        let whole = certificate(&[vec![attribute(COMMON_NAME, 0x0C, b"x")]]);
        for len in 0..whole.len() {
            assert_eq!(CertificateSubject::of_certificate(&whole[..len]), None, "{len} bytes");
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 0xFF;
            // Must not read past its end, whatever the result.
            let _ = CertificateSubject::of_certificate(&changed);
        }
    }
}
