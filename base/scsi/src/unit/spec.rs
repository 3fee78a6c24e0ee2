//! Configuration of a unit.

use std::sync::Arc;

use super::PoolSpace;
use crate::inquiry::UnitIdentity;

/// Configuration of a unit.
#[derive(Debug, Clone)]
pub struct UnitSpec {
    /// Volume name.
    pub name: String,
    /// Unit identity.
    pub identity: UnitIdentity,
    /// Read-only unit.
    pub read_only: bool,
    /// Rotational medium.
    pub rotational: bool,
    /// Space of the pool.
    pub space: Arc<PoolSpace>,
    /// Initiators that see the unit; an empty list admits all.
    pub initiators: Vec<String>,
}

/// Returns true if a name is in a list, in which `*` at the end of an entry matches any suffix; an empty list matches
/// all.
pub fn is_listed(list: &[String], name: &str) -> bool {
    list.is_empty()
        || list.iter().any(|entry| match entry.strip_suffix('*') {
            Some(start) => name.get(..start.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(start)),
            None => entry.eq_ignore_ascii_case(name),
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_of_initiators() {
        let list = |entries: &[&str]| entries.iter().map(|&entry| entry.to_owned()).collect::<Vec<_>>();
        assert!(is_listed(&[], "iqn.x"));
        assert!(is_listed(&list(&["iqn.a", "IQN.X"]), "iqn.x"));
        assert!(!is_listed(&list(&["iqn.a"]), "iqn.ab"));
        assert!(is_listed(&list(&["iqn.a*"]), "iqn.ab") && !is_listed(&list(&["iqn.a*"]), "iqn"));
    }
}
