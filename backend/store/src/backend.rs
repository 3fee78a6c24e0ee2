//! Implementation of [`ObjectBackend`] for the store.

use std::ops::Range;
use std::rc::Rc;

use forebay_block::{
    BackendInfo, DataKey, DataPolicy, Error, ErrorKind, ExtentMap, KvPage, ListPage, LocalFuture, ObjectBackend,
    ObjectName, ObjectRead, ObjectStat, PoolIdentity, Result, SnapId, SnapSet, SparseData, StoredBytes, Transaction,
    Usage,
};

use crate::core::Core;
use crate::keys;
use crate::object::{HEAD, StoreObject};
use crate::store::Store;
use crate::{read, transact};

/// Returns the object, if its head exists.
async fn existing(core: &Core, name: &ObjectName) -> Result<Rc<StoreObject>> {
    let object = core.find(name).await?.filter(|object| object.state().exists);
    object.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("object {name}")))
}

async fn kv_get(core: Rc<Core>, name: ObjectName, wanted: Vec<Vec<u8>>) -> Result<Vec<Option<Vec<u8>>>> {
    loop {
        let object = existing(&core, &name).await?;
        let version = object.state().version;
        let mut out = Vec::with_capacity(wanted.len());
        for key in &wanted {
            out.push(core.index.kv(object.oid, HEAD, key).await?);
        }
        // A transaction may have been applied between two lookups; a read must not see a part of one.
        if object.state().version == version {
            return Ok(out);
        }
    }
}

async fn kv_list(core: Rc<Core>, name: ObjectName, prefix: Vec<u8>, after: Vec<u8>, max: usize) -> Result<KvPage> {
    loop {
        let object = existing(&core, &name).await?;
        let version = object.state().version;
        let all = keys::kv(object.oid, HEAD, &prefix);
        let mut from = all.clone();
        if !after.is_empty() {
            let mut next = keys::kv(object.oid, HEAD, &after);
            next.push(0);
            from = from.max(next);
        }
        let to = keys::after(&all);
        let mut found = core.index.lookup_range(&from, &to, max.saturating_add(1)).await?;
        // A lost value within the returned range must be reported, not omitted.
        let upto = match found.get(max).and(max.checked_sub(1)) {
            Some(last) => [&found[last].0[..], &[0]].concat(),
            None => to,
        };
        core.index.check_none_lost(&from, &upto).await?;
        if object.state().version != version {
            continue;
        }
        let more = found.len() > max;
        found.truncate(max);
        let cut = keys::kv(object.oid, HEAD, &[]).len();
        return Ok(KvPage {
            pairs: found.into_iter().map(|(key, value)| (key[cut..].to_vec(), value)).collect(),
            more,
        });
    }
}

async fn list(core: Rc<Core>, namespace: Option<String>, cursor: Option<Vec<u8>>, max: usize) -> Result<ListPage> {
    let prefix = namespace.map_or_else(|| vec![b'n'], |namespace| keys::name_space(&namespace));
    let to = keys::after(&prefix);
    let mut from = match cursor {
        Some(mut cursor) => {
            cursor.push(0);
            cursor
        }
        None => prefix,
    };
    let mut names = Vec::new();
    while names.len() < max {
        let wanted = (max - names.len()).min(1024);
        let page = core.index.lookup_range(&from, &to, wanted).await?;
        let full = page.len() == wanted;
        let Some((last, _)) = page.last() else { return Ok(ListPage { names, next: None }) };
        from = last.clone();
        for (key, value) in page {
            let oid = value.try_into().map(u64::from_le_bytes).unwrap_or(0);
            // A removed object that still has clones has a name but no head.
            if let Some(object) = core.by_oid(oid).await?
                && object.state().exists
            {
                debug_assert_eq!(keys::name(&object.name), key);
                names.push(object.name.clone());
            }
        }
        if !full {
            return Ok(ListPage { names, next: None });
        }
        if names.len() < max {
            from.push(0);
        }
    }
    Ok(ListPage { names, next: Some(from) })
}

async fn list_between(core: Rc<Core>, names: Range<ObjectName>, max: usize) -> Result<Vec<ObjectName>> {
    let (from, to) = (keys::name(&names.start), keys::name(&names.end));
    let found = core.index.lookup_range(&from, &to, max).await?;
    let cut = keys::name_space(names.start.namespace()).len();
    let name = |(key, _): &(Vec<u8>, Vec<u8>)| {
        let name = std::str::from_utf8(key.get(cut..)?).ok()?;
        Some(ObjectName::in_namespace(names.start.namespace_shared(), name))
    };
    let damaged = || Error::new(ErrorKind::Corrupt, "an object's name is not UTF-8");
    found.iter().map(|pair| name(pair).ok_or_else(damaged)).collect()
}

impl Store {
    async fn flush_now(core: Rc<Core>) -> Result<()> {
        if core.read_only {
            return Ok(());
        }
        let log = core.log();
        log.sync(log.last_seq()).await
    }
}

impl ObjectBackend for Store {
    fn info(&self) -> BackendInfo {
        self.info.clone()
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        read::read(&self.core, object, read)
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        let (core, object) = (self.core.clone(), object.clone());
        Box::pin(async move { core.map_extents(&object, read).await })
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        let (core, object) = (self.core.clone(), object.clone());
        Box::pin(async move { core.stat(&object, snap).await })
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        transact::submit(&self.core, object, transaction)
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        Box::pin(kv_get(self.core.clone(), object.clone(), keys))
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        Box::pin(kv_list(self.core.clone(), object.clone(), prefix.to_vec(), after.to_vec(), max))
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        let (core, object) = (self.core.clone(), object.clone());
        Box::pin(async move { core.snap_set(&object).await })
    }

    fn identity(&self) -> Option<PoolIdentity> {
        Some(PoolIdentity { store: self.uuid(), pool: 0 })
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        let core = self.core.clone();
        Box::pin(async move { core.snap_allocate().await })
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        let core = self.core.clone();
        Box::pin(async move { core.snap_remove(snap).await })
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        Box::pin(list(self.core.clone(), namespace.map(str::to_owned), cursor, max))
    }

    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        Some(Box::pin(list_between(self.core.clone(), names, max)))
    }

    fn data_policy(&self, prefix: &ObjectName) -> Result<Option<DataPolicy>> {
        Ok(self.core.policies.get(prefix.namespace(), prefix.name()))
    }

    fn set_data_policy(&self, prefix: &ObjectName, policy: Option<DataPolicy>) -> LocalFuture<Result<()>> {
        let (core, prefix) = (self.core.clone(), prefix.clone());
        Box::pin(async move { core.set_policy(&prefix, policy).await })
    }

    fn is_encrypted(&self, prefix: &ObjectName) -> bool {
        self.core.volume_keys.has(prefix)
    }

    fn encrypt(&self, prefix: &ObjectName) -> LocalFuture<Result<()>> {
        let (core, prefix) = (self.core.clone(), prefix.clone());
        Box::pin(async move { core.add_key(&prefix).await })
    }

    fn log_key(&self, prefix: &ObjectName) -> Result<Option<DataKey>> {
        self.core.log_key(prefix)
    }

    fn destroy_key(&self, prefix: &ObjectName) -> LocalFuture<Result<()>> {
        let (core, prefix) = (self.core.clone(), prefix.clone());
        Box::pin(async move { core.destroy_key(&prefix).await })
    }

    fn stored_bytes(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<Option<StoredBytes>>> {
        let (core, object) = (self.core.clone(), object.clone());
        Box::pin(async move { core.stored_bytes(&object, snap).await.map(Some) })
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        Box::pin(Store::flush_now(self.core.clone()))
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        Box::pin(std::future::ready(Ok(Store::usage(self))))
    }
}
