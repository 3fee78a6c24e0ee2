//! RBD namespaces of a pool: parts of it with images, groups and a trash of their own.
//!
//! The object `rbd_namespace` of the pool lists them. A namespace admits new images while the state in its directory of
//! images says so; the removal of an empty one removes that directory first.

use forebay_block::{Error, ErrorKind, ObjectName, ObjectOp, Result, SnapId, Transaction};

use crate::directory::Directory;
use crate::format::{DIRECTORY, GROUP_DIRECTORY, NAMESPACE_READY, NAMESPACE_STATE, TRASH, name_key};
use crate::images::{Images, NAME_LEN_MAX};

/// Objects of a namespace without images, but for its directory of images.
const OBJECTS: [&str; 6] = ["rbd_children", GROUP_DIRECTORY, "rbd_info", "rbd_mirroring", "rbd_task", TRASH];

impl Images {
    fn namespace_list(&self) -> Directory<'_> {
        Directory::of_namespaces(&self.backend, &self.namespace)
    }

    /// Returns the names of the pool's namespaces, in order.
    pub async fn namespaces(&self) -> Result<Vec<String>> {
        self.namespace_list().all_names().await.map_err(|error| error.within("listing namespaces"))
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
            match self.backend.submit(&self.namespace_list().object(), Transaction::new(ops).durable()).await {
                Err(error) if error.kind() == ErrorKind::Guard && there.admits_images().await? => {
                    Err(Error::new(ErrorKind::Exists, format!("namespace {name}")))
                }
                Err(error) if error.kind() == ErrorKind::Guard => {
                    there.admit_images().await?;
                    // A removal by another client that is about to end either finds the list changed, or is undone by this.
                    self.list_namespace(name).await
                }
                listed => {
                    listed?;
                    there.admit_images().await
                }
            }
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
            if name.is_empty() || self.namespace_list().get(name_key(name)).await?.is_none() {
                return Err(Error::new(ErrorKind::NotFound, format!("namespace {name}")));
            }
            let mut seen = Vec::new();
            for object in OBJECTS {
                seen.push((object, there.version_of(object).await?));
            }
            there.check_groups_and_trash().await?;
            there.remove_empty_directory().await?;
            // Another client may have moved an image to the trash or made a group before the directory was gone, or have
            // created the namespace again.
            for (object, version) in seen {
                if !there.remove_unchanged(object, version).await? {
                    there.admit_images().await?;
                    return Err(there.in_use());
                }
            }
            self.unlist_namespace(name, &there).await
        };
        removed.await.map_err(|error| error.within(format_args!("removing namespace {name}")))
    }

    /// Lists a namespace, again if it is listed.
    async fn list_namespace(&self, name: &str) -> Result<()> {
        let listed = ObjectOp::KvSet { pairs: vec![(name_key(name), Vec::new())] };
        self.backend.submit(&self.namespace_list().object(), Transaction::of(listed).durable()).await.map(drop)
    }

    /// Removes a namespace from the list, unless another client has created it again.
    async fn unlist_namespace(&self, name: &str, there: &Images) -> Result<()> {
        loop {
            let Some(version) = self.version(&self.namespace_list().object()).await? else { return Ok(()) };
            if there.admits_images().await? {
                return Err(there.in_use());
            }
            let ops = vec![ObjectOp::AssertVersion(version), ObjectOp::KvRemove { keys: vec![name_key(name)] }];
            match self.backend.submit(&self.namespace_list().object(), Transaction::new(ops).durable()).await {
                Err(error) if error.kind() == ErrorKind::Guard => {}
                unlisted => return unlisted.map(drop),
            }
        }
    }

    fn in_use(&self) -> Error {
        Error::new(ErrorKind::Busy, format!("another client uses namespace {}", self.namespace))
    }

    /// Returns the version of an object; `None` if it does not exist.
    async fn version(&self, object: &ObjectName) -> Result<Option<u64>> {
        match self.backend.stat(object, SnapId::HEAD).await {
            Ok(stat) => Ok(Some(stat.version)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn version_of(&self, object: &str) -> Result<Option<u64>> {
        self.version(&ObjectName::in_namespace(self.namespace.clone(), object)).await
    }

    /// Returns whether this namespace admits new images: it was created, and is not being removed.
    pub async fn admits_images(&self) -> Result<bool> {
        self.directory().admits_images().await
    }

    /// Lets this namespace admit new images.
    async fn admit_images(&self) -> Result<()> {
        let ready = ObjectOp::KvSet { pairs: vec![(NAMESPACE_STATE.to_vec(), NAMESPACE_READY.to_vec())] };
        self.backend.submit(&self.directory().object(), Transaction::of(ready).durable()).await.map(drop)
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
            let Some(version) = self.version(&self.directory().object()).await? else { return Ok(()) };
            if self.has_entries(DIRECTORY).await? {
                return Err(Error::new(ErrorKind::Busy, format!("namespace {} has images", self.namespace)));
            }
            if self.remove_unchanged(DIRECTORY, Some(version)).await? {
                return Ok(());
            }
        }
    }

    /// Removes an object of this namespace that has this version, or does not exist; returns false if it has changed.
    async fn remove_unchanged(&self, object: &str, version: Option<u64>) -> Result<bool> {
        let Some(version) = version else { return Ok(self.version_of(object).await?.is_none()) };
        let object = ObjectName::in_namespace(self.namespace.clone(), object);
        let ops = vec![ObjectOp::AssertVersion(version), ObjectOp::Remove];
        match self.backend.submit(&object, Transaction::new(ops).durable()).await {
            // A removal by another client has ended before.
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(true),
            Err(error) if error.kind() == ErrorKind::Guard => Ok(self.version(&object).await?.is_none()),
            removed => removed.map(|_| true),
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
