//! Check of a store on several devices.

use std::path::PathBuf;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::OpenOptions;

use super::open::find_devices;
use crate::check::{CheckOptions, CheckReport, Finding};
use crate::format::BLOCK;
use crate::format::anchor::{Anchor, SLOTS};
use crate::format::superblock::{COPIES, StoreSuperblock};
use crate::store::{Store, StoreOptions, StorePlace};

/// Checks the store on the devices at `paths`, which must not be open elsewhere. `uuid` is that of the store, if known.
///
/// # Errors
/// When the store cannot be opened at all; internal problems are in the report.
pub(crate) async fn check_devices(
    paths: &[PathBuf],
    uuid: Option<[u8; 16]>,
    options: &CheckOptions,
    mut progress: impl FnMut(u64, u64),
) -> Result<CheckReport> {
    if options.rebuild {
        let text =
            "a store on several devices has its superblocks and anchors on each of them; --rebuild is for one device";
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    let mut report = CheckReport::default();
    check_copies(paths, uuid, options, &mut report).await?;
    let accept_missing = options.accept_missing;
    let place = StorePlace::Several { paths, uuid, accept_missing };
    if options.roll_back && !Store::verify_roll_back(place, options, &mut report, &mut progress).await? {
        return Ok(report);
    }
    if options.roll_back {
        let store =
            place.open(StoreOptions { roll_back: true, without_master_key: true, ..StoreOptions::default() }).await?;
        if let Some((place, lost)) = &store.lost {
            let problem = format!("{lost}; discarded");
            report.findings.push(Finding { place: (*place).into(), problem, repaired: true });
        }
        store.close().await?;
    }
    if options.drop_lost && !Store::drop_lost(place, options.force, &mut report, &mut progress).await? {
        return Ok(report);
    }
    let opening = StoreOptions { read_only: true, roll_back: true, data_cache: 0, ..StoreOptions::default() };
    let store = place.open(opening).await?;
    if let Some((place, lost)) = &store.lost {
        report.add(*place, lost.clone());
    }
    if let Some(text) = store.degraded() {
        report.add("devices", text);
    }
    report.replayed = store.stats().replay.batches;
    store.check_structures(options, &mut report, &mut progress).await?;
    let wrong = store.devices().into_iter().filter(|device| device.wrong_blocks > 0);
    for device in wrong {
        report.add(
            format!("device {} ({})", device.number, device.path.display()),
            format!("{} blocks were wrong, and were reconstructed; a scrub mends them", device.wrong_blocks),
        );
    }
    Ok(report)
}

/// Checks each copy of superblock and anchor on every device.
async fn check_copies(
    paths: &[PathBuf],
    uuid: Option<[u8; 16]>,
    options: &CheckOptions,
    report: &mut CheckReport,
) -> Result<()> {
    let how = if options.repair { OpenOptions::read_write() } else { OpenOptions::read() };
    let found = find_devices(paths, uuid, how.direct().lock()).await?;
    for (path, why) in &found.unusable {
        report.add(path.display().to_string(), why.clone());
    }
    for device in &found.devices {
        let path = device.path.display();
        let failed = |error| Error::from_io(error, format!("checking the superblock of {path}"));
        for at in COPIES {
            let (result, block) = device.file.read_at(BufMut::with_capacity(BLOCK), at).await;
            result.map_err(failed)?;
            if StoreSuperblock::decode(&block).is_ok() {
                continue;
            }
            let problem = "damaged; `forebay store check --repair` renews it".to_owned();
            let mut finding = Finding { place: format!("superblock at byte {at} of {path}"), problem, repaired: false };
            if options.repair {
                device.file.write_at(Buf::copy_of(&device.superblock.encode()), at).await.map_err(failed)?;
                device.file.sync_data().await.map_err(failed)?;
                (finding.problem, finding.repaired) = ("damaged".into(), true);
            }
            report.findings.push(finding);
        }
        for at in SLOTS.into_iter().flatten() {
            let (result, block) = device.file.read_at(BufMut::with_capacity(BLOCK), at).await;
            result.map_err(failed)?;
            if let Err(error) = Anchor::decode(&block, device.superblock.store_number()) {
                report.add(format!("anchor at byte {at} of {path}"), error.to_string());
            }
        }
    }
    Ok(())
}
