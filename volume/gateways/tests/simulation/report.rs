//! State of a simulated group, for conditions and messages of tests.

use forebay_gateways::{GatewayState, MemberId};

use super::{Daemon, World};

impl World {
    /// Returns members that serve in the record.
    pub fn serving(&self) -> usize {
        self.record.members().values().filter(|member| member.state.serves()).count()
    }

    /// Returns what is wrong where all must be well: every volume is served by its owner.
    pub fn complaint(&self) -> Option<String> {
        if let Some((name, since)) = self.unserved.first_key_value() {
            let owner = self.record.volume(name).map(|volume| volume.owner);
            return Some(format!(
                "{} volumes are not served, {name} since {} ms: {owner:?}",
                self.unserved.len(),
                (self.now - since) / 1_000_000
            ));
        }
        let of = |id: MemberId| self.daemons.iter().find(|daemon| daemon.id == id);
        for (name, volume) in self.record.volumes() {
            let daemon = of(volume.owner.member)?;
            let term = daemon.machine.as_ref().and_then(|machine| machine.open_term(name));
            if volume.leaving {
                return Some(format!("{name} has not left yet"));
            }
            if term.is_none() {
                return Some(format!("{name} is not open at its owner"));
            }
            if volume.owner.next.is_some() {
                return Some(format!("{name} is still being moved"));
            }
        }
        let without = self.daemons.iter().find(|daemon| daemon.machine.is_some() && !daemon.hosts);
        without.map(|daemon| format!("member {} admits no hosts", daemon.id))
    }

    /// Describes all members, for messages.
    pub fn describe(&self) -> String {
        let describe = |daemon: &Daemon| {
            let standing = daemon.machine.as_ref().map(|machine| (machine.standing(), machine.record().epoch()));
            let entry = self.record.member(daemon.id).map(|entry| (entry.state, entry.start));
            let fenced = self.fenced.contains(&daemon.start);
            format!("{} start {} fenced {fenced} {standing:?} {entry:?}", daemon.id, daemon.start)
        };
        let members: Vec<String> = self.daemons.iter().map(describe).collect();
        format!("epoch {}; {}", self.record.epoch(), members.join("; "))
    }

    /// Returns the state of a member in the record.
    pub fn state(&self, at: usize) -> Option<GatewayState> {
        self.record.member(self.daemons[at].id).map(|member| member.state)
    }
}
