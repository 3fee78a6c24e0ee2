//! Persistent record of a write log in the metadata of an image, the image's lock, and the log devices that this
//! process has open.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::ready;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockRequest, ClientIdentity, DataKey, Error, ErrorKind, InFlightTracker, LocalFuture, Result,
};
use forebay_image::{Image, KeptLock};
use forebay_reactor::sync::KeyedLock;
use forebay_writelog::format::LOGS_AT;
use forebay_writelog::replication::{LogMembers, MemberEntry, MemberState, PeerId, ReplicaPolicy};
use forebay_writelog::{
    DirtyLimits, LogKeeper, LogOptions, LogRecord, PeerAccess, Persist, PlaceChange, RecordedLog, Shelf, ShelfOptions,
    id_text, parse_id,
};
use serde::{Deserialize, Serialize};

use super::replicas::LogPeers;
use crate::api;
use crate::config::ReplicaSettings;

/// Time for which a client whose log was taken over stays fenced: longer than a suspended machine may sleep.
const FENCED: Duration = Duration::from_secs(30 * 24 * 3600);

/// Metadata key of an image's log record.
const RECORD_KEY: &str = "forebay.writelog";

/// Stored form of the record, in JSON.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct StoredRecord {
    epoch: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log: Option<StoredLog>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoredLog {
    id: String,
    place: api::LogPlace,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    members: Option<StoredMembers>,
}

/// Stored form of the members of a log; their epoch is that of the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoredMembers {
    term: u64,
    primary: String,
    client: String,
    copies: BTreeMap<String, StoredMember>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoredMember {
    state: StoredState,
    copy: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum StoredState {
    Complete,
    Filling,
}

impl StoredMembers {
    fn new(members: &LogMembers) -> Self {
        let copies = members.members().map(|(peer, MemberEntry { state, copy })| {
            let state = match state {
                MemberState::Complete => StoredState::Complete,
                MemberState::Filling => StoredState::Filling,
            };
            (id_text(&peer.0), StoredMember { state, copy: id_text(&copy) })
        });
        Self {
            term: members.term(),
            primary: id_text(&members.primary().0),
            client: members.client().clone(),
            copies: copies.collect(),
        }
    }

    /// Returns the members of a record of `epoch`, or what is wrong with them.
    fn decode(&self, epoch: u64) -> std::result::Result<LogMembers, String> {
        let id = |text: &str| parse_id(text).ok_or_else(|| format!("'{text}' is not an id"));
        let copies = self.copies.iter().map(|(peer, StoredMember { state, copy })| {
            let state = match state {
                StoredState::Complete => MemberState::Complete,
                StoredState::Filling => MemberState::Filling,
            };
            Ok((PeerId(id(peer)?), MemberEntry { state, copy: id(copy)? }))
        });
        let copies = copies.collect::<std::result::Result<Vec<_>, String>>()?;
        let opened = (PeerId(id(&self.primary)?), self.client.clone());
        let members = LogMembers::stored((epoch, self.term), opened, copies);
        members.ok_or_else(|| format!("no log has these members in epoch {epoch}"))
    }
}

/// Reads the log record of an image.
///
/// # Errors
/// Errors of the image; [`ErrorKind::Corrupt`] for a malformed record.
pub async fn load_record(image: &Image) -> Result<LogRecord<api::LogPlace>> {
    let Some(stored) = image.metadata(RECORD_KEY).await? else { return Ok(LogRecord::default()) };
    decode_record(&stored)
}

fn decode_record(stored: &[u8]) -> Result<LogRecord<api::LogPlace>> {
    let damaged = |why: String| {
        Error::new(ErrorKind::Corrupt, format!("the record of the image's write log is malformed: {why}"))
    };
    let StoredRecord { epoch, log } = serde_json::from_slice(stored).map_err(|error| damaged(error.to_string()))?;
    if epoch == u64::MAX {
        // The next release would need an epoch after it.
        return Err(damaged(format!("its epoch {epoch} has no successor")));
    }
    let Some(StoredLog { id, place, members }) = log else { return Ok(LogRecord { epoch, log: None }) };
    let id = parse_id(&id).ok_or_else(|| damaged(format!("'{id}' is not the id of a log")))?;
    let members = members.map(|members| members.decode(epoch)).transpose().map_err(damaged)?;
    Ok(LogRecord { epoch, log: Some(RecordedLog { id, place, members }) })
}

fn encode_record(record: LogRecord<api::LogPlace>) -> Vec<u8> {
    let log = record.log.map(|RecordedLog { id, place, members }| StoredLog {
        id: id_text(&id),
        place,
        members: members.as_ref().map(StoredMembers::new),
    });
    serde_json::to_vec(&StoredRecord { epoch: record.epoch, log }).expect("plain data becomes JSON")
}

/// Open log devices, by path.
#[derive(Default)]
pub struct LogDevices {
    open: RefCell<BTreeMap<PathBuf, Weak<Shelf>>>,
    /// Log device in the memory of this process, which lasts as long as it does.
    memory: RefCell<Option<Rc<Shelf>>>,
    /// Per-path locks for opening a device: opening locks the file.
    turns: KeyedLock<PathBuf>,
}

impl LogDevices {
    /// Opens the log device at a place, or shares it; with `create`, creates it and space for one more log.
    ///
    /// # Errors
    /// Errors of [`Shelf::open`].
    pub async fn open(&self, place: &api::LogPlace, create: bool) -> Result<Rc<Shelf>> {
        let room = if create { place.size } else { 0 };
        let options = ShelfOptions { create, room, force: place.force, ..ShelfOptions::default() };
        self.open_with(place.medium, &place.path, options).await
    }

    /// Opens the log device for copies of other daemons' logs, or creates it. A file grows with its copies; persistent
    /// memory, which cannot grow while it is mapped, has space for the quota from the beginning.
    ///
    /// # Errors
    /// Errors of [`Shelf::open`].
    pub async fn open_for_copies(&self, settings: &ReplicaSettings) -> Result<Rc<Shelf>> {
        if settings.medium == api::LogMedium::Dram {
            // Apart from this daemon's own logs, which do not count towards the quota.
            return Shelf::in_process().await;
        }
        let size = settings.quota.saturating_add(LOGS_AT);
        let options = ShelfOptions { create: true, size, force: settings.force, ..ShelfOptions::default() };
        let shelf = self.open_with(settings.medium, &settings.path, options).await?;
        shelf.keep_file();
        Ok(shelf)
    }

    async fn open_with(&self, medium: api::LogMedium, path: &Path, options: ShelfOptions) -> Result<Rc<Shelf>> {
        let _turn = self.turns.lock(&path.to_owned()).await;
        if medium == api::LogMedium::Dram {
            let known = self.memory.borrow().clone();
            return match known {
                Some(shelf) => Ok(shelf),
                None => {
                    let shelf = Shelf::in_process().await?;
                    Ok(self.memory.borrow_mut().insert(shelf).clone())
                }
            };
        }
        if let Some(shelf) = self.open.borrow().get(path).and_then(Weak::upgrade).filter(|shelf| !shelf.is_removed()) {
            return Ok(shelf);
        }
        let shelf = Shelf::open(medium.into(), path, options).await?;
        self.open.borrow_mut().insert(path.to_owned(), Rc::downgrade(&shelf));
        Ok(shelf)
    }
}

/// Returns the name of a client of a cluster in the record of a log.
pub fn client_name(client: &ClientIdentity) -> String {
    format!("client.{} {}", client.number, client.address)
}

/// Reads the name of a client from the record of a log.
pub fn parse_client(name: &str) -> Option<ClientIdentity> {
    let (number, address) = name.strip_prefix("client.")?.split_once(' ')?;
    Some(ClientIdentity { number: number.parse().ok()?, address: address.to_owned() })
}

/// Returns the limits of a log: its own, or the configured ones.
pub fn limits_of(place: &api::LogPlace, configured: DirtyLimits) -> DirtyLimits {
    DirtyLimits {
        bytes_max: place.dirty_max.or(configured.bytes_max),
        age_max: place.dirty_age_ms.map_or(configured.age_max, Duration::from_millis),
    }
}

/// Image that may have a write log.
pub struct ImageLog {
    /// Image behind the log.
    pub image: Rc<Image>,
    /// Identity of the image, which is stored in its log.
    pub volume_id: String,
    /// Identity of the image that all daemons have for it, if it is in a Ceph cluster.
    pub shared_id: Option<String>,
    /// Access to other daemons, where this process is one.
    pub peers: Option<Rc<LogPeers>>,
    /// Name of the image, for messages.
    pub name: String,
    /// Set if the image is in the pool that ends with the daemon.
    pub passing: bool,
    /// Limits of logs that specify none.
    pub configured: DirtyLimits,
    /// Log devices of this process.
    pub devices: Rc<LogDevices>,
    /// Changes from hosts that are in flight.
    pub changes: Rc<InFlightTracker>,
    /// Client that was fenced last for this image: once is enough.
    pub fenced: Rc<RefCell<Option<String>>>,
}

impl LogKeeper for ImageLog {
    type Place = api::LogPlace;
    type Lock = KeptLock;

    fn volume_id(&self) -> String {
        self.volume_id.clone()
    }

    fn shared_id(&self) -> String {
        self.shared_id.clone().unwrap_or_else(|| self.volume_id.clone())
    }

    fn volume_name(&self) -> String {
        self.name.clone()
    }

    fn key(&self) -> LocalFuture<Result<Option<DataKey>>> {
        Box::pin(ready(self.image.log_key()))
    }

    fn load(&self) -> LocalFuture<Result<LogRecord<api::LogPlace>>> {
        let image = self.image.clone();
        Box::pin(async move { load_record(&image).await })
    }

    fn store(&self, record: LogRecord<api::LogPlace>) -> LocalFuture<Result<()>> {
        let image = self.image.clone();
        Box::pin(async move {
            image.set_metadata(RECORD_KEY, Some(encode_record(record))).await?;
            // The record must be durable before anything relies on it.
            image.submit(BlockRequest::Flush).await.map(drop)
        })
    }

    fn replace(&self, from: LogRecord<api::LogPlace>, to: LogRecord<api::LogPlace>) -> LocalFuture<Result<bool>> {
        let image = self.image.clone();
        Box::pin(async move {
            // The guard is what is stored, which another version may have written with other fields.
            let Some(stored) = image.metadata(RECORD_KEY).await? else { return Ok(false) };
            if decode_record(&stored)? != from {
                return Ok(false);
            }
            let replaced = image.replace_metadata(RECORD_KEY, Some(stored), Some(encode_record(to))).await?;
            image.submit(BlockRequest::Flush).await?;
            Ok(replaced)
        })
    }

    fn lock(&self) -> LocalFuture<Result<KeptLock>> {
        let image = self.image.clone();
        Box::pin(async move {
            // Kept before the lock is taken: another client would not see the writes that the log has acknowledged,
            // and write-back would then overwrite what that client wrote.
            let kept = image.keep_lock();
            image.take_lock().await?;
            Ok(kept)
        })
    }

    fn drain_changes(&self) -> LocalFuture<()> {
        let changes = self.changes.clone();
        Box::pin(async move { changes.drain().await })
    }

    fn shelf(&self, place: &api::LogPlace, create: bool) -> LocalFuture<Result<Rc<Shelf>>> {
        let (devices, place) = (self.devices.clone(), place.clone());
        let (name, volume_id) = (self.name.clone(), self.volume_id.clone());
        let passing = create && self.passing;
        Box::pin(async move {
            let shelf = devices.open(&place, create).await?;
            if passing {
                // Logs of images that ended with an earlier daemon are orphaned.
                for id in shelf.ids() {
                    let info = shelf.inspect(&id).await?;
                    if !info.open && info.name == name && info.volume != volume_id {
                        shelf.discard(&id).await?;
                    }
                }
            }
            Ok(shelf)
        })
    }

    fn log_size(&self, place: &api::LogPlace) -> u64 {
        place.size
    }

    fn options(&self, place: &api::LogPlace) -> LogOptions {
        let persist = if place.on_flush { Persist::OnFlush } else { Persist::OnWrite };
        LogOptions { persist, limits: limits_of(place, self.configured), ..LogOptions::default() }
    }

    fn compare(&self, is: &api::LogPlace, wanted: &api::LogPlace) -> PlaceChange {
        is.change_to(wanted)
    }

    fn adjusted(&self, is: &api::LogPlace, wanted: &api::LogPlace) -> api::LogPlace {
        is.adjusted_to(wanted)
    }

    fn moved(&self, place: &api::LogPlace, shelf: &Rc<Shelf>, former: PeerId) -> api::LogPlace {
        let own = self.peers.as_ref().map_or(former, |peers| peers.own());
        place.moved_to((shelf.medium().into(), shelf.path().into()), own, former)
    }

    fn peers(&self) -> Option<Rc<dyn PeerAccess>> {
        self.peers.clone().map(|peers| peers as Rc<dyn PeerAccess>)
    }

    fn wanted(&self, place: &api::LogPlace) -> Vec<PeerId> {
        place.replica_ids()
    }

    fn policy(&self, place: &api::LogPlace) -> ReplicaPolicy {
        place.policy()
    }

    fn client(&self) -> String {
        self.image.client().map_or_else(String::new, |client| client_name(&client))
    }

    fn fence(&self, client: &str) -> LocalFuture<Result<()>> {
        let (image, name, fenced) = (self.image.clone(), client.to_owned(), self.fenced.clone());
        Box::pin(async move {
            if fenced.borrow().as_ref() == Some(&name) {
                return Ok(());
            }
            let Some(client) = parse_client(&name) else {
                let text = format!("the record of the write log names the client '{name}', which cannot be fenced");
                return Err(Error::new(ErrorKind::Corrupt, text));
            };
            image.fence(&client, FENCED).await?;
            tracing::warn!(image = image.name(), client = name, "fenced the client of a write log's former primary");
            fenced.replace(Some(name));
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn records_are_read_as_they_were_always_written() {
        let stored = br#"{"epoch":3,"log":{"id":"000102030405060708090a0b0c0d0e0f","place":{"medium":"ssd","path":"/l","size":16777216}}}"#;
        let record = decode_record(stored).expect("a record");
        assert_eq!((record.epoch, record.log.as_ref().map(|log| log.id[15])), (3, Some(15)));
        assert_eq!(encode_record(record), stored);
        let stored = br#"{"epoch":9,"log":{"id":"000102030405060708090a0b0c0d0e0f","place":{"medium":"ssd","path":"/l","size":16777216},"members":{"term":7,"primary":"01010101010101010101010101010101","client":"client.4","copies":{"01010101010101010101010101010101":{"state":"complete","copy":"02020202020202020202020202020202"},"03030303030303030303030303030303":{"state":"filling","copy":"04040404040404040404040404040404"}}}}}"#;
        let record = decode_record(stored).expect("a record with members");
        let members = record.log.as_ref().and_then(|log| log.members.clone()).expect("members");
        assert_eq!((members.epoch(), members.term(), members.primary()), (9, 7, PeerId([1; 16])));
        assert_eq!(members.state(PeerId([3; 16])), Some(MemberState::Filling));
        assert_eq!(encode_record(record), stored);
        let alone = String::from_utf8_lossy(stored).replace("complete", "filling");
        assert_eq!(decode_record(alone.as_bytes()).expect_err("nobody is complete").kind(), ErrorKind::Corrupt);
        assert_eq!(decode_record(b"{\"epoch\":4}").expect("a record"), LogRecord { epoch: 4, log: None });
        for damaged in [
            &b"{"[..],
            b"{\"epoch\":18446744073709551615}",
            b"{\"epoch\":1,\"log\":{\"id\":\"xy\",\"place\":{\"medium\":\"ssd\",\"path\":\"/l\",\"size\":1}}}",
        ] {
            assert_eq!(decode_record(damaged).expect_err("damaged").kind(), ErrorKind::Corrupt);
        }
    }

    proptest! {
        #[test]
        fn records_round_trip_and_garbage_is_refused(
            (epoch, id, size) in (0..u64::MAX, any::<[u8; 16]>(), any::<u64>()),
            (on_flush, dirty_max) in (any::<bool>(), prop::option::of(any::<u64>())),
            members in prop::option::of(("\\PC{0,20}", any::<bool>(), any::<[u8; 16]>())),
            (cut, at, byte) in (any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>()),
        ) {
            let place = api::LogPlace { on_flush, dirty_max, .."ssd:/srv/logs:16M".parse().expect("a place") };
            let place = api::LogPlace { size, ..place };
            let members = members.map(|(client, filling, copy)| {
                let members = LogMembers::created_in(1 + epoch / 2, PeerId([1; 16]), id, client);
                if filling { members.with_filling(PeerId([2; 16]), copy) } else { members }
            });
            let epoch = members.as_ref().map_or(epoch, LogMembers::epoch);
            let record = LogRecord { epoch, log: Some(RecordedLog { id, place, members }) };
            let mut stored = encode_record(record.clone());
            prop_assert_eq!(decode_record(&stored).expect("a record"), record);
            let cut = decode_record(&stored[..cut.index(stored.len())]);
            prop_assert_eq!(cut.expect_err("cut short").kind(), ErrorKind::Corrupt);
            let at = at.index(stored.len());
            stored[at] = byte;
            // Whatever a damaged record decodes to, it is one that can be stored again.
            if let Ok(record) = decode_record(&stored) {
                prop_assert_eq!(decode_record(&encode_record(record.clone())).expect("a record"), record);
            }
        }
    }
}
