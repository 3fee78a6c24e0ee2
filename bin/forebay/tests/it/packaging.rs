//! Installation by `make install`: the files, the unit, and that an administrator's configuration stays.

use std::collections::BTreeSet;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{Done, skip};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Runs `make install` or `make uninstall` for the program under test; it needs no compiler.
fn make(dir: &Path, target: &str, places: &[(&str, &Path)]) -> Done {
    // Not the program itself: with debug symbols it is large, and what is installed is the same for both.
    let program = dir.join("program");
    std::fs::write(&program, format!("#!/bin/sh\nexec '{}' \"$@\"\n", env!("CARGO_BIN_EXE_forebay"))).expect("written");
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).expect("set");
    let mut command = Command::new("make");
    for name in ["PREFIX", "DESTDIR", "SYSCONFDIR", "UNITDIR", "ZSHDIR", "MAKEFLAGS", "MAKELEVEL"] {
        command.env_remove(name);
    }
    command.current_dir(root()).args(["--no-print-directory", target]).arg(format!("PROGRAM={}", program.display()));
    command.args(places.iter().map(|(name, path)| format!("{name}={}", path.display())));
    Done(command.output().expect("make"))
}

/// Returns the files below a directory.
fn files(dir: &Path) -> BTreeSet<String> {
    fn walk(dir: &Path, root: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let path = entry.path();
            match path.is_dir() {
                true => walk(&path, root, found),
                false => drop(found.insert(path.strip_prefix(root).expect("below").display().to_string())),
            }
        }
    }
    let mut found = BTreeSet::new();
    walk(dir, dir, &mut found);
    found
}

#[test]
fn the_unit_is_the_one_in_the_documentation() {
    let page = read("docs/operations.md");
    let block = page.split("```ini\n").nth(1).and_then(|rest| rest.split("```").next()).expect("a unit");
    assert_eq!(block, read("packaging/forebay.service"));
}

#[test]
fn everything_is_installed_and_removed_again() {
    let scratch = tempfile::tempdir().expect("a directory");
    let stage = scratch.path().join("stage");
    let places = [("DESTDIR", stage.as_path())];
    make(scratch.path(), "install", &places).ok();
    let found = files(&stage);
    for file in [
        "etc/forebay.toml",
        "usr/local/bin/forebay",
        "usr/local/lib/systemd/system/forebay.service",
        "usr/local/share/man/man1/forebay.1",
        "usr/local/share/man/man1/forebay-store-init.1",
        "usr/local/share/bash-completion/completions/forebay",
        "usr/local/share/zsh/site-functions/_forebay",
        "usr/local/share/fish/vendor_completions.d/forebay.fish",
        "usr/local/share/doc/forebay/README.md",
        "usr/local/share/doc/forebay/LICENSE-MIT",
        "usr/local/share/doc/forebay/LICENSE-APACHE",
        "usr/local/share/doc/forebay/examples/forebay.toml",
    ] {
        assert!(found.contains(file), "{file} is not among {found:?}");
    }
    assert!(!found.iter().any(|file| file.contains("__complete")), "what is hidden has no manual page: {found:?}");
    let configuration = stage.join("etc/forebay.toml");
    let mode = std::fs::metadata(&configuration).expect("there").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "it may come to hold secrets");
    let unit = std::fs::read_to_string(stage.join("usr/local/lib/systemd/system/forebay.service")).expect("the unit");
    assert!(unit.contains("ExecStart=/usr/local/bin/forebay serve --config /etc/forebay.toml\n"), "{unit}");
    assert!(unit.contains("ExecReload=/usr/local/bin/forebay reload\n"), "{unit}");

    // A newer version leaves the configuration alone, and no page of a command that is gone.
    std::fs::write(&configuration, "cores = 2\n").expect("written");
    let old = stage.join("usr/local/share/man/man1/forebay-frobnicate.1");
    std::fs::write(&old, "").expect("written");
    make(scratch.path(), "install", &places).ok();
    assert_eq!(std::fs::read_to_string(&configuration).expect("there"), "cores = 2\n");
    assert!(!old.exists());
    assert_eq!(files(&stage), found);

    let said = make(scratch.path(), "uninstall", &places).ok();
    assert!(said.contains("etc/forebay.toml stays"), "{said}");
    assert_eq!(files(&stage), BTreeSet::from(["etc/forebay.toml".to_owned()]));
}

#[test]
fn other_places_are_taken_over_into_the_unit() {
    let scratch = tempfile::tempdir().expect("a directory");
    let prefix = scratch.path().join("opt");
    make(scratch.path(), "install", &[("PREFIX", &prefix)]).ok();
    assert!(prefix.join("etc/forebay.toml").exists(), "without root nothing outside of PREFIX can be written");
    let path = prefix.join("lib/systemd/system/forebay.service");
    let unit = std::fs::read_to_string(&path).expect("the unit");
    let start = format!("ExecStart={0}/bin/forebay serve --config {0}/etc/forebay.toml\n", prefix.display());
    assert!(unit.contains(&start), "{unit}");
    match Command::new("systemd-analyze").arg("verify").arg(&path).output() {
        Ok(done) => {
            let done = Done(done);
            assert_eq!((done.ok(), done.stderr()), (String::new(), String::new()), "the unit is faulty");
        }
        Err(error) => skip(&format!("systemd-analyze is not there: {error}")),
    }
    let said = make(scratch.path(), "install", &[("PREFIX", Path::new("opt"))]).fails(2);
    assert!(said.contains("/usr/local"), "{said}");
}
