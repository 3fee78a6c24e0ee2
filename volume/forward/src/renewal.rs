//! Renewal of the leases that a forwarder has at owners.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_messenger::Connection;
use forebay_reactor::{Instant, now, sleep, spawn};

use crate::client::ForwardClient;
use crate::route;
use crate::wire::{self, ForwardAnswer, ForwardRequest, KIND_REQUEST};

/// Number of renewals in the length of a lease.
const RENEWALS: u32 = 8;
/// Shortest time between renewals.
const PAUSE_MIN: Duration = Duration::from_millis(10);

/// Leases over one connection.
struct ConnectionLease {
    connection: Connection,
    /// Newest grant, and when it was received.
    grant: Option<(u64, Instant)>,
    /// The owner has not answered yet.
    asked: bool,
}

/// Renewal of the leases of all sessions of a forwarder.
///
/// An owner counts a lease from a grant that it has given, and that the forwarder has named since.  So the forwarder knows,
/// whatever becomes of its messages, that no lease counts from later than it received the newest grant that it has named.
#[derive(Default)]
pub(crate) struct LeaseRenewal {
    connections: RefCell<Vec<ConnectionLease>>,
    newest_named: Cell<Option<Instant>>,
    running: Cell<bool>,
}

impl LeaseRenewal {
    pub(crate) fn newest_named(&self) -> Option<Instant> {
        self.newest_named.get()
    }

    /// Forgets the grants of a connection that has ended.
    pub(crate) fn forget(&self, connection: &Connection) {
        self.connections.borrow_mut().retain(|lease| lease.connection != *connection);
    }
}

impl ForwardClient {
    /// Renews leases as long as there are sessions at other daemons.
    pub(crate) fn keep_leases(self: &Rc<Self>) {
        if self.renewal.running.replace(true) {
            return;
        }
        let client = Rc::downgrade(self);
        drop(spawn(renew_leases(client)));
    }

    /// Renews the leases over each connection whose owner has answered; returns false if there is none.
    fn renew(self: &Rc<Self>) -> bool {
        let in_use = self.connections_in_use();
        let mut leases = self.renewal.connections.borrow_mut();
        leases.retain(|lease| in_use.contains(&lease.connection));
        for connection in &in_use {
            if !leases.iter().any(|lease| lease.connection == *connection) {
                leases.push(ConnectionLease { connection: connection.clone(), grant: None, asked: false });
            }
        }
        // Leases are those of connections: as long as they are renewed for other volumes, those of a volume that was given up,
        // and whose sessions its owner does not say to have ended, would not run out.
        let pauses = self.waits_for_leases();
        for lease in leases.iter_mut().filter(|lease| !lease.asked && !pauses) {
            lease.asked = true;
            let (grant, received) = lease.grant.unzip();
            // Counts from here on, whether the message arrives or not.
            self.renewal.newest_named.set(self.renewal.newest_named.get().max(received));
            drop(spawn(ask(Rc::downgrade(self), lease.connection.clone(), grant.unwrap_or(0))));
        }
        !in_use.is_empty()
    }
}

/// Names a grant to an owner, and notes the next one.
async fn ask(client: Weak<ForwardClient>, connection: Connection, grant: u64) {
    let renew = wire::urgent(wire::message(KIND_REQUEST, ForwardRequest::Renew { grant }.encode()));
    let answer = route::request(&connection, renew).await;
    let Some(client) = client.upgrade() else { return };
    let mut leases = client.renewal.connections.borrow_mut();
    let Some(at) = leases.iter().position(|lease| lease.connection == connection) else { return };
    match answer {
        Ok(ForwardAnswer::Renewed { grant }) => {
            (leases[at].grant, leases[at].asked) = (Some((grant, now())), false);
        }
        // The connection was lost, or the owner has begun again.
        _ => drop(leases.swap_remove(at)),
    }
}

async fn renew_leases(client: Weak<ForwardClient>) {
    loop {
        let pause = {
            let Some(client) = client.upgrade() else { return };
            if !client.renew() {
                client.renewal.running.set(false);
                return;
            }
            (client.lease() / RENEWALS).max(PAUSE_MIN)
        };
        sleep(pause).await;
    }
}
