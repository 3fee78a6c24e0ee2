//! Runs seeds of the simulator: `sim [SUBJECT] [--everywhere] [--seed N] [--steps M] [--runs R]`.
//!
//! The subject is the store and images on it; or, with `--messenger`, messengers; with `--writelog`, write logs; with
//! `--attachment`, volumes that get and lose write logs under load; with `--replication`, write logs with members on several
//! gateways; with `--shared`, images of a pool that several clients
//! use at once; with `--families`, clones and snapshots of images; with `--forward`, volumes that other daemons have open; with `--devices`, stores on
//! several devices.  `--everywhere` crashes each seed's scenario at every persistence point of its first life in turn.
//!
//! A failure prints its seed, its trace and how to replay it, and ends with exit code 1.

use std::fmt::Debug;
use std::process::ExitCode;

use forebay_sim::harness::{
    AttachmentTally, DevicesTally, Failure, FamilyTally, ForwardTally, LogTally, MessengerTally, ReplicationTally,
    SharedTally, Tally, run_attachment, run_devices, run_families, run_forward, run_messenger, run_replication,
    run_shared, run_writelog, soak, sweep, sweep_writelog,
};

const USAGE: &str = "sim [--messenger | --writelog | --attachment | --replication | --shared | --families | --forward | --devices] [--everywhere] [--seed N] [--steps M] [--runs R]";

/// Subject of the runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    Store,
    Messenger,
    WriteLog,
    Attachment,
    Replication,
    Shared,
    Families,
    Forward,
    Devices,
}

struct Args {
    subject: Subject,
    everywhere: bool,
    seed: u64,
    steps: u64,
    runs: u64,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut args = Args { subject: Subject::Store, everywhere: false, seed: 1, steps: 100_000, runs: 1 };
    while let Some(word) = words.next() {
        let mut number = || {
            let text = words.next().ok_or_else(|| format!("{word} needs a number"))?;
            text.parse::<u64>().map_err(|error| format!("{word} {text}: {error}"))
        };
        match word.as_str() {
            "--seed" => args.seed = number()?,
            "--steps" => args.steps = number()?,
            "--runs" => args.runs = number()?,
            "--messenger" => args.subject = Subject::Messenger,
            "--writelog" => args.subject = Subject::WriteLog,
            "--attachment" => args.subject = Subject::Attachment,
            "--replication" => args.subject = Subject::Replication,
            "--families" => args.subject = Subject::Families,
            "--forward" => args.subject = Subject::Forward,
            "--devices" => args.subject = Subject::Devices,
            "--shared" => args.subject = Subject::Shared,
            "--everywhere" => args.everywhere = true,
            _ => return Err(format!("{word}: unknown; usage: {USAGE}")),
        }
    }
    match args.everywhere && !matches!(args.subject, Subject::Store | Subject::WriteLog) {
        true => Err("--everywhere goes with the store and with --writelog only".to_owned()),
        false => Ok(args),
    }
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(text) => {
            eprintln!("{text}");
            return ExitCode::from(2);
        }
    };
    // A panic is caught and reported with its trace; its own message would only come before its time.
    std::panic::set_hook(Box::new(|_| {}));
    let steps = args.steps;
    match (args.subject, args.everywhere) {
        (Subject::Store, false) => run(&args, "--steps 1", |seed| soak(seed, steps), Tally::add),
        (Subject::Store, true) => run(&args, "--everywhere", sweep, Tally::add),
        (Subject::WriteLog, false) => run(&args, "--writelog", run_writelog, LogTally::add),
        (Subject::WriteLog, true) => run(&args, "--writelog --everywhere", sweep_writelog, LogTally::add),
        (Subject::Messenger, _) => run(&args, "--messenger", run_messenger, MessengerTally::add),
        (Subject::Attachment, _) => run(&args, "--attachment", run_attachment, AttachmentTally::add),
        (Subject::Replication, _) => run(&args, "--replication", run_replication, ReplicationTally::add),
        (Subject::Families, _) => run(&args, "--families", run_families, FamilyTally::add),
        (Subject::Forward, _) => run(&args, "--forward", run_forward, ForwardTally::add),
        (Subject::Devices, _) => run(&args, "--devices", run_devices, DevicesTally::add),
        (Subject::Shared, _) => run(&args, "--shared", run_shared, SharedTally::add),
    }
}

/// Runs one seed after the other and prints what all did; `options` replay one.
fn run<T: Debug + Default>(
    args: &Args,
    options: &str,
    one: impl Fn(u64) -> Result<T, Failure>,
    add: impl Fn(&mut T, &T),
) -> ExitCode {
    let mut total = T::default();
    for run in 0..args.runs {
        match one(args.seed.wrapping_add(run)) {
            Ok(tally) => add(&mut total, &tally),
            Err(failure) => {
                println!("{failure}");
                println!("replay: sim {options} --seed {}", failure.seed);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{total:#?}");
    ExitCode::SUCCESS
}
