//! A queue for one stream or call: the transport's thread fills it, one consumer empties it, either
//! by waiting on it or by being told through the [`Notifier`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::notifier::Notifier;

#[derive(Debug)]
struct State<T> {
    queue: VecDeque<(T, usize)>,
    num_bytes: usize,
    is_awaited: bool,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Mailbox<T> {
    state: Mutex<State<T>>,
    has_changed: Condvar,
    key: u64,
    notifier: Arc<Notifier>,
}

impl<T> Mailbox<T> {
    pub(super) fn new(key: u64, notifier: Arc<Notifier>) -> Self {
        let state = State { queue: VecDeque::new(), num_bytes: 0, is_awaited: false };
        Self { state: Mutex::new(state), has_changed: Condvar::new(), key, notifier }
    }

    /// The key that the notifier tells.
    pub(super) fn key(&self) -> u64 {
        self.key
    }

    /// Adds an item and returns how many bytes wait with it.
    pub(super) fn push(&self, item: T, num_bytes: usize) -> usize {
        let mut state = self.state.lock();
        state.queue.push_back((item, num_bytes));
        state.num_bytes += num_bytes;
        let waiting = state.num_bytes;
        let is_awaited = std::mem::take(&mut state.is_awaited);
        drop(state);
        self.has_changed.notify_one();
        if is_awaited {
            self.notifier.notify(self.key);
        }
        waiting
    }

    /// Forgets what waits, but for this item, which comes next.
    pub(super) fn replace(&self, item: T) {
        {
            let mut state = self.state.lock();
            state.queue.clear();
            state.num_bytes = 0;
        }
        self.push(item, 0);
    }

    /// Takes the next item. If there is none, the notifier tells when one comes.
    pub(super) fn take_or_await(&self) -> Option<T> {
        let mut state = self.state.lock();
        let item = take(&mut state);
        state.is_awaited = item.is_none();
        item
    }

    /// Takes the next item, and waits for it at most this long.
    pub(super) fn wait(&self, limit: Duration) -> Option<T> {
        let until = Instant::now() + limit;
        let mut state = self.state.lock();
        while state.queue.is_empty() {
            if self.has_changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
        take(&mut state)
    }
}

fn take<T>(state: &mut State<T>) -> Option<T> {
    let (item, num_bytes) = state.queue.pop_front()?;
    state.num_bytes -= num_bytes;
    Some(item)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mailbox() -> (Mailbox<u8>, Arc<Notifier>) {
        let notifier = Arc::new(Notifier::new().unwrap());
        (Mailbox::new(9, Arc::clone(&notifier)), notifier)
    }

    #[test]
    fn only_an_awaited_mailbox_is_told_and_only_once() {
        let (mailbox, notifier) = mailbox();
        mailbox.push(1, 10);
        assert!(notifier.take().is_empty());
        assert_eq!(mailbox.take_or_await(), Some(1));
        mailbox.push(2, 10);
        assert!(notifier.take().is_empty(), "it was not asked for");
        assert_eq!(mailbox.take_or_await(), Some(2));
        assert_eq!(mailbox.take_or_await(), None);
        assert_eq!(mailbox.push(3, 10), 10);
        assert_eq!(mailbox.push(4, 10), 20);
        assert_eq!(notifier.take(), [9]);
    }

    #[test]
    fn a_wait_ends_with_an_item_or_at_the_limit() {
        let (mailbox, _) = mailbox();
        assert_eq!(mailbox.wait(Duration::from_millis(5)), None);
        let mailbox = Arc::new(mailbox);
        let waiting = Arc::clone(&mailbox);
        let thread = std::thread::spawn(move || waiting.wait(Duration::from_secs(20)));
        mailbox.push(1, 1);
        assert_eq!(thread.join().unwrap(), Some(1));
    }

    #[test]
    fn replacing_forgets_what_waits() {
        let (mailbox, _) = mailbox();
        mailbox.push(1, 10);
        mailbox.replace(2);
        assert_eq!(mailbox.push(3, 5), 5);
        assert_eq!(mailbox.take_or_await(), Some(2));
        assert_eq!(mailbox.take_or_await(), Some(3));
    }
}
