//! Image details of `rbd info` and `rbd ls -l` beyond size and layout: parents, snapshots, lock, watchers.

use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectBackend, ObjectName, Result, SnapId, Watcher};

use crate::directory::Directory;
use crate::exclusive_lock::GET_INFO;
use crate::format::{GROUP_DIRECTORY, ImageHeader, decode_string, id_key};
use crate::images::Images;
use crate::info::{ImageDetails, LockKind, ParentInfo, SnapshotDetails};
use crate::wire::group::decode_group;
use crate::wire::lock::{decode_info, encode_get_info};
use crate::wire::snapshot::{Parent, Snapshot};

/// Header key of the group that an image belongs to.
pub(crate) const GROUP_KEY: &[u8] = b"rbd_group_ref";
/// Header key of the snapshot limit of an image.
pub(crate) const LIMIT_KEY: &[u8] = b"snap_limit";

impl Images {
    /// Returns the full description of an image. On a shared pool it costs several requests more than
    /// [`info`](Self::info).
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` for a damaged header; errors of the backend.
    pub async fn details(&self, name: &str) -> Result<ImageDetails> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.details(name)).await;
        }
        let (id, header) = self.load(name).await?;
        let told = async {
            let parent = match &header.parent {
                Some((_, spec)) => Some(self.parent_info(spec).await?),
                None => None,
            };
            let mut snapshots = Vec::new();
            for snapshot in header.snapshots.iter().rev() {
                // Snapshots of the newer format record no parent, only their overlap with the image's.
                let own = match (&snapshot.parent, &header.parent) {
                    (Some(spec), _) => Some(self.parent_info(spec).await?),
                    (None, Some(_)) if snapshot.overlap.is_some() => parent.clone(),
                    _ => None,
                };
                let overlap = snapshot.overlap.unwrap_or(0);
                let parent = own.map(|parent| ParentInfo { overlap, ..parent });
                snapshots.push(SnapshotDetails { info: snapshot.info(), parent });
            }
            let data_pool = match header.data_pool {
                Some(pool) => Some(self.pool_name(pool).await?),
                None => None,
            };
            let lock = self.lock_kind(&id).await?;
            let (group, snapshot_limit) = self.group_and_limit(&id).await?;
            // After a flatten, only snapshots may still need the parent.
            let is_clone = |(_, spec): &(Vec<u8>, Parent)| spec.overlap.is_some();
            let parent = parent.filter(|_| header.parent.as_ref().is_some_and(is_clone));
            Ok((parent, snapshots, data_pool, lock, group, snapshot_limit))
        };
        let (parent, snapshots, data_pool, lock, group, snapshot_limit) =
            told.await.map_err(|error: forebay_block::Error| error.within(format_args!("image {name}")))?;
        let op_features = header.op_features;
        let info = self.describe(name, id, header);
        Ok(ImageDetails { info, op_features, data_pool, group, snapshot_limit, parent, snapshots, lock })
    }

    /// Returns the group of an image as `POOL/NAME`, and its snapshot limit.
    pub(crate) async fn group_and_limit(&self, id: &str) -> Result<(Option<String>, Option<u64>)> {
        let keys = vec![GROUP_KEY.to_vec(), LIMIT_KEY.to_vec()];
        let mut values = self.backend.kv_get(&self.header_object(id), keys).await?.into_iter();
        let (group, limit) = (values.next().flatten(), values.next().flatten());
        let limit = limit.and_then(|value| value.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)));
        let group = match group.as_deref().and_then(decode_group) {
            Some((pool, group)) => self.group_name(pool, &group).await?,
            None => None,
        };
        Ok((group, limit.filter(|&limit| limit < u64::MAX)))
    }

    /// Returns the group of an image as `POOL/NAME`; one that is gone does not count.
    pub(crate) async fn group_of(&self, id: &str) -> Result<Option<String>> {
        Ok(self.group_and_limit(id).await?.0)
    }

    async fn group_name(&self, pool: i64, id: &str) -> Result<Option<String>> {
        let Some(backend) = self.pool_of(pool).await? else { return Ok(None) };
        let groups = ObjectName::in_namespace(self.namespace.clone(), GROUP_DIRECTORY);
        let name = match backend.kv_get(&groups, vec![id_key(id)]).await {
            Ok(mut values) => values.pop().flatten().and_then(|value| decode_string(&value)),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let slash = if self.namespace.is_empty() { "" } else { "/" };
        Ok(name.map(|name| format!("{}/{}{slash}{name}", backend.info().pool, self.namespace)))
    }

    /// Returns the backend of the pool with this number; `None` if the pool is gone.
    pub(crate) async fn pool_of(&self, pool: i64) -> Result<Option<Rc<dyn ObjectBackend>>> {
        match self.backend.shared() {
            Some(shared) if shared.pool_id() != pool => match shared.pool(pool).await {
                Ok(pool) => Ok(Some(pool)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            },
            _ => Ok(Some(self.backend.clone())),
        }
    }

    /// Returns the watchers of an image's header: the clients that have the image open, this one included. Empty
    /// where the pool is not shared.
    ///
    /// # Errors
    /// `NotFound`; errors of the backend.
    pub async fn watchers(&self, name: &str) -> Result<Vec<Watcher>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.watchers(name)).await;
        }
        let id = self.id_of(name).await?;
        let Some(shared) = self.backend.shared() else { return Ok(Vec::new()) };
        let watchers = shared.watchers(&self.header_object(&id)).await;
        watchers.map_err(|error| error.within(format_args!("image {name}")))
    }

    /// Resolves the ids of a parent to names. Deleted pools, images and snapshots are shown by id.
    pub(crate) async fn parent_info(&self, spec: &Parent) -> Result<ParentInfo> {
        let mut info = ParentInfo {
            pool: spec.pool.to_string(),
            namespace: spec.namespace.clone(),
            image: spec.image.clone(),
            id: spec.image.clone(),
            snapshot: spec.snap.0.to_string(),
            trash: false,
            is_clonable: false,
            snapshot_id: spec.snap.0,
            overlap: spec.overlap.unwrap_or(0),
        };
        let Some(backend) = self.pool_of(spec.pool).await? else { return Ok(info) };
        let images = Images::in_namespace(&backend, &spec.namespace);
        info.pool = backend.info().pool;
        match Directory::of_images(&images.backend, &images.namespace).name_of(&spec.image).await? {
            Some(name) => info.image = name,
            None => {
                if let Some(trashed) = images.trash().entry(&spec.image).await? {
                    (info.image, info.trash) = (trashed.name, true);
                }
            }
        }
        match images.header(&spec.image).await {
            Ok(header) => {
                let snapshot = header.snapshots.into_iter().find(|snapshot| snapshot.id == spec.snap);
                info.is_clonable = !info.trash && snapshot.as_ref().is_some_and(Snapshot::is_user);
                info.snapshot = snapshot.map_or(info.snapshot, |snapshot| snapshot.name);
            }
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(info)
    }

    async fn pool_name(&self, pool: i64) -> Result<String> {
        // Deleted pools are shown in the notation of `rbd`.
        let found = self.pool_of(pool).await?;
        Ok(found.map_or_else(|| format!("<missing data pool {pool}>"), |backend| backend.info().pool))
    }

    async fn lock_kind(&self, id: &str) -> Result<Option<LockKind>> {
        let Some(shared) = self.backend.shared() else { return Ok(None) };
        match shared.exec(&self.header_object(id), SnapId::HEAD, GET_INFO, encode_get_info()).await {
            // Unreadable locks are not reported here; taking the lock reports the reason.
            Ok(answer) => {
                Ok(decode_info(&answer).filter(|lock| !lock.lockers.is_empty()).map(|lock| match lock.exclusive {
                    true => LockKind::Exclusive,
                    false => LockKind::Shared,
                }))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl ImageDetails {
    /// Returns the names of the operations behind the feature `operations`, in the spelling of `rbd`; unknown bits as
    /// `bit N`.
    pub fn op_feature_names(&self) -> Vec<String> {
        names(self.op_features, &["clone-parent", "clone-child", "group", "snap-trash"])
    }

    /// Returns the names of the flags, in the spelling of `rbd`; unknown bits as `bit N`.
    pub fn flag_names(&self) -> Vec<String> {
        debug_assert_eq!((ImageHeader::MAP_INVALID, ImageHeader::FAST_DIFF_INVALID), (1, 2), "the order of the names");
        names(self.info.flags, &["object map invalid", "fast diff invalid"])
    }
}

fn names(bits: u64, known: &[&str]) -> Vec<String> {
    let set = (0..64).filter(|bit| bits >> bit & 1 == 1);
    set.map(|bit| known.get(bit).map_or_else(|| format!("bit {bit}"), |name| (*name).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_have_the_names_that_rbd_gives_them() {
        assert_eq!(
            names(0b11, &["object map invalid", "fast diff invalid"]),
            ["object map invalid", "fast diff invalid"]
        );
        assert_eq!(names(1 << 63 | 1, &["clone-parent"]), ["clone-parent", "bit 63"]);
        assert!(names(0, &[]).is_empty());
    }
}
