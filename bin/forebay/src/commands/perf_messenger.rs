//! `perf messenger`: messages a second, latencies and processor time between two processes, or within one.

use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::perf::{self, Measurement, PerfLoad};
use forebay_messenger::wire::control::mode;
use forebay_messenger::{Address, Auth, Keyring, MessengerCore, MessengerOptions, SharedKey};
use forebay_reactor::{DriverChoice, Reactor};
use serde::Serialize;

use crate::cli::{MessengerEndArgs, MessengerRunArgs, PerfMessenger};
use crate::config::peers::{ClientSide, read_key};
use crate::engine::peers::cpu_nanos;
use crate::failure::{Failure, FailureKind, Result};
use crate::output::Output;

/// Not measured, at first.
const WARM_UP: Duration = Duration::from_millis(200);
/// The name that both ends have the key under.
const NAME: &str = "perf";

/// Does what `perf messenger` says.
pub fn run(output: Output, command: PerfMessenger) -> Result<()> {
    let reactor =
        Reactor::system(DriverChoice::Auto).map_err(|error| Failure::failed(format!("a reactor: {error}")))?;
    let (PerfMessenger::Serve(end) | PerfMessenger::Run(MessengerRunArgs { end, .. })) = &command;
    reactor.set_linger(Duration::from_micros(end.linger_us.into()));
    match command {
        PerfMessenger::Serve(end) => reactor.block_on(serve(output, &end)),
        PerfMessenger::Run(options) => output.print(&reactor.block_on(measure(&options))?, render),
    }
}

fn invalid(text: String) -> Failure {
    Failure::new(FailureKind::Invalid, text)
}

fn seconds(option: &str, seconds: f64) -> Result<Duration> {
    Duration::try_from_secs_f64(seconds).map_err(|error| invalid(format!("{option}: {error}")))
}

/// The address, and what both ends are set up with.
fn set_up(end: &MessengerEndArgs) -> Result<(Address, MessengerOptions)> {
    let configured = end.config.as_deref().map(ClientSide::load).transpose()?.unwrap_or_default();
    let text = match &end.transport {
        Some(name) if !["tcp", "rdma", "unix", "shm", "loopback"].contains(&name.as_str()) => {
            return Err(Failure::new(FailureKind::Unsupported, format!("there is no transport {name}")));
        }
        Some(name) if !end.addr.starts_with(&format!("{name}:")) => format!("{name}:{}", end.addr),
        _ => end.addr.clone(),
    };
    let address = match text.strip_prefix("loopback:") {
        Some(name) => Address::Loopback(name.into()),
        None => configured.transport.address(&text)?,
    };
    let key = match (&end.key, end.key_file.as_ref().or(configured.key.as_ref())) {
        (Some(text), _) => {
            Some(SharedKey::from_hex(text).ok_or_else(|| invalid("a key has 64 hexadecimal digits".into()))?)
        }
        (None, Some(path)) => Some(read_key(path)?),
        // On this machine no key is required, but encryption needs one.
        (None, None) if end.secure && address.is_local() => Some(SharedKey::new([0; 32])),
        (None, None) if !address.is_local() => {
            return Err(invalid(format!("{address} is not on this machine: --key or --key-file is needed")));
        }
        (None, None) => None,
    };
    let auth = match key {
        None => Auth::None,
        Some(key) => {
            let keyring = Rc::new(Keyring::new().with(NAME, key.clone()));
            Auth::SharedKey { name: NAME.into(), key, keyring }
        }
    };
    let modes = Some(vec![if end.secure { mode::SECURE } else { mode::CRC }]);
    let busy_poll = Duration::from_micros(end.linger_us.into());
    let rdma_local = end.rdma_local.or(configured.rdma_local);
    Ok((
        address,
        MessengerOptions { busy_poll, rdma_local, auth, modes, checksum: !end.no_crc, ..MessengerOptions::default() },
    ))
}

async fn serve(output: Output, end: &MessengerEndArgs) -> Result<()> {
    #[derive(Serialize)]
    struct Serving {
        address: String,
    }
    let (address, options) = set_up(end)?;
    let core = MessengerCore::default();
    let (_server, bound) = perf::serve(&core, options, &address, cpu_nanos)
        .map_err(|error| Failure::failed(format!("listening on {address}: {error}")))?;
    output.print(&Serving { address: bound.to_string() }, |serving| serving.address.clone())?;
    std::future::pending().await
}

/// Output of `perf messenger run`.
#[derive(Debug, Serialize)]
struct Report {
    address: String,
    size: usize,
    depth: usize,
    connections: usize,
    messages: u64,
    seconds: f64,
    messages_per_s: f64,
    /// 10^6 bytes of payload a second.
    mb_per_s: f64,
    latency_us_p50: f64,
    latency_us_p99: f64,
    latency_us_p999: f64,
    latency_us_max: f64,
    /// Processor time a message on our side, in microseconds.
    client_cpu_us: f64,
    /// The same of the server; in one process with us it is the same time.
    server_cpu_us: Option<f64>,
}

async fn measure(options: &MessengerRunArgs) -> Result<Report> {
    let (address, set_up) = set_up(&options.end)?;
    let core = MessengerCore::default();
    // Within the process there is no server yet.
    let local = match &address {
        Address::Loopback(_) => Some(
            perf::serve(&core, set_up.clone(), &address, cpu_nanos)
                .map_err(|error| Failure::failed(format!("listening on {address}: {error}")))?,
        ),
        _ => None,
    };
    let load = PerfLoad {
        size: options.size,
        depth: options.depth,
        connections: options.connections,
        time: seconds("--seconds", options.seconds)?,
        warm_up: WARM_UP,
        one_way: options.one_way,
        lossy: options.lossy,
        every: Duration::from_micros(options.every_us.into()),
        patience: seconds("--timeout", options.timeout)?,
    };
    let before = cpu_nanos();
    let outcome = perf::run(&core, set_up, &address, &load).await;
    let outcome = outcome.map_err(|error| Failure::new(FailureKind::Unreachable, format!("{address}: {error}")))?;
    // The warm-up has been paid for too.
    let share = outcome.seconds / (outcome.seconds + WARM_UP.as_secs_f64());
    let used = (cpu_nanos() - before) as f64 * share;
    if let Some((server, _)) = local {
        server.shutdown();
    }
    Ok(report(&address, options, &outcome, used))
}

fn report(address: &Address, options: &MessengerRunArgs, outcome: &Measurement, cpu_nanos: f64) -> Report {
    let messages = outcome.messages.max(1) as f64;
    let micros = |part: f64| outcome.percentile(part) as f64 / 1e3;
    Report {
        address: address.to_string(),
        size: options.size,
        depth: options.depth,
        connections: options.connections,
        messages: outcome.messages,
        seconds: outcome.seconds,
        messages_per_s: outcome.messages as f64 / outcome.seconds,
        mb_per_s: outcome.messages as f64 * options.size as f64 / outcome.seconds / 1e6,
        latency_us_p50: micros(0.5),
        latency_us_p99: micros(0.99),
        latency_us_p999: micros(0.999),
        latency_us_max: micros(1.0),
        client_cpu_us: cpu_nanos / messages / 1e3,
        server_cpu_us: outcome.server_cpu_nanos.map(|nanos| nanos as f64 / messages / 1e3),
    }
}

fn render(report: &Report) -> String {
    let server = report.server_cpu_us.map_or(String::new(), |used| format!(", server {used:.2}"));
    format!(
        "{:.0} messages/s, {:.1} MB/s\nlatency us: 50% {:.1}, 99% {:.1}, 99.9% {:.1}, max {:.1}\n\
         processor us a message: client {:.2}{server}",
        report.messages_per_s,
        report.mb_per_s,
        report.latency_us_p50,
        report.latency_us_p99,
        report.latency_us_p999,
        report.latency_us_max,
        report.client_cpu_us,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(addr: &str) -> MessengerEndArgs {
        MessengerEndArgs {
            addr: addr.into(),
            transport: None,
            crc: false,
            no_crc: false,
            secure: false,
            key: None,
            key_file: None,
            config: None,
            linger_us: 0,
            rdma_local: None,
        }
    }

    #[test]
    fn off_this_machine_a_key_is_needed() {
        assert!(set_up(&end("10.0.0.1:7000")).is_err());
        let with_key = MessengerEndArgs { key: Some("ab".repeat(32)), ..end("10.0.0.1:7000") };
        assert!(set_up(&with_key).is_ok());
        assert!(set_up(&MessengerEndArgs { key: Some("ab".into()), ..end("127.0.0.1:7000") }).is_err());
    }

    #[test]
    fn the_transport_can_be_named_apart() {
        let named = MessengerEndArgs { transport: Some("unix".into()), ..end("/run/x") };
        assert_eq!(set_up(&named).map(|(address, _)| address).ok(), Some(Address::Unix("/run/x".into())));
        let unknown = MessengerEndArgs { transport: Some("pigeon".into()), ..end("127.0.0.1:1") };
        assert!(set_up(&unknown).is_err());
    }

    #[test]
    fn two_ends_in_one_process_are_measured() {
        let options = MessengerRunArgs {
            end: end("loopback:test"),
            size: 100,
            depth: 5,
            connections: 1,
            seconds: 0.01,
            one_way: false,
            lossy: false,
            every_us: 0,
            timeout: 30.0,
        };
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let report = reactor.block_on(measure(&options)).expect("it runs");
        assert!(report.messages > 0 && report.latency_us_p50 > 0.0 && report.server_cpu_us.is_some());
        assert!(render(&report).contains("messages/s"));
    }
}
