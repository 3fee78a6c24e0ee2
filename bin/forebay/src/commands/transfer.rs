//! `import` and `export`.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::thread;

use forebay_image::diff::{DiffDecoder, DiffError, DiffEvent, DiffVersion, MAGIC};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

use super::diffs::{StreamWriter, goes_to_stdout};
use super::shapes::Info;
use super::streams::{receive, send};
use super::with_session;
use crate::api::{ExportResult, ImportResult, NewImageOptions, Progress};
use crate::cli::{self, GlobalArgs};
use crate::client::direct::Direct;
use crate::client::http::{Begun, Response, SentRequest, Upload};
use crate::client::progress::{Bar, ProgressUnit};
use crate::client::session::{CommandSession, DaemonClient};
use crate::engine::Engine;
use crate::engine::apply::ImageImport;
use crate::engine::transfer::{CHUNK_LEN_MAX, CHUNKS_QUEUED, Chunk, ImportParameters};
use crate::failure::{Failure, Result};
use crate::ops::{image_path, with_snapshot};
use crate::output::Output;
use crate::spec::{ImageSpec, LOCAL_POOL, SourceSpec};
use crate::transfer::container::{Converter, container};
use crate::transfer::records::StreamFormat;
use crate::transfer::sink::ImageSink;
use crate::transfer::source::{Source, nonzero_runs};
use crate::transfer::stream_file::StreamSource;

/// Result of `import` as JSON.
#[derive(Serialize)]
struct ImportedShape<'a> {
    image: Info<'a>,
    /// Bytes that were written; the rest is holes.
    written: u64,
}

/// Makes an image of a file or stream.
pub fn import(global: &GlobalArgs, output: Output, options: cli::ImportArgs) -> Result<()> {
    let (path, pool) = (options.names.path, options.names.pool);
    let spec = match options.names.image {
        Some(spec) => spec,
        None => default_image(pool.as_deref().unwrap_or(LOCAL_POOL), &path)?,
    };
    if options.format.has_snapshots() {
        return import_image(global, output, spec, &path, options.made.options());
    }
    let mut source = Source::open(&path)?;
    if !options.raw {
        check_raw(&mut source, &path)?;
    }
    let import = ImportParameters { spec, options: options.made.options(), size: source.len() };
    let bar = Bar::new(global, "Importing", ProgressUnit::Bytes);
    let imported = with_session(global, |session| match session {
        CommandSession::Daemon(client) => import_through(client, import, source, &path, &bar),
        CommandSession::Direct(direct) => import_here(direct, import, source, &path, &bar),
    })?;
    drop(bar);
    let shown = ImportedShape { image: Info::from(&imported.image), written: imported.written };
    output.print(&shown, |_| String::new())
}

/// Makes an image with snapshots of a file or stream.
fn import_image(
    global: &GlobalArgs,
    output: Output,
    spec: ImageSpec,
    path: &Path,
    options: NewImageOptions,
) -> Result<()> {
    let source = StreamSource::open(path)?;
    let total = source.len.unwrap_or(0);
    let target = format!("{}/data?format=2{}", image_path(&spec), options.query());
    let bar = Bar::new(global, "Importing", ProgressUnit::Bytes);
    let import = ImageImport { spec, options, parent: None };
    let imported: ImportResult = with_session(global, |session| {
        let work = |engine: Rc<Engine>, chunks, begun| engine.import_image(import, chunks, begun);
        send(session, &target, StreamFormat::Image, source, work, |done| bar.show(Progress { done, total }))
    })?;
    drop(bar);
    let shown = ImportedShape { image: Info::from(&imported.image), written: imported.written };
    output.print(&shown, |_| String::new())
}

/// Writes an image with its snapshots to a file or stream.
fn export_image(global: &GlobalArgs, output: Output, source: SourceSpec, path: &Path, force: bool) -> Result<()> {
    if let Some(snapshot) = source.snapshot {
        let what = format!("--export-format 2 writes the image {} with all its snapshots", source.image);
        return Err(Failure::invalid(what).hint(format!("leave out '@{snapshot}', or the format")));
    }
    let to_stdout = goes_to_stdout(path, output)?;
    let target = format!("{}/data?format=2", image_path(&source.image));
    let bar = Bar::new(global, "Exporting", ProgressUnit::Bytes);
    let mut writer = StreamWriter::new(path, force, &bar);
    with_session(global, |session| {
        let work = |engine: Rc<Engine>, chunks| engine.export_image(source.image, chunks);
        receive(session, &target, StreamFormat::Image, work, |received| writer.take(received))
    })?;
    let exported = writer.finish()?;
    drop(bar);
    if to_stdout { Ok(()) } else { output.print(&exported, |_| String::new()) }
}

/// Refuses what is a disk in a format of its own, or nothing at all.
fn check_raw(source: &mut Source, path: &Path) -> Result<()> {
    let is_stdin = path.as_os_str() == "-";
    let shown = if is_stdin { "standard input".to_owned() } else { path.display().to_string() };
    let head = source.peek().map_err(|error| reading(error, path))?;
    // One that was closed has become /dev/null by now; a pipe may be empty.
    let is_null = |stat: rustix::fs::Stat| rustix::fs::FileType::from_raw_mode(stat.st_mode).is_char_device();
    if head.is_empty() && is_stdin && rustix::fs::fstat(std::io::stdin()).is_ok_and(is_null) {
        return Err(Failure::invalid("standard input is closed: there is nothing to import")
            .hint("for an empty image: forebay create IMAGE --size SIZE"));
    }
    let Some(format) = container(&head) else { return Ok(()) };
    let convert = match format.converter {
        Converter::Qemu if is_stdin => {
            "keep it in a file and convert it: qemu-img convert -O raw FILE disk.raw".to_owned()
        }
        Converter::Pipe(program) if is_stdin => {
            format!("unpack it first: ... | {program} -dc | forebay import - POOL/IMAGE")
        }
        Converter::Qemu => format!("convert it: qemu-img convert -O raw {shown} disk.raw"),
        Converter::Pipe(program) => format!("unpack it: {program} -dc {shown} | forebay import - POOL/IMAGE"),
        Converter::ExportFormat2 => format!("import it as one: forebay import --export-format 2 {shown} POOL/IMAGE"),
        Converter::ImportDiff => format!("apply it to an image: forebay import-diff {shown} POOL/IMAGE"),
    };
    let hint = format!("{convert}; --raw imports the bytes unchanged");
    Err(Failure::invalid(format!("{shown} is {}, not a raw disk image", format.name)).hint(hint))
}

fn default_image(pool: &str, path: &Path) -> Result<ImageSpec> {
    let name = path.file_name().and_then(|name| name.to_str()).filter(|_| path.as_os_str() != "-");
    let Some(name) = name else {
        return Err(Failure::invalid("no name for the new image")
            .hint(format!("for example: forebay import {} {pool}/disk1", path.display())));
    };
    ImageSpec::new(pool, name).map_err(Failure::invalid)
}

fn reading(error: std::io::Error, path: &Path) -> Failure {
    Failure::io(error, format_args!("reading {}", path.display()))
}

fn import_through(
    client: &DaemonClient,
    import: ImportParameters,
    mut source: Source,
    path: &Path,
    bar: &Bar,
) -> Result<ImportResult> {
    let mut target = format!("{}/data?format=1{}", image_path(&import.spec), import.options.query());
    if let Some(size) = import.size {
        target.push_str(&format!("&size={size}"));
    }
    let begun = Upload::begin(&client.socket, "PUT", &target).map_err(|error| client.lost(error))?;
    let mut upload = match begun {
        Begun::Upload(upload) => upload,
        Begun::Answered(response) => return client.read_lines(response, |_| {}),
    };
    let mut head = MAGIC.to_vec();
    if let Some(size) = import.size {
        DiffVersion::V1.put_size(&mut head, size);
    }
    let mut buf = vec![0; CHUNK_LEN_MAX];
    let total = import.size.unwrap_or(0);
    // A daemon that stops reading has said why, or is about to.
    let sent = loop {
        let chunk = source.next(&mut buf).map_err(|error| reading(error, path))?;
        bar.show(Progress { done: source.position(), total });
        let Some((offset, len)) = chunk else { break Ok(()) };
        let mut sent = Ok(());
        for run in nonzero_runs(offset, &buf[..len]) {
            DiffVersion::V1.put_data_head(&mut head, offset + run.start as u64, run.len() as u64);
            sent = sent.and_then(|()| upload.write(&[&head, &buf[run]]));
            head.clear();
        }
        if let Err(error) = sent {
            break Err(error);
        }
    };
    if import.size.is_none() {
        DiffVersion::V1.put_size(&mut head, source.position());
    }
    DiffVersion::V1.put_end(&mut head);
    let response = match sent.and_then(|()| upload.write(&[&head])) {
        Ok(()) => upload.finish(),
        Err(_) => upload.answer(),
    };
    client.read_lines(response.map_err(|error| client.lost(error))?, |_| {})
}

fn import_here(
    direct: &Direct,
    import: ImportParameters,
    mut source: Source,
    path: &Path,
    bar: &Bar,
) -> Result<ImportResult> {
    let total = import.size.unwrap_or(0);
    let (chunks, receiver) = mpsc::channel(CHUNKS_QUEUED);
    let (begun, _) = oneshot::channel();
    let engine = direct.engine().clone();
    let work = thread::spawn(move || engine.call_blocking(move |engine| engine.import(import, receiver, begun)));
    // Ends early, without an end chunk, when the source fails or the receiver is gone: the import then removes its
    // image.
    let fed = (|| {
        let mut buf = vec![0; CHUNK_LEN_MAX];
        loop {
            let chunk = source.next(&mut buf).map_err(|error| reading(error, path))?;
            bar.show(Progress { done: source.position(), total });
            let Some((offset, len)) = chunk else { break };
            for run in nonzero_runs(offset, &buf[..len]) {
                let data = forebay_reactor::Buf::copy_of(&buf[run.clone()]);
                if chunks.blocking_send(Chunk::Data(offset + run.start as u64, data)).is_err() {
                    return Ok(());
                }
            }
        }
        for chunk in [Chunk::Size(source.position()), Chunk::End] {
            if chunks.blocking_send(chunk).is_err() {
                return Ok(());
            }
        }
        Ok(())
    })();
    drop(chunks);
    let result = work.join().unwrap_or_else(|_| Err(Failure::failed("the import ended with a panic")));
    fed.and(result)
}

/// Writes an image or a snapshot to a file or stream.
pub fn export(global: &GlobalArgs, output: Output, options: cli::ExportArgs) -> Result<()> {
    let source = options.names.source;
    let path = options.names.path.unwrap_or_else(|| match &source.snapshot {
        Some(snapshot) => PathBuf::from(format!("{}@{snapshot}", source.image.name())),
        None => PathBuf::from(source.image.name()),
    });
    if options.format.has_snapshots() {
        return export_image(global, output, source, &path, options.force);
    }
    let to_stdout = goes_to_stdout(&path, output)?;
    let bar = Bar::new(global, "Exporting", ProgressUnit::Bytes);
    let writer = Writer { sink: None, path: &path, force: options.force, size: 0, data: 0, bar: &bar };
    let exported = with_session(global, |session| match session {
        CommandSession::Daemon(client) => export_through(client, &source, writer),
        CommandSession::Direct(direct) => export_here(direct, source, writer),
    })?;
    drop(bar);
    if to_stdout {
        return Ok(());
    }
    output.print(&exported, |_| String::new())
}

/// Takes an image's content in; opens what it is written to only when the image is known to be there.
struct Writer<'a> {
    sink: Option<ImageSink>,
    path: &'a Path,
    force: bool,
    size: u64,
    data: u64,
    bar: &'a Bar,
}

impl Writer<'_> {
    fn size(&mut self, size: u64) -> Result<()> {
        let mut sink = ImageSink::open(self.path, self.force)?;
        sink.size(size)?;
        self.size = size;
        self.sink = Some(sink);
        Ok(())
    }

    fn sink(&mut self) -> Result<&mut ImageSink> {
        self.sink.as_mut().ok_or_else(|| Failure::failed("malformed stream: image data before the image size"))
    }

    fn data(&mut self, offset: u64, data: &[u8]) -> Result<()> {
        self.bar.show(Progress { done: offset, total: self.size });
        self.data += data.len() as u64;
        let path = self.path;
        self.sink()?.data(offset, data).map_err(|error| writing(error, path))
    }

    fn end(mut self) -> Result<ExportResult> {
        let (path, size) = (self.path, self.size);
        self.sink()?.finish(size).map_err(|error| writing(error, path))?;
        Ok(ExportResult { size, data: self.data })
    }
}

fn writing(error: std::io::Error, path: &Path) -> Failure {
    Failure::io(error, format_args!("writing {}", path.display()))
}

fn export_through(client: &DaemonClient, source: &SourceSpec, mut writer: Writer<'_>) -> Result<ExportResult> {
    let target = with_snapshot(format!("{}/data", image_path(&source.image)), source);
    let mut response: Response = SentRequest::send(&client.socket, "GET", &target, None)
        .and_then(|request| request.response(None))
        .map_err(|error| client.lost(error))?;
    if response.status >= 300 {
        return Err(client.read_error(response));
    }
    let wrong = |error: DiffError| Failure::failed(format!("the daemon's reply is malformed: {error}"));
    let mut decoder = DiffDecoder::new();
    let mut buf = vec![0; CHUNK_LEN_MAX];
    loop {
        let got = response.read(&mut buf).map_err(|error| client.lost(error))?;
        if got == 0 {
            decoder.finish().map_err(wrong)?;
            return writer.end();
        }
        let mut input = &buf[..got];
        while let Some(event) = decoder.next(&mut input).map_err(wrong)? {
            match event {
                DiffEvent::Size(size) => writer.size(size)?,
                DiffEvent::Data(offset, data) => writer.data(offset, data)?,
                DiffEvent::Zero(..) | DiffEvent::End => {}
                DiffEvent::From(_) | DiffEvent::To(_) | DiffEvent::Protected(_) | DiffEvent::Changed(..) => {}
                DiffEvent::Failure(why) => {
                    return Err(serde_json::from_slice(&why)
                        .unwrap_or_else(|_| Failure::failed("the daemon aborted the export without a reason")));
                }
            }
        }
    }
}

fn export_here(direct: &Direct, source: SourceSpec, mut writer: Writer<'_>) -> Result<ExportResult> {
    let (sender, mut chunks) = mpsc::channel(CHUNKS_QUEUED);
    let engine = direct.engine().clone();
    let work = thread::spawn(move || engine.call_blocking(move |engine| engine.export(source, sender)));
    let mut written = Ok(());
    while let Some(chunk) = chunks.blocking_recv() {
        written = match chunk {
            Chunk::Size(size) => writer.size(size),
            Chunk::Data(offset, data) => writer.data(offset, &data),
            _ => Ok(()),
        };
        if written.is_err() {
            break;
        }
    }
    drop(chunks);
    let result = work.join().unwrap_or_else(|_| Err(Failure::failed("the export ended with a panic")));
    written?;
    result?;
    writer.end()
}
