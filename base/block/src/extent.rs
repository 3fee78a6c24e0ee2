use std::ops::Range;

/// A run of bytes: `offset..offset + len`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Extent {
    /// A run of `len` bytes from `offset`.
    pub const fn new(offset: u64, len: u64) -> Self {
        Self { offset, len }
    }

    /// One past the last byte; `None` when that overflows.
    pub fn checked_end(self) -> Option<u64> {
        self.offset.checked_add(self.len)
    }

    /// One past the last byte.
    ///
    /// # Panics
    /// When that overflows; check what comes from outside first.
    pub fn end(self) -> u64 {
        self.checked_end().expect("an extent past 2^64")
    }

    /// As a range.
    pub fn range(self) -> Range<u64> {
        self.offset..self.end()
    }

    /// They share a byte.
    pub fn overlaps(self, other: Extent) -> bool {
        self.offset < other.end() && other.offset < self.end()
    }
}

/// What is known of a run without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ExtentState {
    /// Bytes are stored.
    Data,
    /// Nothing is stored; reads as zeroes.
    Hole,
    /// Stored, or at least reserved, and known to read as zeroes.
    Zero,
}

/// A run and its state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mapped {
    /// Where.
    pub extent: Extent,
    /// What.
    pub state: ExtentState,
}

/// Runs that cover a range without gap, in order; neighbours differ in state.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExtentMap {
    runs: Vec<Mapped>,
}

impl ExtentMap {
    /// Covers nothing yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends `len` bytes of `state` after what is covered (or from `offset`, if nothing is yet), merging.
    ///
    /// # Panics
    /// When `offset` is not where the map ends.
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

    /// The runs.
    pub fn runs(&self) -> &[Mapped] {
        &self.runs
    }

    /// Bytes in state `Data`.
    pub fn data_bytes(&self) -> u64 {
        self.runs.iter().filter(|run| run.state == ExtentState::Data).map(|run| run.extent.len).sum()
    }
}
