//! Content of the status page, one page of each list at a time.
//!
//! The status page reloads periodically while open, on the reactor that serves volumes.  The cost of a load is
//! independent of the data that images hold: a load reads the pools' lists of names, and the header of each image
//! that is shown.

use std::time::Duration;

use forebay_image as image;
use forebay_reactor::{now, timeout, yield_now};

use super::Engine;
use crate::api::{self, DaemonStatus, Front, ImageExport};
use crate::failure::Result;
use crate::spec::{ImageSpec, image_spec};

/// Maximum number of rows of a list on one page.
pub const PAGE_ROWS: usize = 200;

/// Total time for pools to list their images: a cluster that does not respond must not block the page.
const PATIENCE: Duration = Duration::from_secs(2);

/// One page of a longer list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OverviewPage<T> {
    /// Rows of the page, at most [`PAGE_ROWS`].
    pub rows: Vec<T>,
    /// Page number, from 1.
    pub number: usize,
    /// Number of pages, at least 1.
    pub pages: usize,
    /// Number of rows on all pages.
    pub total: usize,
}

impl<T> OverviewPage<T> {
    /// Returns one page of all rows; a number past the end selects the last page.
    pub fn of(all: Vec<T>, number: usize) -> Self {
        let (total, pages) = (all.len(), all.len().div_ceil(PAGE_ROWS).max(1));
        let number = number.clamp(1, pages);
        let rows = all.into_iter().skip((number - 1) * PAGE_ROWS).take(PAGE_ROWS).collect();
        Self { rows, number, pages, total }
    }

    /// Maps each row.
    pub fn map<U>(self, change: impl FnMut(T) -> U) -> OverviewPage<U> {
        let rows = self.rows.into_iter().map(change).collect();
        OverviewPage { rows, number: self.number, pages: self.pages, total: self.total }
    }
}

/// Requested page number of each list, from 1.
#[derive(Debug, Clone, Copy)]
pub struct PageNumbers {
    /// Page of the images.
    pub images: usize,
    /// Page of the exports.
    pub exports: usize,
}

/// An image on the status page.
#[derive(Debug, Clone)]
pub struct ImageRow {
    /// Pool of the image.
    pub pool: String,
    /// Image name.
    pub name: String,
    /// Size in bytes, if the header was read in time.
    pub size: Option<u64>,
    /// Fronts over which the image is exported.
    pub fronts: Vec<Front>,
    /// State of its write log, while the log is open.
    pub log: Option<String>,
}

/// An open write log on the status page.
#[derive(Debug, Clone)]
pub struct LogRow {
    /// Log as `log ls` shows it.
    pub log: api::WriteLogInfo,
    /// Bytes of the log that cannot be written now.
    pub used: u64,
    /// Bytes of payload capacity.
    pub capacity: u64,
}

/// A pool whose images cannot be listed.
#[derive(Debug, Clone)]
pub struct UnlistedPool {
    /// Pool name.
    pub pool: String,
    /// Reason for the failure.
    pub reason: String,
}

/// Everything on the status page.
#[derive(Debug)]
pub struct Overview {
    /// State of the daemon, its pools and peers.
    pub status: DaemonStatus,
    /// Exports; those that hosts cannot reach come first.
    pub exports: OverviewPage<ImageExport>,
    /// Images of all pools, by pool and name.
    pub images: OverviewPage<ImageRow>,
    /// Pools that could not be listed in `images`.
    pub unlisted: Vec<UnlistedPool>,
    /// Open write logs; those that do not accept writes come first.
    pub logs: OverviewPage<LogRow>,
}

impl Engine {
    /// Returns everything on the status page.
    pub async fn overview(&self, numbers: PageNumbers) -> Result<Overview> {
        let status = self.status().await?;
        let (images, unlisted) = self.images_page(numbers.images).await;
        Ok(Overview { status, exports: self.targets_page(numbers.exports), images, unlisted, logs: self.logs_page() })
    }

    async fn images_page(&self, number: usize) -> (OverviewPage<ImageRow>, Vec<UnlistedPool>) {
        let deadline = now() + PATIENCE;
        let mut all = Vec::new();
        let mut unlisted = Vec::new();
        for pool in self.pool_names() {
            let reason = match timeout(deadline - now(), self.image_names(&pool)).await {
                Ok(Ok(names)) => {
                    all.extend(names.into_iter().map(|name| (pool.clone(), name)));
                    continue;
                }
                Ok(Err(failure)) => failure.message,
                Err(_) => format!("it does not answer within {} s", PATIENCE.as_secs()),
            };
            unlisted.push(UnlistedPool { pool, reason });
        }
        let mut images = OverviewPage::of(all, number).map(|(pool, name)| {
            let spec = image_spec(&pool, &name).ok();
            let fronts = spec.as_ref().map(|spec| self.fronts_of(spec)).unwrap_or_default();
            let log = spec.as_ref().and_then(|spec| self.running_log(spec)).map(|log| log.state);
            ImageRow { pool, name, size: None, fronts, log }
        });
        // Listing time of the pools is not deducted from the images' time.
        let deadline = now() + PATIENCE;
        for row in &mut images.rows {
            let info = async { image::info(&self.pool(&row.pool).await.ok()?, &row.name).await.ok() };
            match timeout(deadline - now(), info).await {
                Ok(info) => row.size = info.map(|info| info.size),
                Err(_) => break,
            }
            // Yields, since reads from memory never suspend.
            yield_now().await;
        }
        (images, unlisted)
    }

    fn logs_page(&self) -> OverviewPage<LogRow> {
        let mut open = self.open_logs();
        open.sort_by_key(|(_, log)| log.mode().is_on());
        let page = OverviewPage::of(open, 1);
        let describe = |(spec, log): (ImageSpec, std::rc::Rc<forebay_writelog::WriteLog>)| {
            let stats = log.stats();
            Some(LogRow { log: self.running_log(&spec)?, used: stats.used, capacity: stats.capacity })
        };
        let (number, pages, total) = (page.number, page.pages, page.total);
        OverviewPage { rows: page.rows.into_iter().filter_map(describe).collect(), number, pages, total }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_never_beside_the_list() {
        let of = |count: usize, number| {
            let page = OverviewPage::of((0..count).collect(), number);
            (page.rows.first().copied(), page.rows.len(), page.number, page.pages, page.total)
        };
        assert_eq!(of(0, 1), (None, 0, 1, 1, 0));
        assert_eq!(of(200, 2), (Some(0), 200, 1, 1, 200));
        assert_eq!(of(201, 2), (Some(200), 1, 2, 2, 201));
        assert_eq!(of(10_000, 0), (Some(0), 200, 1, 50, 10_000));
        assert_eq!(of(10_000, usize::MAX), (Some(9_800), 200, 50, 50, 10_000));
    }
}
