//! Creation of clones.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};

use crate::children::{CLONE_CHILD, add_legacy, attach, detach, remove_legacy};
use crate::format::{ImageFeatures, ImageHeader, METADATA_PREFIX};
use crate::images::Images;
use crate::info::{CloneFormat, CloneOptions, CreateOptions};
use crate::wire::children::Child;
use crate::wire::snapshot::{Parent, Protection};

/// Metadata values read in one request.
const PAGE: usize = 64;

/// Snapshot from which a clone is being made.
pub(crate) struct CloneSource {
    /// Images of the parent's pool and namespace.
    images: Rc<Images>,
    parent: Parent,
    /// Set if the parent's header records the clone (version 2).
    recorded_by_parent: bool,
    /// Keys and values of the parent's metadata, which the clone inherits.
    pub(crate) metadata: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Images {
    /// Makes an image of this pool that is a clone of a snapshot, `IMAGE@SNAPSHOT` of `from`: it has the snapshot's size and
    /// data, and shares what it does not change. An earlier attempt at the same name that was interrupted by a crash is
    /// completed.
    ///
    /// # Errors
    /// `NotFound` if there is no such snapshot; `Exists`; `Invalid` for an invalid name or option, a snapshot that is not
    /// protected and a clone of version 1, or pools of different clusters; `Unsupported` if the parent has no layering;
    /// errors of the backend, after which the clone does not exist.
    pub async fn clone_from(
        self: &Rc<Self>,
        from: &Rc<Self>,
        snapshot: &str,
        name: &str,
        options: &CloneOptions,
    ) -> Result<()> {
        let there = from.route(snapshot);
        let (from, snapshot) = there.as_ref().map_or((from, snapshot), |(images, snapshot)| (images, *snapshot));
        let here = self.route(name);
        let (images, name) = here.as_ref().map_or((self, name), |(images, name)| (images, *name));
        let (source, create) = match images.source(from, snapshot, options).await {
            Ok(source) => source,
            Err(error) => return Err(error.within(format_args!("cloning {snapshot} as {name}"))),
        };
        images.create_from(name, create, Some(&source)).await
    }

    /// Returns the source of a clone that is to be created here, and its options.
    async fn source(
        &self,
        from: &Rc<Self>,
        name: &str,
        options: &CloneOptions,
    ) -> Result<(CloneSource, CreateOptions)> {
        let refuse = |why: String| Err(Error::new(ErrorKind::Invalid, why));
        let Some((image, snapshot)) = name.split_once('@') else {
            return refuse(format!("{name} is no snapshot: write IMAGE@SNAPSHOT"));
        };
        let is_one_cluster = match self.backend().shared() {
            Some(shared) => match shared.pool(from.pool_id()).await {
                Ok(pool) => from.backend().shared().is_some() && same(&pool, from.backend()),
                Err(error) if error.kind() == ErrorKind::NotFound => false,
                Err(error) => return Err(error),
            },
            None => same(self.backend(), from.backend()),
        };
        if !is_one_cluster {
            return refuse(
                "a clone and its parent must be in pools of the same cluster, or both in the same store".to_owned(),
            );
        }
        let (id, header) = from.load(image).await?;
        let found = header.snapshots.iter().find(|stored| stored.is_user() && stored.name == snapshot);
        let Some(found) = found else {
            return Err(Error::new(ErrorKind::NotFound, format!("snapshot {image}@{snapshot}")));
        };
        let unsupported = header.features.unsupported(true, from.backend().shared().is_some());
        if unsupported != ImageFeatures::default() {
            let what = format!("the parent has the features {unsupported}");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        if !header.features.has(ImageFeatures::LAYERING) {
            return Err(Error::new(ErrorKind::Unsupported, "the parent has no layering"));
        }
        if options.features.is_some_and(|features| !features.has(ImageFeatures::LAYERING)) {
            return refuse("a clone must have the feature layering".to_owned());
        }
        let is_protected = found.protection == Protection::Full;
        let one_namespace = self.namespace() == from.namespace();
        let recorded_by_parent = match options.format {
            CloneFormat::V1 if !is_protected => {
                return refuse(format!("the snapshot {image}@{snapshot} must be protected for a clone of version 1"));
            }
            CloneFormat::V1 if !one_namespace => {
                return refuse("a clone of version 1 must be in the namespace of its parent".to_owned());
            }
            CloneFormat::V1 => false,
            CloneFormat::V2 => true,
            CloneFormat::Auto => !is_protected || !one_namespace || self.backend().shared().is_none(),
        };
        let parent = Parent {
            pool: from.pool_id(),
            namespace: from.namespace().to_string(),
            image: id,
            snap: found.id,
            overlap: Some(found.size),
        };
        let create = CreateOptions {
            size: found.size,
            object_size: options.object_size.unwrap_or(header.object_size()),
            striping: options.striping,
            features: options.features,
            data_pool: options.data_pool.clone(),
            // What is copied up from an encrypted parent is not left in the plain.
            encrypted: options.encrypted || from.backend().is_encrypted(&from.data_prefix(&header.object_prefix)),
        };
        let metadata = from.metadata_of(&parent.image).await?;
        Ok((CloneSource { images: from.clone(), parent, recorded_by_parent, metadata }, create))
    }

    /// Returns the stored metadata of an image, as keys and values of its header.
    async fn metadata_of(&self, id: &str) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
        let mut pairs: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        loop {
            let after = pairs.last().map_or(&[][..], |(key, _)| &key[..]);
            let page = self.backend().kv_list(&self.header_object(id), METADATA_PREFIX.as_bytes(), after, PAGE).await?;
            pairs.extend(page.pairs);
            if !page.more {
                return Ok(pairs);
            }
        }
    }
}

fn same(one: &Rc<dyn forebay_block::ObjectBackend>, other: &Rc<dyn forebay_block::ObjectBackend>) -> bool {
    std::ptr::addr_eq(Rc::as_ptr(one), Rc::as_ptr(other))
}

impl CloneSource {
    /// Records a clone that is about to be created in `clones`.
    pub(crate) async fn record(&self, clones: &Images, id: &str) -> Result<()> {
        if self.recorded_by_parent {
            return attach(&self.images, &self.parent, &child(clones, id)).await;
        }
        add_legacy(clones, &self.parent, id).await?;
        // A client that ends the protection marks the snapshot first, and looks for clones then.
        let header = self.images.header(&self.parent.image).await?;
        let found = header.snapshots.iter().find(|snapshot| snapshot.id == self.parent.snap);
        if found.is_some_and(|snapshot| snapshot.protection == Protection::Full) {
            return Ok(());
        }
        remove_legacy(clones, &self.parent, id).await?;
        Err(Error::new(ErrorKind::Busy, "the protection of the snapshot has been ended meanwhile"))
    }

    /// Ends the record of a clone whose creation failed.
    pub(crate) async fn forget(&self, clones: &Images, id: &str) -> Result<()> {
        match self.recorded_by_parent {
            true => detach(&self.images, &self.parent, &child(clones, id)).await,
            false => remove_legacy(clones, &self.parent, id).await,
        }
    }

    /// Returns the header of a new image as that of the clone.
    pub(crate) fn inherit(&self, header: ImageHeader) -> ImageHeader {
        let header = ImageHeader { parent: Some((self.parent.encode(), self.parent.clone())), ..header };
        header.with_operations(if self.recorded_by_parent { CLONE_CHILD } else { 0 }, 0)
    }
}

fn child(clones: &Images, id: &str) -> Child {
    Child { pool: clones.pool_id(), namespace: clones.namespace().to_string(), image: id.to_owned() }
}
