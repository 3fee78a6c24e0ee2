//! Directories of a pool's images and of its groups, and the objects that map the name of an image to an id.
//!
//! The directory of images (`rbd_directory`) is authoritative: an `rbd_id.NAME` object that disagrees with it was left by a
//! crash, and is overwritten when its name is needed.

use std::rc::Rc;

use forebay_block::{
    BufList, Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result, SnapId, Transaction,
};
use forebay_reactor::Buf;

use crate::format::{
    DIRECTORY, GROUP_DIRECTORY, ID_LEN_MAX, NAMESPACE_READY, NAMESPACE_STATE, NAMESPACES, decode_string, encode_string,
    id_key, id_object, is_valid_group_id, is_valid_id, name_key, name_keys, name_of_key,
};

/// Names read in one request.
const PAGE: usize = 1000;

/// Outcome of adding an entry.
pub(crate) enum Added {
    /// Entry added.
    New,
    /// Name in use, by the image with this id.
    NameTaken(String),
    /// Id in use by another image.
    IdTaken,
}

/// Directory of the images of a backend, or of its groups.
pub(crate) struct Directory<'a> {
    backend: &'a Rc<dyn ObjectBackend>,
    namespace: &'a Rc<str>,
    /// Name of the object.
    object: &'static str,
    /// Word for an entry, for error messages.
    what: &'static str,
    /// Returns whether an id is well-formed.
    is_valid_id: fn(&str) -> bool,
}

impl<'a> Directory<'a> {
    /// Returns the directory of the images.
    pub(crate) fn of_images(backend: &'a Rc<dyn ObjectBackend>, namespace: &'a Rc<str>) -> Self {
        Self { backend, namespace, object: DIRECTORY, what: "image", is_valid_id }
    }

    /// Returns the directory of the groups.
    pub(crate) fn of_groups(backend: &'a Rc<dyn ObjectBackend>, namespace: &'a Rc<str>) -> Self {
        Self { backend, namespace, object: GROUP_DIRECTORY, what: "group", is_valid_id: is_valid_group_id }
    }

    /// Returns the list of a pool's namespaces, which have no ids.
    pub(crate) fn of_namespaces(backend: &'a Rc<dyn ObjectBackend>, namespace: &'a Rc<str>) -> Self {
        debug_assert!(namespace.is_empty(), "the list is in the default namespace");
        Self { backend, namespace, object: NAMESPACES, what: "namespace", is_valid_id: |_| false }
    }

    pub(crate) fn object(&self) -> ObjectName {
        ObjectName::in_namespace(self.namespace.clone(), self.object)
    }

    /// Returns the id of the image of that name. `Corrupt` if the entry is malformed.
    pub(crate) async fn id_of(&self, name: &str) -> Result<Option<String>> {
        let Some(value) = self.get(name_key(name)).await? else { return Ok(None) };
        match decode_string(&value) {
            Some(id) if (self.is_valid_id)(&id) => Ok(Some(id)),
            _ => Err(Error::new(ErrorKind::Corrupt, format!("directory entry of {} {name}", self.what))),
        }
    }

    /// Returns the name of the image of that id. `Corrupt` if the entry is malformed.
    pub(crate) async fn name_of(&self, id: &str) -> Result<Option<String>> {
        let Some(value) = self.get(id_key(id)).await? else { return Ok(None) };
        let malformed = || Error::new(ErrorKind::Corrupt, format!("directory entry of {} id {id}", self.what));
        decode_string(&value).map(Some).ok_or_else(malformed)
    }

    pub(crate) async fn get(&self, key: Vec<u8>) -> Result<Option<Vec<u8>>> {
        match self.backend.kv_get(&self.object(), vec![key]).await {
            Ok(mut values) => Ok(values.pop().flatten()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns at most `max` names after `cursor`, in order, and the cursor of the next page, if there is one.
    pub(crate) async fn names(&self, cursor: Option<Vec<u8>>, max: usize) -> Result<(Vec<String>, Option<Vec<u8>>)> {
        let after = cursor.unwrap_or_default();
        match self.backend.kv_list(&self.object(), name_keys(), &after, max).await {
            Ok(page) => {
                let names = page.pairs.iter().filter_map(|(key, _)| name_of_key(key)).collect();
                let next = page.more.then(|| page.pairs.last().map(|(key, _)| key.clone())).flatten();
                Ok((names, next))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok((Vec::new(), None)),
            Err(error) => Err(error),
        }
    }

    /// Returns all names, in order.
    pub(crate) async fn all_names(&self) -> Result<Vec<String>> {
        let (mut all, mut cursor) = (Vec::new(), None);
        loop {
            let (names, next) = self.names(cursor, PAGE).await?;
            all.extend(names);
            cursor = next;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Adds an image, if neither its name nor its id is in use.
    pub(crate) async fn add(&self, name: &str, id: &str) -> Result<Added> {
        let mut ops = vec![
            ObjectOp::Create { exclusive: false },
            ObjectOp::KvCompare { key: name_key(name), value: None },
            ObjectOp::KvCompare { key: id_key(id), value: None },
            ObjectOp::KvSet { pairs: entries(name, id) },
        ];
        if !self.namespace.is_empty() && self.object == DIRECTORY {
            // Namespaces have a directory from their creation on; one that is being removed admits no new images.
            self.check_namespace().await?;
            ops[0] = ObjectOp::KvCompare { key: NAMESPACE_STATE.to_vec(), value: Some(NAMESPACE_READY.to_vec()) };
        }
        match self.backend.submit(&self.object(), Transaction::new(ops).durable()).await {
            Ok(_) => Ok(Added::New),
            Err(error) if error.kind() == ErrorKind::Guard => {
                Ok(self.id_of(name).await?.map_or(Added::IdTaken, Added::NameTaken))
            }
            Err(error) => Err(error),
        }
    }

    /// Gives the name of an image to another, of an id that is not in use; returns whether it had that name.
    pub(crate) async fn replace(&self, name: &str, from: &str, to: &str) -> Result<bool> {
        let mut ops = holds(name, from);
        ops.push(ObjectOp::KvCompare { key: id_key(to), value: None });
        ops.push(ObjectOp::KvRemove { keys: vec![id_key(from)] });
        ops.push(ObjectOp::KvSet { pairs: entries(name, to) });
        match self.backend.submit(&self.object(), Transaction::new(ops).durable()).await {
            Ok(_) => Ok(true),
            Err(error) if error.kind() == ErrorKind::Guard => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Returns whether another image has the name, and this one has none: it was not renamed, or moved to the trash.
    pub(crate) async fn is_replaced(&self, name: &str, id: &str) -> Result<bool> {
        Ok(self.id_of(name).await?.is_some_and(|other| other != id) && self.name_of(id).await?.is_none())
    }

    /// Returns whether the namespace of this directory of images admits new ones: it was created, and is not being removed.
    pub(crate) async fn admits_images(&self) -> Result<bool> {
        Ok(self.get(NAMESPACE_STATE.to_vec()).await?.as_deref() == Some(NAMESPACE_READY))
    }

    async fn check_namespace(&self) -> Result<()> {
        if self.admits_images().await? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::NotFound, format!("namespace {}, or it is being removed", self.namespace)))
    }

    /// Removes an image; succeeds if it was removed already. `Busy` if name and id belong to different images by now.
    pub(crate) async fn remove(&self, name: &str, id: &str) -> Result<()> {
        let mut ops = holds(name, id);
        ops.push(ObjectOp::KvRemove { keys: vec![name_key(name), id_key(id)] });
        match self.backend.submit(&self.object(), Transaction::new(ops).durable()).await {
            Ok(_) => Ok(()),
            Err(error) if matches!(error.kind(), ErrorKind::Guard | ErrorKind::NotFound) => {
                // A new image may have been given the name.
                if self.name_of(id).await?.is_none() {
                    return Ok(());
                }
                Err(Error::new(ErrorKind::Busy, format!("{} {name} was renamed meanwhile", self.what)))
            }
            Err(error) => Err(error),
        }
    }

    /// Renames an image; `Exists` if the new name is in use, `NotFound` if the image does not have the old one.
    pub(crate) async fn rename(&self, id: &str, from: &str, to: &str) -> Result<()> {
        let mut ops = holds(from, id);
        ops.push(ObjectOp::KvCompare { key: name_key(to), value: None });
        ops.push(ObjectOp::KvRemove { keys: vec![name_key(from)] });
        ops.push(ObjectOp::KvSet { pairs: entries(to, id) });
        match self.backend.submit(&self.object(), Transaction::new(ops).durable()).await {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::Guard => {
                let kind = if self.id_of(to).await?.is_some() { ErrorKind::Exists } else { ErrorKind::NotFound };
                let name = if kind == ErrorKind::Exists { to } else { from };
                Err(Error::new(kind, format!("{} {name}", self.what)))
            }
            Err(error) => Err(error),
        }
    }

    /// Writes `id` to `rbd_id.NAME`. `Exists` if the object names another image that has this name in the directory.
    pub(crate) async fn write_id(&self, name: &str, id: &str) -> Result<()> {
        let object = id_object(self.namespace, name);
        let content: BufList = Buf::copy_of(&encode_string(id)).into();
        let create = vec![ObjectOp::Create { exclusive: true }, ObjectOp::Write { offset: 0, data: content.clone() }];
        match self.backend.submit(&object, Transaction::new(create).durable()).await {
            Err(error) if error.kind() == ErrorKind::Exists => {}
            other => return other.map(drop),
        }
        match self.read_id(name).await? {
            Some(found) if found == id => Ok(()),
            Some(found) if self.name_of(&found).await?.as_deref() == Some(name) => {
                Err(Error::new(ErrorKind::Exists, format!("image {name}")))
            }
            // Left by a crash: the directory does not confirm it.
            _ => {
                let replace = Transaction::of(ObjectOp::WriteFull { data: content }).durable();
                self.backend.submit(&object, replace).await.map(drop)
            }
        }
    }

    /// Returns the id in `rbd_id.NAME`; `None` if the object does not exist or holds no valid id.
    async fn read_id(&self, name: &str) -> Result<Option<String>> {
        let read = ObjectRead::new(SnapId::HEAD, forebay_block::Extent::new(0, 4 + ID_LEN_MAX as u64));
        match self.backend.read(&id_object(self.namespace, name), read).await {
            Ok(data) => {
                let bytes = data.fill(read.extent).to_vec();
                Ok(decode_string(&bytes).filter(|id| is_valid_id(id)))
            }
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes `rbd_id.NAME` if it names `id`, or an image that has no longer that name, left by an interrupted creation. The
    /// directory must still have the name for `id`: meanwhile no client gives it to an image.
    pub(crate) async fn remove_ids(&self, name: &str, id: &str) -> Result<()> {
        self.remove_id(name, id).await?;
        match self.read_id(name).await? {
            Some(found) if self.name_of(&found).await?.as_deref() != Some(name) => self.remove_id(name, &found).await,
            _ => Ok(()),
        }
    }

    /// Removes `rbd_id.NAME` if it names `id`; succeeds if it does not, or does not exist.
    pub(crate) async fn remove_id(&self, name: &str, id: &str) -> Result<()> {
        let content = Buf::copy_of(&encode_string(id)).into();
        let ops = vec![ObjectOp::AssertExists, ObjectOp::Compare { offset: 0, data: content }, ObjectOp::Remove];
        match self.backend.submit(&id_object(self.namespace, name), Transaction::new(ops).durable()).await {
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Mismatch(_)) => Ok(()),
            other => other.map(drop),
        }
    }
}

fn entries(name: &str, id: &str) -> Vec<(Vec<u8>, Vec<u8>)> {
    vec![(name_key(name), encode_string(id)), (id_key(id), encode_string(name))]
}

/// Returns guards that hold if name and id map to each other.
fn holds(name: &str, id: &str) -> Vec<ObjectOp> {
    let guard = |(key, value)| ObjectOp::KvCompare { key, value: Some(value) };
    entries(name, id).into_iter().map(guard).collect()
}
