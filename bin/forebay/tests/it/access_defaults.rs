//! Access that the configuration and changes at run time decide together: what is meant for some hosts never opens to
//! others, whatever becomes of files and names.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::common::{Nbd, Site};
use crate::hosts::*;
use forebay_iscsi_host::client::{Client as Initiator, Options};
use forebay_reactor::Addr;
use serde_json::json;

/// A daemon with a configuration, which a test changes and has read again.
struct Configured {
    site: Site,
    flags: Vec<String>,
}

impl Configured {
    fn new(text: &str) -> Self {
        let site = Site::new();
        let path = file(&site, "forebay.toml", text);
        let path = path.to_str().expect("a path").to_owned();
        let flags = FRONTS.iter().map(|&flag| flag.to_owned()).chain(["--config".to_owned(), path]).collect();
        let mut this = Self { site, flags };
        this.start();
        this
    }

    fn start(&mut self) {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        self.site.start_with_flags(&flags);
    }

    fn restart(&mut self) {
        self.site.stop();
        self.start();
    }

    fn write(&self, text: &str) {
        file(&self.site, "forebay.toml", text);
    }

    /// Text of a daemon that does not start, which ends with an exit code.
    fn fails_to_start(&self, code: i32) -> String {
        let flags: Vec<&str> = self.flags.iter().map(String::as_str).collect();
        self.site.run(&[&["serve"][..], &flags].concat()).fails(code)
    }

    fn nqn(&self) -> String {
        self.site.json(&["status"])["nvme_nqn"].as_str().expect("a name").to_owned()
    }

    fn iqn(&self) -> String {
        self.site.json(&["status"])["iscsi_name"].as_str().expect("a name").to_owned()
    }

    /// Connects as a host to the default subsystem; returns whether it is admitted.
    fn admission(&self, host: &str) -> Admission {
        admission(&address(&self.site, "nvme"), &self.nqn(), host)
    }
}

fn expose(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("its mode");
}

/// Says why an initiator that proves nothing is refused; empty for one that is not.
fn refusal(addr: &Addr, target: &str, initiator: &str) -> String {
    let done = on_reactor(async { Initiator::login(addr, &Options::new(target, initiator)).await.err() });
    done.map_or_else(String::new, |error| error.to_string())
}

/// Status class and detail of a login that was to prove something (RFC 7143, 11.13.5).
const AUTHENTICATION_FAILED: &str = "0x0201";

#[test]
fn an_initiator_that_is_added_proves_what_the_others_do() {
    let mut daemon = Configured::new(&format!(
        "[iscsi-target]\ninitiators = ['{CAROL}']\nchap = {{ user = 'carol', secret = 'a long enough secret' }}\n"
    ));
    let secret = file(&daemon.site, "chap", "another long secret\n");
    let chap = format!("dave,{}", secret.display());
    daemon.site.run(&["iscsi-target", "create", TARGET, "--chap", &chap, "--initiator", CAROL]).ok();
    // What was read counts, wherever its file is now.
    fs::rename(&secret, daemon.site.path("elsewhere")).expect("moved");
    for target in [daemon.iqn(), TARGET.to_owned()] {
        let allowed = daemon.site.json(&["iscsi-target", "allow", "--target", &target, DAVE]);
        assert!(allowed["chap"].is_string(), "{allowed}");
        assert_eq!(allowed["initiators"], json!([CAROL, DAVE]));
        let refused = refusal(&address(&daemon.site, "iscsi"), &target, DAVE);
        assert!(refused.contains(AUTHENTICATION_FAILED), "{target}: {refused:?}");
        daemon.site.run(&["iscsi-target", "deny", "--target", &target, DAVE]).ok();
        let refused = refusal(&address(&daemon.site, "iscsi"), &target, CAROL);
        assert!(refused.contains(AUTHENTICATION_FAILED), "{target}: {refused:?}");
    }
    // After a start without the file no host is admitted there; with it everything is as before.
    daemon.restart();
    assert!(refusal(&address(&daemon.site, "iscsi"), TARGET, CAROL).contains("0x0202"));
    fs::rename(daemon.site.path("elsewhere"), &secret).expect("moved back");
    daemon.site.run(&["iscsi-target", "allow", "--target", TARGET, DAVE]).ok();
    assert!(refusal(&address(&daemon.site, "iscsi"), TARGET, DAVE).contains(AUTHENTICATION_FAILED));
}

#[test]
fn the_last_host_of_the_default_subsystem_is_not_denied_into_a_list_of_everybody() {
    let listed = format!("[nvme-subsystem]\nhosts = ['{ALICE}']\n[iscsi-target]\ninitiators = ['{CAROL}']\n");
    let mut daemon = Configured::new(&listed);
    let secret = file(&daemon.site, "bob.key", SECRET);
    daemon.site.run(&["nvme-subsystem", "allow", &format!("{BOB},secret={}", secret.display())]).ok();
    daemon.site.run(&["iscsi-target", "allow", DAVE]).ok();
    // The configuration has no list any more: those that were added are the list.
    daemon.write("");
    daemon.site.run(&["reload"]).ok();
    assert_eq!((daemon.admission(ALICE), daemon.admission(BOB)), (Admission::Refused, Admission::Asked));
    for denied in [["nvme-subsystem", "deny", BOB], ["iscsi-target", "deny", DAVE]] {
        let said = daemon.site.run(&denied).fails(2);
        assert!(said.contains("everybody") && said.contains("forebay reload"), "{said}");
    }
    assert_eq!((daemon.admission(ALICE), daemon.admission(BOB)), (Admission::Refused, Admission::Asked));
    let iqn = daemon.iqn();
    assert!(refusal(&address(&daemon.site, "iscsi"), &iqn, CAROL).contains("0x0202"));
    assert_eq!(refusal(&address(&daemon.site, "iscsi"), &iqn, DAVE), "");
    // The only host of the list cannot be read: the subsystem then admits no host.
    expose(&secret, 0o644);
    daemon.restart();
    assert_eq!((daemon.admission(ALICE), daemon.admission(BOB)), (Admission::Refused, Admission::Refused));
    assert!(daemon.site.log().contains("bob.key"), "the log says why");
    expose(&secret, 0o600);
    daemon.site.run(&["reload"]).ok();
    assert_eq!((daemon.admission(ALICE), daemon.admission(BOB)), (Admission::Refused, Admission::Asked));
}

/// A host that is listed by its name, and was given a secret: it is not let in by its name alone when that is
/// unreadable.
#[test]
fn a_secret_that_cannot_be_read_does_not_fall_back_to_a_name() {
    let mut daemon = Configured::new(&format!("[nvme-subsystem]\nhosts = ['{ALICE}', '{BOB}']\n"));
    assert_eq!(daemon.admission(ALICE), Admission::ByName);
    let secret = file(&daemon.site, "alice.key", SECRET);
    daemon.site.run(&["nvme-subsystem", "allow", &format!("{ALICE},secret={}", secret.display())]).ok();
    assert_eq!(daemon.admission(ALICE), Admission::Asked);
    expose(&secret, 0o644);
    daemon.restart();
    assert_eq!((daemon.admission(ALICE), daemon.admission(BOB)), (Admission::Refused, Admission::ByName));
    // Denied, it would be back to what the configuration says: less than what it had to prove.
    assert!(daemon.site.run(&["nvme-subsystem", "deny", ALICE]).fails(2).contains("configuration"));
    assert_eq!(daemon.admission(ALICE), Admission::Refused);
}

#[test]
fn a_change_of_one_host_leaves_the_others_as_they_were_read() {
    let daemon = Configured::new(&format!("[nvme-subsystem]\nhosts = ['{BOB}']\n"));
    let secret = file(&daemon.site, "alice.key", SECRET);
    daemon.site.run(&["nvme-subsystem", "allow", &format!("{ALICE},secret={}", secret.display())]).ok();
    fs::remove_file(&secret).expect("removed");
    let other = "nqn.2024-05.org.example:other";
    for change in ["allow", "deny"] {
        daemon.site.run(&["nvme-subsystem", change, other]).ok();
        let expected = if change == "allow" { Admission::ByName } else { Admission::Refused };
        assert_eq!((daemon.admission(ALICE), daemon.admission(other)), (Admission::Asked, expected), "{change}");
    }
}

#[test]
fn a_default_name_that_was_added_keeps_the_daemon_from_starting() {
    let mut daemon = Configured::new("");
    daemon.site.run(&["nvme-subsystem", "create", DISKS, "--host", ALICE]).ok();
    daemon.site.run(&["iscsi-target", "create", TARGET, "--initiator", CAROL]).ok();
    daemon.site.stop();
    for (setting, name) in [("nvme-subsystem.nqn", DISKS), ("iscsi-target.name", TARGET)] {
        daemon.write(&format!("{setting} = '{name}'\n"));
        let said = daemon.fails_to_start(2);
        assert!(said.contains(setting) && said.contains(name) && said.contains("access.json"), "{said}");
    }
    daemon.write("");
    daemon.start();
    assert_eq!(daemon.site.json(&["nvme-subsystem", "ls"]).as_array().expect("a list").len(), 2);
}

/// An export in the default subsystem is the same one whether it is named or not.
#[test]
fn the_default_subsystem_and_target_may_be_named() {
    let mut daemon = Configured::new("");
    let (nqn, iqn) = (daemon.nqn(), daemon.iqn());
    daemon.site.run(&["create", "one", "--size", "64M"]).ok();
    for _ in 0..2 {
        daemon.site.run(&["attach", "one", "--nvme", "--subsystem", &nqn]).ok();
        daemon.site.run(&["attach", "one", "--nvme"]).ok();
        let shouted = iqn.to_uppercase().replacen("IQN", "iqn", 1);
        daemon.site.run(&["attach", "one", "--iscsi", "--target", &shouted]).ok();
        daemon.site.run(&["attach", "one", "--iscsi"]).ok();
        let said = daemon.site.json(&["targets"]);
        assert_eq!(said.as_array().expect("a list").len(), 2, "{said}");
        assert!(said.as_array().expect("a list").iter().all(|target| target["state"].is_null()), "{said}");
        assert_eq!(daemon.site.json(&["nvme-subsystem", "ls"])[0]["exports"], 1);
        assert_eq!(daemon.site.json(&["iscsi-target", "ls"])[0]["exports"], 1);
        daemon.restart();
    }
    // The configuration names it otherwise: the export goes along.
    daemon.site.stop();
    daemon.write(&format!("[nvme-subsystem]\nnqn = '{DISKS}'\n[iscsi-target]\nname = '{TARGET}'\n"));
    daemon.start();
    let said = daemon.site.json(&["targets"]).to_string();
    assert!(said.contains(DISKS) && said.contains(TARGET), "{said}");
}

/// An export has one list of hosts, by whichever of its names it is asked for.
#[test]
fn no_name_of_an_nbd_export_leads_past_its_hosts() {
    let site = Site::serving(&[]);
    let socket = site.data().join("nbd.sock");
    site.run(&["create", "one", "--size", "64M"]).ok();
    site.run(&["attach", "one", "--nbd", "--host", "192.0.2.0/24"]).ok();
    for name in ["one", "local/one", ""] {
        assert!(Nbd::connect(&socket, name).is_err(), "{name:?}");
    }
    site.run(&["detach", "one", "--nbd"]).ok();
    site.run(&["attach", "one", "--nbd", "--host", "unix"]).ok();
    for name in ["one", "local/one", ""] {
        let mut host = Nbd::connect(&socket, name).expect("admitted");
        host.write(0, &[7; 512]);
        let busy = site.run(&["detach", "one", "--nbd"]).fails(6);
        assert!(busy.contains("--force"), "{name:?}: {busy}");
        site.run(&["detach", "one", "--nbd", "--force"]).ok();
        assert!(host.ends(), "{name:?}");
        site.run(&["attach", "one", "--nbd", "--host", "unix"]).ok();
    }
}
