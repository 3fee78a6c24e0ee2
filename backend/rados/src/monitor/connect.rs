//! Connection to one of the monitors, kept up until the session is closed.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind};
use forebay_messenger::wire::EntityAddr;
use forebay_messenger::{Address, Connection, DisconnectReason, Policy};
use forebay_reactor::{Instant, now, timeout};

use super::rejection::{MonitorLoss, denied_by_all};
use super::{MONITOR_TIMEOUT, MonitorSession};

/// Pause after all monitors were tried.
const PAUSE: Duration = Duration::from_secs(1);

/// Attempts to open a session with a monitor.
///
/// Invariant: `last_error` is that of the last monitor tried; `None` before the first failure, and from the moment that
/// a monitor accepts this client until the next failure.
#[derive(Default)]
pub(super) struct Attempts {
    last_error: RefCell<Option<Error>>,
    /// Number of complete rounds over all monitors.
    rounds: Cell<u32>,
}

impl Attempts {
    /// Returns the error of the last monitor tried.
    pub(super) fn last_error(&self) -> Option<Error> {
        self.last_error.borrow().clone()
    }

    /// Returns true once all monitors were tried and the last one rejects this client.  A monitor may be down for a
    /// while, but a key rejected by all is invalid, and so are connection modes that none accepts.
    pub(super) fn are_rejected(&self) -> bool {
        let permanent = |error: &Error| matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unsupported);
        self.rounds.get() > 0 && self.last_error.borrow().as_ref().is_some_and(permanent)
    }

    fn succeeded(&self) {
        self.last_error.borrow_mut().take();
    }

    /// Records an error; returns whether it differs from the previous one.
    fn failed(&self, error: &Error) -> bool {
        let before = self.last_error.replace(Some(error.clone()));
        before.as_ref().map(Error::context) != Some(error.context())
    }

    fn end_round(&self) {
        self.rounds.set(self.rounds.get().saturating_add(1));
    }
}

/// Connection to the monitor that has accepted this client.
///
/// Invariant: the time of authentication and the address are those of the last monitor that has accepted this client;
/// they stay known while there is no connection.
#[derive(Default)]
pub(super) struct CurrentMonitor {
    connection: RefCell<Option<Connection>>,
    /// Time of the last authentication, from which the monitors' own tickets are valid.
    authenticated: Cell<Option<Instant>>,
    /// Address of this client, as seen by the last monitor that has told it.
    own_addr: Cell<Option<EntityAddr>>,
}

impl CurrentMonitor {
    /// Returns the connection.
    pub(super) fn connection(&self) -> Option<Connection> {
        self.connection.borrow().clone()
    }

    /// Returns the address of this client, as seen by the monitors.
    pub(super) fn own_addr(&self) -> Option<EntityAddr> {
        self.own_addr.get()
    }

    /// Returns whether the last authentication is at least `age` old.
    pub(super) fn is_older_than(&self, age: Duration) -> bool {
        self.authenticated.get().is_some_and(|since| since.elapsed() >= age)
    }

    fn accepted_by(&self, connection: &Connection) {
        *self.connection.borrow_mut() = Some(connection.clone());
        self.authenticated.set(Some(now()));
        self.own_addr.set(connection.own_addr().or(self.own_addr.get()));
    }

    fn disconnected(&self) {
        self.connection.borrow_mut().take();
    }
}

/// Maintains a connection to one of the monitors until the session is closed.
pub(super) async fn maintain(shared: Rc<MonitorSession>) {
    while !shared.closed.get() {
        // Set while every monitor of this round has denied access.
        let mut all_refuse = true;
        for monitor in shared.addresses() {
            let Some(messenger) = shared.messenger.borrow().clone() else { return };
            let connection = messenger.connect(&Address::Tcp(monitor), Policy::LossyClient);
            let reason = match timeout(MONITOR_TIMEOUT, connection.ready()).await {
                Ok(Ok(())) => serve(&shared, &connection).await,
                Ok(Err(reason)) => reason,
                Err(_) => DisconnectReason::Handshake("connecting"),
            };
            connection.close();
            shared.current.disconnected();
            if shared.closed.get() {
                return;
            }
            all_refuse &= record(&shared, monitor, &reason) == ErrorKind::Denied;
        }
        if let Some(error) = shared.attempts.last_error().filter(|_| all_refuse) {
            shared.listener.refused(Some(denied_by_all(error)));
        }
        shared.attempts.end_round();
        shared.changed.notify_all();
        let _ = timeout(PAUSE, shared.changed.wait_until(|| shared.closed.get())).await;
    }
}

/// Uses a monitor connection until it ends.
async fn serve(shared: &Rc<MonitorSession>, connection: &Connection) -> DisconnectReason {
    shared.current.accepted_by(connection);
    shared.attempts.succeeded();
    shared.listener.refused(None);
    tracing::debug!(monitor = %connection.address(), client = shared.ticket_store.global_id(), "authenticated with a monitor");
    shared.subscribe();
    shared.requests.send_all(connection);
    shared.changed.notify_all();
    connection.ended().await
}

/// Records and logs why a monitor connection was lost; returns the kind of the error.
fn record(shared: &MonitorSession, monitor: SocketAddr, reason: &DisconnectReason) -> ErrorKind {
    let name = format!("client.{}", shared.config.id);
    let loss = MonitorLoss::of(monitor, &name, shared.ticket_store.global_id(), reason);
    let is_new = shared.attempts.failed(loss.error());
    match &loss {
        MonitorLoss::Conflict(error) if is_new => tracing::warn!("{}", error.context()),
        MonitorLoss::Conflict(_) => {}
        MonitorLoss::IdentityRejected(error) => {
            tracing::warn!("{}", error.context());
            shared.ticket_store.clear();
        }
        MonitorLoss::Denied(_) | MonitorLoss::Unreachable(_) => {
            tracing::info!(%monitor, %reason, "the connection to a monitor is lost");
        }
    }
    loss.error().kind()
}
