//! Entry point for fuzzing: any bytes decode to a list of exports or an error, and a decoded list survives encoding.

use crate::list::{ListState, StoredList};

/// Decodes bytes as a list and, after a zero byte, its journal.
pub fn list(data: &[u8]) {
    let end = data.iter().position(|&byte| byte == 0).unwrap_or(data.len());
    let (list, journal) = (&data[..end], data.get(end + 1..).unwrap_or_default());
    let Ok(stored) = StoredList::<String>::decode(list) else { return };
    let Ok(replayed) = stored.replay(journal, Some) else { return };
    assert!(replayed.state.journal_len().is_none_or(|len| len <= journal.len() as u64));
    let (count, retired) = (replayed.content.targets.len(), replayed.content.retired.clone());
    let list = ListState::default().encode_list(replayed.content, 1).expect("it was decoded");
    let again = StoredList::<String>::decode(&list.text).expect("it was encoded");
    let again = again.replay(b"", Some).expect("no journal").content;
    // Numbers with fractions within entries may change in the last digit.
    assert_eq!((again.targets.len(), again.retired), (count, retired));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn no_bytes_panic(journal in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut data = b"{\"version\":2,\"generation\":1,\"targets\":[]}\0{\"generation\":1}\n[]\n".to_vec();
            data.extend(journal);
            super::list(&data);
        }
    }
}
