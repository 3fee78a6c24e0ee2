//! Faults of limits and shares of volumes.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-qos");
const VIRTUAL_TIME: Stage = Stage::Test("forebay-qos", "virtual_time");

const BUCKET: &str = "volume/qos/src/bucket.rs";
const THROTTLE: &str = "volume/qos/src/throttle.rs";
const SHARE: &str = "volume/qos/src/share.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "qos-burst-forever",
        "A burst is refilled at its own rate, not at that of the limit",
        BUCKET,
        "self.reserve = add(self.reserve, self.limit.rate)",
        "self.reserve = add(self.reserve, self.limit.burst)",
        &[UNIT],
    ),
    Mutant::new(
        "qos-overtakes",
        "A request overtakes an older one of the other direction that waits for the total",
        THROTTLE,
        "overtaken.is_none_or(|older| self.admits_in_total(older.cost))",
        "overtaken.is_none_or(|older| self.admits_in_total(older.cost) || older.cost.bytes > 0)",
        &[UNIT],
    ),
    Mutant::new(
        "qos-tokens-leak",
        "A request that is dropped after its admission keeps its tokens",
        "volume/qos/src/volume.rs",
        "if !throttle.cancel(self.ticket) {",
        "if throttle.cancel(self.ticket) {",
        &[VIRTUAL_TIME],
    ),
    Mutant::new(
        "qos-share-with-itself",
        "A volume takes itself for another one that is quiet, and limits itself",
        SHARE,
        "light.key != key && light.until > now",
        "light.until > now",
        &[UNIT],
    ),
];
