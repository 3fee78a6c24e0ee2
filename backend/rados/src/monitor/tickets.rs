//! Renewal of tickets before they expire.

use std::rc::Weak;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_messenger::wire::entity;
use forebay_reactor::{BufList, random, sleep};

use super::wire::{self, kind};
use super::{MonitorSession, Monitors, SERVICES, malformed};

/// Maximum interval between ticket renewals.
const RENEWAL_MAX: Duration = Duration::from_secs(3600);
/// Minimum interval between ticket renewals, however short their validity.
const RENEWAL_MIN: Duration = Duration::from_secs(5);

/// Renews tickets when half of their validity has passed.
pub(super) async fn maintain(shared: Weak<MonitorSession>) {
    let mut due = None;
    loop {
        sleep(due.unwrap_or(RENEWAL_MIN)).await;
        let Some(session) = shared.upgrade() else { return };
        if session.closed.get() {
            return;
        }
        let half = |service: u8| {
            let ticket = session.ticket_store.ticket(service.into())?;
            Some(Duration::from_secs(u64::from(ticket.valid_seconds) / 2))
        };
        let (Some(own), Some(osd)) = (half(entity::AUTH), half(entity::OSD)) else { continue };
        if due.is_some() {
            let connection = session.current.connection().filter(|_| session.current.is_older_than(own));
            if let Some(connection) = connection {
                // The monitors' own ticket is only issued by authentication.
                connection.close();
            } else if let Err(error) = renew_now(&Monitors(session)).await {
                tracing::warn!(%error, "cannot renew tickets; retrying");
                due = Some(RENEWAL_MIN);
                continue;
            }
        }
        due = Some(own.min(osd).clamp(RENEWAL_MIN, RENEWAL_MAX));
    }
}

/// Requests new tickets.  The monitors' own ticket is renewed by authenticating again.
pub(crate) async fn renew_now(monitors: &Monitors) -> Result<()> {
    let ticket_store = monitors.0.ticket_store.clone();
    let Some(payload) = ticket_store.renewal(SERVICES, random()) else { return Ok(()) };
    let reply = monitors.request(kind::AUTH, (1, 1), &wire::auth(&payload), BufList::new()).await?;
    let (status, payload) = wire::auth_reply(&reply.front.to_vec()).map_err(malformed)?;
    if status < 0 {
        return Err(crate::error::failure(status, "renewing tickets"));
    }
    let refused = |error| Error::new(ErrorKind::Denied, format!("renewing tickets: {error}"));
    ticket_store.renewed(&payload).map_err(refused)
}
