//! Explores all states of the model, those fewest events away first, so that a counterexample is as short as can be.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};

use crate::model::{ModelAction, ModelState, ReplicationModel};
use crate::recovery::gets_on;

/// Number of states from each of which the volume must get on; of further ones, one in so many.
const RECOVERED: usize = 100_000;
const RECOVERED_EVERY: u64 = 16;

/// Result of an exploration.
#[derive(Debug)]
pub struct Exploration {
    /// Number of states.
    pub states: usize,
    /// Number of events to the state that is furthest away.
    pub depth: usize,
    /// First property that is broken, and the events that lead there.
    pub broken: Option<(&'static str, Vec<ModelAction>)>,
    /// Set where a peer has taken over in some state, and acknowledged a write.
    pub shows_takeover: bool,
}

/// Predecessor of each state, and the number of the event that led from there.  States are known by 64 bits of a hash.
type Reached = HashMap<u64, (u64, u16)>;

fn fingerprint(state: &ModelState) -> u64 {
    let mut hasher = DefaultHasher::new();
    state.hash(&mut hasher);
    hasher.finish()
}

/// Explores all states within the limits of a model, until something is broken.
pub fn explore(model: &ReplicationModel) -> Exploration {
    let first = model.first_state();
    let mut reached = Reached::new();
    reached.insert(fingerprint(&first), (0, 0));
    let mut found = Exploration { states: 1, depth: 0, broken: None, shows_takeover: false };
    let mut level = vec![first];
    while !level.is_empty() {
        let mut next_level = Vec::new();
        for state in level {
            let from = fingerprint(&state);
            for (event, action) in model.actions(&state).into_iter().enumerate() {
                let Some(next) = model.next_state(&state, action) else { continue };
                let at = fingerprint(&next);
                let Entry::Vacant(entry) = reached.entry(at) else { continue };
                entry.insert((from, event as u16));
                found.shows_takeover |= next.shows_takeover();
                let tried = reached.len() <= RECOVERED || at.is_multiple_of(RECOVERED_EVERY);
                let stuck = || (tried && !gets_on(model, &next)).then_some("a volume that stalls does not get on");
                if let Some(what) = next.broken().or_else(stuck) {
                    found.states = reached.len();
                    found.broken = Some((what, events_to(model, &reached, at)));
                    return found;
                }
                next_level.push(next);
            }
        }
        found.depth += usize::from(!next_level.is_empty());
        level = next_level;
    }
    found.states = reached.len();
    found
}

/// Returns the events from the first state to one that was reached.
fn events_to(model: &ReplicationModel, reached: &Reached, mut at: u64) -> Vec<ModelAction> {
    let mut state = model.first_state();
    let first = fingerprint(&state);
    let mut events = Vec::new();
    while at != first {
        let (from, event) = reached[&at];
        events.push(event);
        at = from;
    }
    let take = |event: u16| {
        let action = model.actions(&state).swap_remove(event as usize);
        state = model.next_state(&state, action.clone()).expect("made a difference before");
        action
    };
    events.into_iter().rev().map(take).collect()
}
