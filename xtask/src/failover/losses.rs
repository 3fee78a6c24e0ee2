//! Ways in which a primary is lost, and their order.

use std::time::Duration;

use anyhow::{Context, Result};

use super::hosts::Hosts;
use super::{FIO, NUMBERED};
use crate::network::{End, NetworkCut};
use crate::numbered::Random;
use crate::shell;

/// Longest time in which a primary that is cut off goes on before another host acts: longer than the time after which
/// it drops a silent replica.
const PAUSE_MS: u64 = 1500;

/// Way in which a primary is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Loss {
    /// `kill -9`.
    Killed,
    /// Stopped, and continued after another one has taken over: it must be fenced.
    Suspended,
    /// Handed over: its log is closed, and nobody is fenced.
    HandedOver,
    /// Stopped in order.
    Stopped,
    /// `kill -9`, and started again before anybody takes over: it goes on as another client.
    Restarted,
    /// Its whole network is lost, while clients on its own machine go on writing; it is back after a takeover.
    NetworkLost,
    /// Only the path between it and one replica is lost: it drops the replica, and serves on.
    PeerPathLost,
    /// Only its path to the Ceph cluster is lost; it is back after a takeover.
    BackendPathLost,
    /// Its packets to everybody are lost, and those of everybody arrive; its path is back after a takeover.
    OutgoingPathLost,
}

/// Losses of ten rounds, in an order that the seed draws.
const DECK: [Loss; 10] = [
    Loss::Killed,
    Loss::Killed,
    Loss::Suspended,
    Loss::HandedOver,
    Loss::Stopped,
    Loss::Restarted,
    Loss::NetworkLost,
    Loss::PeerPathLost,
    Loss::BackendPathLost,
    Loss::OutgoingPathLost,
];

impl Loss {
    /// Returns whether the daemon runs on, and must find out later that another one has taken over.
    pub fn leaves_rival(self) -> bool {
        matches!(self, Self::Suspended | Self::NetworkLost | Self::BackendPathLost | Self::OutgoingPathLost)
    }

    /// Returns whether replicas notice by themselves that the primary is lost: it has closed no log, and is not heard of.
    pub fn is_noticed(self) -> bool {
        matches!(self, Self::Killed | Self::Suspended | Self::NetworkLost | Self::OutgoingPathLost)
    }

    /// Returns whether another host serves the images afterwards.
    pub fn moves(self) -> bool {
        !matches!(self, Self::Restarted | Self::PeerPathLost)
    }
}

/// Order of losses: each kind comes in every ten of them.
#[derive(Default)]
pub struct Deck {
    rest: Vec<Loss>,
}

impl Deck {
    /// Returns the next loss.
    pub fn draw(&mut self, random: &mut Random) -> Loss {
        if self.rest.is_empty() {
            self.rest.extend(DECK);
            for at in (1..self.rest.len()).rev() {
                self.rest.swap(at, (random.next() % (at as u64 + 1)) as usize);
            }
        }
        self.rest.pop().expect("a deck is not empty")
    }
}

/// Loses the primary, or with a lost path `other`; returns for how long the others leave it alone then.
pub fn lose(hosts: &mut Hosts, loss: Loss, other: usize, random: &mut Random) -> Result<Duration> {
    let former = hosts.primary;
    let draw = random.next();
    let host = &mut hosts.all[former];
    match loss {
        Loss::Restarted | Loss::Killed => {
            host.crashed = Some(host.daemon.take().context("its daemon runs")?.crash()?);
        }
        Loss::Stopped => host.crashed = Some(host.daemon.take().context("its daemon runs")?.halt()?),
        Loss::Suspended => shell::signal("STOP", &[host.daemon().id()]),
        Loss::HandedOver => {
            for name in [NUMBERED, FIO] {
                host.until(&["detach", name, "--nbd", "--keep-log", "--force"])?;
            }
        }
        Loss::NetworkLost => {
            let how = if draw.is_multiple_of(2) { NetworkCut::LinkDown } else { NetworkCut::Unbridged };
            hosts.network.cut(former, how)?;
        }
        Loss::PeerPathLost => {
            let (from, to) = (End::Host(former), End::Host(other));
            // One direction is as good as none, for either end.
            let lost = match draw % 3 {
                0 => vec![(from, to)],
                1 => vec![(to, from)],
                _ => vec![(from, to), (to, from)],
            };
            for (from, to) in lost {
                hosts.network.lose(from, to)?;
            }
        }
        Loss::BackendPathLost => {
            hosts.network.lose(End::Host(former), End::Cluster)?;
            hosts.network.lose(End::Cluster, End::Host(former))?;
        }
        Loss::OutgoingPathLost => {
            for end in hosts.network.others(former) {
                hosts.network.lose(End::Host(former), end)?;
            }
        }
    }
    let is_cut_off = loss.leaves_rival() && loss != Loss::Suspended;
    let pause = if is_cut_off { random.next() % PAUSE_MS } else { 0 };
    Ok(Duration::from_millis(pause))
}

/// Brings back what was lost of a daemon that runs on.
pub fn restore(hosts: &mut Hosts, loss: Loss, former: usize) -> Result<()> {
    if loss == Loss::Suspended {
        shell::signal("CONT", &[hosts.all[former].daemon().id()]);
    }
    hosts.network.restore()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_losses_are_of_every_kind() {
        let mut random = Random(7);
        let mut deck = Deck::default();
        for _ in 0..5 {
            let mut ten: Vec<Loss> = (0..10).map(|_| deck.draw(&mut random)).collect();
            ten.sort_unstable();
            assert_eq!(ten, DECK);
        }
    }
}
