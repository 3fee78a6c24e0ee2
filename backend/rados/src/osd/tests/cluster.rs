//! Test cluster: one monitor, which sends the messages that a test specifies.

use std::time::Duration;

use forebay_block::{ObjectBackend, ObjectOp, SharedObjects, Transaction};
use forebay_messenger::wire::entity;
use forebay_messenger::{Address, Connection, Message, Messenger, MessengerOptions};
use forebay_reactor::sync::Notify;
use forebay_reactor::timeout;

use super::*;
use crate::cluster::RadosCluster;
use crate::config::CephConfig;
use crate::denc::ReaderExt;
use crate::map::Epoch;
use crate::map::tests::{change_to, osd_map_of};
use crate::monitor::wire::kind;

/// Version of the client section of maps that only readers of a later release understand.
const NEWER: (u8, u8) = (14, 11);

/// Time limit for expected messages.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests received by the monitor.
#[derive(Default)]
struct Asked {
    client: RefCell<Option<Connection>>,
    /// Start epochs of OSD map subscriptions, in order.
    from: RefCell<Vec<u64>>,
    changed: Notify,
}

/// Monitor of a cluster without authentication.
struct Monitor {
    messenger: Messenger,
    asked: Rc<Asked>,
}

/// Encodes a message with maps of OSDs: changes and whole maps, by epoch.
fn maps(changes: &[(Epoch, Vec<u8>)], wholes: &[(Epoch, Vec<u8>)]) -> Message {
    let mut out = PayloadWriter::new();
    out.raw(&[7; 16]);
    for maps in [changes, wholes] {
        out.u32(maps.len() as u32);
        for (epoch, map) in maps {
            out.u32(*epoch).blob(map);
        }
    }
    Message::new(kind::OSD_MAP).front(Buf::copy_of(&out.finish()))
}

/// Encodes a message with an empty monitor map, with the fsid of all maps here.
fn monitor_map() -> Message {
    let mut map = PayloadWriter::new();
    map.versioned(9, 6, |out| {
        out.raw(&[7; 16]).u32(1).raw(&[0; 16]);
        for _ in 0..2 {
            out.versioned(1, 1, |_| ());
        }
        out.u32(0);
    });
    let mut out = PayloadWriter::new();
    out.blob(&map.finish());
    Message::new(kind::MON_MAP).front(Buf::copy_of(&out.finish()))
}

/// Returns the start epoch of a subscription to OSD maps.
fn wanted(front: &[u8]) -> u64 {
    let mut from = PayloadReader::new(front, "a subscription");
    let wanted = from.vec(|from| Ok((from.text()?, from.u64()?, from.u8()?))).expect("a subscription");
    wanted.iter().find(|(name, ..)| name == "osdmap").expect("maps of OSDs").1
}

impl Monitor {
    /// Listens on a free local port; the first subscriber gets a map of epoch 12.
    fn start() -> (Self, SocketAddr) {
        let asked = Rc::new(Asked::default());
        let options = MessengerOptions { entity: entity::MON, ..MessengerOptions::default() };
        let seen = asked.clone();
        let handler = move |connection: &Connection, message: Message| {
            if message.kind != kind::MON_SUBSCRIBE {
                return;
            }
            if seen.client.replace(Some(connection.clone())).is_none() {
                connection.post(monitor_map()).expect("sent");
                connection.post(maps(&[], &[(12, osd_map_of(12, (10, 1)))])).expect("sent");
            }
            seen.from.borrow_mut().push(wanted(&message.front.to_vec()));
            seen.changed.notify_all();
        };
        let messenger = Messenger::new(&MessengerCore::default(), options, handler);
        let bound = messenger.bind(&"127.0.0.1:0".parse().expect("an address")).expect("bound");
        let Address::Tcp(socket) = bound else { panic!("a port of this machine, not {bound}") };
        (Self { messenger, asked }, socket)
    }

    fn send(&self, message: Message) {
        let client = self.asked.client.borrow();
        client.as_ref().expect("a client").post(message).expect("sent");
    }

    /// Waits until `times` subscriptions have arrived; returns their start epochs.
    async fn asked(&self, times: usize) -> Vec<u64> {
        let asked = self.asked.changed.wait_until(|| self.asked.from.borrow().len() >= times);
        let _ = timeout(PATIENCE, asked).await;
        self.asked.from.borrow().clone()
    }
}

/// Runs a test with a client of a cluster that has the pool 4 and no OSDs.
fn with_cluster<F: Future<Output = ()>>(test: impl Fn(Monitor, Rc<RadosCluster>) -> F) {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let (monitor, socket) = Monitor::start();
        let messenger = monitor.messenger.clone();
        let config = CephConfig {
            id: "admin".into(),
            credentials: Credentials::None,
            monitors: vec![socket],
            monitor_modes: Vec::new(),
            said: Said::default(),
            ask_monitors: false,
            connect_timeout: PATIENCE,
        };
        let cluster = RadosCluster::connect(config).await.expect("connected");
        test(monitor, cluster.clone()).await;
        cluster.close();
        messenger.shutdown();
    });
}

#[test]
fn a_change_from_a_newer_release_has_the_whole_map_asked_for() {
    with_cluster(|monitor, cluster| async move {
        assert_eq!((monitor.asked(1).await, cluster.map().epoch), (vec![0], 12));
        monitor.send(maps(&[(13, change_to(13, NEWER))], &[]));
        assert_eq!(monitor.asked(2).await, [0, 0], "a whole map, not the changes behind 12");
        assert_eq!(cluster.map().epoch, 12, "the one before stays");
        // The full map is unreadable, too: it is requested again after the next incremental map, not immediately.
        monitor.send(maps(&[], &[(13, osd_map_of(13, NEWER))]));
        monitor.send(maps(&[(14, change_to(14, NEWER))], &[]));
        assert_eq!(monitor.asked(3).await, [0, 0, 0]);
        // The map no longer uses the new encoding.
        monitor.send(maps(&[], &[(15, osd_map_of(15, (10, 1)))]));
        let came = cluster.objecter().changed.wait_until(|| cluster.map().epoch == 15);
        timeout(PATIENCE, came).await.expect("a map that is understood");
        assert_eq!(monitor.asked(3).await, [0, 0, 0], "nothing is missed");
    });
}

#[test]
fn requests_of_a_pool_that_is_marked_as_in_use_wait() {
    with_cluster(|_monitor, cluster| async move {
        let objecter = cluster.objecter();
        for seed in 0..32 {
            let pg = PgId { pool: 4, seed };
            let at_3 = PgTarget { pg, ..(*target_at(3)).clone() };
            objecter.current.set_target(Rc::new(at_3));
        }
        objecter.rejections.set_by_osd(3, &secure_only(3));
        let pool = cluster.pool("rbd").expect("a pool");
        let create = ObjectOp::Create { exclusive: true };
        let write = || pool.submit(&ObjectName::new("o"), Transaction::of(create.clone()));
        let failed = write().await.expect_err("nothing has answered");
        assert_eq!(failed.kind(), ErrorKind::Unsupported);
        pool.mark_in_use();
        let mut waiting = write();
        let polled = waiting.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "a host would get an error");
    });
}
