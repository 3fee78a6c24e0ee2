//! The embedded store from the command line: made, checked, damaged.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::common::{Site, content, shape};
use serde_json::json;

#[test]
fn init_check_and_df() {
    let site = Site::new();
    let made = site.json(&["store", "init", "--size", "128M"]);
    let want = json!({
        "path": "string", "capacity": "number", "used": "number", "available": "number", "objects": "number",
        "compressed_logical": "number", "compressed_stored": "number",
    });
    assert_eq!(shape(&made), want);
    let said = site.run(&["store", "init", "--size", "128M"]).fails(5);
    assert!(said.contains("--force"), "{said}");
    std::fs::write(site.path("file"), content(8 << 20, 1)).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    let space = site.json(&["store", "df"]);
    assert_eq!(shape(&space), want);
    assert!(space["used"].as_u64().expect("a number") > 4 << 20, "{space}");
    assert!(site.run(&["store", "df"]).ok().contains("capacity:"));
    let report = site.json(&["store", "check"]);
    assert_eq!(report["damage"], json!([]));
    assert!(report["blocks_read"].as_u64().expect("a number") > 1000, "{report}");
    let quick = site.json(&["store", "check", "--quick"]);
    assert_eq!(quick["blocks_read"], json!(0));
    site.run(&["store", "init", "--size", "128M", "--force"]).ok();
    assert_eq!(site.json(&["ls"]), json!([]));
}

#[test]
fn a_store_too_small_is_refused() {
    let site = Site::new();
    site.run(&["store", "init", "--size", "64K"]).fails(2);
}

/// Returns a size that the file system of the site does not have, free or not, in MiB.
fn too_much(site: &Site) -> String {
    let space = rustix::fs::statvfs(site.dir.path()).expect("its file system");
    ((space.f_blocks * space.f_frsize + (1 << 30)) >> 20).to_string()
}

#[test]
fn a_store_that_finds_no_space_to_preallocate_leaves_the_old_one_as_it_was() {
    let site = Site::with_store();
    let bytes = content(4 << 20, 9);
    std::fs::write(site.path("file"), &bytes).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    let path = site.data().join("store.img");
    let before = std::fs::read(&path).expect("the store");
    let said = site.run(&["store", "init", "--force", "--preallocate", "--size", &too_much(&site)]).fails(7);
    assert!(said.contains("bytes free"), "{said}");
    assert!(std::fs::read(&path).expect("the store") == before, "it was changed");
    assert_eq!(site.export("x"), bytes);
    // Over the old one where there is space: allocated, and nothing of the old one is left.
    site.run(&["store", "init", "--force", "--preallocate", "--size", "128M"]).ok();
    let meta = path.metadata().expect("the store");
    assert!(meta.blocks() * 512 >= meta.len() && meta.len() <= 128 << 20, "{meta:?}");
    assert_eq!(site.json(&["ls"]), json!([]));
    assert_eq!(site.json(&["store", "check"])["damage"], json!([]));
}

#[test]
fn a_store_that_is_not_made_leaves_neither_file_nor_link() {
    let site = Site::new();
    let (link, elsewhere) = (site.data().join("store.img"), site.path("elsewhere.img"));
    let store = elsewhere.to_str().expect("a path");
    for (size, code) in [(too_much(&site).as_str(), 7), ("64K", 2)] {
        let args = ["store", "init", "--preallocate", "--size", size];
        site.run(&[&args[..], &["--store", store]].concat()).fails(code);
        assert!(link.symlink_metadata().is_err(), "{size}: the data directory names it");
        assert!(!elsewhere.exists(), "{size}: half a store is left");
        site.run(&args).fails(code);
        assert!(link.symlink_metadata().is_err(), "{size}: half a store is left");
    }
    // A link from before stays, and so does nothing else.
    site.run(&["store", "init", "--size", "128M", "--store", store]).ok();
    std::fs::remove_file(&elsewhere).expect("removed");
    site.run(&["store", "init", "--preallocate", "--size", &too_much(&site)]).fails(7);
    assert_eq!(std::fs::read_link(&link).expect("the link"), elsewhere);
    assert!(!elsewhere.exists(), "half a store is left");
}

#[test]
fn a_relative_link_leads_from_the_data_directory_and_not_from_the_working_directory() {
    let site = Site::new();
    let (inside, cwd) = (site.data().join("big"), site.path("big"));
    for dir in [&inside, &cwd] {
        std::fs::create_dir_all(dir).expect("a directory");
    }
    // Commands run in the directory above.
    std::fs::write(cwd.join("store.img"), content(4096, 3)).expect("a file of others");
    let link = site.data().join("store.img");
    std::os::unix::fs::symlink("big/store.img", &link).expect("a link");
    // First where it dangles, then over the store that is there.
    for force in [&[][..], &["--force"]] {
        site.run(&[&["store", "init", "--size", "128M"], force].concat()).ok();
        assert_eq!(std::fs::read(cwd.join("store.img")).expect("the file"), content(4096, 3), "it was overwritten");
        assert!(inside.join("store.img").metadata().expect("the store").len() > 64 << 20);
        assert_eq!(site.json(&["ls"]), json!([]));
    }
    assert_eq!(std::fs::read_link(&link).expect("the link"), Path::new("big/store.img"));
    // The store may also be named by where it lies.
    let named = inside.join("store.img");
    site.run(&["store", "init", "--size", "128M", "--force", "--store", named.to_str().expect("a path")]).ok();
}

#[test]
fn a_daemon_makes_its_store_where_a_dangling_link_leads() {
    let mut site = Site::new();
    std::fs::create_dir_all(site.data().join("big")).expect("a directory");
    // By way of another link, and relative.
    std::os::unix::fs::symlink("far/store.img", site.data().join("big/next")).expect("a link");
    std::fs::create_dir_all(site.data().join("big/far")).expect("a directory");
    std::os::unix::fs::symlink("big/next", site.data().join("store.img")).expect("a link");
    site.start();
    assert!(site.data().join("big/far/store.img").metadata().expect("the store").is_file());
    assert!(site.data().join("store.img").symlink_metadata().expect("the link").is_symlink());
    site.run(&["create", "x", "--size", "1G"]).ok();
    site.stop();
    assert_eq!(site.run(&["ls"]).ok(), "x\n");
}

#[test]
fn a_device_has_nothing_to_preallocate_and_says_so() {
    let site = Site::new();
    let Some(device) = crate::common::LoopDevice::new(&site.path("image"), 64 << 20) else { return };
    let path = device.path().to_str().expect("a path");
    let said = site.run(&["store", "init", "--preallocate", "--store", path]).fails(9);
    assert!(said.contains("is a device") && said.contains("without --preallocate"), "{said}");
    assert!(site.data().join("store.img").symlink_metadata().is_err(), "the data directory names it");
    site.run(&["store", "init", "--store", path]).ok();
}

#[test]
fn a_running_daemon_keeps_its_store_to_itself() {
    let site = Site::serving(&[]);
    for args in [&["store", "check"][..], &["store", "init", "--force", "--size", "64M"]] {
        let said = site.run(args).fails(6);
        assert!(said.contains("stop the daemon"), "{args:?}: {said}");
    }
    assert!(site.json(&["store", "df"])["capacity"].as_u64().expect("a number") > 0);
}

#[test]
fn a_store_grows_with_and_without_a_daemon() {
    let mut site = Site::with_store();
    let bytes = content(4 << 20, 5);
    std::fs::write(site.path("file"), &bytes).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    let capacity = |site: &Site| site.json(&["store", "df"])["capacity"].as_u64().expect("a number");
    let before = capacity(&site);
    let said = site.run(&["store", "grow", "--size", "1M"]).fails(2);
    assert!(said.contains("cannot be made smaller"), "{said}");
    let said = site.run(&["store", "grow", "/dev/sdb"]).fails(2);
    assert!(said.contains("leave out DEV"), "{said}");
    let said = site.run(&["store", "add", "other"]).0;
    assert!(!said.status.success() && !site.path("other").exists(), "{said:?}");
    let grown = site.json(&["store", "grow", "--size", "256M"])["capacity"].as_u64().expect("a number");
    assert!(grown > before * 3 / 2, "{before} and {grown}");
    site.start();
    // Another program has made the file longer.
    let file = std::fs::File::options().write(true).open(site.data().join("store.img")).expect("the store");
    file.set_len(512 << 20).expect("longer");
    let again = site.json(&["store", "grow"])["capacity"].as_u64().expect("a number");
    assert!(again > grown * 3 / 2 && capacity(&site) == again, "{grown} and {again}");
    assert_eq!(site.export("x"), bytes);
    site.stop();
    assert_eq!(capacity(&site), again);
    assert_eq!(site.json(&["store", "check"])["damage"], json!([]));
}

#[test]
fn a_store_on_several_files_grows_and_takes_more() {
    let mut site = Site::new();
    site.run(&["store", "init", "--ec", "1+1", "a", "b", "--size", "64M"]).ok();
    let capacity = |site: &Site| site.json(&["store", "df"])["capacity"].as_u64().expect("a number");
    let before = capacity(&site);
    site.start();
    site.run(&["store", "grow", "--size", "128M"]).ok();
    let grown = capacity(&site);
    assert!(grown > before * 3 / 2, "{before} and {grown}");
    let said = site.run(&["store", "grow", "c"]).fails(3);
    assert!(said.contains("no device"), "{said}");
    let said = site.run(&["store", "add", "c"]).fails(2);
    assert!(said.contains("--size") && !site.path("c").exists(), "{said}");
    let devices = site.json(&["store", "add", "c", "d", "--size", "64M"]);
    assert_eq!(devices["devices"].as_array().map(Vec::len), Some(4), "{devices}");
    let added = capacity(&site);
    assert!(added > grown + before / 2, "{grown} and {added}");
    site.stop();
    let list = std::fs::read_to_string(site.data().join("store-devices.json")).expect("the list");
    assert!(["/a\"", "/b\"", "/c\"", "/d\""].iter().all(|name| list.contains(name)), "{list}");
    assert_eq!(capacity(&site), added);
    assert_eq!(site.json(&["store", "check"])["damage"], json!([]));
}

#[test]
fn a_store_elsewhere_is_found() {
    let site = Site::new();
    let elsewhere = site.path("elsewhere.img");
    site.run(&["store", "init", "--size", "128M", "--store", elsewhere.to_str().expect("a path")]).ok();
    site.run(&["create", "x", "--size", "1G"]).ok();
    assert_eq!(site.run(&["ls"]).ok(), "x\n");
    site.run(&["store", "check"]).ok();
    let said = site.run(&["store", "init", "--size", "128M", "--store", "/dev/other"]).fails(2);
    assert!(said.contains("elsewhere.img"), "{said}");
}

#[test]
fn damage_is_found_and_never_returned_as_data() {
    let site = Site::with_store();
    let bytes = vec![0x5a; 8 << 20];
    std::fs::write(site.path("file"), &bytes).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    // One byte of the image's content, wherever the store has put it.
    let path = site.data().join("store.img");
    let store = std::fs::read(&path).expect("the store");
    let run = store.windows(65536).position(|window| window.iter().all(|&byte| byte == 0x5a)).expect("the content");
    let file = std::fs::File::options().write(true).open(&path).expect("the store");
    file.write_all_at(&[0x5b], run as u64 + 30_000).expect("damaged");
    let said = site.run(&["export", "x", "out"]).fails(8);
    assert!(said.contains("checksum mismatch") && said.contains("store check"), "{said}");
    assert!(!site.path("out").exists(), "half an export is left");
    let done = site.run(&["store", "check", "--format", "json"]);
    assert_eq!(done.0.status.code(), Some(8), "{}", done.stderr());
    let report: serde_json::Value = serde_json::from_str(&done.stdout()).expect("JSON");
    assert_eq!(report["damage"].as_array().map(Vec::len), Some(1), "{report}");
    // The daemon says the same, and lives.
    let mut site = site;
    site.start();
    let said = site.run(&["export", "x", "-"]);
    assert_eq!(said.0.status.code(), Some(8), "{}", said.stderr());
    assert!(said.stderr().contains("checksum mismatch"), "{}", said.stderr());
    site.run(&["status"]).ok();
}

#[test]
fn what_is_no_store_is_refused() {
    let site = Site::with_store();
    let path = site.data().join("store.img");
    std::fs::write(&path, vec![0xee; 1 << 20]).expect("rubbish");
    let said = site.run(&["ls"]);
    assert!(matches!(said.0.status.code(), Some(2 | 8)), "{}", said.stderr());
    assert!(said.stderr().contains("store.img"), "{}", said.stderr());
    let said = site.run(&["serve"]);
    assert!(matches!(said.0.status.code(), Some(2 | 8)), "{}", said.stderr());
    assert_eq!(std::fs::read(&path).expect("the file"), vec![0xee; 1 << 20], "it was overwritten");
}

/// Bytes at places of a new file of 64 MiB.
fn image(site: &Site, name: &str, parts: &[(u64, &[u8])]) -> PathBuf {
    let path = site.path(name);
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(64 << 20).expect("its size");
    parts.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).expect("written"));
    path
}

/// Tries to make a store at `path`, which holds `what`: refused, named, untouched, and only done with `--force`.
fn is_kept(site: &Site, path: &Path, code: i32, what: &str) {
    let before = std::fs::read(path).expect("the file");
    let store = path.to_str().expect("a path");
    let said = site.run(&["store", "init", "--size", "32M", "--store", store]).fails(code);
    assert!(said.contains(what), "{what}: {said}");
    assert!(std::fs::read(path).expect("the file") == before, "{what}: it was changed");
    assert!(!site.data().join("store.img").exists(), "{what}: the data directory names it");
    let forced = Site::new();
    let done = forced.run(&["store", "init", "--size", "32M", "--force", "--store", store]);
    done.ok();
    assert!(done.stderr().contains(&format!("which holds {what}")), "{what}: {}", done.stderr());
    forced.run(&["store", "check"]).ok();
}

#[test]
fn init_keeps_what_others_have_there_and_names_it() {
    let site = Site::new();
    let parts: [(&str, &[(u64, &[u8])]); 7] = [
        ("a LUKS volume", &[(0, b"LUKS\xba\xbe\0\x02")]),
        ("an LVM physical volume", &[(512, b"LABELONE")]),
        ("a Ceph OSD (BlueStore)", &[(0, b"bluestore block device\n")]),
        ("a GPT partition table (backup)", &[((64 << 20) - 512, b"EFI PART")]),
        ("a member of a Linux RAID (1.0)", &[((64 << 20) - 8192, &[0xfc, 0x4e, 0x2b, 0xa9])]),
        ("an XFS file system (label 'srv')", &[(0, b"XFSB"), (108, b"srv")]),
        ("unknown data at byte 40000007", &[(40_000_007, b"x")]),
    ];
    for (at, (what, parts)) in parts.into_iter().enumerate() {
        is_kept(&site, &image(&site, &format!("image{at}"), parts), 5, what);
    }
    // A short text counts as data, too.
    let note = site.path("note");
    std::fs::write(&note, "remember the milk\n").expect("written");
    is_kept(&site, &note, 5, "unknown data at byte 0");
    // What only takes space, or was emptied, holds nothing.
    for parts in [&[][..], &[(1 << 20, &[0; 1 << 20][..])]] {
        let (site, path) = (Site::new(), image(&site, "empty", parts));
        site.run(&["store", "init", "--store", path.to_str().expect("a path"), "--size", "32M"]).ok();
    }
}

#[test]
fn init_keeps_what_real_tools_have_made() {
    let site = Site::new();
    // The sizes are the least that the tools accept, rounded up.
    let tools: [(&str, &[&str], u64, &str); 4] = [
        ("mkfs.ext4", &["-q", "-F", "-L", "home"], 64 << 20, "an ext2, ext3 or ext4 file system (label 'home')"),
        ("mkswap", &["-q"], 64 << 20, "a swap area"),
        ("mkfs.xfs", &["-q"], 320 << 20, "an XFS file system"),
        ("mkfs.btrfs", &["-q"], 128 << 20, "a btrfs file system"),
    ];
    for (tool, args, size, what) in tools {
        let path = image(&site, tool, &[]);
        std::fs::File::options().write(true).open(&path).and_then(|file| file.set_len(size)).expect("its size");
        let made = std::process::Command::new(tool).args(args).arg(&path).output();
        match made {
            Ok(done) if done.status.success() => is_kept(&site, &path, 5, what),
            other => crate::common::skip(&format!("{tool}: {other:?}")),
        }
    }
}

#[test]
fn a_store_with_both_superblocks_damaged_is_kept_and_repaired() {
    let superblocks = [0_u64, 64 << 10];
    for (what, damage) in [("flipped", &[0xff; 16][..]), ("overwritten", &[0; 4096][..])] {
        let site = Site::with_store();
        let bytes = content(4 << 20, 5);
        std::fs::write(site.path("file"), &bytes).expect("a file");
        site.run(&["import", "file", "x"]).ok();
        let path = site.data().join("store.img");
        let file = std::fs::File::options().write(true).open(&path).expect("the store");
        superblocks
            .iter()
            .for_each(|at| file.write_all_at(damage, at + 40 * u64::from(what == "flipped")).expect("damaged"));
        let before = std::fs::read(&path).expect("the store");
        for args in [&["store", "init", "--size", "128M"][..], &["serve"], &["ls"], &["store", "check"]] {
            let said = site.run(args).fails(8);
            assert!(said.contains("--repair") && said.contains("--rebuild"), "{what}, {args:?}: {said}");
            assert!(!said.contains("--force") && !said.contains("store init"), "{what}, {args:?}: {said}");
        }
        assert!(std::fs::read(&path).expect("the store") == before, "{what}: it was changed");
        let report = site.json(&["store", "check", "--repair"]);
        assert_eq!(report["damage"].as_array().map(Vec::len), Some(2), "{report}");
        assert_eq!(site.export("x"), bytes, "{what}");
        assert_eq!(site.json(&["store", "check"])["damage"], json!([]));
    }
}

#[test]
fn a_store_without_superblocks_and_anchors_is_rebuilt_from_its_log() {
    // Superblocks and anchors; or the anchors alone.
    for (from, pages) in [(0_u64, &[0_u64, 64, 128, 192, 256, 320][..]), (1, &[128, 192, 256, 320])] {
        let site = Site::with_store();
        let bytes = content(4 << 20, 5);
        std::fs::write(site.path("file"), &bytes).expect("a file");
        site.run(&["import", "file", "x"]).ok();
        let path = site.data().join("store.img");
        let file = std::fs::File::options().write(true).open(&path).expect("the store");
        pages.iter().for_each(|at| file.write_all_at(&[from as u8; 4096], at << 10).expect("overwritten"));
        let before = std::fs::read(&path).expect("the store");
        for args in [&["store", "init", "--size", "128M"][..], &["serve"], &["ls"], &["store", "check"]] {
            let done = site.run(args);
            let said = done.stderr();
            let whole = from == 1 && args.get(1) == Some(&"init");
            assert!(whole || said.contains("forebay store check --rebuild"), "{args:?}: {said}");
            assert_ne!(done.0.status.code(), Some(0), "{args:?}");
        }
        assert!(std::fs::read(&path).expect("the store") == before, "it was changed");
        let report = site.json(&["store", "check", "--rebuild"]);
        let rebuilt = &report["rebuild"];
        assert_eq!(
            (&rebuilt["written"], &rebuilt["lost"], &rebuilt["unproven"]),
            (&json!(true), &json!([]), &json!([]))
        );
        assert!(rebuilt["objects"].as_u64().expect("a number") >= 1 && rebuilt["checkpoints"] != json!(0), "{report}");
        assert_eq!(site.export("x"), bytes);
        assert_eq!(site.json(&["store", "check"])["damage"], json!([]));
        // It is whole now: nothing is rebuilt, and nothing is said of it.
        assert!(site.json(&["store", "check", "--rebuild"])["rebuild"].is_null());
    }
}

#[test]
fn one_damaged_superblock_is_told_until_it_is_renewed() {
    let mut site = Site::with_store();
    let path = site.data().join("store.img");
    let file = std::fs::File::options().write(true).open(&path).expect("the store");
    file.write_all_at(&[0xff; 16], (64 << 10) + 40).expect("damaged");
    let said = site.run(&["store", "check"]);
    assert!(said.stdout().contains("forebay store check --repair"), "{}", said.stdout());
    site.start();
    assert!(site.log().contains("forebay store check --repair"), "{}", site.log());
    let status = site.run(&["status"]).ok();
    assert!(status.contains("needs a repair") && status.contains("forebay store check --repair"), "{status}");
    site.stop();
    site.run(&["store", "check", "--repair"]).ok();
    site.start();
    assert!(!site.run(&["status"]).ok().contains("repair"));
}

#[test]
fn what_others_have_made_over_a_store_is_theirs() {
    let site = Site::with_store();
    let path = site.data().join("store.img");
    let file = std::fs::File::options().write(true).open(&path).expect("the store");
    file.write_all_at(&[0; 128 << 10], 0).expect("cleared");
    file.write_all_at(b"XFSB", 0).expect("the other's superblock");
    let before = std::fs::read(&path).expect("the file");
    for args in
        [&["store", "init", "--size", "128M"][..], &["store", "check", "--repair"], &["store", "check", "--rebuild"]]
    {
        let said = site.run(args).0;
        let text = String::from_utf8_lossy(&said.stderr).into_owned();
        assert!(!said.status.success() && text.contains("XFS"), "{args:?}: {text}");
    }
    assert!(std::fs::read(&path).expect("the file") == before, "it was changed");
}

#[test]
fn a_mounted_device_is_refused_whatever_is_said() {
    let site = Site::new();
    let image = site.path("image");
    let Some(mount) = crate::common::Mount::ext4(&site.path("mnt"), &image, 64 << 20) else { return };
    std::fs::write(mount.path().join("file"), b"still here").expect("written");
    let mounts = std::fs::read_to_string("/proc/mounts").expect("mounts");
    let line = mounts.lines().find(|line| line.contains(mount.path().to_str().expect("a path"))).expect("mounted");
    let device = line.split(' ').next().expect("a device");
    for store in [device, image.to_str().expect("a path")] {
        for force in [&[][..], &["--force"]] {
            let args = [&["store", "init", "--size", "32M", "--store", store][..], force].concat();
            let said = site.run(&args).fails(6);
            assert!(said.contains("in use"), "{args:?}: {said}");
        }
    }
    assert_eq!(std::fs::read(mount.path().join("file")).expect("the file"), b"still here");
}

#[test]
fn what_a_damaged_index_has_lost_is_named_and_dropped_only_by_force() {
    use forebay_store::format::anchor::{Anchor, SLOTS};

    let site = Site::with_store();
    std::fs::write(site.path("file"), content(4 << 20, 5)).expect("a file");
    site.run(&["import", "file", "x"]).ok();
    assert_eq!(site.json(&["store", "check", "--drop-lost"])["waits_for_force"], json!(false));
    let said = site.run(&["store", "check", "--force"]).fails(2);
    assert!(said.contains("--drop-lost"), "{said}");
    let path = site.data().join("store.img");
    let file = std::fs::File::options().read(true).write(true).open(&path).expect("the store");
    let block = |at: u64| {
        let mut block = vec![0; 4096];
        file.read_exact_at(&mut block, at).expect("read");
        block
    };
    let anchors = SLOTS.map(|slot| Anchor::decode_any(&block(slot[0])).expect("an anchor"));
    let root = anchors.into_iter().max_by_key(|anchor| anchor.generation).expect("an anchor").root;
    file.write_all_at(&[0xee; 4], root.addr).expect("damaged");
    let before = std::fs::read(&path).expect("the store");
    let done = site.run(&["store", "check", "--drop-lost"]);
    assert_eq!(done.0.status.code(), Some(8), "{}", done.stderr());
    assert!(
        done.stdout().contains("would be lost:") && done.stdout().contains("together with their names"),
        "{}",
        done.stdout()
    );
    assert!(done.stderr().contains("--force"), "{}", done.stderr());
    assert!(std::fs::read(&path).expect("the store") == before, "it was changed");
    let report = site.json(&["store", "check", "--drop-lost", "--force"]);
    assert!(report["freed"].as_u64().expect("a number") > 2 << 20, "{report}");
    assert_eq!(site.json(&["store", "check"])["damage"], json!([]));
    assert_eq!(site.json(&["ls"]), json!([]));
    site.run(&["import", "file", "x"]).ok();
}
