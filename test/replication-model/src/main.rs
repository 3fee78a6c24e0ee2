//! `forebay-replication-model`: explores the replication protocol within limits, and prints what it found.

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;
use forebay_replication_model::{Exploration, Limits, ModelAction, Omission, ReplicationModel, explore};

/// Explores the replication protocol of write logs exhaustively, within limits.
///
/// Example: `forebay-replication-model --peers 3 --writes 2 --changes 3`
#[derive(Parser)]
struct Arguments {
    /// Peers
    #[arg(long, default_value_t = 2)]
    peers: u8,
    /// Peers that are complete members of the log at first
    #[arg(long, default_value_t = 2)]
    members: u8,
    /// Peers that are being filled at first
    #[arg(long, default_value_t = 0)]
    filling: u8,
    /// Writes of the host
    #[arg(long, default_value_t = 2)]
    writes: u8,
    /// Changes of the record, openings and takeovers among them
    #[arg(long, default_value_t = 2)]
    changes: u64,
    /// Crashes of processes
    #[arg(long, default_value_t = 1)]
    crashes: u8,
    /// Media that fail
    #[arg(long, default_value_t = 0)]
    media: u8,
    /// Primaries that close the log
    #[arg(long, default_value_t = 0)]
    closes: u8,
    /// Time that passes, in lengths of a lease; 0 leaves out reads and leases
    #[arg(long, default_value_t = 0)]
    time: u64,
    /// Explores a list of limits, and leaves out each rule in turn, which must have a counterexample
    #[arg(long)]
    all: bool,
    /// Leaves this rule out
    #[arg(long)]
    without: Option<String>,
    /// Explores larger limits, too
    #[arg(long, requires = "all")]
    deep: bool,
    /// Prints the events of each counterexample
    #[arg(long)]
    events: bool,
}

const fn limits(peers: [u8; 3], writes: u8, changes: u64, crashes: u8) -> Limits {
    let [members, filling, others] = peers;
    Limits {
        peers: members + filling + others,
        members,
        filling,
        writes,
        changes,
        crashes,
        media: 0,
        closes: 0,
        time: 0,
    }
}

/// Limits within which the whole protocol is explored in a test run.
const SCOPES: [Limits; 7] = [
    limits([2, 0, 0], 2, 2, 1),
    limits([3, 0, 0], 1, 2, 0),
    limits([2, 1, 0], 1, 2, 0),
    limits([1, 1, 0], 2, 3, 0),
    Limits { media: 1, ..limits([2, 0, 0], 1, 3, 0) },
    Limits { closes: 1, ..limits([2, 0, 0], 1, 3, 0) },
    Limits { time: 1, ..limits([2, 0, 0], 1, 2, 0) },
];

/// Limits of a long exploration.
const DEEP: [Limits; 3] =
    [limits([2, 0, 0], 2, 3, 0), limits([2, 1, 0], 1, 3, 0), Limits { time: 2, ..limits([2, 0, 0], 1, 2, 0) }];

/// Limits within which counterexamples are looked for, smallest first.
const SEARCHED: [Limits; 7] = [
    limits([2, 0, 0], 1, 2, 0),
    Limits { media: 1, ..limits([2, 0, 0], 1, 2, 0) },
    limits([2, 0, 0], 2, 2, 0),
    limits([2, 1, 0], 1, 2, 0),
    Limits { closes: 1, ..limits([2, 0, 0], 1, 3, 0) },
    Limits { time: 2, ..limits([2, 0, 0], 1, 2, 0) },
    limits([3, 0, 0], 2, 3, 0),
];

fn described(limits: Limits) -> String {
    let Limits { peers, members, filling, writes, changes, crashes, media, closes, time } = limits;
    let mut text = format!("{peers} peers: {members} complete, {filling} filling; {writes} writes, {changes} changes");
    let counts = [(crashes, "crashes"), (media, "failing media"), (closes, "closed logs")];
    let counts = counts.into_iter().map(|(count, what)| (u64::from(count), what));
    for (count, what) in counts.chain([(time, "of time")]) {
        if count > 0 {
            text += &format!(", {count} {what}");
        }
    }
    text
}

fn print_events(events: &[ModelAction]) {
    events.iter().for_each(|event| println!("  {event:?}"));
}

/// Explores the whole protocol.  Returns whether nothing is broken, and the exploration showed a takeover.
fn verify(scope: Limits) -> bool {
    let begin = Instant::now();
    let found = explore(&ReplicationModel { limits: scope, omission: None });
    let Exploration { states, depth, .. } = found;
    let seconds = begin.elapsed().as_secs_f64();
    let scope = described(scope);
    match found.broken {
        Some((property, events)) => {
            println!("not ok {scope}: broken after {} events: {property}", events.len());
            print_events(&events);
            false
        }
        None if !found.shows_takeover => {
            println!("not ok {scope}: no peer takes over, so that this shows nothing");
            false
        }
        None => {
            println!("ok {scope}: {states} states, {depth} events deep, {seconds:.1} s");
            true
        }
    }
}

/// Leaves a rule out.  Returns whether that has a counterexample.
fn refute(omission: Omission, arguments: &Arguments) -> bool {
    for scope in SEARCHED {
        let found = explore(&ReplicationModel { limits: scope, omission: Some(omission) });
        let Some((property, events)) = found.broken else { continue };
        let (states, scope) = (found.states, described(scope));
        println!(
            "ok without {omission:?}: broken after {} events: {property} ({scope}; {states} states)",
            events.len()
        );
        if arguments.events {
            print_events(&events);
        }
        return true;
    }
    println!("not ok without {omission:?}: no counterexample");
    false
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let Arguments { peers, members, filling, writes, changes, crashes, media, closes, time, .. } = arguments;
    if members == 0 || members + filling > peers {
        eprintln!(
            "{members} complete and {filling} filling peers of {peers}: one must be complete, and all must be there"
        );
        return ExitCode::from(2);
    }
    let mut good = true;
    if arguments.all {
        let deep: &[Limits] = if arguments.deep { &DEEP } else { &[] };
        for scope in SCOPES.iter().chain(deep) {
            good &= verify(*scope);
        }
        for omission in Omission::ALL {
            good &= refute(omission, &arguments);
        }
    } else if let Some(name) = &arguments.without {
        let Some(omission) = Omission::ALL.into_iter().find(|omission| format!("{omission:?}") == *name) else {
            eprintln!("there is no rule {name}; there are: {:?}", Omission::ALL);
            return ExitCode::from(2);
        };
        good = refute(omission, &arguments);
    } else {
        let scope = Limits { peers, members, filling, writes, changes, crashes, media, closes, time };
        good = verify(scope);
    }
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
