//! Operations that this client asks of the owner of an image's exclusive lock.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::sync::Notify;
use forebay_reactor::timeout;

use crate::image::Image;
use crate::info::ObjectProgress;
use crate::owner::{OwnerOperation, UNSUPPORTED};
use crate::snapshots::find;
use crate::watcher::HeaderWatcher;
use crate::wire::notify::{NotifyMessage, OwnerRequest, RequestId, decode_response};
use crate::wire::snapshot::Protection;

/// Silence of the owner after which it is asked again, as librbd does.
const SILENCE: Duration = Duration::from_secs(30);
/// Attempts to ask an owner that does not answer.
const TRIES: usize = 3;

/// Requests of this client that are in progress at the owner.
#[derive(Default)]
pub(crate) struct AskedOperations {
    last: Cell<u64>,
    /// By the numbers of the requests.
    running: RefCell<BTreeMap<u64, Rc<Asked>>>,
}

/// Request in progress.
#[derive(Default)]
struct Asked {
    progress: Cell<ObjectProgress>,
    result: Cell<Option<i32>>,
    /// Signaled by each message about it.
    told: Notify,
}

/// Answer to a request.
enum Answer {
    /// Carried out by the owner.
    Done,
    /// The owner does not carry it out for others, or there is no owner any more.
    Refused,
    /// No answer in time: it may have been carried out.
    Silence,
}

impl AskedOperations {
    /// Delivers a message about a request of this client.
    pub(crate) fn deliver(&self, message: NotifyMessage) {
        let (id, progress, result) = match message {
            NotifyMessage::Progress { id, done, total } => (id, Some(ObjectProgress { done, total }), None),
            NotifyMessage::Completed { id, result } => (id, None, Some(result)),
            _ => return,
        };
        // The number is unique to this client, whose watch may have changed since.
        let Some(asked) = self.running.borrow().get(&id.number).cloned() else { return };
        if let Some(progress) = progress {
            asked.progress.set(progress);
        }
        if result.is_some() {
            asked.result.set(result);
        }
        asked.told.notify_all();
    }

    fn begin(&self) -> (u64, Rc<Asked>) {
        // Numbers of several handles of a client must differ, and those of its former lives.
        let number = match self.last.get() {
            0 => forebay_reactor::random() >> 8,
            last => last + 1,
        };
        self.last.set(number);
        let asked = Rc::new(Asked::default());
        self.running.borrow_mut().insert(number, asked.clone());
        (number, asked)
    }
}

impl Image {
    /// Asks the owner of the lock for an operation, if another client that is alive has the lock. Returns whether the owner
    /// has carried it out; the header is as it is after that.
    pub(crate) async fn ask_owner(
        &self,
        operation: OwnerOperation,
        progress: &mut impl FnMut(ObjectProgress),
    ) -> Result<bool> {
        let shared = self.shared();
        if self.is_read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, "opened for reading only"));
        }
        shared.check_there()?;
        if !shared.has_other_owner().await? {
            return Ok(false);
        }
        let Some(watcher) = shared.watcher() else { return Ok(false) };
        shared.refresh().await?;
        let was_so = self.is_carried_out(&operation);
        let (number, asked) = shared.owner().asked.begin();
        let mut silent = false;
        let mut answered = Ok(Answer::Silence);
        for _ in 0..TRIES {
            answered = ask(&watcher, &operation, number, &asked, progress).await;
            silent |= matches!(answered, Ok(Answer::Silence));
            if !matches!(answered, Ok(Answer::Silence)) || !shared.has_other_owner().await? {
                break;
            }
        }
        shared.owner().asked.running.borrow_mut().remove(&number);
        // The owner may have carried it out in silence; repeated, it fails then.
        if silent && !was_so && !matches!(answered, Ok(Answer::Done)) {
            shared.refresh().await?;
            if self.is_carried_out(&operation) {
                answered = Ok(Answer::Done);
            }
        }
        match answered? {
            Answer::Done => {
                shared.refresh().await?;
                tracing::info!(image = shared.name(), ?operation, "carried out by the owner of the lock");
                Ok(true)
            }
            Answer::Refused | Answer::Silence => Ok(false),
        }
    }

    /// Returns whether the image is as it is after an operation; false where the header does not show that.
    fn is_carried_out(&self, operation: &OwnerOperation) -> bool {
        let shared = self.shared();
        let header = shared.header();
        match operation {
            OwnerOperation::Flatten => header.parent.as_ref().is_none_or(|(_, parent)| parent.overlap.is_none()),
            OwnerOperation::Resize { size, .. } => header.size == *size,
            OwnerOperation::CreateSnapshot { name } => find(shared, name).is_ok(),
            OwnerOperation::RemoveSnapshot { name, in_trash: false } => find(shared, name).is_err(),
            OwnerOperation::RenameSnapshot { id, to } => {
                header.snapshots.iter().any(|snapshot| snapshot.id.0 == *id && snapshot.name == *to)
            }
            OwnerOperation::ProtectSnapshot { name, protected } => {
                let wanted = if *protected { Protection::Full } else { Protection::None };
                find(shared, name).is_ok_and(|snapshot| snapshot.protection == wanted)
            }
            _ => false,
        }
    }
}

async fn ask(
    watcher: &Rc<HeaderWatcher>,
    operation: &OwnerOperation,
    number: u64,
    asked: &Asked,
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<Answer> {
    // Older clients answer the others only when they are complete.
    let has_id = matches!(
        operation,
        OwnerOperation::Flatten
            | OwnerOperation::Resize { .. }
            | OwnerOperation::CreateSnapshot { .. }
            | OwnerOperation::Sparsify { .. }
    );
    let id = has_id.then(|| RequestId { client: watcher.client(), number });
    let request = OwnerRequest { id, operation: Some(operation.clone()) };
    let told = match watcher.notify(NotifyMessage::Operation(request)).await {
        Err(error) if error.kind() == ErrorKind::TimedOut => return Ok(Answer::Silence),
        told => told?,
    };
    let result = told.answers.iter().find_map(|answer| decode_response(&answer.payload));
    match result {
        Some(0) if has_id => {}
        Some(result) => return answer_of(result),
        None if told.missed.is_empty() => return Ok(Answer::Refused),
        None => return Ok(Answer::Silence),
    }
    loop {
        let wait = asked.told.wait();
        if let Some(result) = asked.result.get() {
            return answer_of(result);
        }
        progress(asked.progress.get());
        if timeout(SILENCE, wait).await.is_err() {
            return Ok(Answer::Silence);
        }
    }
}

/// Returns the answer of a result, or its error.
fn answer_of(result: i32) -> Result<Answer> {
    let kind = match -result {
        0 => return Ok(Answer::Done),
        // Not supported, restart, shut down: the lock is changing hands, or must.
        UNSUPPORTED_ERRNO | 85 | 108 => return Ok(Answer::Refused),
        110 => return Ok(Answer::Silence),
        2 => ErrorKind::NotFound,
        16 => ErrorKind::Busy,
        17 => ErrorKind::Exists,
        22 => ErrorKind::Invalid,
        28 | 122 => ErrorKind::NoSpace,
        1 | 13 | 30 => ErrorKind::ReadOnly,
        _ => ErrorKind::Io,
    };
    Err(Error::new(kind, format!("refused by the owner of the lock ({result})")))
}

/// Errno of an operation that is not supported.
const UNSUPPORTED_ERRNO: i32 = -UNSUPPORTED;
