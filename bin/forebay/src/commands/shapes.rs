//! The shapes of `rbd`: what it prints of images, key for key and column for column.

use forebay_block::StoredBytes;
use serde::Serialize;

use crate::api::{
    ConfigOption, DiskUsage, ImageChild, ImageInfo, ImageListing, ImageParent, ImageSnapshot, ImageStatus, ImageUsage,
    SnapshotNamespace,
};
use crate::timestamp::Timestamp;
use crate::units::rbd_size;

/// An image as `rbd info --format json` prints it; keys that `rbd` has not come last.
#[derive(Debug, Serialize)]
pub struct Info<'a> {
    name: &'a str,
    id: &'a str,
    size: u64,
    objects: u64,
    order: u8,
    object_size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_pool: Option<&'a str>,
    snapshot_count: usize,
    block_name_prefix: &'a str,
    format: u8,
    features: &'a [String],
    op_features: &'a [String],
    flags: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    group: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    create_timestamp: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    access_timestamp: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modify_timestamp: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    protected: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshot_limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<&'a ImageParent>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stripe_unit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stripe_count: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    compression: Option<&'a str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    encrypted: bool,
    pool: &'a str,
}

impl<'a> From<&'a ImageInfo> for Info<'a> {
    fn from(info: &'a ImageInfo) -> Self {
        let local = |time: Option<Timestamp>| time.map(Timestamp::local_text);
        Self {
            name: &info.name,
            id: &info.id,
            size: info.size,
            objects: info.objects,
            order: info.order,
            object_size: info.object_size,
            data_pool: info.data_pool.as_deref(),
            snapshot_count: info.snapshot_count,
            block_name_prefix: &info.block_name_prefix,
            format: info.format,
            features: &info.features,
            op_features: &info.op_features,
            flags: &info.flags,
            group: info.group.as_deref(),
            create_timestamp: local(info.create_timestamp),
            access_timestamp: local(info.access_timestamp),
            modify_timestamp: local(info.modify_timestamp),
            protected: info.protected.as_deref(),
            snapshot_limit: info.snapshot_limit,
            parent: info.parent.as_ref(),
            stripe_unit: info.stripe_unit,
            stripe_count: info.stripe_count,
            compression: info.compression.as_deref(),
            encrypted: info.encrypted,
            pool: &info.pool,
        }
    }
}

impl Info<'_> {
    /// Writes it as `rbd info` does.
    pub fn text(&self) -> String {
        let mut rows = vec![
            format!("size {} in {} objects", rbd_size(self.size), self.objects),
            format!("order {} ({} objects)", self.order, rbd_size(self.object_size)),
            format!("snapshot_count: {}", self.snapshot_count),
            format!("id: {}", self.id),
        ];
        rows.extend(self.data_pool.map(|pool| format!("data_pool: {pool}")));
        rows.push(format!("block_name_prefix: {}", self.block_name_prefix));
        rows.push(format!("format: {}", self.format));
        rows.push(format!("features: {}", self.features.join(", ")));
        rows.push(format!("op_features: {}", self.op_features.join(", ")));
        rows.push(format!("flags: {}", self.flags.join(", ")));
        rows.extend(self.group.map(|group| format!("group: {group}")));
        let times = [
            ("create_timestamp", &self.create_timestamp),
            ("access_timestamp", &self.access_timestamp),
            ("modify_timestamp", &self.modify_timestamp),
        ];
        rows.extend(times.iter().filter_map(|(name, time)| Some(format!("{name}: {}", time.as_ref()?))));
        let protected = |text: &str| if text == "true" { "True" } else { "False" };
        rows.extend(self.protected.map(|text| format!("protected: {}", protected(text))));
        rows.extend(self.snapshot_limit.map(|limit| format!("snapshot_limit: {limit}")));
        if let Some(parent) = self.parent {
            let trash = if parent.trash { format!(" (trash {})", parent.id) } else { String::new() };
            rows.push(format!("parent: {}{trash}", crate::api::ListedParent::from(parent).spec()));
            rows.push(format!("overlap: {}", rbd_size(parent.overlap)));
        }
        rows.extend(self.stripe_unit.map(|unit| format!("stripe unit: {}", rbd_size(unit))));
        rows.extend(self.stripe_count.map(|count| format!("stripe count: {count}")));
        rows.extend(self.compression.map(|setting| format!("compression: {setting}")));
        rows.extend(self.encrypted.then(|| "encrypted: yes".to_owned()));
        let rows: String = rows.iter().map(|row| format!("\t{row}\n")).collect();
        format!("rbd image '{}':\n{rows}", self.name)
    }
}

/// Writes a list as `rbd ls -l` does.
pub fn listing(images: &[ImageListing]) -> String {
    let rows = images.iter().map(|listed| {
        let lock = match listed.lock_type.as_deref() {
            Some("exclusive") => "excl",
            Some(_) => "shr",
            None => "",
        };
        [
            snapshot_name(&listed.image, &listed.snapshot),
            rbd_size(listed.size),
            listed.parent.as_ref().map(|parent| parent.spec()).unwrap_or_default(),
            listed.format.to_string(),
            if listed.protected.as_deref() == Some("true") { "yes".into() } else { String::new() },
            lock.into(),
        ]
    });
    table(["NAME", "SIZE", "PARENT", "FMT", "PROT", "LOCK"], &[1, 3], rows)
}

fn snapshot_name(image: &str, snapshot: &Option<String>) -> String {
    match snapshot {
        Some(snapshot) => format!("{image}@{snapshot}"),
        None => image.to_owned(),
    }
}

/// Writes what images take up as `rbd du` does.
pub fn usage(usage: &DiskUsage) -> String {
    let row = |name: String, provisioned, used| [name, rbd_size(provisioned), rbd_size(used)];
    let images = usage.images.iter();
    let mut rows: Vec<_> = images
        .map(|image| row(snapshot_name(&image.name, &image.snapshot), image.provisioned_size, image.used_size))
        .collect();
    if rows.len() > 1 {
        rows.push(row("<TOTAL>".into(), usage.total_provisioned_size, usage.total_used_size));
    }
    if usage.images.iter().all(|image| image.stored_size.is_none()) {
        return table(["NAME", "PROVISIONED", "USED"], &[1, 2], rows);
    }
    let compressed =
        |image: Option<&ImageUsage>| match image.and_then(|image| image.logical_size.zip(image.stored_size)) {
            Some((logical, stored)) => {
                let ratio = StoredBytes { logical, stored }.ratio();
                [rbd_size(logical), rbd_size(stored), format!("{ratio:.2}")]
            }
            None => [String::new(), String::new(), String::new()],
        };
    let rows = rows.into_iter().enumerate().map(|(at, [name, provisioned, used])| {
        let [logical, stored, ratio] = compressed(usage.images.get(at));
        [name, provisioned, used, logical, stored, ratio]
    });
    table(["NAME", "PROVISIONED", "USED", "LOGICAL", "STORED", "RATIO"], &[1, 2, 3, 4, 5], rows)
}

/// A snapshot as `rbd snap ls --format json` prints it.
#[derive(Debug, Serialize)]
pub struct SnapshotRow<'a> {
    id: u64,
    name: &'a str,
    size: u64,
    protected: &'a str,
    /// Empty if the time is unknown.
    timestamp: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    namespace: Option<&'a SnapshotNamespace>,
}

impl<'a> From<&'a ImageSnapshot> for SnapshotRow<'a> {
    fn from(snapshot: &'a ImageSnapshot) -> Self {
        Self {
            id: snapshot.id,
            name: &snapshot.name,
            size: snapshot.size,
            protected: &snapshot.protected,
            timestamp: snapshot.timestamp.map(Timestamp::local_text).unwrap_or_default(),
            namespace: snapshot.namespace.as_ref(),
        }
    }
}

/// Writes snapshots as `rbd snap ls` does; `all` adds the column of their owners.
pub fn snapshots(snapshots: &[SnapshotRow<'_>], all: bool) -> String {
    let cells = |snapshot: &SnapshotRow<'_>| {
        let protected = if snapshot.protected == "true" { "yes" } else { "" };
        [
            snapshot.id.to_string(),
            snapshot.name.into(),
            rbd_size(snapshot.size),
            protected.into(),
            snapshot.timestamp.clone(),
        ]
    };
    const TITLES: [&str; 5] = ["SNAPID", "NAME", "SIZE", "PROTECTED", "TIMESTAMP"];
    const RIGHT: [usize; 3] = [0, 2, 4];
    if !all {
        return table(TITLES, &RIGHT, snapshots.iter().map(cells));
    }
    let [id, name, size, protected, time] = TITLES;
    let rows = snapshots.iter().map(|snapshot| {
        let [id, name, size, protected, time] = cells(snapshot);
        let owner = snapshot.namespace.map(|namespace| {
            let SnapshotNamespace { kind, original_name, pool, group, group_snapshot } = namespace;
            match (original_name, pool, group, group_snapshot) {
                (Some(name), ..) => format!("{kind} ({name})"),
                (None, Some(pool), Some(group), Some(snapshot)) => format!("{kind} ({pool}/{group}@{snapshot})"),
                _ => kind.clone(),
            }
        });
        let owner = owner.unwrap_or_default();
        [id, name, size, protected, time, owner]
    });
    table([id, name, size, protected, time, "NAMESPACE"], &RIGHT, rows)
}

/// A clone as `rbd children --format json` prints it.
#[derive(Debug, Serialize)]
pub struct ChildRow<'a> {
    pool: &'a str,
    pool_namespace: &'a str,
    image: &'a str,
    /// With `--all`.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    /// With `--all`.
    #[serde(skip_serializing_if = "Option::is_none")]
    trash: Option<bool>,
}

impl<'a> ChildRow<'a> {
    /// Creates the row of a clone; `all` adds its id, and whether it is in the trash.
    pub fn new(child: &'a ImageChild, all: bool) -> Self {
        Self {
            pool: &child.pool,
            pool_namespace: &child.pool_namespace,
            image: &child.image,
            id: all.then_some(&child.id[..]),
            trash: all.then_some(child.trash),
        }
    }
}

/// Writes options as `rbd config image ls` does, or `rbd config pool ls`.
pub fn config_options(options: &[ConfigOption], of_image: bool) -> String {
    let cells = |option: &ConfigOption| [option.name.clone(), option.value.clone(), option.source.clone()];
    let rows = table(["Name", "Value", "Source"], &[], options.iter().map(cells));
    match (of_image, options.len()) {
        (false, _) => rows,
        (true, 1) => format!("There is 1 value:\n{rows}"),
        (true, count) => format!("There are {count} values:\n{rows}"),
    }
}

/// Writes the watchers of an image as `rbd status` does.
pub fn watchers(status: &ImageStatus) -> String {
    if status.watchers.is_empty() {
        return "Watchers: none\n".into();
    }
    let line = |watcher: &crate::api::ImageWatcher| {
        format!("\twatcher={} client.{} cookie={}\n", watcher.address, watcher.client, watcher.cookie)
    };
    format!("Watchers:\n{}", status.watchers.iter().map(line).collect::<String>())
}

/// Lays out a table as Ceph's programs do: titles to the left, the last column padded as well, nothing where there are
/// no rows.
pub(super) fn table<const N: usize>(
    titles: [&str; N],
    right: &[usize],
    rows: impl IntoIterator<Item = [String; N]>,
) -> String {
    let rows: Vec<_> = rows.into_iter().collect();
    if rows.is_empty() {
        return String::new();
    }
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([titles[column].len()]).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text =
        titles.iter().zip(widths).map(|(title, width)| format!("{title:<width$}")).collect::<Vec<_>>().join("  ");
    for row in &rows {
        let cells = row.iter().zip(widths).enumerate().map(|(column, (cell, width))| match right.contains(&column) {
            true => format!("{cell:>width$}"),
            false => format!("{cell:<width$}"),
        });
        text.push('\n');
        text.push_str(&cells.collect::<Vec<_>>().join("  "));
    }
    text.push('\n');
    text
}

/// Changed range as `rbd diff` shows it.
#[derive(Debug, Serialize)]
pub struct ChangedExtent {
    /// Offset in bytes.
    pub offset: u64,
    length: u64,
    exists: &'static str,
}

impl ChangedExtent {
    /// Creates it of a range with data, or one that reads as zeroes.
    pub fn new(offset: u64, length: u64, exists: bool) -> Self {
        Self { offset, length, exists: if exists { "true" } else { "false" } }
    }
}

/// Writes changes as `rbd diff` does.
pub fn changes(changes: &[ChangedExtent]) -> String {
    if changes.is_empty() {
        return String::new();
    }
    let rows = changes.iter().map(|change| {
        let kind = if change.exists == "true" { "data" } else { "zero" };
        [change.offset.to_string(), change.length.to_string(), kind.to_owned()]
    });
    table(["Offset", "Length", "Type"], &[], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{ImageUsage, ImageWatcher, ListedParent};

    fn listed(image: &str, size: u64) -> ImageListing {
        ImageListing {
            image: image.into(),
            id: "1015d79e38d3".into(),
            snapshot: None,
            snapshot_id: None,
            size,
            parent: None,
            format: 2,
            protected: None,
            lock_type: None,
        }
    }

    /// Output of `rbd ls -l` 16.2.
    #[test]
    fn a_list_byte_for_byte() {
        let snapshot = |name: &str, id, protected: &str| ImageListing {
            snapshot: Some(name.into()),
            snapshot_id: Some(id),
            protected: Some(protected.into()),
            ..listed("a", 100 << 20)
        };
        let parent = ListedParent {
            pool: "rbd".into(),
            pool_namespace: String::new(),
            image: "a".into(),
            snapshot: "s1".into(),
        };
        let images = [
            listed("a", 100 << 20),
            snapshot("s1", 4, "true"),
            snapshot("s2", 5, "false"),
            ImageListing { lock_type: Some("exclusive".into()), ..listed("b", 10 << 20) },
            ImageListing { parent: Some(parent.clone()), ..listed("c", 100 << 20) },
            listed("o", 5_120_000),
        ];
        let want = [
            "NAME  SIZE     PARENT    FMT  PROT  LOCK",
            "a     100 MiB              2            ",
            "a@s1  100 MiB              2  yes       ",
            "a@s2  100 MiB              2            ",
            "b      10 MiB              2        excl",
            "c     100 MiB  rbd/a@s1    2            ",
            "o     4.9 MiB              2            ",
            "",
        ];
        assert_eq!(listing(&images), want.join("\n"));
        assert_eq!(listing(&[]), "");
        assert_eq!(ListedParent { pool_namespace: "ns".into(), ..parent }.spec(), "rbd/ns/a@s1");
        let json = serde_json::to_string(&images[1]).expect("JSON");
        let want = r#"{"image":"a","id":"1015d79e38d3","snapshot":"s1","snapshot_id":4,"size":104857600,"format":2,"protected":"true"}"#;
        assert_eq!(json, want);
    }

    /// Output of `rbd du` 16.2.
    #[test]
    fn usage_byte_for_byte() {
        let image = |name: &str, provisioned_size, used_size| ImageUsage {
            name: name.into(),
            id: "1".into(),
            snapshot: None,
            snapshot_id: None,
            provisioned_size,
            used_size,
            logical_size: None,
            stored_size: None,
        };
        let one =
            DiskUsage { images: vec![image("o", 5_120_000, 0)], total_provisioned_size: 5_120_000, total_used_size: 0 };
        assert_eq!(usage(&one), "NAME  PROVISIONED  USED\no         4.9 MiB   0 B\n");
        let snapshot = ImageUsage { snapshot: Some("s1".into()), snapshot_id: Some(4), ..image("a", 100 << 20, 0) };
        let two = DiskUsage {
            images: vec![snapshot, image("a", 100 << 20, 4 << 20), image("b", 10 << 20, 0)],
            total_provisioned_size: 110 << 20,
            total_used_size: 4 << 20,
        };
        let want = [
            "NAME     PROVISIONED  USED ",
            "a@s1         100 MiB    0 B",
            "a            100 MiB  4 MiB",
            "b             10 MiB    0 B",
            "<TOTAL>      110 MiB  4 MiB",
            "",
        ];
        assert_eq!(usage(&two), want.join("\n"));
    }

    /// Output of `rbd snap ls` 16.2.
    /// Compares with what 'rbd config image ls' of Ceph 16.2 printed.
    #[test]
    fn options_byte_for_byte() {
        let option = |name: &str, value: &str, source: &str| ConfigOption {
            name: name.into(),
            value: value.into(),
            source: source.into(),
        };
        let all = [
            option("rbd_qos_iops_limit", "1000", "image"),
            option("rbd_plugins", "", "config"),
            option("rbd_cache", "true", "pool"),
        ];
        let want = "There are 3 values:\n\
            Name                Value  Source\n\
            rbd_qos_iops_limit  1000   image \n\
            rbd_plugins                config\n\
            rbd_cache           true   pool  \n";
        assert_eq!(config_options(&all, true), want);
        assert_eq!(config_options(&all, false), want.split_once('\n').expect("lines").1);
        assert!(config_options(&all[..1], true).starts_with("There is 1 value:\n"));
    }

    #[test]
    fn snapshots_byte_for_byte() {
        let snapshot = |id, name, protected| SnapshotRow {
            id,
            name,
            size: 100 << 20,
            protected,
            timestamp: "Mon Nov 23 19:41:42 2026".into(),
            namespace: None,
        };
        let all =
            [snapshot(4, "s1", "true"), SnapshotRow { timestamp: String::new(), ..snapshot(15, "second", "false") }];
        let want = [
            "SNAPID  NAME    SIZE     PROTECTED  TIMESTAMP               ",
            "     4  s1      100 MiB  yes        Mon Nov 23 19:41:42 2026",
            "    15  second  100 MiB                                     ",
            "",
        ];
        assert_eq!(snapshots(&all, false), want.join("\n"));
        assert_eq!(snapshots(&[], false), "");
        let json = serde_json::to_string(&all[0]).expect("JSON");
        let want = r#"{"id":4,"name":"s1","size":104857600,"protected":"true","timestamp":"Mon Nov 23 19:41:42 2026"}"#;
        assert_eq!(json, want);
        let user = SnapshotNamespace { kind: "user".into(), ..SnapshotNamespace::default() };
        let owned = [SnapshotRow { namespace: Some(&user), ..snapshot(4, "s1", "false") }];
        let want = [
            "SNAPID  NAME  SIZE     PROTECTED  TIMESTAMP                 NAMESPACE",
            "     4  s1    100 MiB             Mon Nov 23 19:41:42 2026  user     ",
            "",
        ];
        assert_eq!(snapshots(&owned, true), want.join("\n"));
    }

    /// Output of `rbd status` 16.2.
    #[test]
    fn watchers_byte_for_byte() {
        let watcher =
            ImageWatcher { address: "127.0.0.1:0/2719492090".into(), client: 4328, cookie: 93_876_820_201_264 };
        let status = |watchers| ImageStatus { watchers, exports: Vec::new() };
        let want = "Watchers:\n\twatcher=127.0.0.1:0/2719492090 client.4328 cookie=93876820201264\n";
        assert_eq!(watchers(&status(vec![watcher])), want);
        assert_eq!(watchers(&status(Vec::new())), "Watchers: none\n");
    }

    /// Output of `rbd info` 16.2 for a clone, without the times, which depend on the time zone.
    #[test]
    fn an_image_line_for_line() {
        let info = ImageInfo {
            compression: None,
            encrypted: false,
            pool: "rbd".into(),
            name: "c".into(),
            id: "101f31f0f504".into(),
            size: 100 << 20,
            objects: 25,
            order: 22,
            object_size: 4 << 20,
            data_pool: None,
            snapshot_count: 0,
            block_name_prefix: "rbd_data.101f31f0f504".into(),
            format: 2,
            features: vec!["layering".into(), "exclusive-lock".into()],
            op_features: vec!["clone-child".into()],
            flags: vec![],
            group: Some("rbd/g".into()),
            create_timestamp: None,
            access_timestamp: None,
            modify_timestamp: Some(Timestamp(0)),
            protected: Some("false".into()),
            snapshot_limit: Some(9),
            parent: Some(ImageParent {
                pool: "rbd".into(),
                pool_namespace: String::new(),
                image: "a".into(),
                id: "1015d79e38d3".into(),
                snapshot: "s1".into(),
                trash: false,
                overlap: 100 << 20,
            }),
            stripe_unit: Some(64 << 10),
            stripe_count: Some(16),
        };
        let time = format!("\tmodify_timestamp: {}", Timestamp(0).local_text());
        let want = [
            "rbd image 'c':",
            "\tsize 100 MiB in 25 objects",
            "\torder 22 (4 MiB objects)",
            "\tsnapshot_count: 0",
            "\tid: 101f31f0f504",
            "\tblock_name_prefix: rbd_data.101f31f0f504",
            "\tformat: 2",
            "\tfeatures: layering, exclusive-lock",
            "\top_features: clone-child",
            "\tflags: ",
            "\tgroup: rbd/g",
            &time,
            "\tprotected: False",
            "\tsnapshot_limit: 9",
            "\tparent: rbd/a@s1",
            "\toverlap: 100 MiB",
            "\tstripe unit: 64 KiB",
            "\tstripe count: 16",
            "",
        ];
        assert_eq!(Info::from(&info).text(), want.join("\n"));
    }
}
