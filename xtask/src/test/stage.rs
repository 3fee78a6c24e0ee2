//! Stage: a command, what must have succeeded before it, and the time it takes.

use std::process::Command;

use anyhow::Result;

use crate::{daemon, shell};

/// Length of a stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Length {
    /// Between its quick form (0.0) and what `make test` runs of it (1.0).
    Part(f64),
    /// All of it, as `cargo xtask soak` runs it.
    Soak,
}

impl Length {
    /// The shortest form of a stage that still tells something.
    pub(super) const QUICK: Self = Self::Part(0.0);
    /// Length that `make test` runs without a limit of its time.
    pub(super) const USUAL: Self = Self::Part(1.0);

    /// Returns how many seeds, kills or seconds that is, given how many each length has.
    pub(super) fn of(self, quick: u64, usual: u64, soak: u64) -> u64 {
        match self {
            Self::Part(part) => quick + (usual.saturating_sub(quick) as f64 * part.clamp(0.0, 1.0)).round() as u64,
            Self::Soak => soak,
        }
    }
}

/// Seconds that a stage takes on a quiet machine of two cores, another stage beside it.
#[derive(Clone, Copy)]
pub(super) struct Takes {
    pub(super) quick: f64,
    pub(super) usual: f64,
    pub(super) soak: f64,
}

impl Takes {
    /// Returns the seconds at a length.
    pub(super) fn at(self, length: Length) -> f64 {
        match length {
            Length::Part(part) => self.quick + (self.usual - self.quick) * part.clamp(0.0, 1.0),
            Length::Soak => self.soak,
        }
    }
}

type MakeCommand = dyn Fn(Length) -> Result<Command> + Send + Sync;

/// One stage of a test run.
pub(super) struct Stage {
    pub(super) name: &'static str,
    pub(super) title: &'static str,
    /// Stages that must have passed before.
    pub(super) after: &'static [&'static str],
    pub(super) command: Box<MakeCommand>,
    /// Its output holds tests to count; a build's does not.
    pub(super) counted: bool,
    /// Cores that it keeps busy on average, on a quiet machine; 0 for what waits for the network.
    pub(super) load: f64,
    pub(super) takes: Takes,
    /// Only `cargo xtask soak` runs it.
    pub(super) only_soak: bool,
}

impl Stage {
    /// A stage that builds what others run.
    pub(super) fn build(
        name: &'static str,
        title: &'static str,
        after: &'static [&'static str],
        seconds: u32,
        command: impl Fn() -> Result<Command> + Send + Sync + 'static,
    ) -> Self {
        Self { counted: false, ..Self::tests(name, title, after, move |_| command()).takes(seconds) }
    }

    /// A stage of tests.
    pub(super) fn tests(
        name: &'static str,
        title: &'static str,
        after: &'static [&'static str],
        command: impl Fn(Length) -> Result<Command> + Send + Sync + 'static,
    ) -> Self {
        let takes = Takes { quick: 0.0, usual: 0.0, soak: 0.0 };
        Self { name, title, after, command: Box::new(command), counted: true, load: 1.0, takes, only_soak: false }
    }

    /// Sets the time of a stage without lengths, in seconds.
    pub(super) fn takes(self, seconds: u32) -> Self {
        self.long(seconds, seconds, seconds)
    }

    /// Sets the seconds of each length.
    pub(super) fn long(mut self, quick: u32, usual: u32, soak: u32) -> Self {
        self.takes = Takes { quick: quick.into(), usual: usual.into(), soak: soak.into() };
        self
    }

    /// Sets the cores that the stage keeps busy: CPU time divided by the time it takes, as the table of a run shows them.
    /// A stage that waits for timers, peers and daemons runs beside others that do.
    pub(super) fn busy(mut self, cores: f64) -> Self {
        self.load = cores;
        self
    }

    /// `make test` does not run it.
    pub(super) fn only_soak(mut self) -> Self {
        self.only_soak = true;
        self
    }

    /// Returns whether the stage can be shortened.
    pub(super) fn has_lengths(&self) -> bool {
        self.takes.quick < self.takes.usual || self.takes.usual < self.takes.soak
    }
}

/// A script of test/interop that finds the daemon's program in `FOREBAY`.
pub(super) fn script(name: &str) -> Command {
    let mut script = shell::command(shell::root().join("test/interop").join(name));
    script.env("FOREBAY", daemon::program());
    script
}

/// The same, with another program of ours in `PROGRAM`: its path below the release folder.
pub(super) fn script_with(name: &str, program: &str) -> Command {
    let mut script = script(name);
    script.env("PROGRAM", shell::target().join("release").join(program));
    script
}

/// One of our own chores, as a command.
pub(super) fn own(words: &[&str]) -> Result<Command> {
    let mut command = shell::command(std::env::current_exe()?);
    command.args(words);
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_lie_between_the_quick_and_the_usual_form() {
        assert_eq!(Length::QUICK.of(8, 50, 100), 8);
        assert_eq!(Length::Part(0.5).of(8, 50, 100), 29);
        assert_eq!(Length::USUAL.of(8, 50, 100), 50);
        assert_eq!(Length::Soak.of(8, 50, 100), 100);
        assert_eq!(Length::Part(7.0).of(8, 50, 100), 50);
        let takes = Takes { quick: 10.0, usual: 20.0, soak: 60.0 };
        assert_eq!([takes.at(Length::QUICK), takes.at(Length::Part(0.5)), takes.at(Length::Soak)], [10.0, 15.0, 60.0]);
    }
}
