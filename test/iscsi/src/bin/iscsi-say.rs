//! Sends commands to a unit, one after the other in one session, and prints a line for each: its status, its sense key
//! and code where it has sense data, and what it read.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use forebay_iscsi_host::cdb::Cdb;
use forebay_iscsi_host::plain::{Done, Session};
use forebay_iscsi_host::target::Uri;

#[derive(Parser)]
#[command(after_help = "Example: iscsi-say iscsi://127.0.0.1:3260/iqn.x:y/0 12018300ff:in=255 00")]
struct Arguments {
    /// iscsi://HOST:PORT/TARGET/LUN
    uri: Uri,
    /// Commands in hexadecimal; `:in=BYTES` reads, `:out=HEX` sends (`HEXxTIMES` sends it that many times)
    commands: Vec<Said>,
    /// Name of the initiator
    #[arg(long, default_value = "iqn.2026-11.io.forebay:say")]
    initiator: String,
    /// Tells the initiator's sessions apart
    #[arg(long, default_value_t = 1)]
    session: u16,
    /// The last command is sent again and again until it ends with this sense, such as 6/3807, for up to 30 s
    #[arg(long)]
    until: Option<String>,
    /// Prints unit attentions, too, instead of trying again
    #[arg(long)]
    attentions: bool,
}

/// Command with its data.
#[derive(Debug, Clone)]
struct Said {
    cdb: Cdb,
    data: Vec<u8>,
    read: usize,
}

impl std::str::FromStr for Said {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(':');
        let command = bytes(parts.next().unwrap_or_default())?;
        ensure!((1..=16).contains(&command.len()), "a command has 1 to 16 bytes");
        let mut said = Self { cdb: [0; 16], data: Vec::new(), read: 0 };
        said.cdb[..command.len()].copy_from_slice(&command);
        for part in parts {
            match part.split_once('=').context("in=BYTES or out=HEX")? {
                ("in", count) => said.read = count.parse()?,
                ("out", data) => {
                    let (data, times) = data.split_once('x').unwrap_or((data, "1"));
                    said.data = bytes(data)?.repeat(times.parse()?);
                }
                (what, _) => anyhow::bail!("in=BYTES or out=HEX, not {what}="),
            }
        }
        Ok(said)
    }
}

fn bytes(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2) && text.is_ascii(), "'{text}' is not hexadecimal");
    let pair =
        |at: usize| u8::from_str_radix(&text[at..at + 2], 16).with_context(|| format!("'{text}' is not hexadecimal"));
    (0..text.len()).step_by(2).map(pair).collect()
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut session = Session::open(&arguments.uri, &arguments.initiator, arguments.session, 1 << 20)?;
    let sense = |done: &Done| done.sense().map(|(key, code)| format!("{key:x}/{code:04x}"));
    for (index, Said { cdb, data, read }) in arguments.commands.iter().enumerate() {
        let last = index + 1 == arguments.commands.len();
        let begun = Instant::now();
        let done = loop {
            let done = match arguments.attentions || arguments.until.is_some() {
                true => session.run(*cdb, data, *read)?,
                false => session.settle(*cdb, data, *read)?,
            };
            if !last || arguments.until.is_none() || sense(&done) == arguments.until {
                break done;
            }
            ensure!(begun.elapsed() < Duration::from_secs(300), "it does not end so: {done:x?}");
            std::thread::sleep(Duration::from_millis(50));
        };
        let sense = sense(&done).map_or(String::new(), |sense| format!(" {sense}"));
        let found: String = done.data.iter().map(|byte| format!("{byte:02x}")).collect();
        println!("{:02x}{sense} {found}", done.status);
    }
    Ok(())
}
