use std::collections::BTreeSet;
use std::rc::Rc;

use forebay_block::{
    Buf, BufList, ErrorKind, Extent, ExtentState, ObjectBackend, ObjectName, ObjectOp, ObjectRead, SnapContext, SnapId,
    Transaction,
};

use super::{TestSubject, pair, pattern, write, zero};

pub(super) async fn nothing_is_there(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "nothing");
    let kind = |error: forebay_block::Error| error.kind();
    assert_eq!(backend.read(&it.object, ObjectRead::head(0, 1)).await.map_err(kind).err(), Some(ErrorKind::NotFound));
    assert_eq!(backend.map(&it.object, ObjectRead::head(0, 1)).await.map_err(kind).err(), Some(ErrorKind::NotFound));
    assert_eq!(backend.stat(&it.object, SnapId::HEAD).await.map_err(kind), Err(ErrorKind::NotFound));
    assert_eq!(backend.kv_get(&it.object, vec![b"k".to_vec()]).await.map_err(kind), Err(ErrorKind::NotFound));
    assert_eq!(backend.kv_list(&it.object, b"", b"", 1).await.map_err(kind), Err(ErrorKind::NotFound));
    assert_eq!(backend.snap_set(&it.object).await.map_err(kind), Err(ErrorKind::NotFound));

    let fails = [
        (ObjectOp::AssertExists, ErrorKind::NotFound),
        (ObjectOp::AssertVersion(0), ErrorKind::Guard),
        (ObjectOp::Compare { offset: 3, data: Buf::copy_of(b"\0\0x").into() }, ErrorKind::Mismatch(2)),
        (ObjectOp::KvCompare { key: b"k".to_vec(), value: Some(vec![]) }, ErrorKind::Guard),
        (ObjectOp::Remove, ErrorKind::NotFound),
        (ObjectOp::KvRemove { keys: vec![b"k".to_vec()] }, ErrorKind::NotFound),
    ];
    for (op, expected) in fails {
        let text = format!("{op:?}");
        assert_eq!(it.run(vec![op]).await.map_err(kind), Err(expected), "{text} on an object that is not there");
    }
    it.must(vec![zero(0, 100)]).await;
    it.must(vec![ObjectOp::Truncate { size: 100 }]).await;
    it.must(vec![ObjectOp::Compare { offset: 3, data: BufList::zeroes(9000) }]).await;
    it.must(vec![ObjectOp::KvCompare { key: b"k".to_vec(), value: None }]).await;
    assert!(!it.exists(SnapId::HEAD).await, "none of this creates an object");
}

pub(super) async fn sparse_reads_and_writes(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "sparse");
    it.must(vec![write(10_000, b"hello")]).await;
    assert_eq!(it.size().await, 10_005);
    let mut expected = vec![0; 10_005];
    expected[10_000..].copy_from_slice(b"hello");
    assert_eq!(it.bytes().await, expected);
    // Across a boundary of any block size up to 4 KiB, and over existing data.
    it.must(vec![write(8190, b"abcd"), write(10_002, b"LP!!!!")]).await;
    expected[8190..8194].copy_from_slice(b"abcd");
    expected.truncate(10_002);
    expected.extend_from_slice(b"LP!!!!");
    assert_eq!(it.bytes().await, expected);
    for (offset, len) in [(0, 1), (8191, 2), (8000, 5000), (10_007, 1), (10_008, 1), (1 << 30, 4096), (5, 0)] {
        let extent = Extent::new(offset, len);
        let got = backend.read(&it.object, ObjectRead::new(SnapId::HEAD, extent)).await.expect("read");
        let end = got.runs.last().map_or(0, |(at, run)| at + run.len() as u64);
        assert!(end <= 10_008, "read past the end");
        let wanted: Vec<u8> = (offset..offset + len).map(|i| expected.get(i as usize).copied().unwrap_or(0)).collect();
        assert_eq!(got.fill(extent).to_vec(), wanted, "{len} bytes at {offset}");
    }
    // An empty write creates the object, and does not grow it.
    let empty = TestSubject::new(&backend, "sparse.empty");
    empty.must(vec![write(100, b"")]).await;
    assert_eq!(empty.bytes().await, b"");
}

pub(super) async fn write_full_replaces_bytes_and_keeps_keys(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "full");
    it.must(vec![ObjectOp::WriteFull { data: pattern(1, 20_000) }]).await;
    it.must(vec![ObjectOp::KvSet { pairs: vec![pair("k", "v")] }]).await;
    it.must(vec![ObjectOp::WriteFull { data: pattern(2, 5000) }]).await;
    assert_eq!(it.bytes().await, pattern(2, 5000).to_vec());
    it.must(vec![ObjectOp::WriteFull { data: BufList::new() }]).await;
    assert_eq!(it.bytes().await, b"");
    // Bytes beyond a shorter replacement must not reappear.
    it.must(vec![ObjectOp::Truncate { size: 20_000 }]).await;
    assert_eq!(it.bytes().await, vec![0; 20_000]);
    assert_eq!(backend.kv_get(&it.object, vec![b"k".to_vec()]).await.expect("keys"), [Some(b"v".to_vec())]);
}

pub(super) async fn zero_keeps_the_size(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "zero");
    let mut expected = pattern(7, 50_000).to_vec();
    it.must(vec![write(0, &expected)]).await;
    let runs =
        [(1, 1), (4096, 4096), (5000, 10_000), (20_479, 2), (30_000, 0), (49_999, 500), (60_000, 10), (40_960, 9040)];
    for (offset, len) in runs {
        it.must(vec![zero(offset, len)]).await;
        let end = (offset + len).min(50_000) as usize;
        expected[(offset as usize).min(end)..end].fill(0);
        assert_eq!(it.bytes().await, expected, "after zeroing {len} at {offset}");
    }
    it.must(vec![zero(0, 1 << 40)]).await;
    assert_eq!(it.bytes().await, vec![0; 50_000]);
}

pub(super) async fn truncate_cuts_and_grows(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "truncate");
    let mut expected = pattern(9, 30_000).to_vec();
    it.must(vec![write(0, &expected)]).await;
    for size in [29_999, 40_000, 12_288, 12_289, 8191, 30_000, 0, 10_000, 4096, 4096] {
        it.must(vec![ObjectOp::Truncate { size }]).await;
        expected.resize(size as usize, 0);
        assert_eq!(it.bytes().await, expected, "after truncating to {size}");
    }
    it.must(vec![write(5000, b"x")]).await;
    expected.resize(5000, 0);
    expected.push(b'x');
    assert_eq!(it.bytes().await, expected);
}

pub(super) async fn map_tells_holes_from_data(backend: Rc<dyn ObjectBackend>) {
    // Units of 64 KiB, which every backend can distinguish.
    const UNIT: u64 = 64 * 1024;
    let it = TestSubject::new(&backend, "map");
    it.must(vec![write(UNIT, &pattern(3, 2 * UNIT as usize).to_vec()), write(5 * UNIT, b"tail")]).await;
    it.must(vec![zero(UNIT, UNIT)]).await;
    let map = backend.map(&it.object, ObjectRead::head(0, 8 * UNIT)).await.expect("map");
    assert_eq!(map.runs().first().expect("a run").state, ExtentState::Hole);
    let at = |offset: u64| map.runs().iter().find(|run| run.extent.range().contains(&offset)).expect("covered").state;
    assert_ne!(at(UNIT), ExtentState::Data, "zeroed space is given back");
    assert_eq!(at(2 * UNIT), ExtentState::Data);
    assert_eq!(at(3 * UNIT), ExtentState::Hole);
    assert_eq!(at(5 * UNIT), ExtentState::Data);
    assert_eq!(at(7 * UNIT), ExtentState::Hole);
    let part = backend.map(&it.object, ObjectRead::head(2 * UNIT + 100, 50)).await.expect("map");
    assert_eq!(part.runs().len(), 1);
    assert_eq!(part.runs()[0].extent, Extent::new(2 * UNIT + 100, 50), "clipped to what was asked for");
    assert_eq!(backend.map(&it.object, ObjectRead::head(9, 0)).await.expect("map").runs(), []);
}

pub(super) async fn guards_undo_the_whole(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "guards");
    it.must(vec![write(0, b"0123456789"), ObjectOp::KvSet { pairs: vec![pair("k", "v")] }]).await;
    let version = backend.stat(&it.object, SnapId::HEAD).await.expect("stat").version;
    let compare = |offset, data: &[u8]| ObjectOp::Compare { offset, data: Buf::copy_of(data).into() };
    let has = |value: Option<&[u8]>| ObjectOp::KvCompare { key: b"k".to_vec(), value: value.map(<[u8]>::to_vec) };
    let fails = [
        (ObjectOp::AssertVersion(version + 1), ErrorKind::Guard),
        (compare(2, b"234x"), ErrorKind::Mismatch(3)),
        (compare(8, b"89\0x"), ErrorKind::Mismatch(3)),
        (compare(50_000, b"\x01"), ErrorKind::Mismatch(0)),
        (has(None), ErrorKind::Guard),
        (has(Some(b"w")), ErrorKind::Guard),
        (ObjectOp::Create { exclusive: true }, ErrorKind::Exists),
    ];
    for (guard, kind) in fails {
        let text = format!("{guard:?}");
        let ops = vec![guard, write(0, b"XXXX"), ObjectOp::KvSet { pairs: vec![pair("k", "x"), pair("l", "x")] }];
        assert_eq!(it.run(ops).await.map_err(|error| error.kind()), Err(kind), "{text}");
        assert_eq!(it.bytes().await, b"0123456789", "{text}");
        let keys = backend.kv_list(&it.object, b"", b"", 10).await.expect("keys").pairs;
        assert_eq!(keys, [pair("k", "v")], "{text}");
        let now = backend.stat(&it.object, SnapId::HEAD).await.expect("stat").version;
        assert_eq!(now, version, "{text}: a transaction that did nothing changed the version");
    }
    let holds = vec![
        ObjectOp::AssertExists,
        ObjectOp::AssertVersion(version),
        compare(8, b"89\0\0"),
        has(Some(b"v")),
        write(0, b"XXXX"),
        ObjectOp::KvSet { pairs: vec![pair("k", "x")] },
    ];
    let after = it.run(holds).await.expect("all guards hold");
    assert!(after > version);
    assert_eq!(backend.stat(&it.object, SnapId::HEAD).await.expect("stat").version, after);
    assert_eq!(it.bytes().await, b"XXXX456789");
}

pub(super) async fn a_failed_step_undoes_the_whole(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "undo");
    let refused = it.run(vec![write(0, b"a"), ObjectOp::Create { exclusive: true }]).await;
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::Exists));
    assert!(!it.exists(SnapId::HEAD).await, "a failed transaction created an object");
    it.must(vec![write(0, &[1; 9000])]).await;
    let ops = vec![write(4000, b"abc"), zero(0, 4096), ObjectOp::Truncate { size: 5000 }, ObjectOp::Remove];
    let refused = it.run([ops, vec![ObjectOp::AssertExists]].concat()).await;
    assert_eq!(refused.map_err(|error| error.kind()), Err(ErrorKind::NotFound));
    assert_eq!(it.bytes().await, [1; 9000]);
    // Steps are executed in order.
    it.must(vec![write(0, b"xyz"), ObjectOp::Remove, write(1, b"new"), ObjectOp::Truncate { size: 3 }]).await;
    assert_eq!(it.bytes().await, b"\0ne");
}

pub(super) async fn exclusive_create(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "create");
    it.must(vec![ObjectOp::Create { exclusive: false }]).await;
    it.must(vec![ObjectOp::Create { exclusive: false }]).await;
    assert_eq!(it.bytes().await, b"");
    let again = it.run(vec![ObjectOp::Create { exclusive: true }]).await;
    assert_eq!(again.map_err(|error| error.kind()), Err(ErrorKind::Exists));
    it.must(vec![ObjectOp::Remove]).await;
    it.must(vec![ObjectOp::Create { exclusive: true }, write(0, b"x")]).await;
    assert_eq!(it.bytes().await, b"x");
}

pub(super) async fn versions_grow(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "versions");
    let mut last = 0;
    for round in 0..3u8 {
        for ops in [vec![write(0, &[round])], vec![ObjectOp::KvSet { pairs: vec![pair("k", "v")] }]] {
            let version = it.run(ops).await.expect("a change");
            assert!(version > last, "version {version} after {last}");
            assert_eq!(backend.stat(&it.object, SnapId::HEAD).await.expect("stat").version, version);
            last = version;
        }
        let guarded = it.run(vec![ObjectOp::AssertVersion(last - 1), ObjectOp::Remove]).await;
        assert_eq!(guarded.map_err(|error| error.kind()), Err(ErrorKind::Guard));
        it.must(vec![ObjectOp::AssertVersion(last), ObjectOp::Remove]).await;
    }
}

pub(super) async fn keys_and_values(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "keys");
    let binary = (vec![0, 255, 0], vec![0; 300]);
    it.must(vec![ObjectOp::KvSet { pairs: vec![pair("b", "2"), pair("a", ""), binary.clone()] }]).await;
    assert_eq!(it.bytes().await, b"", "keys are not bytes");
    let get = async |keys: &[&[u8]]| {
        backend.kv_get(&it.object, keys.iter().map(|key| key.to_vec()).collect()).await.expect("keys")
    };
    let some = |value: &[u8]| Some(value.to_vec());
    assert_eq!(get(&[b"a", b"x", b"b", &binary.0]).await, [some(b""), None, some(b"2"), Some(binary.1)]);
    it.must(vec![
        ObjectOp::KvRemove { keys: vec![b"a".to_vec(), b"x".to_vec()] },
        ObjectOp::KvSet { pairs: vec![pair("b", "3"), pair("c", "4")] },
    ])
    .await;
    assert_eq!(get(&[b"a", b"b", b"c"]).await, [None, some(b"3"), some(b"4")]);
    assert_eq!(get(&[]).await, [] as [Option<Vec<u8>>; 0]);
    it.must(vec![ObjectOp::Remove]).await;
    it.must(vec![ObjectOp::Create { exclusive: true }]).await;
    assert_eq!(get(&[b"b"]).await, [None], "keys go with the object");
}

pub(super) async fn keys_in_pages(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "pages");
    let mut all = BTreeSet::new();
    for chunk in 0..5 {
        let pairs = (0..100).map(|i| pair(&format!("name_{:03}", (i * 37 + chunk * 13) % 500), "v"));
        let pairs: Vec<_> = pairs.chain([pair(&format!("id_{chunk}"), "i")]).collect();
        all.extend(pairs.iter().map(|(key, _)| key.clone()));
        it.must(vec![ObjectOp::KvSet { pairs }]).await;
    }
    for (prefix, max) in [("", 7), ("", 1000), ("name_", 100), ("name_1", 3), ("id_", 5), ("id_", 4), ("zzz", 10)] {
        let expected: Vec<_> = all.iter().filter(|key| key.starts_with(prefix.as_bytes())).cloned().collect();
        let mut got: Vec<Vec<u8>> = Vec::new();
        loop {
            let after = got.last().cloned().unwrap_or_default();
            let page = backend.kv_list(&it.object, prefix.as_bytes(), &after, max).await.expect("page");
            assert!(
                page.pairs.len() <= max && (!page.more || !page.pairs.is_empty()),
                "a page of {}",
                page.pairs.len()
            );
            got.extend(page.pairs.into_iter().map(|(key, _)| key));
            if !page.more {
                break;
            }
        }
        assert_eq!(got, expected, "prefix '{prefix}', pages of {max}");
    }
}

pub(super) async fn submission_order_is_kept(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "order");
    let all: Vec<_> = (0..200u32)
        .map(|i| {
            let data = Buf::copy_of(&i.to_le_bytes()).into();
            let step = ObjectOp::Write { offset: u64::from(i % 7) * 4, data };
            backend.submit(&it.object, Transaction::of(step))
        })
        .collect();
    let mut last = 0;
    // Awaited in reverse order: the order of awaiting must not matter.
    let mut versions = Vec::new();
    for done in all.into_iter().rev() {
        versions.push(done.await.expect("a write"));
    }
    for version in versions.into_iter().rev() {
        assert!(version > last, "version {version} after {last}: out of order");
        last = version;
    }
    let expected: Vec<u8> = (0..7u32).flat_map(|i| (199 - (199 - i) % 7).to_le_bytes()).collect();
    assert_eq!(it.bytes().await, expected);
}

pub(super) async fn a_dropped_future_undoes_nothing(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "dropped");
    drop(backend.submit(&it.object, Transaction::of(write(0, b"first"))));
    it.must(vec![ObjectOp::AssertExists, write(5, b" second")]).await;
    assert_eq!(it.bytes().await, b"first second");
}

pub(super) async fn large_objects(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "large");
    let len = 4 << 20;
    let data = pattern(5, len);
    it.must(vec![ObjectOp::Write { offset: 0, data: data.clone() }]).await;
    assert!(it.bytes().await == data.to_vec(), "4 MiB come back");
    let max = backend.info().object_size_max;
    assert!(max >= 32 << 20, "images use objects of up to 32 MiB");
    let past = [
        vec![write(max, b"x")],
        vec![ObjectOp::Truncate { size: max + 1 }],
        vec![write(u64::MAX - 1, b"xx")],
        vec![ObjectOp::Compare { offset: u64::MAX, data: Buf::copy_of(b"xx").into() }],
    ];
    for ops in past {
        let text = format!("{ops:?}");
        assert_eq!(it.run(ops).await.map_err(|error| error.kind()), Err(ErrorKind::OutOfRange), "{text}");
    }
    assert_eq!(it.size().await, len as u64);
    it.must(vec![write(max - 1, b"x")]).await;
    assert_eq!(it.size().await, max);
    it.must(vec![ObjectOp::Remove]).await;
}

pub(super) async fn listing(backend: Rc<dyn ObjectBackend>) {
    let before = all_names(&backend, None, 10).await.len();
    let spaces = ["", "conformance-a", "conformance-b"];
    let name = |space: &str, i: usize| ObjectName::in_namespace(space.into(), format!("conformance.list.{i}"));
    for space in spaces {
        for i in 0..25 {
            let step = Transaction::of(ObjectOp::Create { exclusive: true });
            backend.submit(&name(space, i), step).await.expect("create");
        }
        backend.submit(&name(space, 3), Transaction::of(ObjectOp::Remove)).await.expect("remove");
    }
    for max in [1, 7, 1000] {
        assert_eq!(all_names(&backend, None, max).await.len(), before + 3 * 24);
        for space in &spaces[1..] {
            let expected: BTreeSet<_> = (0..25).filter(|&i| i != 3).map(|i| name(space, i)).collect();
            assert_eq!(all_names(&backend, Some(space), max).await, expected);
        }
        let default = all_names(&backend, Some(""), max).await;
        assert!(default.contains(&name("", 0)) && !default.contains(&name(spaces[1], 0)));
    }
    assert_eq!(all_names(&backend, Some("conformance-c"), 5).await, BTreeSet::new());
    backend.flush().await.expect("flush");
    // A cluster counts in the background.
    for _ in 0..120 {
        if backend.usage().await.expect("usage").objects as usize == before + 3 * 24 {
            return;
        }
        forebay_reactor::sleep(std::time::Duration::from_millis(500)).await;
    }
    assert_eq!(backend.usage().await.expect("usage").objects as usize, before + 3 * 24);
}

async fn all_names(backend: &Rc<dyn ObjectBackend>, space: Option<&str>, max: usize) -> BTreeSet<ObjectName> {
    let mut names = BTreeSet::new();
    let mut cursor = None;
    loop {
        let page = backend.list(space, cursor, max).await.expect("a page of names");
        assert!(page.names.len() <= max);
        for name in page.names {
            assert!(names.insert(name.clone()), "{name} listed twice");
        }
        cursor = page.next;
        if cursor.is_none() {
            return names;
        }
    }
}

pub(super) async fn bad_arguments(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "bad");
    it.must(vec![write(0, b"x")]).await;
    let kind = |error: forebay_block::Error| error.kind();
    let past = ObjectRead::new(SnapId::HEAD, Extent::new(u64::MAX, 2));
    assert_eq!(backend.read(&it.object, past).await.map_err(kind).err(), Some(ErrorKind::OutOfRange));
    assert_eq!(backend.map(&it.object, past).await.map_err(kind).err(), Some(ErrorKind::OutOfRange));
    let overflow = it.run(vec![ObjectOp::Zero { extent: past.extent }]).await;
    assert_eq!(overflow.map_err(kind), Err(ErrorKind::OutOfRange));
    for snaps in [vec![1, 2], vec![2, 2], vec![9]] {
        let snapc = SnapContext { seq: 5, snaps: snaps.into_iter().map(SnapId).collect() };
        let refused = it.submit(Transaction::of(write(0, b"y")).with_snapc(Rc::new(snapc))).await;
        assert_eq!(refused.map_err(kind), Err(ErrorKind::Invalid));
    }
    for name in [String::new(), "n".repeat(ObjectName::LEN_MAX + 1)] {
        let refused = backend.submit(&ObjectName::new(name), Transaction::of(write(0, b"y"))).await;
        assert_eq!(refused.map_err(kind), Err(ErrorKind::Invalid));
    }
    let longest = ObjectName::new("n".repeat(ObjectName::LEN_MAX));
    backend.submit(&longest, Transaction::of(write(0, b"y"))).await.expect("the longest name goes");
    backend.submit(&longest, Transaction::of(ObjectOp::Remove)).await.expect("and can be removed");
    assert_eq!(it.bytes().await, b"x");
}

pub(super) async fn durable_and_flush(backend: Rc<dyn ObjectBackend>) {
    let it = TestSubject::new(&backend, "durable");
    it.submit(Transaction::of(write(0, b"a")).durable()).await.expect("a durable write");
    it.must(vec![write(1, b"b")]).await;
    backend.flush().await.expect("flush");
    backend.flush().await.expect("flush with nothing to do");
    it.submit(Transaction::new(vec![]).durable()).await.expect("a transaction of nothing");
    assert_eq!(it.bytes().await, b"ab");
}
