//! Tests of the same exchange over every transport, on both system drivers.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_messenger::wire::control::mode;
use forebay_messenger::{
    Address, Auth, Connection, ConnectionState, DisconnectReason, Handler, Keyring, MemoryWindow, Message,
    MessageBudget, Messenger, MessengerCore, MessengerOptions, Policy, SendError, SharedKey, WindowDescriptor,
    WriteError,
};
use forebay_reactor::{Buf, BufList, DriverChoice, Reactor, random, spawn, timeout};

/// Replies with the received segments.
fn echo(connection: &Connection, message: Message) {
    let mut reply = message.reply(message.kind + 1).front(message.front.clone()).data(message.data.clone());
    reply.middle = message.middle.clone();
    let connection = connection.clone();
    drop(spawn(async move { connection.send(reply).await }));
}

fn quiet(_: &Connection, _: Message) {}

fn with_key(modes: Option<Vec<u32>>) -> MessengerOptions {
    let key = SharedKey::new([1; 32]);
    let keyring = Rc::new(Keyring::new().with("a", key.clone()));
    MessengerOptions { auth: Auth::SharedKey { name: "a".into(), key, keyring }, modes, ..MessengerOptions::default() }
}

fn addresses() -> Vec<Address> {
    let path = std::env::temp_dir().join(format!("forebay-messenger-{}-{:x}", std::process::id(), random()));
    let shm = Address::Shm(path.with_extension("shm"));
    vec!["127.0.0.1:0".parse().expect("an address"), Address::Unix(path), shm, Address::Loopback("here".into())]
}

/// Runs a test on both drivers, over each transport, in each mode.
fn everywhere<F: Future<Output = ()>>(test: impl Fn(Address, MessengerOptions) -> F) {
    for driver in [DriverChoice::Uring, DriverChoice::Poll] {
        let Ok(reactor) = Reactor::system(driver) else {
            // Where io_uring is forbidden, only the other driver is available.
            assert_eq!(driver, DriverChoice::Uring);
            continue;
        };
        reactor.block_on(async {
            for options in [
                MessengerOptions::default(),
                MessengerOptions { checksum: false, ..MessengerOptions::default() },
                with_key(Some(vec![mode::CRC])),
                with_key(Some(vec![mode::SECURE])),
            ] {
                for address in addresses() {
                    let one = test(address.clone(), options.clone());
                    timeout(Duration::from_secs(600), one).await.unwrap_or_else(|_| panic!("{address} in time"));
                    if let Address::Unix(path) | Address::Shm(path) = address {
                        // The socket file exists only where it was bound.
                        let _ = std::fs::remove_file(path);
                    }
                }
            }
        });
    }
}

fn bytes(len: usize, salt: usize) -> BufList {
    let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + at / 251 + salt) as u8).collect();
    bytes.chunks(30_001).map(Buf::copy_of).collect()
}

#[test]
fn requests_of_all_sizes_are_answered_in_all_modes() {
    everywhere(|address, options| async move {
        let core = MessengerCore::default();
        let server = Messenger::new(&core, options.clone(), echo);
        let address = server.bind(&address).expect("bound");
        let client = Messenger::new(&core, options, quiet);
        let connection = client.connect(&address, Policy::LosslessPeer);
        let asking: Vec<_> = [0, 1, 511, 513, 4096, 10_000, 65_536, 300_000, 2 << 20]
            .into_iter()
            .cycle()
            .take(18)
            .enumerate()
            .map(|(at, len)| {
                let connection = connection.clone();
                spawn(async move {
                    let mut message = Message::new(10).front(bytes(at * 13, 1)).data(bytes(len, at));
                    message.middle = bytes(at % 3 * 100, 2);
                    let reply = connection.request(message).await.expect("answered");
                    assert_eq!(reply.kind, 11);
                    assert!(reply.front == bytes(at * 13, 1).to_vec()[..]);
                    assert!(reply.middle == bytes(at % 3 * 100, 2).to_vec()[..]);
                    assert!(reply.data == bytes(len, at).to_vec()[..]);
                })
            })
            .collect();
        for one in asking {
            one.await;
        }
        assert_eq!(core.held(), MessageBudget { messages: 0, bytes: 0 });
        server.shutdown();
        client.shutdown();
    });
}

#[test]
fn one_messenger_is_reached_at_all_its_places() {
    everywhere(|address, options| async move {
        let core = MessengerCore::default();
        let server = Messenger::new(&core, options.clone(), echo);
        let bound = [&"127.0.0.1:0".parse().expect("an address"), &address].map(|at| server.bind(at).expect("bound"));
        let client = Messenger::new(&core, options, quiet);
        for address in bound {
            let connection = client.connect(&address, Policy::LosslessPeer);
            connection.request(Message::new(1)).await.expect("answered");
            assert!(address.to_string().starts_with(&format!("{}:", connection.transport())), "{address}");
        }
        server.shutdown();
        client.shutdown();
    });
}

#[test]
fn a_clients_own_numbers_go_to_all_its_peers() {
    everywhere(|address, options| async move {
        let core = MessengerCore::default();
        // Replies with the transaction ID of the request.
        let tell = |connection: &Connection, message: Message| {
            let tid = Buf::copy_of(&message.tid.to_le_bytes());
            connection.post(message.reply(2).front(tid)).expect("there is room");
        };
        let server = Messenger::new(&core, options.clone(), tell);
        let address = server.bind(&address).expect("bound");
        let client = Messenger::new(&core, options, quiet);
        let connections = [(); 2].map(|()| client.connect(&address, Policy::LosslessPeer));
        let mut asking = Vec::new();
        for at in 0..20 {
            let (connection, tid) = (connections[at % 2].clone(), client.next_tid());
            assert_eq!(tid, at as u64 + 1);
            asking.push(spawn(async move {
                // The connection's own numbers are there too.
                let (one, other) = (connection.request_as(tid, Message::new(1)), connection.request(Message::new(1)));
                let one = one.await.expect("answered");
                assert_eq!((one.tid, one.front.to_vec()), (tid, tid.to_le_bytes().to_vec()));
                assert_ne!(other.await.expect("answered").tid, tid);
            }));
        }
        for one in asking {
            one.await;
        }
        let [one, other] = connections;
        assert_eq!(one.request_as(0, Message::new(1)).await.err(), Some(SendError::Tid(0)));
        let again = one.clone();
        let first = spawn(async move { again.request_as(50, Message::new(1)).await });
        forebay_reactor::yield_now().await;
        if !first.is_finished() {
            assert_eq!(one.request_as(50, Message::new(1)).await.err(), Some(SendError::Tid(50)));
        }
        assert_eq!(other.request_as(50, Message::new(1)).await.expect("answered").tid, 50);
        assert_eq!(first.await.expect("answered").tid, 50);
        // It has ended, and may be sent again.
        assert_eq!(one.request_as(50, Message::new(1)).await.expect("answered").tid, 50);
        server.shutdown();
        client.shutdown();
    });
}

/// Opens a window of 100,000 bytes for each request, and keeps it in `windows`; ranges to persist are recorded in
/// `durable`.
fn opener(
    windows: Rc<RefCell<Vec<MemoryWindow>>>,
    durable: Rc<RefCell<Vec<(u64, u64)>>>,
) -> impl Fn(&Connection, Message) + 'static {
    move |connection, message| {
        let window = connection.window(100_000).expect("memory");
        if message.kind == 2 {
            let durable = durable.clone();
            window.on_persist(move |_, offset, len| {
                let durable = durable.clone();
                async move {
                    forebay_reactor::yield_now().await;
                    if offset == 99_999 {
                        return Err(std::io::Error::other("the medium is gone"));
                    }
                    durable.borrow_mut().push((offset, len));
                    Ok(())
                }
            });
        }
        connection.post(message.reply(1).front(Buf::copy_of(&window.descriptor().encode()))).expect("there is room");
        windows.borrow_mut().push(window);
    }
}

#[test]
fn a_peer_writes_into_a_window_and_no_further() {
    everywhere(|address, options| async move {
        let (windows, durable) = (Rc::default(), Rc::default());
        let core = MessengerCore::default();
        let server = Messenger::new(&core, options.clone(), opener(Rc::clone(&windows), Rc::clone(&durable)));
        let address = server.bind(&address).expect("bound");
        let client = Messenger::new(&core, options, quiet);
        let connection = client.connect(&address, Policy::LosslessPeer);
        let place = async |kind: u16| {
            let reply = connection.request(Message::new(kind)).await.expect("answered");
            WindowDescriptor::decode(&reply.front.to_vec()).expect("a place")
        };
        let (plain, lasting) = (place(1).await, place(2).await);
        assert!(plain != lasting && plain.len() == 100_000 && !connection.writes_one_sided());
        // Many at once, each to a part of its own.
        let writing: Vec<_> = (0..50u64)
            .map(|at| {
                let connection = connection.clone();
                spawn(async move { connection.write(lasting, at * 2000, bytes(1900, at as usize)).await })
            })
            .collect();
        for one in writing {
            one.await.expect("written");
        }
        let mut found = vec![0; 100_000];
        windows.borrow()[1].read(0, &mut found);
        for at in 0..50usize {
            assert!(bytes(1900, at) == found[at * 2000..at * 2000 + 1900], "part {at}");
            assert!(found[at * 2000 + 1900..(at + 1) * 2000].iter().all(|&byte| byte == 0), "behind part {at}");
        }
        assert_eq!(windows.borrow()[1].writes_by_message(), 50);
        windows.borrow()[0].read(0, &mut found);
        assert!(found.iter().all(|&byte| byte == 0), "the other one is as it was");
        // An empty write at the end succeeds; a write past the end fails.
        connection.write(plain, 100_000, BufList::new()).await.expect("nothing fits everywhere");
        let past = connection.write(plain, 99_999, bytes(2, 0)).await;
        assert_eq!(past, Err(WriteError::PastTheEnd { offset: 99_999, len: 2, window: 100_000 }));
        connection.persist(lasting, 10, 20).await.expect("durable");
        assert_eq!(*durable.borrow(), [(10, 20)]);
        assert_eq!(connection.persist(plain, 0, 1).await, Err(WriteError::NotDurable));
        assert_eq!(connection.persist(lasting, 99_999, 1).await, Err(WriteError::Failed("the medium is gone".into())));
        // A window ID is valid only on its connection, and no longer once the window is dropped.
        let other = client.connect(&address, Policy::LosslessPeer);
        assert!(matches!(other.write(plain, 0, bytes(1, 0)).await, Err(WriteError::NoWindow(_))));
        windows.borrow_mut().clear();
        assert!(matches!(connection.write(plain, 0, bytes(1, 0)).await, Err(WriteError::NoWindow(_))));
        assert_eq!(core.held(), MessageBudget { messages: 0, bytes: 0 });
        // Messages continue as before.
        connection.request(Message::new(1)).await.expect("answered");
        server.shutdown();
        client.shutdown();
    });
}

#[derive(Default)]
struct Counter {
    next: Cell<u64>,
}

struct InOrder(Rc<Counter>);

impl Handler for InOrder {
    fn message(&self, _connection: &Connection, message: Message) {
        let number = u64::from_le_bytes(message.front.to_vec().try_into().expect("8 bytes"));
        assert_eq!(number, self.0.next.replace(number + 1));
    }
}

#[test]
fn one_way_messages_come_in_order_and_senders_are_held_back() {
    everywhere(|address, options| async move {
        let options = MessengerOptions {
            receive: MessageBudget { messages: 50, bytes: 1 << 20 },
            send: MessageBudget { messages: 30, bytes: 1 << 20 },
            ..options
        };
        let counter = Rc::new(Counter::default());
        let (server_core, client_core) = (MessengerCore::default(), MessengerCore::default());
        let local = matches!(address, Address::Loopback(_));
        let server = Messenger::new(&server_core, options.clone(), InOrder(counter.clone()));
        let address = server.bind(&address).expect("bound");
        let client = Messenger::new(if local { &server_core } else { &client_core }, options, quiet);
        let connection = client.connect(&address, Policy::LosslessPeer);
        let number = |number: u64| Message::new(1).front(Buf::copy_of(&number.to_le_bytes())).data(Buf::zeroed(900));
        let mut sent = 0u64;
        // Without waiting, as many as fit.
        while connection.post(number(sent)).is_ok() {
            sent += 1;
        }
        assert!((30..=50).contains(&sent), "{sent} fit");
        assert_eq!(connection.post(number(sent)), Err(SendError::Full));
        for _ in 0..2000 {
            connection.send(number(sent)).await.expect("sent");
            sent += 1;
        }
        connection.deliver(number(sent)).await.expect("delivered");
        while counter.next.get() <= sent {
            forebay_reactor::yield_now().await;
        }
        assert!(connection.pending().messages == 0);
        server.shutdown();
        client.shutdown();
    });
}

#[test]
fn a_lossy_client_is_told_and_a_lossless_one_comes_back() {
    everywhere(|address, options| async move {
        if matches!(address, Address::Loopback(_)) {
            return;
        }
        let options = MessengerOptions { backoff_max: Duration::from_millis(50), ..options };
        let core = MessengerCore::default();
        let first = Messenger::new(&core, options.clone(), echo);
        let address = first.bind(&address).expect("bound");
        let client = Messenger::new(&core, options.clone(), quiet);
        let lossy = client.connect(&address, Policy::LossyClient);
        let lossless = client.connect(&address, Policy::LosslessPeer);
        for connection in [&lossy, &lossless] {
            connection.request(Message::new(1)).await.expect("answered");
        }
        first.shutdown();
        assert!(matches!(lossy.ended().await, DisconnectReason::PeerClosed | DisconnectReason::Io(..)));
        assert!(matches!(lossy.request(Message::new(1)).await, Err(SendError::Ended(_))));
        let second = loop {
            let second = Messenger::new(&core, options.clone(), echo);
            if second.bind(&address).is_ok() {
                break second;
            }
            forebay_reactor::yield_now().await;
        };
        // The server has dropped the session; requests pending at that time fail with `Reset`, and then the session
        // continues.
        loop {
            match lossless.request(Message::new(1)).await {
                Ok(_) => break,
                Err(SendError::Ended(DisconnectReason::Reset)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        assert_eq!(lossless.state(), ConnectionState::Open);
        second.shutdown();
        client.shutdown();
    });
}

#[test]
fn sessions_of_one_messenger_with_one_peer_are_apart() {
    everywhere(|address, options| async move {
        let core = MessengerCore::default();
        let server = Messenger::new(&core, options.clone(), echo);
        let address = server.bind(&address).expect("bound");
        let client = Messenger::new(&core, options, quiet);
        let connections: Vec<_> = (0..5).map(|_| client.connect(&address, Policy::LosslessPeer)).collect();
        for _ in 0..3 {
            for connection in &connections {
                connection.request(Message::new(1)).await.expect("answered");
            }
        }
        assert_eq!(server.connections().len(), 5);
        server.shutdown();
        client.shutdown();
    });
}

#[test]
fn nobody_at_an_address() {
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    reactor.block_on(async {
        let client = Messenger::new(&MessengerCore::default(), MessengerOptions::default(), quiet);
        for address in ["127.0.0.1:1", "unix:/nowhere/at/all", "loopback:nobody"] {
            let connection = client.connect(&address.parse().expect("an address"), Policy::LossyClient);
            assert!(matches!(connection.ready().await, Err(DisconnectReason::Io(..))), "{address}");
        }
        // A lossless connection keeps retrying, until it is closed or `give_up` has passed.
        let patient = client.connect(&"127.0.0.1:1".parse().expect("an address"), Policy::LosslessPeer);
        while patient.reason().is_none() {
            forebay_reactor::yield_now().await;
        }
        assert_eq!(patient.state(), ConnectionState::Connecting);
        patient.close();
        assert_eq!(patient.ended().await, DisconnectReason::Closed);
        let options = MessengerOptions { give_up: Some(Duration::from_millis(1)), ..MessengerOptions::default() };
        let hasty = Messenger::new(&MessengerCore::default(), options, quiet);
        let connection = hasty.connect(&"127.0.0.1:1".parse().expect("an address"), Policy::LosslessPeer);
        assert!(matches!(connection.ended().await, DisconnectReason::Io(..)));
    });
}
