use std::ops::Range;

/// Byte range: `offset..offset + len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Extent {
    /// Creates an extent of `len` bytes from `offset`.
    pub const fn new(offset: u64, len: u64) -> Self {
        Self { offset, len }
    }

    /// Returns the end (exclusive); `None` when it overflows.
    pub fn checked_end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// Returns the end (exclusive).
    ///
    /// # Panics
    /// When that overflows; validate untrusted input first.
    pub fn end(self) -> u64 {
        self.checked_end().expect("an extent past 2^64")
    }

    /// Returns the extent as a range.
    pub fn range(self) -> Range<u64> {
        self.offset..self.end()
    }

    /// Returns whether the extents share a byte.
    pub fn overlaps(self, other: Extent) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// Allocation state of an extent, known without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtentState {
    /// Stored bytes.
    Data,
    /// Unallocated; reads as zeroes.
    Hole,
    /// Stored or at least reserved, and known to read as zeroes.
    Zero,
}

/// Extent and its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapped {
    /// Byte range.
    pub extent: Extent,
    /// State of the range.
    pub state: ExtentState,
}

/// Extents that cover a range without gap, in order; neighbours differ in state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtentMap {
    runs: Vec<Mapped>,
}

impl ExtentMap {
    /// Creates a map that covers nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `len` bytes of `state` after the covered range (or from `offset`, if the map is empty), merging equal
    /// states.
    ///
    /// # Panics
    /// When `offset` is not the end of a non-empty map.
    pub fn push(&mut self, offset: u64, len: u64, state: ExtentState) {
        if len == 0 {
            return;
        }
        if let Some(last) = self.runs.last_mut() {
            assert_eq!(last.extent.end(), offset, "a gap in an extent map");
            if last.state == state {
                last.extent.len += len;
                return;
            }
        }
        self.runs.push(Mapped { extent: Extent::new(offset, len), state });
    }

    /// Returns the extents.
    pub fn runs(&self) -> &[Mapped] {
        &self.runs
    }

    /// Returns the bytes in state `Data`.
    pub fn data_bytes(&self) -> u64 {
        self.runs.iter().filter(|run| run.state == ExtentState::Data).map(|run| run.extent.len).sum()
    }
}
