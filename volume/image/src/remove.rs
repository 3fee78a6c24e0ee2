//! Removal of images.

use std::cell::Cell;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent, ObjectOp, Result, Transaction};

use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::images::{Images, SIZE_MAX, check_openable};
use crate::info::{ObjectProgress, RemoveOptions};
use crate::resize::{trim, unless_absent};
use crate::snapshots::free_removed;

impl Images {
    /// Removes an image and its data. An interrupted removal can be repeated: the image stays listed until all of it
    /// is removed.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it is open (unless forced), has snapshots, belongs to a group, or is being changed.
    pub async fn remove(
        self: &Rc<Self>,
        name: &str,
        options: RemoveOptions,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<()> {
        let routed = self.route(name);
        let (images, name) = routed.as_ref().map_or((self, name), |(images, name)| (images, *name));
        let _changing = images.change(name)?;
        let directory = images.directory();
        let removed = async {
            let id = images.id_of(name).await?;
            match images.header(&id).await {
                Ok(header) => {
                    images.remove_content(name, &id, &header, options, &Cell::new(false), &mut progress).await?
                }
                // Left by an interrupted creation or removal.
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
            directory.remove_ids(name, &id).await?;
            directory.remove(name, &id).await
        };
        removed.await.map_err(|error| error.within(format_args!("removing image {name}")))
    }

    /// Removes the data, then the header: as long as there is data, the header locates it. Sets `begun` before the first data
    /// is removed.
    pub(crate) async fn remove_content(
        self: &Rc<Self>,
        name: &str,
        id: &str,
        header: &ImageHeader,
        options: RemoveOptions,
        begun: &Cell<bool>,
        progress: &mut impl FnMut(ObjectProgress),
    ) -> Result<()> {
        // A crash may have left snapshots in the trash.
        self.empty_trash_of(id, header).await?;
        let header = &self.header(id).await?;
        if !header.snapshots.is_empty() {
            return Err(Error::new(ErrorKind::Busy, format!("image {name} has snapshots")));
        }
        if let Some(group) = self.group_of(id).await? {
            let what = format!("image {name} belongs to the group {group}; remove it from the group first");
            return Err(Error::new(ErrorKind::Busy, what));
        }
        check_openable(name, header)?;
        let unsupported = header.features.unsupported(false, self.backend.shared().is_some());
        if unsupported != ImageFeatures::default() {
            let what = format!("it has the features {unsupported}");
            return Err(Error::new(ErrorKind::Unsupported, what));
        }
        let open = self.find_open(id).filter(|shared| !shared.lifecycle().is_closing());
        if let Some(shared) = &open
            && shared.lifecycle().handles() > 0
            && !options.force
        {
            return Err(Error::new(ErrorKind::Busy, format!("image {name} is open")));
        }
        let was_open = open.is_some();
        let shared = match open {
            Some(shared) => shared,
            None => self.open_for_removal(name, id).await?,
        };
        shared.lifecycle().set_removed(true);
        let removed = async {
            if let Some(watcher) = shared.watcher() {
                let others = watcher.others().await?;
                if let Some(other) = others.first() {
                    return Err(Error::new(ErrorKind::Busy, format!("image {name} is open elsewhere: {other}")));
                }
            }
            // In-flight writes would recreate objects.
            let hold = shared.enter_alone(Extent::new(0, SIZE_MAX)).await?;
            // The parent's data needs no copy-up and no masking, since the header is removed too.
            shared.reduce_overlap(0);
            begun.set(true);
            trim(&shared, 0..header.size, progress).await?;
            shared.data().flush().await?;
            free_removed(&shared).await?;
            self.forget_child(id, header).await?;
            drop(hold);
            shared.end_coordination().await;
            if self.backend.shared().is_some() {
                // It is also left by an interrupted change of the features.
                let map = map_object(&self.namespace, id, None);
                unless_absent(self.backend.submit(&map, Transaction::of(ObjectOp::Remove).durable())).await?;
            }
            self.forget_data_policy(&header.object_prefix).await?;
            self.backend.submit(&self.header_object(id), Transaction::of(ObjectOp::Remove).durable()).await
        };
        match removed.await {
            Ok(_) => {
                self.open.remove(id);
                Ok(())
            }
            Err(error) => {
                if was_open {
                    shared.lifecycle().set_removed(false);
                    shared.refresh_stored().await.unwrap_or_default();
                } else {
                    shared.end_coordination().await;
                }
                Err(error)
            }
        }
    }
}
