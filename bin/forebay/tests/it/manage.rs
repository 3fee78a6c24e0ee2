//! Metadata, locks, features and object maps through the command line, on the store. What a Ceph cluster alone has is tested
//! on one: `test/interop/rbd-manage.sh`.

use serde_json::{Value, json};

use crate::common::{Nbd, Site};

#[test]
fn metadata_is_listed_set_and_removed() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "4M"]).ok();
        assert_eq!(site.run(&["image-meta", "ls", "disk"]).ok(), "There are 0 metadata on this image.\n", "{mode}");
        assert_eq!(site.json(&["image-meta", "ls", "disk"]), json!({}), "{mode}");
        assert_eq!(site.run(&["image-meta", "set", "disk", "k", "v"]).ok(), "", "{mode}");
        site.run(&["image-meta", "set", "-p", "local", "--image", "disk", "a/b c", "two words"]).ok();
        assert_eq!(site.json(&["image-meta", "list", "disk"]), json!({"a/b c": "two words", "k": "v"}), "{mode}");
        let want = "There are 2 metadata on this image:\n\nKey    Value    \na/b c  two words\nk      v        \n";
        assert_eq!(site.run(&["image-meta", "ls", "disk"]).ok(), want, "{mode}");
        assert_eq!(site.run(&["image-meta", "get", "disk", "a/b c"]).ok(), "two words\n", "{mode}");
        assert_eq!(site.json(&["image-meta", "get", "disk", "k"]), json!("v"), "{mode}");
        site.run(&["image-meta", "set", "disk", "k", "other"]).ok();
        assert_eq!(site.json(&["image-meta", "get", "disk", "k"]), json!("other"), "{mode}");
        assert_eq!(site.run(&["image-meta", "rm", "disk", "k"]).ok(), "", "{mode}");
        for verb in ["rm", "remove", "get"] {
            let said = site.run(&["image-meta", verb, "disk", "k"]).fails(3);
            assert!(said.contains("'k'") && said.contains("forebay image-meta ls local/disk"), "{mode} {verb}: {said}");
            let said = site.run(&["image-meta", verb, "nope", "k"]).fails(3);
            assert!(said.contains("there is no image local/nope"), "{mode} {verb}: {said}");
        }
        for verb in [&["set", "disk", "forebay.writelog", "x"][..], &["rm", "disk", "forebay.reservations"]] {
            let said = site.run(&[&["image-meta"], verb].concat()).fails(10);
            assert!(said.contains("Forebay's own"), "{mode} {verb:?}: {said}");
        }
        site.run(&["image-meta", "set", "disk", "k"]).fails(2);
        site.run(&["image-meta", "get", "disk"]).fails(2);
    }
}

#[test]
fn what_only_a_cluster_has_is_refused() {
    for (mode, site) in Site::each() {
        site.run(&["create", "disk", "--size", "4M", "--image-feature", "layering"]).ok();
        for args in [
            &["lock", "ls", "disk"][..],
            &["lock", "add", "disk", "mine"],
            &["lock", "rm", "disk", "mine", "client.1"],
            &["watch", "disk"],
            &["feature", "enable", "disk", "exclusive-lock"],
            &["feature", "enable", "disk", "journaling"],
            &["feature", "disable", "disk", "journaling"],
        ] {
            let said = site.run(args).fails(9);
            assert!(said.contains("Ceph cluster") || said.contains("journaling"), "{mode} {args:?}: {said}");
        }
        for (args, says) in [
            (&["object-map", "check", "disk"][..], "object-map is not enabled"),
            (&["object-map", "rebuild", "disk"], "object-map is not enabled"),
            (&["feature", "disable", "disk", "layering"], "layering cannot be changed"),
            (&["feature", "enable", "disk", "deep-flatten"], "deep-flatten cannot be changed"),
            (&["feature", "disable", "disk", "deep-flatten"], "is disabled already"),
            (&["feature", "enable", "disk", "nonsense"], "there is no feature 'nonsense'"),
            (&["feature", "enable", "disk"], "at least one feature"),
            (&["lock", "rm", "disk", "mine", "me"], "is no locker"),
        ] {
            let said = site.run(args).fails(2);
            assert!(said.contains(says), "{mode} {args:?}: {said}");
        }
        for args in [
            &["lock", "ls", "nope"][..],
            &["lock", "add", "nope", "mine"],
            &["lock", "rm", "nope", "mine", "client.1"],
            &["feature", "disable", "nope", "object-map"],
            &["object-map", "check", "nope"],
            &["object-map", "rebuild", "nope@s"],
        ] {
            let said = site.run(args).fails(3);
            assert!(said.contains("there is no image local/nope"), "{mode} {args:?}: {said}");
        }
    }
}

#[test]
fn stored_zeroes_are_freed() {
    const MIB: u64 = 1 << 20;
    let site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "16M", "--object-size", "1M"]).ok();
    site.run(&["attach", "disk", "--nbd"]).ok();
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), "disk").expect("connects");
    client.write(0, &vec![0; 2 << 20]);
    client.write(2 * MIB, &vec![7; 1 << 20]);
    client.write(2 * MIB + 8192, &[0; 4096]);
    let used = || site.json(&["du", "disk", "--exact"])["total_used_size"].as_u64().expect("a number");
    let before = site.export("disk");
    assert_eq!(used(), 3 * MIB);
    // While it is in use.
    assert_eq!(site.run(&["sparsify", "disk", "--sparse-size", "8K"]).ok(), "");
    assert_eq!(used(), MIB);
    assert_eq!(site.http("POST /v1/images/local/disk/sparsify\ncontent-length: 2\n\n{}").0, 200);
    assert_eq!(used(), MIB - 4096);
    assert!(site.export("disk") == before);
    for size in ["3000", "5000", "2M"] {
        let said = site.run(&["sparsify", "disk", "--sparse-size", size]).fails(2);
        assert!(said.contains("power of two"), "{said}");
    }
    let said = site.run(&["sparsify", "none"]).fails(3);
    assert!(said.contains("there is no image local/none"), "{said}");
    drop(client);
}

#[test]
fn commands_of_rbd_alone_are_refused_by_name() {
    let site = Site::new();
    for line in ["journal status a/b", "trash purge schedule add -p a 1d", "device attach a/b"] {
        let words: Vec<&str> = line.split(' ').collect();
        let said = site.run(&words).fails(9);
        assert!(said.contains(&format!("'rbd {}", words[0])), "{line}: {said}");
    }
    let said = site.run(&["nothing", "here"]).fails(2);
    assert!(said.contains("unrecognized subcommand"), "{said}");
}

#[test]
fn the_control_api() {
    let site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "4M"]).ok();
    let image = "/v1/images/local/disk";
    let json = |(status, body): (u16, String)| -> Value {
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    };
    site.run(&["image-meta", "set", "disk", "a/b c", "v"]).ok();
    assert_eq!(json(site.http(&format!("GET {image}/metadata"))), json!({"a/b c": "v"}));
    assert_eq!(json(site.http(&format!("GET {image}/metadata/a%2Fb%20c"))), json!({"value": "v"}));
    assert_eq!(site.http(&format!("DELETE {image}/metadata/a%2Fb%20c")).0, 200);
    assert_eq!(site.http(&format!("DELETE {image}/metadata/a%2Fb%20c")).0, 404);
    assert_eq!(site.http(&format!("DELETE {image}/metadata/forebay.writelog")).0, 403);
    assert_eq!(site.http(&format!("GET {image}/locks")).0, 501);
    assert_eq!(site.http(&format!("DELETE {image}/locks/x")).0, 400);
    assert_eq!(site.http(&format!("POST {image}/object-map/check")).0, 400);
    assert_eq!(site.http(&format!("POST {image}/object-map/rebuild?snap=s")).0, 400);
    let described: Value = json(site.http("GET /openapi.json"));
    for path in [
        "metadata",
        "metadata/{key}",
        "sparsify",
        "locks",
        "locks/{id}",
        "features",
        "object-map/check",
        "object-map/rebuild",
    ] {
        let path = format!("/v1/images/{{pool}}/{{image}}/{path}");
        assert!(described["paths"][&path].is_object(), "{path} is not described");
    }
}
