//! Shape of a copy of a log: the numbers of its entries, and the term of each.

/// Consecutive entries of one term.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TermSpan {
    /// Term of the entries.
    pub term: u64,
    /// Number after the last entry.
    pub end: u64,
}

/// Shape of a copy of a log: which entries it has, and in which term each was appended.
///
/// Two copies in which an entry has the same number and term have the same entry there, and the same ones before it.  So
/// shapes alone decide how far copies agree.
///
/// | invariant | |
/// |---|---|
/// | S1 | the ends of the spans increase strictly, the first being after the tail |
/// | S2 | terms increase strictly from span to span |
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogShape {
    tail: u64,
    spans: Vec<TermSpan>,
}

impl LogShape {
    /// Returns the shape of a log that is empty at `tail`.
    pub fn empty_at(tail: u64) -> Self {
        Self { tail, spans: Vec::new() }
    }

    /// Returns the number of the oldest entry that the backend may not hold.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// Returns the number of the next entry.
    pub fn head(&self) -> u64 {
        self.spans.last().map_or(self.tail, |span| span.end)
    }

    /// Returns the spans, oldest first.
    pub fn spans(&self) -> &[TermSpan] {
        &self.spans
    }

    /// Returns the term of an entry, if the log has it.
    pub fn term_of(&self, number: u64) -> Option<u64> {
        if number < self.tail {
            return None;
        }
        self.spans.iter().find(|span| number < span.end).map(|span| span.term)
    }

    /// Appends entries of a term.
    pub fn push(&mut self, term: u64, count: u64) {
        if count == 0 {
            return;
        }
        let end = self.head() + count;
        match self.spans.last_mut() {
            Some(last) if last.term == term => last.end = end,
            last => {
                debug_assert!(last.is_none_or(|last| last.term < term), "S2: term {term}");
                self.spans.push(TermSpan { term, end });
            }
        }
    }

    /// Removes the entries from `number` on.
    pub fn truncate(&mut self, number: u64) {
        let number = number.max(self.tail);
        let whole = self.spans.partition_point(|span| span.end <= number);
        let begin = whole.checked_sub(1).map_or(self.tail, |at| self.spans[at].end);
        match self.spans.get_mut(whole) {
            Some(span) if begin < number => {
                span.end = number;
                self.spans.truncate(whole + 1);
            }
            _ => self.spans.truncate(whole),
        }
    }

    /// Moves the tail forward, over entries that the backend holds; never past the head.
    pub fn retire(&mut self, tail: u64) {
        let tail = tail.min(self.head());
        if tail > self.tail {
            self.tail = tail;
            self.spans.retain(|span| span.end > tail);
        }
    }

    /// Returns the number of the first entry in which the copies may differ; the head of the shorter one if they do not.
    ///
    /// Entries before the tail of either count as equal: they are in the backend.
    pub fn agreement(&self, other: &Self) -> u64 {
        let end = self.head().min(other.head());
        let mut at = self.tail.max(other.tail).min(end);
        while at < end {
            let (Some(mine), Some(theirs)) = (self.span_at(at), other.span_at(at)) else { break };
            if mine.term != theirs.term {
                break;
            }
            at = mine.end.min(theirs.end).min(end);
        }
        at
    }

    fn span_at(&self, number: u64) -> Option<TermSpan> {
        self.spans.iter().copied().find(|span| number < span.end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the shape of a plain list of terms, of which `tail` are retired.
    fn shape(terms: &[u64], tail: u64) -> LogShape {
        let mut shape = LogShape::default();
        terms.iter().for_each(|term| shape.push(*term, 1));
        shape.retire(tail);
        shape
    }

    /// Returns increasing terms, each some entries long.
    fn terms() -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(1..4_u64, 0..12).prop_map(|steps| {
            let mut term = 1;
            steps
                .into_iter()
                .map(|step| {
                    term += step / 3;
                    term
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn a_shape_is_a_list_of_terms(terms in terms(), tail in 0..14_u64, cut in 0..14_u64) {
            let mut found = shape(&terms, tail);
            let tail = tail.min(terms.len() as u64);
            prop_assert_eq!((found.tail(), found.head()), (tail, terms.len() as u64));
            let expected = |kept: u64, number: u64| (tail..kept).contains(&number).then(|| terms[number as usize]);
            for number in 0..14 {
                prop_assert_eq!(found.term_of(number), expected(terms.len() as u64, number));
            }
            found.truncate(cut);
            let kept = cut.clamp(tail, terms.len() as u64);
            prop_assert_eq!(found.head(), kept);
            for number in 0..14 {
                prop_assert_eq!(found.term_of(number), expected(kept, number));
            }
        }

        #[test]
        fn copies_agree_as_far_as_their_terms(one in terms(), other in terms(), tails in (0..14_u64, 0..14_u64)) {
            let (a, b) = (shape(&one, tails.0), shape(&other, tails.1));
            let end = a.head().min(b.head());
            let first = a.tail().max(b.tail()).min(end);
            let expected = (first..end).find(|at| one[*at as usize] != other[*at as usize]).unwrap_or(end);
            prop_assert_eq!(a.agreement(&b), expected);
            prop_assert_eq!(b.agreement(&a), expected);
        }
    }
}
