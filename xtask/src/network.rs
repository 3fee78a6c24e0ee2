//! Networks of the daemons: one namespace each, all of them and the cluster at one bridge, and the ways in which paths
//! between them are lost.
//!
//! A lost path is silent: packets disappear, and nobody is told.  Packets of one end to another are lost by an entry of
//! the sender's neighbour table, which sends them to a station that does not exist; this works for each direction alone
//! and needs no packet filter in the kernel.  A whole network is lost by taking its port out of the bridge, or down.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result};

use crate::shell;

/// Prefix of the names of namespaces; the process id of the run and the number of the host follow.
const NAMESPACES: &str = "forebay-failover-";
/// Prefix of the names of bridges; the process id of the run follows. A link's name has at most 15 bytes.
const BRIDGES: &str = "fbfail";
/// Prefix of the bridge's ports; the process id of the run, `p` and the number of the host follow.
const PORTS: &str = "fbf";
/// Largest number of hosts of any run.
const HOSTS_MAX: usize = 12;
/// Number of the address of clients, after those of all hosts.
const CLIENTS: u32 = 14;
/// Address of the hardware that nobody has: packets to it are lost.
const NOBODY: &str = "02:00:00:00:00:01";
/// Number of networks of 16 addresses in 198.18.0.0/15, which RFC 2544 reserves for tests.
const SUBNETS: u32 = 8192;

/// End of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Host with a daemon.
    Host(usize),
    /// The Ceph cluster, in the namespace of this machine.
    Cluster,
}

/// Way in which a host's whole network is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NetworkCut {
    /// Its link loses the carrier.
    LinkDown,
    /// Its port is no longer in the bridge; the link looks healthy.
    Unbridged,
}

/// Namespaces and the bridge between them, deleted when dropped.
pub struct Network {
    run: u32,
    subnet: u32,
    hosts: usize,
    /// Paths whose packets are lost, from the first to the second end.
    dropped: BTreeSet<(End, End)>,
    /// Host whose whole network is lost.
    cut: Option<(usize, NetworkCut)>,
}

impl Network {
    /// Creates the namespaces of this many hosts, and deletes those of runs that were killed.
    ///
    /// # Errors
    /// Fails without the privileges of root.
    pub fn create(hosts: usize) -> Result<Self> {
        let run = std::process::id();
        // A killed run may have had the same process id.
        delete(run, HOSTS_MAX);
        let network = Self { run, subnet: free_subnet(run)?, hosts, dropped: BTreeSet::new(), cut: None };
        network.build().context(
            "cannot create network namespaces: run this as root, on a kernel with network namespaces, veth and bridges, \
             with iproute2 installed",
        )?;
        // Only with the privileges that the links took: without them, nothing could be deleted.
        delete_leftovers();
        Ok(network)
    }

    fn build(&self) -> Result<()> {
        let bridge = bridge(self.run);
        ip(&["link", "add", &bridge, "type", "bridge"])?;
        ip(&["address", "add", &format!("{}/28", self.address(End::Cluster)), "dev", &bridge])?;
        ip(&["link", "set", &bridge, "up"])?;
        for host in 0..self.hosts {
            let (namespace, port) = (namespace(self.run, host), port(self.run, host));
            ip(&["netns", "add", &namespace])?;
            ip(&["link", "add", &port, "type", "veth", "peer", "name", "eth0", "netns", &namespace])?;
            ip(&["link", "set", &port, "master", &bridge])?;
            ip(&["link", "set", &port, "up"])?;
            let address = format!("{}/28", self.address(End::Host(host)));
            ip(&["-n", &namespace, "address", "add", &address, "dev", "eth0"])?;
            for link in ["lo", "eth0"] {
                ip(&["-n", &namespace, "link", "set", link, "up"])?;
            }
        }
        Ok(())
    }

    /// Returns the IP address of an end.
    pub fn address(&self, end: End) -> String {
        let number = match end {
            End::Cluster => 1,
            End::Host(host) => host as u32 + 2,
        };
        address(self.subnet, number)
    }

    /// Lets clients on this machine reach the hosts from an address of their own, which a path that is lost between a host
    /// and the cluster does not concern.
    pub fn separate_clients(&self) -> Result<()> {
        let (bridge, own) = (bridge(self.run), address(self.subnet, CLIENTS));
        ip(&["address", "add", &format!("{own}/28"), "dev", &bridge])?;
        ip(&["route", "replace", &format!("{}/28", address(self.subnet, 0)), "dev", &bridge, "src", &own])
    }

    /// Returns the words before a command that run it in a host's namespace.
    pub fn wrapper(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec"].map(String::from).into_iter().chain([namespace(self.run, host)]).collect()
    }

    /// Returns all ends but one host.
    pub fn others(&self, host: usize) -> Vec<End> {
        let hosts = (0..self.hosts).filter(|other| *other != host).map(End::Host);
        hosts.chain([End::Cluster]).collect()
    }

    /// Loses all packets of one end to another from now on.
    pub fn lose(&mut self, from: End, to: End) -> Result<()> {
        let (device, address) = (self.device(from), self.address(to));
        let entry = ["neighbour", "replace", &address, "lladdr", NOBODY, "nud", "permanent", "dev", &device];
        self.dropped.insert((from, to));
        self.ip_at(from, &entry)
    }

    /// Loses the whole network of a host.
    pub fn cut(&mut self, host: usize, how: NetworkCut) -> Result<()> {
        self.cut = Some((host, how));
        let port = port(self.run, host);
        match how {
            NetworkCut::LinkDown => ip(&["link", "set", &port, "down"]),
            NetworkCut::Unbridged => ip(&["link", "set", &port, "nomaster"]),
        }
    }

    /// Brings all paths back.
    pub fn restore(&mut self) -> Result<()> {
        while let Some((from, to)) = self.dropped.pop_first() {
            let (device, address) = (self.device(from), self.address(to));
            self.ip_at(from, &["neighbour", "delete", &address, "dev", &device])?;
        }
        if let Some((host, how)) = self.cut.take() {
            let port = port(self.run, host);
            match how {
                NetworkCut::LinkDown => ip(&["link", "set", &port, "up"])?,
                NetworkCut::Unbridged => ip(&["link", "set", &port, "master", &bridge(self.run)])?,
            }
        }
        Ok(())
    }

    fn device(&self, end: End) -> String {
        match end {
            End::Host(_) => "eth0".into(),
            End::Cluster => bridge(self.run),
        }
    }

    fn ip_at(&self, end: End, arguments: &[&str]) -> Result<()> {
        match end {
            End::Host(host) => ip(&[&["-n", &namespace(self.run, host)], arguments].concat()),
            End::Cluster => ip(arguments),
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        delete(self.run, self.hosts);
    }
}

fn namespace(run: u32, host: usize) -> String {
    format!("{NAMESPACES}{run}-{host}")
}

fn bridge(run: u32) -> String {
    format!("{BRIDGES}{run}")
}

fn port(run: u32, host: usize) -> String {
    format!("{PORTS}{run}p{host}")
}

fn ip(arguments: &[&str]) -> Result<()> {
    shell::output(shell::command("ip").args(arguments)).map(drop)
}

/// Returns an address of a subnet of 16 addresses.
fn address(subnet: u32, number: u32) -> String {
    let address = std::net::Ipv4Addr::new(198, 18, 0, 0).to_bits() + subnet * 16 + number;
    std::net::Ipv4Addr::from_bits(address).to_string()
}

/// Returns a subnet without an address on this machine; different runs begin at different ones.
fn free_subnet(run: u32) -> Result<u32> {
    let used = shell::output(shell::command("ip").args(["-4", "-o", "address", "show"]))?;
    let is_free = |subnet: &u32| !used.contains(&format!(" {}/", address(*subnet, 1)));
    (0..SUBNETS).map(|step| (run + step) % SUBNETS).find(is_free).context("no subnet of 198.18.0.0/15 is free")
}

/// Deletes what runs have left that were killed, daemons in their namespaces included.
fn delete_leftovers() {
    let mut runs = BTreeSet::new();
    let namespaces = shell::output(shell::command("ip").args(["netns", "list"])).unwrap_or_default();
    runs.extend(namespaces.lines().filter_map(|line| run_of_namespace(line.split_whitespace().next()?)));
    let bridges =
        shell::output(shell::command("ip").args(["-o", "link", "show", "type", "bridge"])).unwrap_or_default();
    runs.extend(bridges.lines().filter_map(|line| {
        let (_, rest) = line.split_once(": ")?;
        rest.split_once(':')?.0.strip_prefix(BRIDGES)?.parse::<u32>().ok()
    }));
    let program = |run: &str| std::fs::read_to_string(format!("/proc/{run}/comm")).ok();
    for run in runs {
        if program(&run.to_string()).is_none_or(|other| Some(other) != program("self")) {
            println!("deleting the network of run {run}, which was killed");
            delete(run, HOSTS_MAX);
        }
    }
}

/// Returns the process id of the run that a namespace is of.
fn run_of_namespace(name: &str) -> Option<u32> {
    name.strip_prefix(NAMESPACES)?.split_once('-')?.0.parse().ok()
}

/// Deletes the namespaces and links of a run; errors cannot be reported, since there may be nothing to delete.
fn delete(run: u32, hosts: usize) {
    let existing = shell::output(shell::command("ip").args(["netns", "list"])).unwrap_or_default();
    for host in 0..hosts {
        let namespace = namespace(run, host);
        if existing.lines().any(|line| line.split_whitespace().next() == Some(&namespace)) {
            // A process within would keep the namespace and its link.
            let inside = shell::output(shell::command("ip").args(["netns", "pids", &namespace])).unwrap_or_default();
            let inside: Vec<u32> = inside.split_whitespace().filter_map(|id| id.parse().ok()).collect();
            if !inside.is_empty() {
                shell::signal("KILL", &inside);
            }
            let _ = ip(&["netns", "delete", &namespace]);
        }
        delete_link(&port(run, host));
    }
    delete_link(&bridge(run));
}

fn delete_link(name: &str) {
    if Path::new("/sys/class/net").join(name).exists() {
        let _ = ip(&["link", "delete", name]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_enough_and_found_again() {
        let run = 4_194_304;
        assert!(bridge(run).len() <= 15 && port(run, 9).len() <= 15);
        assert_eq!(run_of_namespace(&namespace(run, 2)), Some(run));
        assert_eq!(run_of_namespace("forebay-failover-x-1"), None);
    }

    #[test]
    fn subnets_do_not_overlap_and_stay_within_the_reserved_network() {
        assert_eq!(address(0, 1), "198.18.0.1");
        assert_eq!(address(1, 1), "198.18.0.17");
        assert_eq!(address(SUBNETS - 1, 15), "198.19.255.255");
    }
}
