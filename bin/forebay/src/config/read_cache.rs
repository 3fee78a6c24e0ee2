//! Configuration of the read cache of snapshot parents.

use std::path::{Path, PathBuf};

use forebay_readcache::{CacheOptions, DISK_SIZE_MIN, DiskOptions};
use serde::Deserialize;

use super::{absolute, memory};
use crate::failure::{Failure, Result};
use crate::units::Size;

/// Default size of the layer in memory.
const MEMORY: Size = Size(64 << 20);
/// Maximum size of the layer on disk: 64 TiB.
const DISK_SIZE_MAX: Size = Size(64 << 40);

/// `[read-cache]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ReadCacheSection {
    path: Option<PathBuf>,
    size: Option<Size>,
    memory: Option<Size>,
}

impl ReadCacheSection {
    /// Resolves the settings; `None` if there is no cache. `store` is the file of the embedded store.
    pub(super) fn resolve(self, store: &Path) -> Result<Option<CacheOptions>> {
        let in_memory = self.memory.unwrap_or(MEMORY);
        if in_memory.0 > memory() {
            let text = format!("[read-cache]: memory = \"{in_memory}\": this machine has {} of memory", Size(memory()));
            return Err(Failure::invalid(text));
        }
        let disk = match (self.path, self.size) {
            (None, None) => None,
            (None, Some(_)) => {
                return Err(Failure::invalid("[read-cache]: the path of the file is missing")
                    .hint("write for example path = \"/srv/fast/read-cache\", or leave out size"));
            }
            (Some(_), None) => {
                return Err(Failure::invalid("[read-cache]: the size of the file is missing")
                    .hint("write for example size = \"50G\""));
            }
            (Some(path), Some(size)) => {
                let path = absolute(&path)?;
                if !(DISK_SIZE_MIN..=DISK_SIZE_MAX.0).contains(&size.0) {
                    let least = Size(DISK_SIZE_MIN);
                    let text = format!("[read-cache]: size = \"{size}\": from {least} to {DISK_SIZE_MAX}");
                    return Err(Failure::invalid(text));
                }
                if path == store {
                    let text = format!("[read-cache]: {} is the file of the store", path.display());
                    return Err(Failure::invalid(text).hint("name another file or device"));
                }
                Some(DiskOptions { path, size: size.0 })
            }
        };
        let options = CacheOptions { memory: in_memory.0, disk };
        Ok(Some(options).filter(|options| options.memory > 0 || options.disk.is_some()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str) -> Result<Option<CacheOptions>> {
        let section = toml::from_str::<ReadCacheSection>(text).map_err(|error| Failure::invalid(error.to_string()))?;
        section.resolve(Path::new("/d/store.img"))
    }

    #[test]
    fn settings_are_read_and_what_is_wrong_is_said() {
        assert_eq!(resolve("").expect("defaults"), Some(CacheOptions { memory: 64 << 20, disk: None }));
        assert_eq!(resolve("memory = '0'").expect("off"), None);
        let disk = Some(DiskOptions { path: "/srv/c".into(), size: 1 << 30 });
        let text = "path = '/srv/c'\nsize = '1G'\nmemory = '16M'";
        assert_eq!(resolve(text).expect("both"), Some(CacheOptions { memory: 16 << 20, disk: disk.clone() }));
        let text = "path = '/srv/c'\nsize = '1G'\nmemory = '0'";
        assert_eq!(resolve(text).expect("disk"), Some(CacheOptions { memory: 0, disk }));
        for (text, says) in [
            ("path = '/srv/c'", "size"),
            ("size = '1G'", "path"),
            ("path = '/srv/c'\nsize = '15M'", "16 MiB"),
            ("path = '/srv/c'\nsize = '65T'", "64 TiB"),
            ("path = '/d/store.img'\nsize = '1G'", "store"),
            ("memory = '1000T'", "memory"),
            ("pth = '/srv/c'", "pth"),
        ] {
            let failure = resolve(text).expect_err(text);
            assert!(failure.message.contains(says), "{text}: {failure}");
        }
    }
}
