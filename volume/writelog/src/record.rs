//! Record of a volume's write log, which decides which log is valid.
//!
//! ```text
//!  epoch e, no log --attach--> epoch e, log --release, discard--> epoch e + 1, no log
//! ```
//!
//! | invariant | |
//! |---|---|
//! | R1 | the epoch never decreases, and increases whenever a log stops being named |
//! | R2 | a log has the epoch of the record that named it first |
//! | R3 | a log that the record has stopped naming is never named again |
//!
//! So a process that opened a log, and reads the record under the image's lock, knows from the log's id and epoch
//! whether it may still acknowledge and write back: [`LogRecord::standing`].

use crate::format::LogId;
use crate::replication::LogMembers;

/// Record of a volume's write log, stored with the image: the only arbiter of which log belongs to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogRecord<P> {
    /// Epoch, incremented whenever a log is released, so that a released log is refused permanently.
    pub epoch: u64,
    /// Log of the volume, if there is one.
    pub log: Option<RecordedLog<P>>,
}

/// Log that a record names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordedLog<P> {
    /// Id on the log device.
    pub id: LogId,
    /// Location and settings.
    pub place: P,
    /// Members of the log, if it has some. Their epoch is that of the record.
    pub members: Option<LogMembers>,
}

/// Standing of a log that was opened with an epoch, by the record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// Named by the record: it may acknowledge, be replayed and be written back.
    Current,
    /// Released by the last change of the record, possibly by a store that reported an error.
    Released,
    /// Superseded: it must neither acknowledge nor write back, and its content is stale.
    Stale,
}

impl<P> Default for LogRecord<P> {
    fn default() -> Self {
        Self { epoch: 0, log: None }
    }
}

impl<P> LogRecord<P> {
    /// Returns the record that replaces one of `epoch` whose log is released or discarded.
    pub fn released(epoch: u64) -> Self {
        Self { epoch: epoch + 1, log: None }
    }

    /// Returns the standing of a log that was opened with `epoch`.
    pub fn standing(&self, id: &LogId, epoch: u64) -> Standing {
        match &self.log {
            Some(log) if self.epoch == epoch && log.id == *id => Standing::Current,
            None if epoch.checked_add(1) == Some(self.epoch) => Standing::Released,
            _ => Standing::Stale,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Step of a host that has the image's lock.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// Attaches a log; with `true`, the record is stored but reported as failed, and corrected.
        Attach(bool),
        /// Releases the log that a handle has; with `true`, the store reports an error and is repeated.
        Release(usize, bool),
        /// Discards the log that the record names, if any.
        Discard,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => any::<bool>().prop_map(Step::Attach),
            3 => (0usize..8, any::<bool>()).prop_map(|(handle, repeated)| Step::Release(handle, repeated)),
            1 => Just(Step::Discard),
        ]
    }

    /// Handle of a log that a host has opened.
    #[derive(Debug, Clone, Copy)]
    struct Handle {
        id: LogId,
        epoch: u64,
    }

    /// Releases a log as its owner does; returns whether the record was changed or was so already.
    fn release(record: &mut LogRecord<()>, handle: Handle) -> bool {
        match record.standing(&handle.id, handle.epoch) {
            Standing::Current => *record = LogRecord::released(handle.epoch),
            Standing::Released => {}
            Standing::Stale => return false,
        }
        true
    }

    proptest! {
        /// Compares the standing of all handles with a plain model that knows which log is attached.
        #[test]
        fn one_log_at_most_is_current_and_a_released_one_never_again(steps in prop::collection::vec(step(), 0..40)) {
            let mut record = LogRecord::<()>::default();
            let mut handles: Vec<Handle> = Vec::new();
            let mut attached: Option<usize> = None;
            for (number, step) in steps.into_iter().enumerate() {
                let before = record.epoch;
                match step {
                    Step::Attach(fails) if attached.is_none() => {
                        let mut id = LogId::default();
                        id[..8].copy_from_slice(&(number as u64).to_le_bytes());
                        let epoch = record.epoch;
                        record = LogRecord { epoch, log: Some(RecordedLog { id, place: (), members: None }) };
                        handles.push(Handle { id, epoch });
                        attached = Some(handles.len() - 1);
                        if fails {
                            record = LogRecord::released(epoch);
                            attached = None;
                        }
                    }
                    Step::Attach(_) => {}
                    Step::Release(which, repeated) if which < handles.len() => {
                        let released = release(&mut record, handles[which]);
                        prop_assert!(released || attached != Some(which));
                        if repeated && released {
                            prop_assert!(release(&mut record, handles[which]), "a repeated release succeeds");
                        }
                        if attached == Some(which) {
                            attached = None;
                        }
                    }
                    Step::Release(..) => {}
                    Step::Discard => {
                        record = LogRecord::released(record.epoch);
                        attached = None;
                    }
                }
                prop_assert!(record.epoch >= before, "R1");
                for (which, handle) in handles.iter().enumerate() {
                    let standing = record.standing(&handle.id, handle.epoch);
                    prop_assert_eq!(standing == Standing::Current, attached == Some(which), "R3: {:?}", standing);
                    prop_assert!(standing != Standing::Released || attached.is_none());
                }
            }
        }
    }
}
