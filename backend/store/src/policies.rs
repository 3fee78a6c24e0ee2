//! Data policies: compression of the objects whose names begin with a prefix.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use forebay_block::{Compression, DataPolicy, ErrorKind, ObjectName, Result};

use crate::core::{Core, corrupt};
use crate::format::entry::StoreEntry;
use crate::format::policy;
use crate::keys;
use crate::rebuild::bad_sectors::is_of_bad_sector;

/// Data policies of a store, in memory. All objects of a volume share one.
#[derive(Default)]
pub struct DataPolicies {
    /// Policies by namespace and prefix. The default of the store has neither.
    by_prefix: RefCell<HashMap<String, HashMap<String, DataPolicy>>>,
}

impl DataPolicies {
    /// Returns the policy that is set for a prefix.
    pub fn get(&self, namespace: &str, prefix: &str) -> Option<DataPolicy> {
        self.by_prefix.borrow().get(namespace)?.get(prefix).copied()
    }

    /// Returns the compression of data written to an object.
    pub fn compression(&self, object: &ObjectName) -> Compression {
        if self.by_prefix.borrow().is_empty() {
            return Compression::None;
        }
        let name = object.name();
        let prefix = name.rfind('.').and_then(|dot| self.get(object.namespace(), &name[..=dot]));
        prefix.or_else(|| self.get("", "")).unwrap_or_default().compression
    }

    fn set(&self, namespace: &str, prefix: &str, policy: Option<DataPolicy>) {
        let mut by_prefix = self.by_prefix.borrow_mut();
        match policy {
            Some(policy) => {
                by_prefix.entry(namespace.into()).or_default().insert(prefix.into(), policy);
            }
            None => {
                let Some(prefixes) = by_prefix.get_mut(namespace) else { return };
                prefixes.remove(prefix);
                if prefixes.is_empty() {
                    by_prefix.remove(namespace);
                }
            }
        }
    }
}

/// Policies read at a time.
const POLICY_PAGE: usize = 256;

impl Core {
    /// Applies the setting of a policy; an empty record removes it.
    pub fn apply_policy(&self, namespace: &str, prefix: &str, record: &[u8]) {
        self.features.note_blobs();
        let key = keys::policy(namespace, prefix);
        if record.is_empty() {
            self.index.put(key, None);
            return self.policies.set(namespace, prefix, None);
        }
        self.index.put(key, Some(record.to_vec()));
        match policy::decode(record) {
            Ok(policy) => self.policies.set(namespace, prefix, Some(policy)),
            Err(error) => tracing::error!("the data policy of {prefix}* is ignored: {error}"),
        }
    }

    /// Sets the policy of the objects whose names begin with `prefix`, durably; `None` removes it.
    pub async fn set_policy(self: &Rc<Self>, prefix: &ObjectName, policy: Option<DataPolicy>) -> Result<()> {
        self.refuse_writes()?;
        let same = self.policies.get(prefix.namespace(), prefix.name()) == policy;
        if same {
            return Ok(());
        }
        self.enable_blobs().await?;
        let entry = StoreEntry::Policy {
            namespace: prefix.namespace().into(),
            prefix: prefix.name().into(),
            policy: policy.as_ref().map(policy::encode).unwrap_or_default(),
        };
        self.refuse_writes()?;
        let seq = self.append_global(&entry);
        self.log().sync(seq).await
    }

    /// Loads the policies and the counters of compressed data of the last checkpoint.
    ///
    /// A damaged tree must not prevent opening: data is then written uncompressed, and `store check` reports the damage.
    pub async fn load_policies(&self) -> Result<()> {
        match self.try_load_policies().await {
            Err(error) if error.kind() == ErrorKind::Corrupt || is_of_bad_sector(&error) => {
                tracing::error!(%error, "cannot read all data policies; the default applies where one is missing");
                Ok(())
            }
            done => done,
        }
    }

    async fn try_load_policies(&self) -> Result<()> {
        if let Some(value) = self.index.lookup(&keys::blob_counters()).await? {
            self.blobs.load(&value)?;
        }
        let (mut from, to) = (vec![b'p'], keys::after(b"p"));
        loop {
            let page = self.index.lookup_range(&from, &to, POLICY_PAGE).await?;
            let Some((last, _)) = page.last() else { return Ok(()) };
            from.clone_from(last);
            from.push(0);
            for (key, record) in page {
                let damaged = || corrupt("the key of a data policy");
                let space = key.get(1..3).map(|len| usize::from(u16::from_be_bytes([len[0], len[1]])));
                let split = space.and_then(|len| key.get(3..)?.split_at_checked(len)).ok_or_else(damaged)?;
                let text = |bytes| std::str::from_utf8(bytes).map_err(|_| damaged());
                let (namespace, prefix) = (text(split.0)?, text(split.1)?);
                let policy = policy::decode(&record).map_err(|error| corrupt(error.to_string()))?;
                self.policies.set(namespace, prefix, Some(policy));
            }
        }
    }
}
