//! Doing one job: gathering, the codec, scattering.

use super::{CompressionJob, CompressionWork, Finished, InputPages, JobError, JobOutcome, PagesMut};
use crate::compress::{Codec, CompressError, Compressor, Decompressor, looks_incompressible};

/// Memory of one worker thread.
#[derive(Default)]
pub(super) struct Worker {
    compressor: Compressor,
    decompressor: Decompressor,
    gathered: Vec<u8>,
    produced: Vec<u8>,
}

impl Worker {
    /// Does a job.
    pub(super) fn run(&mut self, job: CompressionJob) -> Finished {
        let CompressionJob { work, input, mut output } = job;
        let result = match work {
            CompressionWork::Compress { codec, at_most, sample } => {
                self.compress(codec, at_most, sample, &*input, &mut *output)
            }
            CompressionWork::Decompress { codec } => self.decompress(codec, &*input, &mut *output),
        };
        Finished { result, input, output }
    }

    fn compress(
        &mut self,
        codec: Codec,
        at_most: usize,
        sample: bool,
        input: &dyn InputPages,
        output: &mut dyn PagesMut,
    ) -> Result<JobOutcome, JobError> {
        let Self { compressor, gathered, produced, .. } = self;
        let data = contiguous(input, gathered);
        let percent = (at_most as u64 * 100).checked_div(data.len() as u64).unwrap_or(100).min(100) as u8;
        if sample && looks_incompressible(data, percent) {
            return Ok(JobOutcome::PassedThrough);
        }
        let room = output.total();
        let limit = at_most.min(room);
        match into_pages(output, limit, produced, |out| compressor.compress(codec, data, out)) {
            Ok(length) => Ok(JobOutcome::Done(length)),
            Err(CompressError::NoRoom) if at_most <= room => Ok(JobOutcome::PassedThrough),
            Err(CompressError::NoRoom) => Err(JobError::NoRoom),
        }
    }

    fn decompress(
        &mut self,
        codec: Codec,
        input: &dyn InputPages,
        output: &mut dyn PagesMut,
    ) -> Result<JobOutcome, JobError> {
        let Self { decompressor, gathered, produced, .. } = self;
        let data = contiguous(input, gathered);
        let limit = output.total();
        let expand = |out: &mut [u8]| decompressor.decompress(codec, data, out).map(|expanded| expanded.produced);
        Ok(JobOutcome::Done(into_pages(output, limit, produced, expand)?))
    }
}

/// Returns the input as one slice: the page itself if there is one, otherwise a copy.
fn contiguous<'a>(pages: &'a dyn InputPages, gathered: &'a mut Vec<u8>) -> &'a [u8] {
    if pages.count() == 1 {
        return pages.page(0);
    }
    gathered.clear();
    (0..pages.count()).for_each(|index| gathered.extend_from_slice(pages.page(index)));
    gathered
}

/// Calls a producer of up to `limit` bytes, and puts them into the pages.
fn into_pages<E>(
    pages: &mut dyn PagesMut,
    limit: usize,
    produced: &mut Vec<u8>,
    produce: impl FnOnce(&mut [u8]) -> Result<usize, E>,
) -> Result<usize, E> {
    if pages.count() > 0 && pages.page(0).len() >= limit {
        return produce(&mut pages.page_mut(0)[..limit]);
    }
    if produced.len() < limit {
        produced.resize(limit, 0);
    }
    let length = produce(&mut produced[..limit])?;
    let mut rest = &produced[..length];
    for index in 0..pages.count() {
        let page = pages.page_mut(index);
        let (piece, after) = rest.split_at(rest.len().min(page.len()));
        page[..piece.len()].copy_from_slice(piece);
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    Ok(length)
}
