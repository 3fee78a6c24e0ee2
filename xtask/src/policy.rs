//! Rules of the house that a compiler does not know: where unsafe code, clocks, threads and chance may be, and how
//! long a file may grow.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use crate::shell;

/// The rooms where unsafe code is allowed, each block with its reason.
const UNSAFE_ROOMS: &[&str] = &["base/reactor", "base/accel", "base/tls", "test/peers"];

/// A file longer than this is pointed out: it asks to be split along a seam.
const LINES_MAX: usize = 700;

/// A pattern that must not occur, and the folders in which it may all the same.
struct Forbidden {
    pattern: &'static str,
    reason: &'static str,
    allowed: &'static [&'static str],
}

/// Crates that only the reactor may use; the programs at the edge (the daemon's HTTP thread, xtask) are exempt.
const EDGE: &[&str] = &["base/reactor", "bin/", "xtask/", "test/"];

/// Beside those, the threads of the software engines, which work for reactors and never wait for one.
const THREADS: &[&str] = &["base/reactor", "bin/", "xtask/", "test/", "base/accel/src/compress/engine/"];

const FORBIDDEN: &[Forbidden] = &[
    Forbidden { pattern: "std::time::Instant", reason: "time comes from the reactor", allowed: EDGE },
    Forbidden { pattern: "std::time::SystemTime", reason: "time comes from the reactor", allowed: EDGE },
    Forbidden { pattern: "SystemTime::now", reason: "time comes from the reactor", allowed: EDGE },
    Forbidden { pattern: "Instant::now", reason: "time comes from the reactor", allowed: EDGE },
    Forbidden { pattern: "std::thread", reason: "a core belongs to its reactor", allowed: THREADS },
    Forbidden { pattern: "thread::spawn", reason: "a core belongs to its reactor", allowed: THREADS },
    Forbidden { pattern: "std::fs::", reason: "files are opened through the reactor", allowed: EDGE },
    Forbidden { pattern: "std::net::Tcp", reason: "sockets are opened through the reactor", allowed: EDGE },
    Forbidden { pattern: "rand::", reason: "chance comes from the reactor, so that a seed replays it", allowed: EDGE },
    Forbidden {
        pattern: "getrandom",
        reason: "chance comes from the reactor, so that a seed replays it",
        allowed: EDGE,
    },
    Forbidden { pattern: "todo!(", reason: "what is not there yet is an issue, not a macro", allowed: &[] },
    Forbidden { pattern: "unimplemented!(", reason: "what is not there yet is an issue, not a macro", allowed: &[] },
    Forbidden { pattern: "FIXME", reason: "what is wrong is an issue, not a comment", allowed: &[] },
    Forbidden { pattern: "TODO", reason: "what is not there yet is an issue, not a comment", allowed: &[] },
    Forbidden { pattern: "#[ignore", reason: "a test that does not run tells nothing", allowed: &[] },
];

/// Modules that only decide, so that fuzzers and the simulator can drive them: nothing there awaits.
const PURE: &[&str] = &["wire", "session"];

/// Returns whether a file belongs to a module of [`PURE`] in a crate that speaks a protocol.
fn is_pure(name: &str) -> bool {
    let source = name.split_once("/src/").filter(|(room, _)| room.starts_with("front/") || *room == "base/messenger");
    source.is_some_and(|(_, path)| path.split(['/', '.']).next().is_some_and(|module| PURE.contains(&module)))
}

/// Reads every source file of the project.
pub fn check() -> Result<()> {
    let root = shell::root();
    let mut wrong = Vec::new();
    let files = shell::output(shell::command("git").args(["ls-files", "--cached", "--others", "--exclude-standard"]))?;
    for name in files.lines().filter(|name| root.join(name).is_file()) {
        let path = Path::new(name);
        if path.extension().is_some_and(|kind| kind == "rs") && name != "xtask/src/policy.rs" {
            source(name, &std::fs::read_to_string(root.join(path))?, &mut wrong);
        }
        if path.file_name().is_some_and(|file| file == "Cargo.toml") && name.contains('/') {
            manifest(name, &std::fs::read_to_string(root.join(path))?, &mut wrong);
        }
        if path.extension().is_some_and(|kind| kind == "md") {
            links(&root, path, &std::fs::read_to_string(root.join(path))?, &mut wrong);
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    bail!("{}", wrong.join("\n"))
}

fn source(name: &str, text: &str, wrong: &mut Vec<String>) {
    let lines = text.lines().count();
    if lines > LINES_MAX {
        println!("{} {name} has {lines} lines and asks to be split", shell::paint("warning:", "33"));
    }
    let mut in_tests = false;
    for (number, line) in text.lines().enumerate() {
        // A crate's own tests may use the edge of the world; by the house's habit they are the end of the file.
        in_tests |= line.trim_start().starts_with("#[cfg(test)]") && !line.contains("mod tests;");
        let code = line.split("//").next().unwrap_or_default();
        if !in_tests && is_pure(name) && (code.contains(".await") || code.contains("async ")) {
            wrong.push(format!(
                "{name}:{}: `wire` and `session` decide and do no I/O: nothing awaits there",
                number + 1
            ));
        }
        for rule in FORBIDDEN {
            let exempt = rule.allowed.iter().any(|folder| name.starts_with(folder))
                || (!rule.allowed.is_empty() && (in_tests || name.contains("/tests/") || name.contains("/examples/")));
            let searched = if rule.allowed.is_empty() { line } else { code };
            if !exempt && contains(searched, rule.pattern) {
                wrong.push(format!("{name}:{}: `{}`: {}", number + 1, rule.pattern, rule.reason));
            }
        }
    }
}

/// Finds a pattern that is not the tail of a longer name (`operand::` holds no `rand::`).
fn contains(line: &str, pattern: &str) -> bool {
    line.match_indices(pattern)
        .any(|(at, _)| !line[..at].chars().next_back().is_some_and(|before| before.is_alphanumeric() || before == '_'))
}

fn manifest(name: &str, text: &str, wrong: &mut Vec<String>) {
    let folder = name.trim_end_matches("/Cargo.toml");
    // A workspace of its own cannot inherit.
    if folder == "fuzz" {
        return;
    }
    let inherits = text.split("[lints]").nth(1).is_some_and(|rest| rest.trim_start().starts_with("workspace = true"));
    if !inherits && !UNSAFE_ROOMS.contains(&folder) {
        wrong.push(format!("{name}: does not inherit the workspace's lints, which forbid unsafe code"));
    }
}

/// A relative link in a document leads to something that is there.
fn links(root: &Path, document: &Path, text: &str, wrong: &mut Vec<String>) {
    let mut fenced = false;
    for (number, line) in text.lines().enumerate() {
        fenced ^= line.trim_start().starts_with("```");
        if fenced {
            continue;
        }
        for (at, _) in line.match_indices("](") {
            let target = line[at + 2..].split(')').next().unwrap_or_default().split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains("://") || target.starts_with("mailto:") {
                continue;
            }
            let folder = document.parent().map_or_else(PathBuf::new, Path::to_path_buf);
            if !root.join(folder).join(target).exists() {
                wrong.push(format!("{}:{}: the link {target} leads nowhere", document.display(), number + 1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_found_outside_the_reactor_only() {
        let mut wrong = Vec::new();
        source("volume/image/src/lib.rs", "let now = std::time::Instant::now();", &mut wrong);
        assert!(!wrong.is_empty());
        wrong.clear();
        source("base/reactor/src/time.rs", "let now = std::time::Instant::now();", &mut wrong);
        source("volume/image/src/lib.rs", "// not std::time::Instant", &mut wrong);
        source("volume/image/src/lib.rs", "operand::run()", &mut wrong);
        source("volume/image/src/lib.rs", "#[cfg(test)]\nmod tests { use std::thread; }", &mut wrong);
        assert_eq!(wrong, Vec::<String>::new());
    }

    #[test]
    fn nothing_awaits_where_a_protocol_is_decided() {
        for (name, refused) in [
            ("front/nbd/src/session.rs", true),
            ("front/nbd/src/session/receive.rs", true),
            ("base/messenger/src/wire/frame.rs", true),
            ("front/nbd/src/serve/session.rs", false),
            ("volume/image/src/session.rs", false),
            ("front/nbd/src/sessions.rs", false),
        ] {
            let mut wrong = Vec::new();
            source(name, "let next = stream.read().await;", &mut wrong);
            assert_eq!(!wrong.is_empty(), refused, "{name}");
        }
    }

    #[test]
    fn a_crate_that_allows_itself_unsafe_is_found() {
        let mut wrong = Vec::new();
        manifest("volume/image/Cargo.toml", "[package]\n", &mut wrong);
        assert_eq!(wrong.len(), 1);
        wrong.clear();
        manifest("volume/image/Cargo.toml", "[package]\n[lints]\nworkspace = true\n", &mut wrong);
        manifest("base/reactor/Cargo.toml", "[package]\n", &mut wrong);
        assert!(wrong.is_empty());
    }
}
