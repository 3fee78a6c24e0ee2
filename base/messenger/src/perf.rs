//! Messenger benchmark: a server that replies, and clients that keep a number of requests in flight.
//!
//! Base of `forebay perf messenger` and of the benchmarks.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{Buf, BufList, now, sleep, spawn, timeout, yield_now};

use crate::{Address, Connection, Message, Messenger, MessengerCore, MessengerOptions, Policy, SendError};

/// Request; answered by an empty reply.
const KIND_ASK: u16 = 1;
/// Empty reply to a request.
const KIND_ANSWER: u16 = 2;
/// Request for the processor time that the server has used.
const KIND_USAGE: u16 = 3;
/// One-way message; not answered.
const KIND_PUSH: u16 = 4;

/// Load of one run.
#[derive(Debug, Clone)]
pub struct PerfLoad {
    /// Data size of a request in bytes.
    pub size: usize,
    /// Requests in flight on each connection.
    pub depth: usize,
    /// Number of connections.
    pub connections: usize,
    /// Measured time.
    pub time: Duration,
    /// Warm-up time before the measurement.
    pub warm_up: Duration,
    /// One-way mode, without replies: `depth` is the number of messages queued before the receiver runs.
    pub one_way: bool,
    /// Lossy mode: no state is kept when a connection is lost, and the run fails.
    pub lossy: bool,
    /// Pause of each slot between a reply and its next request; zero for none.
    pub every: Duration,
    /// Timeout without a connection or a reply, after which the run fails; a lossless peer would wait indefinitely.
    pub patience: Duration,
}

/// Error that failed a run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// Connection that ended, or could not be established.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Timeout: no reply for as long as the load's `patience`.
    #[error("no reply for {} s", .0.as_secs_f64())]
    Silent(Duration),
}

/// Result of a run.
#[derive(Debug, Clone, Default)]
pub struct Measurement {
    /// Number of requests answered (or one-way messages sent).
    pub messages: u64,
    /// Measured time in seconds.
    pub seconds: f64,
    /// Latency histogram: number of requests in each bucket of [`bucket_nanos`].
    pub latencies: Vec<u64>,
    /// Processor time that the server reports for the run, in nanoseconds.
    pub server_cpu_nanos: Option<u64>,
}

impl Measurement {
    /// Records one more request with its latency in nanoseconds.
    pub fn count(&mut self, nanos: u64) {
        let bucket = bucket(nanos);
        if self.latencies.len() <= bucket {
            self.latencies.resize(bucket + 1, 0);
        }
        self.messages += 1;
        self.latencies[bucket] += 1;
    }

    /// Returns the latency in nanoseconds that the fraction `part` of all requests did not exceed; 0 when there were
    /// none.
    pub fn percentile(&self, part: f64) -> u64 {
        let total: u64 = self.latencies.iter().sum();
        let rank = (total as f64 * part).ceil() as u64;
        let mut seen = 0;
        for (bucket, &count) in self.latencies.iter().enumerate() {
            seen += count;
            if count > 0 && seen >= rank {
                return bucket_nanos(bucket);
            }
        }
        0
    }
}

/// Buckets per power of two.
const STEPS: u32 = 16;

fn bucket(nanos: u64) -> usize {
    let nanos = nanos.max(u64::from(STEPS));
    let exponent = nanos.ilog2();
    let step = (nanos >> (exponent - STEPS.ilog2())) as u32 - STEPS;
    ((exponent - STEPS.ilog2()) * STEPS + step) as usize
}

/// Returns the upper bound of a latency bucket, in nanoseconds.
pub fn bucket_nanos(bucket: usize) -> u64 {
    let (exponent, step) = (bucket as u32 / STEPS, bucket as u32 % STEPS);
    u64::from(STEPS + step + 1) << exponent
}

/// Answers a benchmark request; `cpu_nanos` returns the processor time that the process has used.  For servers that
/// also do other work: returns false if the message is not a benchmark request.
pub fn answer(connection: &Connection, message: &Message, cpu_nanos: impl Fn() -> u64) -> bool {
    let mut reply = match message.kind {
        KIND_ASK => message.reply(KIND_ANSWER),
        KIND_USAGE => message.reply(KIND_ANSWER).front(Buf::copy_of(&cpu_nanos().to_le_bytes())),
        kind => return kind == KIND_PUSH,
    };
    if let Ok(false) = connection.conn.offer(&mut reply, &mut None) {
        // A client has more requests in flight than the send queue admits: its reply waits.
        let connection = connection.clone();
        drop(spawn(async move { connection.send(reply).await }));
    }
    true
}

/// Starts a server that answers benchmark requests; `cpu_nanos` returns the processor time that its process has used.
///
/// # Errors
/// Errors of binding.
pub fn serve(
    core: &MessengerCore,
    options: MessengerOptions,
    address: &Address,
    cpu_nanos: impl Fn() -> u64 + 'static,
) -> io::Result<(Messenger, Address)> {
    let handler = move |connection: &Connection, message: Message| {
        answer(connection, &message, &cpu_nanos);
    };
    let server = Messenger::new(core, options, handler);
    let bound = server.bind(address)?;
    Ok((server, bound))
}

async fn usage(connection: &Connection) -> Option<u64> {
    let reply = connection.request(Message::new(KIND_USAGE)).await.ok()?;
    Some(u64::from_le_bytes(reply.front.to_vec().try_into().ok()?))
}

/// Runs a load against a server.
///
/// # Errors
/// When a connection cannot be established, or ends, or there is no reply for as long as the load's `patience`.
pub async fn run(
    core: &MessengerCore,
    options: MessengerOptions,
    address: &Address,
    load: &PerfLoad,
) -> Result<Measurement, RunError> {
    let client = Messenger::new(core, options, |_: &Connection, _: Message| {});
    let answers = Rc::new(Cell::new(0));
    // Slots that pause between requests receive no replies meanwhile.
    let patience = load.patience + 2 * load.every;
    let outcome = {
        let mut measuring = std::pin::pin!(measure(&client, address, load, &answers));
        loop {
            let before = answers.get();
            match timeout(patience, measuring.as_mut()).await {
                Ok(outcome) => break outcome.map_err(RunError::from),
                Err(_) if answers.get() == before => break Err(RunError::Silent(patience)),
                Err(_) => {}
            }
        }
    };
    client.shutdown();
    outcome
}

async fn measure(
    client: &Messenger,
    address: &Address,
    load: &PerfLoad,
    answers: &Rc<Cell<u64>>,
) -> Result<Measurement, SendError> {
    let policy = if load.lossy { Policy::LossyClient } else { Policy::LosslessPeer };
    let mut connections = Vec::new();
    for _ in 0..load.connections.max(1) {
        let connection = client.connect(address, policy);
        connection.ready().await.map_err(SendError::Ended)?;
        connections.push(connection);
    }
    let payload: BufList = Buf::copy_of(&vec![0xA5; load.size]).into();
    let measuring = Rc::new(Cell::new(false));
    let stop = Rc::new(Cell::new(false));
    let tally = Rc::new(RefCell::<Measurement>::default());
    let mut tasks = Vec::new();
    for connection in &connections {
        let lanes = if load.one_way { 1 } else { load.depth.max(1) };
        for _ in 0..lanes {
            let (connection, payload) = (connection.clone(), payload.clone());
            let (measuring, stop, tally) = (measuring.clone(), stop.clone(), tally.clone());
            let answers = answers.clone();
            let depth = load.one_way.then_some(load.depth.max(1));
            let every = load.every;
            tasks.push(spawn(async move {
                let mut begin = now();
                while !stop.get() {
                    if let Some(depth) = depth {
                        push(&connection, &payload, depth).await?;
                        answers.set(answers.get() + 1);
                        if measuring.get() {
                            tally.borrow_mut().messages += depth as u64;
                        }
                        continue;
                    }
                    if !every.is_zero() {
                        sleep(every).await;
                        begin = now();
                    }
                    connection.request(Message::new(KIND_ASK).data(payload.clone())).await?;
                    answers.set(answers.get() + 1);
                    // The next request is sent at once.
                    let end = now();
                    let nanos = end.since(std::mem::replace(&mut begin, end)).as_nanos() as u64;
                    if measuring.get() {
                        tally.borrow_mut().count(nanos);
                    }
                }
                Ok::<(), SendError>(())
            }));
        }
    }
    sleep(load.warm_up).await;
    let before = usage(&connections[0]).await;
    let begin = now();
    measuring.set(true);
    sleep(load.time).await;
    measuring.set(false);
    let seconds = begin.elapsed().as_secs_f64();
    let after = usage(&connections[0]).await;
    stop.set(true);
    for task in tasks {
        task.await?;
    }
    let mut outcome = std::mem::take(&mut *tally.borrow_mut());
    outcome.seconds = seconds;
    outcome.server_cpu_nanos = before.zip(after).map(|(before, after)| after.saturating_sub(before));
    Ok(outcome)
}

/// Queues one-way messages, and yields to the receiver.
async fn push(connection: &Connection, payload: &BufList, count: usize) -> Result<(), SendError> {
    for _ in 0..count {
        let message = Message::new(KIND_PUSH).data(payload.clone());
        match connection.post(message) {
            Ok(()) => {}
            Err(SendError::Full) => connection.send(Message::new(KIND_PUSH).data(payload.clone())).await?,
            Err(error) => return Err(error),
        }
    }
    yield_now().await;
    Ok(())
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor};

    use super::*;

    #[test]
    fn buckets_hold_what_they_say() {
        for nanos in [0, 1, 15, 16, 17, 31, 32, 33, 1000, 123_456_789, u64::MAX / 4] {
            let bucket = bucket(nanos);
            assert!(bucket_nanos(bucket) > nanos.saturating_sub(1));
            assert!(bucket == 0 || bucket_nanos(bucket - 1) <= nanos.max(16));
        }
        let mut latencies = vec![0; 200];
        latencies[bucket(1000)] = 99;
        latencies[bucket(5000)] = 1;
        let outcome = Measurement { latencies, ..Measurement::default() };
        assert!((1000..1100).contains(&outcome.percentile(0.5)) && (5000..5400).contains(&outcome.percentile(1.0)));
    }

    #[test]
    fn a_run_counts_what_is_answered() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let core = MessengerCore::default();
            for address in ["127.0.0.1:0", "loopback:perf"] {
                let address = address.parse().expect("an address");
                let (server, address) = serve(&core, MessengerOptions::default(), &address, || 7).expect("bound");
                for one_way in [false, true] {
                    let load = PerfLoad {
                        size: 3000,
                        depth: 10,
                        connections: 2,
                        time: Duration::from_millis(20),
                        warm_up: Duration::from_millis(5),
                        one_way,
                        lossy: !one_way,
                        every: if one_way { Duration::ZERO } else { Duration::from_micros(100) },
                        patience: Duration::from_secs(30),
                    };
                    let outcome = run(&core, MessengerOptions::default(), &address, &load).await.expect("it runs");
                    assert!(outcome.messages > 10 && outcome.seconds > 0.01);
                    assert_eq!(outcome.server_cpu_nanos, Some(0));
                    assert_eq!(one_way, outcome.percentile(0.5) == 0);
                }
                server.shutdown();
            }
        });
    }

    #[test]
    fn a_run_whose_server_goes_does_not_wait_for_ever() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let core = MessengerCore::default();
            let (server, address) =
                serve(&core, MessengerOptions::default(), &"127.0.0.1:0".parse().expect("an address"), || 7)
                    .expect("bound");
            let load = PerfLoad {
                size: 10,
                depth: 2,
                connections: 1,
                time: Duration::from_secs(600),
                warm_up: Duration::ZERO,
                one_way: false,
                lossy: false,
                every: Duration::ZERO,
                patience: Duration::from_millis(50),
            };
            let went = spawn(async move {
                // The run is in progress after this pause; otherwise there is no server to connect to at all.
                sleep(Duration::from_millis(20)).await;
                server.shutdown();
            });
            let outcome = run(&core, MessengerOptions::default(), &address, &load).await;
            assert_eq!(outcome.err(), Some(RunError::Silent(load.patience)));
            went.await;
        });
    }
}
