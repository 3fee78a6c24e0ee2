//! Group of a family's images, and its snapshots.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};
use forebay_image::{Images, SnapshotKind};

use super::logs::{FamilyLogs, LoggedMember};
use super::{Family, open, wrong};

/// Name of the group.
const GROUP: &str = "family";

/// Operation on the group.
#[derive(Debug, Clone)]
pub(super) enum GroupStep {
    /// Adds the image, to a new group if there is none.
    Join,
    /// Removes the image.
    Leave,
    Snapshot {
        name: String,
    },
    RemoveSnapshot {
        name: String,
    },
    RollBack {
        name: String,
    },
}

/// Part of a group's snapshot, as the model has it.
pub(super) struct KnownPart {
    content: Vec<u8>,
    /// Set if it may read the image's parent.
    pub(super) uses_parent: bool,
}

/// Group as the model has it.
#[derive(Default)]
pub(super) struct KnownGroup {
    exists: bool,
    members: BTreeSet<usize>,
    /// Parts by image, by the name of the snapshot.
    snapshots: BTreeMap<String, BTreeMap<usize, KnownPart>>,
}

impl KnownGroup {
    /// Returns whether an image is in the group, or has parts of its snapshots.
    pub(super) fn needs(&self, number: usize) -> bool {
        self.members.contains(&number) || self.parts(number) > 0
    }

    /// Returns the number of parts that an image has.
    fn parts(&self, number: usize) -> usize {
        self.snapshots.values().filter(|parts| parts.contains_key(&number)).count()
    }

    /// Returns whether parts of an image read its parent.
    pub(super) fn uses_parent(&self, number: usize) -> bool {
        self.snapshots.values().filter_map(|parts| parts.get(&number)).any(|part| part.uses_parent)
    }

    /// Does what a deep flatten of an image does.
    pub(super) fn detach(&mut self, number: usize) {
        for part in self.snapshots.values_mut().filter_map(|parts| parts.get_mut(&number)) {
            part.uses_parent = false;
        }
    }
}

impl Family {
    /// Draws an operation on the group.
    pub(super) fn draw_group_step(&mut self, number: usize) -> GroupStep {
        let group = &self.group;
        let count = group.snapshots.len() as u64;
        let names: Vec<_> = group.snapshots.keys().cloned().collect();
        match self.rng.below(8) {
            _ if !group.members.contains(&number) => GroupStep::Join,
            0 => GroupStep::Leave,
            1 | 2 if count > 0 => GroupStep::RemoveSnapshot { name: self.rng.pick(&names).clone() },
            3 | 4 if count > 0 => GroupStep::RollBack { name: self.rng.pick(&names).clone() },
            _ => GroupStep::Snapshot { name: self.fresh("g") },
        }
    }

    pub(super) async fn perform_group_step(&self, images: &Rc<Images>, number: usize, step: &GroupStep) -> Result<()> {
        let member = &self.members[number].name;
        match step {
            GroupStep::Join => {
                if !images.groups().await?.contains(&GROUP.to_owned()) {
                    images.create_group(GROUP).await?;
                }
                images.add_to_group(GROUP, images, member).await
            }
            GroupStep::Leave => images.remove_from_group(GROUP, images, member).await,
            GroupStep::Snapshot { name } => take_snapshot(images, self.logs.as_ref(), name).await,
            GroupStep::RemoveSnapshot { name } => images.remove_group_snapshot(GROUP, name).await,
            GroupStep::RollBack { name } => {
                for part in images.group_snapshot_parts(GROUP, name).await? {
                    let image = open(images, &part.image).await?;
                    let closed = match self.logs.as_ref().and_then(|logs| logs.of_name(&part.image)) {
                        Some(LoggedMember { log, .. }) => Some(log.shrink(0).await?),
                        None => None,
                    };
                    let rolled_back = image.rollback_number(part.snapshot, |_| {}).await;
                    drop(closed);
                    image.close().await;
                    rolled_back?;
                }
                Ok(())
            }
        }
    }

    /// Does in the model what an operation has done.
    pub(super) fn apply_group_step(&mut self, number: usize, step: GroupStep) {
        let group = &mut self.group;
        match step {
            GroupStep::Join => {
                group.exists = true;
                group.members.insert(number);
            }
            GroupStep::Leave => drop(group.members.remove(&number)),
            GroupStep::Snapshot { name } => {
                let part = |&number: &usize| {
                    let member = &self.members[number];
                    (number, KnownPart { content: member.content.clone(), uses_parent: member.attached })
                };
                let parts = group.members.iter().map(part).collect();
                group.snapshots.insert(name, parts);
                self.tally.group_snapshots += 1;
            }
            GroupStep::RemoveSnapshot { name } => drop(group.snapshots.remove(&name)),
            GroupStep::RollBack { name } => {
                for (&number, part) in group.snapshots.get(&name).into_iter().flatten() {
                    self.members[number].content = part.content.clone();
                }
            }
        }
    }

    /// Completes an operation that the end of the last life cut short, or finds out that it has not happened.
    pub(super) async fn settle_group_step(
        &mut self,
        images: &Rc<Images>,
        number: usize,
        step: GroupStep,
    ) -> Result<()> {
        let listed = match images.group_snapshots(GROUP).await {
            Err(error) if error.kind() == ErrorKind::NotFound => Vec::new(),
            listed => listed?,
        };
        let found = |name: &str| listed.iter().find(|snapshot| snapshot.name == name);
        match &step {
            GroupStep::Join => match self.perform_group_step(images, number, &step).await {
                Err(error) if error.kind() != ErrorKind::Exists => return Err(error),
                _ => {}
            },
            GroupStep::Leave => match self.perform_group_step(images, number, &step).await {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            },
            GroupStep::Snapshot { name } => match found(name) {
                Some(snapshot) if snapshot.is_complete => {}
                Some(_) => return images.remove_group_snapshot(GROUP, name).await,
                None => return Ok(()),
            },
            GroupStep::RemoveSnapshot { name } => {
                if found(name).is_some() {
                    self.perform_group_step(images, number, &step).await?;
                }
            }
            GroupStep::RollBack { .. } => self.perform_group_step(images, number, &step).await?,
        }
        self.apply_group_step(number, step);
        Ok(())
    }

    /// Compares the group with the model.
    pub(super) async fn check_group(&self, images: &Rc<Images>) -> Result<()> {
        for (number, member) in self.members.iter().enumerate().filter(|(_, member)| !member.gone) {
            let all = images.snapshots(&member.name).await?;
            let parts = all.iter().filter(|one| matches!(one.kind, SnapshotKind::Group { .. })).count();
            if parts != self.group.parts(number) {
                let wanted = self.group.parts(number);
                return Err(wrong(format!("{} has {parts} parts of the group's snapshots, not {wanted}", member.name)));
            }
        }
        if !self.group.exists {
            return Ok(());
        }
        let mut members: Vec<_> = images.group_images(GROUP).await?;
        members.sort_by(|one, other| one.image.cmp(&other.image));
        let mut wanted: Vec<_> = self.group.members.iter().map(|&number| &self.members[number].name).collect();
        wanted.sort();
        if !members.iter().map(|member| &member.image).eq(wanted.iter().copied())
            || members.iter().any(|member| !member.is_attached)
        {
            return Err(wrong(format!("the group has {members:?}, not {wanted:?}")));
        }
        let mut snapshots = images.group_snapshots(GROUP).await?;
        snapshots.sort_by(|one, other| one.name.cmp(&other.name));
        let known = self.group.snapshots.keys();
        if !snapshots.iter().map(|snapshot| &snapshot.name).eq(known) || snapshots.iter().any(|one| !one.is_complete) {
            return Err(wrong(format!("the group has the snapshots {snapshots:?}")));
        }
        Ok(())
    }
}

/// Creates a snapshot of the group.
async fn take_snapshot(images: &Rc<Images>, logs: Option<&FamilyLogs>, name: &str) -> Result<()> {
    let mut members = Vec::new();
    for member in images.group_images(GROUP).await? {
        members.push(open(images, &member.image).await?);
    }
    let handles = members.clone();
    let taken = async {
        let (pending, mut parts) = images.begin_group_snapshot(GROUP, name, members).await?;
        // Of an image with a log, its cut chooses the moment; the writes to others are held.
        let mut cuts = Vec::new();
        for part in &mut parts {
            match logs.and_then(|logs| logs.of_name(&part.image().name())) {
                Some(LoggedMember { log, .. }) => cuts.push(Some((log.begin_cut().await, log))),
                None => {
                    part.hold().await?;
                    cuts.push(None);
                }
            }
        }
        let mut created = Vec::new();
        for (part, cut) in parts.into_iter().zip(cuts) {
            if let Some((cut, log)) = &cut {
                log.complete_cut(cut).await?;
            }
            created.push(part.create().await?);
        }
        pending.complete(created).await.map(drop)
    };
    let taken: Result<()> = taken.await;
    for image in handles {
        image.close().await;
    }
    taken
}

/// Removes the group, if there is one.
pub(super) async fn remove(images: &Rc<Images>) -> Result<()> {
    match images.remove_group(GROUP).await {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Returns whether an object may be left when all images and groups are removed: the directory of groups, and the empty header of a
/// group whose creation was cut short.
pub(super) async fn may_be_left(images: &Rc<Images>, object: &forebay_block::ObjectName) -> Result<bool> {
    if object.name() == "rbd_group_directory" {
        return Ok(true);
    }
    let is_empty = async || Ok::<_, Error>(images.backend().kv_list(object, b"", b"", 1).await?.pairs.is_empty());
    Ok(object.name().starts_with("rbd_group_header.") && is_empty().await?)
}
