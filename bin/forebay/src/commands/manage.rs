//! Commands `image-meta`, `lock`, `feature`, `object-map`, `watch`.

use std::io::{self, BufRead};
use std::time::Duration;

use forebay_image::ImageNotification;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use super::shapes::{self, Info};
use super::with_session;
use crate::api::{AddLockRequest, LockListing, ObjectMapCheck, UpdateFeaturesRequest};
use crate::cli::{FeatureCommand, FeatureNames, GlobalArgs, ImageMetaCommand, LockCommand, ObjectMapCommand, OneImage};
use crate::client::progress::{Bar, ProgressUnit};
use crate::client::session::CommandSession;
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::{
    AddLock, CheckObjectMap, GetMetadata, ListLocks, ListMetadata, RebuildObjectMap, RemoveLock, SetMetadata,
    UpdateFeatures,
};
use crate::output::{Output, put};
use crate::spec::{LOCAL_POOL, RAM_POOL};

/// Manages metadata.
pub fn image_meta(global: &GlobalArgs, output: Output, command: ImageMetaCommand) -> Result<()> {
    match command {
        ImageMetaCommand::Ls(options) => {
            let listed = with_session(global, |session| session.call(ListMetadata(options.image), |_| {}))?;
            output.print(&listed, |listed| metadata(listed.iter().map(|(key, value)| [key.clone(), value.clone()])))
        }
        ImageMetaCommand::Get(options) => {
            let operation = GetMetadata { spec: options.image, key: options.key };
            let found = with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&found.value, |value| format!("{value}\n"))
        }
        ImageMetaCommand::Set(options) => {
            let changed = options.image.clone();
            let operation = SetMetadata { spec: options.image, key: options.key, value: Some(options.value) };
            with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&changed, |_| String::new())
        }
        ImageMetaCommand::Rm(options) => {
            let changed = options.image.clone();
            let operation = SetMetadata { spec: options.image, key: options.key, value: None };
            with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&changed, |_| String::new())
        }
    }
}

/// Writes metadata as `rbd image-meta ls` does.
fn metadata(rows: impl ExactSizeIterator<Item = [String; 2]>) -> String {
    let (count, end) = (rows.len(), if rows.len() == 0 { "." } else { ":" });
    let what = if count == 1 { "is 1 metadatum".to_owned() } else { format!("are {count} metadata") };
    let table = shapes::table(["Key", "Value"], &[], rows);
    let gap = if count == 0 { "" } else { "\n" };
    format!("There {what} on this image{end}\n{gap}{table}")
}

/// Manages locks.
pub fn lock(global: &GlobalArgs, output: Output, command: LockCommand) -> Result<()> {
    match command {
        LockCommand::Ls(options) => {
            let locks = with_session(global, |session| session.call(ListLocks(options.image), |_| {}))?;
            match output.is_json() {
                true => output.print(&locks.locks, |_| String::new()),
                false => output.print(&locks, listed_locks),
            }
        }
        LockCommand::Add(options) => {
            let changed = options.lock.image.clone();
            let request = AddLockRequest { id: options.lock.id, shared: options.shared };
            let operation = AddLock { spec: options.lock.image, request };
            with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&changed, |_| String::new())
        }
        LockCommand::Rm(options) => {
            let changed = options.image.clone();
            let operation = RemoveLock { spec: options.image, id: options.id, locker: options.locker };
            with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&changed, |_| String::new())
        }
    }
}

/// Writes locks as `rbd lock ls` does.
fn listed_locks(locks: &LockListing) -> String {
    let how = if locks.exclusive { "exclusive" } else { "shared" };
    let head = match locks.locks.len() {
        0 => return String::new(),
        1 => format!("There is 1 {how} lock on this image.\n"),
        count => format!("There are {count} {how} locks on this image.\n"),
    };
    let tag = if locks.exclusive { String::new() } else { format!("Lock tag: {}\n", locks.tag) };
    let rows = locks.locks.iter().map(|lock| [lock.locker.clone(), lock.id.clone(), lock.address.clone()]);
    head + &tag + &shapes::table(["Locker", "ID", "Address"], &[], rows)
}

/// Enables and disables features.
pub fn feature(global: &GlobalArgs, output: Output, command: FeatureCommand) -> Result<()> {
    let (FeatureNames { image, features }, enabled) = match command {
        FeatureCommand::Enable(names) => (names, true),
        FeatureCommand::Disable(names) => (names, false),
    };
    let operation = UpdateFeatures { spec: image, request: UpdateFeaturesRequest { features, enabled } };
    let info = with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(&Info::from(&info), |_| String::new())
}

/// Checks and rebuilds object maps.
pub fn object_map(global: &GlobalArgs, output: Output, command: ObjectMapCommand) -> Result<()> {
    match command {
        ObjectMapCommand::Check(options) => {
            let bar = Bar::new(global, "Checking", ProgressUnit::Steps);
            let operation = CheckObjectMap(options.source);
            let checked = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            eprint!("{}", wrong_objects(&checked));
            output.print(&checked, |_| String::new())
        }
        ObjectMapCommand::Rebuild(options) => {
            let bar = Bar::new(global, "Rebuilding", ProgressUnit::Steps);
            let rebuilt = options.source.to_string();
            let operation = RebuildObjectMap(options.source);
            with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            output.print(&rebuilt, |_| String::new())
        }
    }
}

/// Names the objects that a map marks wrongly, in the words of `rbd`.
fn wrong_objects(check: &ObjectMapCheck) -> String {
    let line = |object: &crate::api::WrongMapEntry| {
        let crate::api::WrongMapEntry { name, marked, actual } = object;
        format!("forebay: object map error: object {name} marked as {marked}, but should be {actual}\n")
    };
    let mut text: String = check.wrong_objects.iter().map(line).collect();
    let more = check.wrong - check.wrong_objects.len() as u64;
    if more > 0 {
        text += &format!("forebay: object map error: {more} more objects are marked wrongly\n");
    }
    if !check.valid {
        text += "forebay: the object map is marked as invalid; 'forebay object-map rebuild' makes a valid one\n";
    }
    text
}

/// A notification as JSON.
#[derive(Debug, Serialize)]
struct NotificationLine<'a> {
    image: &'a str,
    notify_id: u64,
    cookie: u64,
    notifier_id: u64,
    length: usize,
    message: &'a str,
}

/// Prints the notifications of an image, until a line is read from standard input or it ends.
pub fn watch(global: &GlobalArgs, output: Output, options: OneImage) -> Result<()> {
    let spec = options.image;
    if [LOCAL_POOL, RAM_POOL].contains(&spec.pool.as_str()) {
        let what = format!("{spec}: only images in pools of a Ceph cluster have notifications");
        return Err(Failure::new(FailureKind::Unsupported, what));
    }
    let image = spec.image.clone();
    let here = CommandSession::own(global, false, Duration::ZERO)?;
    let engine = here.engine().clone();
    let (seen, mut notifications) = mpsc::unbounded_channel();
    let (stop, stopped) = oneshot::channel();
    let watching = std::thread::Builder::new()
        .name("watch".into())
        .spawn(move || engine.call_blocking(move |engine| engine.watch_image(spec, seen, stopped)))
        .map_err(|error| Failure::io(error, "starting a thread"))?;
    let mut stop = Some(stop);
    let mut printed = Ok(());
    while let Some(told) = notifications.blocking_recv() {
        printed = match told {
            None => {
                wait_for_enter(stop.take())?;
                if output.is_json() { Ok(()) } else { put(b"press enter to exit...\n") }
            }
            Some(notification) => print(output, &image, &notification),
        };
        if printed.is_err() {
            break;
        }
    }
    drop((stop, notifications));
    let watched = watching.join().unwrap_or_else(|_| Err(Failure::failed("the engine ended with a panic")));
    let closed = here.close();
    watched.and(printed).and(closed)
}

/// Stops the watch in a thread of its own once a line is read from standard input.
fn wait_for_enter(stop: Option<oneshot::Sender<()>>) -> Result<()> {
    let read = move || {
        let _ = io::stdin().lock().read_line(&mut String::new());
        // A watch that has ended needs no stop.
        let _ = stop.map(|stop| stop.send(()));
    };
    let spawned = std::thread::Builder::new().name("enter".into()).spawn(read);
    spawned.map(drop).map_err(|error| Failure::io(error, "starting a thread"))
}

fn print(output: Output, image: &str, told: &ImageNotification) -> Result<()> {
    let ImageNotification { id, cookie, sender, len, kind } = told;
    let line =
        NotificationLine { image, notify_id: *id, cookie: *cookie, notifier_id: *sender, length: *len, message: kind };
    output.print(&line, |_| {
        format!(
            "{image} received notification: notify_id={id}, cookie={cookie}, notifier_id={sender}, bl.length={len}\n"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{ListedLock, WrongMapEntry};

    /// Output of `rbd image-meta ls` 16.2.
    #[test]
    fn metadata_byte_for_byte() {
        let rows = [["k", "v"], ["longer", "two words"]].map(|row| row.map(String::from));
        let want = "There are 2 metadata on this image:\n\nKey     Value    \nk       v        \nlonger  two words\n";
        assert_eq!(metadata(rows.clone().into_iter()), want);
        let want = "There is 1 metadatum on this image:\n\nKey     Value    \nlonger  two words\n";
        assert_eq!(metadata(rows.into_iter().skip(1)), want);
        assert_eq!(metadata(std::iter::empty()), "There are 0 metadata on this image.\n");
    }

    /// Output of `rbd lock ls` 16.2.
    #[test]
    fn locks_byte_for_byte() {
        let lock = |id: &str, locker: &str, address: &str| ListedLock {
            id: id.into(),
            locker: locker.into(),
            address: address.into(),
        };
        let one = LockListing {
            exclusive: true,
            tag: String::new(),
            locks: vec![lock("me", "client.4234", "127.0.0.1:0/2815228658")],
        };
        let want = "There is 1 exclusive lock on this image.\nLocker       ID  Address               \nclient.4234  me  127.0.0.1:0/2815228658\n";
        assert_eq!(listed_locks(&one), want);
        let json = serde_json::to_string(&one.locks).expect("JSON");
        assert_eq!(json, r#"[{"id":"me","locker":"client.4234","address":"127.0.0.1:0/2815228658"}]"#);
        let two = LockListing {
            exclusive: false,
            tag: "t".into(),
            locks: vec![
                lock("x", "client.4254", "127.0.0.1:0/1166558266"),
                lock("y", "client.4256", "127.0.0.1:0/356869037"),
            ],
        };
        let want = [
            "There are 2 shared locks on this image.",
            "Lock tag: t",
            "Locker       ID  Address               ",
            "client.4254  x   127.0.0.1:0/1166558266",
            "client.4256  y   127.0.0.1:0/356869037 ",
            "",
        ];
        assert_eq!(listed_locks(&two), want.join("\n"));
        assert_eq!(listed_locks(&LockListing { locks: Vec::new(), ..two }), "");
    }

    #[test]
    fn wrong_objects_are_named() {
        let object = WrongMapEntry { name: "rbd_data.1.0000000000000110".into(), marked: 1, actual: 3 };
        let check = ObjectMapCheck { objects: 9, wrong: 3, wrong_objects: vec![object], valid: false };
        let text = wrong_objects(&check);
        assert!(text.contains("object map error: object rbd_data.1.0000000000000110 marked as 1, but should be 3\n"));
        assert!(text.contains("2 more objects") && text.contains("forebay object-map rebuild"), "{text}");
        let good = ObjectMapCheck { wrong: 0, wrong_objects: Vec::new(), valid: true, ..check };
        assert_eq!(wrong_objects(&good), "");
    }
}
