//! Groups of images, and their snapshots, which have the state of all images at one moment: `docs/design/image.md`, "Groups".

mod members;
mod parts;
mod snapshots;

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::random;

use crate::directory::{Added, Directory};
use crate::format::is_valid_group_id;
use crate::images::{Images, check_name};
use crate::resize::unless_absent;
pub use members::GroupMember;
pub use parts::{CreatedPart, PendingPart};
pub use snapshots::{GroupSnapshotInfo, GroupSnapshotPart, PendingGroupSnapshot};

/// Names and keys read in one request.
const PAGE: usize = 1000;
/// Attempts to change a header that other clients change at the same time.
const TRIES: usize = 16;

/// Guard of a group: no other command of this process changes it, or its snapshots.
pub struct GroupGuard {
    images: Rc<Images>,
    name: String,
}

impl GroupGuard {
    fn begin(images: &Rc<Images>, group: &str) -> Result<Self> {
        let name = format!("group/{group}");
        if !images.begin_changing(&name) {
            return Err(Error::new(ErrorKind::Busy, format!("group {group} is being changed; try again")));
        }
        Ok(Self { images: images.clone(), name })
    }
}

impl Drop for GroupGuard {
    fn drop(&mut self) {
        self.images.end_changing(&self.name);
    }
}

/// Returns the error of a pair of a group's header that is malformed: what it names would be forgotten.
fn malformed(group: &str, key: &[u8]) -> Error {
    let what = format!("key '{}' of the header of group {group}", String::from_utf8_lossy(key));
    Error::new(ErrorKind::Corrupt, what)
}

impl Images {
    pub(crate) fn group_directory(&self) -> Directory<'_> {
        Directory::of_groups(&self.backend, &self.namespace)
    }

    /// Returns the header object of a group.
    fn group_object(&self, id: &str) -> ObjectName {
        ObjectName::in_namespace(self.namespace.clone(), format!("rbd_group_header.{id}"))
    }

    /// Returns the pairs of a group's header whose keys have a prefix; none if it does not exist, as after an interrupted removal.
    async fn group_pairs(&self, group: &str, prefix: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let (mut pairs, mut after) = (Vec::new(), Vec::new());
        loop {
            let page = match self.backend.kv_list(&self.group_object(group), prefix, &after, PAGE).await {
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(pairs),
                page => page?,
            };
            let last = page.pairs.last().filter(|_| page.more).map(|(key, _)| key.clone());
            pairs.extend(page.pairs);
            match last {
                Some(last) => after = last,
                None => return Ok(pairs),
            }
        }
    }

    async fn group_id(&self, name: &str) -> Result<String> {
        let not_found = || Error::new(ErrorKind::NotFound, format!("group {name}"));
        self.group_directory().id_of(name).await?.ok_or_else(not_found)
    }

    /// Returns the names of all groups, in order.
    pub async fn groups(&self) -> Result<Vec<String>> {
        self.group_directory().all_names().await.map_err(|error| error.within("listing groups"))
    }

    /// Creates a group without images, durably.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for an invalid name; errors of the backend.
    pub async fn create_group(self: &Rc<Self>, name: &str) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.create_group(name)).await;
        }
        check_name(name)?;
        let created = async {
            let _change = GroupGuard::begin(self, name)?;
            for _ in 0..TRIES {
                let id = format!("{:014x}", random() >> 8);
                let header = Transaction::of(ObjectOp::Create { exclusive: true }).durable();
                match self.backend.submit(&self.group_object(&id), header).await {
                    Err(error) if error.kind() == ErrorKind::Exists => continue,
                    created => created.map(drop)?,
                }
                // After the header: a crash leaves an empty object at worst, and never a name without a group.
                let added = self.group_directory().add(name, &id).await;
                match &added {
                    Ok(Added::New) => return Ok(()),
                    _ => self.remove_group_header(&id).await?,
                }
                match added? {
                    Added::NameTaken(_) => return Err(Error::new(ErrorKind::Exists, "there is one of that name")),
                    _ => continue,
                }
            }
            Err(Error::new(ErrorKind::Busy, format!("no free id in {TRIES} tries")))
        };
        created.await.map_err(|error: Error| error.within(format_args!("creating group {name}")))
    }

    /// Renames a group, durably.
    ///
    /// # Errors
    /// `NotFound`; `Exists`; `Invalid` for an invalid name; errors of the backend.
    pub async fn rename_group(self: &Rc<Self>, from: &str, to: &str) -> Result<()> {
        if let (Some((images, from)), Some((_, to))) = (self.route(from), self.route(to)) {
            return Box::pin(images.rename_group(from, to)).await;
        }
        check_name(to)?;
        let renamed = async {
            let _change = GroupGuard::begin(self, from)?;
            let id = self.group_id(from).await?;
            self.group_directory().rename(&id, from, to).await
        };
        renamed.await.map_err(|error: Error| error.within(format_args!("renaming group {from} to {to}")))
    }

    /// Removes a group and its snapshots; its images stay. An interrupted removal can be repeated.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if a snapshot of it cannot be removed; errors of the backend.
    pub async fn remove_group(self: &Rc<Self>, name: &str) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.remove_group(name)).await;
        }
        let removed = async {
            let change = GroupGuard::begin(self, name)?;
            let id = self.group_id(name).await?;
            for snapshot in self.stored_group_snapshots(&id).await? {
                self.remove_stored_group_snapshot(&id, &snapshot, &[]).await?;
            }
            for (pool, image) in self.member_ids(&id).await?.into_keys() {
                self.detach_member(&id, pool, &image).await?;
            }
            self.remove_group_header(&id).await?;
            self.group_directory().remove(name, &id).await?;
            drop(change);
            Ok(())
        };
        removed.await.map_err(|error: Error| error.within(format_args!("removing group {name}")))
    }

    async fn remove_group_header(&self, id: &str) -> Result<()> {
        let remove = Transaction::of(ObjectOp::Remove).durable();
        unless_absent(self.backend.submit(&self.group_object(id), remove)).await.map(drop)
    }

    /// Returns the names of a group and of one of its snapshots, by their ids, with the name of their pool; `None` for what is
    /// gone.
    pub async fn group_names(
        &self,
        pool: i64,
        group: &str,
        snapshot: &str,
    ) -> Result<(Option<String>, Option<String>, Option<String>)> {
        let Some(backend) = self.pool_of(pool).await? else { return Ok((None, None, None)) };
        let there = Images::in_namespace(&backend, &self.namespace);
        let name = if is_valid_group_id(group) { there.group_directory().name_of(group).await? } else { None };
        let stored = there.stored_group_snapshot(group, snapshot).await?;
        Ok((Some(backend.info().pool), name, stored.map(|(_, stored)| stored.name)))
    }
}
