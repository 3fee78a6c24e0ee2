//! Command `log`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::with_session;
use crate::api::{LogPolicy, LogTakeover, WriteLogInfo};
use crate::cli::{GlobalArgs, LogCommand};
use crate::client::session::CommandSession;
use crate::failure::Result;
use crate::ops::{DiscardLog, FlushLog, GetLog, ListLogs, TakeOverLog};
use crate::output::{Output, table};
use crate::units::{self, Size, Span};

/// Shows and looks after write logs.
pub fn run(global: &GlobalArgs, output: Output, command: LogCommand) -> Result<()> {
    match command {
        LogCommand::Ls => {
            let logs = with_session(global, |session| session.call(ListLogs, |_| {}))?;
            output.print(&logs, |logs| list(logs))
        }
        LogCommand::Info(options) => {
            let log = with_session(global, |session| session.call(GetLog(options.image), |_| {}))?;
            output.print(&log, show)
        }
        LogCommand::Flush(options) => {
            let log = with_session(global, |session| session.call(FlushLog(options.image), |_| {}))?;
            output.print(&log, show)
        }
        LogCommand::Takeover(options) => {
            let operation =
                TakeOverLog { spec: options.name.image, flush_only: options.flush_only, force: options.force };
            let log = CommandSession::daemon(global)?.call(&operation, None, |_| {})?;
            output.print(&log, show)
        }
        LogCommand::Discard(options) => {
            let done = options.name.image.clone();
            let operation = DiscardLog { spec: options.name.image, force: options.force };
            with_session(global, |session| session.call(operation, |_| {}))?;
            output.print(&done, |_| String::new())
        }
    }
}

/// Returns the time since `at`, in milliseconds since 1970.
fn since(at: u64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_millis(at))
}

fn age(log: &WriteLogInfo) -> String {
    log.dirty_since_ms.map_or_else(String::new, |at| format!("{:.1} s", since(at).as_secs_f64()))
}

/// Returns whether payloads are encrypted, for display; nothing if that is unknown.
fn encrypted(log: &WriteLogInfo) -> &'static str {
    match log.encrypted {
        Some(true) => "yes",
        Some(false) => "no",
        None => "",
    }
}

fn list(logs: &[WriteLogInfo]) -> String {
    let rows = logs.iter().map(|log| {
        vec![
            log.image.clone(),
            log.place.to_string(),
            log.state.clone(),
            encrypted(log).to_owned(),
            Size(log.dirty_bytes).to_string(),
            log.dirty_entries.to_string(),
            age(log),
            log.reason.clone().unwrap_or_default(),
        ]
    });
    table(&["IMAGE", "LOG", "STATE", "ENCRYPTED", "DIRTY", "ENTRIES", "SINCE", "WHY"], &[4, 5, 6], rows)
}

fn most(log: &WriteLogInfo) -> String {
    log.dirty_max.map_or("as much as it holds".to_owned(), |bytes| Size(bytes).to_string())
}

fn policy(policy: LogPolicy) -> String {
    let LogPolicy { takeover, lease_ms, min_replicas } = policy;
    let lease = Span(Duration::from_millis(lease_ms));
    format!("policy: takeover={}, lease={lease}, min-replicas={min_replicas}", takeover.name())
}

fn takeover(takeover: &LogTakeover) -> String {
    let LogTakeover { at_ms, duration_ms, from, from_host, automatic } = takeover;
    let (ago, from) = (units::duration(since(*at_ms).as_secs()), from_host.as_ref().unwrap_or(from));
    let by = if *automatic { "by itself" } else { "by command" };
    format!("taken over: {ago} ago from {from}, {by}, in {}", Span(Duration::from_millis(*duration_ms)))
}

fn show(log: &WriteLogInfo) -> String {
    let mut lines = vec![
        format!("image:  {}", log.image),
        format!("log:    {}", log.place),
        format!("id:     {}", log.id),
        format!("epoch:  {}", log.epoch),
        format!("state:  {}", log.state),
        format!("encrypted: {}", encrypted(log)),
        format!("dirty:  {}", log.dirty()),
        format!("limits: {}, {}", most(log), Span(Duration::from_millis(log.dirty_age_max_ms))),
    ];
    if !log.members.is_empty() {
        let complete = log.members.iter().filter(|member| member.state == "complete").count();
        let wanted = log.copies_wanted.map_or(String::new(), |wanted| format!(" of {wanted}"));
        lines.push(format!("copies: {complete}{wanted}"));
        lines.extend(log.policy.map(policy));
        let rows = log.members.iter().map(|member| {
            vec![
                member.host.clone().unwrap_or_else(|| member.peer.clone()),
                member.role.clone(),
                member.state.clone(),
                match member.connected {
                    Some(true) => "yes".into(),
                    Some(false) => "no".into(),
                    None => String::new(),
                },
                Size(member.lag_bytes).to_string(),
                member.lag_entries.to_string(),
            ]
        });
        let header = ["MEMBER", "ROLE", "STATE", "CONNECTED", "LAG", "ENTRIES"];
        lines.push(table(&header, &[4, 5], rows).trim_end().to_owned());
    }
    lines.extend(log.last_takeover.as_ref().map(takeover));
    if log.dirty_since_ms.is_some() {
        lines.push(format!("since:  {} ago", age(log)));
    }
    lines.extend(log.reason.iter().map(|reason| format!("why:    {reason}")));
    lines.join("\n")
}
