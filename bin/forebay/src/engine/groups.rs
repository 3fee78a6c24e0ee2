//! Operations on groups of images, and on their snapshots: `docs/design/image.md`, "Groups".

use std::rc::Rc;
use std::time::Duration;

use forebay_block::ErrorKind;
use forebay_image::{self as image, CreatedPart, GroupMember, PendingPart};
use forebay_reactor::sync::join_all;
use forebay_reactor::timeout;
use forebay_writelog::{Cut, Mode, WriteLog};

use super::Engine;
use super::logs::log_failure;
use super::volumes::Volume;
use crate::api::{GroupImage, GroupSnapshotListing};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{GroupSnapshotSpec, GroupSpec, ImageSpec, place_text, split_pool};

/// Maximum wait for the writes in flight to all images of a group, while new ones are held.
const HOLD_MAX: Duration = Duration::from_secs(10);
/// Units of progress for an image.
const IMAGE_UNITS: u64 = 1000;

impl Engine {
    /// Lists the names of the groups of a pool or namespace, in order.
    pub async fn list_groups(&self, pool: &str) -> Result<Vec<String>> {
        let listed = self.images_in(pool).await?.groups().await;
        listed.map_err(|error| self.pool_failure(error, pool))
    }

    /// Creates a group without images.
    pub async fn create_group(&self, spec: &GroupSpec) -> Result<()> {
        spec.check_new()?;
        let created = self.images_in(&spec.pool).await?.create_group(&spec.group).await;
        created.map_err(|error| self.group_failure(error, spec))?;
        self.flush_group(spec).await?;
        tracing::info!(group = %spec, "a group was created");
        Ok(())
    }

    /// Renames a group.
    pub async fn rename_group(&self, spec: &GroupSpec, name: &str) -> Result<()> {
        let to = GroupSpec::new(&spec.pool, name).map_err(Failure::invalid)?;
        to.check_new()?;
        if *spec == to {
            return Err(Failure::new(FailureKind::Exists, format!("{spec} has that name already")));
        }
        let renamed = self.images_in(&spec.pool).await?.rename_group(&spec.group, &to.group).await;
        renamed.map_err(|error| match error.kind() {
            ErrorKind::Exists => self.group_failure(error, &to),
            _ => self.group_failure(error, spec),
        })?;
        self.flush_group(spec).await?;
        tracing::info!(group = %spec, %to, "a group was renamed");
        Ok(())
    }

    /// Removes a group with its snapshots; its images stay.
    pub async fn remove_group(&self, spec: &GroupSpec) -> Result<()> {
        let removed = self.images_in(&spec.pool).await?.remove_group(&spec.group).await;
        removed.map_err(|error| self.group_failure(error, spec))?;
        self.flush_group(spec).await?;
        tracing::info!(group = %spec, "a group was removed");
        Ok(())
    }

    /// Lists the images of a group.
    pub async fn list_group_images(&self, spec: &GroupSpec) -> Result<Vec<GroupImage>> {
        let members = self.group_members(spec).await?.into_iter();
        let listed = |member: GroupMember| GroupImage {
            image: member.image,
            pool: member.pool,
            namespace: member.namespace,
            state: (!member.is_attached).into(),
        };
        let mut listed: Vec<_> = members.map(listed).collect();
        // The order of rbd.
        listed.sort_by(|one, other| (&one.pool, &one.image).cmp(&(&other.pool, &other.image)));
        Ok(listed)
    }

    async fn group_members(&self, spec: &GroupSpec) -> Result<Vec<GroupMember>> {
        let members = self.images_in(&spec.pool).await?.group_images(&spec.group).await;
        members.map_err(|error| self.group_failure(error, spec))
    }

    /// Adds an image to a group.
    pub async fn add_to_group(&self, spec: &GroupSpec, member: &ImageSpec) -> Result<()> {
        let (groups, images) = self.registries(spec, member).await?;
        if let Err(error) = groups.add_to_group(&spec.group, &images, member.name()).await {
            return Err(self.member_failure(error, spec, member).await);
        }
        self.flush_group(spec).await?;
        self.flush_pool(member).await?;
        tracing::info!(group = %spec, image = %member, "an image was added to a group");
        Ok(())
    }

    /// Removes an image from a group; one that is gone is named by its id.
    pub async fn remove_from_group(&self, spec: &GroupSpec, member: &ImageSpec) -> Result<()> {
        let (groups, images) = self.registries(spec, member).await?;
        if let Err(error) = groups.remove_from_group(&spec.group, &images, member.name()).await {
            return Err(self.member_failure(error, spec, member).await);
        }
        self.flush_group(spec).await?;
        self.flush_pool(member).await?;
        tracing::info!(group = %spec, image = %member, "an image was removed from a group");
        Ok(())
    }

    /// Returns the registries of a group and of an image, which must be of one cluster or store.
    async fn registries(&self, spec: &GroupSpec, member: &ImageSpec) -> Result<(Rc<image::Images>, Rc<image::Images>)> {
        let (groups, images) = (self.images_in(&spec.pool).await?, self.images_in(&member.place()).await?);
        let is_shared = |images: &image::Images| images.backend().shared().is_some();
        if split_pool(&spec.pool).1 != member.namespace() {
            let what = format!("{member} cannot be in the group {spec}: they are in different namespaces");
            return Err(Failure::invalid(what));
        }
        if split_pool(&spec.pool).0 != member.pool && !(is_shared(&groups) && is_shared(&images)) {
            let what = format!("{member} cannot be in the group {spec}: they are in different stores");
            return Err(Failure::invalid(what).hint(format!("create a group in the pool {}", member.pool)));
        }
        Ok((groups, images))
    }

    /// Lists the snapshots of a group.
    pub async fn list_group_snapshots(&self, spec: &GroupSpec) -> Result<Vec<GroupSnapshotListing>> {
        let snapshots = self.images_in(&spec.pool).await?.group_snapshots(&spec.group).await;
        let snapshots = snapshots.map_err(|error| self.group_failure(error, spec))?;
        let state = |is_complete| if is_complete { "ok" } else { "incomplete" };
        let listed = snapshots.into_iter();
        Ok(listed
            .map(|found| GroupSnapshotListing { snapshot: found.name, state: state(found.is_complete).into() })
            .collect())
    }

    /// Creates a snapshot of a group: all its images as they were at one moment.
    ///
    /// Writes of hosts wait until the moment is chosen; those to an image without a write log until its part is created.
    pub async fn create_group_snapshot(self: &Rc<Self>, spec: &GroupSnapshotSpec) -> Result<()> {
        spec.check_new()?;
        let groups = self.images_in(&spec.group.pool).await?;
        let (mut images, mut volumes) = (Vec::new(), Vec::new());
        for member in self.group_members(&spec.group).await? {
            let image = self.named_member(&member, &spec.group)?;
            let volume = self.open_volume(&image).await?;
            if let Some(log) = volume.log() {
                // Hosts of all images would wait for it.
                log.acquired().await.map_err(|error| log_failure(error, &image))?;
            }
            volumes.push(volume);
            images.push(image);
        }
        let mut turns = Vec::new();
        for volume in &volumes {
            turns.push(volume.snapshotting.acquire(1).await);
        }
        let members = volumes.iter().map(|volume| volume.image.clone()).collect();
        let begun = groups.begin_group_snapshot(&spec.group.group, &spec.snapshot, members).await;
        let (pending, parts) = match begun {
            Ok(begun) => begun,
            Err(error) => return Err(self.group_creation_failure(error, spec).await),
        };
        let completed = match self.create_parts(&volumes, parts).await {
            Ok(created) => pending.complete(created).await.map_err(|error| self.group_failure(error, &spec.group)),
            Err(failure) => {
                pending.undo().await;
                Err(failure.context(format_args!("creating the snapshot {spec}")))
            }
        };
        completed?;
        self.flush_group(&spec.group).await?;
        for image in &images {
            self.flush_pool(image).await?;
        }
        tracing::info!(snapshot = %spec, images = volumes.len(), "a snapshot of a group was created");
        Ok(())
    }

    /// Creates the parts of a group's snapshot, all of one moment.
    async fn create_parts(&self, volumes: &[Rc<Volume>], parts: Vec<PendingPart>) -> Result<Vec<CreatedPart>> {
        // What a host submits from here on waits until every part's moment is chosen. So a write that waits for the answer
        // to another one, which a part has not, is in no part.
        let held: Vec<_> = volumes.iter().map(|volume| volume.hold_writes()).collect();
        let Ok(chosen) = timeout(HOLD_MAX, choose_moments(volumes, parts)).await else {
            let what = format!("writes to its images have not completed in {} s", HOLD_MAX.as_secs());
            return Err(Failure::new(FailureKind::Busy, what).hint("try again when the cluster has recovered"));
        };
        let creations = chosen?.into_iter().map(|(part, cut)| Box::pin(create_part(part, cut)));
        // Later writes stay in the log, or wait for the image.
        drop(held);
        join_all(creations).await.into_iter().collect()
    }

    /// Renames a snapshot of a group.
    pub async fn rename_group_snapshot(&self, spec: &GroupSnapshotSpec, name: &str) -> Result<()> {
        let to = GroupSnapshotSpec::new(spec.group.clone(), name).map_err(Failure::invalid)?;
        to.check_new()?;
        if *spec == to {
            return Err(Failure::new(FailureKind::Exists, format!("{spec} has that name already")));
        }
        let groups = self.images_in(&spec.group.pool).await?;
        if let Err(error) = groups.rename_group_snapshot(&spec.group.group, &spec.snapshot, &to.snapshot).await {
            let about = if error.kind() == ErrorKind::Exists { &to } else { spec };
            return Err(self.group_snapshot_failure(error, about).await);
        }
        self.flush_group(&spec.group).await?;
        tracing::info!(snapshot = %spec, %to, "a snapshot of a group was renamed");
        Ok(())
    }

    /// Removes a snapshot of a group, from all images.
    pub async fn remove_group_snapshot(&self, spec: &GroupSnapshotSpec) -> Result<()> {
        let groups = self.images_in(&spec.group.pool).await?;
        if let Err(error) = groups.remove_group_snapshot(&spec.group.group, &spec.snapshot).await {
            return Err(self.group_snapshot_failure(error, spec).await);
        }
        self.flush_group(&spec.group).await?;
        tracing::info!(snapshot = %spec, "a snapshot of a group was removed");
        Ok(())
    }

    /// Rolls the images of a group back to a snapshot of it. None may be exported.
    pub async fn roll_back_group(self: &Rc<Self>, spec: &GroupSnapshotSpec, progress: ProgressSink) -> Result<()> {
        let groups = self.images_in(&spec.group.pool).await?;
        // Its snapshots are not removed meanwhile.
        let _guard = groups.guard_group(&spec.group.group).map_err(|error| self.group_failure(error, &spec.group))?;
        let parts = match groups.group_snapshot_parts(&spec.group.group, &spec.snapshot).await {
            Ok(parts) => parts,
            Err(error) => return Err(self.group_snapshot_failure(error, spec).await),
        };
        let mut reserved = Vec::new();
        for part in &parts {
            if !part.has_name {
                let what = format!("{}/{} of the snapshot {spec} is gone, or in the trash", part.pool, part.image);
                return Err(Failure::new(FailureKind::NotFound, what).hint("restore it from the trash first"));
            }
            let image = self.member_spec(&spec.group, &part.pool, &part.image)?;
            let snapshots = self.images_in(&image.place()).await?.snapshots(image.name()).await;
            let snapshots = snapshots.map_err(|error| self.image_failure(error, &image))?;
            if !snapshots.iter().any(|snapshot| snapshot.id == part.snapshot.0) {
                let what = format!("{image} has no part of the snapshot {spec} any more; no image was rolled back");
                return Err(Failure::new(FailureKind::NotFound, what).hint(format!(
                    "another client has removed it; what is left goes with 'forebay group snap rm {spec}'"
                )));
            }
            reserved.push((self.reserve_unused(&image).await?, image, part.snapshot));
        }
        let count = reserved.len() as u64;
        let mut volumes = Vec::new();
        for (reserved, image, snapshot) in &reserved {
            let volume = self.open_reserved(reserved).await?;
            let closed = match volume.log() {
                Some(log) => Some(log.shrink(0).await.map_err(|error| log_failure(error, image))?),
                None => None,
            };
            volumes.push((volume, closed, image, *snapshot));
        }
        for (done, (volume, _, image, snapshot)) in (0..).zip(&volumes) {
            let shown = |now: image::ObjectProgress| {
                let part = now.done * IMAGE_UNITS / now.total.max(1);
                progress.report(done * IMAGE_UNITS + part, count * IMAGE_UNITS);
            };
            if let Err(error) = volume.image.rollback_number(*snapshot, shown).await {
                let failure =
                    Failure::from(error).context(image).context(format_args!("after {done} of {count} images"));
                return Err(failure.hint("images may be rolled back in part: roll the group back again"));
            }
            self.flush_pool(image).await?;
        }
        progress.report(count * IMAGE_UNITS, count * IMAGE_UNITS);
        tracing::info!(snapshot = %spec, images = count, "the images of a group were rolled back");
        Ok(())
    }

    /// Returns the spec of an image of a group that has a name.
    fn named_member(&self, member: &GroupMember, group: &GroupSpec) -> Result<ImageSpec> {
        if !member.has_name {
            let place = place_text(&member.pool, &member.namespace);
            let what = format!("{place}/{} of the group {group} is gone, or in the trash", member.image);
            return Err(Failure::new(FailureKind::Busy, what).hint(format!(
                "restore it, or remove it from the group: forebay group image rm {group} {place}/{}",
                member.id
            )));
        }
        self.member_spec(group, &member.pool, &member.image)
    }

    /// Returns the spec of an image of a group, whose pool is named as its store names it.
    fn member_spec(&self, group: &GroupSpec, pool: &str, name: &str) -> Result<ImageSpec> {
        let (group_pool, namespace) = split_pool(&group.pool);
        // Images of a group are in its namespace.
        self.spec_beside(group_pool, pool, namespace, name)
    }

    async fn flush_group(&self, spec: &GroupSpec) -> Result<()> {
        let backend = self.pool(split_pool(&spec.pool).0).await?;
        backend.flush().await.map_err(|error| self.group_failure(error, spec))
    }

    /// Explains an error about a group to the user.
    fn group_failure(&self, error: forebay_block::Error, spec: &GroupSpec) -> Failure {
        let failure = Failure::from(error);
        match failure.kind {
            FailureKind::NotFound => Failure::new(FailureKind::NotFound, format!("there is no group {spec}"))
                .hint(format!("'forebay group ls {}' lists the groups", spec.pool)),
            FailureKind::Exists => Failure::new(FailureKind::Exists, format!("the group {spec} exists already"))
                .hint(format!("choose another name, or remove that one: forebay group rm {spec}")),
            _ => failure.context(format_args!("the group {spec}")),
        }
    }

    async fn has_group(&self, spec: &GroupSpec) -> bool {
        self.list_groups(&spec.pool).await.is_ok_and(|groups| groups.contains(&spec.group))
    }

    /// Explains an error about an image of a group.
    async fn member_failure(&self, error: forebay_block::Error, spec: &GroupSpec, member: &ImageSpec) -> Failure {
        match error.kind() {
            ErrorKind::NotFound if !self.has_group(spec).await => self.group_failure(error, spec),
            ErrorKind::NotFound if self.image_is_missing(member).await => self.image_failure(error, member),
            ErrorKind::NotFound => Failure::new(FailureKind::NotFound, format!("{member} is not in the group {spec}"))
                .hint(format!("'forebay group image ls {spec}' lists its images")),
            ErrorKind::Exists => {
                let failure = Failure::from(error);
                failure.hint("an image belongs to one group; 'forebay info' shows which")
            }
            _ => self.image_failure(error, member),
        }
    }

    /// Explains why a snapshot of a group cannot be created.
    async fn group_creation_failure(&self, error: forebay_block::Error, spec: &GroupSnapshotSpec) -> Failure {
        match error.kind() {
            ErrorKind::Exists => self.group_snapshot_failure(error, spec).await,
            ErrorKind::NotFound if !self.has_group(&spec.group).await => self.group_failure(error, &spec.group),
            ErrorKind::NoSpace => Failure::from(error)
                .hint("'forebay snap ls --all' lists its snapshots; 'forebay snap limit clear' ends the limit"),
            _ => Failure::from(error),
        }
    }

    /// Explains an error about a snapshot of a group.
    async fn group_snapshot_failure(&self, error: forebay_block::Error, spec: &GroupSnapshotSpec) -> Failure {
        match error.kind() {
            ErrorKind::NotFound if !self.has_group(&spec.group).await => self.group_failure(error, &spec.group),
            ErrorKind::NotFound => Failure::new(FailureKind::NotFound, format!("there is no snapshot {spec}"))
                .hint(format!("'forebay group snap ls {}' lists the snapshots", spec.group)),
            ErrorKind::Exists => Failure::new(FailureKind::Exists, format!("the snapshot {spec} exists already"))
                .hint(format!("choose another name, or remove that one: forebay group snap rm {spec}")),
            ErrorKind::Invalid => Failure::from(error).hint(format!("remove it: forebay group snap rm {spec}")),
            _ => Failure::from(error).context(format_args!("the group {}", spec.group)),
        }
    }
}

/// Cut of a write log, which chooses the moment of a part.
type LogCut = (Rc<WriteLog>, Cut);

/// Chooses the moment of each part: the cut of its image's write log, or of an image without one, a hold of its writes.
async fn choose_moments(volumes: &[Rc<Volume>], parts: Vec<PendingPart>) -> Result<Vec<(PendingPart, Option<LogCut>)>> {
    let mut chosen = Vec::new();
    for mut part in parts {
        let volume = volumes.iter().find(|volume| Rc::ptr_eq(&volume.image, part.image()));
        let cut = match volume.and_then(|volume| volume.log()) {
            Some(log) => {
                let cut = log.begin_cut().await;
                // A log that is off passes requests on, and its cut holds none of them.
                (!matches!(log.mode(), Mode::Off(_))).then_some((log, cut))
            }
            None => None,
        };
        if cut.is_none() {
            part.hold().await?;
        }
        chosen.push((part, cut));
    }
    Ok(chosen)
}

/// Creates a part; one behind a write log once the image is at the moment of the cut.
async fn create_part(part: PendingPart, cut: Option<LogCut>) -> Result<CreatedPart> {
    let Some((log, cut)) = cut else { return Ok(part.create().await?) };
    let image = part.image().name();
    let completed = log.complete_cut(&cut).await;
    completed.map_err(|error| Failure::from(error).context(format_args!("the write log of {image}")))?;
    let created = part.create().await;
    drop(cut);
    Ok(created?)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use forebay_block::{BlockRequest, Buf};
    use forebay_image::CreateOptions;
    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;
    use crate::engine::testing::{POOL, engine_with_cluster, until};

    fn write() -> BlockRequest {
        BlockRequest::Write { offset: 0, data: Buf::copy_of(&[7; 4096]).into(), fua: false }
    }

    /// While the moment of one image waits for a write in flight, hosts' writes to the others wait as well.
    #[test]
    fn writes_to_all_images_wait_for_the_moment_of_each() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let dir = tempfile::tempdir().expect("a directory");
        reactor.block_on(async {
            let (engine, cluster, client, _) = engine_with_cluster(dir.path()).await;
            let group: GroupSpec = "rbd/g".parse().expect("a spec");
            engine.create_group(&group).await.expect("a group");
            let mut volumes = Vec::new();
            for name in ["y", "z"] {
                let options = CreateOptions { size: 8 << 20, ..CreateOptions::default() };
                image::create(&client.pool(POOL), name, options).await.expect("an image");
                let spec = format!("rbd/{name}").parse().expect("a spec");
                engine.add_to_group(&group, &spec).await.expect("added");
                volumes.push(engine.open_volume(&spec).await.expect("open"));
            }
            // The moments are chosen in the order of the ids.
            volumes.sort_by_key(|volume| volume.image.id().to_owned());
            let device = |volume: &Rc<Volume>| {
                let spec = format!("rbd/{}", volume.image.name()).parse().expect("a spec");
                volume.device(false, engine.meter(&spec, None)).expect("a device")
            };
            let devices: Vec<_> = volumes.iter().map(device).collect();
            for device in &devices {
                device.submit(write()).await.expect("written");
            }
            let stall = cluster.stall(POOL, &format!("rbd_data.{}", volumes[0].image.id()));
            let slow = spawn(devices[0].submit(write()));
            until(|| stall.waiting() > 0).await;
            let (own, snapshot) = (engine.clone(), GroupSnapshotSpec::new(group, "s").expect("a spec"));
            let taken = spawn(async move { own.create_group_snapshot(&snapshot).await });
            until(|| volumes[1].gate.holds.get() > 0).await;
            let (is_done, waiting) = (Rc::new(Cell::new(false)), devices[1].clone());
            let own = is_done.clone();
            let later = spawn(async move {
                waiting.submit(write()).await.expect("written");
                own.set(true);
            });
            for _ in 0..100 {
                yield_now().await;
            }
            assert!(!is_done.get(), "a write passed while a moment was to be chosen");
            drop(stall);
            slow.await.expect("written");
            taken.await.expect("a snapshot");
            later.await;
            drop((devices, volumes));
            engine.close().await.expect("closed");
        });
    }
}
