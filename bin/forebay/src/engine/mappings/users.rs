//! Users of a device and of its partitions, as `/sys` and `/proc` show them.  Everything here may block.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

/// Number of a block device: major and minor.
type DeviceNumber = (u32, u32);

/// Block device or partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockNode {
    /// Name in `/dev`.
    pub name: String,
    number: DeviceNumber,
    /// Directory in `/sys`.
    sys: PathBuf,
}

/// Roots of what the kernel shows; tests have their own.
pub struct SystemView {
    sys: PathBuf,
    proc: PathBuf,
    /// Type of the files whose numbers are compared.
    node_type: FileType,
}

impl Default for SystemView {
    fn default() -> Self {
        Self { sys: "/sys".into(), proc: "/proc".into(), node_type: FileType::BlockDevice }
    }
}

impl SystemView {
    /// Returns a device, first, and its partitions; none if the kernel has no such device.
    pub fn nodes(&self, index: u32) -> Vec<BlockNode> {
        let name = format!("nbd{index}");
        let disk = self.sys.join("block").join(&name);
        let Some(number) = number_in(&disk) else { return Vec::new() };
        let partition = |path: PathBuf| {
            let name = path.file_name()?.to_str()?.to_owned();
            path.join("partition").exists().then_some(())?;
            Some(BlockNode { name, number: number_in(&path)?, sys: path })
        };
        let mut partitions: Vec<_> = entries(&disk).into_iter().filter_map(partition).collect();
        partitions.sort_by_key(|node| node.number);
        let mut nodes = vec![BlockNode { name, number, sys: disk }];
        nodes.append(&mut partitions);
        nodes
    }

    /// Describes a user of a device or of its partitions: a device on top of it, a loop device, a mount in any mount
    /// namespace, or a process that has it open, other than the process `except`.
    pub fn user(&self, nodes: &[BlockNode], except: Option<u32>) -> Option<String> {
        let mut namespaces = BTreeSet::new();
        let mut processes: Vec<_> = entries(&self.proc).into_iter().filter_map(process).collect();
        processes.sort_by_key(|(id, _)| *id);
        self.holder(nodes).or_else(|| {
            // One process for each mount namespace, the lowest first.
            let mounts = |(id, path): &(u32, PathBuf)| {
                let namespace = fs::read_link(path.join("ns/mnt")).ok();
                (namespace.is_none() || namespaces.insert(namespace)).then(|| mounted(nodes, *id, path))?
            };
            let mounted = processes.iter().find_map(mounts);
            let others = processes.iter().filter(|(id, _)| except != Some(*id));
            mounted.or_else(|| others.into_iter().find_map(|(id, path)| self.open_in(nodes, *id, path)))
        })
    }

    /// Describes a block device that is made of one of the nodes.
    fn holder(&self, nodes: &[BlockNode]) -> Option<String> {
        for node in nodes {
            if let Some(holder) = entries(&node.sys.join("holders")).first() {
                let name = holder.file_name()?.to_string_lossy().into_owned();
                let mapper = fs::read_to_string(self.sys.join("block").join(&name).join("dm/name"));
                let mapper = mapper.map_or_else(|_| String::new(), |text| format!(" (/dev/mapper/{})", text.trim()));
                return Some(format!("{} is part of /dev/{name}{mapper}", node.name));
            }
        }
        for device in entries(&self.sys.join("block")) {
            let Ok(backing) = fs::read_to_string(device.join("loop/backing_file")) else { continue };
            let backing = Path::new(backing.trim_end_matches('\n'));
            let by_name = |node: &&BlockNode| backing == Path::new("/dev").join(&node.name);
            let found = nodes.iter().find(by_name).or_else(|| self.node_at(nodes, backing));
            if let Some(node) = found {
                let name = device.file_name()?.to_string_lossy().into_owned();
                return Some(format!("{} is behind the loop device /dev/{name}", node.name));
            }
        }
        None
    }

    /// Describes a process, if it has one of the nodes open, by whatever path.
    fn open_in(&self, nodes: &[BlockNode], id: u32, process: &Path) -> Option<String> {
        let node = entries(&process.join("fd")).iter().find_map(|file| self.node_at(nodes, file))?;
        let name = fs::read_to_string(process.join("comm")).unwrap_or_default();
        Some(format!("{} is open in process {id} ({})", node.name, name.trim()))
    }

    /// Returns the node that a path leads to.
    fn node_at<'a>(&self, nodes: &'a [BlockNode], path: &Path) -> Option<&'a BlockNode> {
        // Without asking the server of a file on a network, which may not answer.
        let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE).ok()?;
        (FileType::from_raw_mode(found.stx_mode.into()) == self.node_type).then_some(())?;
        nodes.iter().find(|node| node.number == (found.stx_rdev_major, found.stx_rdev_minor))
    }
}

/// Describes a mount of one of the nodes in the mount namespace of a process.
fn mounted(nodes: &[BlockNode], id: u32, process: &Path) -> Option<String> {
    // Paths need not be UTF-8.
    let table = fs::read(process.join("mountinfo")).ok()?;
    let table = String::from_utf8_lossy(&table);
    table.lines().find_map(|line| {
        // ID, PARENT, MAJOR:MINOR, ROOT, MOUNT POINT, ..., "-", TYPE, SOURCE: some file systems have numbers of their own.
        let (mount, source) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(2);
        let (number, at) = (parse_number(fields.next()?)?, fields.nth(1)?);
        let source = source.split(' ').nth(1);
        let is_mounted = |node: &&BlockNode| {
            number == node.number || source.and_then(|path| path.strip_prefix("/dev/")) == Some(node.name.as_str())
        };
        let node = nodes.iter().find(is_mounted)?;
        Some(format!("{} is mounted at {at}, as process {id} sees it", node.name))
    })
}

fn process(path: PathBuf) -> Option<(u32, PathBuf)> {
    let id = path.file_name()?.to_str()?.parse().ok()?;
    Some((id, path))
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    // What is gone, or not ours to read, shows nothing.
    fs::read_dir(dir).map_or_else(|_| Vec::new(), |found| found.flatten().map(|entry| entry.path()).collect())
}

fn number_in(sys: &Path) -> Option<DeviceNumber> {
    parse_number(fs::read_to_string(sys.join("dev")).ok()?.trim())
}

fn parse_number(text: &str) -> Option<DeviceNumber> {
    let (major, minor) = text.split_once(':')?;
    Some((major.parse().ok()?, minor.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Directory with a device `nbd0` that has the number of `/dev/null` in its partition, and a process 42.
    struct Fake(tempfile::TempDir);

    impl Fake {
        fn new() -> Self {
            let fake = Self(tempfile::tempdir().expect("a directory"));
            fake.write("sys/block/nbd0/dev", "43:0\n");
            fake.write("sys/block/nbd0/queue/rotational", "0\n");
            fake.write("sys/block/nbd0/nbd0p1/dev", "1:3\n");
            fake.write("sys/block/nbd0/nbd0p1/partition", "1\n");
            fake.write("sys/block/loop0/loop/backing_file", "/some/file\n");
            fake.write("proc/42/comm", "bash\n");
            fake.write("proc/42/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n");
            fake.write("proc/self/mountinfo", "23 27 43:0 / /not-a-process rw - ext4 /dev/nbd0 rw\n");
            fake.link("proc/42/fd/0", "/dev/zero");
            fake
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("created");
            fs::write(path, text).expect("written");
        }

        fn link(&self, path: &str, to: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("created");
            symlink(to, path).expect("a link");
        }

        fn view(&self) -> SystemView {
            let (sys, proc) = (self.0.path().join("sys"), self.0.path().join("proc"));
            SystemView { sys, proc, node_type: FileType::CharacterDevice }
        }

        fn user(&self, except: Option<u32>) -> Option<String> {
            let nodes = self.view().nodes(0);
            assert_eq!(nodes.iter().map(|node| node.name.as_str()).collect::<Vec<_>>(), ["nbd0", "nbd0p1"]);
            self.view().user(&nodes, except)
        }
    }

    #[test]
    fn a_device_that_nobody_uses_has_no_user() {
        let fake = Fake::new();
        assert_eq!(fake.user(None), None);
        assert_eq!(fake.view().nodes(1), []);
    }

    #[test]
    fn a_process_with_a_partition_open_by_whatever_path_is_found() {
        let fake = Fake::new();
        let null = fake.0.path().join("another-name");
        symlink("/dev/null", &null).expect("a link");
        fake.link("proc/42/fd/7", null.to_str().expect("a path"));
        assert_eq!(fake.user(None).as_deref(), Some("nbd0p1 is open in process 42 (bash)"));
        assert_eq!(fake.user(Some(42)), None, "the caller itself");
    }

    #[test]
    fn mounts_in_any_namespace_are_found_by_number_and_by_source() {
        for line in [
            "36 35 1:3 / /mnt\\040x rw,noatime master:1 - ext4 /dev/root rw",
            "36 35 0:45 / /mnt\\040x rw,noatime - btrfs /dev/nbd0p1 rw",
        ] {
            let fake = Fake::new();
            fake.write("proc/43/mountinfo", &format!("22 27 0:21 / /proc rw - proc proc rw\n{line}\n"));
            fake.link("proc/42/ns/mnt", "mnt:[1]");
            fake.link("proc/43/ns/mnt", "mnt:[2]");
            let want = "nbd0p1 is mounted at /mnt\\040x, as process 43 sees it";
            assert_eq!(fake.user(None).as_deref(), Some(want));
            assert_eq!(fake.user(Some(43)).as_deref(), Some(want), "a mount is none of the caller's descriptors");
        }
    }

    #[test]
    fn devices_on_top_are_found() {
        let fake = Fake::new();
        fake.write("sys/block/loop0/loop/backing_file", "/dev/nbd0p1\n");
        assert_eq!(fake.user(None).as_deref(), Some("nbd0p1 is behind the loop device /dev/loop0"));
        fake.write("sys/block/loop0/loop/backing_file", "/dev/null\n");
        assert_eq!(fake.user(None).as_deref(), Some("nbd0p1 is behind the loop device /dev/loop0"), "another path");
        fake.write("sys/block/dm-3/dm/name", "vg-lv\n");
        fake.link("sys/block/nbd0/nbd0p1/holders/dm-3", "../../../dm-3");
        assert_eq!(fake.user(None).as_deref(), Some("nbd0p1 is part of /dev/dm-3 (/dev/mapper/vg-lv)"));
    }

    #[test]
    fn malformed_mount_tables_have_no_mounts() {
        let fake = Fake::new();
        for text in ["", "\n", "1 2 1:3", " - ", "1 2 x:3 / /mnt - ext4 /dev/nbd0", "1 2 1:3 /", "\u{0} - \u{0}"] {
            fake.write("proc/43/mountinfo", text);
            assert_eq!(fake.user(None), None, "{text:?}");
        }
    }
}
