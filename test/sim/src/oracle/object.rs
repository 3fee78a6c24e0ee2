//! The oracle for object backends.
//!
//! Transactions on one object take effect in the order in which they were submitted, wholly or not at all.  So an
//! object's history is a row of states, one after each transaction; a read may see any of them from the last
//! transaction that was answered before it was submitted on, up to the last one submitted before its answer; and a
//! crash leaves any of them from the last durable one on.  Only where the environment may fail a transaction does a
//! step have more than one outcome.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{
    BackendInfo, BufList, Error, ErrorKind, ExtentMap, ExtentState, KvPage, ListPage, LocalFuture, ObjectBackend,
    ObjectName, ObjectRead, ObjectStat, Result, SnapId, SnapSet, SparseData, Transaction, Usage,
};

use super::Expected;
use super::object_state::{Body, ObjectState, Observed};
use crate::world::{CrashKind, World};

type States = Vec<Rc<ObjectState>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done(u64),
    Refused(ErrorKind),
    /// The environment prevented it: nothing was done.
    Undone,
    /// The environment failed it: it was done or not.
    Unknown,
}

struct Entry {
    transaction: Transaction,
    /// Moment of its completion, counted in events, and its outcome.
    answer: Option<(u64, Outcome)>,
    /// Every state there may be after it.
    after: States,
}

/// One object's past.
struct History {
    /// Before the first entry.
    base: States,
    /// States that a crash may bring back beside those of the entries: from before the process was killed.
    older: States,
    entries: Vec<Entry>,
    /// Entries before this one are durable.
    durable: usize,
    /// Reads in progress.
    reads: usize,
    /// Entries folded into the base so far, so that reads in progress can name them.
    folded: usize,
}

impl History {
    fn new() -> Self {
        let base = vec![Rc::default()];
        Self { base, older: Vec::new(), entries: Vec::new(), durable: 0, reads: 0, folded: 0 }
    }

    /// The states after the first `count` entries.
    fn position(&self, count: usize) -> &States {
        count.checked_sub(1).map_or(&self.base, |index| &self.entries[index].after)
    }

    fn last(&self) -> &States {
        self.position(self.entries.len())
    }

    /// Works out the states after each entry from the given one on; false if there is an entry whose answer fits
    /// none of the states before it.
    fn walk(&mut self, from: usize, expected: Expected) -> bool {
        let mut possible = true;
        for index in from..self.entries.len() {
            let before = self.position(index).clone();
            let entry = &self.entries[index];
            let mut after: States = Vec::new();
            let mut add = |state: Rc<ObjectState>| {
                if !after.iter().any(|known| Rc::ptr_eq(known, &state) || known == &state) {
                    after.push(state);
                }
            };
            let may_fail = expected.may_fail();
            for state in before {
                let outcome = entry.answer.map(|(_, outcome)| outcome);
                if state.may_refuse_version(&entry.transaction)
                    && matches!(outcome, None | Some(Outcome::Unknown | Outcome::Refused(ErrorKind::Guard)))
                {
                    add(state.clone());
                }
                match (state.apply(&entry.transaction), outcome) {
                    (Ok(next), Some(Outcome::Done(version))) => add(Rc::new(next.with_version(Some(version)))),
                    (Ok(next), None) => {
                        add(Rc::new(next));
                        if may_fail {
                            add(state);
                        }
                    }
                    (Ok(next), Some(Outcome::Unknown)) => {
                        add(state);
                        add(Rc::new(next));
                    }
                    (_, Some(Outcome::Undone)) => add(state),
                    (Err(kind), Some(Outcome::Refused(told))) if kind == told => add(state),
                    (Err(_), None | Some(Outcome::Unknown)) => add(state),
                    // It must have been another state.
                    (Ok(_), Some(Outcome::Refused(_))) | (Err(_), Some(_)) => {}
                }
            }
            if after.is_empty() {
                possible = false;
                after = self.position(index).clone();
            }
            self.entries[index].after = after;
        }
        possible
    }

    /// Forgets what can matter no more.
    fn fold(&mut self) {
        if self.reads > 0 {
            return;
        }
        let answered = self.entries.iter().take_while(|entry| entry.answer.is_some()).count();
        let count = answered.min(self.durable);
        if count > 0 {
            self.base = self.position(count).clone();
            self.entries.drain(..count);
            self.durable -= count;
            self.folded += count;
        }
    }

    /// The states that a failure of power leaves.
    fn after_power_failure(&self) -> impl Iterator<Item = &Rc<ObjectState>> {
        let positions = (self.durable..=self.entries.len()).flat_map(|count| self.position(count));
        self.older.iter().chain(positions)
    }

    /// The states that a kill of the process leaves: all transactions that were acknowledged are in them.
    fn after_kill(&self) -> impl Iterator<Item = &Rc<ObjectState>> {
        let done = |entry: &Entry| matches!(entry.answer, Some((_, Outcome::Done(_))));
        let from = self.entries.iter().rposition(done).map_or(0, |index| index + 1);
        (from.max(self.durable)..=self.entries.len()).flat_map(|count| self.position(count))
    }
}

/// Oracle of the states that each object of a backend may have.
pub struct ObjectOracle {
    objects: BTreeMap<ObjectName, History>,
    /// Counts submissions and answers.
    event: u64,
    expected: Expected,
    /// Snapshot numbers given out, and the newest of them that is durable.
    snap_last: u64,
    snap_durable: u64,
    violation: Option<String>,
    notes: Option<World>,
}

/// A read in progress.
#[derive(Debug, Clone)]
pub struct ReadToken {
    object: ObjectName,
    /// The first position that it may see, counted from the object's first entry ever.
    from: usize,
}

impl ObjectOracle {
    /// For a backend without objects, and durably so.
    pub fn new(expected: Expected) -> Self {
        Self {
            objects: BTreeMap::new(),
            event: 0,
            expected,
            snap_last: 0,
            snap_durable: 0,
            violation: None,
            notes: None,
        }
    }

    /// Changes what the environment may cause.
    pub fn expect(&mut self, expected: Expected) {
        self.expected = expected;
    }

    /// Returns the first violation.
    pub fn violation(&self) -> Option<&str> {
        self.violation.as_deref()
    }

    /// Returns the version of an object after its last transaction, if that has completed.
    pub fn version(&self, object: &ObjectName) -> Option<u64> {
        self.objects.get(object)?.last().iter().find_map(|state| state.head()?.version())
    }

    /// Every object that was ever named.
    pub fn names(&self) -> Vec<ObjectName> {
        self.objects.keys().cloned().collect()
    }

    /// The states that an object may be in now, if no transaction on it is in flight.
    pub fn states(&self, object: &ObjectName) -> Vec<Rc<ObjectState>> {
        self.objects.get(object).map_or_else(|| vec![Rc::default()], |history| history.last().clone())
    }

    fn violated(&mut self, text: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(text());
        }
    }

    /// An object may be in so many states, after failures with unknown effect, that a workload
    /// should leave it alone until they are settled.
    pub fn is_vague(&self, object: &ObjectName) -> bool {
        const STATES_VAGUE: usize = 16;
        self.objects.get(object).is_some_and(|history| history.last().len() > STATES_VAGUE)
    }

    /// Notes every request and answer in a world's trace.
    pub fn note_in(&mut self, world: World) {
        self.notes = Some(world);
    }

    fn note(&self, text: impl FnOnce() -> String) {
        if let Some(world) = &self.notes {
            world.note(text);
        }
    }

    /// A transaction is submitted; answers its place, to be told to [`submitted_done`](Self::submitted_done).
    pub fn submit(&mut self, object: &ObjectName, transaction: &Transaction) -> usize {
        self.event += 1;
        let history = self.objects.entry(object.clone()).or_insert_with(History::new);
        history.fold();
        history.entries.push(Entry { transaction: transaction.clone(), answer: None, after: Vec::new() });
        let index = history.entries.len() - 1;
        history.walk(index, self.expected);
        let place = history.folded + index;
        self.note(|| format!("{object} #{place}: {}", describe(&transaction.ops)));
        place
    }

    /// Notes that a transaction has completed.
    pub fn submitted_done(&mut self, object: &ObjectName, place: usize, result: &Result<u64>) {
        self.note(|| format!("{object} #{place}: {result:?}"));
        self.event += 1;
        let event = self.event;
        let expected = self.expected;
        let Some(history) = self.objects.get_mut(object) else { return };
        // A place from before a crash.
        let Some(index) = place.checked_sub(history.folded).filter(|&index| index < history.entries.len()) else {
            return;
        };
        let outcome = match result {
            Ok(version) => Outcome::Done(*version),
            Err(error) if expected.allows(error.kind()) => match error.kind() {
                // Refused for want of space, or because what it needed to read is damaged: nothing was done.
                ErrorKind::NoSpace if !expected.no_space_late => Outcome::Undone,
                ErrorKind::Corrupt => Outcome::Undone,
                _ => Outcome::Unknown,
            },
            Err(error) => Outcome::Refused(error.kind()),
        };
        let durable = history.entries[index].transaction.durable;
        history.entries[index].answer = Some((event, outcome));
        let possible = history.walk(index, expected);
        if durable && matches!(outcome, Outcome::Done(_)) {
            history.durable = history.durable.max(index + 1);
            history.older.clear();
        }
        let versions_fit = history.versions_fit(index);
        let ops = history.entries[index].transaction.ops.clone();
        if !possible {
            self.violated(|| format!("{object}: {result:?} is no answer to {}", describe(&ops)));
        } else if !versions_fit {
            self.violated(|| format!("{object}: version {result:?} is not in its place"));
        }
    }

    /// A read of any kind begins.
    pub fn read(&mut self, object: &ObjectName) -> ReadToken {
        self.event += 1;
        let history = self.objects.entry(object.clone()).or_insert_with(History::new);
        history.fold();
        history.reads += 1;
        let answered = history.entries.iter().rposition(|entry| entry.answer.is_some()).map_or(0, |index| index + 1);
        ReadToken { object: object.clone(), from: history.folded + answered }
    }

    /// A read is answered; `fits` says whether a state could have answered so.
    pub fn read_done(&mut self, token: ReadToken, what: impl FnOnce() -> String, fits: impl Fn(&ObjectState) -> bool) {
        self.event += 1;
        let Some(history) = self.objects.get_mut(&token.object) else { return };
        history.reads = history.reads.saturating_sub(1);
        let Some(from) = token.from.checked_sub(history.folded) else { return };
        let seen = (from..=history.entries.len()).flat_map(|count| history.position(count)).any(|state| fits(state));
        if !seen {
            let allowed: Vec<String> = (from..=history.entries.len())
                .flat_map(|count| history.position(count))
                .map(|state| state.describe())
                .collect();
            self.violated(|| {
                format!("{}: {} fits none of the {} states allowed: {allowed:#?}", token.object, what(), allowed.len())
            });
        }
    }

    /// A read failed.
    pub fn read_failed(&mut self, token: ReadToken, what: &str, error: &Error, snap: SnapId) {
        if self.expected.allows(error.kind()) {
            self.event += 1;
            if let Some(history) = self.objects.get_mut(&token.object) {
                history.reads = history.reads.saturating_sub(1);
            }
            return;
        }
        let kind = error.kind();
        self.read_done(
            token,
            || format!("{what}: {error:?}"),
            |state| kind == ErrorKind::NotFound && state.at(snap).is_none(),
        );
    }

    /// A flush begins; answers what to tell [`flushed`](Self::flushed).
    pub fn flush(&mut self) -> (u64, u64) {
        self.event += 1;
        (self.event, self.snap_last)
    }

    /// A flush has succeeded.
    pub fn flushed(&mut self, (submitted, snap): (u64, u64)) {
        self.event += 1;
        self.snap_durable = self.snap_durable.max(snap);
        for history in self.objects.values_mut() {
            let before = |entry: &Entry| entry.answer.is_some_and(|(at, _)| at < submitted);
            if let Some(index) = history.entries.iter().rposition(before) {
                history.durable = history.durable.max(index + 1);
            }
            history.older.clear();
            history.fold();
        }
    }

    /// All names were listed while nothing was in flight: those of the objects that are there, each once.
    pub fn listed(&mut self, found: &[ObjectName]) {
        let mut sorted = found.to_vec();
        sorted.sort();
        let mut wrong: Vec<String> =
            sorted.windows(2).filter(|pair| pair[0] == pair[1]).map(|pair| format!("{} twice", pair[0])).collect();
        for (name, history) in &self.objects {
            let there = |state: &Rc<ObjectState>| state.head().is_some();
            let listed = sorted.binary_search(name).is_ok();
            if !history.last().iter().any(|state| there(state) == listed) {
                wrong.push(format!("{name} {}", if listed { "is not there" } else { "is missing" }));
            }
        }
        wrong.extend(found.iter().filter(|name| !self.objects.contains_key(name)).map(|name| format!("{name}?")));
        if !wrong.is_empty() {
            self.violated(|| format!("a list of {} names: {}", found.len(), wrong.join(", ")));
        }
    }

    /// A snapshot number is asked for; answers what to tell [`snap_allocated`](Self::snap_allocated).
    pub fn snap_allocation(&self) -> u64 {
        self.snap_last
    }

    /// A snapshot number was given out: greater than all that were known when it was asked for.
    pub fn snap_allocated(&mut self, before: u64, snap: SnapId) {
        if snap.0 <= before {
            self.violated(|| format!("snapshot number {} after {before}", snap.0));
        }
        self.snap_last = self.snap_last.max(snap.0);
    }

    /// The machine has crashed, or only the process was killed: nothing is in flight any more.
    pub fn crash(&mut self, kind: CrashKind) {
        self.snap_last = self.snap_durable;
        for history in self.objects.values_mut() {
            let older = distinct(history.after_power_failure());
            let base = match kind {
                CrashKind::Power => older.clone(),
                CrashKind::Kill => distinct(history.after_kill()),
            };
            *history = History { base, older, ..History::new() };
        }
    }

    /// Records an object after the recovery from a crash.  It is durable from then on, unless only the process was
    /// killed.
    pub fn recovered(&mut self, object: &ObjectName, observed: &Observed, kind: CrashKind) {
        let history = self.objects.entry(object.clone()).or_insert_with(History::new);
        let fitting: States = (history.base.iter().filter(|state| state.fits(observed)))
            .map(|state| Rc::new(state.with_version(observed.version)))
            .collect();
        if fitting.is_empty() {
            let count = history.base.len();
            let head = observed.head.as_ref().map(|(bytes, keys)| {
                format!("{} bytes [{}], {} keys", bytes.len(), crate::stamp::describe(0, bytes), keys.len())
            });
            let allowed: Vec<String> = history.base.iter().map(|state| state.describe()).collect();
            return self.violated(|| {
                format!("{object} after the crash ({kind:?}): {head:?} is none of the {count} allowed: {allowed:#?}")
            });
        }
        history.base = fitting;
        if kind == CrashKind::Power {
            history.older.clear();
        }
    }
}

/// Returns the states, each once.
fn distinct<'a>(states: impl Iterator<Item = &'a Rc<ObjectState>>) -> States {
    let mut out: States = Vec::new();
    for state in states {
        if !out.iter().any(|known| Rc::ptr_eq(known, state) || known == state) {
            out.push(state.clone());
        }
    }
    out
}

fn describe(ops: &[forebay_block::ObjectOp]) -> String {
    let mut text = format!("{ops:?}");
    text.truncate(600);
    text
}

impl ObjectState {
    fn describe(&self) -> String {
        match self.head() {
            None => "not there".to_owned(),
            Some(body) => {
                let bytes = body.bytes(forebay_block::Extent::new(0, body.size()));
                let (text, keys) = (crate::stamp::describe(0, &bytes), body.keys().len());
                format!("{} bytes [{text}], {keys} keys, version {:?}", bytes.len(), body.version())
            }
        }
    }
}

impl History {
    /// An answered transaction's version is greater than those before it, and less than those after it.
    fn versions_fit(&self, index: usize) -> bool {
        let version = |entry: &Entry| match entry.answer {
            Some((_, Outcome::Done(version))) if changes(&entry.transaction) => Some(version),
            _ => None,
        };
        let Some(own) = version(&self.entries[index]) else { return true };
        self.entries[..index].iter().filter_map(version).all(|other| other < own)
            && self.entries[index + 1..].iter().filter_map(version).all(|other| other > own)
    }
}

fn changes(transaction: &Transaction) -> bool {
    use forebay_block::ObjectOp::{Create, KvSet, Write, WriteFull};
    transaction
        .ops
        .iter()
        .any(|op| matches!(op, Write { .. } | WriteFull { .. } | KvSet { .. } | Create { exclusive: true }))
}

/// A backend whose every request and answer the oracle hears of.
pub struct CheckedBackend {
    inner: Rc<dyn ObjectBackend>,
    oracle: Rc<RefCell<ObjectOracle>>,
}

impl CheckedBackend {
    /// Puts the oracle in front of a backend.
    pub fn new(inner: Rc<dyn ObjectBackend>, oracle: Rc<RefCell<ObjectOracle>>) -> Rc<Self> {
        Rc::new(Self { inner, oracle })
    }

    /// Watches one read.
    fn watch<T: 'static>(
        &self,
        object: &ObjectName,
        snap: SnapId,
        what: impl Fn(Option<&T>) -> String + 'static,
        answer: LocalFuture<Result<T>>,
        fits: impl Fn(&Body, &T) -> bool + 'static,
    ) -> LocalFuture<Result<T>> {
        let oracle = self.oracle.clone();
        let token = oracle.borrow_mut().read(object);
        Box::pin(async move {
            let result = answer.await;
            match &result {
                Ok(value) => {
                    let fits = |state: &ObjectState| state.at(snap).is_some_and(|body| fits(body, value));
                    oracle.borrow_mut().read_done(token, || what(Some(value)), fits);
                }
                Err(error) => oracle.borrow_mut().read_failed(token, &what(None), error, snap),
            }
            result
        })
    }
}

impl ObjectBackend for CheckedBackend {
    fn info(&self) -> BackendInfo {
        self.inner.info()
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        let answer = self.inner.read(object, read);
        let what = move |data: Option<&SparseData>| {
            let runs = data.map_or(&[][..], |data| &data.runs);
            let text = |(at, run): &(u64, BufList)| {
                // Sectors are recognised from their beginning only.
                let skip = (at.next_multiple_of(512) - at).min(run.len() as u64);
                let found = crate::stamp::describe(at + skip, &run.to_vec()[skip as usize..]);
                format!("{} bytes at {at}: {found}", run.len())
            };
            format!("{read:?} answered with {:#?}", runs.iter().map(text).collect::<Vec<_>>())
        };
        self.watch(object, read.snap, what, answer, move |body, data| body.answers(read.extent, data))
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        let answer = self.inner.map(object, read);
        self.watch(
            object,
            read.snap,
            move |map| format!("map {read:?}: {map:?}"),
            answer,
            move |body, map| {
                let mut at = read.extent.offset;
                let fits = map.runs().iter().all(|run| {
                    let follows = run.extent.offset == at;
                    at = run.extent.end();
                    follows && (run.state == ExtentState::Data || forebay_block::is_zero(&body.bytes(run.extent)))
                });
                fits && at == read.extent.end()
            },
        )
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        let answer = self.inner.stat(object, snap);
        self.watch(
            object,
            snap,
            move |stat| format!("stat at {snap:?}: {stat:?}"),
            answer,
            move |body, stat| {
                let version_fits = snap != SnapId::HEAD || body.version().is_none_or(|version| version == stat.version);
                body.size() == stat.size && version_fits
            },
        )
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let (oracle, object) = (self.oracle.clone(), object.clone());
        let place = oracle.borrow_mut().submit(&object, &transaction);
        let answer = self.inner.submit(&object, transaction);
        Box::pin(async move {
            let result = answer.await;
            oracle.borrow_mut().submitted_done(&object, place, &result);
            result
        })
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        let (answer, asked) = (self.inner.kv_get(object, keys.clone()), keys.clone());
        let what = move |values: Option<&_>| format!("kv_get {asked:?}: {values:?}");
        self.watch(object, SnapId::HEAD, what, answer, move |body, values| {
            let right: Vec<Option<&Vec<u8>>> = keys.iter().map(|key| body.keys().get(key)).collect();
            values.iter().map(Option::as_ref).collect::<Vec<_>>() == right
        })
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        let answer = self.inner.kv_list(object, prefix, after, max);
        let (prefix, after) = (prefix.to_vec(), after.to_vec());
        let asked = format!("kv_list {prefix:?} after {after:?}, {max} at most");
        let what = move |page: Option<&KvPage>| format!("{asked}: {page:?}");
        self.watch(object, SnapId::HEAD, what, answer, move |body, page| {
            let mut right = body.keys().iter().filter(|(key, _)| key.starts_with(&prefix) && **key > after);
            let count = page.pairs.len();
            let same = page.pairs.iter().all(|(key, value)| right.next() == Some((key, value)));
            // A page may be shorter than asked for, as long as it says that there is more.
            same && count <= max && page.more == right.next().is_some()
        })
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        self.inner.snap_set(object)
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        let before = self.oracle.borrow().snap_allocation();
        let (oracle, answer) = (self.oracle.clone(), self.inner.snap_allocate());
        Box::pin(async move {
            let result = answer.await;
            if let Ok(snap) = &result {
                oracle.borrow_mut().snap_allocated(before, *snap);
            }
            result
        })
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        self.inner.snap_remove(snap)
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        self.inner.list(namespace, cursor, max)
    }

    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        self.inner.list_between(names, max)
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        let oracle = self.oracle.clone();
        let mark = oracle.borrow_mut().flush();
        let answer = self.inner.flush();
        Box::pin(async move {
            let result = answer.await;
            match &result {
                Ok(()) => oracle.borrow_mut().flushed(mark),
                Err(error) => {
                    let mut oracle = oracle.borrow_mut();
                    if !oracle.expected.allows(error.kind()) {
                        oracle.violated(|| format!("a flush failed: {error:?}"));
                    }
                }
            }
            result
        })
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        self.inner.usage()
    }
}

/// Reads everything of an object: for [`ObjectOracle::recovered`].
pub async fn observe(backend: &dyn ObjectBackend, object: &ObjectName, snaps: &BTreeSet<SnapId>) -> Result<Observed> {
    let mut observed = Observed::default();
    if let Some(bytes) = whole(backend, object, SnapId::HEAD).await? {
        let mut keys = BTreeMap::new();
        let mut after = Vec::new();
        loop {
            const PAGE_KEYS: usize = 7;
            let page = backend.kv_list(object, b"", &after, PAGE_KEYS).await?;
            if let Some((key, _)) = page.pairs.last() {
                after.clone_from(key);
            }
            let empty = page.pairs.is_empty();
            keys.extend(page.pairs);
            if !page.more || empty {
                break;
            }
        }
        observed.head = Some((bytes, keys));
        observed.version = Some(backend.stat(object, SnapId::HEAD).await?.version);
    }
    for &snap in snaps {
        observed.snaps.push((snap, whole(backend, object, snap).await?));
    }
    Ok(observed)
}

async fn whole(backend: &dyn ObjectBackend, object: &ObjectName, snap: SnapId) -> Result<Option<Vec<u8>>> {
    let stat = match backend.stat(object, snap).await {
        Ok(stat) => stat,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let extent = forebay_block::Extent::new(0, stat.size);
    let data = backend.read(object, ObjectRead::new(snap, extent)).await?;
    let mut bytes = vec![0; stat.size as usize];
    for (offset, run) in data.runs {
        let at = offset as usize;
        let Some(out) = bytes.get_mut(at..at + run.len()) else {
            return Err(Error::new(ErrorKind::Invalid, format!("{object}: a run past the end")));
        };
        run.copy_to(out);
    }
    Ok(Some(bytes))
}
