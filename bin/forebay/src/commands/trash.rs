//! Command `trash`.

use std::process::{Command, Stdio};
use std::time::SystemTime;

use serde::Serialize;

use super::shapes::{self, Info};
use super::with_session;
use crate::api::{ListedParent, TrashListing};
use crate::cli::{GlobalArgs, TrashCommand};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::{ListTrash, MoveToTrash, PurgeTrash, RemoveFromTrash, RestoreFromTrash};
use crate::output::Output;
use crate::timestamp::Timestamp;

/// Manages the trash.
pub fn run(global: &GlobalArgs, output: Output, command: TrashCommand) -> Result<()> {
    match command {
        TrashCommand::Mv(options) => {
            let expires_at = expiry(&options.expires_at)?;
            let operation = MoveToTrash { spec: options.name.image, expires_at };
            let moved = with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&ShortRow::from(&moved), |_| String::new())
        }
        TrashCommand::Ls(options) => {
            let operation = ListTrash { pool: options.name.pool, all: options.all };
            let trashed = with_session(global, |session| session.call(operation, |_| {}))?;
            if options.long {
                let now = now();
                let rows: Vec<_> = trashed.iter().map(|image| LongRow::new(image, now)).collect();
                return output.print(&rows, |rows| long(rows));
            }
            let rows: Vec<_> = trashed.iter().map(ShortRow::from).collect();
            output.print(&rows, |rows| rows.iter().map(|row| format!("{} {}\n", row.id, row.name)).collect())
        }
        TrashCommand::Restore(options) => {
            let operation = RestoreFromTrash { spec: options.name.spec, name: options.image };
            let restored = with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&Info::from(&restored), |_| String::new())
        }
        TrashCommand::Rm(options) => {
            let bar = Bar::new(global, "Removing", ProgressUnit::Steps);
            let removed = options.name.spec.clone();
            let operation = RemoveFromTrash { spec: options.name.spec, force: options.force };
            with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            output.print(&removed, |_| String::new())
        }
        TrashCommand::Purge(options) => {
            if options.threshold.is_some() {
                let what = "--threshold: this build does not purge by the usage of the pool";
                return Err(Failure::new(FailureKind::Unsupported, what)
                    .hint("'forebay trash purge --expired-before TIME' removes those that have expired"));
            }
            let expired_before = options.expired_before.as_deref().map(read_date).transpose()?;
            let bar = Bar::new(global, "Removing", ProgressUnit::Steps);
            let operation = PurgeTrash { pool: options.name.pool, expired_before };
            let removed = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            output.print(&removed, |_| String::new())
        }
    }
}

fn now() -> Timestamp {
    Timestamp(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_secs()))
}

/// Returns the time at which an image expires; `None` for now.
fn expiry(text: &str) -> Result<Option<Timestamp>> {
    if text == "now" {
        return Ok(None);
    }
    let time = read_date(text)?;
    if time < now() {
        let what = format!("--expires-at: {} is in the past", time.local_text());
        return Err(Failure::invalid(what).hint("name a later time, such as '2 weeks' or '2030-01-31 12:00'"));
    }
    Ok(Some(time))
}

/// Reads a time as `rbd` does: by asking `date`, whose language it is.
fn read_date(text: &str) -> Result<Timestamp> {
    let mut date = Command::new("date");
    date.env("LC_ALL", "C").arg(format!("--date={text}")).arg("+%s").stdin(Stdio::null());
    let done = date.output().map_err(|error| Failure::io(error, "running 'date', which reads times"))?;
    let seconds = String::from_utf8_lossy(&done.stdout).trim().parse::<i64>().ok().filter(|_| done.status.success());
    match seconds.map(u64::try_from) {
        Some(Ok(seconds)) => Ok(Timestamp(seconds)),
        Some(Err(_)) => Err(Failure::invalid(format!("'{text}' is before 1970"))),
        None => Err(Failure::invalid(format!("'{text}' is no time that 'date --date' reads"))
            .hint("examples: '2030-01-31 12:00', '2 weeks', 'tomorrow'")),
    }
}

/// An image in the trash as `rbd trash ls --format json` prints it.
#[derive(Debug, Serialize)]
struct ShortRow<'a> {
    id: &'a str,
    name: &'a str,
}

impl<'a> From<&'a TrashListing> for ShortRow<'a> {
    fn from(image: &'a TrashListing) -> Self {
        Self { id: &image.id, name: &image.name }
    }
}

/// An image in the trash as `rbd trash ls --long --format json` prints it.
#[derive(Debug, Serialize)]
struct LongRow<'a> {
    id: &'a str,
    name: &'a str,
    source: &'a str,
    deleted_at: String,
    status: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<&'a ListedParent>,
}

impl<'a> LongRow<'a> {
    fn new(image: &'a TrashListing, now: Timestamp) -> Self {
        let how = if now < image.expires_at { "protected until" } else { "expired at" };
        Self {
            id: &image.id,
            name: &image.name,
            source: &image.source,
            deleted_at: image.deleted_at.local_text(),
            status: format!("{how} {}", image.expires_at.local_text()),
            parent: image.parent.as_ref(),
        }
    }
}

/// Writes images as `rbd trash ls --long` does.
fn long(rows: &[LongRow<'_>]) -> String {
    let cells = rows.iter().map(|row| {
        let parent = row.parent.map(ListedParent::spec).unwrap_or_default();
        [row.id.into(), row.name.into(), row.source.into(), row.deleted_at.clone(), row.status.clone(), parent]
    });
    shapes::table(["ID", "NAME", "SOURCE", "DELETED_AT", "STATUS", "PARENT"], &[], cells)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_as_date_reads_them() {
        assert_eq!(read_date("2030-01-31 12:00 UTC").expect("a time"), Timestamp(1_896_091_200));
        assert_eq!(read_date("@7").expect("a time"), Timestamp(7));
        let soon = expiry("2 weeks").expect("a time").expect("not now");
        assert!(soon.0 >= now().0 + 14 * 86_400 - 5 * 3600 && soon.0 <= now().0 + 14 * 86_400 + 5 * 3600);
        assert_eq!(expiry("now").expect("a time"), None);
        for wrong in ["never ever", "@-5", "--help"] {
            assert_eq!(read_date(wrong).expect_err("no time").kind, FailureKind::Invalid, "{wrong}");
        }
        assert!(expiry("yesterday").expect_err("past").message.contains("past"));
    }

    /// Output of `rbd trash ls --long` 16.2.
    #[test]
    fn a_long_list_byte_for_byte() {
        let image = TrashListing {
            id: "1015d79e38d3".into(),
            name: "t".into(),
            source: "USER".into(),
            deleted_at: Timestamp(0),
            expires_at: Timestamp(10),
            parent: None,
        };
        let time = |seconds| Timestamp(seconds).local_text();
        let rows = [LongRow::new(&image, Timestamp(10)), LongRow::new(&image, Timestamp(9))];
        assert_eq!(rows[0].status, format!("expired at {}", time(10)));
        assert_eq!(rows[1].status, format!("protected until {}", time(10)));
        let want = [
            "ID            NAME  SOURCE  DELETED_AT                STATUS                               PARENT"
                .to_owned(),
            format!("1015d79e38d3  t     USER    {}  expired at {}             ", time(0), time(10)),
        ];
        assert_eq!(long(&rows[..1]).lines().next().map(str::len), long(&rows[..1]).lines().nth(1).map(str::len));
        assert_eq!(
            long(&rows[1..]).lines().next(),
            Some(
                "ID            NAME  SOURCE  DELETED_AT                STATUS                                    PARENT"
            )
        );
        assert_eq!(
            long(&rows[..1]).lines().map(str::trim_end).collect::<Vec<_>>(),
            want.iter().map(|row| row.trim_end()).collect::<Vec<_>>()
        );
        assert_eq!(long(&[]), "");
    }
}
