//! Connections within a core: messages are handed over without being serialised.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use crate::connection::{Conn, Connection, ConnectionIdentity, Outgoing, PeerRoute};
use crate::endpoint::MessengerEndpoint;
use crate::session::{MessengerSession, Policy, Resume};
use crate::transport::{Address, no_local_endpoint};

/// Name of the transport.
const NAME: &str = "loopback";

/// Endpoints of a core that listen at a loopback address, by name; a name belongs to one endpoint until that stops.
#[derive(Default)]
pub(crate) struct LocalEndpoints(RefCell<BTreeMap<String, Weak<MessengerEndpoint>>>);

impl LocalEndpoints {
    /// Gives the name to `endpoint`.  Returns false if another one has it.
    pub(crate) fn listen(&self, name: &str, endpoint: &Rc<MessengerEndpoint>) -> bool {
        let mut names = self.0.borrow_mut();
        if names.get(name).is_some_and(|other| other.strong_count() > 0) {
            return false;
        }
        names.insert(name.to_owned(), Rc::downgrade(endpoint));
        true
    }

    /// Returns the endpoint of this name, unless it has stopped.
    fn find(&self, name: &str) -> Option<Rc<MessengerEndpoint>> {
        let found = self.0.borrow().get(name).and_then(Weak::upgrade);
        found.filter(|endpoint| !endpoint.stop.is_sent())
    }

    /// Removes the names of an endpoint that stops.
    pub(crate) fn remove(&self, endpoint: &Rc<MessengerEndpoint>) {
        let mut names = self.0.borrow_mut();
        names.retain(|_, other| other.upgrade().is_some_and(|other| !Rc::ptr_eq(&other, endpoint)));
    }
}

/// Connects an endpoint to the one of this name; the connection ends at once if there is none.
pub(crate) fn connect(
    client: &Rc<MessengerEndpoint>,
    address: &Address,
    name: &str,
    policy: Policy,
    session: MessengerSession<Rc<Outgoing>>,
) -> Connection {
    let identity = || ConnectionIdentity::new(address.clone(), String::new());
    let conn = Conn::new(client.clone(), identity(), (policy, PeerRoute::Local(RefCell::default())), session);
    let Some(server) = client.core.local.find(name) else {
        conn.end(no_local_endpoint(name).into());
        return Connection::new(conn);
    };
    let theirs = (server.options.accept, PeerRoute::Local(RefCell::new(Rc::downgrade(&conn))));
    let other = Conn::new(server.clone(), identity(), theirs, MessengerSession::new(true, Resume::default()));
    if let PeerRoute::Local(end) = &conn.route {
        *end.borrow_mut() = Rc::downgrade(&other);
    }
    conn.identity.identify(server.options.entity, None);
    other.identity.identify(client.options.entity, None);
    client.connections.add(&conn);
    server.connections.add(&other);
    other.lifecycle.open(NAME);
    conn.lifecycle.open(NAME);
    server.handler.opened(&Connection::new(other));
    client.handler.opened(&Connection::new(conn.clone()));
    Connection::new(conn)
}
