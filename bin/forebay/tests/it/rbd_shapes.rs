//! Compatibility with `rbd`, for its users and their scripts: the same options, keys and columns.

use crate::common::{Nbd, Site, shape};
use serde_json::{Value, json};

#[test]
fn keys_are_those_of_rbd() {
    for (mode, site) in Site::each() {
        site.run(&["create", "-p", "local", "--image", "disk", "--size", "5000K", "--order", "20"]).ok();
        let info = site.json(&["info", "disk"]);
        let want = json!({
            "name": "string", "id": "string", "size": "number", "objects": "number", "order": "number",
            "object_size": "number", "snapshot_count": "number", "block_name_prefix": "string", "format": "number",
            "features": ["string"], "op_features": [], "flags": [], "create_timestamp": "string",
            "access_timestamp": "string", "modify_timestamp": "string", "pool": "string",
        });
        assert_eq!(shape(&info), want, "{mode}");
        assert_eq!((&info["order"], &info["object_size"], &info["objects"]), (&json!(20), &json!(1 << 20), &json!(5)));

        let listed = json!([{"image": "disk", "id": info["id"], "size": 5_120_000, "format": 2}]);
        assert_eq!(site.json(&["ls", "-l"]), listed, "{mode}");
        let table = site.run(&["ls", "-l", "-p", "local"]).ok();
        let want = "NAME  SIZE     PARENT  FMT  PROT  LOCK\ndisk  4.9 MiB            2            \n";
        assert_eq!(table, want, "{mode}");

        let usage = json!({
            "images": [{"name": "disk", "id": info["id"], "provisioned_size": 5_120_000, "used_size": 0}],
            "total_provisioned_size": 5_120_000, "total_used_size": 0,
        });
        assert_eq!(site.json(&["du", "local/disk"]), usage, "{mode}");
        assert_eq!(site.run(&["du"]).ok(), "NAME  PROVISIONED  USED\ndisk      4.9 MiB   0 B\n", "{mode}");
        site.run(&["rm", "--image", "disk"]).ok();
        for args in [&["ls", "-l"][..], &["du"]] {
            assert_eq!(site.run(args).ok(), "", "{mode} {args:?}");
        }
    }
}

#[test]
fn times_are_those_of_the_reader() {
    let site = Site::with_store();
    site.run(&["create", "disk", "--size", "1M"]).ok();
    let created = |zone: &str| {
        let output = site.command(&["info", "disk", "--format", "json"]).env("TZ", zone).output().expect("the command");
        let info: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        info["create_timestamp"].as_str().expect("a time").to_owned()
    };
    let hour = |text: &str| text[11..13].parse::<u32>().expect("an hour");
    let (here, there) = (created("UTC"), created("XYZ-3"));
    // As ctime: "Mon Nov 23 19:41:42 2026".
    assert!(here.len() == 24 && here.as_bytes()[13] == b':', "{here}");
    assert_eq!(hour(&there), (hour(&here) + 3) % 24, "{here}, {there}");
    let info = site.run(&["info", "disk"]).ok();
    assert!(info.starts_with("rbd image 'disk':\n\tsize 1 MiB in 1 objects\n\torder 22 (4 MiB objects)\n"), "{info}");
}

#[test]
fn the_pool_and_the_image_as_options() {
    for (mode, site) in Site::each() {
        site.run(&["create", "--pool", "local", "one", "--size", "1M"]).ok();
        for args in [
            &["info", "-p", "local", "--image", "one"][..],
            &["info", "-p", "local", "one"],
            &["info", "--image", "local/one"],
            &["resize", "--image", "one", "--size", "2M"],
            &["du", "-p", "local", "--image", "one"],
            &["status", "-p", "local", "one"],
            &["reservations", "ls", "--image", "one"],
            &["bench", "-p", "local", "--image", "one", "--io-type", "write", "--seconds", "0.01"],
        ] {
            if args[0] != "bench" || mode == "direct" {
                site.run(args).ok();
            }
        }
        site.run(&["mv", "--image", "one", "--dest", "two"]).ok();
        site.run(&["mv", "-p", "local", "--image", "two", "three"]).ok();
        let file = site.path("file");
        let file = file.to_str().expect("a path");
        site.run(&["export", "-p", "local", "--image", "three", file]).ok();
        site.run(&["import", file, "-p", "local"]).ok();
        site.run(&["import", file, "--image", "four"]).ok();
        assert_eq!(site.json(&["ls", "-p", "local"]), json!(["file", "four", "three"]), "{mode}");
        for (args, says) in [
            (&["info"][..], "no image is named"),
            (&["info", "-p", "local"], "--image"),
            (&["info", "three", "--image", "four"], "both name the image"),
            (&["info", "-p", "ram", "local/three"], "different pools"),
            (&["ls", "-p", "ram", "local"], "different pools"),
            (&["create", "x", "--size", "1M", "--order", "20", "--object-size", "1M"], "--object-size"),
            (&["create", "x", "--size", "1M", "--order", "26"], "12..=25"),
            (&["create", "x", "--size", "1M", "--order", "12"], "64 KiB"),
        ] {
            let said = site.run(args).fails(2);
            assert!(said.contains(says), "{mode} {args:?}: {said}");
        }
    }
}

#[test]
fn order_is_taken_and_given_up_as_in_rbd() {
    let site = Site::with_store();
    let done = site.run(&["create", "x", "--size", "1M", "--order", "16"]);
    assert!(done.stderr().contains("--order is deprecated, use --object-size"), "{}", done.stderr());
    done.ok();
    assert_eq!(site.json(&["info", "x"])["object_size"], json!(65_536));
}

#[test]
fn who_watches_an_image() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "1M"]).ok();
        assert_eq!(site.run(&["status", "local/disk"]).ok(), "Watchers: none\n", "{mode}");
        assert_eq!(site.json(&["status", "disk"]), json!({"watchers": [], "exports": []}), "{mode}");
        for args in [&["status", "nope"][..], &["status", "rbd/nope"]] {
            let said = site.run(args).fails(3);
            assert!(said.contains("error opening image nope: (2) No such file or directory"), "{mode}: {said}");
        }
        let said = site.run(&["status", "nope", "--format", "json"]).fails(3);
        let error: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(error["error"]["kind"], "not_found", "{mode}");
        if mode == "daemon" {
            site.run(&["attach", "disk", "--nbd"]).ok();
            let host = Nbd::connect(&site.data().join("nbd.sock"), "local/disk").expect("connected");
            let status = site.json(&["status", "disk"]);
            assert_eq!(status["watchers"], json!([]), "no cluster knows of it");
            let export = &status["exports"][0];
            assert_eq!((&export["front"], &export["connections"]), (&json!("nbd"), &json!(1)), "{status}");
            assert_eq!(site.run(&["status", "disk"]).ok(), "Watchers: none\n");
            drop(host);
            assert_eq!(site.json(&["status"])["ready"], json!(true), "without an image it is the daemon's");
        }
    }
}

#[test]
fn du_of_a_pool_or_of_an_image() {
    let mut site = Site::serving(&[]);
    let names = |site: &Site, args: &[&str]| -> Vec<String> {
        let usage = site.json(&[&["du"], args].concat());
        let images = usage["images"].as_array().expect("images").clone();
        images.iter().map(|image| image["name"].as_str().expect("a name").to_owned()).collect()
    };
    for image in ["local/ram", "local/rbd", "ram/a"] {
        site.run(&["create", image, "--size", "1M"]).ok();
    }
    assert_eq!(names(&site, &["ram"]), ["a"], "a pool goes before an image");
    assert_eq!(names(&site, &["ram/"]), ["a"]);
    assert_eq!(names(&site, &["-p", "ram"]), ["a"]);
    assert_eq!(names(&site, &["local"]), ["ram", "rbd"]);
    assert_eq!(names(&site, &["rbd"]), ["rbd"], "no such pool, but an image");
    assert_eq!(names(&site, &["local/ram"]), ["ram"]);
    assert_eq!(names(&site, &["--image", "ram"]), ["ram"]);
    let said = site.run(&["du", "nope"]).fails(3);
    assert!(said.contains("no pool 'nope'") && said.contains("no image local/nope"), "{said}");
    site.run(&["du", "rbd/"]).fails(3);
    site.stop();
    assert_eq!(names(&site, &["ram"]), ["ram"], "the pool ram has gone with the daemon");
}
