//! A gateway group of three daemons before a Ceph cluster, each in a network of its own, and a guest that reaches its volumes
//! over all of them while members are killed, stopped, drained, suspended and cut off.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use crate::ceph::Cluster;
use crate::daemon::{self, Crashed, Daemon};
use crate::network::{End, Network};
use crate::shell::{self, Scratch};

/// Number of members.
const MEMBERS: usize = 3;
const GROUP: &str = "rbd/gateways";
/// Images, each of which the guest uses as a disk.
const IMAGES: [&str; 2] = ["rbd/one", "rbd/two"];
/// Time within which all members serve all volumes again.
const PATIENCE: Duration = Duration::from_secs(60);

/// Arguments of `guest-gateways`.
#[derive(clap::Args)]
pub struct GatewaysArguments {
    /// Protocol of the guest: nvme or iscsi
    #[arg(long, default_value = "nvme")]
    front: String,
    /// Number of failures
    #[arg(long, default_value_t = 10)]
    rounds: u32,
    /// Kinds of failures, one after the other: kill, drain, isolate, stop, suspend, upgrade
    #[arg(long, default_value = "kill,drain,isolate,stop,suspend,upgrade")]
    faults: String,
    /// Run the operators' drill, docs/drill.md, after the failures (nvme only)
    #[arg(long)]
    drill: bool,
    /// Lease of the members
    #[arg(long, default_value = "1s")]
    lease: String,
}

/// Member of the group.
struct Member {
    name: String,
    address: String,
    /// Build that it runs.
    program: PathBuf,
    daemon: Option<Daemon>,
    crashed: Option<Crashed>,
    suspended: bool,
}

impl Member {
    fn daemon(&self) -> Result<&Daemon> {
        self.daemon.as_ref().with_context(|| format!("{} does not run", self.name))
    }

    fn take_daemon(&mut self) -> Result<Daemon> {
        self.daemon.take().with_context(|| format!("{} does not run", self.name))
    }

    fn start(&mut self) -> Result<()> {
        self.daemon = Some(self.crashed.take().with_context(|| format!("{} runs", self.name))?.restart()?);
        Ok(())
    }

    /// Returns the number of volumes that it owns, as it says.
    fn owned(&self) -> Result<u64> {
        let text = shell::output(self.daemon()?.command().args(["--format", "json", "group", "status"]))?;
        let status: Value = serde_json::from_str(&text)?;
        let members = status["members"].as_array().context("members")?;
        let own = members.iter().find(|one| one["own"] == true).context("it is a member")?;
        own["volumes"].as_u64().context("a number of volumes")
    }
}

/// The group, its members and their networks.
struct GatewayGroup {
    members: Vec<Member>,
    network: Network,
    front: String,
}

impl GatewayGroup {
    fn start(scratch: &Scratch, network: Network, variable: &str, arguments: &GatewaysArguments) -> Result<Self> {
        let key = scratch.path().join("peer.key");
        fs::write(&key, "5a".repeat(32))?;
        fs::set_permissions(&key, fs::Permissions::from_mode(0o600))?;
        let mut members = Vec::new();
        for number in 0..MEMBERS {
            let (name, address) = (format!("gateway{}", number + 1), network.address(End::Host(number)));
            let folder = scratch.path().join(&name);
            fs::create_dir_all(&folder)?;
            let config = folder.join("forebay.toml");
            let text = format!(
                "peer = ['{address}:7100']\npeer-key = '{}'\nnvme = ['{address}:4420']\niscsi = ['{address}:3260']\n\
                 group = '{GROUP}'\n",
                key.display(),
            );
            fs::write(&config, text)?;
            // Each has a host name of its own, by which the group shows it.
            let named = "hostname \"$0\" && exec \"$@\"";
            let wrapper = network.wrapper(number);
            let mut wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
            wrapper.extend(["/usr/bin/env", variable, "unshare", "--uts", "sh", "-c", named, &name]);
            let config = config.display().to_string();
            let words = ["--config", &config, "--store-size", "64M"];
            let daemon = Daemon::start_under(&wrapper, &folder.join("data"), &words)?;
            let program = daemon::program();
            members.push(Member { name, address, program, daemon: Some(daemon), crashed: None, suspended: false });
        }
        Ok(Self { members, network, front: arguments.front.clone() })
    }

    fn member(&mut self, name: &str) -> Result<&mut Member> {
        self.members.iter_mut().find(|member| member.name == name).with_context(|| format!("no member {name}"))
    }

    /// Returns what members that run, and are not suspended, say of the group.
    fn states(&self) -> Vec<Value> {
        let running = self.members.iter().filter(|member| !member.suspended);
        let ask = |member: &Member| {
            let mut command = member.daemon().ok()?.command();
            let text = shell::output(command.args(["--format", "json", "group", "status"])).ok()?;
            serde_json::from_str(&text).ok()
        };
        running.filter_map(ask).collect()
    }

    /// Waits until all members agree that all serve, and every volume is open at its owner.
    fn settle(&self) -> Result<()> {
        let is_settled = || {
            let states = self.states();
            let all = |state: &Value, what: &str, is_so: &dyn Fn(&Value) -> bool| {
                state[what].as_array().is_some_and(|all| all.iter().all(is_so))
            };
            let settled = |state: &Value| {
                all(state, "members", &|one| {
                    one["state"] == "active" && (one["own"] == true || one["connected"] == true)
                }) && all(state, "volumes", &|one| one["next"].is_null() && one["error"].is_null())
            };
            let owners = states.iter().flat_map(|state| state["volumes"].as_array().into_iter().flatten());
            let open = owners.filter(|volume| volume["open_here"] == true).count();
            (states.len() == MEMBERS && states.iter().all(settled) && open == IMAGES.len()).then_some(())
        };
        shell::wait_for(PATIENCE, is_settled).with_context(|| {
            let logs: Vec<String> =
                self.members.iter().filter_map(|member| Some(member.daemon.as_ref()?.log_tail())).collect();
            format!("the group does not settle: {:?}\n{}", self.states(), logs.join("\n"))
        })
    }

    /// Returns the name of a volume's owner, as most members say.
    fn owner(&self, image: &str) -> Result<String> {
        let said = |state: &Value| {
            let volume = state["volumes"].as_array()?.iter().find(|volume| volume["image"] == image)?.clone();
            volume["owner"].as_str().map(str::to_owned)
        };
        let mut all: Vec<String> = self.states().iter().filter_map(said).collect();
        all.sort();
        let most = |name: &&String| all.iter().filter(|other| other == name).count();
        all.iter().max_by_key(most).cloned().with_context(|| format!("the owner of {image}"))
    }

    /// Keeps the members' logs, for a look at what happened.
    fn keep_logs(&self) -> Result<()> {
        let folder = shell::target().join("guest-gateways");
        fs::create_dir_all(&folder)?;
        for member in &self.members {
            let log = member.daemon.as_ref().map(Daemon::log).or(member.crashed.as_ref().map(Crashed::log));
            fs::write(folder.join(format!("{}.log", member.name)), log.unwrap_or_default())?;
        }
        Ok(())
    }

    /// Does with the daemon of a member what systemctl does with a unit.
    fn systemctl(&mut self, name: &str, words: &[&str]) -> Result<String> {
        let runs = self.member(name)?.daemon.is_some();
        match words {
            ["kill", "-s", "KILL"] => self.serve(&["kill", name]),
            ["kill", "-s", "STOP"] => self.serve(&["suspend", name]),
            ["kill", "-s", "CONT"] => self.serve(&["resume", name]),
            ["start"] if runs => Ok(String::new()),
            ["start"] => self.serve(&["start", name]),
            ["stop"] => self.serve(&["stop", name]),
            ["restart"] => self.serve(&["upgrade", name]),
            words => bail!("the drill asks for systemctl {words:?}"),
        }
    }

    /// Does what the guest asks for.
    fn serve(&mut self, words: &[&str]) -> Result<String> {
        match words {
            ["owner", image] => return self.owner(image),
            ["settle"] => self.settle()?,
            ["kill", name] => {
                let member = self.member(name)?;
                member.crashed = Some(member.take_daemon()?.crash()?);
            }
            ["stop", name] => {
                let member = self.member(name)?;
                member.crashed = Some(member.take_daemon()?.halt()?);
            }
            // Drained, and restarted as another build.
            ["upgrade", name] => {
                let member = self.member(name)?;
                shell::output(member.daemon()?.command().args(["group", "drain"]))?;
                let is_drained = || member.owned().ok().filter(|owned| *owned == 0);
                shell::wait_for(PATIENCE, is_drained).with_context(|| format!("{name} is not drained"))?;
                let halted = member.take_daemon()?.halt()?;
                member.program =
                    if member.program == daemon::program() { daemon::debug_program() } else { daemon::program() };
                member.daemon = Some(halted.restart_as(&member.program)?);
            }
            ["at", name, "forebay", words @ ..] => {
                return shell::output(self.member(name)?.daemon()?.command().args(words));
            }
            ["at", name, "systemctl", words @ .., "forebay"] => return self.systemctl(name, words),
            ["start", name] => self.member(name)?.start()?,
            ["drain", name] => drop(shell::output(self.member(name)?.daemon()?.command().args(["group", "drain"]))?),
            ["undrain", name] => {
                drop(shell::output(self.member(name)?.daemon()?.command().args(["group", "drain", "--undo"]))?);
            }
            ["suspend", name] => {
                let member = self.member(name)?;
                shell::signal("STOP", &[member.daemon()?.id()]);
                member.suspended = true;
            }
            ["resume", name] => {
                let member = self.member(name)?;
                shell::signal("CONT", &[member.daemon()?.id()]);
                member.suspended = false;
            }
            // From the cluster and the other members; hosts still reach it.
            ["isolate", name] => {
                let number = self.members.iter().position(|member| member.name == *name).context("no such member")?;
                // What this machine sends would be lost for its clients as well.
                for other in self.network.others(number) {
                    self.network.lose(End::Host(number), other)?;
                    if other != End::Cluster {
                        self.network.lose(other, End::Host(number))?;
                    }
                }
            }
            ["restore"] => self.network.restore()?,
            words => bail!("the guest asks for {words:?}"),
        }
        Ok(String::new())
    }
}

/// Serves images by a gateway group and runs test/interop/guest-gateways-FRONT.sh in the guest.
pub fn run(arguments: &GatewaysArguments) -> Result<()> {
    ensure!(["nvme", "iscsi"].contains(&&*arguments.front), "--front nvme or iscsi, not {}", arguments.front);
    ensure!(!arguments.drill || arguments.front == "nvme", "the drill needs --front nvme");
    shell::build(&mut daemon::build_command())?;
    shell::build(&mut daemon::build_debug_command())?;
    let network = Network::create(MEMBERS)?;
    network.separate_clients()?;
    let cluster = Cluster::start_at(3, &network.address(End::Cluster))?;
    let scratch = Scratch::within(&shell::target(), "guest")?;
    let variable = cluster.variable();
    let mut alone = shell::command("/usr/bin/env");
    alone.arg(&variable).arg(daemon::program()).args(["group", "create", GROUP, "--gateways", "--lease"]);
    shell::output(alone.arg(&arguments.lease))?;
    let mut group = GatewayGroup::start(&scratch, network, &variable, arguments)?;
    for (number, image) in IMAGES.iter().enumerate() {
        let daemon = group.members[number].daemon()?;
        shell::output(daemon.command().args(["create", image, "--size", "48M"]))?;
        shell::output(daemon.command().args(["attach", image, &format!("--{}", group.front)]))?;
    }
    group.settle()?;
    let share = scratch.path().join("share");
    fs::create_dir(&share)?;
    let mut guest = shell::command(shell::root().join("test/lab/guest"));
    guest.arg(shell::root().join(format!("test/interop/guest-gateways-{}.sh", arguments.front)));
    guest
        .args([&arguments.rounds.to_string(), &arguments.faults])
        .arg(if arguments.drill { shell::root().join("docs/drill.md") } else { PathBuf::from("-") })
        .args(group.members.iter().map(|member| &member.address));
    let limit = 180 + 60 * arguments.rounds + if arguments.drill { 420 } else { 0 };
    guest.env("SHARE", &share).env("TIMEOUT", limit.to_string());
    let status = super::attend(&mut guest, &scratch, &share, |words| group.serve(words))?;
    group.keep_logs()?;
    if !status.success() {
        let logs: Vec<String> = group.members.iter().filter_map(|one| Some(one.daemon.as_ref()?.log_tail())).collect();
        bail!("the guest ended with {status}; the members' logs:\n{}", logs.join("\n"));
    }
    for member in &mut group.members {
        member.daemon.take().context("a member does not run")?.stop()?;
    }
    Ok(())
}
