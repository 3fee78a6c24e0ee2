//! Commands `diff`, `export-diff`, `import-diff` and `merge-diff`.

use std::path::Path;

use serde::Serialize;

use super::shapes::{self, ChangedExtent};
use super::streams::{Received, receive, send};
use super::with_session;
use crate::api::{AppliedDiff, ExportResult, Progress};
use crate::cli::{self, ChangesArgs, GlobalArgs};
use crate::client::progress::{Bar, ProgressUnit};
use crate::engine::diffs::DiffParameters;
use crate::engine::transfer::Chunk;
use crate::failure::{Failure, Result};
use crate::ops::image_path;
use crate::output::Output;
use crate::spec::{ImageSpec, SourceSpec, uri_encode};
use crate::transfer::merge;
use crate::transfer::records::StreamFormat;
use crate::transfer::stream_file::{StreamFile, StreamSource};

/// Lists the changes of an image.
pub fn list(global: &GlobalArgs, output: Output, options: cli::DiffArgs) -> Result<()> {
    let diff = parameters(options.name.source, options.changes, false);
    let target = target(&diff);
    let bar = Bar::new(global, "Comparing", ProgressUnit::Bytes);
    let (mut size, mut rows) = (0, Vec::new());
    let each = |received: Received<'_>| {
        let row = match received {
            Received::Chunk(&Chunk::Changed(offset, length)) => ChangedExtent::new(offset, length, true),
            Received::Chunk(&Chunk::Zero(offset, length)) => ChangedExtent::new(offset, length, false),
            Received::Chunk(&Chunk::Size(said)) => {
                size = said;
                return Ok(());
            }
            _ => return Ok(()),
        };
        bar.show(Progress { done: row.offset, total: size });
        rows.push(row);
        Ok(())
    };
    with_session(global, |session| {
        receive(session, &target, StreamFormat::Diff, |engine, chunks| engine.export_diff(diff, chunks), each)
    })?;
    drop(bar);
    output.print(&rows, |rows| shapes::changes(rows))
}

fn parameters(source: SourceSpec, changes: ChangesArgs, data: bool) -> DiffParameters {
    DiffParameters { source, from: changes.from_snap, whole_object: changes.whole_object, data }
}

/// Returns the path and query of a download of changes.
fn target(diff: &DiffParameters) -> String {
    let path = image_path(&diff.source.image);
    let mut target = format!("{path}/diff?data={}&whole_object={}", diff.data, diff.whole_object);
    for (key, name) in [("from", &diff.from), ("snapshot", &diff.source.snapshot)] {
        if let Some(name) = name {
            target.push_str(&format!("&{key}={}", uri_encode(name, false)));
        }
    }
    target
}

/// Stream that is written to a file, which is opened once the stream has begun.
pub(super) struct StreamWriter<'a> {
    pub(super) path: &'a Path,
    pub(super) force: bool,
    pub(super) bar: &'a Bar,
    pub(super) file: Option<StreamFile>,
    pub(super) result: ExportResult,
}

impl<'a> StreamWriter<'a> {
    pub(super) fn new(path: &'a Path, force: bool, bar: &'a Bar) -> Self {
        Self { path, force, bar, file: None, result: ExportResult { size: 0, data: 0 } }
    }

    pub(super) fn take(&mut self, received: Received<'_>) -> Result<()> {
        match received {
            Received::Chunk(Chunk::Size(size)) => self.result.size = *size,
            Received::Chunk(Chunk::Data(offset, data)) => {
                self.result.data += data.len() as u64;
                self.bar.show(Progress { done: *offset, total: self.result.size });
            }
            Received::Chunk(_) => {}
            Received::Bytes(bytes) => {
                if self.file.is_none() {
                    self.file = Some(StreamFile::create(self.path, self.force)?);
                }
                if let Some(file) = &mut self.file {
                    file.write(bytes)?;
                }
            }
        }
        Ok(())
    }

    pub(super) fn finish(self) -> Result<ExportResult> {
        self.file.map_or(Ok(()), StreamFile::finish)?;
        Ok(self.result)
    }
}

/// Refuses JSON beside a stream on standard output; returns whether that is where the stream goes.
pub(super) fn goes_to_stdout(path: &Path, output: Output) -> Result<bool> {
    let to_stdout = path.as_os_str() == "-";
    if to_stdout && output.is_json() {
        return Err(Failure::invalid("--format json and an export to standard output would mix"));
    }
    Ok(to_stdout)
}

/// Writes the changes of an image to a file.
pub fn export(global: &GlobalArgs, output: Output, options: cli::ExportDiffArgs) -> Result<()> {
    let source = options.names.source;
    let Some(path) = options.names.path else {
        let example = format!("for example: forebay export-diff {source} changes.diff");
        return Err(Failure::invalid("no file is named for the changes").hint(example));
    };
    let to_stdout = goes_to_stdout(&path, output)?;
    let diff = parameters(source, options.changes, true);
    let target = target(&diff);
    let bar = Bar::new(global, "Exporting", ProgressUnit::Bytes);
    let mut writer = StreamWriter::new(&path, options.force, &bar);
    with_session(global, |session| {
        let each = |received: Received<'_>| writer.take(received);
        receive(session, &target, StreamFormat::Diff, |engine, chunks| engine.export_diff(diff, chunks), each)
    })?;
    let exported = writer.finish()?;
    drop(bar);
    if to_stdout { Ok(()) } else { output.print(&exported, |_| String::new()) }
}

/// Result of `import-diff` as JSON.
#[derive(Serialize)]
struct AppliedShape<'a> {
    image: &'a ImageSpec,
    #[serde(flatten)]
    applied: &'a AppliedDiff,
}

/// Applies the changes in a file to an image.
pub fn import(global: &GlobalArgs, output: Output, options: cli::ImportDiffArgs) -> Result<()> {
    let path = options.names.path;
    let Some(spec) = options.names.image else {
        return Err(Failure::invalid("no image is named for the changes")
            .hint(format!("for example: forebay import-diff {} local/disk1", path.display())));
    };
    let source = StreamSource::open(&path)?;
    let total = source.len.unwrap_or(0);
    let bar = Bar::new(global, "Importing", ProgressUnit::Bytes);
    let target = image_path(&spec) + "/diff";
    let into = spec.clone();
    let applied = with_session(global, |session| {
        let work = |engine: std::rc::Rc<crate::engine::Engine>, chunks, begun| engine.import_diff(into, chunks, begun);
        send(session, &target, StreamFormat::Diff, source, work, |done| bar.show(Progress { done, total }))
    })?;
    drop(bar);
    output.print(&AppliedShape { image: &spec, applied: &applied }, |_| String::new())
}

/// Merges two successive diffs.
pub fn merge(global: &GlobalArgs, output: Output, options: cli::MergeDiffArgs) -> Result<()> {
    let path = options.path.or(options.named).unwrap_or_default();
    goes_to_stdout(&path, output)?;
    if options.second.as_os_str() == "-" {
        return Err(Failure::invalid("only the first diff can come from standard input"));
    }
    let (first, second) = (StreamSource::open(&options.first)?, StreamSource::open(&options.second)?);
    let total = first.len.zip(second.len).map_or(0, |(first, second)| first + second);
    let bar = Bar::new(global, "Merging", ProgressUnit::Bytes);
    let out = || StreamFile::create(&path, options.force);
    merge::merge(first, second, out, |done| bar.show(Progress { done, total }))
}
