//! Completions in real shells: what they offer beside a daemon, without one, and beside one that hangs.

use std::process::{Command, Stdio};

use crate::common::{Done, Site, forebay, skip, wait_until};

/// Response of a shell to a request for completions.
struct Offered {
    words: Vec<String>,
    stderr: String,
}

/// Writes the completions of a shell, and returns a command of that shell in which `forebay` is the program under test;
/// says so and returns `None` where the shell is missing.
fn shell(site: &Site, name: &str) -> Option<Command> {
    let script = Done(forebay().args(["completions", name]).output().expect("the command")).ok();
    std::fs::write(site.path(&format!("completions.{name}")), script).expect("written");
    let program = std::path::Path::new(env!("CARGO_BIN_EXE_forebay")).parent().expect("a directory");
    let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap_or_default());
    if !Command::new(name).arg("-c").arg("true").status().is_ok_and(|status| status.success()) {
        skip(&format!("{name} is not there"));
        return None;
    }
    let mut command = Command::new(name);
    command.env("PATH", path).env("FOREBAY_RUN_DIR", site.path("run")).env("FOREBAY_DATA", site.data());
    // What a user's shell would read at its start is none of the test's.
    command.env("HOME", site.dir.path()).env("XDG_CONFIG_HOME", site.dir.path()).env_remove("FOREBAY_CONTROL");
    command.current_dir(site.dir.path()).stdin(Stdio::null());
    Some(command)
}

fn run(mut command: Command) -> Offered {
    let done = Done(command.output().expect("the shell"));
    let words = done.ok().lines().map(str::to_owned).collect();
    Offered { words, stderr: done.stderr() }
}

/// Presses TAB behind words as bash splits them: it sets `COMP_WORDS` and `COMP_CWORD`, and calls the function that is
/// registered for the command.
fn bash(site: &Site, words: &[&str]) -> Offered {
    let mut command = shell(site, "bash").expect("bash is everywhere");
    let text = r#"
        set -u
        source completions.bash
        registered=$(complete -p forebay); function=${registered#*-F }; function=${function%% *}
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMP_LINE="$*" COMP_POINT=${#COMP_LINE} COMP_TYPE=9 COMP_KEY=9
        "$function" forebay "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD - 1]}"
        for word in "${COMPREPLY[@]}"; do printf '%s\n' "$word"; done"#;
    command.args(["--norc", "-c", text, "bash", "forebay"]).args(words);
    run(command)
}

/// Asks again until names are there: the daemon has a second to answer, and on a busy machine it may not.
fn bash_offers(site: &Site, words: &[&str], wanted: &[&str]) {
    let mut last = Vec::new();
    wait_until(&format!("{words:?} offer {wanted:?}"), || {
        let offered = bash(site, words);
        assert_eq!(offered.stderr, "", "{words:?}");
        let done = offered.words == wanted;
        assert!(done || offered.words.is_empty() || offered.words != last, "{words:?}: {last:?}, not {wanted:?}");
        last = offered.words;
        done
    });
}

fn with_images() -> Site {
    let site = Site::serving(&[]);
    for image in ["local/disk1", "local/disk2", "local/a:b", "ram/fast"] {
        site.run(&["create", image, "--size", "8M"]).ok();
    }
    site.run(&["attach", "local/disk2", "--nbd"]).ok();
    site
}

#[test]
fn bash_offers_images_pools_and_exports() {
    let site = with_images();
    bash_offers(&site, &["info", "local/"], &["local/a:b", "local/disk1", "local/disk2"]);
    bash_offers(&site, &["info", "local/d"], &["local/disk1", "local/disk2"]);
    bash_offers(&site, &["info", "ra"], &["ram/"]);
    bash_offers(&site, &["info", "dis"], &["disk1", "disk2"]);
    bash_offers(&site, &["info", "ram/"], &["ram/fast"]);
    bash_offers(&site, &["--format", "json", "log", "flush", "local/disk1"], &["local/disk1"]);
    // bash splits words at the colon, and inserts behind it.
    bash_offers(&site, &["info", "local/a", ":"], &["b"]);
    bash_offers(&site, &["detach", ""], &["local/disk2"]);
    bash_offers(&site, &["ls", ""], &["local", "ram"]);
    bash_offers(&site, &["create", "l"], &["local/"]);
    bash_offers(&site, &["create", "local/"], &[]);
    bash_offers(&site, &["ls", "--format", "=", "j"], &["json"]);
    bash_offers(&site, &["store", "ch"], &["check"]);
    // The daemon that the line names is asked, not that of the environment.
    let elsewhere = site.path("elsewhere").display().to_string();
    bash_offers(&site, &["--data", &elsewhere, "info", "local/"], &[]);
}

#[test]
fn nothing_of_a_name_is_run_by_the_shell() {
    let site = Site::serving(&[]);
    site.run(&["create", "local/$(touch${IFS}ran)", "--size", "8M"]).ok();
    bash_offers(&site, &["info", "local/"], &[r"local/\$\(touch\$\{IFS\}ran\)"]);
    // What is inserted is typed at a prompt: it is the name, and nothing else.
    let offered = bash(&site, &["info", "local/"]).words;
    let typed = format!("printf '%s\\n' {}", offered.first().expect("the name"));
    let mut command = shell(&site, "bash").expect("bash is everywhere");
    command.args(["--norc", "-c", &typed]);
    assert_eq!(run(command).words, ["local/$(touch${IFS}ran)"]);
    assert!(!site.path("ran").exists(), "a part of the name was run");
}

#[test]
fn without_a_daemon_nothing_is_offered_and_nothing_said() {
    let site = Site::with_store();
    site.run(&["create", "local/disk1", "--size", "8M"]).ok();
    for words in [&["info", "local/"][..], &["info", ""], &["ls", ""], &["detach", ""], &["du", "l"]] {
        let offered = bash(&site, words);
        assert_eq!((offered.words, offered.stderr), (Vec::new(), String::new()), "{words:?}");
    }
    // What the program knows by itself is there all the same.
    assert_eq!(bash(&site, &["ls", "--form"]).words, ["--format"]);
    assert_eq!(bash(&site, &["resi"]).words, ["resize"]);
}

#[test]
fn a_daemon_that_hangs_holds_nobody_up() {
    let site = with_images();
    site.signal("STOP");
    for words in [&["info", "local/"][..], &["detach", ""]] {
        let offered = bash(&site, words);
        assert_eq!((offered.words, offered.stderr), (Vec::new(), String::new()), "{words:?}");
    }
    site.signal("CONT");
    bash_offers(&site, &["info", "local/disk"], &["local/disk1", "local/disk2"]);
}

#[test]
fn what_is_wrong_elsewhere_is_not_said() {
    let site = Site::new();
    let mut command = forebay();
    command.args(["__complete", "bash", "--", "forebay", "info", "local/"]);
    command.envs([("FOREBAY_ACCEL", "nonsense"), ("FOREBAY_LOG", "a=b=c")]).env("FOREBAY_DATA", site.data());
    let done = Done(command.output().expect("the command"));
    assert_eq!((done.ok().as_str(), done.stderr().as_str()), ("none\n", ""));
    let bare = Done(forebay().args(["__complete", "fish"]).output().expect("the command"));
    assert_eq!((bare.ok().as_str(), bare.stderr().as_str()), ("none\n", ""));
}

#[test]
fn fish_offers_images_with_what_they_are() {
    let site = with_images();
    let ask = |line: &str| {
        let mut command = shell(&site, "fish")?;
        let text = "source completions.fish; complete --do-complete $argv[1]";
        command.args(["--no-config", "-c", text, line]);
        Some(run(command))
    };
    let Some(first) = ask("forebay info local/d") else { return };
    assert_eq!(first.stderr, "");
    wait_until("fish offers images", || {
        ask("forebay info local/d").is_some_and(|now| now.words == ["local/disk1\timage", "local/disk2\timage"])
    });
    wait_until("fish offers pools", || {
        ask("forebay create ").is_some_and(|now| now.words == ["local/\tpool", "ram/\tpool"])
    });
    std::fs::write(site.path("some.toml"), "").expect("written");
    let files = ask("forebay serve --config some").expect("fish is there").words;
    assert!(files.iter().any(|file| file.starts_with("some.toml")), "{files:?}");
}

#[test]
fn zsh_offers_images_with_what_they_are() {
    let site = with_images();
    let ask = |words: &[&str]| {
        let mut command = shell(&site, "zsh")?;
        // A real zsh has its completion system; the function is called with what that would set, and shows what it adds.
        let text = r#"
            compdef() { registered="$*" }
            _describe() { print -rl -- "begun:" $begun "whole:" $whole }
            _files() { print -r -- "files $*" }
            source ./completions.zsh
            [[ $registered == "_forebay forebay" ]] || print -r -- "registered: $registered"
            words=("$@") CURRENT=$#
            _forebay"#;
        command.args(["-f", "-c", text, "zsh", "forebay"]).args(words);
        Some(run(command))
    };
    let Some(first) = ask(&["info", "local/d"]) else { return };
    assert_eq!(first.stderr, "");
    let offers = |words: &[&str], wanted: &[&str]| {
        wait_until(&format!("zsh offers {wanted:?}"), || ask(words).is_some_and(|now| now.words == wanted));
    };
    offers(&["info", "local/d"], &["begun:", "whole:", "local/disk1:image", "local/disk2:image"]);
    offers(&["info", "local/a"], &["begun:", "whole:", r"local/a\:b:image"]);
    offers(&["create", ""], &["begun:", "local/:pool", "ram/:pool", "whole:"]);
    offers(&["serve", "--config", ""], &["files "]);
    offers(&["status", "--data", ""], &["files -/"]);
}
