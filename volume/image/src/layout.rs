//! Mapping of byte ranges of an image to objects.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::{Extent, ObjectName};

/// Size of the object name cache. A power of two, so that a run of this many consecutive objects fits.
const NAMES: usize = 256;

/// Part of a request within one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectExtent {
    /// Object number.
    pub(crate) object: u64,
    /// Byte range in the object.
    pub(crate) extent: Extent,
    /// Offset in the request, in bytes from its start.
    pub(crate) at: u64,
}

/// Striping of an image over objects.
pub(crate) struct StripeLayout {
    order: u8,
    /// Object name prefix `PREFIX.`, before 16 hexadecimal digits.
    prefix: String,
    namespace: Rc<str>,
    names: RefCell<Vec<Option<(u64, ObjectName)>>>,
}

impl StripeLayout {
    pub(crate) fn new(order: u8, object_prefix: &str, namespace: &Rc<str>) -> Self {
        let prefix = format!("{object_prefix}.");
        Self { order, prefix, namespace: namespace.clone(), names: RefCell::default() }
    }

    pub(crate) fn object_size(&self) -> u64 {
        1 << self.order
    }

    /// Returns the number of objects of an image of `size` bytes.
    pub(crate) fn objects(&self, size: u64) -> u64 {
        size.div_ceil(self.object_size())
    }

    /// Returns the piece that covers all of `extent`, if it is within one object.
    pub(crate) fn single(&self, extent: Extent) -> Option<ObjectExtent> {
        let object = extent.offset >> self.order;
        let offset = extent.offset & (self.object_size() - 1);
        (offset + extent.len <= self.object_size()).then(|| ObjectExtent {
            object,
            extent: Extent::new(offset, extent.len),
            at: 0,
        })
    }

    /// Returns the pieces of `extent`, in order.
    pub(crate) fn pieces(&self, extent: Extent) -> impl Iterator<Item = ObjectExtent> + use<> {
        let (order, object_size) = (self.order, self.object_size());
        let mut at = 0;
        std::iter::from_fn(move || {
            let rest = extent.len - at;
            if rest == 0 {
                return None;
            }
            let from = extent.offset + at;
            let offset = from & (object_size - 1);
            let len = rest.min(object_size - offset);
            let piece = ObjectExtent { object: from >> order, extent: Extent::new(offset, len), at };
            at += len;
            Some(piece)
        })
    }

    /// Returns the piece that covers an object up to the end of an image of `size` bytes.
    pub(crate) fn piece_of(&self, object: u64, size: u64) -> ObjectExtent {
        let at = object << self.order;
        ObjectExtent { object, extent: Extent::new(0, self.object_size().min(size - at)), at }
    }

    /// Returns the name of a data object.
    pub(crate) fn name(&self, object: u64) -> ObjectName {
        let mut names = self.names.borrow_mut();
        if names.is_empty() {
            names.resize(NAMES, None);
        }
        let slot = &mut names[object as usize % NAMES];
        match slot {
            Some((number, name)) if *number == object => name.clone(),
            _ => {
                let name = format!("{}{object:016x}", self.prefix);
                let name = ObjectName::in_namespace(self.namespace.clone(), name);
                *slot = Some((object, name.clone()));
                name
            }
        }
    }

    /// Returns the number of the data object of that name, also if a suffix follows it; `None` for any other name.
    pub(crate) fn number(&self, name: &ObjectName) -> Option<u64> {
        let digits = name.name().strip_prefix(&self.prefix)?.get(..16)?;
        let lower = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        lower.then(|| u64::from_str_radix(digits, 16).ok()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_a_request_without_gap() {
        let layout = StripeLayout::new(16, "rbd_data.a1", &"".into());
        let unit = 1u64 << 16;
        for extent in
            [(0, 1), (0, unit), (0, unit + 1), (unit - 1, 2), (100, 5 * unit), (3 * unit, 0), (u64::MAX - 9, 9)]
        {
            let extent = Extent::new(extent.0, extent.1);
            let pieces: Vec<ObjectExtent> = layout.pieces(extent).collect();
            let mut at = 0;
            for piece in &pieces {
                assert_eq!(piece.at, at);
                assert_eq!(piece.object * unit + piece.extent.offset, extent.offset + at);
                assert!(piece.extent.len > 0 && piece.extent.end() <= unit);
                at += piece.extent.len;
            }
            assert_eq!(at, extent.len);
            match layout.single(extent) {
                Some(single) => assert!(extent.len == 0 || pieces == [single]),
                None => assert!(pieces.len() > 1),
            }
        }
    }

    #[test]
    fn names_are_hexadecimal_and_remembered_rightly() {
        let layout = StripeLayout::new(22, "rbd_data.10226b8b4567", &"".into());
        for object in [0, 10, 256, 0, 512 + 10, 10, u64::MAX] {
            assert_eq!(layout.name(object).name(), format!("rbd_data.10226b8b4567.{object:016x}"));
            assert_eq!(layout.number(&layout.name(object)), Some(object));
        }
    }

    #[test]
    fn other_names_have_no_number() {
        let layout = StripeLayout::new(22, "rbd_data.1", &"".into());
        let number = |name: &str| layout.number(&ObjectName::new(name));
        assert_eq!(number("rbd_data.1.00000000000000ff.more"), Some(0xff));
        for name in
            ["rbd_data.1", "rbd_data.1.", "rbd_data.1.ff", "rbd_data.1.00000000000000FF", "rbd_data.2.00000000000000ff"]
        {
            assert_eq!(number(name), None, "{name}");
        }
    }

    #[test]
    fn objects_are_counted_up() {
        let layout = StripeLayout::new(16, "p", &"".into());
        assert_eq!([0, 1, 65536, 65537].map(|size| layout.objects(size)), [0, 1, 1, 2]);
    }
}
