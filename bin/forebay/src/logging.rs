//! Logging to standard error.
//!
//! A separate thread writes the lines.  Logging only queues a line: a full disk, a closed pipe or a reader that has
//! stopped neither delays a reactor nor ends it.  Lines that cannot be queued or written are dropped and counted, and
//! the log reports their number as soon as it can be written again.

use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde_json::json;
use tracing::{Dispatch, Event, Level, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use crate::cli::LogFormat;
use crate::failure::{Failure, Result};

/// Maximum number of queued lines.
const QUEUE_LINES: usize = 4096;
/// With lines dropped and nothing new to be logged, writing is tried again after this long.
const RETRY_AFTER: Duration = Duration::from_secs(1);
/// The end of the process waits this long for what is queued.
const FLUSH_MAX: Duration = Duration::from_secs(1);

/// Message to the writing thread.
enum LogItem {
    Line(Box<[u8]>),
    /// Everything before it has been written, or dropped: tell so.
    Flush(SyncSender<()>),
}

/// The way to the writing thread.
struct LogQueue {
    items: SyncSender<LogItem>,
    /// Lines dropped since the start.
    dropped: AtomicU64,
}

static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// Reads a level, or a filter: levels, and modules with levels of their own, between commas.
fn parse_filter(text: &str) -> Result<EnvFilter> {
    let wrong = |why: String| {
        Failure::invalid(format!("invalid log level '{text}': {why}"))
            .hint("use error, warn, info, debug, trace, or a filter such as info,forebay_nbd=debug")
    };
    // A word alone is the name of a module to the filter, and anything else is then not logged.
    let is_level = |word: &str| word.parse::<tracing_subscriber::filter::LevelFilter>().is_ok();
    if let Some(word) = text.split(',').map(str::trim).find(|word| !word.contains('=') && !is_level(word)) {
        return Err(wrong(format!("'{word}' is no level")));
    }
    EnvFilter::builder().parse(text).map_err(|error| wrong(error.to_string()))
}

/// Returns whether standard error is the journal (systemd.exec(5), `JOURNAL_STREAM`: its device and inode).
fn is_journal() -> bool {
    let Ok(stream) = std::env::var("JOURNAL_STREAM") else { return false };
    let own = rustix::fs::fstat(io::stderr()).map(|stat| format!("{}:{}", stat.st_dev, stat.st_ino));
    own.is_ok_and(|own| own == stream)
}

/// Begins each line with its priority, as the journal reads it (sd-daemon(3)).
struct WithPriority<F>(F);

impl<S, N, F> FormatEvent<S, N> for WithPriority<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(&self, context: &FmtContext<'_, S, N>, mut line: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let priority = match *event.metadata().level() {
            Level::ERROR => 3,
            Level::WARN => 4,
            Level::INFO => 6,
            _ => 7,
        };
        write!(line, "<{priority}>")?;
        self.0.format_event(context, line, event)
    }
}

/// Starts logging at a level or by a filter; `default` when none is given.
pub fn start(level: Option<&str>, default: &str, format: LogFormat) -> Result<()> {
    let text = level.filter(|level| !level.is_empty()).unwrap_or(default);
    let filter = parse_filter(text)?;
    let (items, waiting) = sync_channel(QUEUE_LINES);
    let twice = || Failure::failed("logging was started twice");
    QUEUE.set(LogQueue { items, dropped: AtomicU64::new(0) }).map_err(|_| twice())?;
    let queue = QUEUE.get().ok_or_else(twice)?;
    std::thread::Builder::new()
        .name("log".into())
        .spawn(move || LogWriter::new(io::stderr(), &queue.dropped, format).run(&waiting))
        .map_err(|error| Failure::io(error, "starting the thread that writes the log"))?;
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(move || QueuedLine(queue))
        // It would report a failed write on standard error, which panics when that cannot be written.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal());
    // The journal stamps lines itself.
    let dispatch: Dispatch = match (is_journal(), format) {
        (true, LogFormat::Text) => lines.without_time().map_event_format(WithPriority).finish().into(),
        (true, LogFormat::Json) => {
            lines.json().flatten_event(true).without_time().map_event_format(WithPriority).finish().into()
        }
        (false, LogFormat::Text) => lines.finish().into(),
        (false, LogFormat::Json) => lines.json().flatten_event(true).finish().into(),
    };
    tracing::dispatcher::set_global_default(dispatch).map_err(|error| Failure::failed(error.to_string()))
}

/// Logs panics as other events, so that a panicking thread does not block on a standard error that is not read.
pub fn log_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let thread = std::thread::current();
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        let message = panic.payload_as_str().unwrap_or("no message");
        let trace = std::backtrace::Backtrace::capture();
        let trace = (trace.status() == std::backtrace::BacktraceStatus::Captured).then_some(trace);
        let trace = trace.map(|trace| format!("\n{trace}")).unwrap_or_default();
        tracing::error!("thread '{}' panicked at {place}: {message}{trace}", thread.name().unwrap_or("?"));
        // Some panics end the process at once, and what is queued then with it.
        flush();
    }));
}

/// Returns how many lines were dropped since the start.
pub fn dropped_lines() -> u64 {
    QUEUE.get().map_or(0, |queue| queue.dropped.load(Ordering::Relaxed))
}

/// Waits, with a short timeout, until all log lines are written or dropped: standard error may not be read.
pub fn flush() -> bool {
    let Some(queue) = QUEUE.get() else { return true };
    let deadline = Instant::now() + FLUSH_MAX;
    let (done, waiting) = sync_channel(1);
    while queue.items.try_send(LogItem::Flush(done.clone())).is_err() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    waiting.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok()
}

/// Takes a line from the subscriber, and never fails.
struct QueuedLine(&'static LogQueue);

impl Write for QueuedLine {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.0.items.try_send(LogItem::Line(line.into())).is_err() {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes lines, whole ones where it can, and keeps account of those that it could not write.
struct LogWriter<'a, W> {
    out: W,
    dropped: &'a AtomicU64,
    /// Dropped lines that the log has spoken of.
    told: u64,
    /// Error of the last failed write.
    reason: Option<io::Error>,
    /// The last line has been written in part.
    torn: bool,
    format: LogFormat,
}

impl<'a, W: Write> LogWriter<'a, W> {
    fn new(out: W, dropped: &'a AtomicU64, format: LogFormat) -> Self {
        Self { out, dropped, told: 0, reason: None, torn: false, format }
    }

    /// Writes queued lines until all senders are dropped.
    fn run(mut self, items: &Receiver<LogItem>) {
        loop {
            let item = if self.untold() == 0 {
                items.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                items.recv_timeout(RETRY_AFTER)
            };
            match item {
                Ok(LogItem::Line(line)) => self.line(&line),
                // The receiver may have timed out.
                Ok(LogItem::Flush(done)) => drop(done.try_send(())),
                Err(RecvTimeoutError::Timeout) => drop(self.tell()),
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn untold(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed) - self.told
    }

    fn line(&mut self, line: &[u8]) {
        if !self.tell() || !self.put(line) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Says how many lines were dropped, if any; false when that cannot be written either.
    fn tell(&mut self) -> bool {
        let count = self.untold();
        if count == 0 {
            return true;
        }
        let why = self.reason.as_ref().map_or_else(|| "it was written too slowly".to_owned(), ToString::to_string);
        let newline = if self.torn { "\n" } else { "" };
        let text = format!("{count} lines of the log were dropped: {why}");
        let line = match self.format {
            LogFormat::Text => format!("{newline}forebay: {text}\n"),
            LogFormat::Json => {
                format!("{newline}{}\n", json!({ "level": "WARN", "target": "forebay::logging", "message": text }))
            }
        };
        let said = self.put(line.as_bytes());
        if said {
            self.told += count;
            self.reason = None;
        }
        said
    }

    /// Writes all of it, or remembers why not.
    fn put(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let error = match self.out.write(bytes) {
                Ok(0) => io::ErrorKind::WriteZero.into(),
                Ok(len) => {
                    bytes = &bytes[len..];
                    self.torn = !bytes.is_empty();
                    continue;
                }
                Err(error) => error,
            };
            match error.kind() {
                io::ErrorKind::Interrupted => {}
                // Another process has set it on the shared file description.
                io::ErrorKind::WouldBlock => std::thread::sleep(Duration::from_millis(10)),
                _ => {
                    self.reason = Some(error);
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Accepts this many bytes, then fails.
    struct Disk {
        room: usize,
        text: Vec<u8>,
    }

    impl Write for &mut Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let len = bytes.len().min(self.room);
            if len == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room -= len;
            self.text.extend_from_slice(&bytes[..len]);
            Ok(len)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Set for the process that [`the_last_words_of_a_process_that_aborts_are_written`] starts.
    const ABORTING: &str = "FOREBAY_TEST_ABORTING";

    /// Aborts on a panic like a file thread of a reactor, whose operation would otherwise never end.
    struct AbortOnPanic;

    impl Drop for AbortOnPanic {
        fn drop(&mut self) {
            std::process::abort();
        }
    }

    #[test]
    fn the_last_words_of_a_process_that_aborts_are_written() {
        if std::env::var_os(ABORTING).is_some() {
            start(None, "info", LogFormat::Text).expect("logging");
            log_panics();
            // So that what comes last is not written in passing.
            (0..QUEUE_LINES - 1).for_each(|line| tracing::info!(line, "busy"));
            let _guard = AbortOnPanic;
            panic!("on purpose");
        }
        let this = std::env::current_exe().expect("this program");
        let name = "logging::tests::the_last_words_of_a_process_that_aborts_are_written";
        let mut again = std::process::Command::new(this);
        // A trace would come last.
        again.args(["--exact", name]).env(ABORTING, "1").env_remove("RUST_BACKTRACE").env_remove("RUST_LIB_BACKTRACE");
        let done = again.output();
        let done = done.expect("this program again");
        let said = String::from_utf8_lossy(&done.stderr);
        assert!(done.status.code().is_none(), "it was not aborted: {}", done.status);
        let last = said.lines().last().unwrap_or_default();
        assert!(last.contains("panicked at ") && last.ends_with(": on purpose"), "{last}");
    }

    #[test]
    fn dropped_lines_are_counted_and_told_once() {
        let dropped = AtomicU64::new(0);
        let mut disk = Disk { room: 10, text: Vec::new() };
        let mut log = LogWriter::new(&mut disk, &dropped, LogFormat::Text);
        ["first\n", "second\n", "third\n"].iter().for_each(|line| log.line(line.as_bytes()));
        assert_eq!((dropped.load(Ordering::Relaxed), log.untold()), (2, 2));
        assert!(!log.tell(), "there is no room to say so");
        log.out.room = 1000;
        log.line(b"fourth\n");
        log.line(b"fifth\n");
        assert_eq!((dropped.load(Ordering::Relaxed), log.untold()), (2, 0));
        let text = String::from_utf8(disk.text).expect("text");
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines[0], lines[1]), ("first", "seco"), "{text}");
        assert!(lines[2].starts_with("forebay: 2 lines of the log were dropped: "), "{text}");
        assert_eq!(lines[3..], ["fourth", "fifth"], "{text}");
    }

    #[test]
    fn a_queue_that_nobody_empties_drops_lines() {
        let (items, _waiting) = sync_channel(1);
        let queue = Box::leak(Box::new(LogQueue { items, dropped: AtomicU64::new(0) }));
        let mut line = QueuedLine(queue);
        for _ in 0..3 {
            line.write_all(b"a line\n").expect("it never fails");
        }
        assert_eq!(queue.dropped.load(Ordering::Relaxed), 2);
    }
}
