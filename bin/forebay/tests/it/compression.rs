//! Compression of images on the embedded store, through the command line.

use crate::common::Site;

/// Returns text that compresses well, of whole blocks.
fn text(len: usize) -> Vec<u8> {
    (0..)
        .flat_map(|line: u32| format!("line {line} of a log that says the same again\n").into_bytes())
        .take(len)
        .collect()
}

#[test]
fn an_image_is_compressed_as_its_setting_or_the_default_says() {
    const MIB: usize = 1 << 20;
    for (mode, site) in Site::each() {
        site.run(&["create", "own", "--size", "8M", "--compression", "zstd:5"]).ok();
        site.run(&["create", "plain", "--size", "8M"]).ok();
        let info = site.json(&["info", "own"]);
        assert_eq!(info["compression"], "zstd:5", "{mode}");
        assert!(site.run(&["info", "own"]).ok().contains("\tcompression: zstd:5\n"), "{mode}");
        assert!(site.json(&["info", "plain"]).get("compression").is_none(), "{mode}");

        // The default of the store applies to images without a setting, and to data written from then on.
        site.run(&["config", "pool", "set", "local", "forebay_compression", "lz4"]).ok();
        assert_eq!(site.run(&["config", "pool", "get", "local", "forebay_compression"]).ok(), "lz4\n", "{mode}");
        assert_eq!(site.json(&["info", "plain"])["compression"], "lz4", "{mode}");
        assert_eq!(site.run(&["config", "image", "get", "own", "forebay_compression"]).ok(), "zstd:5\n", "{mode}");
        for (image, value, source) in [("own", "zstd:5", "image"), ("plain", "lz4", "pool")] {
            let options = site.json(&["config", "image", "ls", image]);
            let found =
                options.as_array().expect("a list").iter().find(|option| option["name"] == "forebay_compression");
            let found = found.expect("it is listed");
            assert_eq!((&found["value"], &found["source"]), (&value.into(), &source.into()), "{mode}");
        }
        site.run(&["config", "image", "set", "plain", "forebay_compression", "none"]).ok();
        assert!(site.json(&["info", "plain"]).get("compression").is_none(), "{mode}");

        // Imported with the default, which is lz4.
        let data = text(4 * MIB);
        site.run_with_input(&["import", "-", "copy"], &data).ok();
        assert!(site.export("copy") == data, "{mode}");
        let usage = site.json(&["du", "copy"]);
        let image = &usage["images"][0];
        let (logical, stored) = (image["logical_size"].as_u64(), image["stored_size"].as_u64());
        assert_eq!(logical, Some(4 * MIB as u64), "{mode}: {usage}");
        assert!(stored.is_some_and(|stored| stored > 0 && stored < MIB as u64), "{mode}: {usage}");
        assert!(site.run(&["du", "copy"]).ok().contains("RATIO"), "{mode}");
        assert!(!site.run(&["du", "plain"]).ok().contains("RATIO"), "{mode}");
        let space = site.json(&["store", "df"]);
        // Beside the image's data there is the object of its name, in a sector.
        assert!(space["compressed_logical"].as_u64() >= logical, "{mode}: {space}");
        let other = space["compressed_stored"].as_u64().zip(stored).map(|(all, image)| all - image);
        assert!(other.is_some_and(|other| other <= 4096), "{mode}: {space}");
        assert!(site.run(&["store", "df"]).ok().contains("(ratio "), "{mode}");

        // A removed image takes its setting along: one of the same name has the default.
        site.run(&["rm", "own"]).ok();
        site.run(&["create", "own", "--size", "8M"]).ok();
        site.run(&["config", "image", "get", "own", "forebay_compression"]).fails(3);
        site.run(&["config", "pool", "rm", "local", "forebay_compression"]).ok();
        assert!(site.json(&["info", "own"]).get("compression").is_none(), "{mode}");

        for (arguments, code, says) in [
            (&["create", "bad", "--size", "8M", "--compression", "gzip"][..], 2, "unknown compression `gzip`"),
            (&["create", "bad", "--size", "8M", "--compression", "zstd:20"], 2, "from -7 to 19"),
            (&["config", "image", "set", "own", "forebay_compression", "lz4:1"], 2, "unknown compression `lz4:1`"),
            (&["config", "image", "rm", "own", "forebay_compression"], 3, "forebay_compression is not set"),
            (&["config", "image", "set", "none", "forebay_compression", "lz4"], 3, "there is no image local/none"),
        ] {
            let said = site.run(arguments).fails(code);
            assert!(said.contains(says), "{mode}: {arguments:?}: {said}");
        }
    }
}

#[test]
fn a_store_is_made_with_a_default() {
    let site = Site::new();
    site.run(&["store", "init", "--size", "64M", "--compression", "lz4"]).ok();
    site.run(&["create", "disk", "--size", "8M"]).ok();
    assert_eq!(site.json(&["info", "disk"])["compression"], "lz4");
    site.run(&["store", "check"]).ok();
}
