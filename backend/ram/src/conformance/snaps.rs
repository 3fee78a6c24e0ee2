use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectBackend, ObjectOp, SnapContext, SnapId, Transaction};
use forebay_reactor::BufList;

use super::{TestSubject, pair, write, zero};

/// Test subject with the snapshots taken of it.
struct Snapped {
    it: TestSubject,
    snapc: SnapContext,
}

impl Snapped {
    fn new(backend: &Rc<dyn ObjectBackend>, object: &str) -> Self {
        Self { it: TestSubject::new(backend, object), snapc: SnapContext::empty() }
    }

    async fn snap(&mut self) -> SnapId {
        let snap = self.it.backend.snap_allocate().await.expect("a snapshot number");
        assert!(snap.0 > self.snapc.seq, "snapshot numbers grow");
        self.snapc.seq = snap.0;
        self.snapc.snaps.insert(0, snap);
        snap
    }

    async fn remove_snap(&mut self, snap: SnapId) {
        self.snapc.snaps.retain(|&other| other != snap);
        self.it.backend.snap_remove(snap).await.expect("the snapshot goes");
    }

    async fn run(&self, ops: Vec<ObjectOp>) {
        let text = format!("{ops:?} on {}", self.it.object);
        let transaction = Transaction::new(ops).with_snapc(Rc::new(self.snapc.clone()));
        if let Err(error) = self.it.submit(transaction).await {
            panic!("{text}: {error}");
        }
    }

    /// Returns the snapshots of each clone, oldest clone first.
    async fn clones(&self) -> Vec<Vec<SnapId>> {
        let set = self.it.backend.snap_set(&self.it.object).await.expect("the object is there");
        assert!(set.clones.windows(2).all(|pair| pair[0].id < pair[1].id), "clones oldest first");
        for clone in &set.clones {
            assert!(clone.snaps.windows(2).all(|pair| pair[0] > pair[1]), "snapshots newest first");
            assert!(clone.snaps.first().is_none_or(|&newest| newest <= clone.id));
            assert!(clone.id.0 <= set.seq);
        }
        set.clones.into_iter().map(|clone| clone.snaps).collect()
    }
}

pub(super) async fn first_write_keeps_a_clone(backend: Rc<dyn ObjectBackend>) {
    let mut at = Snapped::new(&backend, "clone");
    at.run(vec![write(0, b"one"), write(9000, b"far")]).await;
    let first = at.snap().await;
    assert_eq!(at.clones().await, [[]; 0], "no write has seen it");
    assert_eq!(at.it.bytes_at(first).await.len(), 9003, "the head stands for it");
    let refused = Transaction::new(vec![ObjectOp::AssertVersion(0), write(0, b"x")]);
    at.it.submit(refused.with_snapc(Rc::new(at.snapc.clone()))).await.expect_err("the guard does not hold");
    assert_eq!(at.clones().await, [[]; 0], "nor has a write that was refused");
    at.run(vec![write(0, b"two")]).await;
    at.run(vec![ObjectOp::Truncate { size: 3 }]).await;
    assert_eq!(at.clones().await, [[first]]);
    assert_eq!(at.it.bytes().await, b"two");
    assert_eq!(at.it.bytes_at(first).await[..3], *b"one");
    assert_eq!(at.it.bytes_at(first).await[9000..], *b"far");
    let second = at.snap().await;
    at.run(vec![zero(0, 1)]).await;
    assert_eq!(at.clones().await, [[first], [second]]);
    assert_eq!(at.it.bytes_at(second).await, b"two");
    assert_eq!(at.it.bytes().await, b"\0wo");
    let set = backend.snap_set(&at.it.object).await.expect("the object is there");
    assert!(set.head_exists && set.seq == second.0);
    assert_eq!(set.clones.iter().map(|clone| clone.size).collect::<Vec<_>>(), [9003, 3]);
}

pub(super) async fn snapshots_of_what_was_not_there(backend: Rc<dyn ObjectBackend>) {
    let mut at = Snapped::new(&backend, "later");
    let before = at.snap().await;
    at.run(vec![write(0, b"x")]).await;
    assert!(!at.it.exists(before).await, "created after the snapshot");
    at.run(vec![write(0, b"y")]).await;
    assert_eq!(at.clones().await, [[]; 0]);
    assert!(!at.it.exists(before).await);
}

pub(super) async fn a_removed_object_keeps_its_clones(backend: Rc<dyn ObjectBackend>) {
    let mut at = Snapped::new(&backend, "gone");
    at.run(vec![write(0, b"kept")]).await;
    let snap = at.snap().await;
    at.run(vec![ObjectOp::Remove]).await;
    assert!(!at.it.exists(SnapId::HEAD).await);
    assert_eq!(at.it.bytes_at(snap).await, b"kept");
    assert!(!backend.snap_set(&at.it.object).await.expect("a clone is left").head_exists);
    let names = backend.list(None, None, 10_000).await.expect("names").names;
    assert!(!names.contains(&at.it.object), "an object without a head is not listed");
    let again = at.it.run(vec![ObjectOp::Remove]).await;
    assert_eq!(again.map_err(|error| error.kind()), Err(ErrorKind::NotFound));
    // A re-created object starts empty, and the snapshot still shows the previous one.
    at.run(vec![ObjectOp::Create { exclusive: true }, write(1, b"!")]).await;
    assert_eq!(at.it.bytes().await, b"\0!");
    assert_eq!(at.it.bytes_at(snap).await, b"kept");
    assert_eq!(at.clones().await, [[snap]]);
}

pub(super) async fn rollback(backend: Rc<dyn ObjectBackend>) {
    let mut at = Snapped::new(&backend, "rollback");
    let before = at.snap().await;
    at.run(vec![write(0, b"first state"), ObjectOp::KvSet { pairs: vec![pair("k", "1")] }]).await;
    let first = at.snap().await;
    at.run(vec![ObjectOp::Rollback { snap: first }]).await;
    assert_eq!(at.it.bytes().await, b"first state", "to what the head still is");
    at.run(vec![write(0, b"SECOND"), ObjectOp::KvSet { pairs: vec![pair("k", "2"), pair("l", "2")] }]).await;
    let second = at.snap().await;
    at.run(vec![ObjectOp::Rollback { snap: first }]).await;
    assert_eq!(at.it.bytes().await, b"first state");
    assert_eq!(backend.kv_list(&at.it.object, b"", b"", 9).await.expect("keys").pairs, [pair("k", "1")]);
    assert_eq!(at.it.bytes_at(second).await, b"SECONDstate", "rolling back is a write, and keeps what was there");
    at.run(vec![write(0, b"third")]).await;
    assert_eq!(at.it.bytes_at(first).await, b"first state", "the clone is not the head");
    at.run(vec![ObjectOp::Rollback { snap: before }]).await;
    assert!(!at.it.exists(SnapId::HEAD).await, "it was not there then");
    at.run(vec![ObjectOp::Rollback { snap: second }]).await;
    assert_eq!(at.it.bytes().await, b"SECONDstate");
}

pub(super) async fn one_clone_for_many_snapshots(backend: Rc<dyn ObjectBackend>) {
    let mut at = Snapped::new(&backend, "many");
    at.run(vec![write(0, b"a")]).await;
    let (one, two, three) = (at.snap().await, at.snap().await, at.snap().await);
    at.run(vec![write(0, b"b")]).await;
    assert_eq!(at.clones().await, [[three, two, one]]);
    for snap in [one, two, three] {
        assert_eq!(at.it.bytes_at(snap).await, b"a");
    }
    at.remove_snap(three).await;
    for snap in [one, two] {
        assert_eq!(at.it.bytes_at(snap).await, b"a", "the clone stays for the others");
    }
    // A context older than the object's last one preserves nothing new.
    let old = SnapContext { seq: two.0, snaps: vec![two, one] };
    at.it.submit(Transaction::of(write(0, b"c")).with_snapc(Rc::new(old))).await.expect("an old context");
    at.it.must(vec![write(1, b"d")]).await;
    assert_eq!(at.it.bytes_at(two).await, b"a");
    assert_eq!(at.it.bytes().await, b"cd");
    assert_eq!(backend.snap_set(&at.it.object).await.expect("clones").clones.len(), 1);
}

pub(super) async fn removed_snapshots_go(backend: Rc<dyn ObjectBackend>) {
    let mut at = Snapped::new(&backend, "trim");
    at.run(vec![write(0, &[7; 8192])]).await;
    let one = at.snap().await;
    at.run(vec![ObjectOp::WriteFull { data: BufList::zeroes(1) }]).await;
    let two = at.snap().await;
    at.run(vec![ObjectOp::Remove]).await;
    let unused = at.snap().await;
    at.remove_snap(unused).await;
    at.remove_snap(one).await;
    assert_eq!(at.it.bytes_at(two).await, b"\0");
    at.remove_snap(two).await;
    // Clones are trimmed in the background; writes continue meanwhile, and a context that still names a removed
    // snapshot is harmless.
    let stale = SnapContext { seq: two.0, snaps: vec![two, one] };
    let again = Transaction::of(write(0, b"new")).with_snapc(Rc::new(stale));
    at.it.submit(again).await.expect("a stale context");
    assert_eq!(at.it.bytes().await, b"new");
    backend.snap_remove(two).await.expect("removing it twice changes nothing");
    let never = SnapId(at.snapc.seq + 1_000_000);
    let refused = backend.snap_remove(never).await;
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::NotFound));
}
