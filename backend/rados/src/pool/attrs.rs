//! Extended attributes of objects.  Images do not use them; other users of RADOS do.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, Result, SnapContext, SnapId};

use super::{RadosPool, answer, check_name, ended, output, refusal};
use crate::error::errno;
use crate::osd::OsdRequest;
use crate::osd::wire::{OsdOp, SNAP_HEAD, code, flag};

/// Maximum length of an attribute name in bytes, imposed by the object store of OSDs.
const NAME_MAX: usize = 255;
/// Maximum length of an attribute value in bytes (the default of `osd max attr size` is unlimited; BlueStore stores
/// attributes with the object).
const VALUE_MAX: usize = 1 << 20;

/// Step of an attribute change.  The steps of a change are applied in order and atomically.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AttrOp {
    /// Guard: the attribute must have this value, else the change fails with `Guard`.  A missing attribute compares as
    /// empty.
    Compare(String, Vec<u8>),
    /// Sets an attribute, and creates the object if it does not exist.
    Set(String, Vec<u8>),
    /// Removes an attribute, if it exists.
    Remove(String),
}

impl AttrOp {
    fn operation(&self) -> Result<OsdOp> {
        let (code, name, value) = match self {
            Self::Compare(name, value) => (code::CMP_ATTR, name, value.as_slice()),
            Self::Set(name, value) => (code::SET_ATTR, name, value.as_slice()),
            Self::Remove(name) => (code::RM_ATTR, name, [].as_slice()),
        };
        check_attr(name, value)?;
        Ok(OsdOp::attr(code, name, value))
    }
}

fn check_attr(name: &str, value: &[u8]) -> Result<()> {
    if name.is_empty() || name.len() > NAME_MAX || name.contains('\0') || value.len() > VALUE_MAX {
        let text = format!("an attribute with a name of {} bytes and a value of {}", name.len(), value.len());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

impl RadosPool {
    /// Returns an attribute of an object; `None` if it does not exist.
    ///
    /// # Errors
    /// `NotFound` if the object does not exist at that snapshot; `Invalid` for an invalid attribute name.
    pub async fn attr(&self, object: &ObjectName, snap: SnapId, name: &str) -> Result<Option<Vec<u8>>> {
        check_name(object)?;
        check_attr(name, &[])?;
        let request = self.request(object, snap.0, flag::READ, vec![OsdOp::attr(code::GET_ATTR, name, &[])]);
        let mut reply = self.cluster.objecter().submit(request).await.unwrap_or_else(|| Err(ended()))?;
        match reply.result {
            0.. => Ok(Some(output(&mut reply, 0).to_vec())),
            result if result == -errno::ENODATA => Ok(None),
            result => Err(refusal(result, object)),
        }
    }

    /// Returns all attributes of an object, sorted by name.
    ///
    /// # Errors
    /// `NotFound` if the object does not exist at that snapshot.
    pub async fn attrs(&self, object: &ObjectName, snap: SnapId) -> Result<Vec<(String, Vec<u8>)>> {
        let mut reply = self.ask(object, snap.0, vec![OsdOp::new(code::GET_ATTRS)]).await?;
        answer::attrs(&output(&mut reply, 0)).map_err(|error| answer::strange(object, error))
    }

    /// Changes attributes and returns the resulting object version.
    ///
    /// # Errors
    /// `Guard` if a comparison fails; `NotFound` for a removal or comparison on an object that does not exist.
    pub async fn change_attrs(
        &self,
        object: &ObjectName,
        snapc: Option<Rc<SnapContext>>,
        changes: &[AttrOp],
    ) -> Result<u64> {
        check_name(object)?;
        let ops = changes.iter().map(AttrOp::operation).collect::<Result<Vec<_>>>()?;
        let flags = flag::WRITE | flag::FULL_TRY;
        let request =
            OsdRequest { pool: self.id, object: object.clone(), group: 0, snap: SNAP_HEAD, snapc, flags, ops };
        let reply = self.cluster.objecter().submit(request).await.unwrap_or_else(|| Err(ended()))?;
        if reply.result < 0 { Err(refusal(reply.result, object)) } else { Ok(reply.version) }
    }
}
