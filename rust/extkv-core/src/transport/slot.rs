//! A place for one value that a socket's handler delivers and another thread waits for.

use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

/// Holds one value; the first one put stays.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    value: Mutex<Option<T>>,
    is_full: Condvar,
}

impl<T> Default for Slot<T> {
    fn default() -> Self {
        Self { value: Mutex::new(None), is_full: Condvar::new() }
    }
}

impl<T: Clone> Slot<T> {
    /// Puts a value; returns whether there was none.
    pub(crate) fn put(&self, value: T) -> bool {
        let mut current = self.value.lock();
        if current.is_some() {
            return false;
        }
        *current = Some(value);
        self.is_full.notify_all();
        true
    }

    /// Waits for the value, at most this long.
    pub(crate) fn wait(&self, limit: Duration) -> Option<T> {
        let until = Instant::now() + limit;
        let mut value = self.value.lock();
        while value.is_none() {
            if self.is_full.wait_until(&mut value, until).timed_out() {
                break;
            }
        }
        value.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn the_first_value_stays() {
        let slot = Arc::new(Slot::default());
        assert_eq!(slot.wait(Duration::from_millis(1)), None);
        let waiting = Arc::clone(&slot);
        let thread = std::thread::spawn(move || waiting.wait(Duration::from_secs(20)));
        assert!(slot.put(1));
        assert!(!slot.put(2));
        assert_eq!(thread.join().unwrap(), Some(1));
    }
}
