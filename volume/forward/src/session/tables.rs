//! Reservation tables as a forwarder receives them.

use std::sync::Arc;

use forebay_block::reservation::ReservationTable;

use crate::wire::NumberedTable;

/// Handling of a table that a forwarder has received.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReceivedTable {
    /// Number of the newest table at this forwarder, by which it marks requests.
    pub number: u64,
    /// True if the table differs from the one before, and is to be published.
    pub is_new: bool,
    /// True if a newer table was received in the same session before.
    pub is_superseded: bool,
}

/// Tables that a forwarder has received, over all sessions.
///
/// A table of another session has the same number here only if it is the same, with the same revision: then no change was
/// missed in between.  An event may be seen before the answer that opens its session, so the owner's numbers decide which
/// of the two is newer.
#[derive(Debug)]
pub struct ReceivedTables {
    newest: Arc<ReservationTable>,
    number: u64,
    /// Session in which the newest was received, and its number at the owner.
    from: (u64, u64),
}

impl ReceivedTables {
    /// Begins with the first table, which gets the number 1.
    pub fn new(session: u64, first: &NumberedTable) -> Self {
        Self { newest: first.table.clone(), number: 1, from: (session, first.number) }
    }

    /// Notes a table that was received in the session that is open or being opened.
    pub fn receive(&mut self, session: u64, received: &NumberedTable) -> ReceivedTable {
        if self.from.0 == session && received.number < self.from.1 {
            return ReceivedTable { number: self.number, is_new: false, is_superseded: true };
        }
        self.from = (session, received.number);
        let is_new = *self.newest != *received.table;
        if is_new {
            self.newest = received.table.clone();
            self.number += 1;
        }
        ReceivedTable { number: self.number, is_new, is_superseded: false }
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::reservation::{HostId, ReservationAction};

    use super::*;

    fn table(number: u64, key: u64) -> NumberedTable {
        let mut table = ReservationTable::new();
        let add = ReservationAction::Add { key, persist: None };
        table.apply(&HostId::new(b"host").expect("a host"), &add).expect("registered");
        NumberedTable { number, table: table.into() }
    }

    fn received(number: u64, is_new: bool, is_superseded: bool) -> ReceivedTable {
        ReceivedTable { number, is_new, is_superseded }
    }

    #[test]
    fn an_event_before_the_answer_that_opens_its_session_is_newer() {
        let mut tables = ReceivedTables::new(1, &table(5, 1));
        assert_eq!(tables.receive(2, &table(8, 3)), received(2, true, false));
        assert_eq!(tables.receive(2, &table(7, 2)), received(2, false, true));
        assert_eq!(tables.receive(2, &table(8, 3)), received(2, false, false));
        // Another owner has its own numbers.
        assert_eq!(tables.receive(3, &table(1, 3)), received(2, false, false), "the same table");
        assert_eq!(tables.receive(3, &table(2, 4)), received(3, true, false));
        assert_eq!(tables.receive(4, &table(2, 3)), received(4, true, false), "not the one before");
    }
}
