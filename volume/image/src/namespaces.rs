//! RBD namespaces of a pool: parts of it with images, groups and a trash of their own.
//!
//! The object `rbd_namespace` of the pool lists them. A namespace admits new images while the state in its directory of
//! images says so; the removal of an empty one removes that directory first.

use forebay_block::{Error, ErrorKind, ObjectName, ObjectOp, Result, SnapId, Transaction};

use crate::format::{
    DIRECTORY, GROUP_DIRECTORY, NAMESPACE_READY, NAMESPACE_STATE, NAMESPACES, TRASH, name_key, name_keys, name_of_key,
};
use crate::images::{Images, NAME_LEN_MAX};

const PAGE: usize = 1000;
/// Objects of a namespace without images, but for its directory of images.
const OBJECTS: [&str; 6] = ["rbd_children", GROUP_DIRECTORY, "rbd_info", "rbd_mirroring", "rbd_task", TRASH];

impl Images {
    fn namespaces_object(&self) -> ObjectName {
        ObjectName::new(NAMESPACES)
    }

    /// Returns the names of the pool's namespaces, in order.
    pub async fn namespaces(&self) -> Result<Vec<String>> {
        let (mut all, mut after) = (Vec::new(), Vec::new());
        loop {
            let page = match self.backend.kv_list(&self.namespaces_object(), name_keys(), &after, PAGE).await {
                Ok(page) => page,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(all),
                Err(error) => return Err(error.within("listing namespaces")),
            };
            all.extend(page.pairs.iter().filter_map(|(key, _)| name_of_key(key)));
            match page.pairs.last() {
                Some((last, _)) if page.more => after.clone_from(last),
                _ => return Ok(all),
            }
        }
    }

    /// Returns whether the pool lists a namespace of that name.
    pub async fn has_namespace(&self, name: &str) -> Result<bool> {
        match self.backend.kv_get(&self.namespaces_object(), vec![name_key(name)]).await {
            Ok(values) => Ok(values.first().is_some_and(Option::is_some)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Creates a namespace, durably. A creation or removal that was interrupted is completed or reverted.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for an invalid name; `Busy` while it is being created or removed here.
    pub async fn create_namespace(&self, name: &str) -> Result<()> {
        check_name(name)?;
        let _changing = self.change(&format!("namespace/{name}"))?;
        let there = Self::in_namespace(&self.backend, name);
        let created = async {
            let ops = vec![
                ObjectOp::Create { exclusive: false },
                ObjectOp::KvCompare { key: name_key(name), value: None },
                ObjectOp::KvSet { pairs: vec![(name_key(name), Vec::new())] },
            ];
            match self.backend.submit(&self.namespaces_object(), Transaction::new(ops).durable()).await {
                Err(error) if error.kind() == ErrorKind::Guard && there.admits_images().await? => {
                    return Err(Error::new(ErrorKind::Exists, format!("namespace {name}")));
                }
                Err(error) if error.kind() == ErrorKind::Guard => {}
                listed => drop(listed?),
            }
            there.admit_images().await
        };
        created.await.map_err(|error| error.within(format_args!("creating namespace {name}")))
    }

    /// Removes an empty namespace, durably. A removal that was interrupted is completed.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it has images, groups, or images in its trash, or while it is being created or removed here.
    pub async fn remove_namespace(&self, name: &str) -> Result<()> {
        let _changing = self.change(&format!("namespace/{name}"))?;
        let there = Self::in_namespace(&self.backend, name);
        let removed = async {
            if name.is_empty() || !self.has_namespace(name).await? {
                return Err(Error::new(ErrorKind::NotFound, format!("namespace {name}")));
            }
            there.check_groups_and_trash().await?;
            there.remove_empty_directory().await?;
            // An image may have been moved to the trash, or a group created, before the directory was gone.
            if let Err(error) = there.check_groups_and_trash().await {
                there.admit_images().await?;
                return Err(error);
            }
            for object in OBJECTS {
                there.remove_object(object, None).await?;
            }
            let unlisted = Transaction::of(ObjectOp::KvRemove { keys: vec![name_key(name)] }).durable();
            self.backend.submit(&self.namespaces_object(), unlisted).await.map(drop)
        };
        removed.await.map_err(|error| error.within(format_args!("removing namespace {name}")))
    }

    fn directory_object(&self) -> ObjectName {
        ObjectName::in_namespace(self.namespace.clone(), DIRECTORY)
    }

    /// Returns whether this namespace admits new images.
    async fn admits_images(&self) -> Result<bool> {
        match self.backend.kv_get(&self.directory_object(), vec![NAMESPACE_STATE.to_vec()]).await {
            Ok(values) => Ok(values.first().is_some_and(|state| state.as_deref() == Some(NAMESPACE_READY))),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Lets this namespace admit new images.
    async fn admit_images(&self) -> Result<()> {
        let ready = ObjectOp::KvSet { pairs: vec![(NAMESPACE_STATE.to_vec(), NAMESPACE_READY.to_vec())] };
        self.backend.submit(&self.directory_object(), Transaction::of(ready).durable()).await.map(drop)
    }

    /// Fails with `Busy` if this namespace has groups, or images in its trash.
    async fn check_groups_and_trash(&self) -> Result<()> {
        for (object, what) in [(GROUP_DIRECTORY, "groups"), (TRASH, "images in its trash")] {
            if self.has_entries(object).await? {
                return Err(Error::new(ErrorKind::Busy, format!("namespace {} has {what}", self.namespace)));
            }
        }
        Ok(())
    }

    /// Returns whether a directory of this namespace has entries, readable or not.
    async fn has_entries(&self, object: &str) -> Result<bool> {
        let object = ObjectName::in_namespace(self.namespace.clone(), object);
        match self.backend.kv_list(&object, b"", b"", 2).await {
            Ok(page) => Ok(page.pairs.iter().any(|(key, _)| key != NAMESPACE_STATE)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Removes the directory of images, if it has none; from then on the namespace admits no new images.
    async fn remove_empty_directory(&self) -> Result<()> {
        loop {
            let version = match self.backend.stat(&self.directory_object(), SnapId::HEAD).await {
                Ok(stat) => stat.version,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
                Err(error) => return Err(error),
            };
            if self.has_entries(DIRECTORY).await? {
                return Err(Error::new(ErrorKind::Busy, format!("namespace {} has images", self.namespace)));
            }
            match self.remove_object(DIRECTORY, Some(version)).await {
                // Another client has changed it since.
                Err(error) if error.kind() == ErrorKind::Guard => {}
                removed => return removed,
            }
        }
    }

    /// Removes an object of this namespace, of that version if one is given; succeeds if it does not exist.
    async fn remove_object(&self, object: &str, version: Option<u64>) -> Result<()> {
        let object = ObjectName::in_namespace(self.namespace.clone(), object);
        let mut ops = vec![ObjectOp::AssertExists];
        ops.extend(version.map(ObjectOp::AssertVersion));
        ops.push(ObjectOp::Remove);
        match self.backend.submit(&object, Transaction::new(ops).durable()).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map(drop),
        }
    }
}

/// Refuses names that clients could not write, since `/` and `@` separate a namespace from others.
fn check_name(name: &str) -> Result<()> {
    let unusable = |c: char| c.is_control() || c == '/' || c == '@';
    if name.is_empty() || name.len() > NAME_LEN_MAX || name.contains(unusable) {
        let text =
            format!("namespace name {name:?}: 1 to {NAME_LEN_MAX} bytes without '/', '@' and control characters");
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}
