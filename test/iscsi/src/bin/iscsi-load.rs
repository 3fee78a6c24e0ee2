//! Benchmarks a unit from one thread in one session, and prints the results as JSON.

use std::net::TcpStream;

use anyhow::{Result, bail, ensure};
use clap::Parser;
use forebay_iscsi::wire::{Response, response, response_flag};
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::plain::Session;
use forebay_iscsi_host::target::Uri;
use forebay_load::Load;
use forebay_load::load::{self, Command};

#[derive(Parser)]
struct Arguments {
    /// iscsi://HOST:PORT/TARGET/LUN
    uri: Uri,
    #[command(flatten)]
    load: Load,
    /// Sessions that only stand there
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// Number of units that idle sessions use, from the one of the URI on
    #[arg(long, default_value_t = 1)]
    units: u16,
}

const HOST: &str = "iqn.2026-11.io.forebay:load";
/// Number of idle sessions per initiator name.
const SESSIONS_A_HOST: usize = 128;

fn open(uri: &Uri, number: usize) -> Result<Session> {
    let initiator = format!("{HOST}-{}", number / SESSIONS_A_HOST);
    Session::open(uri, &initiator, number as u16, if number == 0 { 4 << 20 } else { 8192 })
}

/// Session under load.
struct Loaded(Session);

impl load::Session for Loaded {
    fn stream(&mut self) -> &mut TcpStream {
        &mut self.0.stream
    }

    fn fill(&mut self) -> Result<()> {
        self.0.fill()
    }

    fn command(&mut self, out: &mut Vec<u8>, command: &Command<'_>) {
        let cdb = match command.data {
            [] => cdb::read(command.block, command.count),
            _ => cdb::write(command.block, command.count),
        };
        self.0.command(out, command.tag.into(), cdb, command.count as usize * 512, command.data);
    }

    fn done(&mut self, out: &mut Vec<u8>, data: &[u8]) -> Result<Option<u16>> {
        while let Some((header, ..)) = self.0.peek() {
            match header.opcode {
                response::DATA_IN if header.flags & response_flag::STATUS == 0 => {}
                response::DATA_IN | response::SCSI => {
                    let status = header.specific[1];
                    ensure!(status == 0, "a command failed with status {status}");
                    self.0.exp_stat_sn = header.view::<Response>().stat_sn.get().wrapping_add(1);
                    return Ok(Some(header.itt.get() as u16));
                }
                response::R2T => self.0.answer(out, header.view(), data),
                response::NOP_IN => {}
                opcode => bail!("a PDU with opcode {opcode:#04x}"),
            }
        }
        Ok(None)
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut standing = Vec::new();
    for number in 1..=arguments.idle {
        let lun = arguments.uri.lun + (number % usize::from(arguments.units)) as u16;
        let mut session = open(&Uri { lun, ..arguments.uri.clone() }, number)?;
        session.size()?;
        standing.push(session);
    }
    if arguments.load.seconds <= 0.0 {
        println!("{} sessions", standing.len());
        std::io::stdin().read_line(&mut String::new())?;
        return Ok(());
    }
    let mut session = Loaded(open(&arguments.uri, 0)?);
    let size = session.0.size()?;
    println!("{}", load::run(&mut session, size, &arguments.load)?);
    drop(standing);
    Ok(())
}
