//! Registry of the images of one backend: creates, lists, renames and removes them, and tracks which are open.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::sync::{KeyedLock, WeakMap, join_all};
use forebay_reactor::{random, timeout, wall_clock};

use crate::create_clone::CloneSource;
use crate::directory::{Added, Directory};
use crate::format::{
    ImageFeatures, ImageHeader, SNAPSHOT_PREFIX, header_object, map_object, object_prefix, object_prefix_elsewhere,
};
use crate::image::{Image, ImageOpenOptions};
use crate::info::{CreateOptions, ImageDescription, STRIPE_COUNT_MAX, STRIPE_UNIT_MIN, SnapshotInfo, Striping};
use crate::objectmap;
use crate::open_image::{ImageView, OpenImage};
use crate::resize::unless_absent;
use crate::watcher::NOTIFY_TIMEOUT;
use crate::wire::bitmap::OBJECTS_MAX;
use crate::wire::notify::NotifyMessage;
use crate::wire::snapshot::Snapshot;

/// Longest name of a new image in bytes, librbd's limit.
pub const NAME_LEN_MAX: usize = 95;
/// Largest image in bytes: 1 EiB.
pub const SIZE_MAX: u64 = 1 << 60;
/// Smallest and largest objects of a new image, in bytes.
pub const OBJECT_SIZES: std::ops::RangeInclusive<u64> = 64 << 10..=32 << 20;
/// Names or keys read in one request.
const PAGE: usize = 1000;
/// Attempts to read a header before it is taken for damaged.
const HEADER_TRIES: usize = 4;
/// Attempts to find an unused id.
const ID_TRIES: usize = 8;

/// Images of one backend, or of one of its namespaces.
pub struct Images {
    pub(crate) backend: Rc<dyn ObjectBackend>,
    /// RBD namespace; empty for the default one.
    pub(crate) namespace: Rc<str>,
    /// Open images by id. An entry without handles is closing.
    pub(crate) open: WeakMap<String, OpenImage>,
    /// Names of images being created, renamed, moved or removed; `trash/ID` for one in the trash, `group/NAME` for a group.
    changing: RefCell<BTreeSet<String>>,
    /// Locks by id: one open at a time, so that an image is never open twice.
    opening: KeyedLock<String>,
}

thread_local! {
    /// Registries of this core, one for each backend and namespace in use.
    static ALL: RefCell<Vec<Weak<Images>>> = const { RefCell::new(Vec::new()) };
}

impl Images {
    /// Returns the images of `backend`: the same registry for every caller on this core, so that an image is never
    /// open twice.
    pub fn of(backend: &Rc<dyn ObjectBackend>) -> Rc<Self> {
        Self::in_namespace(backend, "")
    }

    /// Returns the images of an RBD namespace, which must have been created (`rbd namespace create`) before images
    /// are.
    pub fn in_namespace(backend: &Rc<dyn ObjectBackend>, namespace: &str) -> Rc<Self> {
        ALL.with_borrow_mut(|all| {
            all.retain(|images| images.strong_count() > 0);
            let same = |images: &Rc<Images>| {
                &*images.namespace == namespace && std::ptr::addr_eq(Rc::as_ptr(&images.backend), Rc::as_ptr(backend))
            };
            if let Some(images) = all.iter().filter_map(Weak::upgrade).find(same) {
                return images;
            }
            let images = Rc::new(Self {
                backend: backend.clone(),
                namespace: namespace.into(),
                open: WeakMap::new(),
                changing: RefCell::default(),
                opening: KeyedLock::new(),
            });
            all.push(Rc::downgrade(&images));
            images
        })
    }

    /// Closes all open images of a shared backend, those of its namespaces included, so that other clients can acquire their
    /// locks. Waits `patience` for the handles that are still in use; the lock and watch of an image that keeps one are
    /// released then, and writes through it fail with [`ErrorKind::ShuttingDown`]. A lock that is to be kept
    /// ([`Image::keep_lock`]) stays.
    pub async fn close_all(backend: &Rc<dyn ObjectBackend>, patience: Duration) {
        let registries: Vec<_> = ALL.with_borrow(|all| {
            let same = |images: &Rc<Images>| std::ptr::addr_eq(Rc::as_ptr(&images.backend), Rc::as_ptr(backend));
            all.iter().filter_map(Weak::upgrade).filter(same).collect()
        });
        let open = || {
            let images = registries.iter().flat_map(|images| images.open.values());
            images.filter(|image| image.is_shared()).collect::<Vec<_>>()
        };
        let unused = async {
            while let Some(image) = open().into_iter().find(|image| !image.lifecycle().is_closed()) {
                image.lifecycle().closed().await;
            }
        };
        if timeout(patience, unused).await.is_ok() {
            return;
        }
        let close = async |image: Rc<OpenImage>| {
            if image.lifecycle().is_closing() {
                image.lifecycle().closed().await;
            } else if !image.exclusive_lock().is_some_and(|lock| lock.is_kept()) {
                tracing::debug!(image = image.name(), "closing an image that is in use");
                image.end_coordination().await;
            }
        };
        join_all(open().into_iter().map(|image| Box::pin(close(image)))).await;
    }

    /// Returns the backend.
    pub fn backend(&self) -> &Rc<dyn ObjectBackend> {
        &self.backend
    }

    pub(crate) fn namespace(&self) -> &Rc<str> {
        &self.namespace
    }

    pub(crate) fn directory(&self) -> Directory<'_> {
        Directory::of_images(&self.backend, &self.namespace)
    }

    /// Resolves a name of the form `NAMESPACE/IMAGE` to the registry of the namespace and the name in it; `None` for
    /// any other name.
    pub(crate) fn route<'a>(&self, name: &'a str) -> Option<(Rc<Self>, &'a str)> {
        let (namespace, image) = name.split_once('/')?;
        let here = self.namespace.is_empty() && !namespace.is_empty();
        here.then(|| (Self::in_namespace(&self.backend, namespace), image))
    }

    /// Creates an image. An earlier attempt at the same name that was interrupted by a crash is completed.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for an invalid name, size, object size or feature; `Busy` while another change of that
    /// name is in progress; errors of the backend, after which the image does not exist.
    pub async fn create(&self, name: &str, options: CreateOptions) -> Result<()> {
        match self.route(name) {
            Some((images, name)) => images.create_from(name, options, None).await,
            None => self.create_from(name, options, None).await,
        }
    }

    /// Creates an image, as a clone if it has a `source`.
    pub(crate) async fn create_from(
        &self,
        name: &str,
        mut options: CreateOptions,
        source: Option<&CloneSource>,
    ) -> Result<()> {
        check_name(name)?;
        let features = options.features.unwrap_or_else(|| self.default_features(&options));
        let elsewhere = if options.data_pool.is_some() { ImageFeatures::DATA_POOL } else { ImageFeatures::default() };
        let striped = match options.striping {
            Some(striping) if striping != Striping::none(options.object_size) => ImageFeatures::STRIPING,
            _ => ImageFeatures::default(),
        };
        let by_options = ImageFeatures::DATA_POOL.0 | ImageFeatures::STRIPING.0;
        options.features = Some(ImageFeatures(features.0 & !by_options | elsewhere.0 | striped.0));
        check_options(name, &options, self.backend.shared().is_some())?;
        let _changing = self.change(name)?;
        let directory = self.directory();
        let id = self.claim(&directory, name).await?;
        let finished = self.finish_create(&directory, name, &id, &options, source).await;
        if let Err(error) = &finished {
            // A header that existed already belongs to another image.
            let with_header = error.kind() != ErrorKind::Exists;
            self.undo_create(&directory, name, &id, with_header, source).await;
        }
        let finished = match finished {
            Ok(()) if directory.is_replaced(name, &id).await? => {
                // Another client has taken the creation for one that was interrupted.
                self.undo_create(&directory, name, &id, true, source).await;
                Err(Error::new(ErrorKind::Exists, format!("image {name}")))
            }
            finished => finished,
        };
        finished.map_err(|error| error.within(format_args!("creating image {name}")))
    }

    /// Adds the name to the directory; returns the id.
    async fn claim(&self, directory: &Directory<'_>, name: &str) -> Result<String> {
        let exists = || Error::new(ErrorKind::Exists, format!("image {name}"));
        for _ in 0..ID_TRIES {
            let id = format!("{:014x}", random() >> 8);
            let left = match directory.add(name, &id).await? {
                Added::New => return Ok(id),
                Added::IdTaken => continue,
                Added::NameTaken(left) => left,
            };
            if self.header_exists(&left).await? {
                return Err(exists());
            }
            // An entry without a header was left by an interrupted creation or removal, or is that of another client's
            // creation or removal, which does not find it under another id.
            if !directory.replace(name, &left, &id).await? {
                continue;
            }
            if !self.header_exists(&left).await? {
                return Ok(id);
            }
            // A creation that has just been completed.
            directory.replace(name, &id, &left).await?;
            return Err(exists());
        }
        Err(Error::new(ErrorKind::Busy, format!("image {name}: no free id in {ID_TRIES} tries")))
    }

    async fn finish_create(
        &self,
        directory: &Directory<'_>,
        name: &str,
        id: &str,
        options: &CreateOptions,
        source: Option<&CloneSource>,
    ) -> Result<()> {
        let order = options.object_size.trailing_zeros() as u8;
        let striping =
            options.striping.filter(|_| options.features.is_some_and(|set| set.has(ImageFeatures::STRIPING)));
        let features = options.features.unwrap_or_default();
        let mut header = ImageHeader { striping, ..ImageHeader::new(id, options.size, order, features, wall_clock()) };
        if let (Some(pool), Some(shared)) = (&options.data_pool, self.backend.shared()) {
            header.data_pool = Some(shared.pool_id_of(pool).await?);
            header.object_prefix = object_prefix_elsewhere(shared.pool_id(), id);
        }
        if options.encrypted {
            // Before there can be any data.
            self.backend.encrypt(&self.data_prefix(&header.object_prefix)).await?;
        }
        directory.write_id(name, id).await?;
        let mut pairs = Vec::new();
        if let Some(source) = source {
            source.record(self, id).await?;
            header = source.inherit(header);
            pairs.extend(source.metadata.iter().cloned());
        }
        pairs.extend(header.encode());
        let ops = vec![ObjectOp::Create { exclusive: true }, ObjectOp::KvSet { pairs }];
        self.backend.submit(&self.header_object(id), Transaction::new(ops).durable()).await?;
        if features.has(ImageFeatures::OBJECT_MAP) {
            let objects = header.striping_or_none().objects(options.object_size, options.size);
            objectmap::create(&self.backend, &map_object(&self.namespace, id, None), objects).await?;
        }
        Ok(())
    }

    fn default_features(&self, options: &CreateOptions) -> ImageFeatures {
        if self.backend.shared().is_none() {
            return ImageFeatures(ImageFeatures::LAYERING.0 | ImageFeatures::DEEP_FLATTEN.0);
        }
        let objects = options.objects();
        let without = if objects > OBJECTS_MAX { ImageFeatures::OBJECT_MAP.0 | ImageFeatures::FAST_DIFF.0 } else { 0 };
        ImageFeatures(ImageFeatures::RBD_DEFAULT.0 & !without)
    }

    pub(crate) fn header_object(&self, id: &str) -> ObjectName {
        header_object(&self.namespace, id)
    }

    /// Rolls back a failed creation, as far as possible. Any remains can be completed by creating the image again, or
    /// removed.
    async fn undo_create(
        &self,
        directory: &Directory<'_>,
        name: &str,
        id: &str,
        with_header: bool,
        source: Option<&CloneSource>,
    ) {
        let undo = async {
            if with_header {
                for object in [map_object(&self.namespace, id, None), self.header_object(id)] {
                    unless_absent(self.backend.submit(&object, Transaction::of(ObjectOp::Remove).durable())).await?;
                }
            }
            if let Some(source) = source {
                source.forget(self, id).await?;
            }
            self.backend.destroy_key(&self.data_prefix(&object_prefix(id))).await?;
            directory.remove_ids(name, id).await?;
            directory.remove(name, id).await
        };
        if let Err(error) = undo.await {
            tracing::warn!(image = name, %error, "cannot remove what is left of a failed creation; create the image again or remove it");
        }
    }

    pub(crate) async fn header_exists(&self, id: &str) -> Result<bool> {
        match self.backend.stat(&self.header_object(id), forebay_block::SnapId::HEAD).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns all names, in order. Includes images whose creation or removal was interrupted by a crash; excludes
    /// names that are not UTF-8, which only other clients create.
    pub async fn list(&self) -> Result<Vec<String>> {
        self.directory().all_names().await.map_err(|error| error.within("listing images"))
    }

    /// Returns up to `max` names in order, from the first or from `cursor`, and the cursor of the next page, if there
    /// is one.
    pub async fn list_page(&self, cursor: Option<Vec<u8>>, max: usize) -> Result<(Vec<String>, Option<Vec<u8>>)> {
        let listed = self.directory().names(cursor, max.max(1)).await;
        listed.map_err(|error| error.within("listing images"))
    }

    /// Returns the description of an image.
    pub async fn info(&self, name: &str) -> Result<ImageDescription> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.info(name)).await;
        }
        let (id, header) = self.load(name).await?;
        Ok(self.describe(name, id, header))
    }

    pub(crate) fn describe(&self, name: &str, id: String, header: ImageHeader) -> ImageDescription {
        // During a shrink, the size of the open image is ahead of the stored one.
        let size = self.find_open(&id).map_or(header.size, |shared| shared.size());
        ImageDescription {
            name: name.to_owned(),
            id,
            size,
            object_size: header.object_size(),
            striping: header.striping,
            features: header.features,
            flags: header.flags,
            snapshots: header.snapshots.len(),
            has_parent: header.parent.is_some(),
            created: header.created,
            accessed: header.accessed,
            modified: header.modified,
            block_name_prefix: header.object_prefix,
        }
    }

    /// Returns the snapshots of an image, oldest first.
    pub async fn snapshots(&self, name: &str) -> Result<Vec<SnapshotInfo>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.snapshots(name)).await;
        }
        let (_, header) = self.load(name).await?;
        Ok(header.snapshots.iter().rev().map(Snapshot::info).collect())
    }

    /// Opens an image, or as `IMAGE@SNAPSHOT` a snapshot of it, which is read-only. Opening an open image returns
    /// another handle of it.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while it is being created, renamed or removed; `Unsupported` for unsupported features;
    /// `Corrupt` for a damaged header.
    pub async fn open(self: &Rc<Self>, name: &str, options: ImageOpenOptions) -> Result<Rc<Image>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.open(name, options)).await;
        }
        let (name, snapshot) = match name.split_once('@') {
            Some((name, snapshot)) => (name, Some(snapshot)),
            None => (name, None),
        };
        self.check_unchanging(name)?;
        let id = self.id_of(name).await?;
        // Serialized, so that the image is not opened and resized between the lookup and the open.
        let _opening = self.opening.lock(&id).await;
        let read_only = options.read_only || snapshot.is_some();
        let shared = self.open_shared(name, &id, read_only).await;
        let shared = shared.map_err(|error| error.within(format_args!("image {name}")))?;
        shared.check_features(read_only)?;
        let view = match snapshot {
            Some(snapshot) => Some(find_snapshot(&shared, name, snapshot)?),
            None => None,
        };
        self.check_unchanging(name)?;
        self.open.insert(id, &shared);
        Ok(Image::new(shared, options, view))
    }

    /// Opens an image by its id, for writing. It may have no name.
    pub(crate) async fn open_id(self: &Rc<Self>, id: &str) -> Result<Rc<Image>> {
        let name = self.directory().name_of(id).await?.unwrap_or_else(|| id.to_owned());
        let _opening = self.opening.lock(&id.to_owned()).await;
        let shared = self.open_shared(&name, id, false).await;
        let shared = shared.map_err(|error| error.within(format_args!("image {name}")))?;
        shared.check_features(false)?;
        self.open.insert(id.to_owned(), &shared);
        Ok(Image::new(shared, ImageOpenOptions::default(), None))
    }

    /// Opens an image that is to be removed, without its parent, which may be gone, and without registering it.
    pub(crate) async fn open_for_removal(self: &Rc<Self>, name: &str, id: &str) -> Result<Rc<OpenImage>> {
        let shared = OpenImage::open_without_parent(self, name, id, self.header(id).await?).await?;
        shared.check_features(false)?;
        shared.begin_watch().await?;
        Ok(shared)
    }

    /// Returns the open image of that id, or opens it without registering it.
    pub(crate) async fn open_shared(self: &Rc<Self>, name: &str, id: &str, read_only: bool) -> Result<Rc<OpenImage>> {
        if let Some(shared) = self.find_open(id) {
            if !shared.lifecycle().is_closing() {
                return Ok(shared);
            }
            // Wait for its lock and its watch to be released.
            shared.lifecycle().closed().await;
        }
        let header = self.header(id).await?;
        check_openable(name, &header)?;
        let shared = OpenImage::open(self, name, id, header, 0, false).await?;
        shared.check_features(read_only)?;
        shared.begin_watch().await?;
        Ok(shared)
    }

    /// Renames an image, open or not.
    ///
    /// # Errors
    /// `NotFound`; `Exists` if the new name is in use; `Invalid` if it is not a valid name; `Busy` while either name
    /// is being changed.
    pub async fn rename(&self, from: &str, to: &str) -> Result<()> {
        if let (Some((images, from)), Some((there, to))) = (self.route(from), self.route(to))
            && Rc::ptr_eq(&images, &there)
        {
            return Box::pin(images.rename(from, to)).await;
        }
        check_name(to)?;
        if from == to {
            return Err(Error::new(ErrorKind::Exists, format!("image {to}")));
        }
        let _from = self.change(from)?;
        let _to = self.change(to)?;
        let (id, _) = self.load(from).await?;
        let directory = self.directory();
        let renamed = async {
            if directory.id_of(to).await?.is_some() {
                return Err(Error::new(ErrorKind::Exists, format!("image {to}")));
            }
            directory.write_id(to, &id).await?;
            if let Err(error) = directory.rename(&id, from, to).await {
                let left = directory.remove_id(to, &id).await;
                left.unwrap_or_else(|left| tracing::warn!(image = to, error = %left, "cannot remove the id object of a failed rename; the next image of that name takes it over"));
                return Err(error);
            }
            if let Some(shared) = self.find_open(&id) {
                shared.set_name(to);
            }
            directory.remove_id(from, &id).await?;
            if let Some(shared) = self.backend.shared() {
                // Other clients that have the image open look up its name again; those that do not respond do not
                // have it open.
                let update = NotifyMessage::HeaderUpdate.encode();
                let told = shared.notify(&self.header_object(&id), update, NOTIFY_TIMEOUT).await;
                told.map(drop).unwrap_or_else(
                    |error| tracing::debug!(image = to, %error, "cannot notify the other clients of a renamed image"),
                );
            }
            Ok(())
        };
        renamed.await.map_err(|error| error.within(format_args!("renaming image {from} to {to}")))
    }

    pub(crate) async fn id_of(&self, name: &str) -> Result<String> {
        let id = self.directory().id_of(name).await;
        let id = id.map_err(|error| error.within(format_args!("image {name}")))?;
        id.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("image {name}")))
    }

    /// Returns an image's id and metadata.
    pub(crate) async fn load(&self, name: &str) -> Result<(String, ImageHeader)> {
        let id = self.id_of(name).await?;
        let header = self.header(&id).await.map_err(|error| error.within(format_args!("image {name}")))?;
        Ok((id, header))
    }

    pub(crate) async fn header(&self, id: &str) -> Result<ImageHeader> {
        let object = self.header_object(id);
        let mut tries = 0;
        loop {
            let keys = ImageHeader::KEYS.iter().map(|key| key.as_bytes().to_vec()).collect();
            let values = self.backend.kv_get(&object, keys).await?;
            let mut snapshots: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
            loop {
                let after = snapshots.last().map_or(&[][..], |(key, _)| &key[..]);
                let page = self.backend.kv_list(&object, SNAPSHOT_PREFIX.as_bytes(), after, PAGE).await?;
                snapshots.extend(page.pairs);
                if !page.more {
                    break;
                }
            }
            tries += 1;
            match ImageHeader::decode(&values, &snapshots) {
                // The two reads are of different states if another client makes a snapshot in between.
                Err(error) if error.kind() == ErrorKind::Corrupt && tries < HEADER_TRIES => continue,
                decoded => return decoded,
            }
        }
    }

    pub(crate) fn find_open(&self, id: &str) -> Option<Rc<OpenImage>> {
        self.open.get(id)
    }

    fn check_unchanging(&self, name: &str) -> Result<()> {
        if self.changing.borrow().contains(name) {
            return Err(Error::new(
                ErrorKind::Busy,
                format!("image {name} is being created, renamed, moved or removed"),
            ));
        }
        Ok(())
    }

    /// Marks a name as being changed; returns `false` if it is already.
    pub(crate) fn begin_changing(&self, name: &str) -> bool {
        self.changing.borrow_mut().insert(name.to_owned())
    }

    /// Ends that.
    pub(crate) fn end_changing(&self, name: &str) {
        self.changing.borrow_mut().remove(name);
    }

    pub(crate) fn change(&self, name: &str) -> Result<Changing<'_>> {
        self.check_unchanging(name)?;
        self.begin_changing(name);
        Ok(Changing { images: self, name: name.to_owned() })
    }
}

/// Guard of a name that is being changed; unlocks it when dropped.
pub(crate) struct Changing<'a> {
    images: &'a Images,
    name: String,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.images.end_changing(&self.name);
    }
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "is empty"
    } else if name.len() > NAME_LEN_MAX {
        "is longer than 95 bytes"
    } else if name.contains(['/', '@']) {
        "contains '/' or '@', which separate it from its pool and its snapshot"
    } else if name.chars().any(char::is_control) {
        "contains a control character"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Invalid, format!("image name {name:?} {why}")))
}

pub(crate) fn check_openable(name: &str, header: &ImageHeader) -> Result<()> {
    if header.size > SIZE_MAX {
        return Err(Error::new(ErrorKind::Unsupported, format!("image {name}: a size of {} bytes", header.size)));
    }
    Ok(())
}

fn find_snapshot(shared: &OpenImage, name: &str, snapshot: &str) -> Result<ImageView> {
    let header = shared.header();
    let found = header.snapshots.iter().find(|found| found.is_user() && found.name == snapshot);
    let view = found.and_then(|found| shared.view_of(found.id));
    view.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("snapshot {name}@{snapshot}")))
}

fn check_options(name: &str, options: &CreateOptions, shared: bool) -> Result<()> {
    let refuse = |why: String| Err(Error::new(ErrorKind::Invalid, format!("image {name}: {why}")));
    if options.size > SIZE_MAX {
        return refuse(format!("{} bytes are more than the largest size, {SIZE_MAX}", options.size));
    }
    if !options.object_size.is_power_of_two() || !OBJECT_SIZES.contains(&options.object_size) {
        return refuse(format!(
            "an object size of {} is not a power of two from 64 KiB to 32 MiB",
            options.object_size
        ));
    }
    if let Some(Striping { unit, count }) = options.striping.filter(|striping| !striping.is_valid(options.object_size))
    {
        let (object_size, most) = (options.object_size, STRIPE_COUNT_MAX);
        return refuse(format!(
            "a stripe unit of {unit} bytes and a stripe count of {count}: the unit is a power of two from \
             {STRIPE_UNIT_MIN} to the object size of {object_size}, and the count 1 to {most}"
        ));
    }
    let features = options.features.unwrap_or_default();
    // The feature `operations` is set when the header needs it, not on creation.
    let unsupported =
        ImageFeatures(features.0 & ImageFeatures::OPERATION_LIST.0 | features.unsupported(false, shared).0);
    if unsupported != ImageFeatures::default() {
        return refuse(format!("unsupported features {unsupported}"));
    }
    if features.has(ImageFeatures::FAST_DIFF) && !features.has(ImageFeatures::OBJECT_MAP)
        || features.has(ImageFeatures::OBJECT_MAP) && !features.has(ImageFeatures::EXCLUSIVE_LOCK)
    {
        return refuse("the feature fast-diff requires object-map, and object-map requires exclusive-lock".to_owned());
    }
    if features.has(ImageFeatures::OBJECT_MAP) && options.objects() > OBJECTS_MAX {
        return refuse(format!("more than {OBJECTS_MAX} objects are too many for an object map"));
    }
    Ok(())
}
