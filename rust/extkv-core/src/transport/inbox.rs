//! What came in and waits for the thread that works on it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::gate::Gate;

#[derive(Debug)]
struct State<T> {
    queue: VecDeque<(T, usize)>,
    num_wakes: u64,
    is_closed: bool,
}

/// A queue that sockets fill and one thread empties; a full one closes its gate.
#[derive(Debug)]
pub(crate) struct Inbox<T> {
    state: Mutex<State<T>>,
    has_changed: Condvar,
    gate: Arc<Gate>,
}

impl<T> Inbox<T> {
    /// A queue that stops reading when this many bytes wait.
    pub(crate) fn new(limit_bytes: usize) -> Self {
        let state = State { queue: VecDeque::new(), num_wakes: 0, is_closed: false };
        Self {
            state: Mutex::new(state),
            has_changed: Condvar::new(),
            gate: Arc::new(Gate::new(limit_bytes)),
        }
    }

    pub(crate) fn gate(&self) -> Arc<Gate> {
        Arc::clone(&self.gate)
    }

    /// Adds something that took this many bytes.
    pub(crate) fn push(&self, item: T, num_bytes: usize) {
        let mut state = self.state.lock();
        if state.is_closed {
            return;
        }
        self.gate.enter(num_bytes);
        state.queue.push_back((item, num_bytes));
        self.has_changed.notify_all();
    }

    /// Takes all that is there; waits for something, a [`Inbox::wake`], the end, or the limit.
    pub(crate) fn take_all(&self, limit: Duration) -> Vec<T> {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        let num_wakes = state.num_wakes;
        while state.queue.is_empty() && !state.is_closed && state.num_wakes == num_wakes {
            if self.has_changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        let taken = std::mem::take(&mut state.queue);
        drop(state);
        self.gate.leave(taken.iter().map(|(_, num_bytes)| num_bytes).sum());
        taken.into_iter().map(|(item, _)| item).collect()
    }

    /// Makes a waiting `take_all` return.
    pub(crate) fn wake(&self) {
        self.state.lock().num_wakes += 1;
        self.has_changed.notify_all();
    }

    /// Takes nothing more; what is there can still be taken.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.has_changed.notify_all();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn everything_comes_in_order_and_opens_the_gate() {
        let inbox = Inbox::new(10);
        inbox.push(1, 6);
        inbox.push(2, 6);
        assert_eq!(inbox.take_all(LONG), [1, 2]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(inbox.gate().opened());
    }

    #[test]
    fn an_empty_inbox_is_given_up_at_the_limit() {
        let inbox = Inbox::<u8>::new(10);
        assert!(inbox.take_all(Duration::from_millis(5)).is_empty());
    }

    #[test]
    fn a_wait_ends_by_a_push_a_wake_and_the_end() {
        let inbox = Arc::new(Inbox::new(10));
        let ways: [fn(&Inbox<u8>); 3] = [|i| i.push(7, 1), Inbox::wake, Inbox::close];
        for (way, expected) in ways.into_iter().zip([vec![7], vec![], vec![]]) {
            let waiting = Arc::clone(&inbox);
            let thread = std::thread::spawn(move || waiting.take_all(LONG));
            std::thread::sleep(Duration::from_millis(20));
            way(&inbox);
            assert_eq!(thread.join().unwrap(), expected);
        }
        inbox.push(1, 1);
        assert!(inbox.take_all(LONG).is_empty(), "a closed inbox takes nothing");
    }
}
