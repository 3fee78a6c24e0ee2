//! Trash of a pool: images without a name, kept until they are removed or restored.
//!
//! ```text
//!          move               moved            remove            removed
//! image ---------> Moving ----------> Normal ----------> Removing ------> no entry
//!                                      |  ^                 |
//!                              restore |  +-----------------+ refused
//!                                      v        restored
//!                                  Restoring ----------------------------> image
//! ```
//!
//! An entry is written before the name is removed, and removed after the name or the last of the data: as long as an
//! image has data, a name or an entry leads to it.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::wall_clock;

use crate::directory::{Added, Directory};
use crate::format::{TRASH, id_key, id_keys, id_of_key, is_valid_id};
use crate::images::{Images, check_name};
use crate::info::{ObjectProgress, ParentInfo, RemoveOptions};
pub use crate::wire::trash::TrashSource;
use crate::wire::trash::{TrashEntry, TrashState};

/// Entries read in one request.
const PAGE: usize = 1000;

/// Image in the trash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrashedImage {
    /// Id within the pool, which names the image while it is in the trash.
    pub id: String,
    /// Name before it was moved.
    pub name: String,
    /// Origin of the entry.
    pub source: TrashSource,
    /// Time of the move, since 1970-01-01T00:00:00Z.
    pub deleted: Duration,
    /// Time up to which the image is not removed unless forced, since 1970-01-01T00:00:00Z.
    pub deferred_until: Duration,
}

impl TrashedImage {
    fn new(id: &str, entry: &TrashEntry) -> Self {
        Self {
            id: id.to_owned(),
            name: entry.name.clone(),
            source: entry.source,
            deleted: entry.deleted,
            deferred_until: entry.deferred_until,
        }
    }
}

/// Trash of a backend: its entries.
pub(crate) struct TrashDirectory<'a> {
    backend: &'a Rc<dyn ObjectBackend>,
    namespace: &'a Rc<str>,
}

impl TrashDirectory<'_> {
    fn object(&self) -> ObjectName {
        ObjectName::in_namespace(self.namespace.clone(), TRASH)
    }

    /// Returns the entry of the image of that id. `Corrupt` if it is malformed.
    pub(crate) async fn entry(&self, id: &str) -> Result<Option<TrashEntry>> {
        Ok(self.stored(id).await?.map(|(_, entry)| entry))
    }

    /// Returns the stored value of an entry, and what it says.
    async fn stored(&self, id: &str) -> Result<Option<(Vec<u8>, TrashEntry)>> {
        let value = match self.backend.kv_get(&self.object(), vec![id_key(id)]).await {
            Ok(mut values) => values.pop().flatten(),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let Some(value) = value else { return Ok(None) };
        match TrashEntry::decode(&value) {
            Some(entry) => Ok(Some((value, entry))),
            None => Err(Error::new(ErrorKind::Corrupt, format!("trash entry of image id {id}"))),
        }
    }

    /// Returns all entries in the order of their ids. Malformed ones are left out, with a warning.
    async fn all(&self) -> Result<Vec<(String, TrashEntry)>> {
        let mut all = Vec::new();
        let mut after = Vec::new();
        loop {
            let page = match self.backend.kv_list(&self.object(), id_keys(), &after, PAGE).await {
                Ok(page) => page,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(all),
                Err(error) => return Err(error),
            };
            for (key, value) in &page.pairs {
                match id_of_key(key).zip(TrashEntry::decode(value)) {
                    Some(found) => all.push(found),
                    None => {
                        let key = String::from_utf8_lossy(key);
                        tracing::warn!(%key, "a malformed entry of the trash cannot be listed");
                    }
                }
            }
            match page.pairs.into_iter().next_back().filter(|_| page.more) {
                Some((last, _)) => after = last,
                None => return Ok(all),
            }
        }
    }

    /// Stores a new entry. `Exists` if the image has one.
    async fn add(&self, id: &str, entry: &TrashEntry) -> Result<()> {
        let ops = vec![
            ObjectOp::Create { exclusive: false },
            ObjectOp::KvCompare { key: id_key(id), value: None },
            ObjectOp::KvSet { pairs: vec![(id_key(id), entry.encode())] },
        ];
        match self.backend.submit(&self.object(), Transaction::new(ops).durable()).await {
            Err(error) if error.kind() == ErrorKind::Guard => {
                Err(Error::new(ErrorKind::Exists, format!("trash entry of image id {id}")))
            }
            other => other.map(drop),
        }
    }

    /// Changes the state of an entry, if its stored value is still `from`; returns the new value.
    async fn set_state(&self, id: &str, from: &[u8], entry: &TrashEntry, state: TrashState) -> Result<Vec<u8>> {
        let value = TrashEntry { state, ..entry.clone() }.encode();
        if value == from {
            return Ok(value);
        }
        let set = ObjectOp::KvSet { pairs: vec![(id_key(id), value.clone())] };
        self.change(id, from, set).await?;
        Ok(value)
    }

    /// Removes an entry, if its stored value is still `from`.
    async fn remove(&self, id: &str, from: &[u8]) -> Result<()> {
        self.change(id, from, ObjectOp::KvRemove { keys: vec![id_key(id)] }).await
    }

    async fn change(&self, id: &str, from: &[u8], change: ObjectOp) -> Result<()> {
        let guard = ObjectOp::KvCompare { key: id_key(id), value: Some(from.to_vec()) };
        match self.backend.submit(&self.object(), Transaction::new(vec![guard, change]).durable()).await {
            Err(error) if matches!(error.kind(), ErrorKind::Guard | ErrorKind::NotFound) => {
                let what =
                    format!("another client changes the trash entry of image id {id} at the same time; try again");
                Err(Error::new(ErrorKind::Busy, what))
            }
            other => other.map(drop),
        }
    }
}

impl Images {
    pub(crate) fn trash(&self) -> TrashDirectory<'_> {
        TrashDirectory { backend: &self.backend, namespace: &self.namespace }
    }

    /// Moves an image to the trash, where it is not removed before `deferred_until` (since 1970-01-01T00:00:00Z)
    /// unless forced. Clones of its snapshots continue to read it. An interrupted move can be repeated.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if the image is open, here or at another client, belongs to a group, or is being changed.
    pub async fn move_to_trash(&self, name: &str, deferred_until: Duration) -> Result<TrashedImage> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.move_to_trash(name, deferred_until)).await;
        }
        let _changing = self.change(name)?;
        let moved = async {
            let directory = self.directory();
            let Some(id) = directory.id_of(name).await? else { return self.resume_move(name).await };
            self.check_movable(&id, name).await?;
            let (deleted, source) = (wall_clock(), TrashSource::User);
            let state = TrashState::Moving;
            let entry = TrashEntry { source, name: name.to_owned(), deleted, deferred_until, state };
            match self.trash().add(&id, &entry).await {
                // Left by an interrupted move, or by a restoration whose last step is missing.
                Err(error) if error.kind() == ErrorKind::Exists => self.renew(&id, &entry).await?,
                added => added?,
            }
            self.finish_move(&directory, &id, &entry).await?;
            Ok(TrashedImage::new(&id, &entry))
        };
        moved.await.map_err(|error| error.within(format_args!("moving image {name} to the trash")))
    }

    /// Refuses an image that is open or belongs to a group.
    async fn check_movable(&self, id: &str, name: &str) -> Result<()> {
        if let Some(open) = self.find_open(id) {
            if !open.lifecycle().is_closing() {
                return Err(Error::new(ErrorKind::Busy, format!("image {name} is open")));
            }
            open.lifecycle().closed().await;
        }
        if let Some(shared) = self.backend.shared() {
            let watchers = match shared.watchers(&self.header_object(id)).await {
                // What an interrupted removal has left may be moved, too.
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                watchers => watchers?,
            };
            if let Some(other) = watchers.first() {
                let who = format!("client.{} at {}", other.client, other.address);
                return Err(Error::new(ErrorKind::Busy, format!("image {name} is open elsewhere: {who}")));
            }
        }
        match self.group_and_limit(id).await {
            Ok((Some(group), _)) => {
                let what = format!("image {name} belongs to the group {group}; remove it from the group first");
                Err(Error::new(ErrorKind::Busy, what))
            }
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Completes a move that was interrupted after the image's name was removed.
    async fn resume_move(&self, name: &str) -> Result<TrashedImage> {
        let moving = |entry: &TrashEntry| {
            (entry.source, entry.state) == (TrashSource::User, TrashState::Moving) && entry.name == name
        };
        let found = self.trash().all().await?.into_iter().find(|(_, entry)| moving(entry));
        let (id, entry) = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("image {name}")))?;
        self.finish_move(&self.directory(), &id, &entry).await?;
        Ok(TrashedImage::new(&id, &entry))
    }

    /// Replaces the entry of an image that has a name.
    async fn renew(&self, id: &str, entry: &TrashEntry) -> Result<()> {
        let trash = self.trash();
        let Some((stored, old)) = trash.stored(id).await? else { return trash.add(id, entry).await };
        if !matches!(old.state, TrashState::Moving | TrashState::Restoring) {
            let what = format!("image id {id} is in the trash already, as {}", old.name);
            return Err(Error::new(ErrorKind::Exists, what));
        }
        trash.set_state(id, &stored, entry, TrashState::Moving).await.map(drop)
    }

    /// Removes the name of an image whose entry is stored, and completes the move.
    async fn finish_move(&self, directory: &Directory<'_>, id: &str, entry: &TrashEntry) -> Result<()> {
        directory.remove_id(&entry.name, id).await?;
        directory.remove(&entry.name, id).await?;
        let moving = TrashEntry { state: TrashState::Moving, ..entry.clone() };
        self.trash().set_state(id, &moving.encode(), &moving, TrashState::Normal).await.map(drop)
    }

    /// Returns the images in the trash, in the order of their ids, without those that `rbd rm` is removing.
    pub async fn trashed(&self) -> Result<Vec<TrashedImage>> {
        let all = self.trash().all().await.map_err(|error| error.within("listing the trash"))?;
        let kept = all.iter().filter(|(_, entry)| entry.source != TrashSource::Removing);
        Ok(kept.map(|(id, entry)| TrashedImage::new(id, entry)).collect())
    }

    /// Returns the parent of an image in the trash, if it is a clone, and the number of its snapshots. `NotFound` if the
    /// image is gone.
    pub async fn trashed_details(&self, id: &str) -> Result<(Option<ParentInfo>, usize)> {
        let header = self.header(id).await?;
        let parent = match &header.parent {
            Some((_, spec)) => Some(self.parent_info(spec).await?),
            None => None,
        };
        Ok((parent, header.snapshots.len()))
    }

    /// Restores an image from the trash, with its former name or another one; returns the name. An interrupted
    /// restoration can be repeated.
    ///
    /// # Errors
    /// `NotFound`; `Exists` if another image has the name; `Invalid` for an invalid name or an image that is not a
    /// user's; `Busy` if the image is being moved or removed.
    pub async fn restore(&self, id: &str, name: Option<&str>) -> Result<String> {
        let restored = async {
            let _changing = self.change_trashed(id)?;
            let (stored, entry) = self.find_trashed(id).await?;
            if !matches!(entry.source, TrashSource::User | TrashSource::Mirroring | TrashSource::UserParent) {
                return Err(Error::new(ErrorKind::Invalid, "it was not moved to the trash by a user"));
            }
            if entry.state == TrashState::Removing {
                return Err(Error::new(ErrorKind::Busy, "it is being removed"));
            }
            let name = name.unwrap_or(&entry.name);
            check_name(name)?;
            let _name = self.change(name)?;
            let restoring = self.trash().set_state(id, &stored, &entry, TrashState::Restoring).await?;
            if let Err(error) = self.give_name(id, name).await {
                if error.kind() == ErrorKind::Exists {
                    let back = self.trash().set_state(id, &restoring, &entry, TrashState::Normal).await;
                    back.map(drop).unwrap_or_else(|error| {
                        tracing::warn!(id, %error, "an image in the trash stays marked as being restored; restore it again");
                    });
                }
                return Err(error);
            }
            self.trash().remove(id, &restoring).await?;
            Ok(name.to_owned())
        };
        restored.await.map_err(|error| error.within(format_args!("restoring image id {id} from the trash")))
    }

    /// Adds an image to the directory, unless an interrupted attempt has done so.
    async fn give_name(&self, id: &str, name: &str) -> Result<()> {
        let directory = self.directory();
        let taken = || Error::new(ErrorKind::Exists, format!("image {name}"));
        if directory.id_of(name).await?.is_some_and(|other| other != id) {
            return Err(taken());
        }
        directory.write_id(name, id).await?;
        if let Some(earlier) = directory.name_of(id).await?.filter(|earlier| earlier != name) {
            directory.rename(id, &earlier, name).await?;
            return directory.remove_id(&earlier, id).await;
        }
        match directory.add(name, id).await? {
            Added::New => Ok(()),
            Added::NameTaken(other) if other == id => Ok(()),
            Added::NameTaken(_) => {
                directory.remove_id(name, id).await?;
                Err(taken())
            }
            Added::IdTaken => {
                Err(Error::new(ErrorKind::Busy, format!("another client gives image id {id} a name; try again")))
            }
        }
    }

    /// Removes an image in the trash and its data, before the end of its deferment only if forced. An interrupted
    /// removal can be repeated.
    ///
    /// # Errors
    /// `NotFound`; `Denied` before the end of its deferment; `Busy` if it has snapshots, is open, or is being moved or
    /// restored.
    pub async fn remove_trashed(
        self: &Rc<Self>,
        id: &str,
        options: RemoveOptions,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<()> {
        let removed = async {
            let _changing = self.change_trashed(id)?;
            let (stored, entry) = self.find_trashed(id).await?;
            if wall_clock() < entry.deferred_until && !options.force {
                return Err(Error::new(ErrorKind::Denied, "its deferment has not expired"));
            }
            let header = match self.header(id).await {
                Ok(header) => Some(header),
                // Left by an interrupted removal.
                Err(error) if error.kind() == ErrorKind::NotFound => None,
                Err(error) => return Err(error),
            };
            if entry.state == TrashState::Restoring && header.is_some() {
                return Err(Error::new(ErrorKind::Busy, "it is being restored; restore it again to complete that"));
            }
            let removing = self.trash().set_state(id, &stored, &entry, TrashState::Removing).await?;
            if let Some(header) = &header {
                // Removal from the trash is never forced on open images.
                let (options, begun) = (RemoveOptions::default(), Cell::new(false));
                let content = self.remove_content(&entry.name, id, header, options, &begun, &mut progress);
                if let Err(error) = content.await {
                    // What is partly removed, by this or another attempt, must not be restored.
                    if begun.get() || entry.state == TrashState::Removing {
                        return Err(error);
                    }
                    let back = self.trash().set_state(id, &removing, &entry, TrashState::Normal).await;
                    back.map(drop).unwrap_or_else(|error| {
                        tracing::warn!(id, %error, "an image in the trash stays marked as being removed; remove it again");
                    });
                    return Err(error);
                }
            }
            self.trash().remove(id, &removing).await
        };
        removed.await.map_err(|error| error.within(format_args!("removing image id {id} from the trash")))
    }

    /// Returns the entry of an image in the trash, as it is stored and decoded. `Busy` if the image still has its name.
    async fn find_trashed(&self, id: &str) -> Result<(Vec<u8>, TrashEntry)> {
        let found = if is_valid_id(id) { self.trash().stored(id).await? } else { None };
        let (stored, entry) = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("image id {id}")))?;
        if entry.state == TrashState::Moving && self.directory().name_of(id).await?.is_some() {
            let what = format!("image {} is not fully moved to the trash; move it again to complete that", entry.name);
            return Err(Error::new(ErrorKind::Busy, what));
        }
        Ok((stored, entry))
    }

    fn change_trashed(&self, id: &str) -> Result<crate::images::Changing<'_>> {
        self.change(&format!("trash/{id}"))
    }
}
