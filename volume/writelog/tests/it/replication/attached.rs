//! Volumes whose attached log has members, at several hosts of one image.

use std::cell::Cell;
use std::future::ready;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_messenger::Connection;
use forebay_reactor::{sleep, timeout};
use forebay_writelog::replication::{MemberKeeper, MemberState, PeerId, PrimarySet};
use forebay_writelog::{
    LogAttachment, LogId, LogKeeper, LogOptions, LogRecord, MediumKind, PeerAccess, PlaceChange, Shelf,
};

use super::{Host, Keeper, peer, with_hosts, with_media};
use crate::common::{LONG, MILLISECOND, patience, read, write};

/// Access of a host's attachment to the image.
pub(super) struct ImageKeeper(Rc<Host>);

/// Exclusive lock of a host, which another one may have broken.
pub(super) struct Hold(PeerId, Rc<Cell<Option<PeerId>>>);

impl Drop for Hold {
    fn drop(&mut self) {
        self.1.set(self.1.get().filter(|owner| *owner != self.0));
    }
}

impl LogKeeper for ImageKeeper {
    type Place = &'static str;
    type Lock = Hold;

    fn volume_id(&self) -> String {
        "one".into()
    }

    fn volume_name(&self) -> String {
        "pool/a".into()
    }

    fn load(&self) -> LocalFuture<Result<LogRecord<&'static str>>> {
        Box::pin(ready(Ok(self.0.image.log_record.borrow().clone())))
    }

    fn store(&self, record: LogRecord<&'static str>) -> LocalFuture<Result<()>> {
        self.0.image.log_record.replace(record);
        Box::pin(ready(Ok(())))
    }

    fn replace(&self, from: LogRecord<&'static str>, to: LogRecord<&'static str>) -> LocalFuture<Result<bool>> {
        let image = self.0.image.clone();
        Box::pin(async move {
            sleep(MILLISECOND).await;
            let same = *image.log_record.borrow() == from;
            if same {
                image.log_record.replace(to);
            }
            Ok(same)
        })
    }

    fn lock(&self) -> LocalFuture<Result<Hold>> {
        let (owner, own) = (self.0.image.owner.clone(), self.0.id);
        if owner.get().is_some_and(|owner| owner != own) {
            return Box::pin(ready(Err(Error::new(ErrorKind::Busy, "held by another host"))));
        }
        owner.set(Some(own));
        Box::pin(ready(Ok(Hold(own, owner))))
    }

    fn drain_changes(&self) -> LocalFuture<()> {
        Box::pin(ready(()))
    }

    fn shelf(&self, _place: &&'static str, _create: bool) -> LocalFuture<Result<Rc<Shelf>>> {
        Box::pin(ready(Ok(self.0.shelf.clone())))
    }

    fn log_size(&self, _place: &&'static str) -> u64 {
        1 << 20
    }

    fn options(&self, _place: &&'static str) -> LogOptions {
        patience()
    }

    fn compare(&self, is: &&'static str, wanted: &&'static str) -> PlaceChange {
        if is == wanted { PlaceChange::Same } else { PlaceChange::Other }
    }

    fn peers(&self) -> Option<Rc<dyn PeerAccess>> {
        Some(Rc::new(HostPeers(self.0.clone())))
    }

    fn wanted(&self, place: &&'static str) -> Vec<PeerId> {
        if [PLACE, MOVED].contains(place) { vec![peer(1), peer(2)] } else { Vec::new() }
    }

    fn shared_id(&self) -> String {
        "the image, for all".into()
    }

    fn moved(&self, place: &&'static str, shelf: &Rc<Shelf>, former: PeerId) -> &'static str {
        assert!(*place == PLACE && shelf.path() == self.0.shelf.path() && former != self.0.id);
        MOVED
    }

    fn client(&self) -> String {
        format!("client of {}", self.0.id)
    }

    fn fence(&self, client: &str) -> LocalFuture<Result<()>> {
        let image = &self.0.image;
        if image.cannot_fence.get() {
            return Box::pin(ready(Err(Error::new(ErrorKind::TimedOut, "no monitor answers"))));
        }
        image.fenced.borrow_mut().push(client.to_owned());
        image.owner.set(image.owner.get().filter(|owner| format!("client of {owner}") != client));
        Box::pin(ready(Ok(())))
    }
}

struct HostPeers(Rc<Host>);

impl PeerAccess for HostPeers {
    fn own(&self) -> PeerId {
        self.0.id
    }

    fn connection(&self, peer: PeerId) -> Option<Connection> {
        Keeper(self.0.clone()).connection(peer)
    }

    fn release_copy(&self, log: LogId) -> LocalFuture<Result<Option<Rc<Shelf>>>> {
        let host = self.0.clone();
        Box::pin(async move { Ok(host.replicas.give_up(&log).await) })
    }

    fn promise_over(&self, log: LogId, lease: Duration) -> LocalFuture<()> {
        let replicas = self.0.replicas.clone();
        Box::pin(async move { replicas.promise_over(&log, lease).await })
    }

    fn resume_copy(&self, log: LogId) {
        self.0.replicas.resume(&log);
    }
}

/// Place of a log that was taken over.
const MOVED: &str = "/logs:1M with a replica, moved";

/// Place of a log with a replica.
pub(super) const PLACE: &str = "/logs:1M with a replica";

pub(super) async fn attachment(host: &Rc<Host>) -> Result<LogAttachment<ImageKeeper>> {
    LogAttachment::open(Rc::new(ImageKeeper(host.clone())), host.image.base.clone()).await
}

/// Attaches a log with a replica; returns the volume, and the members once both copies are complete.
async fn attached(host: &Rc<Host>) -> (LogAttachment<ImageKeeper>, Rc<PrimarySet>) {
    let attachment = attachment(host).await.expect("opened");
    attachment.attach(&PLACE).await.expect("attached");
    let set = attachment.members().expect("members");
    has_two(&set).await;
    (attachment, set)
}

/// Waits until both copies are complete.
async fn has_two(set: &PrimarySet) {
    let filled = async {
        while set.record().complete().count() < 2 {
            sleep(MILLISECOND).await;
        }
    };
    timeout(LONG, filled).await.expect("filled");
}

/// Takes the log over from the primary that the record names.
pub(super) async fn take_over(host: &Rc<Host>) -> Result<LogAttachment<ImageKeeper>> {
    let log = host.image.log_record.borrow().log.clone();
    let term = log.and_then(|log| log.members).map_or(0, |members| members.term());
    LogAttachment::take_over(Rc::new(ImageKeeper(host.clone())), host.image.base.clone(), term).await
}

#[test]
fn a_takeover_from_another_primary_than_was_decided_about_is_refused() {
    with_hosts(3, async |_, hosts| {
        let [one, two, three] = &hosts[..] else { unreachable!("three hosts") };
        let (_at_one, set) = attached(one).await;
        let term = set.record().term();
        let at_two = take_over(two).await.expect("taken over");
        at_two.log().expect("a log").acquired().await.expect("its own");
        let fenced = one.image.fenced.borrow().len();
        let late = LogAttachment::take_over(Rc::new(ImageKeeper(three.clone())), one.image.base.clone(), term).await;
        assert_eq!(late.err().expect("refused").kind(), ErrorKind::Busy);
        assert_eq!(one.image.fenced.borrow().len(), fenced, "its primary is left alone");
    });
}

#[test]
fn a_volume_is_attached_taken_over_and_detached() {
    for media in [[MediumKind::Ssd; 2], [MediumKind::Pmem; 2], [MediumKind::Ssd, MediumKind::Pmem]] {
        attached_taken_over_and_detached(&media);
    }
}

/// Attaches a log at one host, lets another one take it over, and detaches it there.
fn attached_taken_over_and_detached(media: &[MediumKind]) {
    with_media(media, async |_, _, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let image = &one.image;
        let at_one = attachment(one).await.expect("opened");
        at_one.attach(&PLACE).await.expect("attached");
        let members = || image.log_record.borrow().log.as_ref().and_then(|log| log.members.clone()).expect("members");
        let has_two = async {
            while members().complete().count() < 2 {
                sleep(MILLISECOND).await;
            }
        };
        timeout(LONG, has_two).await.expect("filled");
        assert_eq!(image.log_record.borrow().epoch, members().epoch());
        at_one.device().submit(write(0, 7, 4096)).await.expect("written");
        // While its primary is another peer, nobody opens the volume without the log.
        let refused = attachment(two).await.err().expect("refused");
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        assert!(image.fenced.borrow().is_empty());
        // The primary is cut off, and knows nothing.
        one.server.shutdown();
        let at_two = take_over(two).await.expect("taken over");
        at_two.log().expect("a log").acquired().await.expect("its own");
        assert_eq!((image.owner.get(), members().primary()), (Some(two.id), two.id));
        assert_eq!(read(&*at_two.device(), 0, 4096).await[0], 7);
        at_two.device().submit(write(4096, 8, 4096)).await.expect("written");
        let late = timeout(LONG, at_one.device().submit(write(0, 9, 4096))).await.expect("answered");
        assert_eq!(late.expect_err("superseded").kind(), ErrorKind::Fenced);
        assert_eq!(at_two.recorded().map(|recorded| recorded.place), Some(MOVED), "with its new primary");
        assert_eq!(image.log_record.borrow().log.as_ref().map(|log| log.place), Some(MOVED));
        at_two.end(LONG).await.expect("detached");
        assert_eq!((image.log_record.borrow().log.is_none(), at_two.log().is_none()), (true, true));
        assert_eq!(two.shelf.ids(), [[0; 16]; 0]);
        let bytes = image.base.bytes.borrow();
        assert_eq!((bytes[0], bytes[4096]), (7, 8));
    });
}

#[test]
fn a_log_that_was_closed_is_taken_over_without_a_fence() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (at_one, _set) = attached(one).await;
        at_one.device().submit(write(0, 7, 4096)).await.expect("written");
        at_one.close().await.expect("closed");
        one.image.owner.set(None);
        let at_two = take_over(two).await;
        let at_two = at_two.expect("taken over");
        at_two.log().expect("a log").acquired().await.expect("its own");
        assert_eq!(*one.image.fenced.borrow(), [""; 0]);
        assert_eq!(read(&*at_two.device(), 0, 4096).await[0], 7);
        // The former primary gets a copy again: the one it had is of a former term, and out of use.
        let set = at_two.members().expect("members");
        has_two(&set).await;
    });
}

#[test]
fn a_primary_that_was_taken_over_closes_and_leaves_no_copy() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (at_one, set) = attached(one).await;
        at_one.device().submit(write(0, 7, 4096)).await.expect("written");
        let at_two = take_over(two).await;
        let at_two = at_two.expect("taken over");
        at_two.log().expect("a log").acquired().await.expect("its own");
        timeout(LONG, set.ended()).await.expect("it is told");
        assert!(set.is_fenced());
        let _ = at_one.close().await;
        assert_eq!(one.shelf.ids(), [[0; 16]; 0], "its own copy is of a former term");
        let again = at_two.members().expect("members");
        has_two(&again).await;
    });
}

#[test]
fn detaching_a_volume_discards_the_copies_of_its_log() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (at_one, set) = attached(one).await;
        drop(set);
        assert_eq!(two.shelf.ids().len(), 1);
        at_one.end(LONG).await.expect("detached");
        assert_eq!((one.shelf.ids().len(), two.shelf.ids().len()), (0, 0));
        assert_eq!(one.image.log_record.borrow().log, None);
    });
}

#[test]
fn a_takeover_that_fails_leaves_the_copy_to_its_primary() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (at_one, set) = attached(one).await;
        one.image.cannot_fence.set(true);
        let taken = take_over(two).await;
        assert_eq!(taken.err().expect("no fence").kind(), ErrorKind::TimedOut);
        // Its copy was closed for that, and follows the primary again.
        at_one.device().submit(write(0, 7, 4096)).await.expect("written");
        assert_eq!(set.record().complete().collect::<Vec<_>>(), [one.id, two.id]);
        let [own, other] = set.report()[..] else { panic!("two members") };
        assert!(own.is_primary && own.peer == one.id && own.is_connected && own.lag_entries == 0);
        assert_eq!((other.peer, other.state, other.lag_bytes), (two.id, MemberState::Complete, 0));
        assert_eq!(set.copies(), (2, 2));
    });
}

#[test]
fn a_primary_that_closed_its_log_opens_it_again() {
    with_hosts(2, async |_, hosts| {
        let [one, two] = &hosts[..] else { unreachable!("two hosts") };
        let (at_one, set) = attached(one).await;
        at_one.device().submit(write(0, 7, 4096)).await.expect("written");
        at_one.close().await.expect("closed");
        assert_eq!(set.record().client(), "client of 01010101010101010101010101010101");
        let members = one.image.log_record.borrow().log.as_ref().and_then(|log| log.members.clone());
        assert_eq!(members.expect("members").client(), "", "nothing is on its way");
        drop((at_one, set));
        let again = attachment(one).await.expect("opened again");
        again.log().expect("a log").acquired().await.expect("its own");
        assert!(one.image.fenced.borrow().is_empty(), "it is the same client still");
        assert_eq!(read(&*again.device(), 0, 4096).await[0], 7);
        again.device().submit(write(0, 8, 4096)).await.expect("written, here and there");
        let record = again.members().expect("members").record();
        assert_eq!(record.complete().collect::<Vec<_>>(), [one.id, two.id]);
    });
}
