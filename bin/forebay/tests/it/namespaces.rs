//! Namespaces through the command line: everything that an image can do, in a part of a pool of its own.

use serde_json::json;

use crate::common::{Nbd, Site, content};

const MIB: usize = 1 << 20;

#[test]
fn life_of_a_namespace() {
    for (mode, site) in Site::each() {
        let run = |args: &[&str]| site.run(args);
        assert_eq!(run(&["namespace", "ls"]).ok(), "", "{mode}");
        assert_eq!(site.json(&["namespace", "ls", "local"]), json!([]), "{mode}");
        let said = run(&["create", "local/ns/a", "--size", "1M"]).fails(3);
        assert!(said.contains("no namespace local/ns"), "{mode}: {said}");
        assert!(run(&["ls", "local/ns"]).fails(3).contains("no namespace local/ns"), "{mode}");
        run(&["namespace", "create", "local/ns"]).ok();
        run(&["namespace", "create", "-p", "local", "--namespace", "other"]).ok();
        assert!(run(&["namespace", "create", "ns"]).fails(5).contains("exists already"), "{mode}");
        assert!(run(&["namespace", "rm", "none"]).fails(3).contains("no namespace local/none"), "{mode}");
        run(&["namespace", "create", "a/b/c"]).fails(2);
        assert_eq!(site.json(&["namespace", "list"]), json!([{"name": "ns"}, {"name": "other"}]), "{mode}");
        assert_eq!(run(&["namespace", "ls"]).ok(), "NAME \nns   \nother\n", "{mode}");

        // Images of one name in three places.
        let file = site.path("file");
        for (number, image) in ["a", "local/ns/a", "local/other/a"].into_iter().enumerate() {
            std::fs::write(&file, content(MIB, number as u64)).expect("a file");
            run(&["import", "--no-progress", file.to_str().expect("a path"), image]).ok();
        }
        for (number, image) in ["a", "local/ns/a", "local/other/a"].into_iter().enumerate() {
            assert_eq!(site.export(image), content(MIB, number as u64), "{mode}: {image}");
            assert_eq!(site.json(&["info", image])["name"], json!("a"), "{mode}");
        }
        for place in [&["local/ns"][..], &["--namespace", "ns"], &["-p", "local", "--namespace", "ns"]] {
            assert_eq!(run(&[&["ls"][..], place].concat()).ok(), "a\n", "{mode}: {place:?}");
        }
        assert_eq!(site.json(&["ls", "-l", "local/ns"])[0]["image"], json!("a"), "{mode}");
        assert_eq!(site.json(&["du", "local/ns/"])["images"][0]["name"], json!("a"), "{mode}");
        assert_eq!(site.json(&["du", "local/ns/a"])["images"][0]["name"], json!("a"), "{mode}");

        // Snapshots, clones in another namespace, copies, names.
        run(&["snap", "create", "--no-progress", "local/ns/a@s"]).ok();
        run(&["clone", "local/ns/a@s", "local/other/clone"]).ok();
        assert_eq!(run(&["children", "local/ns/a"]).ok(), "local/other/clone\n", "{mode}");
        assert_eq!(site.json(&["info", "local/other/clone"])["parent"]["pool_namespace"], json!("ns"), "{mode}");
        assert_eq!(site.export("local/other/clone"), content(MIB, 1), "{mode}");
        run(&["rm", "--no-progress", "local/ns/a"]).fails(6);
        let said = run(&["clone", "local/ns/a@s", "local/none/clone"]).fails(3);
        assert!(said.contains("no namespace local/none"), "{mode}: {said}");
        run(&["flatten", "--no-progress", "local/other/clone"]).ok();
        run(&["cp", "--no-progress", "local/ns/a@s", "--dest-namespace", "other", "--dest", "copy"]).ok();
        assert_eq!(site.export("local/other/copy"), content(MIB, 1), "{mode}");
        run(&["snap", "rm", "--no-progress", "local/ns/a@s"]).ok();
        run(&["mv", "local/ns/a", "local/ns/b"]).ok();
        assert!(run(&["mv", "local/ns/b", "local/b"]).fails(2).contains("namespace"), "{mode}");
        assert_eq!(run(&["ls", "local/ns"]).ok(), "b\n", "{mode}");
        run(&["image-meta", "set", "local/ns/b", "key", "value"]).ok();
        assert_eq!(run(&["image-meta", "get", "local/ns/b", "key"]).ok(), "value\n", "{mode}");
        run(&["resize", "--no-progress", "local/ns/b", "--size", "2M"]).ok();

        // Groups and the trash.
        run(&["group", "create", "local/ns/g"]).ok();
        assert_eq!(run(&["group", "ls"]).ok(), "", "{mode}");
        assert_eq!(run(&["group", "ls", "local/ns"]).ok(), "g\n", "{mode}");
        let said = run(&["group", "image", "add", "local/ns/g", "local/a"]).fails(2);
        assert!(said.contains("different namespaces"), "{mode}: {said}");
        run(&["group", "image", "add", "local/ns/g", "local/ns/b"]).ok();
        let member = json!([{"image": "b", "pool": "local", "namespace": "ns", "state": 0}]);
        assert_eq!(site.json(&["group", "image", "ls", "local/ns/g"]), member, "{mode}");
        run(&["group", "snap", "create", "local/ns/g@1"]).ok();
        let listed = site.json(&["snap", "ls", "--all", "local/ns/b"]);
        let owner = &listed[0]["namespace"];
        let expected = (json!("local"), json!("g"), json!("1"));
        assert_eq!(
            (owner["pool"].clone(), owner["group"].clone(), owner["group snap"].clone()),
            expected,
            "{mode}: {listed}"
        );
        run(&["group", "snap", "rollback", "--no-progress", "local/ns/g@1"]).ok();
        run(&["group", "rm", "local/ns/g"]).ok();
        run(&["trash", "mv", "local/ns/b"]).ok();
        assert_eq!(site.json(&["trash", "ls"]), json!([]), "{mode}");
        let id = site.json(&["trash", "ls", "local/ns"])[0]["id"].as_str().expect("an id").to_owned();
        assert!(run(&["namespace", "rm", "local/ns"]).fails(6).contains("trash"), "{mode}");
        run(&["trash", "restore", &format!("local/ns/{id}"), "--image", "c"]).ok();
        assert!(run(&["namespace", "rm", "local/ns"]).fails(6).contains("has images"), "{mode}");
        assert_eq!(site.export("local/ns/c")[..MIB], content(MIB, 1), "{mode}");
        run(&["trash", "mv", "local/ns/c"]).ok();
        run(&["trash", "purge", "--no-progress", "local/ns"]).ok();
        run(&["namespace", "rm", "local/ns"]).ok();
        assert_eq!(run(&["namespace", "ls"]).ok(), "NAME \nother\n", "{mode}");
        assert_eq!(site.export("a"), content(MIB, 0), "{mode}");
        assert_eq!(site.export("local/other/a"), content(MIB, 2), "{mode}");
    }
}

#[test]
fn images_in_namespaces_are_served_with_write_logs_and_over_restarts() {
    let mut site = Site::serving(&[]);
    site.run(&["namespace", "create", "local/ns"]).ok();
    let log = format!("ssd:{}:16M", site.path("logs").display());
    for image in ["local/ns/a", "local/a"] {
        site.run(&["create", image, "--size", "1M"]).ok();
        site.run(&["attach", image, "--nbd", "--log", &log]).ok();
    }
    let connect = |site: &Site, image: &str| Nbd::connect(&site.data().join("nbd.sock"), image).expect("connects");
    connect(&site, "local/ns/a").write(0, &content(4096, 1));
    connect(&site, "local/a").write(0, &content(4096, 2));
    for kills in [true, false] {
        match kills {
            true => site.kill(),
            false => site.stop(),
        }
        site.start();
        assert_eq!(connect(&site, "local/ns/a").read(0, 4096), content(4096, 1));
        assert_eq!(connect(&site, "local/a").read(0, 4096), content(4096, 2));
    }
    assert!(site.run(&["rm", "--no-progress", "local/ns/a"]).fails(6).contains("local/ns/a"));
    // The log of an image in a namespace is not taken for an abandoned one.
    site.stop();
    let listed = site.json(&["log", "ls"]);
    let of = |image: &str| listed.as_array().expect("a list").iter().find(|log| log["image"] == json!(image)).cloned();
    for image in ["local/ns/a", "local/a"] {
        let log = of(image).unwrap_or_else(|| panic!("the log of {image} in {listed}"));
        assert_ne!(log["state"], json!("abandoned"), "{listed}");
    }
    site.start();
    site.run(&["detach", "local/ns/a"]).ok();
    site.run(&["rm", "--no-progress", "local/ns/a"]).ok();
    site.run(&["namespace", "rm", "local/ns"]).ok();
}
