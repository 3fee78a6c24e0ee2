//! Units of virtio-scsi controllers over vhost-user: their numbers, how they come and go, and guests that outlive the daemon.

use std::path::Path;

use forebay_vhost_host::scsi::cdb::{self, reservation_type, reserve_out};
use forebay_vhost_host::scsi::control::{event, reset_reason};
use forebay_vhost_host::scsi::{status, unit_number};
use forebay_vhost_host::{FrontEndOptions, ScsiHost, ScsiHostCommand};
use serde_json::{Value, json};

use crate::common::{PATIENCE, Site, wait_until};

fn guest(socket: &Path) -> ScsiHost {
    let options = FrontEndOptions { patience: PATIENCE, inflight: true, ..FrontEndOptions::scsi(1) };
    ScsiHost::connect(socket, &options).expect("a guest")
}

fn with_images(images: &[&str]) -> Site {
    let site = Site::serving(&[]);
    for image in images {
        site.run(&["create", image, "--size", "64M"]).ok();
    }
    site
}

/// URIs of all exports, by image.
fn uris(site: &Site) -> Vec<(String, Value)> {
    let targets = site.json(&["targets"]);
    let all = targets.as_array().expect("a list");
    all.iter().map(|it| (it["image"].as_str().expect("a name").to_owned(), it["uri"].clone())).collect()
}

#[test]
fn units_share_a_socket_and_keep_their_numbers() {
    let mut site = with_images(&["x", "y", "z", "other"]);
    let socket = site.path("vm.sock");
    let uri = |lun: u16| format!("vhost-user-scsi+unix://{}?lun={lun}", socket.display());
    let attach = ["attach", "x", "--vhost", "vm.sock", "--scsi", "--queues", "3"];
    assert_eq!(site.run(&attach).ok(), format!("{}\n", uri(0)));
    assert_eq!(site.run(&attach).ok(), format!("{}\n", uri(0)), "again is the same");
    assert_eq!(site.run(&["attach", "y", "--vhost", "vm.sock", "--scsi"]).ok(), format!("{}\n", uri(1)));
    let z = ["attach", "z", "--vhost", "vm.sock", "--scsi", "--lun", "300"];
    assert_eq!(site.run(&z).ok(), format!("{}\n", uri(300)));
    assert_eq!(site.json(&["targets"])[1]["vhost"], json!({ "path": socket, "queues": 3, "scsi": true }));
    assert!(site.run(&["status"]).ok().contains("vhost:       1 socket"), "{}", site.run(&["status"]).ok());

    let refused = |args: &[&str], code, why: &str| {
        let said = site.run(args).fails(code);
        assert!(said.contains(why), "{args:?}: {said}");
    };
    let other = ["attach", "other", "--vhost", "vm.sock"];
    refused(&other, 5, "local/x's already");
    refused(&[&other[..], &["--scsi", "--queues", "4"]].concat(), 5, "other options");
    refused(&[&other[..], &["--scsi", "--socket-mode", "0660"]].concat(), 5, "other options");
    refused(&[&other[..], &["--scsi", "--lun", "300"]].concat(), 5, "local/z's already");
    refused(&[&other[..], &["--scsi", "--lun", "16384"]].concat(), 2, "16383");
    refused(&["attach", "other", "--vhost", "blk.sock", "--lun", "1"], 2, "--scsi");
    refused(&["attach", "other", "--nbd", "--lun", "1"], 2, "--lun");
    refused(&["attach", "other", "--iscsi", "--scsi"], 2, "--scsi");
    site.run(&["attach", "other", "--vhost", "blk.sock"]).ok();
    refused(&["attach", "y", "--vhost", "blk.sock", "--scsi"], 5, "local/other's already");
    site.run(&["detach", "other"]).ok();

    let before = uris(&site);
    let units = |host: &mut ScsiHost| host.report_luns().expect("listed");
    assert_eq!(units(&mut guest(&socket)), [0, 1, 300]);
    site.kill();
    site.start();
    assert_eq!(uris(&site), before);
    assert_eq!(units(&mut guest(&socket)), [0, 1, 300]);
    wait_until("the guest is gone", || site.json(&["targets"])[0]["connections"] == json!(0));
    site.run(&["detach", "x", "z"]).ok();
    assert!(socket.exists(), "it has a unit yet");
    assert_eq!(units(&mut guest(&socket)), [1]);
    site.run(&["attach", "x", "--vhost", "vm.sock", "--scsi"]).ok();
    assert_eq!(uris(&site)[0].1, json!(uri(0)), "the number that it had");
    wait_until("the guest is gone", || site.json(&["targets"])[1]["connections"] == json!(0));
    site.run(&["detach", "x", "y"]).ok();
    assert!(!socket.exists(), "the end of the last unit removes it");
    // Its path is free for others.
    site.run(&["attach", "other", "--vhost", "vm.sock"]).ok();
    site.stop();
}

#[test]
fn units_come_and_go_while_a_guest_runs() {
    let mut site = with_images(&["x", "y"]);
    let socket = site.path("vm.sock");
    site.run(&["attach", "x", "--vhost", "vm.sock", "--scsi"]).ok();
    let mut guest = guest(&socket);
    guest.ready(0).expect("ready");
    guest.write(0, 8, &[0xA5; 4096]).expect("written");
    site.run(&["attach", "y", "--vhost", "vm.sock", "--scsi"]).ok();
    let added = guest.await_event(PATIENCE).expect("announced");
    assert_eq!((added.event, added.reason), (event::TRANSPORT_RESET, reset_reason::RESCAN));
    assert_eq!(unit_number(added.lun), Some((0, 1)));
    guest.ready(1).expect("ready");
    guest.write(1, 0, &[0x5A; 512]).expect("written");
    let identity = |guest: &mut ScsiHost, lun| guest.inquiry(lun, Some(0x80)).expect("told")[4..].to_vec();
    assert_ne!(identity(&mut guest, 0), identity(&mut guest, 1));

    site.run(&["resize", "x", "--size", "96M"]).ok();
    let changed = guest.await_event(PATIENCE).expect("announced");
    assert_eq!((changed.changed_parameter(), unit_number(changed.lun)), (Some(0x2A09), Some((0, 0))));
    assert_eq!(guest.capacity(0).expect("told").last_lba + 1, 96 << 11);

    let said = site.run(&["detach", "y"]).fails(6);
    assert!(said.contains("1 connection"), "{said}");
    site.run(&["detach", "y", "--force"]).ok();
    let removed = guest.await_event(PATIENCE).expect("announced");
    assert_eq!((removed.event, removed.reason), (event::TRANSPORT_RESET, reset_reason::REMOVED));
    assert!(!guest.settle(&ScsiHostCommand::read(1, 0, 1)).expect("completed").is_good());
    assert_eq!(guest.read(0, 8, 8).expect("the other goes on"), [0xA5; 4096]);
    // What it wrote is what others read.
    site.run(&["attach", "x", "--nbd", "--read-only"]).ok();
    let mut other = crate::common::Nbd::connect(&site.data().join("nbd.sock"), "local/x").expect("connected");
    assert_eq!(other.read(4096, 4096), [0xA5; 4096]);
    drop(other);
    site.run(&["detach", "x", "--force"]).ok();
    assert!(!socket.exists());
    assert!(guest.read(0, 0, 1).is_err(), "the guest is disconnected");
    site.stop();
}

#[test]
fn a_guest_resumes_after_the_daemon_was_killed() {
    let mut site = with_images(&["x", "y"]);
    let socket = site.path("vm.sock");
    site.run(&["attach", "x", "y", "--vhost", "vm.sock", "--scsi"]).ok();
    let mut guest = guest(&socket);
    for round in 1..4_u8 {
        (0..2).for_each(|lun| guest.ready(lun).expect("ready"));
        site.kill();
        // Submitted while there is no daemon.
        let writes = [0, 1].map(|lun| ScsiHostCommand::write(lun, 0, &[round + 10 * lun as u8; 4096]));
        guest.submit_all(0, &writes).expect("submitted");
        site.start();
        guest.resume(&socket).expect("resumed");
        for _ in 0..2 {
            let done = guest.await_completion(0, std::time::Instant::now() + PATIENCE).expect("completed");
            // A controller that starts has unit attentions, on which a guest repeats its command.
            assert!(done.is_good() || done.is_transient(), "{done:?}");
        }
        for (lun, write) in (0..).zip(&writes) {
            assert!(guest.settle(write).expect("completed").is_good());
            assert_eq!(guest.read(lun, 0, 8).expect("read"), [round + 10 * lun as u8; 4096]);
        }
    }
}

#[test]
fn reservations_of_a_guest_last_and_keep_others_out() {
    let mut site = with_images(&["x"]);
    let socket = site.path("vm.sock");
    site.run(&["attach", "x", "--vhost", "vm.sock", "--scsi"]).ok();
    site.run(&["attach", "x", "--nbd"]).ok();
    let mut first = guest(&socket);
    first.ready(0).expect("ready");
    let reserve = |guest: &mut ScsiHost, action: u8, key: u64, service_key: u64| {
        // APTPL, for registrations that outlive the daemon, is of a registration (SPC-4, section 6.15.3).
        let list = cdb::reserve_list(key, service_key, u8::from(action == reserve_out::REGISTER));
        let command = cdb::persistent_reserve_out(action, reservation_type::EXCLUSIVE_ACCESS, 24);
        let done = guest.settle(&ScsiHostCommand::new(0, command).writing(&list)).expect("completed");
        assert!(done.is_good(), "service action {action}: {done:?}");
    };
    reserve(&mut first, reserve_out::REGISTER, 0, 0xA);
    reserve(&mut first, reserve_out::RESERVE, 0xA, 0);
    let shown = site.json(&["reservations", "ls", "x"]);
    let text = shown.to_string();
    assert!(text.contains("naa:3"), "{text}");
    let mut other = crate::common::Nbd::connect(&site.data().join("nbd.sock"), "local/x").expect("connected");
    assert_ne!(other.try_write(0, &[1; 512]), 0, "it is excluded");
    drop(other);
    drop(first);
    // The guest is known by its socket, after a restart too.
    site.kill();
    site.start();
    let mut again = guest(&socket);
    again.ready(0).expect("ready");
    assert_eq!(again.reservation_keys(0).expect("told"), [0xA]);
    again.write(0, 0, &[2; 512]).expect("its reservation holds");
    reserve(&mut again, reserve_out::CLEAR, 0xA, 0);
    let read = again.settle(&ScsiHostCommand::read(0, 0, 1)).expect("completed");
    assert_eq!(read.status, status::GOOD);
    drop(again);
    site.stop();
}
