//! The images of one backend: creating, listing, renaming, removing, and which are open.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Extent, ObjectBackend, ObjectOp, Result, Transaction};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{random, wall_clock};

use crate::OBJECT_SIZE_DEFAULT;
use crate::directory::{Added, Directory};
use crate::format::{Features, Header, SNAPSHOT_PREFIX, header_object};
use crate::image::{Image, OpenOptions, Shared};
use crate::layout::Layout;
use crate::resize::{trim, unless_absent};

/// Longest name of a new image in bytes, librbd's limit.
pub const NAME_LEN_MAX: usize = 95;
/// Largest image in bytes: 1 EiB.
pub const SIZE_MAX: u64 = 1 << 60;
/// Smallest and largest objects of a new image, in bytes.
const OBJECT_SIZES: std::ops::RangeInclusive<u64> = 64 << 10..=32 << 20;
/// Names or keys read in one go.
const PAGE: usize = 1000;
/// Ids tried until one is free.
const ID_TRIES: usize = 8;

/// How an image is created.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CreateOptions {
    /// Bytes, up to [`SIZE_MAX`].
    pub size: u64,
    /// Bytes an object, a power of two from 64 KiB to 32 MiB.
    pub object_size: u64,
    /// Layering or nothing.
    pub features: Features,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self { size: 0, object_size: OBJECT_SIZE_DEFAULT, features: Features::LAYERING }
    }
}

/// How an image is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RemoveOptions {
    /// Even if it is open; its open handles then answer [`ErrorKind::NotFound`].
    pub force: bool,
}

/// How far something has come, in objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Done.
    pub done: u64,
    /// In all.
    pub total: u64,
}

/// What an image is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageInfo {
    /// Its name.
    pub name: String,
    /// Its id within the pool, which never changes.
    pub id: String,
    /// Bytes.
    pub size: u64,
    /// Bytes an object.
    pub object_size: u64,
    /// What the names of its data objects begin with.
    pub block_name_prefix: String,
    /// Its features.
    pub features: Features,
    /// Flag bits: 1, the object map is invalid; 2, fast-diff is invalid.
    pub flags: u64,
    /// Snapshots.
    pub snapshots: usize,
    /// It is a clone of another image.
    pub has_parent: bool,
    /// When it was created, since 1970-01-01T00:00:00Z, if known.
    pub created: Option<Duration>,
    /// When it was last read, as far as its clients note that.
    pub accessed: Option<Duration>,
    /// When it was last written, as far as its clients note that.
    pub modified: Option<Duration>,
}

impl ImageInfo {
    /// Objects, whether they exist or not.
    pub fn objects(&self) -> u64 {
        self.size.div_ceil(self.object_size)
    }

    /// The binary logarithm of the object size.
    pub fn order(&self) -> u8 {
        self.object_size.trailing_zeros() as u8
    }
}

/// The images of one backend.
pub struct Images {
    backend: Rc<dyn ObjectBackend>,
    /// By id.  An entry without handles is what is ending.
    open: RefCell<BTreeMap<String, Weak<Shared>>>,
    /// Names that are being created, renamed or removed.
    changing: RefCell<BTreeSet<String>>,
    opening: Semaphore,
}

thread_local! {
    /// One of each backend of this core, while anybody uses it.
    static ALL: RefCell<Vec<Weak<Images>>> = const { RefCell::new(Vec::new()) };
}

impl Images {
    /// The images of `backend`: the same for every caller on this core, so that an image is never open twice.
    pub fn of(backend: &Rc<dyn ObjectBackend>) -> Rc<Self> {
        ALL.with_borrow_mut(|all| {
            all.retain(|images| images.strong_count() > 0);
            let same = |images: &Rc<Images>| std::ptr::addr_eq(Rc::as_ptr(&images.backend), Rc::as_ptr(backend));
            if let Some(images) = all.iter().filter_map(Weak::upgrade).find(same) {
                return images;
            }
            let images = Rc::new(Self {
                backend: backend.clone(),
                open: RefCell::default(),
                changing: RefCell::default(),
                opening: Semaphore::new(1),
            });
            all.push(Rc::downgrade(&images));
            images
        })
    }

    /// The backend.
    pub fn backend(&self) -> &Rc<dyn ObjectBackend> {
        &self.backend
    }

    /// Creates an image.  What a crash left of an earlier attempt at the same name is completed.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for a name, size, object size or feature that cannot be; `Busy` while another change of
    /// that name is under way; those of the backend, after which the image is not there.
    pub async fn create(&self, name: &str, options: CreateOptions) -> Result<()> {
        check_name(name)?;
        check_options(name, &options)?;
        let _changing = self.change(name)?;
        let directory = Directory::of(&self.backend);
        let (id, is_new) = self.claim(&directory, name).await?;
        let finished = self.finish_create(&directory, name, &id, &options).await;
        if let (Err(error), true) = (&finished, is_new) {
            // A header that was there already belongs to somebody else.
            let with_header = error.kind() != ErrorKind::Exists;
            undo_create(&self.backend, &directory, name, &id, with_header).await;
        }
        finished.map_err(|error| within(format_args!("creating image {name}"), error))
    }

    /// Enters the name in the directory; the id, and whether the entry is new.
    async fn claim(&self, directory: &Directory<'_>, name: &str) -> Result<(String, bool)> {
        for _ in 0..ID_TRIES {
            let id = format!("{:014x}", random() >> 8);
            match directory.add(name, &id).await? {
                Added::New => return Ok((id, true)),
                Added::IdTaken => continue,
                Added::NameTaken(id) => {
                    if self.header_exists(&id).await? {
                        return Err(Error::new(ErrorKind::Exists, format!("image {name}")));
                    }
                    // Somebody's creation or removal of it was cut short: an entry, but no header.
                    return Ok((id, false));
                }
            }
        }
        Err(Error::new(ErrorKind::Busy, format!("image {name}: no free id in {ID_TRIES} tries")))
    }

    async fn finish_create(
        &self,
        directory: &Directory<'_>,
        name: &str,
        id: &str,
        options: &CreateOptions,
    ) -> Result<()> {
        directory.write_id(name, id).await?;
        let order = options.object_size.trailing_zeros() as u8;
        let header = Header::new(id, options.size, order, options.features, wall_clock());
        let ops = vec![ObjectOp::Create { exclusive: true }, ObjectOp::KvSet { pairs: header.encode() }];
        self.backend.submit(&header_object(id), Transaction::new(ops).durable()).await.map(drop)
    }

    async fn header_exists(&self, id: &str) -> Result<bool> {
        match self.backend.stat(&header_object(id), forebay_block::SnapId::HEAD).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// All names, in order.  One whose creation or removal was cut short by a crash is among them; one that is not
    /// UTF-8, which only other clients make, is not.
    pub async fn list(&self) -> Result<Vec<String>> {
        let mut all = Vec::new();
        let mut cursor = None;
        loop {
            let (names, next) = self.list_page(cursor, PAGE).await?;
            all.extend(names);
            cursor = next;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Up to `max` names in order, from the first or going on at `cursor`; and the cursor to go on at, if there are
    /// more.
    pub async fn list_page(&self, cursor: Option<Vec<u8>>, max: usize) -> Result<(Vec<String>, Option<Vec<u8>>)> {
        let listed = Directory::of(&self.backend).names(cursor, max.max(1)).await;
        listed.map_err(|error| within("listing images", error))
    }

    /// What an image is.
    pub async fn info(&self, name: &str) -> Result<ImageInfo> {
        let (id, header) = self.load(name).await?;
        // While it shrinks, the open image is ahead of what is stored.
        let size = self.find_open(&id).map_or(header.size, |shared| shared.size());
        Ok(ImageInfo {
            name: name.to_owned(),
            id,
            size,
            object_size: header.object_size(),
            features: header.features,
            flags: header.flags,
            snapshots: header.snaps.len(),
            has_parent: header.has_parent,
            created: header.created,
            accessed: header.accessed,
            modified: header.modified,
            block_name_prefix: header.object_prefix,
        })
    }

    /// Opens an image.  Opened again, it is the same image by another handle.
    ///
    /// # Errors
    /// `NotFound`; `Busy` while it is being created, renamed or removed; `Unsupported` for features that are not
    /// known here, and for clones; `Corrupt` for a damaged header.
    pub async fn open(self: &Rc<Self>, name: &str, options: OpenOptions) -> Result<Rc<Image>> {
        self.check_unchanging(name)?;
        // One after another: between looking for an open one and opening it, nobody else opens and resizes it.
        let _opening = self.opening.acquire(1).await;
        let id = self.id_of(name).await?;
        let shared = match self.find_open(&id) {
            Some(shared) => shared,
            None => {
                let header = self.header(&id).await.map_err(|error| within(format_args!("image {name}"), error))?;
                check_openable(name, &header)?;
                Shared::new(self, name, &id, &header)
            }
        };
        shared.check_features(options.read_only)?;
        self.check_unchanging(name)?;
        let mut open = self.open.borrow_mut();
        open.retain(|_, shared| shared.strong_count() > 0);
        open.insert(id, Rc::downgrade(&shared));
        Ok(Image::new(shared, options))
    }

    /// Gives an image another name, open or not.
    ///
    /// # Errors
    /// `NotFound`; `Exists` if the new name is taken; `Invalid` if it cannot be one; `Busy` while either name is
    /// being changed.
    pub async fn rename(&self, from: &str, to: &str) -> Result<()> {
        check_name(to)?;
        if from == to {
            return Err(Error::new(ErrorKind::Exists, format!("image {to}")));
        }
        let _from = self.change(from)?;
        let _to = self.change(to)?;
        let (id, _) = self.load(from).await?;
        let directory = Directory::of(&self.backend);
        let renamed = async {
            if directory.id_of(to).await?.is_some() {
                return Err(Error::new(ErrorKind::Exists, format!("image {to}")));
            }
            directory.write_id(to, &id).await?;
            if let Err(error) = directory.rename(&id, from, to).await {
                let left = directory.remove_id(to, &id).await;
                left.unwrap_or_else(|left| tracing::warn!(image = to, error = %left, "an id object is left"));
                return Err(error);
            }
            if let Some(shared) = self.find_open(&id) {
                shared.set_name(to);
            }
            directory.remove_id(from, &id).await
        };
        renamed.await.map_err(|error| within(format_args!("renaming image {from} to {to}"), error))
    }

    /// Removes an image and its data.  Cut short, it can be done again: the image stays listed until all is gone.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it is open (unless forced), has snapshots, or is being changed.
    pub async fn remove(&self, name: &str, options: RemoveOptions, mut progress: impl FnMut(Progress)) -> Result<()> {
        let _changing = self.change(name)?;
        let directory = Directory::of(&self.backend);
        let removed = async {
            let id = self.id_of(name).await?;
            match self.header(&id).await {
                Ok(header) => self.remove_content(name, &id, &header, options, &mut progress).await?,
                // Its creation or an earlier removal was cut short.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            directory.remove_id(name, &id).await?;
            directory.remove(name, &id).await
        };
        removed.await.map_err(|error| within(format_args!("removing image {name}"), error))
    }

    /// Removes data, then header: while there is data, the header tells where.
    async fn remove_content(
        &self,
        name: &str,
        id: &str,
        header: &Header,
        options: RemoveOptions,
        progress: &mut impl FnMut(Progress),
    ) -> Result<()> {
        if !header.snaps.is_empty() {
            return Err(Error::new(ErrorKind::Busy, format!("image {name} has snapshots")));
        }
        check_openable(name, header)?;
        let unsupported = header.features.unsupported(false);
        if unsupported != Features::default() {
            let what = format!("image {name}: removing an image with the features {unsupported}");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let open = self.find_open(id);
        if let Some(shared) = &open {
            if shared.handles() > 0 && !options.force {
                return Err(Error::new(ErrorKind::Busy, format!("image {name} is open")));
            }
            shared.set_ended(true);
        }
        let removed = async {
            // Writes that are under way would bring objects back.
            let _hold = match &open {
                Some(shared) => Some(shared.gate().hold(Extent::new(0, SIZE_MAX)).await),
                None => None,
            };
            let layout = Layout::new(header.order, &header.object_prefix);
            trim(&self.backend, &layout, None, 0..header.size, progress).await?;
            self.backend.flush().await?;
            self.backend.submit(&header_object(id), Transaction::of(ObjectOp::Remove).durable()).await
        };
        match (removed.await, &open) {
            (Ok(_), _) => {
                self.open.borrow_mut().remove(id);
                Ok(())
            }
            (Err(error), Some(shared)) => {
                shared.set_ended(false);
                Err(error)
            }
            (Err(error), None) => Err(error),
        }
    }

    async fn id_of(&self, name: &str) -> Result<String> {
        let id = Directory::of(&self.backend).id_of(name).await;
        let id = id.map_err(|error| within(format_args!("image {name}"), error))?;
        id.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("image {name}")))
    }

    /// An image's id and metadata.
    async fn load(&self, name: &str) -> Result<(String, Header)> {
        let id = self.id_of(name).await?;
        let header = self.header(&id).await.map_err(|error| within(format_args!("image {name}"), error))?;
        Ok((id, header))
    }

    async fn header(&self, id: &str) -> Result<Header> {
        let object = header_object(id);
        let keys = Header::KEYS.iter().map(|key| key.as_bytes().to_vec()).collect();
        let values = self.backend.kv_get(&object, keys).await?;
        let mut snapshots: Vec<Vec<u8>> = Vec::new();
        loop {
            let after = snapshots.last().map_or(&[][..], |key| &key[..]);
            let page = self.backend.kv_list(&object, SNAPSHOT_PREFIX.as_bytes(), after, PAGE).await?;
            snapshots.extend(page.pairs.into_iter().map(|(key, _)| key));
            if !page.more {
                return Header::decode(&values, &snapshots);
            }
        }
    }

    fn find_open(&self, id: &str) -> Option<Rc<Shared>> {
        let mut open = self.open.borrow_mut();
        let found = open.get(id)?.upgrade();
        if found.is_none() {
            open.remove(id);
        }
        found
    }

    fn check_unchanging(&self, name: &str) -> Result<()> {
        if self.changing.borrow().contains(name) {
            return Err(Error::new(ErrorKind::Busy, format!("image {name} is being created, renamed or removed")));
        }
        Ok(())
    }

    fn change(&self, name: &str) -> Result<Changing<'_>> {
        self.check_unchanging(name)?;
        self.changing.borrow_mut().insert(name.to_owned());
        Ok(Changing { images: self, name: name.to_owned() })
    }
}

/// A name that is being changed; free again when dropped.
struct Changing<'a> {
    images: &'a Images,
    name: String,
}

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.images.changing.borrow_mut().remove(&self.name);
    }
}

/// Takes back, as far as it goes, what a creation that failed has done.  What cannot be taken back can be completed
/// by creating the image again, or removed.
async fn undo_create(
    backend: &Rc<dyn ObjectBackend>,
    directory: &Directory<'_>,
    name: &str,
    id: &str,
    with_header: bool,
) {
    let undo = async {
        if with_header {
            let gone = backend.submit(&header_object(id), Transaction::of(ObjectOp::Remove).durable());
            unless_absent(gone).await?;
        }
        directory.remove_id(name, id).await?;
        directory.remove(name, id).await
    };
    if let Err(error) = undo.await {
        tracing::warn!(image = name, %error, "what is left of an image that could not be created stays for now");
    }
}

/// The error, told with what was being done.
pub(crate) fn within(what: impl Display, error: Error) -> Error {
    let context = if error.context().is_empty() { what.to_string() } else { format!("{what}: {}", error.context()) };
    Error::new(error.kind(), context).with_source(error)
}

fn check_name(name: &str) -> Result<()> {
    let why = if name.is_empty() {
        "is empty"
    } else if name.len() > NAME_LEN_MAX {
        "is longer than 95 bytes"
    } else if name.contains(['/', '@']) {
        "has '/' or '@' in it, which part it from its pool and its snapshot"
    } else if name.chars().any(char::is_control) {
        "has a control character in it"
    } else {
        return Ok(());
    };
    Err(Error::new(ErrorKind::Invalid, format!("image name {name:?} {why}")))
}

fn check_openable(name: &str, header: &Header) -> Result<()> {
    if header.has_parent {
        return Err(Error::new(ErrorKind::Unsupported, format!("image {name}: a clone of another image")));
    }
    if header.size > SIZE_MAX {
        return Err(Error::new(ErrorKind::Unsupported, format!("image {name}: a size of {} bytes", header.size)));
    }
    Ok(())
}

fn check_options(name: &str, options: &CreateOptions) -> Result<()> {
    let refuse = |why: String| Err(Error::new(ErrorKind::Invalid, format!("image {name}: {why}")));
    if options.size > SIZE_MAX {
        return refuse(format!("{} bytes are more than the largest size, {SIZE_MAX}", options.size));
    }
    if !options.object_size.is_power_of_two() || !OBJECT_SIZES.contains(&options.object_size) {
        return refuse(format!("an object size of {} is no power of two from 64 KiB to 32 MiB", options.object_size));
    }
    let unsupported = options.features.unsupported(false);
    if unsupported != Features::default() {
        return refuse(format!("the features {unsupported} cannot be had"));
    }
    Ok(())
}
