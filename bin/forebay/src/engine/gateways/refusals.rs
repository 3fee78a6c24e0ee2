//! Members whose machines refuse connections: their processes are gone, which need not be waited for.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use forebay_gateways::{MemberId, StartId};
use forebay_messenger::{Address, Connection};
use forebay_reactor::{Addr, Stream, sleep, timeout};
use forebay_writelog::replication::PeerId;

use super::JoinedGroup;

/// Number of attempts to connect to a member whose connection was interrupted.
const ATTEMPTS: u32 = 8;
/// Time between attempts.
const PAUSE: Duration = Duration::from_millis(25);
/// Longest time of an attempt; a machine that does not answer says nothing.
const PATIENCE: Duration = Duration::from_millis(200);

impl JoinedGroup {
    /// Finds out whether the process behind an interrupted connection is gone, and tells the state machine so.
    pub(super) async fn probe(self: Rc<Self>, connection: Connection) {
        let Some(engine) = self.engine() else { return };
        let Some(PeerId(id)) = engine.peers.known().described(&connection).map(|known| known.hello.peer) else {
            return;
        };
        let Some((member, start, addrs)) = self.serving_member(MemberId(id)) else { return };
        drop(engine);
        for _ in 0..ATTEMPTS {
            let is_back = self.connection(member).is_some_and(|open| open != connection);
            if is_back || self.serving_member(member).is_none_or(|(_, now, _)| now != start) {
                return;
            }
            // Told more than once: a message of the former connection may be taken after the first time.
            if refuse(&addrs).await
                && let Some(running) = self.running()
            {
                running.runner.refused(member, start);
            }
            sleep(PAUSE).await;
        }
    }

    /// Returns a member that serves, with its start and its addresses for peers.
    fn serving_member(&self, member: MemberId) -> Option<(MemberId, StartId, Vec<Addr>)> {
        let record = self.record()?;
        let entry = record.member(member).filter(|entry| entry.state.serves() && member != self.own)?;
        let addrs = entry.peer_addrs.iter().map(|text| match text.parse::<Address>() {
            Ok(Address::Tcp(addr)) => Some(Addr::Tcp(addr)),
            Ok(Address::Unix(path)) => Some(Addr::Unix(path)),
            // Others may be used although these refuse.
            _ => None,
        });
        Some((member, entry.start, addrs.collect::<Option<Vec<Addr>>>()?))
    }
}

/// Returns whether all addresses refuse connections.
async fn refuse(addrs: &[Addr]) -> bool {
    for addr in addrs {
        match timeout(PATIENCE, Stream::connect(addr)).await {
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {}
            _ => return false,
        }
    }
    !addrs.is_empty()
}
