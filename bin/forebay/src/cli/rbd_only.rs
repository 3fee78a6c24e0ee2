//! Commands of `rbd` that there are none of here: they are refused by name, with the reason.

use crate::failure::{Failure, FailureKind};

/// Commands, by their first words, with the reason and what to do instead.
const COMMANDS: [(&[&str], &str, &str); 12] = [
    (&["config", "global"], "the daemon takes limits of all volumes from its configuration", "set them under [qos]"),
    (&["device", "attach"], "a mapped image keeps its device until it is unmapped", MAP),
    (&["device", "detach"], "a mapped image keeps its device until it is unmapped", MAP),
    (
        &["encryption"],
        "images are not encrypted by RBD's own format here",
        "encrypt on the host, for example with LUKS",
    ),
    (&["journal"], "images with journals are not written", USE_RBD),
    (&["migration"], "images that are being migrated are not opened", USE_RBD),
    (&["mirror"], "images are not mirrored between clusters", USE_RBD),
    (
        &["perf", "image"],
        "the daemon has the figures of its volumes",
        "see 'forebay targets --format json', or /metrics",
    ),
    (&["persistent-cache"], "writes are cached by write logs", "see 'forebay log'"),
    (&["pool", "init"], "pools of a cluster are prepared by its administrator", USE_RBD),
    (&["pool", "stats"], "pools of a cluster are counted by the cluster", "use 'forebay du POOL', or 'rbd pool stats'"),
    (&["trash", "purge", "schedule"], "schedules are the cluster's manager's", USE_RBD),
];

const USE_RBD: &str = "use rbd";
const MAP: &str = "use 'forebay map' and 'forebay unmap'; the daemon reconnects devices by itself";

/// Returns the failure of a command line that is one of `rbd` only.
pub fn refusal(arguments: impl IntoIterator<Item = String>) -> Option<Failure> {
    let words: Vec<String> = arguments.into_iter().skip(1).take_while(|word| !word.starts_with('-')).collect();
    let begins_with = |first: &[&str]| words.len() >= first.len() && first.iter().zip(&words).all(|(a, b)| a == b);
    let (first, why, instead) = COMMANDS.iter().find(|(first, ..)| begins_with(first))?;
    let what = format!("no counterpart of 'rbd {}': {why}", first.join(" "));
    Some(Failure::new(FailureKind::Unsupported, what).hint(*instead))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(line: &str) -> Option<String> {
        refusal(line.split(' ').map(str::to_owned)).map(|failure| failure.to_string())
    }

    #[test]
    fn by_their_first_words() {
        let journal = refused("forebay journal status rbd/vm").expect("refused");
        assert!(journal.contains("'rbd journal'") && journal.contains("use rbd"), "{journal}");
        assert!(refused("forebay trash purge schedule add --pool rbd 1d").is_some());
        assert_eq!(refused("forebay trash purge"), None);
        assert_eq!(refused("forebay perf accel"), None);
        assert_eq!(refused("forebay --format json"), None);
        assert_eq!(refused("forebay"), None);
    }
}
