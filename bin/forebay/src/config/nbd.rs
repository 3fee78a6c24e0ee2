//! NBD access configuration: TLS, networks and names.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_nbd::Tls;
use forebay_nbd::access::NbdAccessControl;
use forebay_reactor::{Addr, Network};
use forebay_tls::{Acceptor, Certificate, Psk, PskHash, PskLookup, ServerCertificate};
use serde::Deserialize;

use super::parse_addr;
use super::peers::read_private;
use crate::cli::ServeArgs;
use crate::failure::{Failure, Result};

/// Minimum length of a pre-shared key in bytes.
const KEY_MIN: usize = 16;
/// Maximum length of a user name in bytes, with margin below the limit of TLS.
const USER_MAX: usize = 1024;

const CREDENTIALS_HINT: &str = "the directory holds server-cert.pem, server-key.pem and, to verify hosts, ca-cert.pem, as \
     QEMU's 'tls-creds-x509' has them; docs/operations.md shows how to make them";

/// `[nbd-tls]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NbdTlsSection {
    credentials: Option<PathBuf>,
    verify_peer: Option<bool>,
    psk: Option<PathBuf>,
    names: Option<Vec<String>>,
}

/// Access control and TLS of the NBD front.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NbdAccess {
    /// TLS mode of each listening address.
    pub tls: Vec<Tls>,
    /// Networks from which hosts may connect; if empty, all.
    pub networks: Vec<Network>,
    /// Names that hosts with TLS must have; if empty, any.
    pub names: Vec<String>,
    /// Server certificate.
    pub certificate: Option<ServerCertificate>,
    /// Pre-shared keys, each with its user.
    pub keys: Arc<Vec<Psk>>,
}

/// Key lookup by user.
struct Users(Arc<Vec<Psk>>);

impl PskLookup for Users {
    fn find(&self, identity: &[u8]) -> Vec<Psk> {
        self.0.iter().filter(|psk| psk.identity == identity).cloned().collect()
    }
}

impl NbdAccess {
    pub(super) fn resolve(
        section: NbdTlsSection,
        allow: Option<Vec<String>>,
        serve: &ServeArgs,
        tls: Vec<Tls>,
    ) -> Result<Self> {
        let allow = if serve.nbd_allow.is_empty() { allow.unwrap_or_default() } else { serve.nbd_allow.clone() };
        let network = |text: &String| text.parse().map_err(|why| Failure::invalid(format!("nbd-allow: {why}")));
        let networks = allow.iter().map(network).collect::<Result<_>>()?;
        let certificate = match serve.nbd_tls.clone().or(section.credentials) {
            Some(dir) => Some(read_credentials(&dir, section.verify_peer.unwrap_or(true))?),
            None if section.verify_peer == Some(true) => {
                return Err(Failure::invalid("nbd-tls.verify-peer is set without credentials").hint(CREDENTIALS_HINT));
            }
            None => None,
        };
        let keys = match serve.nbd_psk.clone().or(section.psk) {
            Some(path) => read_keys(&path)?,
            None => Vec::new(),
        };
        let offers = tls.iter().any(|tls| *tls != Tls::None);
        match (offers, certificate.is_some() || !keys.is_empty()) {
            (true, false) => {
                let what = "an address of nbd offers TLS, but there is neither a certificate nor a key";
                return Err(Failure::invalid(what).hint("--nbd-tls DIR with certificates, or --nbd-psk FILE with keys"));
            }
            (false, true) => {
                let what = "there are certificates or keys for TLS, but no address of nbd offers it";
                return Err(Failure::invalid(what).hint("--nbd ADDR,tls=required"));
            }
            _ => {}
        }
        let names = section.names.unwrap_or_default();
        let verifies = certificate.as_ref().is_some_and(|shown| shown.client_authorities.is_some());
        if !names.is_empty() && !verifies && keys.is_empty() {
            let what = "nbd-tls.names has names, but no host can show one: there are no keys, and no host is verified";
            return Err(Failure::invalid(what).hint("nbd-tls.verify-peer = true, or nbd-tls.psk"));
        }
        let this = Self { tls, networks, names, certificate, keys: Arc::new(keys) };
        // Rejects settings that the TLS library does not accept, before anything depends on them.
        this.access()?;
        Ok(this)
    }

    /// Converts the settings to the front's form.
    ///
    /// # Errors
    /// If the certificate and its key cannot be used.
    pub fn access(&self) -> Result<NbdAccessControl> {
        let keys: Option<Arc<dyn PskLookup>> = match self.keys.is_empty() {
            true => None,
            false => Some(Arc::new(Users(self.keys.clone()))),
        };
        let tls = match keys.is_some() || self.certificate.is_some() {
            true => Some(Acceptor::with_certificate(keys, self.certificate.as_ref()).map_err(|why| {
                Failure::invalid(format!("the certificates of nbd-tls cannot be used: {why}")).hint(CREDENTIALS_HINT)
            })?),
            false => None,
        };
        Ok(NbdAccessControl { networks: self.networks.clone(), names: self.names.clone(), tls })
    }

    /// Returns a reason for the log if an address is open to any host that can reach it.
    pub fn is_open(&self, tls: Tls) -> Option<&'static str> {
        let verifies = self.certificate.as_ref().is_none_or(|shown| shown.client_authorities.is_some());
        match tls {
            Tls::Required if verifies => None,
            _ if !self.networks.is_empty() => Some("hosts are known by their addresses alone"),
            Tls::Required => Some("with TLS, but host certificates are not verified: anyone who can connect can write"),
            _ => Some("without authentication: anyone who can connect can write"),
        }
    }
}

/// Reads a directory of certificates with the file names that QEMU uses.
fn read_credentials(dir: &Path, verify_peer: bool) -> Result<ServerCertificate> {
    let read = |name: &str| {
        let path = dir.join(name);
        fs::read(&path)
            .map_err(|error| Failure::io(error, format_args!("reading the certificate {}", path.display())))
            .map_err(|failure| failure.hint(CREDENTIALS_HINT))
    };
    let chain = read("server-cert.pem")?;
    let key = read_private(&dir.join("server-key.pem"))?.into_bytes().into();
    let client_authorities = verify_peer.then(|| read("ca-cert.pem")).transpose()?;
    Ok(ServerCertificate { certificate: Certificate { chain, key }, client_authorities })
}

/// Reads `USER:HEX` lines, as `psktool` writes them.
fn read_keys(path: &Path) -> Result<Vec<Psk>> {
    let text = read_private(path)?;
    let mut users = BTreeSet::new();
    let mut keys = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        // The line itself is a secret and is not shown.
        let wrong = |why: &str| {
            Failure::invalid(format!("line {number} of {}: {why}", path.display()))
                .hint("each line is USER:HEX, as 'psktool -u USER -p FILE' writes it")
        };
        let (user, secret) = line.rsplit_once(':').ok_or_else(|| wrong("there is no colon"))?;
        let secret = from_hex(secret).ok_or_else(|| wrong("the key has other characters than hexadecimal digits"))?;
        if user.is_empty() || user.len() > USER_MAX {
            return Err(wrong("a user has a name of 1 to 1024 bytes"));
        }
        if secret.len() < KEY_MIN {
            return Err(wrong("a key has 16 bytes at least, which are 32 digits"));
        }
        if !users.insert(user.to_owned()) {
            return Err(wrong("the user has a key already"));
        }
        // GnuTLS supports only SHA-256 for pre-shared keys.
        keys.push(Psk { identity: user.as_bytes().to_vec(), secret: secret.into(), hash: PskHash::Sha256 });
    }
    match keys.is_empty() {
        true => Err(Failure::invalid(format!("{} holds no key", path.display())).hint("psktool -u USER -p FILE")),
        false => Ok(keys),
    }
}

fn from_hex(text: &str) -> Option<Vec<u8>> {
    if !text.len().is_multiple_of(2) || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    (0..text.len()).step_by(2).map(|at| u8::from_str_radix(&text[at..at + 2], 16).ok()).collect()
}

/// Parses a listening address, `ADDR[,tls=required|allowed|none]`.
pub(super) fn parse_listener(text: &str) -> Result<(Addr, Tls)> {
    let (addr, tls) = match text.split_once(",tls=") {
        None => (text, Tls::None),
        Some((addr, "none")) => (addr, Tls::None),
        Some((addr, "allowed")) => (addr, Tls::Allowed),
        Some((addr, "required")) => (addr, Tls::Required),
        Some((_, other)) => {
            return Err(Failure::invalid(format!("nbd: '{text}': tls is required, allowed or none, not '{other}'")));
        }
    };
    Ok((parse_addr(addr)?, tls))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const CERTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../base/tls/tests/certs");

    fn put(path: &Path, text: &[u8], mode: u32) {
        fs::write(path, text).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its mode");
    }

    /// Creates a directory as QEMU expects it, and a key file in it.
    fn credentials() -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, mode) in [("ca-cert.pem", 0o644), ("server-cert.pem", 0o644), ("server-key.pem", 0o600)] {
            put(&dir.path().join(name), &fs::read(Path::new(CERTS).join(name)).expect("there"), mode);
        }
        put(
            &dir.path().join("keys.psk"),
            format!("# users\n\none:{}\na:b:{}\n", "ab".repeat(16), "0F".repeat(32)).as_bytes(),
            0o600,
        );
        dir
    }

    fn resolve(text: &str, serve: &ServeArgs, tls: Tls) -> Result<NbdAccess> {
        NbdAccess::resolve(toml::from_str(text).expect("a section"), None, serve, vec![Tls::None, tls])
    }

    #[test]
    fn certificates_and_keys_come_from_files_and_go_with_listeners() {
        let dir = credentials();
        let (path, psk) = (dir.path().display(), dir.path().join("keys.psk"));
        let text = format!("credentials = '{path}'\npsk = '{}'\nnames = ['CN=one,O=x']\n", psk.display());
        let found = resolve(&text, &ServeArgs::default(), Tls::Required).expect("a configuration");
        assert!(found.certificate.as_ref().is_some_and(|shown| shown.client_authorities.is_some()));
        let users: Vec<_> = found.keys.iter().map(|key| (key.identity.clone(), key.secret.len())).collect();
        assert_eq!(users, [(b"one".to_vec(), 16), (b"a:b".to_vec(), 32)]);
        assert!(!format!("{found:?}").contains("171"), "a key is shown");
        assert!(found.access().expect("what was checked").tls.is_some());
        assert_eq!(found.is_open(Tls::Required), None);
        assert!(found.is_open(Tls::Allowed).is_some());
        // Files for verifying hosts are optional if hosts are not verified.
        fs::remove_file(dir.path().join("ca-cert.pem")).expect("removed");
        let unverified = format!("credentials = '{path}'\nverify-peer = false\n");
        let found = resolve(&unverified, &ServeArgs::default(), Tls::Allowed).expect("a configuration");
        assert!(found.is_open(Tls::Required).is_some());
        let flags = ServeArgs { nbd_psk: Some(psk), nbd_allow: vec!["10.0.0.0/8".into()], ..ServeArgs::default() };
        let found = resolve("", &flags, Tls::Required).expect("flags");
        assert_eq!((found.certificate.is_none(), found.keys.len(), found.networks.len()), (true, 2, 1));
        assert_eq!(
            resolve("", &ServeArgs::default(), Tls::None).expect("nothing").access().expect("nothing").networks,
            []
        );
    }

    #[test]
    fn what_is_wrong_is_said() {
        let dir = credentials();
        let path = dir.path().display();
        let key = |text: &str| {
            put(&dir.path().join("wrong.psk"), text.as_bytes(), 0o600);
            format!("psk = '{path}/wrong.psk'")
        };
        let says = |text: &str, tls: Tls, says: &str| {
            let failure = resolve(text, &ServeArgs::default(), tls).expect_err(text);
            assert!(failure.message.contains(says), "{text}: {failure}");
        };
        let good = "ab".repeat(16);
        says("", Tls::Required, "neither");
        says("", Tls::Allowed, "neither");
        says(&format!("credentials = '{path}'"), Tls::None, "no address");
        says(&format!("psk = '{path}/keys.psk'"), Tls::None, "no address");
        says("verify-peer = true", Tls::None, "without credentials");
        says("credentials = '/nowhere'", Tls::Required, "/nowhere/server-cert.pem");
        says(&format!("credentials = '{path}'\nverify-peer = false\nnames = ['x']"), Tls::Required, "names");
        says(&key("one\n"), Tls::Required, "colon");
        says(&key("one:abc\n"), Tls::Required, "line 1");
        says(&key("\none:abcd\n"), Tls::Required, "line 2");
        says(&key(&format!(":{good}")), Tls::Required, "name");
        says(&key(&format!("one:{good}\none:{good}")), Tls::Required, "already");
        says(&key("# nothing\n"), Tls::Required, "no key");
        put(&dir.path().join("keys.psk"), b"one:00", 0o644);
        says(&format!("psk = '{path}/keys.psk'"), Tls::Required, "others");
        // Cases: a key that does not match the certificate, one that other users may read, and a missing one.
        let file = |name: &str| fs::read(Path::new(CERTS).join(name)).expect("there");
        put(&dir.path().join("server-key.pem"), &file("client-key.pem"), 0o600);
        says(&format!("credentials = '{path}'"), Tls::Required, "cannot be used");
        put(&dir.path().join("server-key.pem"), &file("server-key.pem"), 0o644);
        says(&format!("credentials = '{path}'"), Tls::Required, "others");
        put(&dir.path().join("ca-cert.pem"), b"no certificate", 0o644);
        put(&dir.path().join("server-key.pem"), &file("server-key.pem"), 0o600);
        says(&format!("credentials = '{path}'"), Tls::Required, "cannot be used");
        let flags = ServeArgs { nbd_allow: vec!["10.0.0.0/99".into()], ..ServeArgs::default() };
        let failure = resolve("", &flags, Tls::None).expect_err("no network");
        assert!(failure.message.contains("nbd-allow") && failure.message.contains("10.0.0.0/99"), "{failure}");
    }

    #[test]
    fn listeners_say_whether_they_offer_tls() {
        for (text, tls) in [
            ("127.0.0.1:1", Tls::None),
            ("127.0.0.1:1,tls=none", Tls::None),
            ("127.0.0.1:1,tls=allowed", Tls::Allowed),
            ("unix:/x,tls=required", Tls::Required),
        ] {
            assert_eq!(parse_listener(text).expect(text).1, tls);
        }
        assert!(parse_listener("127.0.0.1:1,tls=yes").is_err());
    }
}
