//! Pre-shared keys for TLS: their interchange format, and the derivation of TLS keys and identities from it
//! (NVMe/TCP transport 1.0, 3.6.1).

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use aws_lc_rs::hkdf;
use forebay_accel::crypto::base64;
use forebay_tls::Psk;
use zeroize::Zeroizing;

use super::secret::{DhChapHash, crc32};
use crate::wire::fabrics::{DISCOVERY_NQN, NQN_MAX};

/// Prefix of a key in the interchange format.
const PREFIX: &str = "NVMeTLSkey-1:";
/// String hashed after the NQNs for the digest in an identity.
const PURPOSE: &[u8] = b" NVMe-over-Fabrics";
/// Maximum bytes of an identity: two NQNs, and a SHA-384 digest in base64.
const IDENTITY_MAX: usize = "NVMe1R02".len() + 3 + 2 * NQN_MAX + 64;

/// Error in the text of a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum PskError {
    /// Not in the interchange format.
    #[error("it does not have the form NVMeTLSkey-1:01:...:, as 'nvme gen-tls-key' makes it")]
    Form,
    /// Length that does not match the hash, in bytes.
    #[error("the key has {0} bytes; it must have 32, or 48 with SHA-384")]
    Length(usize),
    /// Checksum mismatch.
    #[error("checksum mismatch: a character is wrong")]
    Checksum,
}

/// Configured PSK.  Erased when dropped, and not shown by `Debug`.
#[derive(Clone, PartialEq, Eq)]
pub struct TlsKey {
    /// Hash that derives the retained PSK; `None` if the configured PSK is the retained PSK.
    transform: Option<DhChapHash>,
    key: Zeroizing<Vec<u8>>,
}

impl TlsKey {
    /// Parses the interchange format: `NVMeTLSkey-1:`, a hash, and base64 of the key and its CRC-32.
    ///
    /// # Errors
    /// The [`PskError`] in the text.
    pub fn parse(text: &str) -> Result<Self, PskError> {
        let rest = text.trim().strip_prefix(PREFIX).ok_or(PskError::Form)?;
        let (transform, base64) = rest.split_once(':').ok_or(PskError::Form)?;
        let transform = match transform {
            "00" => None,
            "01" => Some(DhChapHash::Sha256),
            "02" => Some(DhChapHash::Sha384),
            _ => return Err(PskError::Form),
        };
        let base64 = base64.strip_suffix(':').ok_or(PskError::Form)?;
        let bytes = Zeroizing::new(base64::decode(base64).ok_or(PskError::Form)?);
        let (key, checksum) = bytes.split_last_chunk::<4>().ok_or(PskError::Form)?;
        if !matches!(
            (transform, key.len()),
            (None | Some(DhChapHash::Sha256), 32) | (None | Some(DhChapHash::Sha384), 48)
        ) {
            return Err(PskError::Length(key.len()));
        }
        if crc32(key).to_le_bytes() != *checksum {
            return Err(PskError::Checksum);
        }
        Ok(Self { transform, key: Zeroizing::new(key.to_vec()) })
    }

    /// Returns the hash for all derivations from the key: SHA-256 for 32 bytes, otherwise SHA-384.
    fn hash(&self) -> DhChapHash {
        if self.key.len() == 32 { DhChapHash::Sha256 } else { DhChapHash::Sha384 }
    }

    /// Derives the retained PSK of a host.
    fn retained(&self, host: &str, form: Form) -> Zeroizing<Vec<u8>> {
        match self.transform {
            None => self.key.clone(),
            Some(hash) => derive(hash, &self.key, "HostNQN", host.as_bytes(), form),
        }
    }

    /// Derives the TLS keys between a host and a subsystem, one for every identity that a host may offer.
    pub fn psks(&self, host: &str, subsystem: &str) -> Vec<Psk> {
        let names = [(0, Form::Standard), (0, Form::Former), (1, Form::Standard), (1, Form::Former)];
        names.into_iter().map(|(version, form)| self.psk(version, form, host, subsystem)).collect()
    }

    fn psk(&self, version: u8, form: Form, host: &str, subsystem: &str) -> Psk {
        let hash = self.hash();
        let (retained, number) = (self.retained(host, form), hash as u8);
        let name = format!("NVMe{version}R{number:02} {host} {subsystem}");
        let (identity, context) = if version == 0 {
            (name.clone(), name)
        } else {
            let digest = hash.hmac(&retained, &[host.as_bytes(), b" ", subsystem.as_bytes(), PURPOSE]);
            let digest = base64::encode(&digest);
            (format!("{name} {digest}"), format!("{number:02} {digest}"))
        };
        let secret = derive(hash, &retained, "nvme-tls-psk", context.as_bytes(), form);
        let hash = if hash == DhChapHash::Sha256 { forebay_tls::PskHash::Sha256 } else { forebay_tls::PskHash::Sha384 };
        Psk { identity: identity.into(), secret, hash }
    }
}

impl fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsKey({} bytes)", self.key.len())
    }
}

/// Encoding of the label of a derivation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// Encoding of RFC 8446, section 7.1.
    Standard,
    /// Encoding of early libnvme: without the lengths of the parts, and with the key length in little-endian.
    Former,
}

/// Computes HKDF-Extract without a salt, and HKDF-Expand-Label to the length of the key.
fn derive(hash: DhChapHash, key: &[u8], label: &str, context: &[u8], form: Form) -> Zeroizing<Vec<u8>> {
    struct Len(usize);
    impl hkdf::KeyType for Len {
        fn len(&self) -> usize {
            self.0
        }
    }
    let algorithm = match hash {
        DhChapHash::Sha256 => hkdf::HKDF_SHA256,
        DhChapHash::Sha384 => hkdf::HKDF_SHA384,
        DhChapHash::Sha512 => hkdf::HKDF_SHA512,
    };
    let label = format!("tls13 {label}");
    let lengths = form == Form::Standard;
    let (label_len, context_len) = ([label.len() as u8], [context.len() as u8]);
    let info: [&[u8]; 5] = [
        &if lengths { (key.len() as u16).to_be_bytes() } else { (key.len() as u16).to_le_bytes() },
        if lengths { &label_len } else { &[] },
        label.as_bytes(),
        if lengths { &context_len } else { &[] },
        context,
    ];
    let mut out = Zeroizing::new(vec![0; key.len()]);
    let prk = hkdf::Salt::new(algorithm, &[]).extract(key);
    prk.expand(&info, Len(key.len())).and_then(|okm| okm.fill(&mut out)).expect("no longer than 255 hashes");
    out
}

/// Host and subsystem of a TLS key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Parties<'a> {
    /// NQN of the host.
    pub host: &'a str,
    /// NQN of the subsystem.
    pub subsystem: &'a str,
}

/// Parses the identity of a TLS key; returns `None` if it is not an NVMe/TCP identity.
pub fn parties(identity: &[u8]) -> Option<Parties<'_>> {
    if identity.len() > IDENTITY_MAX {
        return None;
    }
    let mut words = std::str::from_utf8(identity).ok()?.split(' ');
    let version = words.next()?;
    let (host, subsystem, digest) = (words.next()?, words.next()?, words.next());
    let known = match version {
        "NVMe0R01" | "NVMe0R02" => digest.is_none(),
        "NVMe1R01" | "NVMe1R02" => digest.is_some_and(|digest| !digest.is_empty()),
        _ => false,
    };
    (known && !host.is_empty() && !subsystem.is_empty() && words.next().is_none())
        .then_some(Parties { host, subsystem })
}

/// TLS keys of a subsystem, by identity, and the hosts that have one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TlsKeys {
    by_identity: BTreeMap<Vec<u8>, Vec<Psk>>,
    hosts: BTreeSet<String>,
}

impl TlsKeys {
    /// Derives the TLS keys of hosts, given by NQN, for a subsystem and for discovery.
    pub fn new(hosts: &BTreeMap<String, TlsKey>, subsystem: &str) -> Self {
        let psks = |(host, key): (&String, &TlsKey)| {
            [subsystem, DISCOVERY_NQN]
                .map(|subsystem| key.psks(host, subsystem))
                .into_iter()
                .flatten()
                .collect::<Vec<_>>()
        };
        let mut by_identity: BTreeMap<_, Vec<_>> = BTreeMap::new();
        for psk in hosts.iter().flat_map(psks) {
            by_identity.entry(psk.identity.clone()).or_default().push(psk);
        }
        Self { by_identity, hosts: hosts.keys().cloned().collect() }
    }

    /// Returns the keys with this identity: two if the identity does not tell the encoding of the derivation.
    pub fn find(&self, identity: &[u8]) -> Vec<Psk> {
        let known = parties(identity).and_then(|_| self.by_identity.get(identity));
        known.cloned().unwrap_or_default()
    }

    /// Returns whether no host has a key.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// Returns whether a host has a key.
    pub fn has(&self, host: &str) -> bool {
        self.hosts.contains(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Examples from libnvme's own tests.
    const HOST: &str = "nqn.psk-test-host";
    const SUBSYSTEM: &str = "nqn.psk-test-subsys";
    const SHORT: &str = "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:";
    const LONG: &str = "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:";

    fn identities(text: &str) -> Vec<String> {
        let psks = TlsKey::parse(text).expect(text).psks(HOST, SUBSYSTEM);
        let mut names: Vec<_> = psks.into_iter().map(|psk| String::from_utf8(psk.identity).expect("text")).collect();
        names.dedup();
        names
    }

    #[test]
    fn identities_are_those_of_libnvme() {
        assert_eq!(
            identities(SHORT),
            [
                "NVMe0R01 nqn.psk-test-host nqn.psk-test-subsys",
                "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU=",
                "NVMe1R01 nqn.psk-test-host nqn.psk-test-subsys 66GuqV08TsAGII39teWUfwQwizjv06Jy8jOcX3NAAzM=",
            ]
        );
        assert_eq!(
            identities(LONG),
            [
                "NVMe0R02 nqn.psk-test-host nqn.psk-test-subsys",
                "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys \
                 QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
                "NVMe1R02 nqn.psk-test-host nqn.psk-test-subsys \
                 RsKmYJ3nAn1ApjjMloJFbAkLPivONDAX/xW327YBUsn2eGShXSjCZvBaOxscLqmz",
            ]
        );
    }

    /// Checks derived keys.  The first expected value was computed with `openssl kdf ... HKDF` and RFC 8446's labels,
    /// applied twice; the others come from the same labels.
    #[test]
    fn keys_for_tls_follow_the_standard() {
        let keys = |text: &str| {
            let psks = TlsKey::parse(text).expect(text).psks(HOST, SUBSYSTEM);
            [&psks[0], &psks[2]]
                .iter()
                .map(|psk| psk.secret.iter().map(|byte| format!("{byte:02x}")).collect())
                .collect::<Vec<String>>()
        };
        assert_eq!(
            keys(SHORT),
            [
                "05c6503551ad136e6ee32e6eeb3f6d500b69701d84ec71e328f65c7f51566f68",
                "8fc3c0badfd4c0c66fa3ca33aadd0314f85536cc9bc47338b60f3e6e563786ca",
            ]
        );
        assert_eq!(
            keys(LONG),
            [
                "f42ba63824cdfe421914c582921f85b5b5b7e2d4df084caeedc9be20b212e8bb0fe8a23e9d59a1c8fc6449da4970a78d",
                "a2b2f943f479fc682555cec89857c80ed004ce92f32a973d5764155bb7e36b17a85368a0666d250afac9282dda2e62ca",
            ]
        );
    }

    #[test]
    fn keys_without_a_transformation_are_used_as_they_are() {
        let plain = TlsKey::parse(&SHORT.replace(":01:", ":00:")).expect("a key");
        assert_eq!(plain.retained(HOST, Form::Standard), plain.key);
        assert_ne!(TlsKey::parse(SHORT).expect("a key").retained(HOST, Form::Standard), plain.key);
        assert!(plain.psks(HOST, SUBSYSTEM)[2].identity.starts_with(b"NVMe1R01 "));
    }

    /// Checks keys made by nvme-cli 2.3: `nvme gen-tls-key --hmac=H`.
    #[test]
    fn keys_of_nvme_cli_are_read() {
        for (text, len) in MADE {
            assert_eq!(TlsKey::parse(text).expect(text).key.len(), *len);
            assert!(!format!("{:?}", TlsKey::parse(text)).contains(&text[20..30]));
        }
    }
    const MADE: &[(&str, usize)] = &[
        ("NVMeTLSkey-1:01:vTrtLzXffweBNUwqd0J8QRyT5Ge44ZV8z6P9LGyndhMeb2D+:", 32),
        ("NVMeTLSkey-1:02:7aCoH1dgCGE+Rp5S0rdtkQq3lKlDmH0sKzLEjdsCFr8hgBKQ553dFsDtWMx+m+nFIrsBVw==:", 48),
    ];

    #[test]
    fn what_is_no_key_is_named() {
        for (text, why) in [
            (String::new(), PskError::Form),
            ("NVMeTLSkey-1:".into(), PskError::Form),
            (SHORT.replace("-1:", "-2:"), PskError::Form),
            (SHORT.replace(":01:", ":03:"), PskError::Form),
            (SHORT.trim_end_matches(':').into(), PskError::Form),
            (SHORT.replace(":01:", ":02:"), PskError::Length(32)),
            (LONG.replace(":02:", ":01:"), PskError::Length(48)),
            ("NVMeTLSkey-1:01:AAAAAAAA:".into(), PskError::Length(2)),
            (SHORT.replace("VRLb", "VRLc"), PskError::Checksum),
            (SHORT.replace("VRLb", "VR!b"), PskError::Form),
        ] {
            assert_eq!(TlsKey::parse(&text).expect_err(&text), why, "{text}");
        }
        assert!(TlsKey::parse(&format!(" {SHORT}\n")).is_ok());
    }

    #[test]
    fn identities_are_taken_apart() {
        for identity in identities(SHORT).into_iter().chain(identities(LONG)) {
            assert_eq!(parties(identity.as_bytes()), Some(Parties { host: HOST, subsystem: SUBSYSTEM }));
        }
        for wrong in [
            "",
            "NVMe0R01",
            "NVMe0R01 host",
            "NVMe0R01  sub",
            "NVMe0R01 host ",
            "NVMe0R01 host sub digest",
            "NVMe1R01 host sub",
            "NVMe1R01 host sub ",
            "NVMe1R01 host sub digest more",
            "NVMe0R03 host sub",
            "NVMe2R01 host sub digest",
            "Client_identity",
        ] {
            assert_eq!(parties(wrong.as_bytes()), None, "{wrong}");
        }
        assert_eq!(parties(format!("NVMe0R01 {} sub", "h".repeat(600)).as_bytes()), None);
        assert_eq!(parties(b"NVMe0R01 \xFF sub"), None);
    }

    #[test]
    fn a_host_has_keys_for_its_subsystem_and_discovery_only() {
        let hosts = BTreeMap::from([(HOST.to_owned(), TlsKey::parse(SHORT).expect("a key"))]);
        let keys = TlsKeys::new(&hosts, SUBSYSTEM);
        assert!(keys.has(HOST) && !keys.has("nqn.other"));
        let name = |host: &str, subsystem: &str| format!("NVMe0R01 {host} {subsystem}").into_bytes();
        for subsystem in [SUBSYSTEM, DISCOVERY_NQN] {
            let found = keys.find(&name(HOST, subsystem));
            assert!(found.len() == 2 && found.iter().all(|psk| psk.identity == name(HOST, subsystem)));
            assert_ne!(found[0].secret, found[1].secret);
        }
        assert_eq!(keys.find(&name(HOST, "nqn.psk-other")), []);
        assert_eq!(keys.find(&name("nqn.other", SUBSYSTEM)), []);
    }
}
