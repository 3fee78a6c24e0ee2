use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::Poll;

/// Future of [`join_all`]'s list, then its output.
enum Joined<F: Future> {
    Pending(F),
    Done(F::Output),
}

/// Runs futures concurrently, within the task that awaits this; returns their outputs in order.  A future is dropped as
/// soon as it is done, and no other is started or ended because of its output.
///
/// Each wake-up polls every future that is not done, so the cost grows with the square of their number.  That suits the
/// parts of one request, a few dozen at most; [`InFlight`](super::InFlight) polls only what was woken.
pub async fn join_all<F: Future + Unpin>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut joined: Vec<Joined<F>> = futures.into_iter().map(Joined::Pending).collect();
    poll_fn(|cx| {
        let mut pending = false;
        for each in &mut joined {
            if let Joined::Pending(future) = each {
                match Pin::new(future).poll(cx) {
                    Poll::Ready(output) => *each = Joined::Done(output),
                    Poll::Pending => pending = true,
                }
            }
        }
        if pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    let outputs = joined.into_iter().filter_map(|each| match each {
        Joined::Done(output) => Some(output),
        Joined::Pending(_) => None,
    });
    outputs.collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::pin::pin;
    use std::rc::Rc;
    use std::task::{Context, Waker};

    use proptest::prelude::*;

    use super::*;

    /// Becomes ready at a poll; counts its polls, and its drop as one more.
    struct After(u32, Rc<Cell<u32>>);

    impl Future for After {
        type Output = u32;

        fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<u32> {
            self.1.set(self.1.get() + 1);
            if self.1.get() == self.0 { Poll::Ready(self.0) } else { Poll::Pending }
        }
    }

    impl Drop for After {
        fn drop(&mut self) {
            self.1.set(self.1.get() + 1);
        }
    }

    #[test]
    fn nothing_is_done_at_once() {
        let joined = pin!(join_all(Vec::<After>::new()));
        assert_eq!(joined.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Vec::new()));
    }

    proptest! {
        #[test]
        fn outputs_are_in_order_and_nothing_is_polled_after_its_end(
            rounds in prop::collection::vec(1..6_u32, 1..10),
        ) {
            let polls: Vec<Rc<Cell<u32>>> = rounds.iter().map(|_| Rc::default()).collect();
            let futures = rounds.iter().zip(&polls).map(|(&round, polls)| After(round, polls.clone()));
            let mut joined = pin!(join_all(futures));
            let last = *rounds.iter().max().expect("some");
            for round in 1..=last {
                let polled = joined.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                prop_assert_eq!(polled.is_ready(), round == last);
                if let Poll::Ready(outputs) = polled {
                    prop_assert_eq!(outputs, rounds.clone());
                }
                for (of_future, polls) in rounds.iter().zip(&polls) {
                    let done = u32::from(*of_future <= round);
                    prop_assert_eq!(polls.get(), round.min(*of_future) + done, "dropped when it is done");
                }
            }
        }
    }
}
