//! Mapping of byte ranges of an image to objects.
//!
//! The bytes are distributed over the objects of a set, one stripe unit each in turn; the set is full when its objects
//! are, and the next one follows (Ceph's file layout, `docs/formats/rbd-image.md`). So in one object the image's bytes are in order:
//! what is below some offset of the image is a prefix of each object. With a count of 1 an object is one range of the image.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{BufList, Extent, ObjectName};

use crate::info::Striping;

/// Size of the object name cache. A power of two, so that a run of this many consecutive objects fits.
const NAMES: usize = 256;

/// Part of a request within one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ObjectExtent {
    /// Object number.
    pub(crate) object: u64,
    /// Byte range in the object.
    pub(crate) extent: Extent,
    /// Offset of its first byte in the request.
    pub(crate) at: u64,
}

/// Striping of an image over objects.
pub(crate) struct StripeLayout {
    order: u8,
    /// Binary logarithm of the stripe unit; the object size if the count is 1.
    unit_order: u8,
    /// Objects of a set; 1 unless ranges of the image are in several objects in turn.
    count: u64,
    /// Object name prefix `PREFIX.`, before 16 hexadecimal digits.
    prefix: String,
    namespace: Rc<str>,
    names: RefCell<Vec<Option<(u64, ObjectName)>>>,
}

impl StripeLayout {
    /// Creates the layout of an image. The striping has been checked; see [`Striping::is_valid`].
    pub(crate) fn new(order: u8, striping: Striping, object_prefix: &str, namespace: &Rc<str>) -> Self {
        let prefix = format!("{object_prefix}.");
        // One unit an object is the same as objects one after the other.
        let (unit_order, count) = match striping.is_simple(1 << order) {
            true => (order, 1),
            false => (striping.unit.trailing_zeros() as u8, striping.count),
        };
        Self { order, unit_order, count, prefix, namespace: namespace.clone(), names: RefCell::default() }
    }

    pub(crate) fn object_size(&self) -> u64 {
        1 << self.order
    }

    /// Returns whether neighboring bytes of an object may not be neighbors in the image.
    pub(crate) fn is_striped(&self) -> bool {
        self.count > 1
    }

    fn striping(&self) -> Striping {
        Striping { unit: 1 << self.unit_order, count: self.count }
    }

    /// Returns the number of bytes in a set of objects; a multiple of them begins a set.
    pub(crate) fn set_size(&self) -> u64 {
        self.count << self.order
    }

    /// Returns the number of objects in a set.
    pub(crate) fn set_objects(&self) -> u64 {
        self.count
    }

    /// Returns the number of objects of an image of `size` bytes.
    pub(crate) fn objects(&self, size: u64) -> u64 {
        self.striping().objects(self.object_size(), size)
    }

    /// Returns the numbers of the objects that may have bytes of `extent`, and perhaps of others in their sets.
    pub(crate) fn objects_of(&self, extent: Extent) -> Range<u64> {
        extent.offset / self.set_size() * self.count..self.objects(extent.end())
    }

    /// Returns how many bytes of an object are below an offset of the image: its first ones.
    pub(crate) fn bytes_below(&self, object: u64, offset: u64) -> u64 {
        if self.count == 1 {
            return offset.saturating_sub(object.saturating_mul(self.object_size())).min(self.object_size());
        }
        let set_start = (object / self.count).saturating_mul(self.set_size());
        self.below_in_set(object % self.count, offset.saturating_sub(set_start).min(self.set_size()))
    }

    /// Returns how many bytes of the object at a position of its set are below an offset in the set.
    fn below_in_set(&self, position: u64, offset: u64) -> u64 {
        let unit = 1 << self.unit_order;
        let row = self.count * unit;
        (offset / row * unit) + (offset % row).saturating_sub(position * unit).min(unit)
    }

    /// Returns the offset in the image of a byte of an object.
    fn image_offset(&self, object: u64, offset: u64) -> u64 {
        let (set, position) = (object / self.count, object % self.count);
        let (row, within) = (offset >> self.unit_order, offset & ((1 << self.unit_order) - 1));
        set * self.set_size() + ((row * self.count + position) << self.unit_order) + within
    }

    /// Returns where a range of an object is in the image, in order; ranges of the image that adjoin are one.
    pub(crate) fn image_extents(&self, object: u64, extent: Extent) -> impl Iterator<Item = Extent> + '_ {
        let unit = 1u64 << self.unit_order;
        let mut at = extent.offset;
        std::iter::from_fn(move || {
            let rest = extent.end() - at;
            if rest == 0 {
                return None;
            }
            let len = rest.min(unit - at % unit);
            let part = Extent::new(self.image_offset(object, at), len);
            at += len;
            Some(part)
        })
    }

    /// Returns the smallest range of the image with all of a range of an object, which must not be empty.
    pub(crate) fn span(&self, object: u64, extent: Extent) -> Extent {
        let start = self.image_offset(object, extent.offset);
        Extent::new(start, self.image_offset(object, extent.end() - 1) + 1 - start)
    }

    /// Returns a range of the image with all bytes of a range of objects.
    pub(crate) fn span_of(&self, objects: &Range<u64>) -> Extent {
        let sets = objects.start / self.count..objects.end.div_ceil(self.count);
        Extent::new(sets.start * self.set_size(), (sets.end - sets.start) * self.set_size())
    }

    /// Returns the piece that covers all of `extent`, if it is within one stripe unit.
    pub(crate) fn single(&self, extent: Extent) -> Option<ObjectExtent> {
        let unit = extent.offset >> self.unit_order;
        let within = extent.offset & ((1 << self.unit_order) - 1);
        if within + extent.len > 1 << self.unit_order {
            return None;
        }
        if self.count == 1 {
            return Some(ObjectExtent { object: unit, extent: Extent::new(within, extent.len), at: 0 });
        }
        let (set, unit) = (extent.offset / self.set_size(), unit % (self.set_size() >> self.unit_order));
        let (row, position) = (unit / self.count, unit % self.count);
        let offset = (row << self.unit_order) + within;
        Some(ObjectExtent { object: set * self.count + position, extent: Extent::new(offset, extent.len), at: 0 })
    }

    /// Returns the pieces of `extent`, one an object, in the order of their first bytes.
    pub(crate) fn pieces(&self, extent: Extent) -> impl Iterator<Item = ObjectExtent> + '_ {
        let mut at = 0;
        // Pieces of the set so far.
        let mut number = 0;
        std::iter::from_fn(move || {
            while at < extent.len {
                let from = extent.offset + at;
                if self.count == 1 {
                    let offset = from & (self.object_size() - 1);
                    let len = (extent.len - at).min(self.object_size() - offset);
                    let piece = ObjectExtent { object: from >> self.order, extent: Extent::new(offset, len), at };
                    at += len;
                    return Some(piece);
                }
                let (set, start) = (from / self.set_size(), from % self.set_size());
                let end = self.set_size().min(start + extent.len - at);
                let units = (start >> self.unit_order)..((end - 1) >> self.unit_order) + 1;
                while number < self.count.min(units.end - units.start) {
                    let position = (units.start + number) % self.count;
                    let bytes = self.below_in_set(position, start)..self.below_in_set(position, end);
                    let object = set * self.count + position;
                    number += 1;
                    if !bytes.is_empty() {
                        let at = self.image_offset(object, bytes.start) - extent.offset;
                        let extent = Extent::new(bytes.start, bytes.end - bytes.start);
                        return Some(ObjectExtent { object, extent, at });
                    }
                }
                number = 0;
                at += end - start;
            }
            None
        })
    }

    /// Returns the bytes of a piece, of the data of its request, without copying.
    pub(crate) fn part(&self, data: &BufList, piece: ObjectExtent) -> BufList {
        if !self.is_striped() {
            return data.slice(piece.at as usize..(piece.at + piece.extent.len) as usize);
        }
        let base = self.image_offset(piece.object, piece.extent.offset) - piece.at;
        let mut part = BufList::new();
        for extent in self.image_extents(piece.object, piece.extent) {
            let start = (extent.offset - base) as usize;
            part.append(data.slice(start..start + extent.len as usize));
        }
        part
    }

    /// Puts the bytes of all pieces of a request together, without copying.
    pub(crate) fn join(&self, extent: Extent, parts: Vec<BufList>) -> BufList {
        let mut whole = BufList::new();
        if !self.is_striped() {
            parts.into_iter().for_each(|part| whole.append(part));
            return whole;
        }
        let mut units: Vec<(u64, BufList)> = Vec::new();
        for (piece, part) in self.pieces(extent).zip(parts) {
            let mut at = 0;
            for unit in self.image_extents(piece.object, piece.extent) {
                let end = at + unit.len as usize;
                units.push((unit.offset, part.slice(at..end)));
                at = end;
            }
        }
        units.sort_unstable_by_key(|(offset, _)| *offset);
        units.into_iter().for_each(|(_, unit)| whole.append(unit));
        whole
    }

    /// Returns the piece that covers an object up to the end of an image of `size` bytes.
    pub(crate) fn piece_of(&self, object: u64, size: u64) -> ObjectExtent {
        let extent = Extent::new(0, self.bytes_below(object, size));
        ObjectExtent { object, extent, at: self.image_offset(object, 0) }
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
    use forebay_block::Buf;
    use proptest::prelude::*;

    use super::*;

    fn plain(order: u8, prefix: &str) -> StripeLayout {
        StripeLayout::new(order, Striping { unit: 1 << order, count: 1 }, prefix, &"".into())
    }

    #[test]
    fn pieces_cover_a_request_without_gap() {
        let layout = plain(16, "rbd_data.a1");
        let unit = 1u64 << 16;
        for extent in
            [(0, 1), (0, unit), (0, unit + 1), (unit - 1, 2), (100, 5 * unit), (3 * unit, 0), ((1 << 60) - 9, 9)]
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
        let layout = plain(22, "rbd_data.10226b8b4567");
        for object in [0, 10, 256, 0, 512 + 10, 10, u64::MAX] {
            assert_eq!(layout.name(object).name(), format!("rbd_data.10226b8b4567.{object:016x}"));
            assert_eq!(layout.number(&layout.name(object)), Some(object));
        }
    }

    #[test]
    fn other_names_have_no_number() {
        let layout = plain(22, "rbd_data.1");
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
        let layout = plain(16, "p");
        assert_eq!([0, 1, 65536, 65537].map(|size| layout.objects(size)), [0, 1, 1, 2]);
    }

    /// Returns the object of each byte of an image, and its offset there, byte by byte.
    fn walk(layout: &StripeLayout, unit: u64, size: u64) -> Vec<(u64, u64)> {
        let count = layout.count;
        let mut used = std::collections::BTreeMap::<u64, u64>::new();
        let (mut set, mut position, mut in_unit) = (0, 0, 0);
        let next = (0..size).map(|_| {
            if in_unit == unit {
                (position, in_unit) = ((position + 1) % count, 0);
                let is_full = (0..count).all(|at| used.get(&(set + at)) == Some(&layout.object_size()));
                set += if is_full { count } else { 0 };
            }
            in_unit += 1;
            let object = set + position;
            let offset = used.entry(object).or_default();
            *offset += 1;
            (object, *offset - 1)
        });
        next.collect()
    }

    proptest! {
        #[test]
        fn striping_is_that_of_a_walk_over_all_bytes(
            unit_order in 2u8..=6, more in 0u8..=2, count in 1u64..=5, size in 1u64..3000, ends in any::<(u32, u32)>(),
        ) {
            let order = unit_order + more;
            let striping = Striping { unit: 1 << unit_order, count };
            prop_assert!(striping.is_consistent(1 << order));
            let layout = StripeLayout::new(order, striping, "p", &"".into());
            // A simple layout has units of whole objects.
            let bytes = walk(&layout, 1 << layout.unit_order, size);
            let objects = bytes.iter().map(|(object, _)| object + 1).max().unwrap_or(0);
            prop_assert_eq!(layout.objects(size), objects);
            for object in 0..objects + 2 {
                let below = bytes.iter().filter(|(of, _)| *of == object).count() as u64;
                prop_assert_eq!(layout.bytes_below(object, size), below);
            }
            let start = u64::from(ends.0) % size;
            let extent = Extent::new(start, u64::from(ends.1) % (size - start + 1));
            let data: Vec<u8> = extent.range().map(|offset| offset as u8 ^ (offset >> 8) as u8).collect();
            let data = BufList::from(Buf::copy_of(&data));
            let mut parts = Vec::new();
            let mut seen = 0;
            let range = layout.objects_of(extent);
            for piece in layout.pieces(extent) {
                prop_assert!(extent.len == 0 || range.contains(&piece.object));
                let part = layout.part(&data, piece).to_vec();
                prop_assert_eq!(part.len() as u64, piece.extent.len);
                let span = layout.span(piece.object, piece.extent);
                prop_assert_eq!(span.offset, extent.offset + piece.at);
                let own = layout.span_of(&(piece.object..piece.object + 1));
                prop_assert!(own.offset <= span.offset && span.end() <= own.end());
                let offsets = layout.image_extents(piece.object, piece.extent).flat_map(|extent| extent.range());
                for ((in_object, offset), byte) in piece.extent.range().zip(offsets).zip(part) {
                    prop_assert_eq!(bytes[offset as usize], (piece.object, in_object));
                    prop_assert_eq!(byte, offset as u8 ^ (offset >> 8) as u8);
                    prop_assert!(span.range().contains(&offset));
                    seen += 1;
                }
                parts.push(layout.part(&data, piece));
            }
            prop_assert_eq!(seen, extent.len);
            prop_assert_eq!(layout.join(extent, parts).to_vec(), data.to_vec());
            if let Some(single) = layout.single(extent) {
                prop_assert!(extent.len == 0 || layout.pieces(extent).collect::<Vec<_>>() == [single]);
            }
        }
    }
}
