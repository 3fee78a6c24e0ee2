//! Keys of cached parts.

use std::hash::{Hash, Hasher};
use std::rc::Rc;

use forebay_block::{Buf, PoolIdentity, SnapId, SnapshotIdentity};
use forebay_reactor::random;
use forebay_reactor::sync::WeakMap;

/// Part number of an object whose absence is final.
pub(crate) const ABSENT: u32 = u32::MAX;

/// Image at a snapshot, interned, or a generation of own blocks of an image: equal if and only if it is the same
/// allocation.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotSource(pub(crate) Rc<SnapshotIdentity>);

impl SnapshotSource {
    /// Creates the source of a generation of own blocks, which equals no other one.  Its random identity is in the checksums
    /// of its parts on disk.
    pub(crate) fn generation(image: &str) -> Self {
        let store = (u128::from(random()) << 64 | u128::from(random())).to_le_bytes();
        let pool = PoolIdentity { store, pool: -1 };
        Self(Rc::new(SnapshotIdentity { pool, image: image.into(), snap: SnapId::HEAD }))
    }

    /// Returns whether it is a generation of own blocks, which change.
    pub(crate) fn is_own(&self) -> bool {
        self.0.snap == SnapId::HEAD
    }
}

impl PartialEq for SnapshotSource {
    fn eq(&self, other: &Self) -> bool {
        Rc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SnapshotSource {}

impl Hash for SnapshotSource {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Rc::as_ptr(&self.0).addr().hash(state);
    }
}

/// SnapshotSources that keys refer to.
#[derive(Default)]
pub(crate) struct SnapshotSources(WeakMap<SnapshotIdentity, SnapshotIdentity>);

impl SnapshotSources {
    /// Returns the source of an identity: the same one as long as a key refers to it.
    pub(crate) fn intern(&self, identity: &SnapshotIdentity) -> SnapshotSource {
        if let Some(known) = self.0.get(identity) {
            return SnapshotSource(known);
        }
        let source = Rc::new(identity.clone());
        self.0.insert(identity.clone(), &source);
        SnapshotSource(source)
    }
}

/// Key of a part, or of the absence of a whole object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct PartKey {
    pub(crate) source: SnapshotSource,
    pub(crate) object: u64,
    /// Number of the part within the object, or [`ABSENT`].
    pub(crate) part: u32,
}

/// Knowledge of a part.
#[derive(Debug, Clone)]
pub(crate) enum Part {
    /// All bytes are zero.
    Zero,
    /// The object does not exist.
    Absent,
    /// Bytes, [`PART_LEN`](crate::PART_LEN) of them.
    Data(Buf),
}
