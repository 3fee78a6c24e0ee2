//! Operations that a client asks of the owner of the lock.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockRequest, Error, ErrorKind, LocalFuture, Method, ObjectBackend, ObjectName, Result, SnapId,
};
use forebay_image::{Image, Images, OperationProgress, OwnerOperation, OwnerOperations};
use forebay_reactor::{spawn, yield_now};

use crate::common::cluster::{OBJECT, POOL, cluster, create_and_open, kind, open, read, two_clients, write};
use crate::common::{bytes, pattern, run};

/// Returns the stored lock of an image, which names its owner.
pub async fn lock_of(backend: &Rc<dyn ObjectBackend>, image: &Image) -> Vec<u8> {
    let header = ObjectName::new(format!("rbd_header.{}", image.id()));
    let input = [&[1, 1, 12, 0, 0, 0, 8, 0, 0, 0][..], b"rbd_lock"].concat();
    let shared = backend.shared().expect("shared");
    shared.exec(&header, SnapId::HEAD, Method::new("lock", "get_info"), input).await.expect("the lock")
}

#[test]
fn the_lock_stays_where_it_is() {
    run(async {
        let cluster = cluster(1, 2);
        let (backends, [owner, other]) = two_clients(&cluster, 4 * OBJECT).await;
        write(&owner, 0, &pattern(1, 1000)).await;
        let lock = lock_of(&backends[0], &owner).await;
        let made = other.create_snapshot("one").await.expect("a snapshot");
        assert_eq!((&made.name[..], made.size), ("one", 4 * OBJECT));
        assert_eq!(kind(other.create_snapshot("one").await), Some(ErrorKind::Exists));
        write(&owner, 0, &pattern(2, 1000)).await;
        other.rename_snapshot("one", "two").await.expect("renamed");
        assert_eq!(kind(other.rename_snapshot("one", "two").await), Some(ErrorKind::NotFound));
        assert!(other.set_snapshot_protection("two", true).await.expect("protected"));
        assert!(!other.set_snapshot_protection("two", true).await.expect("protected"), "it was");
        assert_eq!(kind(other.remove_snapshot("two").await), Some(ErrorKind::Busy));
        assert!(other.set_snapshot_protection("two", false).await.expect("unprotected"));
        other.resize(6 * OBJECT, false, |_| {}).await.expect("resized");
        assert_eq!((owner.size(), other.size()), (6 * OBJECT, 6 * OBJECT));
        assert_eq!(kind(other.resize(OBJECT, false, |_| {}).await), Some(ErrorKind::Invalid));
        other.resize(2 * OBJECT, true, |_| {}).await.expect("resized");
        let then = open(&backends[1], "vm@two").await;
        assert!(read(&then, 0, 1000).await == pattern(1, 1000));
        then.close().await;
        other.remove_snapshot("two").await.expect("removed");
        assert_eq!((owner.snapshots(), other.snapshots()), (Vec::new(), Vec::new()));
        assert_eq!(kind(other.flatten(|_| {}).await), Some(ErrorKind::Invalid), "it has no parent");
        assert_eq!(lock_of(&backends[0], &owner).await, lock, "the lock has changed hands");
        // A write does take the lock.
        write(&other, 0, b"x").await;
        assert_ne!(lock_of(&backends[0], &owner).await, lock);
    });
}

/// A client that died without ending its watch delays every notification, and so the owner's response, for as long as its
/// watch lasts: the request is repeated after it was carried out.
#[test]
fn an_operation_that_was_carried_out_in_silence_is_complete() {
    run(async {
        let cluster = cluster(3, 1);
        let (backends, [owner, other]) = two_clients(&cluster, 4 * OBJECT).await;
        write(&owner, 0, b"held").await;
        owner.create_snapshot("one").await.expect("a snapshot");
        let lock = lock_of(&backends[0], &owner).await;
        let third = cluster.client();
        let _watching = open(&third.pool(POOL), "vm").await;
        third.die();
        other.rename_snapshot("one", "two").await.expect("renamed");
        cluster.expire_watches();
        assert_eq!(kind(other.rename_snapshot("two", "two").await), Some(ErrorKind::Exists));
        assert_eq!(lock_of(&backends[0], &owner).await, lock, "the lock has changed hands");
    });
}

#[test]
fn a_clone_is_flattened_by_its_owner() {
    run(async {
        let cluster = cluster(2, 3);
        let backends = [cluster.client().pool(POOL), cluster.client().pool(POOL)];
        let content = pattern(7, 5 * OBJECT as usize);
        let base = create_and_open(&backends[0], "base", 5 * OBJECT).await;
        write(&base, 0, &content).await;
        base.create_snapshot("gold").await.expect("a snapshot");
        let images = Images::of(&backends[0]);
        images.clone_from(&images, "base@gold", "vm", &Default::default()).await.expect("cloned");
        let [owner, other] = [open(&backends[0], "vm").await, open(&backends[1], "vm").await];
        owner.take_lock().await.expect("taken");
        let lock = lock_of(&backends[0], &owner).await;
        other.flatten(|_| {}).await.expect("flattened");
        assert_eq!(lock_of(&backends[0], &owner).await, lock);
        base.remove_snapshot("gold").await.expect("nothing needs it any more");
        for image in [&owner, &other] {
            assert!(read(image, 0, 5 * OBJECT).await == content);
        }
    });
}

/// A layer above an image that takes part in operations.
struct Layer {
    image: Rc<Image>,
    seen: RefCell<Vec<OwnerOperation>>,
    fails: Cell<Option<ErrorKind>>,
}

impl OwnerOperations for Layer {
    fn perform(&self, operation: OwnerOperation, progress: OperationProgress) -> LocalFuture<Result<()>> {
        self.seen.borrow_mut().push(operation.clone());
        let (image, fails) = (self.image.clone(), self.fails.take());
        Box::pin(async move {
            match fails {
                Some(kind) => Err(Error::new(kind, "as the test wants")),
                None => image.perform(operation, progress).await,
            }
        })
    }
}

#[test]
fn a_layer_above_takes_part() {
    run(async {
        let cluster = cluster(3, 1);
        let (backends, [owner, other]) = two_clients(&cluster, 4 * OBJECT).await;
        owner.take_lock().await.expect("taken");
        let _kept = owner.keep_lock();
        let layer = Rc::new(Layer { image: owner.clone(), seen: RefCell::default(), fails: Cell::default() });
        owner.set_operations(layer.clone());
        other.create_snapshot("s").await.expect("a snapshot");
        assert_eq!(*layer.seen.borrow(), [OwnerOperation::CreateSnapshot { name: "s".into() }]);
        for wanted in [ErrorKind::Busy, ErrorKind::NoSpace, ErrorKind::NotFound] {
            layer.fails.set(Some(wanted));
            assert_eq!(kind(other.create_snapshot("t").await), Some(wanted));
        }
        // Who does not carry it out is asked for the lock, which this owner keeps.
        layer.fails.set(Some(ErrorKind::Unsupported));
        assert_eq!(kind(other.create_snapshot("t").await), Some(ErrorKind::Busy));
        assert_eq!(owner.snapshots().len(), 1);
        drop(_kept);
        layer.fails.set(Some(ErrorKind::Unsupported));
        let lock = lock_of(&backends[0], &owner).await;
        other.create_snapshot("t").await.expect("a snapshot");
        assert_ne!(lock_of(&backends[0], &owner).await, lock, "the other has done it itself");
        assert_eq!(owner.snapshots().len(), 2);
    });
}

/// A request that is sent again, because its answer was lost, is carried out once.
#[test]
fn a_repeated_request_is_one() {
    run(async {
        let cluster = cluster(4, 0);
        let (backends, [owner, other]) = two_clients(&cluster, 4 * OBJECT).await;
        owner.take_lock().await.expect("taken");
        let shared = backends[1].shared().expect("shared");
        let header = ObjectName::new(format!("rbd_header.{}", owner.id()));
        // A snapshot, as librbd 16.2 asks for it; then the same again, and one of another number.
        let request = |number: u64| {
            let user = [1, 1, 4, 0, 0, 0, 0, 0, 0, 0];
            let id = [4711_u64, 99, number].map(u64::to_le_bytes).concat();
            let body =
                [&8_u32.to_le_bytes()[..], &1_u32.to_le_bytes(), b"s", &user, &id, &0_u64.to_le_bytes()].concat();
            [&[7, 1][..], &(body.len() as u32).to_le_bytes(), &body].concat()
        };
        let ask = async |number| {
            let told = shared.notify(&header, request(number), Duration::from_secs(5)).await.expect("told");
            let answers: Vec<_> =
                told.answers.into_iter().map(|answer| answer.payload).filter(|a| !a.is_empty()).collect();
            assert_eq!(answers.len(), 1, "the owner alone answers");
            i32::from_le_bytes(answers[0][6..10].try_into().expect("4 bytes"))
        };
        assert_eq!(ask(1).await, 0);
        while owner.snapshots().is_empty() {
            yield_now().await;
        }
        assert_eq!(ask(1).await, 0, "the same result, not 'exists already'");
        assert_eq!(ask(2).await, 0, "accepted; it fails later");
        for _ in 0..1000 {
            yield_now().await;
        }
        assert_eq!(ask(2).await, -17, "its result is known by now");
        assert_eq!(other.snapshots().len(), 1);
    });
}

#[test]
fn a_snapshot_is_asked_for_under_writes() {
    for seed in 1..20 {
        run(async {
            let cluster = cluster(seed, 3);
            let (backends, [owner, other]) = two_clients(&cluster, 4 * OBJECT).await;
            let done = Rc::new(Cell::new(0_u8));
            let told = done.clone();
            let writer = owner.clone();
            let writing = spawn(async move {
                for version in 1..80_u8 {
                    // In two objects.
                    let request =
                        BlockRequest::Write { offset: OBJECT - 2048, data: bytes(&[version; 4096]), fua: false };
                    writer.submit(request).await.expect("a write");
                    told.set(version);
                }
            });
            let mut least = Vec::new();
            for number in 0..3 {
                let before = done.get();
                other.create_snapshot(&format!("s{number}")).await.expect("a snapshot");
                least.push(before);
            }
            writing.await;
            for (number, before) in least.into_iter().enumerate() {
                let then = open(&backends[1], &format!("vm@s{number}")).await;
                let found = read(&then, OBJECT - 2048, 4096).await;
                assert!(found.iter().all(|byte| *byte == found[0]), "seed {seed}: a torn write in s{number}");
                assert!(found[0] >= before, "seed {seed}: s{number} lacks a write that was complete");
            }
        });
    }
}
