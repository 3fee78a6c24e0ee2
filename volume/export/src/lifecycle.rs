//! Life of an export, from its entry in a list to its end.
//!
//! ```text
//!          begin             serve
//!  Idle ----------> Opening ------> Serving
//!   ^                ^   |             |
//!   |          retry |   | fail        |
//!   |                |   v     lose    |
//!   |               Failed <-----------+      Broken: only an operator ends it
//!   +------------------ end -----------+
//! ```
//!
//! | invariant | |
//! |---|---|
//! | L1 | one task at most opens the image of an export: the one to which [`begin`] or [`retry`] returned `true` |
//! | L2 | an export that is being detached is not opened again, and the task that opens it does not serve it |
//! | L3 | an export whose detaching fails is served, opened, or has a failure to show: it is not idle |
//!
//! [`begin`]: ExportLifecycle::begin
//! [`retry`]: ExportLifecycle::retry

/// State of an export, as seen by hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportState<S, F> {
    /// Served to hosts.
    Serving(S),
    /// Image not yet opened; the task that opens it serves the export.  Holds the failure of the previous attempt, if
    /// any.
    Opening(Option<F>),
    /// Failure to open or serve the image; it is retried.
    Failed(F),
    /// Failure of its entry in the list, which an operator has to correct.
    Broken(F),
    /// Not to be served: nothing has begun to, or it has ended.
    Idle,
}

/// Life of an export that is served as an `S`, with failures `F`.
#[derive(Debug)]
pub struct ExportLifecycle<S, F> {
    state: ExportState<S, F>,
    /// Set while it is being detached: it is no longer in the list, and its number is not free yet.
    detaching: bool,
}

impl<S, F: Clone> ExportLifecycle<S, F> {
    /// Creates the life of an export that is not served yet.
    pub fn idle() -> Self {
        Self::new(ExportState::Idle)
    }

    /// Creates the life of an export that is served already.
    pub fn serving(served: S) -> Self {
        Self::new(ExportState::Serving(served))
    }

    /// Creates the life of an export that an operator has to correct.
    pub fn broken(failure: F) -> Self {
        Self::new(ExportState::Broken(failure))
    }

    fn new(state: ExportState<S, F>) -> Self {
        Self { state, detaching: false }
    }

    /// Returns the state.
    pub fn state(&self) -> &ExportState<S, F> {
        &self.state
    }

    /// Returns what serves it, if it is served.
    pub fn served(&self) -> Option<&S> {
        match &self.state {
            ExportState::Serving(served) => Some(served),
            _ => None,
        }
    }

    /// Returns whether a task opens its image, or is to.
    pub fn is_opening(&self) -> bool {
        matches!(self.state, ExportState::Opening(_))
    }

    /// Returns whether it is being detached.
    pub fn is_detaching(&self) -> bool {
        self.detaching
    }

    /// Marks an idle export as opening; returns whether the caller is to open its image.
    pub fn begin(&mut self) -> bool {
        let begins = matches!(self.state, ExportState::Idle);
        if begins {
            self.state = ExportState::Opening(None);
        }
        begins
    }

    /// Marks a failed export as opening, unless it is being detached; returns whether the caller is to open its image.
    pub fn retry(&mut self) -> bool {
        match &self.state {
            ExportState::Failed(failure) if !self.detaching => {
                self.state = ExportState::Opening(Some(failure.clone()));
                true
            }
            _ => false,
        }
    }

    /// Returns whether the task that has opened its image is to serve it.  If it is being detached it is not, and
    /// becomes idle: should the detaching fail, it is known that no task will serve it.
    pub fn is_wanted(&mut self) -> bool {
        if self.is_opening() && self.detaching {
            self.state = ExportState::Idle;
        }
        self.is_opening()
    }

    /// Returns the failure of the previous attempt to open its image, while it is being opened again.
    pub fn previous_failure(&self) -> Option<&F> {
        match &self.state {
            ExportState::Opening(before) => before.as_ref(),
            _ => None,
        }
    }

    /// Records that its image could not be opened or served.
    pub fn fail(&mut self, failure: F) {
        debug_assert!(self.is_opening(), "L1: only the task that opens an image fails to");
        self.state = ExportState::Failed(failure);
    }

    /// Records that its front cannot serve it any more, if it is served; returns what served it.
    pub fn lose(&mut self, failure: F) -> Option<S> {
        match self.state {
            ExportState::Serving(_) => match std::mem::replace(&mut self.state, ExportState::Failed(failure)) {
                ExportState::Serving(served) => Some(served),
                _ => None,
            },
            _ => None,
        }
    }

    /// Records that an operator has to correct it.
    pub fn set_broken(&mut self, failure: F) {
        self.state = ExportState::Broken(failure);
    }

    /// Begins to detach it.
    pub fn begin_detach(&mut self) {
        self.detaching = true;
    }

    /// Ends a detach that has failed.
    pub fn abort_detach(&mut self) {
        self.detaching = false;
    }

    /// Records the failure of a detach that began while its image was being opened.  If the image was opened
    /// meanwhile, the export was not served (L2); it shows the failure and is retried (L3).
    pub fn fail_detach(&mut self, failure: F) {
        self.detaching = false;
        if !self.is_opening() {
            self.state = ExportState::Failed(failure);
        }
    }

    /// Ends it; returns the state that it had, with what served it.
    pub fn end(&mut self) -> ExportState<S, F> {
        std::mem::replace(&mut self.state, ExportState::Idle)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone, Copy)]
    enum Step {
        Begin,
        Retry,
        /// The task that opens the image is done; with `true`, successfully.
        Opened(bool),
        Lose,
        Detach,
        /// The detach has failed.
        FailDetach,
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            Just(Step::Begin),
            Just(Step::Retry),
            any::<bool>().prop_map(Step::Opened),
            Just(Step::Lose),
            Just(Step::Detach),
            Just(Step::FailDetach),
        ]
    }

    proptest! {
        /// Compares with a plain model of openers of the image and of what hosts see.
        #[test]
        fn one_task_opens_an_image_and_no_export_is_forgotten(steps in prop::collection::vec(step(), 0..40)) {
            let mut life: ExportLifecycle<&str, &str> = ExportLifecycle::idle();
            // Tasks that open the image; whether the export was detached while one did.
            let (mut openers, mut begun) = (0, false);
            for step in steps {
                match step {
                    Step::Begin if !begun => {
                        begun = true;
                        openers += u32::from(life.begin());
                    }
                    Step::Begin => {}
                    Step::Retry => {
                        let (detaching, before) = (life.is_detaching(), life.state().clone());
                        let retried = life.retry();
                        openers += u32::from(retried);
                        prop_assert_eq!(retried, !detaching && matches!(before, ExportState::Failed(_)), "L2");
                    }
                    Step::Opened(_) if openers == 0 => {}
                    Step::Opened(succeeds) => {
                        openers -= 1;
                        let detaching = life.is_detaching();
                        let wanted = life.is_wanted();
                        prop_assert_eq!(wanted, !detaching, "L2");
                        if wanted && succeeds {
                            life = ExportLifecycle::serving("a volume");
                        } else if wanted {
                            life.fail("no volume");
                        }
                    }
                    Step::Lose => {
                        let was_served = life.served().is_some();
                        prop_assert_eq!(life.lose("no socket").is_some(), was_served);
                        prop_assert!(!was_served || life.state() == &ExportState::Failed("no socket"));
                    }
                    Step::Detach if life.is_opening() => life.begin_detach(),
                    Step::Detach => {}
                    Step::FailDetach if life.is_detaching() => {
                        life.fail_detach("not detached");
                        prop_assert!(life.state() != &ExportState::Idle, "L3");
                    }
                    Step::FailDetach => {}
                }
                prop_assert!(openers <= 1, "L1");
                prop_assert_eq!(life.is_opening(), openers == 1, "L1: {:?}", life.state());
                let is_idle = life.state() == &ExportState::Idle;
                prop_assert_eq!(is_idle, !begun || (life.is_detaching() && openers == 0), "L3");
            }
        }
    }

    #[test]
    fn what_is_broken_is_not_opened() {
        let mut life: ExportLifecycle<(), &str> = ExportLifecycle::broken("no such front");
        assert!(!life.begin() && !life.retry() && !life.is_wanted());
        assert_eq!(life.end(), ExportState::Broken("no such front"));
        assert_eq!(life.state(), &ExportState::Idle);
    }
}
