//! NVMe subsystems and iSCSI targets that come and go while the daemon runs, and the hosts of each.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crate::common::Site;
use crate::hosts::*;
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::client::{Client as Initiator, Options};
use forebay_nvme_host::client::Client as NvmeHost;
use forebay_nvme_host::codec::{blocks, sqe, with};
use forebay_reactor::Addr;
use serde_json::{Value, json};

fn uri(site: &Site, image: &str) -> String {
    let targets = site.json(&["targets"]);
    let found = targets.as_array().expect("a list").iter().find(|target| target["image"] == json!(image));
    found.and_then(|target| target["uri"].as_str()).unwrap_or_else(|| panic!("{image} in {targets}")).to_owned()
}

/// Names of the subsystems that discovery shows a host.
async fn discover(addr: &Addr, host: &str) -> Vec<String> {
    let (mut admin, _) =
        NvmeHost::admin(addr, PLAIN, "nqn.2014-08.org.nvmexpress.discovery", host).await.expect("discovery");
    let page = admin.run(with(sqe(0x02, 0), 10, 0x70 | 2047 << 16), &[], 8192).await.expect("log").ok();
    let name = |entry: &[u8]| String::from_utf8_lossy(&entry[256..512]).trim_end_matches('\0').to_owned();
    let mut names: Vec<String> = page[1024..].chunks(1024).take(page[8] as usize).map(name).collect();
    names.retain(|name| !name.ends_with("discovery"));
    names
}

#[test]
fn a_subsystem_has_namespaces_and_hosts_of_its_own() {
    let mut site = Site::serving(&FRONTS);
    for image in ["one", "two"] {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    let missing = site.run(&["attach", "one", "--nvme", "--subsystem", DISKS]).fails(3);
    assert!(missing.contains("nvme-subsystem create"), "{missing}");
    let made = site.json(&["nvme-subsystem", "create", DISKS, "--host", ALICE]);
    assert_eq!((&made["nqn"], &made["is_default"], &made["exports"]), (&json!(DISKS), &json!(false), &json!(0)));
    site.run(&["nvme-subsystem", "create", DISKS]).fails(5);
    // Both have number 1: each in its own subsystem.
    site.run(&["attach", "one", "--nvme"]).ok();
    site.run(&["attach", "two", "--nvme", "--subsystem", DISKS]).ok();
    assert!(uri(&site, "one").ends_with("#1") && uri(&site, "two").ends_with(&format!("{DISKS}#1")));
    // The same again is no error, another subsystem is.
    site.run(&["attach", "two", "--nvme"]).ok();
    site.run(&["nvme-subsystem", "create", "nqn.2024-05.org.example:other", "--any-host"]).ok();
    site.run(&["attach", "two", "--nvme", "--subsystem", "nqn.2024-05.org.example:other"]).fails(5);
    let busy = site.run(&["nvme-subsystem", "rm", DISKS]).fails(6);
    assert!(busy.contains("1 export"), "{busy}");

    let addr = address(&site, "nvme");
    let default = site.json(&["status"])["nvme_nqn"].as_str().expect("a name").to_owned();
    on_reactor(async {
        let (_first, mut io) = connect(&addr, &default, BOB).await.expect("the default one is for every host");
        let (_second, mut other) = connect(&addr, DISKS, ALICE).await.expect("a host of the list");
        assert!(connect(&addr, DISKS, BOB).await.is_err());
        io.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        other.run(blocks(1, 1, 0, 1), &[2; 512], 0).await.expect("write").ok();
        assert_eq!(io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok(), [1; 512]);
        assert_eq!(discover(&addr, ALICE).await.len(), 3);
        assert_eq!(discover(&addr, BOB).await.len(), 2);
    });
    assert_eq!((site.export("local/one")[0], site.export("local/two")[0]), (1, 2));

    // All of it is there after a crash.
    site.kill();
    site.start();
    let addr = address(&site, "nvme");
    let all = site.json(&["nvme-subsystem", "ls"]);
    assert_eq!(all.as_array().expect("a list").len(), 3, "{all}");
    on_reactor(async {
        let (_admin, mut io) = connect(&addr, DISKS, ALICE).await.expect("admitted");
        assert_eq!(io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok(), [2; 512]);
        assert!(connect(&addr, DISKS, BOB).await.is_err());
    });
    site.run(&["detach", "two", "--force"]).ok();
    site.run(&["nvme-subsystem", "rm", DISKS]).ok();
    site.run(&["nvme-subsystem", "rm", DISKS]).fails(3);
    on_reactor(async { assert!(connect(&addr, DISKS, ALICE).await.is_err()) });
    assert!(site.run(&["nvme-subsystem", "rm", &default]).fails(2).contains("configuration"));
}

/// A host that is taken off the list loses its connection, in the default subsystem as in others.
#[test]
fn hosts_are_allowed_and_denied_while_the_daemon_runs() {
    let mut site = Site::new();
    let config = site.path("forebay.toml");
    fs::write(&config, format!("[nvme-subsystem]\nhosts = ['{ALICE}']\n")).expect("written");
    let flags = [&FRONTS[..], &["--config", config.to_str().expect("a path")]].concat();
    site.start_with_flags(&flags);
    site.run(&["create", "one", "--size", "64M"]).ok();
    site.run(&["attach", "one", "--nvme"]).ok();
    let addr = address(&site, "nvme");
    let nqn = site.json(&["status"])["nvme_nqn"].as_str().expect("a name").to_owned();
    on_reactor(async {
        assert!(connect(&addr, &nqn, BOB).await.is_err());
        site.run(&["nvme-subsystem", "allow", BOB]).ok();
        let (_admin, mut bob) = connect(&addr, &nqn, BOB).await.expect("allowed");
        let (_admin, mut alice) = connect(&addr, &nqn, ALICE).await.expect("configured");
        let denied = site.json(&["nvme-subsystem", "deny", BOB]);
        assert_eq!(denied["hosts"], json!([{ "nqn": ALICE }]));
        assert!(bob.run(blocks(2, 1, 0, 1), &[], 512).await.is_err(), "it is disconnected");
        alice.run(blocks(2, 1, 0, 1), &[], 512).await.expect("the other goes on").ok();
        assert!(connect(&addr, &nqn, BOB).await.is_err());
        // Hosts of the configuration change there.
        assert!(site.run(&["nvme-subsystem", "deny", ALICE]).fails(2).contains("forebay reload"));
        fs::write(&config, format!("[nvme-subsystem]\nhosts = ['{BOB}']\n")).expect("written");
        assert_eq!(site.json(&["reload"]), json!({ "restart": false }));
        assert!(alice.run(blocks(2, 1, 0, 1), &[], 512).await.is_err(), "it is off the list");
        connect(&addr, &nqn, BOB).await.expect("on the list");
    });
    site.run(&["nvme-subsystem", "deny", "nqn.2024-05.org.example:nobody"]).fails(3);
    let open = "nqn.2024-05.org.example:open";
    site.run(&["nvme-subsystem", "create", open, "--any-host"]).ok();
    let said = site.run(&["nvme-subsystem", "allow", "--subsystem", open, BOB]).fails(2);
    assert!(said.contains("every host"), "{said}");
}

/// Secrets come from files: one that cannot be read changes nothing, and one that changes counts after a reload.
#[test]
fn secrets_of_hosts_are_read_when_they_are_named_and_again_at_a_reload() {
    let site = Site::serving(&FRONTS);
    let secret = file(&site, "alice.key", SECRET);
    let with_secret = format!("{ALICE},secret={}", secret.display());
    let missing = format!("{ALICE},secret={}", site.path("none").display());
    site.run(&["nvme-subsystem", "create", DISKS, "--host", &missing]).fails(3);
    assert_eq!(site.json(&["nvme-subsystem", "ls"]).as_array().expect("a list").len(), 1, "nothing was made");
    let made = site.json(&["nvme-subsystem", "create", DISKS, "--host", &with_secret]);
    assert_eq!(made["hosts"], json!([{ "nqn": ALICE, "secret": secret }]));
    let addr = address(&site, "nvme");
    let admitted = || admission(&addr, DISKS, ALICE);
    assert_eq!(admitted(), Admission::Asked);
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).expect("its mode");
    let said = site.run(&["reload"]).fails(2);
    assert!(said.contains("nothing has changed") && said.contains("alice.key"), "{said}");
    assert_eq!(admitted(), Admission::Asked);
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).expect("its mode");
    site.run(&["nvme-subsystem", "allow", "--subsystem", DISKS, ALICE]).ok();
    assert_eq!(admitted(), Admission::ByName);
    // A key for TLS is of no use where no address takes TLS.
    let key = file(&site, "tls.key", "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:\n");
    let with_key = format!("{BOB},tls-key={}", key.display());
    let said = site.run(&["nvme-subsystem", "allow", "--subsystem", DISKS, &with_key]).fails(2);
    assert!(said.contains("tls=required"), "{said}");
}

#[test]
fn a_target_has_units_and_initiators_of_its_own() {
    let mut site = Site::serving(&FRONTS);
    for image in ["one", "two"] {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    let missing = site.run(&["attach", "one", "--iscsi", "--target", TARGET]).fails(3);
    assert!(missing.contains("iscsi-target create"), "{missing}");
    site.run(&["iscsi-target", "create", TARGET, "--initiator", CAROL]).ok();
    site.run(&["iscsi-target", "create", &TARGET.to_uppercase().replace("IQN", "iqn")]).fails(5);
    site.run(&["attach", "one", "--iscsi"]).ok();
    site.run(&["attach", "two", "--iscsi", "--target", TARGET]).ok();
    assert!(uri(&site, "one").ends_with("/0") && uri(&site, "two").ends_with(&format!("{TARGET}/0")));
    assert!(site.run(&["iscsi-target", "rm", TARGET]).fails(6).contains("1 export"));
    let addr = address(&site, "iscsi");
    let default = site.json(&["status"])["iscsi_name"].as_str().expect("a name").to_owned();
    on_reactor(async {
        let login =
            async |target: &str, initiator: &str| Initiator::login(&addr, &Options::new(target, initiator)).await;
        let mut first = login(&default, DAVE).await.expect("the default one is for every initiator");
        let mut second = login(TARGET, CAROL).await.expect("an initiator of the list");
        let refused = login(TARGET, DAVE).await.err().expect("not of the list").to_string();
        assert!(refused.contains("0x0202"), "{refused}");
        first.settle(0, cdb::write(0, 1), &[1; 512], 0).await.expect("write").ok();
        second.settle(0, cdb::write(0, 1), &[2; 512], 0).await.expect("write").ok();
        assert_eq!(first.settle(0, cdb::read(0, 1), &[], 512).await.expect("read").ok(), [1; 512]);
        let mut asking = login("", DAVE).await.expect("discovery");
        let told = String::from_utf8_lossy(&asking.text(&[("SendTargets", "All")]).await.expect("told")).into_owned();
        assert!(told.contains(&default) && !told.contains(TARGET), "{told}");
        // Who is allowed later gets in; who is denied is out.
        site.run(&["iscsi-target", "allow", "--target", TARGET, DAVE]).ok();
        let mut dave = login(TARGET, DAVE).await.expect("allowed");
        dave.ping().await.expect("there");
        let left = site.json(&["iscsi-target", "deny", "--target", TARGET, DAVE]);
        assert_eq!(left["initiators"], json!([CAROL]));
        while dave.ping().await.is_ok() {}
        assert!(login(TARGET, DAVE).await.is_err());
        second.settle(0, cdb::read(0, 1), &[], 512).await.expect("the other goes on").ok();
    });
    site.kill();
    site.start();
    let all = site.json(&["iscsi-target", "ls"]);
    let names: Vec<&Value> = all.as_array().expect("a list").iter().map(|target| &target["name"]).collect();
    assert_eq!(names, [&json!(default), &json!(TARGET)]);
    // Without any initiator on its list, a target admits none.
    site.run(&["iscsi-target", "deny", "--target", TARGET, CAROL]).ok();
    let addr = address(&site, "iscsi");
    on_reactor(async { assert!(Initiator::login(&addr, &Options::new(TARGET, CAROL)).await.is_err()) });
    site.run(&["detach", "two", "--iscsi"]).ok();
    site.run(&["iscsi-target", "rm", TARGET]).ok();
    assert!(site.run(&["iscsi-target", "rm", &default]).fails(2).contains("configuration"));
}

#[test]
fn secrets_of_a_target_are_refused_where_they_prove_nothing() {
    let site = Site::serving(&FRONTS);
    let (good, same, short) = (
        file(&site, "good", "a long enough secret\n"),
        file(&site, "same", "a long enough secret\n"),
        file(&site, "short", "short\n"),
    );
    let create = |flags: &[&str]| site.run(&[&["iscsi-target", "create", TARGET], flags].concat());
    let user = |path: &PathBuf| format!("carol,{}", path.display());
    assert!(create(&["--chap", "carol"]).fails(2).contains("USER,FILE"));
    assert!(create(&["--chap", &user(&short)]).fails(2).contains("12"));
    assert!(create(&["--chap", &user(&good), "--mutual-chap", &user(&same)]).fails(2).contains("same secret"));
    create(&["--mutual-chap", &user(&good)]).fails(2);
    create(&["--chap", &user(&site.path("none"))]).fails(3);
    assert_eq!(site.json(&["iscsi-target", "ls"]).as_array().expect("a list").len(), 1, "nothing was made");
    let made: Value = create(&["--chap", &user(&good), "--format", "json"]).json();
    assert_eq!((&made["chap"], &made["any_initiator"]), (&json!("carol"), &json!(false)));
}

#[test]
fn a_damaged_list_of_hosts_keeps_the_daemon_from_starting() {
    let mut site = Site::serving(&FRONTS);
    site.run(&["nvme-subsystem", "create", DISKS, "--any-host"]).ok();
    site.stop();
    let path = site.data().join("access.json");
    let text = fs::read(&path).expect("the list");
    fs::write(&path, &text[..text.len() / 2]).expect("cut");
    let mut serve = site.command(&["serve"]);
    let output = serve.output().expect("run");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(8), "{said}");
    assert!(said.contains("access.json"), "{said}");
    fs::write(&path, text).expect("mended");
    site.start();
    assert_eq!(site.json(&["nvme-subsystem", "ls"]).as_array().expect("a list").len(), 2);
}
