//! Soaks the store and images on it in simulation: `sim --seed N --steps M --runs R`; with `--everywhere`, crashes each
//! seed's scenario at every persistence point of its first life in turn; or, with `--messenger`, messengers; or, with
//! `--writelog`, write logs; or, with `--attachment`, volumes that get and lose write logs under load; or, with
//! `--shared`, images of a pool that several clients use at once.
//!
//! A failure prints its seed and its trace, and ends with exit code 1; `sim --seed SEED --steps 1` (or `--everywhere`)
//! replays it.

use std::process::ExitCode;

struct Args {
    seed: u64,
    steps: u64,
    runs: u64,
    messenger: bool,
    writelog: bool,
    attachment: bool,
    shared: bool,
    everywhere: bool,
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Args, String> {
    let (messenger, writelog, attachment, shared, everywhere) = (false, false, false, false, false);
    let mut args = Args { seed: 1, steps: 100_000, runs: 1, messenger, writelog, attachment, shared, everywhere };
    while let Some(word) = words.next() {
        let mut number = || {
            let text = words.next().ok_or_else(|| format!("{word} needs a number"))?;
            text.parse::<u64>().map_err(|error| format!("{word} {text}: {error}"))
        };
        match word.as_str() {
            "--seed" => args.seed = number()?,
            "--steps" => args.steps = number()?,
            "--runs" => args.runs = number()?,
            "--messenger" => args.messenger = true,
            "--writelog" => args.writelog = true,
            "--attachment" => args.attachment = true,
            "--shared" => args.shared = true,
            "--everywhere" => args.everywhere = true,
            _ => {
                let usage = "sim [--seed N] [--steps M] [--runs R] [--everywhere] \
                             [--messenger | --writelog | --attachment | --shared]";
                return Err(format!("{word}: unknown; usage: {usage}"));
            }
        }
    }
    Ok(args)
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
    if args.messenger {
        return messengers(&args);
    }
    if args.writelog {
        return writelogs(&args);
    }
    if args.attachment {
        return attachments(&args);
    }
    if args.shared {
        return shared(&args);
    }
    let mut total = forebay_sim::harness::Tally::default();
    for run in 0..args.runs {
        let seed = args.seed.wrapping_add(run);
        let (ran, how) = if args.everywhere {
            (forebay_sim::harness::sweep(seed), "--everywhere")
        } else {
            (forebay_sim::soak(seed, args.steps), "--steps 1")
        };
        match ran {
            Ok(tally) => total.add(&tally),
            Err(failure) => {
                println!("{failure}");
                println!("replay: sim --seed {} {how}", failure.seed);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{total:#?}");
    ExitCode::SUCCESS
}

fn messengers(args: &Args) -> ExitCode {
    let mut total = forebay_sim::harness::MessengerTally::default();
    for run in 0..args.runs {
        match forebay_sim::harness::run_messenger(args.seed.wrapping_add(run)) {
            Ok(tally) => total.add(&tally),
            Err(failure) => {
                println!("{failure}");
                println!("replay: sim --messenger --seed {}", failure.seed);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{total:#?}");
    ExitCode::SUCCESS
}

fn shared(args: &Args) -> ExitCode {
    let mut total = forebay_sim::harness::SharedTally::default();
    for run in 0..args.runs {
        match forebay_sim::harness::run_shared(args.seed.wrapping_add(run)) {
            Ok(tally) => total.add(&tally),
            Err(failure) => {
                println!("{failure}");
                println!("replay: sim --shared --seed {}", failure.seed);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{total:#?}");
    ExitCode::SUCCESS
}

fn writelogs(args: &Args) -> ExitCode {
    let mut total = forebay_sim::harness::LogTally::default();
    for run in 0..args.runs {
        let seed = args.seed.wrapping_add(run);
        let (ran, how) = if args.everywhere {
            (forebay_sim::harness::sweep_writelog(seed), " --everywhere")
        } else {
            (forebay_sim::harness::run_writelog(seed), "")
        };
        match ran {
            Ok(tally) => total.add(&tally),
            Err(failure) => {
                println!("{failure}");
                println!("replay: sim --writelog --seed {}{how}", failure.seed);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{total:#?}");
    ExitCode::SUCCESS
}

fn attachments(args: &Args) -> ExitCode {
    let mut total = forebay_sim::harness::AttachmentTally::default();
    for run in 0..args.runs {
        match forebay_sim::harness::run_attachment(args.seed.wrapping_add(run)) {
            Ok(tally) => total.add(&tally),
            Err(failure) => {
                println!("{failure}");
                println!("replay: sim --attachment --seed {}", failure.seed);
                return ExitCode::FAILURE;
            }
        }
    }
    println!("{total:#?}");
    ExitCode::SUCCESS
}
