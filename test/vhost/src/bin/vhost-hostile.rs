//! Runs hostile front-ends against a served vhost-user-blk or vhost-user-scsi device, and prints what the device does.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use forebay_vhost_host::DeviceUnderTest;
use forebay_vhost_host::{device, hostile};

#[derive(Parser)]
struct Arguments {
    /// Socket of the device, which is overwritten
    #[arg(long)]
    socket: PathBuf,
    /// Socket of another device of the same process, which must serve meanwhile
    #[arg(long)]
    other: Option<PathBuf>,
    /// Process that serves them
    #[arg(long)]
    process: u32,
    /// Cases of a virtio-scsi device
    #[arg(long)]
    scsi: bool,
    /// Only cases whose name contains this
    #[arg(long, default_value = "")]
    case: String,
    /// Print all reactions, not only faults
    #[arg(long)]
    verbose: bool,
}

impl DeviceUnderTest for Arguments {
    fn socket(&self) -> PathBuf {
        self.socket.clone()
    }

    fn other_socket(&self) -> Option<PathBuf> {
        self.other.clone()
    }

    fn is_alive(&self) -> bool {
        // One that has ended and was not waited for has no memory.
        Path::new(&format!("/proc/{}", self.process)).exists() && device::holdings(self.process).is_some()
    }

    fn holdings(&self) -> Option<(u64, usize)> {
        device::holdings(self.process)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let mut cases = if arguments.scsi { hostile::scsi_cases() } else { hostile::cases() };
    cases.retain(|case| case.name.contains(&arguments.case));
    let report = hostile::run_cases(&arguments, &cases);
    for verdict in report.verdicts.iter().filter(|verdict| arguments.verbose || verdict.fault.is_some()) {
        println!("{}: {:?} {}", verdict.name, verdict.reaction, verdict.fault.as_deref().unwrap_or_default());
    }
    let (faults, left_out) = (report.faults().len(), report.not_offered().len());
    println!("{} cases, {faults} faults, {left_out} not offered", report.verdicts.len());
    if faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
