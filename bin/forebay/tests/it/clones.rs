//! Clones through the command line: made, listed, written, flattened and removed.

use serde_json::{Value, json};

use crate::common::{Nbd, Site, content, shape};

const MIB: usize = 1 << 20;

fn children(site: &Site, source: &str, options: &[&str]) -> Vec<String> {
    let listed = site.json(&[&["children", source], options].concat());
    let name = |child: &Value| child["image"].as_str().expect("a name").to_owned();
    listed.as_array().expect("a list").iter().map(name).collect()
}

#[test]
fn a_clone_shares_data_until_it_changes_it() {
    for (mode, site) in Site::each() {
        let data = content(9 * MIB, 1);
        site.run_with_input(&["import", "-", "gold"], &data).ok();
        site.run(&["snap", "create", "gold@v1"]).ok();
        let info = site.json(&["clone", "gold@v1", "vm1"]);
        assert_eq!((&info["size"], &info["objects"]), (&json!(9 * MIB), &json!(3)), "{mode}");
        assert_eq!(
            (&info["parent"]["image"], &info["parent"]["snapshot"], &info["parent"]["overlap"]),
            (&json!("gold"), &json!("v1"), &json!(9 * MIB)),
            "{mode}: {info}"
        );
        assert_eq!(info["op_features"], json!(["clone-child"]), "{mode}");
        site.run(&["clone", "-p", "local", "--image", "gold", "--snap", "v1", "--dest-pool", "local", "--dest", "vm2"])
            .ok();
        assert!(site.export("vm1") == data && site.export("vm2") == data, "{mode}");
        let usage = site.json(&["du", "vm1", "--exact"]);
        assert_eq!(usage["total_used_size"], json!(0), "{mode}: it shares everything");

        assert_eq!(children(&site, "gold@v1", &[]), ["vm1", "vm2"].map(str::to_owned), "{mode}");
        assert_eq!(site.run(&["children", "local/gold"]).ok(), "local/vm1\nlocal/vm2\n", "{mode}");
        let shapes = site.json(&["children", "gold", "--all"]);
        let want = json!({
            "pool": "string", "pool_namespace": "string", "image": "string", "id": "string", "trash": "bool",
        });
        assert_eq!(shape(&shapes[0]), want, "{mode}");
        assert!(site.json(&["children", "gold"])[0].get("id").is_none(), "{mode}: only with --all, as in rbd");

        // A clone of a clone, with features and objects of its own.
        site.run(&["snap", "create", "vm2@s"]).ok();
        let options = ["--image-feature", "layering", "--object-size", "64K"];
        let info = site.json(&[&["clone", "vm2@s", "vm3"], &options[..]].concat());
        assert_eq!((&info["object_size"], &info["features"][1]), (&json!(65536), &json!("operations")), "{mode}");
        assert!(site.export("vm3") == data, "{mode}");
        assert_eq!(children(&site, "gold", &["--descendants"]), ["vm1", "vm2", "vm3"].map(str::to_owned), "{mode}");

        assert_eq!(site.run(&["flatten", "vm2"]).ok(), "", "{mode}");
        let info = site.json(&["info", "vm2"]);
        assert!(info.get("parent").is_none_or(Value::is_null), "{mode}: {info}");
        assert!(site.export("vm2") == data && site.export("vm3") == data, "{mode}");
        site.run(&["flatten", "vm2"]).fails(2);
        site.run(&["flatten", "none"]).fails(3);

        // The snapshot stays in the trash as long as the clone needs it.
        site.run(&["snap", "rm", "gold@v1"]).ok();
        assert_eq!(site.json(&["snap", "ls", "gold"]), json!([]), "{mode}");
        let all = site.json(&["snap", "ls", "gold", "--all"]);
        let want = json!({"type": "trash", "original_name": "v1"});
        assert_eq!(all[0]["namespace"], want, "{mode}: {all}");
        assert!(site.run(&["snap", "ls", "gold", "--all"]).ok().contains("trash (v1)"), "{mode}");
        let id = all[0]["id"].to_string();
        let said = site.run(&["snap", "rm", "gold", "--snap-id", &id]).fails(6);
        assert!(said.contains("clones") && said.contains("forebay children --all local/gold"), "{mode}: {said}");
        let said = site.run(&["rm", "gold"]).fails(6);
        assert!(said.contains("forebay children --all local/gold"), "{mode}: {said}");
        site.run(&["rm", "vm1"]).ok();
        site.run(&["rm", "vm3"]).ok();
        site.run(&["snap", "purge", "vm2"]).ok();
        assert_eq!(site.json(&["snap", "ls", "gold", "--all"]), json!([]), "{mode}: it went with the last clone");
        site.run(&["rm", "gold"]).ok();
        assert!(site.export("vm2") == data, "{mode}");
    }
}

#[test]
fn a_deep_copy_of_a_clone_shares_the_parent() {
    for (mode, site) in Site::each() {
        let data = content(9 * MIB, 2);
        site.run_with_input(&["import", "-", "gold"], &data).ok();
        site.run(&["snap", "create", "gold@v1"]).ok();
        site.run(&["clone", "gold@v1", "vm", "--stripe-unit", "64K", "--stripe-count", "2"]).ok();
        site.run(&["snap", "create", "vm@first"]).ok();
        site.run(&["resize", "vm", "--size", "5M", "--allow-shrink"]).ok();
        site.run(&["resize", "vm", "--size", "6M"]).ok();
        let now = site.export("vm");
        assert!(now[..5 * MIB] == data[..5 * MIB] && now[5 * MIB..].iter().all(|byte| *byte == 0), "{mode}");

        let copy = site.json(&["deep", "cp", "vm", "copy"]);
        assert_eq!((&copy["parent"]["image"], &copy["stripe_count"]), (&json!("gold"), &json!(2)), "{mode}: {copy}");
        assert_eq!(children(&site, "gold@v1", &[]), ["copy", "vm"].map(str::to_owned), "{mode}");
        assert!(site.export("copy") == now && site.export("copy@first") == data, "{mode}");
        let used = |image: &str| site.json(&["du", image, "--exact"])["total_used_size"].as_u64().expect("bytes");
        assert!(used("copy") <= used("vm"), "{mode}: {} and {}", used("copy"), used("vm"));

        site.run(&["deep", "cp", "vm", "own", "--flatten"]).ok();
        assert!(site.json(&["info", "own"]).get("parent").is_none_or(Value::is_null), "{mode}");
        assert!(site.export("own") == now && site.export("own@first") == data, "{mode}");

        // A parent that gets no more clones.
        site.run(&["snap", "rm", "gold@v1"]).ok();
        let said = site.run(&["deep", "cp", "vm", "late"]).fails(6);
        assert!(said.contains("trash") && said.contains("--flatten"), "{mode}: {said}");
        assert_eq!(site.json(&["ls"]), json!(["copy", "gold", "own", "vm"]), "{mode}: nothing is left");
        site.run(&["deep", "cp", "vm", "late", "--flatten"]).ok();
        assert!(site.export("late@first") == data, "{mode}");
        let said = site.run(&["deep", "cp", "vm", "ram/late"]).fails(6);
        assert!(said.contains("--flatten"), "{mode}: {said}");
    }
}

#[test]
fn clones_of_version_1_need_a_protected_snapshot() {
    for (mode, site) in Site::each() {
        site.run(&["create", "gold", "--size", "5M"]).ok();
        site.run(&["snap", "create", "gold@v1"]).ok();
        let said = site.run(&["clone", "gold@v1", "vm", "--clone-format", "1"]).fails(2);
        assert!(said.contains("protected") && said.contains("forebay snap protect local/gold@v1"), "{mode}: {said}");
        site.run(&["snap", "protect", "gold@v1"]).ok();
        let info = site.json(&["clone", "gold@v1", "vm", "--rbd-default-clone-format", "1"]);
        assert_eq!(info["op_features"], json!([]), "{mode}");
        assert_eq!(children(&site, "gold@v1", &[]), ["vm".to_owned()], "{mode}");
        let said = site.run(&["snap", "unprotect", "gold@v1"]).fails(6);
        assert!(said.contains("clones in pool"), "{mode}: {said}");
        let said = site.run(&["snap", "rm", "gold@v1"]).fails(6);
        assert!(said.contains("protected"), "{mode}: {said}");
        // As 'rbd snap rm --force' does.
        site.run(&["snap", "rm", "gold@v1", "--force"]).ok();
        assert!(site.json(&["info", "vm"]).get("parent").is_none_or(Value::is_null), "{mode}: it was flattened");
        assert_eq!(site.json(&["snap", "ls", "gold", "--all"]), json!([]), "{mode}");
        site.run(&["rm", "gold"]).ok();
    }
}

#[test]
fn a_clone_is_flattened_while_a_host_writes() {
    let site = Site::serving(&[]);
    let data = content(33 * MIB, 1);
    site.run_with_input(&["import", "-", "gold"], &data).ok();
    site.run(&["snap", "create", "gold@v1"]).ok();
    site.run(&["clone", "gold@v1", "vm"]).ok();
    site.run(&["attach", "vm", "--nbd"]).ok();
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), "vm").expect("connects");
    let mut expected = data;
    std::thread::scope(|scope| {
        let flattening = scope.spawn(|| site.run(&["flatten", "vm"]).ok());
        for round in 0..300_usize {
            let offset = (round * 7919 + 13) * 512 % (33 * MIB - 8192);
            let part = content(4096 + round, round as u64);
            client.write(offset as u64, &part);
            expected[offset..offset + part.len()].copy_from_slice(&part);
        }
        flattening.join().expect("flattened");
    });
    client.flush();
    drop(client);
    assert!(site.export("vm") == expected);
    site.run(&["snap", "rm", "gold@v1"]).ok();
    assert_eq!(site.json(&["snap", "ls", "gold", "--all"]), json!([]), "no clone needs it");
    site.run(&["rm", "gold"]).ok();
    assert!(site.export("vm") == expected, "it is independent");
    site.run(&["detach", "vm"]).ok();
}

#[test]
fn what_is_refused() {
    for (mode, site) in Site::each() {
        site.run(&["create", "gold", "--size", "5M"]).ok();
        site.run(&["snap", "create", "gold@v1"]).ok();
        let said = site.run(&["clone", "gold@none", "vm"]).fails(3);
        assert!(said.contains("there is no snapshot local/gold@none"), "{mode}: {said}");
        let said = site.run(&["clone", "none@v1", "vm"]).fails(3);
        assert!(said.contains("local/none"), "{mode}: {said}");
        site.run(&["clone", "gold@v1", "gold"]).fails(5);
        site.run(&["clone", "gold", "vm"]).fails(2);
        let said = site.run(&["clone", "gold@v1", "vm", "--image-feature", "deep-flatten"]).fails(2);
        assert!(said.contains("layering"), "{mode}: {said}");
        let said = site.run(&["clone", "gold@v1", "vm", "--image-feature", "layring"]).fails(2);
        assert!(said.contains("'layring' is no feature"), "{mode}: {said}");
        let said = site.run(&["snap", "rm", "gold", "--snap-id", "999"]).fails(3);
        assert!(said.contains("forebay snap ls --all local/gold"), "{mode}: {said}");
        site.run(&["snap", "rm", "gold@v1", "--snap-id", "9"]).fails(2);
        assert_eq!(site.run(&["children", "gold"]).ok(), "", "{mode}");
        site.run(&["children", "gold@none"]).fails(3);
        let kept = site.json(&["ls"]);
        assert_eq!(kept, json!(["gold"]), "{mode}: nothing is left of what was refused");
    }
    let site = Site::serving(&[]);
    site.run(&["create", "gold", "--size", "5M"]).ok();
    site.run(&["snap", "create", "gold@v1"]).ok();
    let said = site.run(&["clone", "gold@v1", "ram/vm"]).fails(2);
    assert!(said.contains("both in the same store"), "{said}");
}
