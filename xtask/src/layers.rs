//! The layering rules of ARCHITECTURE.md, checked against what `cargo metadata` says is imported.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::shell;

/// Which crates of the workspace `importer` (its folder, such as `front/nbd`) may import.
///
/// `dev` is true for imports that only tests have: a crate's tests may stand it on a backend or on the simulator,
/// but what a floor ships with may not.
fn allowed(importer: &str, imported: &str, dev: bool) -> bool {
    let (floor, _) = importer.split_once('/').unwrap_or((importer, ""));
    // Tests of the daemon are its hosts.
    let is_host = importer == "bin/forebay" && ["test/iscsi", "test/nvme", "test/vhost"].contains(&imported);
    // A disk is tested on a volume that other targets are tested on, too.
    let is_volume = importer == "base/scsi" && imported == "test/load";
    if dev && (is_host || is_volume || imported == "test/sim" || imported == "backend/ram") {
        return true;
    }
    match floor {
        "bin" => !imported.starts_with("test/") && imported != "xtask",
        "test" => imported != "xtask",
        "backend" | "volume" if imported == "base/messenger" => true,
        "front" if ["base/serve", "base/tls", "base/scsi"].contains(&imported) => true,
        "front" | "volume" | "backend" => ["base/block", "base/reactor", "base/accel"].contains(&imported),
        "base" => match importer {
            "base/block" => imported == "base/reactor",
            "base/serve" => ["base/reactor", "base/tls"].contains(&imported),
            "base/messenger" => ["base/reactor", "base/accel"].contains(&imported),
            "base/scsi" => ["base/block", "base/reactor"].contains(&imported),
            _ => false,
        },
        // xtask drives the programs; it links none of the crates, so that it builds at once.
        _ => false,
    }
}

/// Compares every import inside the workspace with the rules.
pub fn check() -> Result<()> {
    let text = shell::output(shell::cargo().args(["metadata", "--format-version=1", "--no-deps", "--offline"]))
        .or_else(|_| shell::output(shell::cargo().args(["metadata", "--format-version=1", "--no-deps"])))?;
    let metadata: Value = serde_json::from_str(&text)?;
    let packages = metadata["packages"].as_array().context("cargo metadata lists no packages")?;
    let root = metadata["workspace_root"].as_str().context("cargo metadata names no root")?;

    let mut folders = BTreeMap::new();
    for package in packages {
        let manifest = package["manifest_path"].as_str().context("a package without a manifest")?;
        let folder = manifest.trim_start_matches(root).trim_start_matches('/').trim_end_matches("/Cargo.toml");
        folders.insert(package["name"].as_str().unwrap_or_default(), folder);
    }
    let mut wrong = Vec::new();
    for package in packages {
        let name = package["name"].as_str().unwrap_or_default();
        let importer = folders[name];
        for dependency in package["dependencies"].as_array().into_iter().flatten() {
            let Some(imported) = dependency["name"].as_str().and_then(|name| folders.get(name)) else { continue };
            let dev = dependency["kind"].as_str() == Some("dev");
            if importer != *imported && !allowed(importer, imported, dev) {
                wrong.push(format!("{importer} must not import {imported}{}", if dev { " even in tests" } else { "" }));
            }
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("{}", wrong.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::allowed;

    #[test]
    fn floors_see_only_what_is_below() {
        assert!(allowed("front/nbd", "base/block", false));
        assert!(allowed("volume/image", "base/block", false));
        assert!(allowed("backend/store", "base/accel", false));
        assert!(allowed("bin/forebay", "backend/store", false));
        assert!(allowed("test/sim", "backend/store", false));
        assert!(!allowed("front/nbd", "volume/image", false));
        assert!(!allowed("volume/image", "backend/store", false));
        assert!(!allowed("backend/store", "backend/ram", false));
        assert!(allowed("base/serve", "base/tls", false));
        assert!(allowed("front/iscsi", "base/scsi", false) && allowed("base/scsi", "base/block", false));
        assert!(!allowed("volume/image", "base/scsi", false) && !allowed("base/scsi", "base/serve", false));
        assert!(!allowed("base/reactor", "base/block", false));
        assert!(!allowed("base/tls", "base/reactor", false));
        assert!(!allowed("xtask", "base/block", false));
    }

    #[test]
    fn tests_may_stand_a_volume_on_memory() {
        assert!(allowed("volume/image", "backend/ram", true));
        assert!(allowed("bin/forebay", "test/nvme", true) && !allowed("bin/forebay", "test/nvme", false));
        assert!(!allowed("front/nvmf", "test/nvme", true));
        assert!(allowed("base/scsi", "test/load", true) && !allowed("base/scsi", "test/load", false));
        assert!(!allowed("volume/image", "backend/store", true));
    }
}
