//! `cargo xtask sim`: the simulator, on every core.

use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::{daemon, shell};

/// Arguments of `sim`.
#[derive(clap::Args)]
pub struct SimArguments {
    /// The first seed
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Requests a seed, at least; a seed continues with further scenarios until it has had this many
    #[arg(long, default_value_t = 100_000)]
    steps: u64,
    /// Seeds, from the first one on
    #[arg(long, default_value_t = 1)]
    runs: u64,
    /// Processes side by side (default: one a core)
    #[arg(long)]
    jobs: Option<u64>,
    /// Messengers under cuts and restarts, in place of stores under crashes
    #[arg(long, conflicts_with = "everywhere")]
    messenger: bool,
    /// Write logs on disks and in persistent memory, in place of stores
    #[arg(long, conflicts_with = "messenger")]
    writelog: bool,
    /// Volumes that get and lose write logs under load, in place of stores
    #[arg(long, conflicts_with_all = ["messenger", "writelog", "shared", "everywhere", "sweeps"])]
    attachment: bool,
    /// Write logs with members on several gateways, in place of stores
    #[arg(long, conflicts_with_all = ["messenger", "writelog", "attachment", "shared", "everywhere", "sweeps"])]
    replication: bool,
    /// Images of a pool that several clients use at once, on a model of RADOS, in place of stores
    #[arg(long, conflicts_with_all = ["messenger", "writelog", "everywhere", "sweeps"])]
    shared: bool,
    /// Clones and snapshots of images under power failures and dying clients, in place of stores
    #[arg(long, conflicts_with_all = ["messenger", "writelog", "attachment", "replication", "shared", "everywhere", "sweeps"])]
    families: bool,
    /// Volumes that other daemons have open, under moves and failures of these, in place of stores
    #[arg(long, conflicts_with_all = ["messenger", "writelog", "attachment", "replication", "shared", "families", "everywhere", "sweeps"])]
    forward: bool,
    /// Stores on several devices that fail, in place of stores on one
    #[arg(long, conflicts_with_all = ["messenger", "writelog", "attachment", "replication", "shared", "families", "forward", "everywhere", "sweeps"])]
    devices: bool,
    /// Crash each seed's scenario at every persistence point of its first life in turn: a run a point
    #[arg(long)]
    everywhere: bool,
    /// Number of further seeds with a crash at every point, as `--everywhere` does it
    #[arg(long, default_value_t = 0, conflicts_with_all = ["everywhere", "messenger"])]
    sweeps: u64,
}

impl SimArguments {
    /// Returns the simulator's options for what runs are about.
    fn options(&self, everywhere: bool) -> Vec<&'static str> {
        let all = [
            (self.messenger, "--messenger"),
            (self.writelog, "--writelog"),
            (self.attachment, "--attachment"),
            (self.replication, "--replication"),
            (self.shared, "--shared"),
            (self.families, "--families"),
            (self.forward, "--forward"),
            (self.devices, "--devices"),
            (everywhere, "--everywhere"),
        ];
        all.into_iter().filter_map(|(asked, option)| asked.then_some(option)).collect()
    }
}

/// Returns the command that builds the simulator.
pub fn build_command() -> Command {
    daemon::build_beside_command(&["-p", "forebay-sim", "--bin", "sim"])
}

/// Runs the seeds; the first failure of each process is printed with its trace.
pub fn run(arguments: &SimArguments) -> Result<()> {
    shell::build(&mut build_command())?;
    run_seeds(arguments, &arguments.options(arguments.everywhere), arguments.runs)?;
    if arguments.sweeps > 0 {
        run_seeds(arguments, &arguments.options(true), arguments.sweeps)?;
    }
    Ok(())
}

fn run_seeds(arguments: &SimArguments, options: &[&str], runs: u64) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let jobs = arguments.jobs.unwrap_or(cores).clamp(1, runs.max(1));
    let mut processes = Vec::new();
    for job in 0..jobs {
        let first = runs * job / jobs;
        let count = runs * (job + 1) / jobs - first;
        let mut simulator = shell::command(shell::target().join("release/sim"));
        simulator.args(["--seed", &arguments.seed.wrapping_add(first).to_string()]);
        simulator.args(["--steps", &arguments.steps.to_string(), "--runs", &count.to_string()]);
        simulator.args(options);
        let child = simulator.stdout(Stdio::piped()).spawn().context("cannot start the simulator")?;
        processes.push((count, child));
    }
    let mut failed = 0;
    for (count, child) in processes {
        let output = child.wait_with_output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        if output.status.success() {
            println!("ok sim: {count} seeds, {}", one_line(&text));
        } else {
            failed += 1;
            println!("{text}");
            let seed = text.lines().find_map(|line| line.strip_prefix("seed ")?.split(':').next()).unwrap_or("N");
            let how = if options.is_empty() { "--steps 1".to_owned() } else { options.join(" ") };
            // A simulator that was killed, for want of memory for example, has printed no seed.
            println!("not ok sim: {}; replay it with: cargo xtask sim --seed {seed} {how}", output.status);
        }
    }
    if failed > 0 {
        bail!("the simulator found something");
    }
    Ok(())
}

/// Puts the simulator's tally, which has a field a line, on one line.
fn one_line(tally: &str) -> String {
    let fields = tally.lines().map(str::trim).filter(|line| line.contains(": "));
    fields.map(|line| line.trim_end_matches(',')).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    #[test]
    fn tallies_are_shortened() {
        assert_eq!(super::one_line("Tally {\n    runs: 2,\n    crashes: 1,\n}\n"), "runs: 2, crashes: 1");
    }
}
