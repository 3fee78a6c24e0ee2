//! Comparison of a family with the model, and what is left when all of it is removed.

use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectName, Result, SnapId};
use forebay_image::{Images, RemoveOptions};

use super::changes::check_changes;
use super::logs::LoggedMember;
use super::{Family, content_of, group, open, wrong};

impl Family {
    /// Compares everything with the model.
    pub(super) async fn check(&self, images: &Rc<Images>) -> Result<()> {
        self.check_group(images).await?;
        let listed = images.list().await?;
        let there = self.members.iter().filter(|member| !member.gone);
        let mut names: Vec<_> = there.map(|member| member.name.clone()).collect();
        names.sort();
        if listed != names {
            return Err(wrong(format!("{listed:?} are listed, not {names:?}")));
        }
        for (number, member) in self.members.iter().enumerate().filter(|(_, member)| !member.gone) {
            let image = open(images, &member.name).await?;
            let mut cut = None;
            if let Some(LoggedMember { log, .. }) = self.logged(number) {
                let found = content_of(&*log).await?;
                self.compare(&format!("{}, with its log,", member.name), &found, &member.content)?;
                // While the cut is held, the image has everything that was acknowledged.
                cut = Some(log.cut().await?);
            }
            let found = content_of(&*image).await?;
            self.compare(&member.name, &found, &member.content)?;
            check_changes(&image, member.snapshots.last(), &member.content).await?;
            drop(cut);
            image.close().await;
            let snapshots = images.snapshots(&member.name).await?;
            let users: Vec<_> = snapshots.iter().filter(|one| one.is_user()).map(|one| &one.name).collect();
            let known: Vec<_> = member.snapshots.iter().map(|known| &known.name).collect();
            if users != known {
                return Err(wrong(format!("{} has the snapshots {users:?}, not {known:?}", member.name)));
            }
            for known in &member.snapshots {
                let name = format!("{}@{}", member.name, known.name);
                let snapshot = open(images, &name).await?;
                let found = content_of(&*snapshot).await?;
                snapshot.close().await;
                self.compare(&name, &found, &known.content)?;
                let recorded = images.children(&member.name, Some(&known.name), false).await?;
                for clone in self.clones(number, &known.name) {
                    if !recorded.iter().any(|child| child.image == clone.name) {
                        return Err(wrong(format!("{} is not recorded as a clone of {name}", clone.name)));
                    }
                }
            }
        }
        Ok(())
    }

    fn compare(&self, name: &str, found: &[u8], wanted: &[u8]) -> Result<()> {
        if found.len() != wanted.len() {
            return Err(wrong(format!("{name} has {} bytes, not {}", found.len(), wanted.len())));
        }
        match found.iter().zip(wanted).position(|(found, wanted)| found != wanted) {
            Some(at) => Err(wrong(format!("{name} has {} at {at}, not {}", found[at], wanted[at]))),
            None => Ok(()),
        }
    }

    /// Removes everything, clones before their parents, and looks for remains.
    pub(super) async fn remove_all(&mut self, images: &Rc<Images>) -> Result<()> {
        if let Some(logs) = &mut self.logs {
            logs.end_all().await?;
        }
        group::remove(images).await?;
        for member in self.members.iter().rev().filter(|member| !member.gone) {
            let image = open(images, &member.name).await?;
            for known in &member.snapshots {
                image.set_snapshot_protection(&known.name, false).await?;
                image.remove_snapshot(&known.name).await?;
            }
            // Kept for a clone whose creation was cut short.
            for snapshot in images.snapshots(&member.name).await? {
                image.remove_snapshot_number(SnapId(snapshot.id)).await?;
            }
            image.close().await;
            images.remove(&member.name, RemoveOptions::default(), |_| {}).await?;
        }
        let backend = images.backend();
        let mut left = backend.list(None, None, 1000).await?.names;
        left.retain(|name| !["rbd_directory", "rbd_children"].contains(&name.name()));
        let mut remains = Vec::new();
        for name in left {
            if !group::may_be_left(images, &name).await? {
                remains.push(name);
            }
        }
        let left = remains;
        if !left.is_empty() {
            return Err(wrong(format!("{left:?} are left")));
        }
        match backend.kv_list(&ObjectName::new("rbd_children"), b"", b"", 9).await {
            Ok(page) if !page.pairs.is_empty() => Err(wrong(format!("{:?} are left in rbd_children", page.pairs))),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}
