//! Measuring a messenger: a server that answers, and clients that keep so many requests under way.
//!
//! `forebay perf messenger` and the benchmarks are built on it.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::{Buf, BufList, now, sleep, spawn, timeout, yield_now};

use crate::{Address, Connection, Message, Messenger, Options, Policy, Portal, SendError};

/// A request, which is answered with nothing in it.
const KIND_ASK: u16 = 1;
/// The answer.
const KIND_ANSWER: u16 = 2;
/// Asks how much processor time the server has used.
const KIND_USAGE: u16 = 3;
/// One-way: nothing is answered.
const KIND_PUSH: u16 = 4;

/// What one run does.
#[derive(Debug, Clone)]
pub struct Load {
    /// Bytes of data a request.
    pub size: usize,
    /// Requests under way on each connection.
    pub depth: usize,
    /// Connections.
    pub connections: usize,
    /// How long it is measured.
    pub time: Duration,
    /// Not measured, at first.
    pub warm_up: Duration,
    /// Nobody waits for answers: `depth` is how many are queued before the receiver has its turn.
    pub one_way: bool,
    /// Nothing is kept when a connection is lost: the run fails.
    pub lossy: bool,
    /// Each of those under way rests so long between an answer and its next request; zero for not at all.
    pub every: Duration,
    /// The run fails when for so long there is no connection, or no answer: a lossless peer would wait for ever.
    pub patience: Duration,
}

/// Why a run failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RunError {
    /// A connection ended, or could not be made.
    #[error(transparent)]
    Send(#[from] SendError),
    /// Nobody answered for as long as the load has patience.
    #[error("no answer for {} s", .0.as_secs_f64())]
    Silent(Duration),
}

/// What a run came to.
#[derive(Debug, Clone, Default)]
pub struct Outcome {
    /// Requests answered (or one-way messages sent).
    pub messages: u64,
    /// In this time.
    pub seconds: f64,
    /// Latencies in nanoseconds: how many in each bucket of [`bucket_nanos`].
    pub latencies: Vec<u64>,
    /// Processor time that the server says it used meanwhile, in nanoseconds.
    pub server_cpu_nanos: Option<u64>,
}

impl Outcome {
    /// One more request, which took so long.
    pub fn count(&mut self, nanos: u64) {
        let bucket = bucket(nanos);
        if self.latencies.len() <= bucket {
            self.latencies.resize(bucket + 1, 0);
        }
        self.messages += 1;
        self.latencies[bucket] += 1;
    }

    /// The latency in nanoseconds that this part of all requests did not exceed; 0 when there were none.
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

/// Buckets to a doubling.
const STEPS: u32 = 16;

fn bucket(nanos: u64) -> usize {
    let nanos = nanos.max(u64::from(STEPS));
    let exponent = nanos.ilog2();
    let step = (nanos >> (exponent - STEPS.ilog2())) as u32 - STEPS;
    ((exponent - STEPS.ilog2()) * STEPS + step) as usize
}

/// The upper end of a bucket of latencies, in nanoseconds.
pub fn bucket_nanos(bucket: usize) -> u64 {
    let (exponent, step) = (bucket as u32 / STEPS, bucket as u32 % STEPS);
    u64::from(STEPS + step + 1) << exponent
}

/// Answers requests; `cpu_nanos` says how much processor time the process has used.  For servers that do other things too:
/// false when it was none of these requests.
pub fn answer(connection: &Connection, message: &Message, cpu_nanos: impl Fn() -> u64) -> bool {
    let mut reply = match message.kind {
        KIND_ASK => message.reply(KIND_ANSWER),
        KIND_USAGE => message.reply(KIND_ANSWER).front(Buf::copy_of(&cpu_nanos().to_le_bytes())),
        kind => return kind == KIND_PUSH,
    };
    if let Ok(false) = connection.conn.offer(&mut reply, &mut None) {
        // A client with more requests under way than a queue holds: its reply waits for room.
        let connection = connection.clone();
        drop(spawn(async move { connection.send(reply).await }));
    }
    true
}

/// A server that answers requests; `cpu_nanos` says how much processor time its process has used.
///
/// # Errors
/// What binding brings.
pub fn serve(
    portal: &Portal,
    options: Options,
    address: &Address,
    cpu_nanos: impl Fn() -> u64 + 'static,
) -> io::Result<(Messenger, Address)> {
    let handler = move |connection: &Connection, message: Message| {
        answer(connection, &message, &cpu_nanos);
    };
    let server = Messenger::new(portal, options, handler);
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
/// When a connection cannot be made, or ends, or nobody answers for as long as the load has patience.
pub async fn run(portal: &Portal, options: Options, address: &Address, load: &Load) -> Result<Outcome, RunError> {
    let client = Messenger::new(portal, options, |_: &Connection, _: Message| {});
    let answers = Rc::new(Cell::new(0));
    // Who rests between requests has no answers meanwhile.
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
    load: &Load,
    answers: &Rc<Cell<u64>>,
) -> Result<Outcome, SendError> {
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
    let tally = Rc::new(RefCell::<Outcome>::default());
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
                    // The next one is asked at once.
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

/// Queues one-way messages, and lets whoever receives them have its turn.
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
        let outcome = Outcome { latencies, ..Outcome::default() };
        assert!((1000..1100).contains(&outcome.percentile(0.5)) && (5000..5400).contains(&outcome.percentile(1.0)));
    }

    #[test]
    fn a_run_counts_what_is_answered() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let portal = Portal::default();
            for address in ["127.0.0.1:0", "loopback:perf"] {
                let address = address.parse().expect("an address");
                let (server, address) = serve(&portal, Options::default(), &address, || 7).expect("bound");
                for one_way in [false, true] {
                    let load = Load {
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
                    let outcome = run(&portal, Options::default(), &address, &load).await.expect("it runs");
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
            let portal = Portal::default();
            let (server, address) =
                serve(&portal, Options::default(), &"127.0.0.1:0".parse().expect("an address"), || 7).expect("bound");
            let load = Load {
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
                // A pause after which the run is under way; if it is not, there is nobody to connect to at all.
                sleep(Duration::from_millis(20)).await;
                server.shutdown();
            });
            let outcome = run(&portal, Options::default(), &address, &load).await;
            assert_eq!(outcome.err(), Some(RunError::Silent(load.patience)));
            went.await;
        });
    }
}
