//! The trash through the command line: images moved there, listed, restored, removed and purged.

use serde_json::{Value, json};

use crate::common::{Nbd, Site, content, shape};

const MIB: usize = 1 << 20;

/// Returns the ids and names in the trash.
fn trashed(site: &Site) -> Vec<(String, String)> {
    let listed = site.json(&["trash", "ls"]);
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    listed.as_array().expect("a list").iter().map(|image| (text(&image["id"]), text(&image["name"]))).collect()
}

#[test]
fn an_image_goes_to_the_trash_and_comes_back() {
    for (mode, site) in Site::each() {
        assert_eq!(site.json(&["trash", "ls"]), json!([]), "{mode}");
        assert_eq!(site.run(&["trash", "ls", "--long"]).ok(), "", "{mode}");
        let data = content(5 * MIB, 1);
        site.run_with_input(&["import", "-", "disk"], &data).ok();
        let id = site.json(&["info", "disk"])["id"].as_str().expect("an id").to_owned();
        assert_eq!(site.run(&["trash", "mv", "disk"]).ok(), "", "{mode}");
        assert_eq!(trashed(&site), [(id.clone(), "disk".to_owned())], "{mode}");
        assert_eq!(site.run(&["trash", "list"]).ok(), format!("{id} disk\n"), "{mode}");
        assert_eq!(site.json(&["ls"]), json!([]), "{mode}");
        site.run(&["info", "disk"]).fails(3);
        site.run(&["trash", "mv", "disk"]).fails(3);

        let long = site.json(&["trash", "ls", "-l", "-p", "local"]);
        let want = json!({
            "id": "string", "name": "string", "source": "string", "deleted_at": "string", "status": "string",
        });
        assert_eq!(shape(&long[0]), want, "{mode}");
        assert_eq!((&long[0]["id"], &long[0]["source"]), (&json!(id), &json!("USER")), "{mode}");
        assert!(long[0]["status"].as_str().expect("a text").starts_with("expired at "), "{mode}");
        let table = site.run(&["trash", "ls", "--long"]).ok();
        let rows: Vec<&str> = table.lines().collect();
        let titles: Vec<_> = rows[0].split_whitespace().collect();
        assert_eq!(titles, ["ID", "NAME", "SOURCE", "DELETED_AT", "STATUS", "PARENT"], "{mode}");
        assert!(rows[1].starts_with(&format!("{id}  disk  USER    ")), "{mode}: {table}");

        // The name is free for another image, and then not for this one.
        site.run(&["create", "disk", "--size", "1M"]).ok();
        let said = site.run(&["trash", "restore", &id]).fails(5);
        assert!(said.contains(&format!("forebay trash restore local/{id} --image NAME")), "{mode}: {said}");
        site.run(&["trash", "restore", &id, "--image", "disk"]).fails(5);
        site.run(&["trash", "restore", &id, "--image", "a/b"]).fails(2);
        let restored = site.json(&["trash", "restore", "-p", "local", "--image-id", &id, "--image", "older"]);
        assert_eq!((&restored["name"], &restored["id"]), (&json!("older"), &json!(id)), "{mode}");
        assert!(site.export("older") == data, "{mode}");
        assert_eq!(trashed(&site), [], "{mode}");
        site.run(&["trash", "restore", &id]).fails(3);
    }
}

#[test]
fn removal_waits_for_the_deferment_unless_forced() {
    for (mode, site) in Site::each() {
        for name in ["now", "later", "last"] {
            site.run(&["create", name, "--size", "4M"]).ok();
        }
        let moved = site.json(&["trash", "move", "later", "--expires-at", "2 weeks"]);
        let later = moved["id"].as_str().expect("an id").to_owned();
        assert_eq!(moved["name"], json!("later"), "{mode}");
        let status = site.json(&["trash", "ls", "-l"])[0]["status"].clone();
        assert!(status.as_str().expect("a text").starts_with("protected until "), "{mode}: {status}");
        for (time, says) in [("yesterday", "past"), ("some day", "no time"), ("@-4", "1970")] {
            let said = site.run(&["trash", "mv", "last", "--expires-at", time]).fails(2);
            assert!(said.contains(says), "{mode} {time}: {said}");
        }
        let said = site.run(&["trash", "rm", &later]).fails(10);
        assert!(said.contains("deferment") && said.contains("--force"), "{mode}: {said}");

        site.run(&["trash", "mv", "now"]).ok();
        site.run(&["trash", "mv", "last"]).ok();
        // Whatever has not expired stays.
        assert_eq!(site.json(&["trash", "purge", "--expired-before", "2 days ago"]), json!([]), "{mode}");
        let purged = site.json(&["trash", "purge", "local"]);
        assert_eq!(purged.as_array().map(Vec::len), Some(2), "{mode}: {purged}");
        assert_eq!(trashed(&site).len(), 1, "{mode}");
        let said = site.run(&["trash", "purge", "--threshold", "0.5"]).fails(9);
        assert!(said.contains("--threshold"), "{mode}: {said}");
        site.run(&["trash", "purge", "--threshold", "0.5", "--expired-before", "now"]).fails(2);
        let removed = site.json(&["trash", "remove", &later, "--force"]);
        assert_eq!(removed, json!({"pool": "local", "id": later}), "{mode}");
        assert_eq!(trashed(&site), [], "{mode}");
        let said = site.run(&["trash", "rm", &later]).fails(3);
        assert!(said.contains("forebay trash ls --all local"), "{mode}: {said}");
        site.run(&["trash", "mv", "nope"]).fails(3);
        site.run(&["trash", "rm", "no-id"]).fails(2);
        site.run(&["trash", "rm"]).fails(2);
        site.run(&["trash", "ls", "nope"]).0.status.success().then(|| panic!("there is no such pool"));
    }
}

#[test]
fn an_image_with_snapshots_is_kept_and_named() {
    for (mode, site) in Site::each() {
        for name in ["disk", "other"] {
            site.run(&["create", name, "--size", "4M"]).ok();
        }
        site.run(&["snap", "create", "disk@s"]).ok();
        let id = site.json(&["trash", "mv", "disk"])["id"].as_str().expect("an id").to_owned();
        site.run(&["trash", "mv", "other"]).ok();
        let said = site.run(&["trash", "rm", &id]).fails(6);
        assert!(said.contains("has 1 snapshot") && said.contains("forebay snap purge"), "{mode}: {said}");
        let said = site.run(&["trash", "purge"]).fails(6);
        assert!(said.contains(&format!("keeps {id} (disk)")), "{mode}: {said}");
        assert_eq!(trashed(&site), [(id.clone(), "disk".to_owned())], "{mode}: the other is gone");
        site.run(&["trash", "restore", &id]).ok();
        site.run(&["snap", "purge", "disk"]).ok();
        site.run(&["trash", "mv", "disk"]).ok();
        site.run(&["trash", "rm", &id]).ok();
    }
}

#[test]
fn an_image_in_use_is_not_moved() {
    let site = Site::serving(&[]);
    let data = content(3 * MIB, 2);
    site.run_with_input(&["import", "-", "disk"], &data).ok();
    site.run(&["attach", "disk", "--nbd"]).ok();
    let said = site.run(&["trash", "mv", "disk"]).fails(6);
    assert!(said.contains("exported") && said.contains("forebay detach local/disk"), "{said}");
    let mut client = Nbd::connect(&site.data().join("nbd.sock"), "disk").expect("connects");
    client.write(0, &content(4096, 3));
    client.flush();
    drop(client);
    site.run(&["detach", "disk", "--force"]).ok();
    let place = format!("ssd:{}:16M", site.path("logs").display());
    site.run(&["attach", "disk", "--nbd", "--log", &place]).ok();
    site.run(&["detach", "disk", "--force", "--keep-log"]).ok();
    let said = site.run(&["trash", "mv", "disk"]).fails(6);
    assert!(said.contains("write log"), "{said}");
    assert_eq!(trashed(&site), []);
}

#[test]
fn a_daemon_finds_what_a_command_moved() {
    let mut site = Site::serving(&[]);
    let data = content(3 * MIB, 4);
    site.run_with_input(&["import", "-", "disk"], &data).ok();
    let id = site.json(&["trash", "mv", "disk"])["id"].as_str().expect("an id").to_owned();
    site.stop();
    assert_eq!(trashed(&site), [(id.clone(), "disk".to_owned())]);
    site.run(&["trash", "restore", &id]).ok();
    site.start();
    assert!(site.export("disk") == data);
    // Over HTTP.
    let json = |(status, body): (u16, String)| -> Value {
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    };
    site.run(&["trash", "mv", "disk"]).ok();
    let listed = json(site.http("GET /v1/trash/local"));
    let time = listed[0]["deleted_at"].as_str().expect("a time");
    assert!(time.ends_with('Z') && listed[0]["expires_at"] == listed[0]["deleted_at"], "{listed}");
    assert_eq!(site.http("GET /v1/trash/local?long=true").0, 400);
    assert_eq!(site.http("DELETE /v1/trash/local/0123").0, 404);
    assert_eq!(site.http("DELETE /v1/trash/local/no-id").0, 400);
    assert_eq!(site.http("DELETE /v1/trash/local?expired_before=soon").0, 400);
    assert_eq!(json(site.http("DELETE /v1/trash/local?expired_before=2020-01-01T00:00:00Z")), json!([]));
    assert_eq!(json(site.http(&format!("POST /v1/trash/local/{id}/restore")))["name"], json!("disk"));
    site.run(&["trash", "mv", "disk"]).ok();
    assert_eq!(json(site.http("DELETE /v1/trash/local")), json!([id]));
    let described: Value = json(site.http("GET /openapi.json"));
    for path in ["", "/{id}", "/{id}/restore"] {
        let path = format!("/v1/trash/{{pool}}{path}");
        assert!(described["paths"][&path].is_object(), "{path} is not described");
    }
}
