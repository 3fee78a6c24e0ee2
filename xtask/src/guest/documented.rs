//! The commands and configurations of README.md and docs/operations.md, as printed, in a guest of their own.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::daemon;
use crate::shell::{self, Scratch};

const PAGES: [&str; 2] = ["README.md", "docs/operations.md"];

/// Languages of fenced blocks: commands, configurations of the daemon, systemd units; then what is not for a machine with
/// a daemon.
const RUN: [&str; 3] = ["sh", "toml", "ini"];
const SHOWN: [&str; 2] = ["mermaid", "conf"];

/// A fenced block of a page.
#[derive(Debug, PartialEq)]
struct Block {
    language: String,
    heading: String,
    text: String,
}

/// Runs test/interop/guest-documented.sh in the guest, with the blocks of the pages.
pub fn run() -> Result<()> {
    shell::build(&mut daemon::build_command())?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let share = scratch.path().join("share");
    let folder = share.join("blocks");
    fs::create_dir_all(&folder)?;
    let mut index = String::new();
    let mut count = 0;
    for page in PAGES {
        let text = fs::read_to_string(shell::root().join(page)).with_context(|| format!("cannot read {page}"))?;
        for block in blocks(&text).with_context(|| page.to_owned())? {
            let name = format!("{count:02}.{}", block.language);
            fs::write(folder.join(&name), &block.text)?;
            index += &format!("{name}\t{page}\t{}\n", block.heading);
            count += 1;
        }
    }
    fs::write(share.join("index"), index)?;
    let disk = |name: &str, size: u64| -> Result<String> {
        let path = scratch.path().join(name);
        fs::File::create(&path)?.set_len(size << 30)?;
        Ok(path.display().to_string())
    };
    let disks = format!("{} {}", disk("files", 16)?, disk("device", 4)?);
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join("test/interop/guest-documented.sh")).arg(daemon::program());
    guest.envs([("KERNEL", "backports"), ("TLS", "1"), ("FSDAX", "1"), ("PMEM_SIZE", "1536"), ("TIMEOUT", "600")]);
    // One processor: a kernel that patches itself while others run is now and then more than the emulator can follow.
    guest.envs([("CPUS", "1"), ("MEM", "3G")]);
    guest.env("SHARE", &share).env("DISKS", disks);
    shell::run(&mut guest)
}

/// Returns the blocks of a page that can be tried.
fn blocks(page: &str) -> Result<Vec<Block>> {
    let mut found = Vec::new();
    let mut heading = "";
    let mut lines = page.lines().enumerate();
    while let Some((number, line)) = lines.next() {
        if line.starts_with('#') {
            heading = line.trim_start_matches('#').trim();
        }
        let Some(language) = line.strip_prefix("```") else { continue };
        if !RUN.contains(&language) && !SHOWN.contains(&language) {
            bail!("line {}: a block of the language {language:?}; write one of {RUN:?} or {SHOWN:?}", number + 1);
        }
        let text: String = lines
            .by_ref()
            .map(|(_, line)| line)
            .take_while(|line| *line != "```")
            .map(|line| format!("{line}\n"))
            .collect();
        if RUN.contains(&language) {
            found.push(Block { language: language.to_owned(), heading: heading.to_owned(), text });
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_found_with_their_headings() {
        let page = "# A\n```sh\n# not a heading\nforebay ls\n```\ntext\n## B c\n```conf\nx\n```\n```toml\na = 1\n```\n";
        let block = |language: &str, heading: &str, text: &str| Block {
            language: language.to_owned(),
            heading: heading.to_owned(),
            text: text.to_owned(),
        };
        let found = blocks(page).expect("good blocks");
        assert_eq!(found, [block("sh", "A", "# not a heading\nforebay ls\n"), block("toml", "B c", "a = 1\n")]);
        assert!(blocks("```\nforebay ls\n```\n").is_err(), "nobody would run it");
    }

    #[test]
    fn every_block_of_the_pages_can_be_tried() {
        for page in PAGES {
            let text = fs::read_to_string(shell::root().join(page)).expect("the page");
            let found = blocks(&text).expect("languages that are known");
            assert!(found.iter().any(|block| block.language == "sh"), "{page}");
        }
    }
}
