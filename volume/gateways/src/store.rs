//! Group record in a pool: reads, changes by compare-and-set, announcements to other members, and the local copy.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    Error, ErrorKind, Notification, ObjectBackend, ObjectName, ObjectOp, Result, SharedObjects, Transaction, Watch,
    WatchHandler, Watcher,
};
use forebay_reactor::spawn;
use forebay_reactor::sync::Semaphore;
use serde::{Deserialize, Serialize};

use crate::record::{
    ChangeRefusal, GROUP_KEY, GroupChange, GroupIdentity, GroupRecord, GroupVersions, KeyChange, MalformedGroup,
};

/// Beginning of the name of a group's object; the name of the group follows.
pub const OBJECT_PREFIX: &str = "forebay_gateways.";
/// Maximum length of the name of a group in bytes.
pub const GROUP_NAME_MAX: usize = 200;

/// Keys that are read at once.
const PAGE: usize = 1024;
/// Number of times that a change is tried again because others have changed the record meanwhile.
const ATTEMPTS: u32 = 50;
/// Number of times that a record is read again because it has changed while it was read.
const READS: u32 = 20;
/// Maximum length of the changes that an announcement has; longer ones are read by the others.
const ANNOUNCED_MAX: usize = 32 << 10;
/// Time that others have to acknowledge an announcement, which nobody waits for.
const ANNOUNCE_MAX: Duration = Duration::from_secs(2);

/// Announcement of a change, to all that watch the record.
#[derive(Serialize, Deserialize)]
struct Announcement {
    epoch: u64,
    /// Keys and values that were set or removed, where they are short.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    keys: Vec<(String, Option<String>)>,
}

struct KnownRecord {
    record: Rc<GroupRecord>,
    /// Stored entry of the group, which a change compares.
    group: Vec<u8>,
}

/// Group record in a pool.
pub struct GroupStore {
    backend: Rc<dyn ObjectBackend>,
    shared: Rc<dyn SharedObjects>,
    object: ObjectName,
    name: String,
    known: RefCell<Option<KnownRecord>>,
    /// Versions of the record that this program works with.
    versions: GroupVersions,
    /// Serializes changes of this process.
    turn: Semaphore,
}

impl GroupStore {
    /// Creates the access to the record of the group `name` in a pool, without reading it.
    ///
    /// # Errors
    /// `Unsupported` if several clients cannot use the pool at once; `Invalid` for a name that a group cannot have.
    pub fn new(backend: &Rc<dyn ObjectBackend>, name: &str) -> Result<Rc<Self>> {
        Self::with_versions(backend, name, GroupVersions::OWN)
    }

    /// Creates the access to a record for a program that works with these versions of it.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_versions(backend: &Rc<dyn ObjectBackend>, name: &str, versions: GroupVersions) -> Result<Rc<Self>> {
        let Some(shared) = backend.shared() else {
            let text = format!(
                "pool '{}' is not in a Ceph cluster: only there can several daemons share volumes",
                backend.info().pool
            );
            return Err(Error::new(ErrorKind::Unsupported, text));
        };
        if name.is_empty()
            || name.len() > GROUP_NAME_MAX
            || name.chars().any(|c| c.is_control() || matches!(c, '/' | '@'))
        {
            let text = format!("'{}' cannot be the name of a gateway group", name.escape_debug());
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        Ok(Rc::new(Self {
            backend: backend.clone(),
            shared,
            object: ObjectName::new(format!("{OBJECT_PREFIX}{name}")),
            name: name.to_owned(),
            known: RefCell::default(),
            versions,
            turn: Semaphore::new(1),
        }))
    }

    /// Returns the name of the group.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the client through which the record is reached.
    pub fn shared(&self) -> &Rc<dyn SharedObjects> {
        &self.shared
    }

    /// Returns the record as it was read or announced last.
    pub fn known(&self) -> Option<Rc<GroupRecord>> {
        self.known.borrow().as_ref().map(|known| known.record.clone())
    }

    fn malformed(&self, error: &MalformedGroup) -> Error {
        let kind = match error {
            MalformedGroup::None => ErrorKind::NotFound,
            MalformedGroup::Version { .. } | MalformedGroup::Features(_) => ErrorKind::Unsupported,
            MalformedGroup::Entry { .. } | MalformedGroup::Contradiction(_) => ErrorKind::Corrupt,
        };
        Error::new(kind, format!("gateway group '{}': {error}", self.name))
    }

    fn named(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::NotFound => {
                Error::new(ErrorKind::NotFound, format!("there is no gateway group '{}'", self.name))
            }
            _ => error.within(format_args!("gateway group '{}'", self.name)),
        }
    }

    /// Creates the group.
    ///
    /// # Errors
    /// `Exists` if there is one of this name.
    pub async fn create(&self, identity: GroupIdentity) -> Result<()> {
        let record = GroupRecord::created(identity, self.versions.newest);
        let pairs = vec![(GROUP_KEY.to_vec(), record.encode_group())];
        let steps = vec![ObjectOp::Create { exclusive: true }, ObjectOp::KvSet { pairs }];
        let created = self.backend.submit(&self.object, Transaction::new(steps).durable()).await;
        created.map(drop).map_err(|error| match error.kind() {
            ErrorKind::Exists => {
                Error::new(ErrorKind::Exists, format!("there is a gateway group '{}' already", self.name))
            }
            _ => self.named(error),
        })
    }

    /// Removes the group, which has no members and no volumes.
    ///
    /// # Errors
    /// `Busy` if it has; `NotFound` if there is no such group.
    pub async fn remove(&self) -> Result<()> {
        loop {
            let record = self.load().await?;
            if !record.members().is_empty() || !record.volumes().is_empty() {
                let (members, volumes) = (record.members().len(), record.volumes().len());
                let text = format!("gateway group '{}' has {members} members and {volumes} volumes", self.name);
                return Err(Error::new(ErrorKind::Busy, text));
            }
            let value = self.known.borrow().as_ref().map(|known| known.group.clone());
            let guard = ObjectOp::KvCompare { key: GROUP_KEY.to_vec(), value };
            let removed =
                self.backend.submit(&self.object, Transaction::new(vec![guard, ObjectOp::Remove]).durable()).await;
            match removed {
                Err(error) if error.kind() == ErrorKind::Guard => {}
                removed => return removed.map(drop).map_err(|error| self.named(error)),
            }
        }
    }

    async fn group_entry(&self) -> Result<Vec<u8>> {
        let values = self.backend.kv_get(&self.object, vec![GROUP_KEY.to_vec()]).await;
        let value = values.map_err(|error| self.named(error))?.pop().flatten();
        value.ok_or_else(|| self.malformed(&MalformedGroup::None))
    }

    /// Reads the record.
    ///
    /// # Errors
    /// `NotFound` if there is no such group; `Corrupt`, `Unsupported`; errors of the pool.
    pub async fn load(&self) -> Result<Rc<GroupRecord>> {
        let mut group = self.group_entry().await?;
        for _ in 0..READS {
            let mut pairs = Vec::new();
            loop {
                let after = pairs.last().map_or(&[][..], |(key, _): &(Vec<u8>, Vec<u8>)| key);
                let page =
                    self.backend.kv_list(&self.object, b"", after, PAGE).await.map_err(|error| self.named(error))?;
                pairs.extend(page.pairs);
                if !page.more {
                    break;
                }
            }
            // Pages of different epochs are no record.
            let again = self.group_entry().await?;
            if again == group && pairs.iter().any(|(key, value)| key == GROUP_KEY && *value == group) {
                let record = GroupRecord::decode(pairs, self.versions).map_err(|error| self.malformed(&error))?;
                return Ok(self.learn(record, group));
            }
            group = again;
        }
        Err(Error::new(ErrorKind::Busy, format!("gateway group '{}' changes faster than it can be read", self.name)))
    }

    /// Reads the record if it has changed since it was read last.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub async fn refresh(&self) -> Result<Rc<GroupRecord>> {
        let group = self.group_entry().await?;
        let same = self.known.borrow().as_ref().filter(|known| known.group == group).map(|known| known.record.clone());
        match same {
            Some(record) => Ok(record),
            None => self.load().await,
        }
    }

    fn learn(&self, record: GroupRecord, group: Vec<u8>) -> Rc<GroupRecord> {
        let mut known = self.known.borrow_mut();
        if let Some(newer) = known.as_mut().filter(|known| known.record.epoch() >= record.epoch()) {
            if newer.record.epoch() == record.epoch() {
                // As it is stored, which another version may have written with other fields.
                newer.group = group;
            }
            return newer.record.clone();
        }
        known.insert(KnownRecord { record: Rc::new(record), group }).record.clone()
    }

    /// Makes changes in one step, and announces them.  Where others have changed the record meanwhile, they are tried again
    /// on what it is then.
    ///
    /// # Errors
    /// Errors of the pool: the change was made or not.  The inner one: it is refused.
    pub async fn change(&self, changes: &[GroupChange]) -> Result<std::result::Result<Rc<GroupRecord>, ChangeRefusal>> {
        let _turn = self.turn.acquire(1).await;
        if self.known.borrow().is_none() {
            self.load().await?;
        }
        for _ in 0..ATTEMPTS {
            let (mut record, group) = {
                let known = self.known.borrow();
                let known = known.as_ref().expect("loaded above");
                ((*known.record).clone(), known.group.clone())
            };
            let keys = match record.apply(changes) {
                Ok(keys) => keys,
                // It may be allowed by what the record is by now.
                Err(refusal) => {
                    let before = record.epoch();
                    if self.refresh().await?.epoch() == before {
                        return Ok(Err(refusal));
                    }
                    continue;
                }
            };
            let stored = record.encode_keys(&keys);
            match self.submit(group, &stored).await {
                Ok(()) => {
                    let record = self.learn(record.clone(), record.encode_group());
                    self.announce(&record, stored);
                    return Ok(Ok(record));
                }
                Err(error) if error.kind() == ErrorKind::Guard => drop(self.refresh().await?),
                Err(error) => return Err(self.named(error)),
            }
        }
        Err(Error::new(
            ErrorKind::Busy,
            format!("gateway group '{}' is being changed by others all the time", self.name),
        ))
    }

    async fn submit(&self, group: Vec<u8>, stored: &[KeyChange]) -> Result<()> {
        let mut steps = vec![ObjectOp::KvCompare { key: GROUP_KEY.to_vec(), value: Some(group) }];
        let set = stored.iter().filter_map(|(key, value)| Some((key.clone(), value.clone()?)));
        steps.push(ObjectOp::KvSet { pairs: set.collect() });
        let removed: Vec<_> = stored.iter().filter(|(_, value)| value.is_none()).map(|(key, _)| key.clone()).collect();
        if !removed.is_empty() {
            steps.push(ObjectOp::KvRemove { keys: removed });
        }
        self.backend.submit(&self.object, Transaction::new(steps).durable()).await.map(drop)
    }

    /// Announces a change in the background: who misses it reads the record a little later.
    fn announce(&self, record: &Rc<GroupRecord>, stored: Vec<KeyChange>) {
        let len: usize = stored.iter().map(|(key, value)| key.len() + value.as_ref().map_or(0, Vec::len)).sum();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("JSON, and keys of names");
        let keys = if len > ANNOUNCED_MAX { Vec::new() } else { stored };
        let keys = keys.into_iter().map(|(key, value)| (text(key), value.map(text))).collect();
        let payload =
            serde_json::to_vec(&Announcement { epoch: record.epoch(), keys }).expect("plain data becomes JSON");
        let (shared, object) = (self.shared.clone(), self.object.clone());
        drop(spawn(async move {
            if let Err(error) = shared.notify(&object, payload, ANNOUNCE_MAX).await {
                tracing::debug!(%object, %error, "cannot announce a change of a gateway group");
            }
        }));
    }

    /// Takes an announcement.  Returns whether the record must be read.
    fn take_announcement(&self, payload: &[u8]) -> bool {
        let Ok(Announcement { epoch, keys }) = serde_json::from_slice(payload) else { return true };
        let mut known = self.known.borrow_mut();
        let Some(known) = known.as_mut() else { return true };
        if epoch <= known.record.epoch() {
            return false;
        }
        let keys: Vec<KeyChange> =
            keys.into_iter().map(|(key, value)| (key.into_bytes(), value.map(String::into_bytes))).collect();
        let mut record = (*known.record).clone();
        let group = keys.iter().find(|(key, _)| key == GROUP_KEY).and_then(|(_, value)| value.clone());
        match (record.follow(&keys, self.versions), group) {
            (Ok(true), Some(group)) => {
                known.group = group;
                known.record = Rc::new(record);
                false
            }
            _ => true,
        }
    }

    /// Watches the record: `changed` is called when it has been announced, with `true` if it must be read.
    ///
    /// # Errors
    /// Errors of the pool.
    pub async fn watch(self: &Rc<Self>, changed: impl Fn(bool) + 'static) -> Result<RecordWatch> {
        let broken = Rc::new(Cell::new(false));
        let handler =
            RecordWatchHandler { store: Rc::downgrade(self), broken: broken.clone(), changed: Box::new(changed) };
        let watch = self.shared.watch(&self.object, Rc::new(handler)).await.map_err(|error| self.named(error))?;
        Ok(RecordWatch { watch, broken })
    }

    /// Returns the clients that watch the record.
    ///
    /// # Errors
    /// Errors of the pool.
    pub async fn watchers(&self) -> Result<Vec<Watcher>> {
        self.shared.watchers(&self.object).await.map_err(|error| self.named(error))
    }
}

/// Watch of a group record.
pub struct RecordWatch {
    watch: Box<dyn Watch>,
    broken: Rc<Cell<bool>>,
}

impl RecordWatch {
    /// Returns whether it is lost, and another one is needed.
    pub fn is_broken(&self) -> bool {
        self.broken.get()
    }

    /// Ends the watch.
    ///
    /// # Errors
    /// Errors of the pool.
    pub async fn end(self) -> Result<()> {
        self.watch.end().await
    }
}

struct RecordWatchHandler {
    store: Weak<GroupStore>,
    broken: Rc<Cell<bool>>,
    changed: Box<dyn Fn(bool)>,
}

impl WatchHandler for RecordWatchHandler {
    fn notified(&self, notification: Notification) {
        let Some(store) = self.store.upgrade() else { return };
        let Notification { id, cookie, payload, .. } = notification;
        let must_read = store.take_announcement(&payload);
        drop(spawn(async move {
            let _ = store.shared.answer_notification(&store.object, id, cookie, Vec::new()).await;
        }));
        (self.changed)(must_read);
    }

    fn broken(&self, error: Error) {
        self.broken.set(true);
        if error.kind() != ErrorKind::Fenced {
            tracing::warn!(%error, "the watch of a gateway group was lost");
        }
        (self.changed)(true);
    }
}
