use std::collections::BTreeMap;

use super::*;

#[derive(Default)]
struct Outside {
    files: BTreeMap<PathBuf, String>,
    variables: BTreeMap<String, String>,
}

impl Outside {
    fn with(files: &[(&str, &str)]) -> Self {
        Self { files: files.iter().map(|(path, text)| (path.into(), (*text).into())).collect(), ..Self::default() }
    }
}

impl Environment for Outside {
    fn read(&self, path: &Path) -> io::Result<String> {
        self.files.get(path).cloned().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
    fn variable(&self, name: &str) -> Option<String> {
        self.variables.get(name).cloned()
    }
    fn host(&self) -> String {
        "here".into()
    }
    fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        if name == "mon.example" { Ok(vec![[192, 0, 2, 7].into()]) } else { Err(io::ErrorKind::NotFound.into()) }
    }
    fn service(&self, name: &str, domain: Option<&str>) -> io::Result<Vec<(String, u16)>> {
        match (name, domain) {
            ("ceph-mon", None) | ("mons", Some("a.example")) => {
                Ok(vec![("mon.example".into(), 3300), ("mon.example".into(), 6789)])
            }
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }
}

const KEY: &str = "AQAAAAAAAAAAABAABwcHBwcHBwcHBwcHBwcHBw==";

fn keyring(name: &str) -> String {
    format!("[client.other]\n\tkey = nonsense\n[{name}]\n\tkey = {KEY}\n\tcaps mon = \"allow *\"\n")
}

#[test]
fn settings_that_multiply_each_other_end() {
    let conf = |text: &str| Conf::parse(text, "ceph", "admin", "here");
    // Seven self-references per level would expand to millions.
    let itself = conf("a = $a$a$a$a$a$a$a\n").expect("settings").get("a").expect("a setting");
    assert!(itself.contains("$a") && itself.len() < 1 << 20, "{} bytes", itself.len());
    let mut text = String::from("z = \n");
    let names = ["b", "c", "d", "e", "f", "g", "h", "z"];
    for pair in names.windows(2) {
        text += &format!("{} = {}\n", pair[0], format!("${}", pair[1]).repeat(50));
    }
    assert!(conf(&text).expect("settings").get("b").expect("a setting").len() < 1 << 20);
    // Without a name, nothing is substituted.
    assert_eq!(conf("a = $$x$\n").expect("settings").get("a").as_deref(), Some("$$x$"));
    let (line, text) = conf("[global]\n = x\n").expect_err("no name");
    assert!(line == 2 && text.contains("sets nothing"), "{line}: {text}");
}

fn settings(config: &CephConfig) -> Settings {
    config.said.with(&BTreeMap::new()).expect("settings").0
}

#[test]
fn the_usual_places() {
    let outside = Outside::with(&[
        ("/etc/ceph/ceph.conf", "[global]\nmon host = 10.0.0.1\n"),
        ("/etc/ceph/ceph.client.admin.keyring", &keyring("client.admin")),
    ]);
    let config = CephConfig::resolve(&Flags::default(), &outside).expect("a configuration");
    assert_eq!(
        (config.id.as_str(), config.monitors.clone()),
        ("admin", vec!["10.0.0.1:3300".parse().expect("an address")])
    );
    assert!(matches!(config.credentials, Credentials::Cephx(_)));
    assert_eq!(settings(&config).osd_modes, [mode::CRC, mode::SECURE]);
    assert_eq!(settings(&config).osd_timeout, None);
    assert!(config.ask_monitors);
}

#[test]
fn flags_and_the_environment() {
    let mut outside = Outside::with(&[
        (
            "/x.conf",
            "mon host = mon.example\nms_client_mode = secure\nkeyring = /k/$cluster.$name\n[client.u]\nrados osd op timeout = 2.5 # s\n",
        ),
        ("/k/west.client.u", &keyring("client.u")),
    ]);
    outside.variables.insert("CEPH_CONF".into(), "/x.conf".into());
    let flags = Flags { id: Some("u".into()), cluster: Some("west".into()), ..Flags::default() };
    let config = CephConfig::resolve(&flags, &outside).expect("a configuration");
    assert_eq!(config.monitors, ["192.0.2.7:3300".parse().expect("an address")]);
    assert_eq!(settings(&config).osd_modes, [mode::SECURE]);
    assert_eq!(settings(&config).osd_timeout, Some(Duration::from_millis(2500)));
    let error = CephConfig::resolve(&Flags { id: Some("nobody".into()), ..flags }, &outside).expect_err("no key");
    assert!(error.to_string().contains("/k/west.client.nobody"), "{error}");
}

#[test]
fn the_name_service() {
    let outside = Outside::with(&[("/c", "auth client required = none")]);
    let flags = Flags { conf: Some("/c".into()), ..Flags::default() };
    let config = CephConfig::resolve(&flags, &outside).expect("a configuration");
    assert_eq!(config.monitors, ["192.0.2.7:3300".parse().expect("an address")]);
    assert!(matches!(config.credentials, Credentials::None));
    // The SRV service name can be changed and may include a domain; settings from monitors can be disabled.
    let text = "auth client required = none\nmon dns srv name = mons_a.example\nno mon config = true\n";
    let outside = Outside::with(&[("/c", text)]);
    let config = CephConfig::resolve(&flags, &outside).expect("a configuration");
    assert_eq!(config.monitors, ["192.0.2.7:3300".parse().expect("an address")]);
    assert!(!config.ask_monitors);
}

#[test]
fn either_way_to_show_who_we_are() {
    let text = "auth client required = cephx, none\nmon host = 10.0.0.1\n";
    let flags = Flags { conf: Some("/c".into()), ..Flags::default() };
    let resolved = |outside: &Outside| CephConfig::resolve(&flags, outside).map(|config| config.credentials);
    assert!(matches!(resolved(&Outside::with(&[("/c", text)])), Ok(Credentials::None)));
    let with_key = Outside::with(&[("/c", text), ("/etc/ceph/ceph.keyring", &keyring("client.admin"))]);
    assert!(matches!(resolved(&with_key), Ok(Credentials::Cephx(_))));
}

#[test]
fn what_is_wrong_is_said() {
    let check = |text: &str, says: &str| {
        let outside = Outside::with(&[("/c", text)]);
        let error =
            CephConfig::resolve(&Flags { conf: Some("/c".into()), ..Flags::default() }, &outside).expect_err(text);
        assert!(error.to_string().contains(says), "{text}: {error}");
    };
    check("[global\n", "/c:1: ");
    check("\n\nnonsense\n", "/c:3: ");
    check("auth client required = gss", "cephx and none");
    check("auth client required = none\nmon host = v1:1.2.3.4", "msgr2");
    check("auth client required = none\nmon host = h:x", "no address");
    check("auth client required = none\nmon host = 1.2.3.4\nms client mode = strange", "'crc' and 'secure'");
    check("auth client required = none\nmon host = 1.2.3.4\nrados osd op timeout = soon", "seconds");
    check("key = short\nmon host = 1.2.3.4", "no key");
    check(
        "key = AgABAAAAAgAAACAAAAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=\nmon host = 1.2.3.4",
        "type is 2, and this build knows keys of type 1",
    );
    let error = CephConfig::resolve(&Flags::default(), &Outside::default()).expect_err("nothing is there");
    assert!(error.to_string().contains("/etc/ceph/ceph.conf"), "{error}");
}

#[test]
fn lines_quotes_and_variables() {
    let text = "a b = one \\\n two\nc = \"x # y\" ; note\nself = $self\nd_d = ${c}/$id/$unknown\n[client]\nc = z\n";
    let conf = Conf::parse(text, "ceph", "admin", "h").expect("a configuration");
    assert_eq!(conf.get("a_b").as_deref(), Some("one  two"));
    assert_eq!(conf.get("c").as_deref(), Some("z"));
    assert_eq!(conf.get("d_d").as_deref(), Some("z/admin/$unknown"));
    assert_eq!(conf.get("self").as_deref(), Some("$self"));
    assert!(Conf::parse("a = 'x", "ceph", "admin", "h").is_err());
}

#[test]
fn a_last_line_that_ends_in_a_backslash_is_read() {
    let read = |text: &str| Conf::parse(text, "ceph", "admin", "h");
    for text in ["a = 1\nb = 2 \\", "a = 1\nb = 2 \\\n", "a = 1\nb = \\\n2 \\"] {
        let conf = read(text).expect(text);
        assert_eq!((conf.get("a").as_deref(), conf.get("b").as_deref()), (Some("1"), Some("2")), "{text}");
    }
    assert_eq!(read("a = 1\nnonsense \\").map_err(|(line, _)| line), Err(2));
    assert_eq!(read("\\").expect("nothing is in it").get("a"), None);
}
