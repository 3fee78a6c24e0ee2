//! Namespaces that a queue uses.

use std::collections::BTreeSet;
use std::rc::Rc;

use super::OpenNamespace;

/// Namespaces that a queue has used, and the last of them kept open.
///
/// 1. The kept namespace was not withdrawn when the withdrawal count had the value that is stored with it, so that it
///    is good for commands while the count stays the same.
/// 2. Once the count has changed, the namespace is released with the next turn of the connection: a withdrawal may be
///    waiting for it.
#[derive(Default)]
pub(super) struct UsedNamespaces {
    /// Namespace of the last command, and the withdrawal count when it was looked up.
    last: Option<(u64, Rc<OpenNamespace>)>,
    used: BTreeSet<u32>,
}

impl UsedNamespaces {
    /// Returns the namespace of the last command, if it has this id and nothing was withdrawn since.  Releases it
    /// otherwise.
    pub(super) fn last(&mut self, withdrawals: u64, nsid: u32) -> Option<Rc<OpenNamespace>> {
        if let Some((seen, last)) = &self.last
            && *seen == withdrawals
            && last.info.nsid == nsid
        {
            return Some(last.clone());
        }
        self.last = None;
        None
    }

    /// Keeps a namespace that was looked up at this withdrawal count.  Returns whether the queue uses it for the first
    /// time.
    pub(super) fn keep(&mut self, withdrawals: u64, namespace: &Rc<OpenNamespace>) -> bool {
        debug_assert!(self.last.is_none(), "the former one is released first");
        self.last = Some((withdrawals, namespace.clone()));
        self.used.insert(namespace.info.nsid)
    }

    /// Releases the kept namespace if any namespace was withdrawn since.
    pub(super) fn release_withdrawn(&mut self, withdrawals: u64) {
        self.last.take_if(|(seen, _)| *seen != withdrawals);
    }

    /// Releases the kept namespace.
    pub(super) fn release(&mut self) {
        self.last = None;
    }
}
