//! Unique identities of this data directory and of the volumes in it.

use std::fs;
use std::io;
use std::path::Path;

use aws_lc_rs::digest::{SHA256, digest};

use super::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL};

/// Unique 128-bit identifier.
pub type Uuid = [u8; 16];

/// Identity of a data directory.
#[derive(Debug, Clone, Copy)]
pub struct DataDirIdentity {
    /// Identifier created at the first start, persisted in the file `identity`.
    pub uuid: Uuid,
    /// Identifier created at every start, for volumes that exist in memory only.
    boot: Uuid,
}

impl DataDirIdentity {
    /// Loads the identity of a data directory, or creates one.
    pub fn load(data: &Path) -> Result<Self> {
        let path = data.join("identity");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let text = format!("{}\n", format_uuid(&random()?));
                replace_file(&path, text.as_bytes())
                    .map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))?;
                text
            }
            Err(error) => return Err(Failure::io(error, format_args!("reading {}", path.display()))),
        };
        let uuid = parse_uuid(text.trim()).ok_or_else(|| {
            Failure::new(FailureKind::Corrupt, format!("the identity in {} is not a UUID", path.display()))
                .hint("restore the previous one: hosts recognize volumes by it")
        })?;
        Ok(Self { uuid, boot: random()? })
    }

    /// Creates a temporary identity, which is not persisted.
    pub fn passing() -> Result<Self> {
        Ok(Self { uuid: random()?, boot: random()? })
    }

    /// Returns the identifier that was created at this start.
    pub fn boot(&self) -> Uuid {
        self.boot
    }

    /// Returns the identity of a volume in a Ceph cluster, which is the same for all daemons.
    pub fn shared_volume(fsid: &str, pool: i64, image_id: &str) -> Uuid {
        let text = format!("{fsid}/{pool}/{image_id}");
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&digest(&SHA256, text.as_bytes()).as_ref()[..16]);
        stamp(uuid)
    }

    /// Returns the identity of something that this data directory has once, by its name.
    pub fn named(&self, name: &str) -> Uuid {
        let text = [&self.uuid[..], b"\0", name.as_bytes()].concat();
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&digest(&SHA256, &text).as_ref()[..16]);
        stamp(uuid)
    }

    /// Returns the identity of a volume: it follows the image, whatever its name, as long as the image exists.
    pub fn volume(&self, spec: &ImageSpec, image_id: &str) -> Uuid {
        let scope = if spec.pool == RAM_POOL { &self.boot } else { &self.uuid };
        let text = [&scope[..], spec.pool.as_bytes(), b"\0", image_id.as_bytes()].concat();
        let mut uuid = [0; 16];
        uuid.copy_from_slice(&digest(&SHA256, &text).as_ref()[..16]);
        stamp(uuid)
    }
}

/// Marks 128 bits as a vendor-specific UUID (RFC 9562, version 8).
fn stamp(mut uuid: Uuid) -> Uuid {
    uuid[6] = uuid[6] & 0x0F | 0x80;
    uuid[8] = uuid[8] & 0x3F | 0x80;
    uuid
}

/// Returns 64 random bits in hexadecimal digits.
pub fn random_hex() -> Result<String> {
    Ok(random()?[8..].iter().map(|byte| format!("{byte:02x}")).collect())
}

fn random() -> Result<Uuid> {
    let mut uuid = [0; 16];
    aws_lc_rs::rand::fill(&mut uuid).map_err(|_| Failure::failed("the system gives no random numbers"))?;
    Ok(stamp(uuid))
}

/// Formats a UUID in its text form.
pub fn format_uuid(uuid: &Uuid) -> String {
    let mut text = String::with_capacity(36);
    for (at, byte) in uuid.iter().enumerate() {
        if [4, 6, 8, 10].contains(&at) {
            text.push('-');
        }
        text.push_str(&format!("{byte:02x}"));
    }
    text
}

/// Parses the text form of a UUID.
pub fn parse_uuid(text: &str) -> Option<Uuid> {
    let digits: String = text.chars().filter(|&char| char != '-').collect();
    if digits.len() != 32 || !digits.is_ascii() {
        return None;
    }
    let mut uuid = [0; 16];
    for (at, byte) in uuid.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(uuid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_identity_stays_and_tells_volumes_apart() {
        let dir = tempfile::tempdir().expect("a directory");
        let first = DataDirIdentity::load(dir.path()).expect("made");
        let again = DataDirIdentity::load(dir.path()).expect("read");
        assert_eq!(first.uuid, again.uuid);
        let local: ImageSpec = "local/a".parse().expect("a spec");
        let ram: ImageSpec = "ram/a".parse().expect("a spec");
        assert_eq!(first.volume(&local, "1"), again.volume(&local, "1"));
        assert_ne!(first.volume(&local, "1"), first.volume(&local, "2"));
        assert_ne!(first.volume(&ram, "1"), again.volume(&ram, "1"), "memory does not last");
        assert_eq!(parse_uuid(&format_uuid(&first.uuid)), Some(first.uuid));
    }

    #[test]
    fn damage_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(dir.path().join("identity"), "something else").expect("written");
        assert_eq!(DataDirIdentity::load(dir.path()).expect_err("no UUID").kind, FailureKind::Corrupt);
    }
}
