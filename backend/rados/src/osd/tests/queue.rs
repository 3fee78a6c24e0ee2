//! Tests of a session whose send queue is full.

use forebay_messenger::wire::entity;
use forebay_messenger::{Address, Connection, Message, Messenger, MessengerOptions};
use forebay_reactor::sync::Notify;
use forebay_reactor::timeout;

use super::*;
use crate::osd::wire::kind;

/// Number of requests, more than a send queue has room for.
const REQUESTS: u64 = 20_000;
/// Time limit for all requests.
const PATIENCE: Duration = Duration::from_secs(60);

/// Requests that an OSD has received.
#[derive(Default)]
struct Received {
    tids: RefCell<Vec<u64>>,
    changed: Notify,
}

#[test]
fn requests_beyond_a_full_queue_are_sent_once_it_has_drained() {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let received = Rc::new(Received::default());
        let seen = received.clone();
        let handler = move |_: &Connection, message: Message| {
            if message.kind == kind::OSD_OP {
                seen.tids.borrow_mut().push(message.tid);
                seen.changed.notify_all();
            }
        };
        let options = MessengerOptions { entity: entity::OSD, nonce: Some(7), ..MessengerOptions::default() };
        let osd = Messenger::new(&MessengerCore::default(), options, handler);
        let bound = osd.bind(&"127.0.0.1:0".parse().expect("an address")).expect("bound");
        let Address::Tcp(socket) = bound else { panic!("a port of this machine, not {bound}") };
        let objecter = objecter_with_group_at(3, sample_with_osd(3, socket, 7));
        objecter.start(("admin".into(), Credentials::None), 1, &MessengerCore::default(), &settings());
        let _waiting: Vec<Answer> = (0..REQUESTS).map(|_| objecter.submit(change_in_group())).collect();
        let unsent = objecter.ops.filter_map(|_, op| (!op.sent).then_some(())).len();
        assert!(unsent > 0, "the queue has room for all: the test tests nothing");
        let all = received.changed.wait_until(|| received.tids.borrow().len() as u64 >= REQUESTS);
        timeout(PATIENCE, all).await.expect("all requests arrive");
        assert!(received.tids.borrow().iter().copied().eq(1..=REQUESTS), "once, in order");
        objecter.close();
        osd.shutdown();
    });
}
