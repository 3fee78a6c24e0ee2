//! IP networks, for access lists.

use std::net::IpAddr;
use std::str::FromStr;

/// IP network: an address and its prefix length in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    addr: IpAddr,
    bits: u32,
}

impl Network {
    /// Returns whether the network contains an address; an IPv4-mapped IPv6 address counts as IPv4.
    pub fn contains(&self, addr: IpAddr) -> bool {
        let same = |one: u128, other: u128, width: u32| self.bits == 0 || (one ^ other) >> (width - self.bits) == 0;
        match (self.addr, addr.to_canonical()) {
            (IpAddr::V4(net), IpAddr::V4(addr)) => same(net.to_bits().into(), addr.to_bits().into(), 32),
            (IpAddr::V6(net), IpAddr::V6(addr)) => same(net.to_bits(), addr.to_bits(), 128),
            _ => false,
        }
    }
}

impl FromStr for Network {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (addr, bits) = text.split_once('/').map_or((text, None), |(addr, bits)| (addr, Some(bits)));
        let wrong = || format!("'{text}' is not a network; use ADDRESS or ADDRESS/BITS");
        let addr: IpAddr = addr.parse().map_err(|_| wrong())?;
        let width = if addr.is_ipv4() { 32 } else { 128 };
        let bits = bits.map_or(Ok(width), |bits| bits.parse().map_err(|_| wrong()))?;
        if bits > width { Err(wrong()) } else { Ok(Self { addr, bits }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_contain_their_addresses() {
        let contains = |network: &str, addr: &str| {
            network.parse::<Network>().expect("a network").contains(addr.parse().expect("an address"))
        };
        assert!(contains("10.17.0.0/16", "10.17.23.10") && !contains("10.17.0.0/16", "10.18.0.1"));
        assert!(contains("10.0.0.1", "10.0.0.1") && !contains("10.0.0.1", "10.0.0.2"));
        assert!(contains("0.0.0.0/0", "1.2.3.4") && !contains("0.0.0.0/0", "::1"));
        assert!(contains("fd00::/8", "fd12::1") && !contains("fd00::/8", "fe80::1"));
        assert!(contains("10.0.0.0/8", "::ffff:10.1.1.1"));
        for wrong in ["", "10.0.0.0/33", "x/3", "10.0.0.0/", "::/129"] {
            assert!(wrong.parse::<Network>().is_err(), "{wrong}");
        }
    }
}
