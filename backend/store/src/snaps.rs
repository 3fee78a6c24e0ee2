//! Snapshot numbers, and trimming of clones that only removed snapshots needed.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result, SnapId};
use forebay_reactor::sleep;

use crate::core::Core;
use crate::format::entry::StoreEntry;
use crate::keys;
use crate::object::HEAD;

const RETRY_AFTER: Duration = Duration::from_secs(1);
/// Objects processed at a time.
const PAGE: usize = 64;

impl Core {
    /// Appends an entry that concerns no single object, and applies it. Returns the batch number.
    pub fn append_global(&self, entry: &StoreEntry) -> u64 {
        let log = self.log();
        log.begin_transaction();
        log.append(entry);
        self.apply_global(entry);
        log.end_transaction()
    }

    /// Allocates a new snapshot number, durably.
    pub async fn snap_allocate(&self) -> Result<SnapId> {
        self.refuse_writes()?;
        let snap = self.counters.snap_seq() + 1;
        let seq = self.append_global(&StoreEntry::SnapAllocate { snap });
        self.log().sync(seq).await?;
        Ok(SnapId(snap))
    }

    /// Removes a snapshot number, durably; its clones are trimmed in the background.
    pub async fn snap_remove(&self, snap: SnapId) -> Result<()> {
        self.refuse_writes()?;
        if snap.0 == 0 || snap.0 > self.counters.snap_seq() {
            return Err(Error::new(ErrorKind::NotFound, format!("snapshot {}", snap.0)));
        }
        let seq = self.append_global(&StoreEntry::SnapRemove { snap: snap.0, done: false });
        self.log().sync(seq).await?;
        self.maintenance.snap_removed();
        Ok(())
    }

    async fn next_snap_to_remove(&self) -> Result<Option<u64>> {
        let prefix = [b's'];
        let found = self.index.lookup_range(&prefix, &keys::after(&prefix), 1).await?;
        Ok(found.first().and_then(|(key, _)| Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))))
    }

    async fn trim_one(self: &Rc<Self>, snap: u64) -> Result<()> {
        let prefix = keys::with_number(b'm', snap);
        // Continues behind the processed keys, because skipping deleted keys again for every page would become slower
        // and slower.  At the end, checks once more from the beginning.
        let (mut from, mut found) = (prefix.clone(), false);
        loop {
            let page = self.index.lookup_range(&from, &keys::after(&prefix), PAGE).await?;
            let Some((last, _)) = page.last() else {
                if !std::mem::take(&mut found) {
                    self.append_global(&StoreEntry::SnapRemove { snap, done: true });
                    return Ok(());
                }
                from.clone_from(&prefix);
                continue;
            };
            found = true;
            from.clone_from(last);
            from.push(0);
            for (key, _) in page {
                let Some(oid) = key.get(9..17).and_then(|bytes| Some(u64::from_be_bytes(bytes.try_into().ok()?)))
                else {
                    continue;
                };
                let Some(object) = self.by_oid(oid).await? else {
                    self.index.put(key, None);
                    continue;
                };
                let guard = self.queues.take_ticket(&object.name).wait().await;
                self.load_pages(&object, HEAD, true, 0, u32::MAX / 2).await?;
                self.refuse_writes()?;
                let left = {
                    let state = object.state();
                    state.clones.iter().find(|clone| clone.snaps.contains(&snap)).map(|clone| {
                        (clone.id, clone.snaps.iter().copied().filter(|&other| other != snap).collect::<Vec<_>>())
                    })
                };
                match left {
                    Some((clone, snaps)) => {
                        let is_last = snaps.is_empty();
                        let kv = if is_last { self.index.all_keys(oid, clone).await? } else { Vec::new() };
                        self.trim_clone(&object, clone, snaps, kv);
                    }
                    None => self.index.put(key, None),
                }
                drop(guard);
                if self.log().is_congested() {
                    self.log().wait_uncongested().await;
                }
            }
        }
    }
}

/// Trims the clones of removed snapshots, until the store closes.
pub async fn trim(core: Rc<Core>) {
    loop {
        if core.maintenance.is_closing() {
            return;
        }
        let changed = core.maintenance.next_snap_removal();
        let result = match core.next_snap_to_remove().await {
            Ok(None) => {
                changed.await;
                continue;
            }
            Ok(Some(snap)) => core.trim_one(snap).await,
            Err(error) => Err(error),
        };
        if let Err(error) = result {
            if core.maintenance.is_closing() {
                return;
            }
            tracing::warn!(?error, "cannot trim the clones of a removed snapshot; retrying in {RETRY_AFTER:?}");
            sleep(RETRY_AFTER).await;
        }
    }
}
