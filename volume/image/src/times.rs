//! Times of the last read and the last write of an image, which its header has as far as clients record them.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{ObjectBackend, ObjectName, ObjectOp, Result, Transaction};

use crate::image::Image;
use crate::wire::CephWriter;

/// Times of an image since 1970-01-01T00:00:00Z.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageTimes {
    /// Time of the last read.
    pub accessed: Option<Duration>,
    /// Time of the last write.
    pub modified: Option<Duration>,
}

/// Recorder of the times of an image, which it does not keep open.
pub struct TimesRecorder {
    pool: Rc<dyn ObjectBackend>,
    header: ObjectName,
}

impl Image {
    /// Returns the times that the header had when it was read last.
    pub fn times(&self) -> ImageTimes {
        let header = self.shared().header();
        ImageTimes { accessed: header.accessed, modified: header.modified }
    }

    /// Returns a recorder of the image's times.
    pub fn times_recorder(&self) -> TimesRecorder {
        TimesRecorder { pool: self.shared().backend().clone(), header: self.shared().header_object() }
    }
}

impl TimesRecorder {
    /// Stores the times that are given; the others stay. Not durable before the next flush, and unknown to other clients
    /// until they read the header again, as with librbd.
    ///
    /// # Errors
    /// `NotFound` if the image has been removed; errors of the backend.
    pub async fn record(&self, times: ImageTimes) -> Result<()> {
        let given = [("access_timestamp", times.accessed), ("modify_timestamp", times.modified)];
        let pairs: Vec<_> = given
            .into_iter()
            .filter_map(|(key, time)| Some((key.as_bytes().to_vec(), CephWriter::new().time(time?).done())))
            .collect();
        if pairs.is_empty() {
            return Ok(());
        }
        let ops = vec![ObjectOp::AssertExists, ObjectOp::KvSet { pairs }];
        self.pool.submit(&self.header, Transaction::new(ops)).await.map(drop)
    }
}
