//! Access control: networks, names proved by TLS, and the host lists of exports.

use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, PoisonError, RwLock};

use forebay_reactor::{Addr, Network};
use forebay_tls::{Acceptor, CertificateSubject, PeerIdentity};

/// Maximum bytes of a host name in a pattern.
const NAME_MAX: usize = 1024;

/// Host name proved by TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostName {
    /// User name of the pre-shared key.
    Key(String),
    /// Subject of the certificate.
    Certificate(CertificateSubject),
}

impl HostName {
    /// Returns the name that a peer's session has proved; `None` for an anonymous peer.
    pub(crate) fn of(peer: PeerIdentity) -> Option<Self> {
        match peer {
            PeerIdentity::Key(identity) => Some(Self::Key(match String::from_utf8(identity) {
                Ok(name) => name,
                Err(error) => error.as_bytes().escape_ascii().to_string(),
            })),
            PeerIdentity::Certificate(subject) => Some(Self::Certificate(subject)),
            PeerIdentity::Anonymous => None,
        }
    }

    /// Returns whether the name equals `pattern`, or begins with it if `pattern` ends with `*`.  For a certificate, a
    /// pattern with `=` applies to the distinguished name, any other to the common name: a common name may look like
    /// a distinguished name.
    pub fn matches(&self, pattern: &str) -> bool {
        let fits = |name: &str| match pattern.strip_suffix('*') {
            Some(start) => name.starts_with(start),
            None => name == pattern,
        };
        match self {
            Self::Key(name) => fits(name),
            Self::Certificate(_) if pattern == "*" => true,
            Self::Certificate(subject) if pattern.contains('=') => fits(&subject.distinguished_name),
            Self::Certificate(subject) => subject.common_name.as_deref().is_some_and(fits),
        }
    }
}

impl fmt::Display for HostName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Key(name) => name.fmt(f),
            Self::Certificate(subject) => subject.distinguished_name.fmt(f),
        }
    }
}

/// Host at the other end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdHost {
    /// Source address.
    pub addr: Addr,
    /// Name proved by TLS.
    pub name: Option<HostName>,
}

/// Pattern for hosts that may use an export: one entry of its list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPattern {
    /// Hosts on a Unix socket: `unix`.
    Unix,
    /// Hosts in a network: `ADDRESS` or `ADDRESS/BITS`.
    Network(Network),
    /// Hosts with a name proved by TLS; a trailing `*` matches any suffix.
    Name(String),
}

impl HostPattern {
    /// Returns whether a host matches.
    pub fn matches(&self, host: &NbdHost) -> bool {
        match (self, &host.addr) {
            (Self::Unix, addr) => matches!(addr, Addr::Unix(_)),
            (Self::Network(network), Addr::Tcp(addr)) => network.contains(addr.ip()),
            (Self::Network(_), Addr::Unix(_)) => false,
            (Self::Name(pattern), _) => host.name.as_ref().is_some_and(|name| name.matches(pattern)),
        }
    }
}

impl FromStr for HostPattern {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        if text == "unix" {
            return Ok(Self::Unix);
        }
        if let Ok(network) = text.parse::<Network>() {
            return Ok(Self::Network(network));
        }
        // A mistyped network must not become a name that no host has.
        let address = text.split_once('/').map_or("", |(address, _)| address);
        if address.parse::<std::net::IpAddr>().is_ok() {
            return Err(format!("'{text}' is not a network; use ADDRESS or ADDRESS/BITS"));
        }
        if text.is_empty() || text.len() > NAME_MAX || text.chars().any(char::is_control) {
            let shown = text.escape_debug();
            return Err(format!("'{shown}' is not a host: use a network, 'unix', or the name of a certificate or key"));
        }
        Ok(Self::Name(text.to_owned()))
    }
}

/// Access control of connections.
#[derive(Debug, Clone, Default)]
pub struct NbdAccessControl {
    /// Networks from which hosts may connect; empty for any.  Unix sockets have permissions of their own.
    pub networks: Vec<Network>,
    /// Names that hosts with TLS must have, where a trailing `*` matches any suffix; empty for any.
    pub names: Vec<String>,
    /// Certificates and keys; without them TLS is not offered.
    pub tls: Option<Acceptor>,
}

impl NbdAccessControl {
    /// Returns the reason why a host may not connect from an address; `None` if it may.
    pub(crate) fn refuses_address(&self, addr: &Addr) -> Option<&'static str> {
        let Addr::Tcp(addr) = addr else { return None };
        let listed = self.networks.is_empty() || self.networks.iter().any(|network| network.contains(addr.ip()));
        (!listed).then_some("its address is not allowed")
    }

    /// Returns the reason why a host with TLS is refused by name; `None` if it is admitted.
    pub(crate) fn refuses_name(&self, name: Option<&HostName>) -> Option<&'static str> {
        if self.names.is_empty() {
            return None;
        }
        match name {
            None => Some("it has no name, and only some names are allowed"),
            Some(name) if !self.names.iter().any(|pattern| name.matches(pattern)) => Some("its name is not allowed"),
            Some(_) => None,
        }
    }
}

/// Replaceable [`NbdAccessControl`] settings, shared by the servers of all cores.  Clones are handles to the same
/// settings.
#[derive(Debug, Clone, Default)]
pub struct SharedAccess(Arc<RwLock<Arc<NbdAccessControl>>>);

impl SharedAccess {
    /// Replaces the settings for hosts that connect from now on.
    pub fn set(&self, access: NbdAccessControl) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(access);
    }

    /// Returns the current settings.
    pub fn get(&self) -> Arc<NbdAccessControl> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(distinguished: &str, common: &str) -> HostName {
        HostName::Certificate(CertificateSubject {
            distinguished_name: distinguished.into(),
            common_name: Some(common.into()),
        })
    }

    fn host(addr: &str, name: Option<HostName>) -> NbdHost {
        NbdHost { addr: addr.parse().expect("an address"), name }
    }

    #[test]
    fn patterns_mean_networks_names_and_unix_sockets() {
        let matches = |pattern: &str, host: &NbdHost| pattern.parse::<HostPattern>().expect(pattern).matches(host);
        let plain = host("10.1.2.3:5", None);
        assert!(matches("10.0.0.0/8", &plain) && matches("10.1.2.3", &plain) && !matches("10.2.0.0/16", &plain));
        assert!(!matches("unix", &plain) && !matches("*", &plain), "a host without a name has none");
        let local = host("unix:/x", None);
        assert!(matches("unix", &local) && !matches("0.0.0.0/0", &local));
        let named = host("10.1.2.3:5", Some(certificate("CN=one,O=Example", "one")));
        assert!(matches("one", &named) && matches("CN=one,O=Example", &named) && matches("on*", &named));
        assert!(matches("*", &named) && matches("10.0.0.0/8", &named));
        assert!(!matches("CN=one", &named) && !matches("One", &named) && !matches("onex*", &named));
        // A common name that looks like the distinguished name of another host.
        let posing = host("10.1.2.3:5", Some(certificate("CN=CN\\=one\\,O\\=Example,O=Other", "CN=one,O=Example")));
        assert!(!matches("CN=one,O=Example", &posing) && !matches("CN=one*", &posing) && matches("CN=CN*", &posing));
        let key = host("unix:/x", Some(HostName::Key("user".into())));
        assert!(matches("user", &key) && matches("unix", &key) && !matches("use", &key));
        // The user name of a key cannot match another kind of pattern.
        assert!(!matches("unix", &host("10.1.2.3:5", Some(HostName::Key("unix".into())))));
        for wrong in ["", "10.0.0.0/33", "::1/x", "a\nb", &"x".repeat(2000)] {
            assert!(wrong.parse::<HostPattern>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn addresses_and_names_are_listed_or_all_may() {
        let addr = |text: &str| text.parse::<Addr>().expect("an address");
        let open = NbdAccessControl::default();
        assert!(open.refuses_address(&addr("192.0.2.1:1")).is_none() && open.refuses_name(None).is_none());
        let networks = vec!["10.0.0.0/8".parse().expect("a network")];
        let names = vec!["one".to_owned(), "host-*".to_owned()];
        let listed = NbdAccessControl { networks, names, tls: None };
        assert!(listed.refuses_address(&addr("10.9.9.9:1")).is_none());
        assert!(listed.refuses_address(&addr("unix:/x")).is_none());
        assert!(listed.refuses_address(&addr("192.0.2.1:1")).is_some());
        assert!(listed.refuses_name(None).is_some());
        for (name, may) in [("one", true), ("host-7", true), ("two", false)] {
            let refused = listed.refuses_name(Some(&HostName::Key(name.into())));
            assert_eq!(refused.is_none(), may, "{name}");
        }
    }

    #[test]
    fn identities_that_are_no_text_are_shown_escaped() {
        assert_eq!(HostName::of(PeerIdentity::Key(b"a\xFF".to_vec())), Some(HostName::Key("a\\xff".into())));
        assert_eq!(HostName::of(PeerIdentity::Anonymous), None);
    }
}
