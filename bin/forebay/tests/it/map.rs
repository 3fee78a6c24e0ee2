//! Images mapped to block devices: what needs no kernel module.  `test/interop/guest-map.sh` has the rest.

use std::fs;

use crate::common::{Site, wait_until};

#[test]
fn nothing_is_mapped() {
    let site = Site::new();
    let said = site.run(&["map", "disk"]).fails(4);
    assert!(said.contains("no daemon"), "{said}");
    let site = Site::serving(&[]);
    site.run(&["create", "disk", "--size", "4M"]).ok();
    assert_eq!(site.run(&["showmapped"]).ok(), "");
    assert_eq!(site.run(&["device", "list", "--format", "json"]).ok().trim(), "[]");
    for target in ["disk", "/dev/nbd0"] {
        let said = site.run(&["unmap", target]).fails(3);
        assert!(said.contains("showmapped"), "{said}");
    }
    assert_eq!(site.http("GET /v1/mappings"), (200, "[]".to_owned()));
    assert_eq!(site.http("DELETE /v1/mappings?pool=local").0, 400);
}

#[test]
fn a_mapping_whose_device_is_gone_ends_with_its_export() {
    let mut site = Site::serving(&[]);
    for image in ["mapped", "other"] {
        site.run(&["create", image, "--size", "4M"]).ok();
        site.run(&["attach", image, "--nbd"]).ok();
    }
    site.stop();
    let record = |image: &str, owns_export: bool| {
        format!(
            r#"{{"pool":"local","image":"{image}","backend":"forebay:x","boot":"another","device":1048575,
                "connections":1,"owns_export":{owns_export}}}"#
        )
    };
    let records = [record("mapped", true), record("other", false)].join(",");
    fs::write(site.data().join("mappings.json"), format!(r#"{{"version":1,"mappings":[{records}]}}"#))
        .expect("written");
    let listed = site.json(&["showmapped"]);
    assert_eq!(listed.as_array().map(Vec::len), Some(2), "{listed}");
    assert_eq!((&listed[0]["device"], &listed[0]["error"]["kind"]), (&"/dev/nbd1048575".into(), &"not_found".into()));
    let said = site.run(&["detach", "mapped"]).fails(6);
    assert!(said.contains("mapped to /dev/nbd1048575"), "{said}");
    site.start();
    wait_until("the mappings are removed", || site.json(&["showmapped"]) == serde_json::json!([]));
    let left = site.json(&["targets"]);
    assert_eq!((left.as_array().map(Vec::len), &left[0]["image"]), (Some(1), &"other".into()), "{left}");
}

#[test]
fn mappings_of_another_version_are_refused() {
    let mut site = Site::serving(&[]);
    site.stop();
    // Whatever that version has.
    fs::write(site.data().join("mappings.json"), r#"{"version":7,"mappings":{"local/disk":7}}"#).expect("written");
    let said = site.run(&["serve"]).fails(9);
    assert!(said.contains("have version 7, this build knows 1"), "{said}");
}
