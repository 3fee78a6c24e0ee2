//! Messengers under cuts, delays, resets and restarts, and an oracle that knows what must arrive.
//!
//! Clients send numbered messages to a server, and the server to each of them.  Each message's content follows from its
//! number.  What the oracle demands:
//!
//! - in each direction and priority, what is delivered comes in order, and nothing comes twice;
//! - a message that was reported as delivered is delivered;
//! - as long as no side has lost its session, everything is delivered, and everybody is told so;
//! - a request is answered with what belongs to it;
//! - what was written into a window, or made durable, is there when the writer is told so, and nothing else is;
//! - in the end nothing is held, queued or waited for.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::wire::control::mode;
use forebay_messenger::{
    Address, Auth, Connection, DisconnectReason, Handler, Keyring, MemoryWindow, Message, MessageBudget, MessageRole,
    Messenger, MessengerCore, MessengerOptions, Policy, SendError, SharedKey, WindowDescriptor, WriteError,
};
use forebay_reactor::{Buf, BufList, sleep, spawn, timeout};

use super::{Failure, guarded};
use crate::faults::{Faults, MICRO, MILLI, NetFaults};
use crate::rng::{Rng, mix64};
use crate::world::World;

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MessengerTally {
    /// Number of runs.
    pub runs: u64,
    /// Messages delivered.
    pub delivered: u64,
    /// Requests that were replied to.
    pub answered: u64,
    /// Writes into windows that were completed, ...
    pub written: u64,
    /// ... and the times that some of it was made durable.
    pub persisted: u64,
    /// Streams that were lost and made again.
    pub resumed: u64,
    /// Sessions that were lost.
    pub resets: u64,
    /// Messages whose delivery is unknown.
    pub failed: u64,
    /// Servers restarted.
    pub restarts: u64,
    /// Runs in secure mode.
    pub secure: u64,
    /// Runs with lossy clients.
    pub lossy: u64,
}

impl MessengerTally {
    /// Adds another's.
    pub fn add(&mut self, other: &Self) {
        let Self { runs, delivered, answered, written, persisted, resumed, resets, failed, restarts, secure, lossy } =
            other;
        self.runs += runs;
        self.delivered += delivered;
        self.answered += answered;
        self.written += written;
        self.persisted += persisted;
        self.resumed += resumed;
        self.resets += resets;
        self.failed += failed;
        self.restarts += restarts;
        self.secure += secure;
        self.lossy += lossy;
    }
}

#[derive(Debug, Clone)]
struct Scenario {
    seed: u64,
    mode: u32,
    with_key: bool,
    lossy: bool,
    clients: usize,
    messages: u64,
    longest: u64,
    restarts: u64,
    tight: bool,
    net: NetFaults,
}

impl Scenario {
    fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let with_key = rng.coin();
        let severity = *rng.pick(&[0, 1_000, 10_000, 40_000]);
        let net = NetFaults {
            latency: 10 * MICRO..*rng.pick(&[50 * MICRO, MILLI, 20 * MILLI]),
            segment_max: *rng.pick(&[50, 1500, 64 * 1024]),
            window: *rng.pick(&[4_000, 64 * 1024, 256 * 1024]),
            partial_recv: true,
            refuse_ppm: *rng.pick(&[0, 100_000]),
            reset_ppm: if rng.coin() { severity } else { 0 },
            cut_ppm: if rng.coin() { severity / 4 } else { 0 },
            stall_ppm: *rng.pick(&[0, 5_000]),
            stall: MILLI..500 * MILLI,
        };
        // A connection must be able to live long enough for a handshake and a message.
        let longest = if net.segment_max < 1000 { 600 } else { *rng.pick(&[200, 5_000, 40_000]) };
        let net = if net.segment_max < 1000 {
            NetFaults { reset_ppm: net.reset_ppm / 20, cut_ppm: net.cut_ppm / 20, ..net }
        } else {
            net
        };
        Self {
            seed,
            mode: if with_key && rng.coin() { mode::SECURE } else { mode::CRC },
            with_key,
            lossy: rng.one_in(5),
            clients: 1 + rng.below(3) as usize,
            messages: 5 + rng.below(40),
            longest,
            restarts: if rng.one_in(3) { 1 + rng.below(2) } else { 0 },
            tight: rng.one_in(3),
            net,
        }
    }

    fn options(&self, name: &str) -> MessengerOptions {
        let key = |name: &str| SharedKey::new([name.as_bytes()[0]; 32]);
        let auth = if self.with_key {
            let keyring =
                (0..self.clients).fold(Keyring::new(), |ring, at| ring.with(client_name(at), key(&client_name(at))));
            Auth::SharedKey { name: name.into(), key: key(name), keyring: Rc::new(keyring) }
        } else {
            Auth::None
        };
        let (receive, send) = if self.tight {
            (MessageBudget { messages: 2, bytes: 8_000 }, MessageBudget { messages: 3, bytes: 10_000 })
        } else {
            (MessengerOptions::default().receive, MessengerOptions::default().send)
        };
        MessengerOptions {
            auth,
            modes: Some(vec![self.mode]),
            receive,
            send,
            handshake_timeout: Duration::from_secs(5),
            keepalive_interval: Duration::from_secs(1),
            keepalive_timeout: Duration::from_secs(3),
            frame_timeout: Duration::from_secs(10),
            backoff_min: Duration::from_millis(10),
            backoff_max: Duration::from_millis(500),
            ..MessengerOptions::default()
        }
    }
}

fn client_name(at: usize) -> String {
    char::from(b'a' + at as u8).to_string()
}

const KIND_NUMBERED: u16 = 7;
const KIND_ASKED: u16 = 8;
const KIND_ANSWER: u16 = 9;
/// Asks for a window; the answer has its place.
const KIND_OPEN: u16 = 10;
/// Bytes of a window.
const WINDOW: usize = 4096;

/// The content of message `number` in one direction of one client.
fn content(salt: u64, number: u64, longest: u64) -> Vec<u8> {
    let mix = mix64(salt ^ number.wrapping_mul(0x9e37));
    let len = mix % (longest + 1);
    (0..len).map(|at| (mix >> (at % 8 * 8)) as u8 ^ at as u8).collect()
}

fn message(salt: u64, number: u64, longest: u64) -> Message {
    let priority = match mix64(number ^ salt.rotate_left(9)) % 8 {
        0 => 196,
        1 => 64,
        _ => 127,
    };
    let bytes = content(salt, number, longest);
    let (middle, data) = bytes.split_at(bytes.len() / 5);
    let front: BufList = Buf::copy_of(&number.to_le_bytes()).into();
    let mut message = Message::new(KIND_NUMBERED).front(front).data(Buf::copy_of(data)).priority(priority);
    message.middle = Buf::copy_of(middle).into();
    message
}

/// One direction of one client, as the oracle sees it.
#[derive(Debug, Default)]
struct Direction {
    /// Last number delivered, by priority.
    last: BTreeMap<u16, u64>,
    delivered: BTreeMap<u64, ()>,
    told: BTreeMap<u64, bool>,
    pushed: u64,
}

#[derive(Default)]
struct Oracle {
    /// By client, to the server (0) and to the client (1).
    directions: RefCell<BTreeMap<(usize, usize), Direction>>,
    wrong: RefCell<Option<String>>,
    tally: RefCell<MessengerTally>,
    session_lost: Cell<bool>,
    /// The newest window of each client, as its owner has it.
    windows: RefCell<BTreeMap<usize, MemoryWindow>>,
    /// Messages of it that were made durable.
    durable: RefCell<BTreeMap<usize, Vec<u8>>>,
}

impl Oracle {
    /// Opens a window for a client, in place of the one before.
    fn open_window(self: &Rc<Self>, connection: &Connection, client: usize) -> WindowDescriptor {
        let window = connection.window(WINDOW).expect("memory");
        let (place, oracle) = (window.descriptor(), Rc::downgrade(self));
        window.on_persist(move |content, offset, len| {
            let oracle = oracle.clone();
            async move {
                sleep(Duration::from_micros(200)).await;
                let mut bytes = vec![0; len as usize];
                content.read(offset as usize, &mut bytes);
                let oracle = oracle.upgrade().expect("it outlives the run");
                let mut durable = oracle.durable.borrow_mut();
                let medium = durable.get_mut(&client).expect("it has a window");
                medium[offset as usize..][..bytes.len()].copy_from_slice(&bytes);
                Ok(())
            }
        });
        self.durable.borrow_mut().insert(client, vec![0; WINDOW]);
        let before = self.windows.borrow_mut().insert(client, window);
        drop(before);
        place
    }

    /// Holds what a client knows of its window's bytes against what is there.
    fn check_window(
        &self,
        client: usize,
        place: WindowDescriptor,
        known: &[Option<u8>],
        range: std::ops::Range<usize>,
    ) {
        let windows = self.windows.borrow();
        let Some(window) = windows.get(&client).filter(|window| window.descriptor() == place) else {
            return self.wrong(format!("client {client}: it is told of a window that is not there"));
        };
        let mut found = vec![0; WINDOW];
        window.read(0, &mut found);
        let differs = |found: &[u8], at: usize| known[at].is_some_and(|byte| byte != found[at]);
        if let Some(at) = (0..WINDOW).find(|&at| differs(&found, at)) {
            self.wrong(format!("client {client}: byte {at} of its window is not what it wrote"));
        }
        let durable = &self.durable.borrow()[&client];
        if let Some(at) = range.into_iter().find(|&at| differs(durable, at)) {
            self.wrong(format!("client {client}: byte {at} of its window is said to be durable, and is not"));
        }
    }

    fn wrong(&self, what: String) {
        self.wrong.borrow_mut().get_or_insert(what);
    }

    fn delivered(&self, client: usize, way: usize, salt: u64, longest: u64, message: &Message) {
        let front = message.front.to_vec();
        let Ok(number) = front.try_into().map(u64::from_le_bytes) else {
            return self.wrong(format!("client {client} way {way}: a front of {} bytes", message.front.len()));
        };
        let bytes = [message.middle.to_vec(), message.data.to_vec()].concat();
        if bytes != content(salt, number, longest) {
            self.wrong(format!("client {client} way {way}: message {number} has other content"));
        }
        let mut directions = self.directions.borrow_mut();
        let direction = directions.entry((client, way)).or_default();
        if direction.delivered.insert(number, ()).is_some() {
            self.wrong(format!("client {client} way {way}: message {number} came twice"));
        }
        let before = direction.last.insert(message.priority, number).unwrap_or(0);
        if before >= number {
            self.wrong(format!("client {client} way {way}: message {number} came after {before}"));
        }
        self.tally.borrow_mut().delivered += 1;
    }

    fn pushed(&self, client: usize, way: usize) -> u64 {
        let mut directions = self.directions.borrow_mut();
        let direction = directions.entry((client, way)).or_default();
        direction.pushed += 1;
        direction.pushed
    }

    fn told(&self, client: usize, way: usize, number: u64, result: &Result<(), SendError>, lossy: bool) {
        let mut directions = self.directions.borrow_mut();
        let direction = directions.entry((client, way)).or_default();
        direction.told.insert(number, result.is_ok());
        match result {
            // A lossy session only says that it was handed over.
            Ok(()) if !lossy && !direction.delivered.contains_key(&number) => {
                // It is in the peer's queue; that it is delivered is checked at the end.
            }
            Ok(()) => {}
            Err(SendError::Ended(_)) => self.tally.borrow_mut().failed += 1,
            Err(error) => self.wrong(format!("client {client} way {way}: message {number} is refused: {error}")),
        }
    }

    fn lost_session(&self) {
        self.session_lost.set(true);
        self.tally.borrow_mut().resets += 1;
    }

    /// Final checks, with nothing in flight.
    fn check(&self, lossy: bool) {
        let strict = !lossy && !self.session_lost.get();
        for ((client, way), direction) in &*self.directions.borrow() {
            for number in 1..=direction.pushed {
                let delivered = direction.delivered.contains_key(&number);
                match direction.told.get(&number) {
                    None => self.wrong(format!("client {client} way {way}: nothing was told of message {number}")),
                    // What a server had taken before it was restarted is gone with it.
                    Some(true) if !lossy && !delivered && !self.session_lost.get() => {
                        self.wrong(format!("client {client} way {way}: message {number} was acknowledged and is lost"));
                    }
                    Some(false) if strict => {
                        self.wrong(format!("client {client} way {way}: message {number} failed without a cause"));
                    }
                    _ => {}
                }
                if strict && !delivered {
                    self.wrong(format!("client {client} way {way}: message {number} is missing"));
                }
            }
        }
    }
}

/// Salt of a client's direction.
fn salt(seed: u64, client: usize, way: usize) -> u64 {
    mix64(seed ^ (client as u64) << 8 ^ way as u64)
}

struct ServerSide {
    oracle: Rc<Oracle>,
    scenario: Scenario,
}

/// The client that a message is from: its first message says so; here its data's salt is tried.
fn client_of(connection: &Connection, message: &Message, scenario: &Scenario) -> Option<usize> {
    if let Some(at) = (0..scenario.clients).find(|&at| client_name(at) == connection.name()) {
        return Some(at);
    }
    // Without authentication the type tells: each client has its own.
    usize::from(message.version).checked_sub(100).filter(|&at| at < scenario.clients)
}

impl Handler for ServerSide {
    fn message(&self, connection: &Connection, message: Message) {
        let Some(client) = client_of(connection, &message, &self.scenario) else {
            return self.oracle.wrong(format!("a message from nobody: {message:?}"));
        };
        match message.kind {
            KIND_NUMBERED => {
                let salt = salt(self.scenario.seed, client, 0);
                self.oracle.delivered(client, 0, salt, self.scenario.longest, &message);
                // It is kept for a while, as one that writes it to a disk would.
                if mix64(salt ^ message.len() as u64).is_multiple_of(3) {
                    drop(spawn(async move {
                        sleep(Duration::from_micros(300)).await;
                        drop(message);
                    }));
                }
            }
            KIND_ASKED => {
                if message.role != MessageRole::Request {
                    self.oracle.wrong(format!("not a request: {message:?}"));
                }
                let reply = message.reply(KIND_ANSWER).data(message.data.clone());
                let connection = connection.clone();
                drop(spawn(async move { connection.send(reply).await }));
            }
            KIND_OPEN => {
                let place = self.oracle.open_window(connection, client);
                let reply = message.reply(KIND_ANSWER).front(Buf::copy_of(&place.encode()));
                let connection = connection.clone();
                drop(spawn(async move { connection.send(reply).await }));
            }
            _ => self.oracle.wrong(format!("an unknown message: {message:?}")),
        }
    }

    fn opened(&self, connection: &Connection) {
        if connection.name().is_empty() {
            return;
        }
        let Some(client) = (0..self.scenario.clients).find(|&at| client_name(at) == connection.name()) else {
            return self.oracle.wrong(format!("nobody is called {}", connection.name()));
        };
        // As many again for the client, a few each time that it comes.
        let (oracle, scenario, connection) = (self.oracle.clone(), self.scenario.clone(), connection.clone());
        drop(spawn(async move {
            let left = |oracle: &Oracle| {
                let directions = oracle.directions.borrow();
                let pushed = directions.get(&(client, 1)).map_or(0, |direction| direction.pushed);
                scenario.messages.saturating_sub(pushed).min(7)
            };
            for _ in 0..left(&oracle) {
                let number = oracle.pushed(client, 1);
                let message = message(salt(scenario.seed, client, 1), number, scenario.longest);
                let lossy = connection.policy().is_lossy();
                let (oracle, connection) = (oracle.clone(), connection.clone());
                let deliver = spawn(async move {
                    let result = connection.deliver(message).await;
                    oracle.told(client, 1, number, &result, lossy);
                });
                // In order: queued one behind the other.
                drop(deliver);
            }
        }));
    }

    fn lost(&self, connection: &Connection, reason: &DisconnectReason) {
        if !connection.policy().is_lossy() {
            if *reason != DisconnectReason::Reset && *reason != DisconnectReason::Closed {
                self.oracle.wrong(format!("a lossless session is lost: {reason}"));
            }
            self.oracle.lost_session();
        }
    }
}

struct ClientSide {
    oracle: Rc<Oracle>,
    scenario: Scenario,
    client: usize,
}

impl Handler for ClientSide {
    fn message(&self, _connection: &Connection, message: Message) {
        let salt = salt(self.scenario.seed, self.client, 1);
        self.oracle.delivered(self.client, 1, salt, self.scenario.longest, &message);
    }

    fn interrupted(&self, _connection: &Connection, _reason: &DisconnectReason) {
        self.oracle.tally.borrow_mut().resumed += 1;
    }

    fn reset(&self, _connection: &Connection) {
        self.oracle.lost_session();
    }

    fn lost(&self, connection: &Connection, reason: &DisconnectReason) {
        if !connection.policy().is_lossy() {
            self.oracle.wrong(format!("a lossless connection is lost: {reason}"));
        }
    }
}

/// A server, as it is started and started again.
async fn start_server(oracle: &Rc<Oracle>, scenario: &Scenario, core: &MessengerCore, address: &Address) -> Messenger {
    let side = ServerSide { oracle: oracle.clone(), scenario: scenario.clone() };
    let server = Messenger::new(core, scenario.options("server"), side);
    while server.bind(address).is_err() {
        sleep(Duration::from_millis(1)).await;
    }
    server
}

/// Everything that one client does.
async fn client(
    oracle: Rc<Oracle>,
    scenario: Scenario,
    core: MessengerCore,
    address: Address,
    at: usize,
    mut rng: Rng,
) {
    let side = ClientSide { oracle: oracle.clone(), scenario: scenario.clone(), client: at };
    let messenger = Messenger::new(&core, scenario.options(&client_name(at)), side);
    let policy = if scenario.lossy { Policy::LossyClient } else { Policy::LosslessPeer };
    let mut connection = messenger.connect(&address, policy);
    let mut waiting = Vec::new();
    if rng.coin() {
        waiting.push(spawn(writer(oracle.clone(), connection.clone(), scenario.clone(), at, rng.fork())));
    }
    for _ in 0..scenario.messages {
        if connection.reason().is_some() && connection.state() == forebay_messenger::ConnectionState::Closed {
            // Lossy: its user reconnects.
            sleep(Duration::from_millis(50)).await;
            connection = messenger.connect(&address, policy);
        }
        let number = oracle.pushed(at, 0);
        let mut message = message(salt(scenario.seed, at, 0), number, scenario.longest);
        message.version = 100 + at as u16;
        let (told, deliver) = (oracle.clone(), connection.clone());
        waiting.push(spawn(async move {
            let result = deliver.deliver(message).await;
            told.told(at, 0, number, &result, scenario.lossy);
        }));
        if rng.one_in(5) {
            let data = content(rng.bits(), number, scenario.longest.min(3000));
            let mut asked = Message::new(KIND_ASKED).data(Buf::copy_of(&data));
            asked.version = 100 + at as u16;
            let (told, asking) = (oracle.clone(), connection.clone());
            waiting.push(spawn(async move {
                match asking.request(asked).await {
                    Ok(reply) if reply.kind == KIND_ANSWER && reply.data.to_vec() == data => {
                        told.tally.borrow_mut().answered += 1;
                    }
                    Ok(reply) => told.wrong(format!("client {at}: a wrong answer: {reply:?}")),
                    Err(SendError::Ended(_)) => {}
                    Err(error) => told.wrong(format!("client {at}: a request is refused: {error}")),
                }
            }));
        }
        if rng.one_in(3) {
            sleep(Duration::from_micros(rng.below(20_000))).await;
        }
    }
    for one in waiting {
        one.await;
    }
    // What the server still has for us comes, and is acknowledged.
    sleep(Duration::from_secs(2)).await;
    if !scenario.lossy {
        let idle = || connection.pending() == MessageBudget { messages: 0, bytes: 0 };
        while !idle() {
            sleep(Duration::from_millis(10)).await;
        }
    }
    drop(connection);
    CLIENTS.with_borrow_mut(|clients| clients.push(messenger));
}

thread_local! {
    /// Clients stay until all is checked, so that none is missed while the server still sends to it.
    static CLIENTS: RefCell<Vec<Messenger>> = const { RefCell::new(Vec::new()) };
}

/// Writes into a window of the server's, and has some of it made durable, one after the other.
async fn writer(oracle: Rc<Oracle>, connection: Connection, scenario: Scenario, at: usize, mut rng: Rng) {
    let mut known = vec![None; WINDOW];
    let mut place = None;
    for _ in 0..scenario.messages {
        if connection.state() == forebay_messenger::ConnectionState::Closed {
            return;
        }
        let Some(window) = place else {
            let mut open = Message::new(KIND_OPEN);
            open.version = 100 + at as u16;
            if let Ok(reply) = connection.request(open).await {
                place = WindowDescriptor::decode(&reply.front.to_vec()).ok();
                known = vec![Some(0); WINDOW];
            }
            continue;
        };
        let len = 1 + rng.below(scenario.longest.min(1500)) as usize;
        let offset = rng.below((WINDOW - len) as u64 + 1) as usize;
        let range = offset..offset + len;
        let result = if rng.one_in(4) {
            let result = connection.persist(window, offset as u64, len as u64).await;
            if result.is_ok() {
                oracle.check_window(at, window, &known, range);
                oracle.tally.borrow_mut().persisted += 1;
            }
            result
        } else {
            let bytes: Vec<u8> = (0..len).map(|_| rng.bits() as u8).collect();
            // Until it is said to be there it may or may not be.
            known[range.clone()].fill(None);
            let result = connection.write(window, offset as u64, Buf::copy_of(&bytes)).await;
            if result.is_ok() {
                known[range].iter_mut().zip(bytes).for_each(|(known, byte)| *known = Some(byte));
                oracle.check_window(at, window, &known, 0..0);
                oracle.tally.borrow_mut().written += 1;
            }
            result
        };
        match result {
            Ok(()) => {}
            // With the session the window is gone too.
            Err(WriteError::NoWindow(_) | WriteError::Send(SendError::Ended(_))) => place = None,
            Err(error) => oracle.wrong(format!("client {at}: a window is refused: {error}")),
        }
    }
}

async fn scene(world: &World, scenario: &Scenario, oracle: &Rc<Oracle>) -> Result<(), String> {
    let mut rng = Rng::new(mix64(scenario.seed ^ 0x6d73_6772));
    let address: Address = "127.0.0.1:3300".parse().expect("an address");
    let server_core = MessengerCore::default();
    let client_core = MessengerCore::default();
    let mut server = start_server(oracle, scenario, &server_core, &address).await;
    let clients: Vec<_> = (0..scenario.clients)
        .map(|at| {
            let parts = (oracle.clone(), scenario.clone(), client_core.clone(), address.clone());
            spawn(client(parts.0, parts.1, parts.2, parts.3, at, rng.fork()))
        })
        .collect();
    for _ in 0..scenario.restarts {
        sleep(Duration::from_micros(rng.below(400_000))).await;
        oracle.tally.borrow_mut().restarts += 1;
        oracle.lost_session();
        server.shutdown();
        if rng.coin() {
            world.reset_connections(None, 1_000_000);
        }
        sleep(Duration::from_micros(rng.below(100_000))).await;
        server = start_server(oracle, scenario, &server_core, &address).await;
    }
    // The storm ends; what it has broken must heal.
    let storm = Duration::from_millis(500 + rng.below(3000));
    sleep(storm).await;
    world.set_faults(Faults::none());
    let patience = Duration::from_secs(600);
    for one in clients {
        timeout(patience, one).await.map_err(|_| "a client does not come to its end".to_owned())?;
    }
    sleep(Duration::from_secs(5)).await;
    oracle.check(scenario.lossy);
    let nothing = MessageBudget { messages: 0, bytes: 0 };
    for (name, core) in [("the server", &server_core), ("the clients", &client_core)] {
        if core.held() != nothing {
            oracle.wrong(format!("{name} still hold {:?}", core.held()));
        }
    }
    for connection in server.connections() {
        if connection.pending() != nothing && !scenario.lossy {
            oracle.wrong(format!("{connection:?} still has {:?}", connection.pending()));
        }
    }
    server.shutdown();
    oracle.windows.take();
    CLIENTS.take().iter().for_each(Messenger::shutdown);
    sleep(Duration::from_secs(1)).await;
    if server.handshakes() != 0 {
        oracle.wrong(format!("{} handshakes are left", server.handshakes()));
    }
    Ok(())
}

/// One run, all of which follows from `seed`.
///
/// # Errors
/// What the oracle found.
pub fn run_messenger(seed: u64) -> Result<MessengerTally, Failure> {
    let scenario = Scenario::draw(seed);
    let faults = Faults { net: scenario.net.clone(), ..Faults::none() };
    let world = World::new(seed, faults);
    let about = format!("{scenario:#?}");
    let oracle = Rc::new(Oracle::default());
    let reactor = world.reactor();
    let result = guarded(&world, &about, || {
        let ran = world.run(&reactor, async {
            scene(&world, &scenario, &oracle).await?;
            match oracle.wrong.take() {
                Some(wrong) => Err(wrong),
                None => Ok(()),
            }
        });
        ran.map_err(|stop| format!("the world stopped: {stop:?}"))?
    });
    drop(CLIENTS.take());
    result?;
    let mut tally = *oracle.tally.borrow();
    tally.runs = 1;
    tally.secure = u64::from(scenario.mode == mode::SECURE);
    tally.lossy = u64::from(scenario.lossy);
    Ok(tally)
}

impl fmt::Debug for Oracle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Oracle({:?})", self.wrong.borrow())
    }
}
