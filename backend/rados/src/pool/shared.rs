//! Operations for pools shared with other clients: watches, notifications, blocklisting.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    ClientIdentity, Error, ErrorKind, LocalFuture, Method, Notified, NotifyAnswer, ObjectBackend, ObjectName, Result,
    SharedObjects, SnapId, Watch, WatchHandler, Watcher,
};
use forebay_messenger::wire::{EntityAddr, MalformedPayload, PayloadReader, PayloadWriter};
use forebay_reactor::{Buf, Instant, spawn};

use super::{RadosPool, answer, check_name, ended, output, ready};
use crate::denc::ReaderExt;
use crate::error::errno;
use crate::error::failure;
use crate::osd::Objecter;
use crate::osd::watch::ObjectWatch;
use crate::osd::wire::{OsdOp, SNAP_HEAD, code, flag};

/// Active watch; dropping it removes the watch in the background.
struct Held {
    objecter: Rc<Objecter>,
    watched: Rc<ObjectWatch>,
}

impl Watch for Held {
    fn cookie(&self) -> u64 {
        self.watched.cookie
    }

    fn confirmed(&self) -> Instant {
        self.watched.confirmed()
    }

    fn end(&self) -> LocalFuture<Result<()>> {
        let (objecter, watched) = (self.objecter.clone(), self.watched.clone());
        Box::pin(async move { objecter.unwatch(&watched).await })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let ending = self.end();
        drop(spawn(async move {
            if let Err(error) = ending.await {
                tracing::debug!(%error, "cannot end a watch; it expires at its OSD");
            }
        }));
    }
}

/// Formats an address as it appears in client identities.
pub(crate) fn address_text(addr: &EntityAddr) -> String {
    match addr.socket {
        Some(socket) => format!("{socket}/{}", addr.nonce),
        None => format!(":/{}", addr.nonce),
    }
}

/// Decodes a list of watchers.
pub(crate) fn watchers(bytes: &[u8]) -> std::result::Result<Vec<Watcher>, MalformedPayload> {
    let mut whole = PayloadReader::new(bytes, "a list of watchers");
    let (_, mut list) = whole.part(1)?;
    list.vec(|from| {
        let (version, mut item) = from.part(2)?;
        item.u8()?;
        let (client, cookie) = (item.u64()?, item.u64()?);
        item.u32()?;
        let address = if version >= 2 { address_text(&EntityAddr::decode(&mut item)?) } else { String::new() };
        Ok(Watcher { client, cookie, address })
    })
}

/// Decodes the result of a notification, as collected by the OSD.
pub(crate) fn notified(bytes: &[u8]) -> std::result::Result<Notified, MalformedPayload> {
    if bytes.is_empty() {
        return Ok(Notified::default());
    }
    let mut from = PayloadReader::new(bytes, "what came of a notification");
    let answers =
        from.vec(|from| Ok(NotifyAnswer { client: from.u64()?, cookie: from.u64()?, payload: from.blob()?.to_vec() }))?;
    let missed = from.vec(|from| Ok((from.u64()?, from.u64()?)))?;
    Ok(Notified { answers, missed })
}

impl SharedObjects for RadosPool {
    fn identity(&self) -> ClientIdentity {
        self.cluster.identity()
    }

    fn exec(&self, object: &ObjectName, snap: SnapId, method: Method, input: Vec<u8>) -> LocalFuture<Result<Vec<u8>>> {
        if let Err(error) = check_name(object) {
            return ready(Err(error));
        }
        let ops = vec![OsdOp::call(method.class, method.name, &input)];
        let answered = self.cluster.objecter().submit(self.request(object, snap.0, flag::READ | flag::EXEC, ops));
        let what = format!("object {object}: {method:?}");
        Box::pin(async move {
            let mut reply = answered.await.unwrap_or_else(|| Err(ended()))?;
            if reply.result < 0 {
                return Err(failure(reply.result, what));
            }
            Ok(output(&mut reply, 0).to_vec())
        })
    }

    fn watch(&self, object: &ObjectName, handler: Rc<dyn WatchHandler>) -> LocalFuture<Result<Box<dyn Watch>>> {
        let (objecter, pool, object) = (self.cluster.objecter().clone(), self.id, object.clone());
        Box::pin(async move {
            check_name(&object)?;
            let watched = objecter.watch(pool, &object, handler).await?;
            let held: Box<dyn Watch> = Box::new(Held { objecter, watched });
            Ok(held)
        })
    }

    fn watchers(&self, object: &ObjectName) -> LocalFuture<Result<Vec<Watcher>>> {
        let asked = self.ask(object, SNAP_HEAD, vec![OsdOp::new(code::LIST_WATCHERS)]);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            watchers(&output(&mut reply, 0).to_vec()).map_err(|error| answer::strange(&object, error))
        })
    }

    fn notify(&self, object: &ObjectName, payload: Vec<u8>, timeout: Duration) -> LocalFuture<Result<Notified>> {
        let (objecter, pool, object) = (self.cluster.objecter().clone(), self.id, object.clone());
        Box::pin(async move {
            check_name(&object)?;
            let (status, data) = objecter.notify(pool, &object, &payload, timeout).await?;
            // Missing acknowledgements are reported in the data.
            if status < 0 && status != -errno::ETIMEDOUT {
                return Err(failure(status, format!("a notification on object {object}")));
            }
            notified(&data).map_err(|error| answer::strange(&object, error))
        })
    }

    fn answer_notification(
        &self,
        object: &ObjectName,
        id: u64,
        cookie: u64,
        payload: Vec<u8>,
    ) -> LocalFuture<Result<()>> {
        let mut input = PayloadWriter::new();
        input.u64(id).u64(cookie).blob(&payload);
        let op = OsdOp::new(code::NOTIFY_ACK).with(Buf::copy_of(&input.finish()));
        let asked = self.ask(object, SNAP_HEAD, vec![op]);
        Box::pin(async move { asked.await.map(drop) })
    }

    fn blocklist(&self, address: &str, expire: Option<Duration>) -> LocalFuture<Result<()>> {
        let (cluster, address) = (self.cluster.clone(), address.to_owned());
        Box::pin(async move { cluster.blocklist(&address, expire).await })
    }

    fn mark_in_use(&self) {
        self.cluster.objecter().mark_in_use(self.id);
    }

    fn pool_id(&self) -> i64 {
        self.id
    }

    fn pool_ids(&self) -> Vec<i64> {
        self.cluster.map().pools.keys().copied().collect()
    }

    fn pool_id_of(&self, name: &str) -> LocalFuture<Result<i64>> {
        let absent = || Error::new(ErrorKind::NotFound, format!("pool {name}"));
        ready(self.cluster.map().pool_named(name).ok_or_else(absent))
    }

    fn pool(&self, id: i64) -> LocalFuture<Result<Rc<dyn ObjectBackend>>> {
        let pool = self.cluster.pool_by_id(id);
        ready(pool.map(|pool| -> Rc<dyn ObjectBackend> { pool }))
    }
}
