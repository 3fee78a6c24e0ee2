//! Memory of the daemon: what connections took comes back when they have closed.

use crate::common::{Nbd, Site, wait_until};

/// Bytes of memory that a process has.
fn resident(process: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).expect("its status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("VmRSS");
    line.trim().trim_end_matches("kB").trim().parse::<u64>().expect("a number") << 10
}

#[test]
fn memory_comes_back_when_connections_have_closed() {
    const CONNECTIONS: usize = 800;
    let site = Site::serving(&[]);
    site.run(&["create", "a", "--size", "16M"]).ok();
    site.run(&["attach", "a", "--nbd"]).ok();
    let socket = site.data().join("nbd.sock");
    let before = resident(site.pid());
    let mut clients: Vec<Nbd> = (0..CONNECTIONS).map(|_| Nbd::connect(&socket, "a").expect("connects")).collect();
    let with = resident(site.pid());
    let taken = with.checked_sub(before).expect("connections take memory");
    assert!(taken > CONNECTIONS as u64 * (8 << 10), "{taken} bytes of {CONNECTIONS} connections");
    // One that lives on, the last one: the free memory lies before what it has.
    let mut last = clients.pop().expect("one");
    drop(clients);
    wait_until("most of what they took is given back", || resident(site.pid()) < with - taken / 2);
    assert_eq!(last.read(0, 4096), [0; 4096]);
}
