//! Addresses of this machine.

use std::io;
use std::net::IpAddr;

use crate::failure::{Failure, Result};

/// Returns the addresses of this machine that hosts can use if a socket listens on the wildcard address.
pub(super) fn own_addresses(v6: bool) -> Result<Vec<IpAddr>> {
    let found = interface_addresses().map_err(|error| Failure::io(error, "asking for this machine's addresses"))?;
    let fits = |ip: &IpAddr| v6 || ip.is_ipv4();
    let mut others: Vec<IpAddr> = found.iter().copied().filter(|ip| fits(ip) && !ip.is_loopback()).collect();
    if others.is_empty() {
        others.extend(found.into_iter().filter(fits));
    }
    Ok(others)
}

/// Returns the addresses of the local interfaces, from the kernel's lists of local routes.
fn interface_addresses() -> io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    let trie = std::fs::read_to_string("/proc/net/fib_trie")?;
    let mut last = None;
    for line in trie.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<IpAddr>().ok();
        } else if line.starts_with("/32 host LOCAL")
            && let Some(address) = last
            && !found.contains(&address)
        {
            found.push(address);
        }
    }
    let v6 = std::fs::read_to_string("/proc/net/if_inet6").unwrap_or_default();
    for line in v6.lines() {
        // Address, interface, prefix, scope: 20 is link-local, which is unusable without the interface.
        let mut fields = line.split_whitespace();
        let (address, scope) = (fields.next(), fields.nth(2));
        if let (Some(address), Some("00" | "10")) = (address, scope)
            && let Ok(bits) = u128::from_str_radix(address, 16)
        {
            found.push(IpAddr::V6(bits.into()));
        }
    }
    Ok(found)
}
