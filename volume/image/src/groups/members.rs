//! Images of a group.
//!
//! ```text
//!                      add: link                    add: link
//!                  +------------------+            +------------+
//!                  |                  v            |            v
//! not a member ----+          link incomplete, reference   link attached, reference
//!      ^                    ^         |            ^            |
//!      |                    |         v            +------------+
//!      +-- link incomplete, no reference            remove: link
//! ```
//!
//! The group lists an image before the image's header names the group, and until it does not any more.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectOp, Result, SnapId, Transaction};

use super::{GroupGuard, TRIES, malformed};
use crate::children::{GROUP_MEMBER, announce, operations_change};
use crate::details::GROUP_KEY;
use crate::images::Images;
use crate::wire::group::{IMAGE_KEYS, LinkState, decode_group, encode_group, member_key, member_of_key};

/// Image in a group.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupMember {
    /// Name of its pool; the number if the pool is gone.
    pub pool: String,
    /// Its RBD namespace; empty for the default one.
    pub namespace: String,
    /// Name; the id of one that has no name any more.
    pub image: String,
    /// Id within the pool.
    pub id: String,
    /// Set unless it is being added or removed, or was left so by an interruption.
    pub is_attached: bool,
    /// Set if it can be opened by its name: it is neither gone nor in the trash.
    pub has_name: bool,
}

impl Images {
    /// Returns the images of a group, by pool and id.
    ///
    /// # Errors
    /// `NotFound`; errors of the backend.
    pub async fn group_images(&self, group: &str) -> Result<Vec<GroupMember>> {
        if let Some((images, group)) = self.route(group) {
            return Box::pin(images.group_images(group)).await;
        }
        let listed = async {
            let id = self.group_id(group).await?;
            let mut members = Vec::new();
            for ((pool, image), state) in self.member_ids(&id).await? {
                members.push(self.describe_member(pool, image, state).await?);
            }
            Ok(members)
        };
        listed.await.map_err(|error: Error| error.within(format_args!("images of group {group}")))
    }

    /// Adds an image of `images`, which must be of the same namespace, to a group, durably. An interrupted addition can be
    /// repeated.
    ///
    /// # Errors
    /// `NotFound`; `Exists` if the image belongs to this group or another one; errors of the backend.
    pub async fn add_to_group(self: &Rc<Self>, group: &str, images: &Rc<Images>, image: &str) -> Result<()> {
        if let (Some((groups, group)), Some((images, image))) = (self.route(group), images.route(image)) {
            return Box::pin(groups.add_to_group(group, &images, image)).await;
        }
        let added = async {
            let _change = GroupGuard::begin(self, group)?;
            let id = self.group_id(group).await?;
            let (pool, image) = (images.pool_id(), images.id_of(image).await?);
            // Before anything is stored.
            self.check_joinable(images, &id, &image).await?;
            self.set_link(&id, pool, &image, LinkState::Incomplete).await?;
            if let Err(error) = self.refer(images, &id, &image).await {
                if error.kind() == ErrorKind::Exists {
                    self.remove_link(&id, pool, &image).await?;
                }
                return Err(error);
            }
            self.set_link(&id, pool, &image, LinkState::Attached).await
        };
        added.await.map_err(|error: Error| error.within(format_args!("adding image {image} to group {group}")))
    }

    /// Removes an image of `images` from a group, durably; the parts of the group's snapshots stay. The image may be gone, and is
    /// named by its id then.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while the group has an incomplete snapshot; errors of the backend.
    pub async fn remove_from_group(self: &Rc<Self>, group: &str, images: &Rc<Images>, image: &str) -> Result<()> {
        if let (Some((groups, group)), Some((images, image))) = (self.route(group), images.route(image)) {
            return Box::pin(groups.remove_from_group(group, &images, image)).await;
        }
        let removed = async {
            let _change = GroupGuard::begin(self, group)?;
            let id = self.group_id(group).await?;
            let pool = images.pool_id();
            let members = self.member_ids(&id).await?;
            let image_id = match images.id_of(image).await {
                Err(error) if error.kind() == ErrorKind::NotFound => image.to_owned(),
                found => found?,
            };
            if !members.contains_key(&(pool, image_id.clone())) {
                return Err(Error::new(ErrorKind::NotFound, format!("image {image} in the group")));
            }
            // The entry does not list its parts, and finds them as long as the image is in the group.
            let snapshots = self.stored_group_snapshots(&id).await?;
            if let Some(incomplete) = snapshots.iter().find(|snapshot| !snapshot.is_complete) {
                let what = format!("the group has the incomplete snapshot {}; remove that first", incomplete.name);
                return Err(Error::new(ErrorKind::Busy, what));
            }
            self.detach_member(&id, pool, &image_id).await
        };
        removed.await.map_err(|error: Error| error.within(format_args!("removing image {image} from group {group}")))
    }

    /// Returns pool and id of the images of a group, and the states of their links.
    pub(super) async fn member_ids(&self, group: &str) -> Result<BTreeMap<(i64, String), LinkState>> {
        let mut members = BTreeMap::new();
        for (key, value) in self.group_pairs(group, IMAGE_KEYS).await? {
            members.insert(member_of_key(&key).ok_or_else(|| malformed(group, &key))?, LinkState::decode(&value));
        }
        Ok(members)
    }

    /// Returns the registry of a member's pool; `None` if the pool is gone.
    pub(super) async fn images_of_member(&self, pool: i64) -> Result<Option<Rc<Images>>> {
        let backend = self.pool_of(pool).await?;
        Ok(backend.map(|backend| Images::in_namespace(&backend, &self.namespace)))
    }

    pub(super) async fn describe_member(&self, pool: i64, id: String, state: LinkState) -> Result<GroupMember> {
        let (namespace, is_attached) = (self.namespace.to_string(), state == LinkState::Attached);
        let Some(images) = self.images_of_member(pool).await? else {
            let (pool, image) = (pool.to_string(), id.clone());
            return Ok(GroupMember { pool, namespace, image, id, is_attached, has_name: false });
        };
        let (image, has_name) = match images.directory().name_of(&id).await? {
            Some(name) => (name, true),
            None => (images.trash().entry(&id).await?.map_or(id.clone(), |entry| entry.name), false),
        };
        Ok(GroupMember { pool: images.backend.info().pool, namespace, image, id, is_attached, has_name })
    }

    /// Refuses an image that belongs to a group.
    async fn check_joinable(&self, images: &Rc<Images>, group: &str, image: &str) -> Result<()> {
        let Some(stored) = self.reference(images, image).await? else { return Ok(()) };
        if self.is_gone(&stored).await? {
            return Ok(());
        }
        if stored == encode_group(self.pool_id(), group) {
            let state = self.member_ids(group).await?.remove(&(images.pool_id(), image.to_owned()));
            return match state {
                Some(LinkState::Attached) => Err(Error::new(ErrorKind::Exists, "it belongs to the group already")),
                // An interrupted addition is completed.
                _ => Ok(()),
            };
        }
        Err(self.belongs_elsewhere(images, image).await)
    }

    /// Returns whether a reference names a group that is gone: another client has removed it while the image was added.
    async fn is_gone(&self, reference: &[u8]) -> Result<bool> {
        let Some((pool, group)) = decode_group(reference) else { return Ok(false) };
        let Some(images) = self.images_of_member(pool).await? else { return Ok(true) };
        match images.backend.stat(&images.group_object(&group), SnapId::HEAD).await {
            Ok(_) => Ok(false),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
            Err(error) => Err(error),
        }
    }

    async fn belongs_elsewhere(&self, images: &Images, image: &str) -> Error {
        let name = images.group_and_limit(image).await.ok().and_then(|(group, _)| group);
        let which = name.map_or_else(|| "another group".to_owned(), |name| format!("the group {name}"));
        Error::new(ErrorKind::Exists, format!("the image belongs to {which}"))
    }

    async fn set_link(&self, group: &str, pool: i64, image: &str, state: LinkState) -> Result<()> {
        let pairs = vec![(member_key(pool, image), state.encode())];
        let ops = vec![ObjectOp::AssertExists, ObjectOp::KvSet { pairs }];
        self.backend.submit(&self.group_object(group), Transaction::new(ops).durable()).await.map(drop)
    }

    async fn remove_link(&self, group: &str, pool: i64, image: &str) -> Result<()> {
        let ops = vec![ObjectOp::AssertExists, ObjectOp::KvRemove { keys: vec![member_key(pool, image)] }];
        self.backend.submit(&self.group_object(group), Transaction::new(ops).durable()).await.map(drop)
    }

    /// Stores the reference to a group in the header of an image. `Exists` if it has one to another group.
    async fn refer(&self, images: &Rc<Images>, group: &str, image: &str) -> Result<()> {
        let reference = encode_group(self.pool_id(), group);
        for _ in 0..TRIES {
            let stored = self.reference(images, image).await?;
            match &stored {
                Some(stored) if *stored == reference => return Ok(()),
                Some(stored) if !self.is_gone(stored).await? => {
                    return Err(self.belongs_elsewhere(images, image).await);
                }
                _ => {}
            }
            let store = ObjectOp::KvSet { pairs: vec![(GROUP_KEY.to_vec(), reference.clone())] };
            if self.store_reference(images, image, stored, store, (GROUP_MEMBER, 0)).await? {
                return Ok(());
            }
        }
        Err(contended())
    }

    /// Removes the reference to a group from the header of an image, if it has that.
    async fn forget(&self, images: &Rc<Images>, group: &str, image: &str) -> Result<()> {
        let reference = encode_group(self.pool_id(), group);
        for _ in 0..TRIES {
            let stored = self.reference(images, image).await?;
            if stored.as_ref() != Some(&reference) {
                return Ok(());
            }
            let remove = ObjectOp::KvRemove { keys: vec![GROUP_KEY.to_vec()] };
            if self.store_reference(images, image, stored, remove, (0, GROUP_MEMBER)).await? {
                return Ok(());
            }
        }
        Err(contended())
    }

    /// Removes an image from a group: its reference, and then the group's entry.
    pub(super) async fn detach_member(&self, group: &str, pool: i64, image: &str) -> Result<()> {
        self.set_link(group, pool, image, LinkState::Incomplete).await?;
        if let Some(images) = self.images_of_member(pool).await? {
            match self.forget(&images, group, image).await {
                // The image is gone.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                forgotten => forgotten?,
            }
        }
        self.remove_link(group, pool, image).await
    }

    async fn reference(&self, images: &Images, image: &str) -> Result<Option<Vec<u8>>> {
        let values = images.backend.kv_get(&images.header_object(image), vec![GROUP_KEY.to_vec()]).await?;
        Ok(values.into_iter().next().flatten())
    }

    /// Changes the reference of an image with its bit of `op_features`; returns `false` if another client was first.
    async fn store_reference(
        &self,
        images: &Rc<Images>,
        image: &str,
        stored: Option<Vec<u8>>,
        change: ObjectOp,
        (set, clear): (u64, u64),
    ) -> Result<bool> {
        let header = images.header_object(image);
        let guard = ObjectOp::KvCompare { key: GROUP_KEY.to_vec(), value: stored };
        let mut ops = vec![ObjectOp::AssertExists, guard];
        ops.extend(operations_change(images.backend(), &header, set, clear).await?);
        ops.push(change);
        match images.backend.submit(&header, Transaction::new(ops).durable()).await {
            Ok(_) => {
                announce(images, image).await;
                Ok(true)
            }
            Err(error) if error.kind() == ErrorKind::Guard => Ok(false),
            Err(error) => Err(error),
        }
    }
}

fn contended() -> Error {
    Error::new(ErrorKind::Busy, format!("other clients have changed the image {TRIES} times meanwhile; try again"))
}
