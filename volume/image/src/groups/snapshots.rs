//! Snapshots of groups.
//!
//! ```text
//!             begin                 all parts created                   remove
//! no entry ----------> incomplete ---------------------> complete ------------------> incomplete
//!     ^                   |   ^                                                            |
//!     +-------------------+   +------------------------------------------------------------+
//!       all parts removed
//! ```
//!
//! An entry exists before the first part, and until the last one is gone: whatever was interrupted, removing the entry removes
//! all parts.

use std::collections::BTreeSet;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectOp, Result, SnapId, Transaction};
use forebay_reactor::random;

use super::parts::{CreatedPart, PendingPart};
use super::{GroupGuard, malformed};
use crate::image::Image;
use crate::images::Images;
use crate::info::SnapshotKind;
use crate::snapshots::check_name;
use crate::wire::group::{GroupSnapshot, LinkState, SNAPSHOT_KEYS, order_key, snapshot_key};

/// Reason for which a snapshot of a group is not created.
const MEMBERS_CHANGED: &str = "the group has got or lost images meanwhile; try again";

/// Snapshot of a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSnapshotInfo {
    /// Id within the group.
    pub id: String,
    /// Name within the group.
    pub name: String,
    /// Set if all images of the group at that time have their part; unset while it is created or removed, and after either was
    /// interrupted.
    pub is_complete: bool,
}

/// Part of a group's snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSnapshotPart {
    /// Name of the image's pool; the number if the pool is gone.
    pub pool: String,
    /// RBD namespace of the image; empty for the default one.
    pub namespace: String,
    /// Name of the image; the id of one that has no name any more.
    pub image: String,
    /// Set if the image can be opened by its name.
    pub has_name: bool,
    /// Number of the image's snapshot.
    pub snapshot: SnapId,
}

/// Snapshot of a group that is being created.
pub struct PendingGroupSnapshot {
    images: Rc<Images>,
    /// Id of the group.
    group: String,
    stored: GroupSnapshot,
    members: Vec<Rc<Image>>,
    _change: GroupGuard,
}

impl Images {
    /// Returns the snapshots of a group, by id.
    ///
    /// # Errors
    /// `NotFound`; errors of the backend.
    pub async fn group_snapshots(&self, group: &str) -> Result<Vec<GroupSnapshotInfo>> {
        if let Some((images, group)) = self.route(group) {
            return Box::pin(images.group_snapshots(group)).await;
        }
        let listed = async {
            let id = self.group_id(group).await?;
            let stored = self.stored_group_snapshots(&id).await?;
            Ok(stored.into_iter().map(info).collect())
        };
        listed.await.map_err(|error: Error| error.within(format_args!("snapshots of group {group}")))
    }

    /// Keeps a group from being changed by other commands of this process, until the guard is dropped.
    ///
    /// # Errors
    /// `Busy` if it is being changed.
    pub fn guard_group(self: &Rc<Self>, group: &str) -> Result<GroupGuard> {
        match self.route(group) {
            Some((images, group)) => GroupGuard::begin(&images, group),
            None => GroupGuard::begin(self, group),
        }
    }

    /// Returns the parts of a complete snapshot of a group.
    ///
    /// # Errors
    /// `NotFound`; `Invalid` for an incomplete snapshot; errors of the backend.
    pub async fn group_snapshot_parts(&self, group: &str, snapshot: &str) -> Result<Vec<GroupSnapshotPart>> {
        if let Some((images, group)) = self.route(group) {
            return Box::pin(images.group_snapshot_parts(group, snapshot)).await;
        }
        let listed = async {
            let id = self.group_id(group).await?;
            let stored = self.find_group_snapshot(&id, snapshot).await?;
            if !stored.is_complete {
                let what = "it is incomplete: its creation or removal is in progress, or was interrupted";
                return Err(Error::new(ErrorKind::Invalid, what));
            }
            let mut parts = Vec::new();
            for part in stored.parts {
                let member = self.describe_member(part.pool, part.image, LinkState::Attached).await?;
                let (pool, namespace, image) = (member.pool, member.namespace, member.image);
                parts.push(GroupSnapshotPart {
                    pool,
                    namespace,
                    image,
                    has_name: member.has_name,
                    snapshot: part.snap,
                });
            }
            Ok(parts)
        };
        listed.await.map_err(|error: Error| error.within(format_args!("snapshot {snapshot} of group {group}")))
    }

    /// Begins to create a snapshot of a group, of which `members` are all images; returns it, and its parts in the order of
    /// pools and ids. The snapshot has one moment if every part is held before the first is created; afterwards it is
    /// [completed](PendingGroupSnapshot::complete) or [undone](PendingGroupSnapshot::undo). Until the parts are created or
    /// dropped, no other change of the images' headers begins.
    ///
    /// # Errors
    /// `NotFound`; `Exists`; `Invalid` for an invalid name; `Busy` if the group has other images by now, or another client keeps
    /// the lock of one; `NoSpace` at the snapshot limit of one; errors of the backend.
    pub async fn begin_group_snapshot(
        self: &Rc<Self>,
        group: &str,
        name: &str,
        members: Vec<Rc<Image>>,
    ) -> Result<(PendingGroupSnapshot, Vec<PendingPart>)> {
        if let Some((images, group)) = self.route(group) {
            return Box::pin(images.begin_group_snapshot(group, name, members)).await;
        }
        let begun = async {
            check_name(name)?;
            let change = GroupGuard::begin(self, group)?;
            let id = self.group_id(group).await?;
            let members = self.check_members(&id, members).await?;
            let stored = self.store_new_snapshot(&id, name).await?;
            let pending = PendingGroupSnapshot { images: self.clone(), group: id, stored, members, _change: change };
            match pending.begin_parts().await {
                Ok(parts) => Ok((pending, parts)),
                Err(error) => {
                    pending.undo().await;
                    Err(error)
                }
            }
        };
        begun.await.map_err(|error: Error| error.within(format_args!("creating snapshot {name} of group {group}")))
    }

    /// Removes a snapshot of a group with all its parts, durably. An interrupted creation or removal is completed so.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if a part cannot be removed; errors of the backend.
    pub async fn remove_group_snapshot(self: &Rc<Self>, group: &str, name: &str) -> Result<()> {
        if let Some((images, group)) = self.route(group) {
            return Box::pin(images.remove_group_snapshot(group, name)).await;
        }
        let removed = async {
            let change = GroupGuard::begin(self, group)?;
            let id = self.group_id(group).await?;
            let stored = self.find_group_snapshot(&id, name).await?;
            self.remove_stored_group_snapshot(&id, &stored, &[]).await?;
            drop(change);
            Ok(())
        };
        removed.await.map_err(|error: Error| error.within(format_args!("removing snapshot {name} of group {group}")))
    }

    /// Renames a snapshot of a group, durably.
    ///
    /// # Errors
    /// `NotFound`; `Exists`; `Invalid` for an invalid name; `Busy` if another client changes it at the same time.
    pub async fn rename_group_snapshot(self: &Rc<Self>, group: &str, from: &str, to: &str) -> Result<()> {
        if let Some((images, group)) = self.route(group) {
            return Box::pin(images.rename_group_snapshot(group, from, to)).await;
        }
        let renamed = async {
            check_name(to)?;
            let change = GroupGuard::begin(self, group)?;
            let id = self.group_id(group).await?;
            let stored = self.find_group_snapshot(&id, from).await?;
            self.refuse_second(&id, to).await?;
            let renamed = GroupSnapshot { name: to.to_owned(), ..stored.clone() };
            self.replace_group_snapshot(&id, &stored, &renamed).await?;
            drop(change);
            Ok(())
        };
        renamed.await.map_err(|error: Error| error.within(format_args!("renaming snapshot {from} of group {group}")))
    }

    /// Returns the stored snapshots of a group.
    ///
    /// # Errors
    /// `Corrupt` for a malformed one: its parts would be forgotten.
    pub(super) async fn stored_group_snapshots(&self, group: &str) -> Result<Vec<GroupSnapshot>> {
        let pairs = self.group_pairs(group, SNAPSHOT_KEYS).await?.into_iter();
        pairs.map(|(key, value)| GroupSnapshot::decode(&value).ok_or_else(|| malformed(group, &key))).collect()
    }

    /// Returns the stored snapshot of an id, with its value.
    pub(super) async fn stored_group_snapshot(
        &self,
        group: &str,
        snapshot: &str,
    ) -> Result<Option<(Vec<u8>, GroupSnapshot)>> {
        let value = match self.backend.kv_get(&self.group_object(group), vec![snapshot_key(snapshot)]).await {
            Ok(mut values) => values.pop().flatten(),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        Ok(value.and_then(|value| GroupSnapshot::decode(&value).map(|snapshot| (value, snapshot))))
    }

    async fn find_group_snapshot(&self, group: &str, name: &str) -> Result<GroupSnapshot> {
        let found = self.stored_group_snapshots(group).await?.into_iter().find(|snapshot| snapshot.name == name);
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, "there is none"))
    }

    /// Refuses a name that a snapshot has already.
    async fn refuse_second(&self, group: &str, name: &str) -> Result<()> {
        match self.stored_group_snapshots(group).await?.iter().any(|snapshot| snapshot.name == name) {
            true => Err(Error::new(ErrorKind::Exists, format!("snapshot {name}"))),
            false => Ok(()),
        }
    }

    /// Returns the members in the order of pools and ids: that in which all clients take their locks.
    async fn check_members(&self, group: &str, mut members: Vec<Rc<Image>>) -> Result<Vec<Rc<Image>>> {
        members.sort_by_key(place);
        let now = self.member_ids(group).await?;
        if !members.iter().map(place).eq(now.keys().cloned()) {
            return Err(Error::new(ErrorKind::Busy, MEMBERS_CHANGED));
        }
        if now.values().any(|&state| state != LinkState::Attached) {
            let what = "an image is being added or removed, or was left so; add it again, or remove it";
            return Err(Error::new(ErrorKind::Busy, what));
        }
        Ok(members)
    }

    /// Stores the entry of a new snapshot, incomplete. Two clients that use one name at the same time may both fail.
    async fn store_new_snapshot(&self, group: &str, name: &str) -> Result<GroupSnapshot> {
        self.refuse_second(group, name).await?;
        let id = format!("{:014x}", random() >> 8);
        let stored = GroupSnapshot::new(id, name);
        let key = snapshot_key(&stored.id);
        let ops = vec![
            ObjectOp::AssertExists,
            ObjectOp::KvCompare { key: key.clone(), value: None },
            ObjectOp::KvSet { pairs: vec![(key, stored.encode())] },
        ];
        self.backend.submit(&self.group_object(group), Transaction::new(ops).durable()).await?;
        let others = self.stored_group_snapshots(group).await?;
        if others.iter().any(|other| other.name == name && other.id != stored.id) {
            self.remove_group_entry(group, &stored.id).await?;
            return Err(Error::new(ErrorKind::Exists, format!("snapshot {name}")));
        }
        Ok(stored)
    }

    /// Replaces the stored value of a snapshot. `Busy` if another client has changed it meanwhile.
    async fn replace_group_snapshot(&self, group: &str, from: &GroupSnapshot, to: &GroupSnapshot) -> Result<()> {
        let changed = || Error::new(ErrorKind::Busy, "another client has changed the snapshot meanwhile; try again");
        let (value, stored) = self.stored_group_snapshot(group, &from.id).await?.ok_or_else(changed)?;
        if stored != *from {
            return Err(changed());
        }
        let key = snapshot_key(&from.id);
        let ops = vec![
            ObjectOp::KvCompare { key: key.clone(), value: Some(value) },
            ObjectOp::KvSet { pairs: vec![(key, to.encode())] },
        ];
        match self.backend.submit(&self.group_object(group), Transaction::new(ops).durable()).await {
            Err(error) if error.kind() == ErrorKind::Guard => Err(changed()),
            replaced => replaced.map(drop),
        }
    }

    async fn remove_group_entry(&self, group: &str, snapshot: &str) -> Result<()> {
        let ops = vec![
            ObjectOp::AssertExists,
            ObjectOp::KvRemove { keys: vec![snapshot_key(snapshot), order_key(snapshot)] },
        ];
        self.backend.submit(&self.group_object(group), Transaction::new(ops).durable()).await.map(drop)
    }

    /// Removes the parts of a snapshot, and then its entry. Besides the images that the entry and the group list, others may have
    /// parts, by pool and id.
    pub(super) async fn remove_stored_group_snapshot(
        self: &Rc<Self>,
        group: &str,
        snapshot: &GroupSnapshot,
        others: &[(i64, String)],
    ) -> Result<()> {
        let removing = GroupSnapshot { is_complete: false, ..snapshot.clone() };
        if snapshot.is_complete {
            self.replace_group_snapshot(group, snapshot, &removing).await?;
        }
        // An interrupted creation has parts that the entry does not list.
        let listed = removing.parts.iter().map(|part| (part.pool, part.image.clone()));
        let mut places: BTreeSet<_> = listed.chain(others.iter().cloned()).collect();
        places.extend(self.member_ids(group).await?.into_keys());
        let kind = self.part_kind(group, &removing.id);
        for (pool, id) in places {
            let Some(images) = self.images_of_member(pool).await? else { continue };
            remove_part(&images, &id, &kind).await?;
        }
        self.remove_group_entry(group, &removing.id).await
    }

    fn part_kind(&self, group: &str, snapshot: &str) -> SnapshotKind {
        SnapshotKind::Group { pool: self.pool_id(), group: group.to_owned(), snapshot: snapshot.to_owned() }
    }
}

/// Removes the part of a group's snapshot that an image has; succeeds if it has none, or is gone.
async fn remove_part(images: &Rc<Images>, id: &str, kind: &SnapshotKind) -> Result<()> {
    let header = match images.header(id).await {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        header => header?,
    };
    if !header.snapshots.iter().any(|snapshot| snapshot.kind == *kind) {
        return Ok(());
    }
    // What is not found from here on is something else, such as the parent.
    let image = images.open_id(id).await?;
    let removed = Box::pin(image.remove_group_part(kind)).await;
    image.close().await;
    removed
}

/// Returns pool and id of an image.
fn place(image: &Rc<Image>) -> (i64, String) {
    (image.shared().images().pool_id(), image.shared().id().to_owned())
}

fn info(stored: GroupSnapshot) -> GroupSnapshotInfo {
    GroupSnapshotInfo { id: stored.id, name: stored.name, is_complete: stored.is_complete }
}

impl PendingGroupSnapshot {
    /// Returns pool and id of the images, in order.
    fn places(&self) -> Vec<(i64, String)> {
        self.members.iter().map(place).collect()
    }

    async fn begin_parts(&self) -> Result<Vec<PendingPart>> {
        let kind = self.images.part_kind(&self.group, &self.stored.id);
        let name = format!(".group.{:x}_{}_{}", self.images.pool_id(), self.group, self.stored.id);
        let mut parts = Vec::new();
        for image in &self.members {
            parts.push(PendingPart::begin(image.clone(), &name, &kind).await?);
        }
        Ok(parts)
    }

    /// Completes the snapshot with its parts, durably.
    ///
    /// # Errors
    /// Errors of the backend; the snapshot is removed then.
    pub async fn complete(self, parts: Vec<CreatedPart>) -> Result<GroupSnapshotInfo> {
        let mut parts: Vec<_> = parts.into_iter().map(|part| part.0).collect();
        parts.sort();
        debug_assert_eq!(parts.len(), self.members.len(), "a part for each image");
        let complete = GroupSnapshot { is_complete: true, parts, ..self.stored.clone() };
        let completed = async {
            // Another client may have added one.
            if !self.places().into_iter().eq(self.images.member_ids(&self.group).await?.into_keys()) {
                return Err(Error::new(ErrorKind::Busy, MEMBERS_CHANGED));
            }
            self.images.replace_group_snapshot(&self.group, &self.stored, &complete).await
        };
        match completed.await {
            Ok(()) => Ok(info(complete)),
            Err(error) => {
                self.undo().await;
                Err(error.within("completing a snapshot of a group"))
            }
        }
    }

    /// Removes the parts that were created, and the entry. All parts must have been created or dropped. What cannot be removed
    /// stays as an incomplete snapshot.
    pub async fn undo(self) {
        let name = &self.stored.name;
        let incomplete = GroupSnapshot { is_complete: false, ..self.stored.clone() };
        // An image may have left the group meanwhile.
        let removed = self.images.remove_stored_group_snapshot(&self.group, &incomplete, &self.places()).await;
        if let Err(error) = removed {
            let hint = "remove it with 'forebay group snap rm'";
            tracing::warn!(snapshot = name, %error, hint, "an incomplete snapshot of a group stays");
        }
    }
}
