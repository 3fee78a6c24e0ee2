//! Planted faults in the encryption of the embedded store.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-store");
const CRYPT: Stage = Stage::Test("forebay-store", "encryption");
const DEVICES: Stage = Stage::Test("forebay-store", "devices");

const USES: &str = "backend/store/src/segment_uses.rs";
const KEYS: &str = "backend/store/src/crypt/volume_keys.rs";
const CIPHER: &str = "backend/store/src/crypt/cipher.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "encryption-uses-again",
        "A use of a segment may have the number of one that a crash has lost",
        USES,
        "if self.features.has_encryption() && !anchor.clean { IN_FLIGHT_MAX } else { 0 }",
        "if self.features.has_encryption() && anchor.clean { IN_FLIGHT_MAX } else { 0 }",
        &[UNIT],
    ),
    Mutant::new(
        "encryption-blocks-like-blobs",
        "A plain block may have the tweak of a sector of a blob",
        CIPHER,
        "SectorNumber { low: place.at | PLAIN_BIT, high: place.segment_use }",
        "SectorNumber { low: place.at | PLAIN_BIT & 0, high: place.segment_use }",
        &[UNIT],
    ),
    Mutant::new(
        "encryption-uses-not-saved",
        "The uses of segments are not in the tree",
        USES,
        "self.index.put(keys::segment_use(segment), Some(seq.to_le_bytes().into()));",
        "self.index.put(keys::segment_use(segment), Some(seq.to_le_bytes().into()).filter(|_| false));",
        &[CRYPT],
    )
    .equivalent(
        "the header of a segment's first batch has its use as well; the record only matters where that is damaged",
    ),
    Mutant::new(
        "encryption-one-place",
        "A destroyed key stays in one of the two places",
        KEYS,
        "        for _ in KEY_PLACES {\n            table.generation += 1;",
        "        for _ in &KEY_PLACES[1..] {\n            table.generation += 1;",
        &[CRYPT],
    ),
    Mutant::new(
        "encryption-no-table-believed",
        "One device without a key table is enough to believe that there was none",
        KEYS,
        "places.iter().all(|copies| copies.none > parity)",
        "places.iter().all(|copies| copies.none > 0)",
        &[UNIT],
    ),
    Mutant::new(
        "encryption-any-master-key",
        "A wrong master key opens the store",
        KEYS,
        "if !table.keys.is_empty() && wrapper.check != table.master_check {",
        "if table.keys.is_empty() && wrapper.check != table.master_check {",
        &[CRYPT],
    ),
    Mutant::new(
        "encryption-cleaner-moves-bytes",
        "The cleaner moves encrypted blocks as they are to a place with another tweak",
        "backend/store/src/clean.rs",
        "        self.relocate(object, run, plain.into(), Some(cipher));",
        "        let _ = plain;\n        self.relocate(object, run, data, None);",
        &[CRYPT],
    ),
    Mutant::new(
        "encryption-key-table-not-copied",
        "A device that joins the store has no key table",
        "backend/store/src/store.rs",
        "        self.core.renew_keys().await?;\n        self.core.maintenance",
        "        self.core.maintenance",
        &[DEVICES],
    ),
];
