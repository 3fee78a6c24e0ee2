//! Peers that describe themselves to each other.

use std::rc::Rc;

use forebay_messenger::{Address, Connection, Message, Messenger, MessengerCore, MessengerOptions, Policy};
use forebay_reactor::{sleep, timeout};
use forebay_sim::{Faults, World};
use forebay_writelog::MediumKind;
use forebay_writelog::replication::hello::{KIND_HELLO, PeerHello, ReplicaOffer};
use forebay_writelog::replication::{KnownPeers, PeerId, PeerUnknown};

use crate::common::{LONG, MILLISECOND};

/// Daemon that knows its peers.
struct Daemon {
    hello: PeerHello,
    peers: Rc<KnownPeers>,
    messenger: Messenger,
}

struct Answers(PeerHello, Rc<KnownPeers>);

impl forebay_messenger::Handler for Answers {
    fn message(&self, connection: &Connection, message: Message) {
        assert_eq!(message.kind, KIND_HELLO);
        self.1.answer(connection, &message, &self.0);
    }

    fn opened(&self, connection: &Connection) {
        self.1.opened(connection, &self.0);
    }

    fn lost(&self, connection: &Connection, _reason: &forebay_messenger::DisconnectReason) {
        self.1.forget(connection);
    }
}

impl Daemon {
    fn start(core: &MessengerCore, (id, boot): (u8, u8), host: &str) -> Self {
        let offers = vec![ReplicaOffer { medium: MediumKind::Ssd, quota: 100, free: u64::from(id) }];
        let hello = PeerHello { peer: PeerId([id; 16]), boot: [boot; 16], host: host.into(), offers };
        let peers = Rc::new(KnownPeers::new(hello.peer, hello.boot));
        let handler = Answers(hello.clone(), peers.clone());
        let messenger = Messenger::new(core, MessengerOptions::default(), handler);
        messenger.bind(&address(boot)).expect("an address");
        Self { hello, peers, messenger }
    }

    async fn knows(&self, count: usize) {
        let knows = async {
            while self.peers.list().len() != count {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, knows).await.expect("a description");
    }
}

fn address(boot: u8) -> Address {
    format!("loopback:daemon{boot}").parse().expect("an address")
}

fn in_a_world(test: impl AsyncFnOnce(MessengerCore)) {
    let world = World::new(1, Faults::none());
    let reactor = world.reactor();
    world.run(&reactor, async { test(MessengerCore::default()).await }).expect("it ends");
}

#[test]
fn both_sides_of_a_connection_know_each_other() {
    in_a_world(async |core| {
        let (one, two) = (Daemon::start(&core, (1, 1), "alpha"), Daemon::start(&core, (2, 2), "beta"));
        let link = one.messenger.connect(&address(2), Policy::LosslessPeer);
        one.knows(1).await;
        two.knows(1).await;
        assert_eq!(one.peers.list()[0].hello, two.hello);
        assert_eq!(two.peers.list()[0].hello, one.hello);
        for name in ["beta", "loopback:daemon2", "02020202", "02020202020202020202020202020202"] {
            assert_eq!(one.peers.find(name), Ok(PeerId([2; 16])), "{name}");
        }
        for name in ["", "0202020", "bet", "alpha"] {
            assert_eq!(one.peers.find(name), Err(PeerUnknown::NoSuch(name.into())), "{name}");
        }
        assert!(
            one.peers.connection(PeerId([2; 16])) == Some(link.clone())
                && one.peers.connection(PeerId([3; 16])).is_none()
        );
        assert_eq!((one.peers.host(PeerId([2; 16])), one.peers.host(PeerId([1; 16]))), (Some("beta".into()), None));
        two.messenger.shutdown();
        // Its session may be resumed, but it is not connected.
        one.knows(0).await;
        assert!(one.peers.connection(PeerId([2; 16])).is_none());
    });
}

#[test]
fn daemons_with_one_identity_are_told_apart_and_get_nothing() {
    in_a_world(async |core| {
        let (one, copy) = (Daemon::start(&core, (1, 1), "alpha"), Daemon::start(&core, (1, 9), "alpha"));
        let link = one.messenger.connect(&address(9), Policy::LosslessPeer);
        let described = async {
            while one.peers.described(&link).is_none() {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, described).await.expect("a description");
        assert!(one.peers.has_copied_identity(&link));
        assert_eq!(one.peers.list(), []);
        assert_eq!(one.peers.find("alpha"), Err(PeerUnknown::Own("alpha".into())));
        drop(copy);
    });
}

#[test]
fn neither_of_two_daemons_with_one_identity_is_a_peer() {
    in_a_world(async |core| {
        let one = Daemon::start(&core, (1, 1), "alpha");
        let others = [Daemon::start(&core, (2, 2), "beta"), Daemon::start(&core, (2, 3), "gamma")];
        let _first = one.messenger.connect(&address(2), Policy::LosslessPeer);
        one.knows(1).await;
        let _second = one.messenger.connect(&address(3), Policy::LosslessPeer);
        one.knows(0).await;
        assert!(one.peers.connection(others[0].hello.peer).is_none());
        // When one of them is gone, the other is a peer.
        others[0].messenger.shutdown();
        one.knows(1).await;
        assert_eq!(one.peers.list()[0].hello, others[1].hello);
    });
}

#[test]
fn a_name_that_several_have_is_refused() {
    in_a_world(async |core| {
        let one = Daemon::start(&core, (1, 1), "alpha");
        let others = [Daemon::start(&core, (2, 2), "beta"), Daemon::start(&core, (3, 3), "beta")];
        let _links = [2, 3].map(|boot| one.messenger.connect(&address(boot), Policy::LosslessPeer));
        one.knows(2).await;
        assert!(matches!(one.peers.find("beta"), Err(PeerUnknown::Several(_, all)) if all.contains("daemon3")));
        assert_eq!(one.peers.find("03030303"), Ok(others[1].hello.peer));
    });
}
