//! Reads of several columns while devices lack some of them.

use forebay_block::{Buf, BufMut, Result};
use forebay_reactor::sync::join_all;
use forebay_reactor::timeout;

use super::set::ColumnSet;
use crate::format::BLOCK;

impl ColumnSet {
    /// Reads the lines `(column, first line, lines)` of data columns, some of which devices lack: as many columns as there
    /// are data columns are read, each once, and those that are lacking are computed from them together. Returns the lines
    /// of each data column.
    ///
    /// Returns `None` if no column is lacking, or if a column cannot be read at once: each is to be read by itself then.
    pub(super) async fn read_degraded(&self, segment: u32, spans: &[(usize, u64, u64)]) -> Option<Vec<Option<Buf>>> {
        let data = self.data_columns();
        let is_readable = |column: &usize| self.column(segment, *column).1.is_readable(segment);
        let lacking: Vec<usize> =
            spans.iter().map(|(column, ..)| *column).filter(|column| !is_readable(column)).collect();
        // Mirrors have one data column.
        if lacking.is_empty() || data == 1 {
            return None;
        }
        let readable: Vec<usize> = (0..self.columns()).filter(is_readable).collect();
        if readable.len() < data {
            return None;
        }
        let from = spans.iter().map(|(_, from, _)| *from).min()?;
        let to = spans.iter().map(|(_, from, lines)| from + lines).max()?;
        let lines = (to - from) as usize;
        // Data columns that are not lacking come first.
        let sources = &readable[..data];
        let reads = join_all(sources.iter().map(|&column| {
            let buf = self.column_buffers.empty(lines);
            Box::pin(self.read_stored(segment, column, from, buf, lines * BLOCK))
        }));
        let latest = sources.iter().map(|&column| self.column(segment, column).1.late_after()).max()?;
        let read = match readable.len() > data {
            true => timeout(latest, reads).await.ok()?,
            // There is no other way.
            false => reads.await,
        };
        let read: Vec<BufMut> = read.into_iter().collect::<Result<_>>().ok()?;
        self.count(|counters| counters.degraded_reads += lacking.len() as u64);
        let mut computed: Vec<BufMut> = lacking.iter().map(|_| self.column_buffers.get(lines)).collect();
        {
            let have: Vec<(usize, &[u8])> = sources.iter().copied().zip(read.iter().map(|buf| &buf[..])).collect();
            let outputs = lacking.iter().copied().zip(computed.iter_mut().map(|buf| &mut buf[..]));
            if !self.code.borrow_mut().rebuild_all(&have, &mut outputs.collect::<Vec<_>>()) {
                return None;
            }
        }
        let mut columns: Vec<Option<Buf>> = vec![None; self.columns()];
        for (column, buf) in sources.iter().copied().zip(read).chain(lacking.into_iter().zip(computed)) {
            columns[column] = Some(buf.freeze());
        }
        let mut found = vec![None; data];
        for &(column, first, lines) in spans {
            let begin = (first - from) as usize * BLOCK;
            found[column] = columns[column].as_ref().map(|buf| buf.slice(begin..begin + lines as usize * BLOCK));
        }
        Some(found)
    }
}
