//! How much of what came in may wait before reading stops.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::sync::Notify;

/// Counts bytes that were read and not taken; closed from its limit on.
#[derive(Debug)]
pub(crate) struct Gate {
    num_bytes: AtomicUsize,
    limit: usize,
    has_opened: Notify,
}

impl Gate {
    pub(crate) fn new(limit: usize) -> Self {
        Self { num_bytes: AtomicUsize::new(0), limit, has_opened: Notify::new() }
    }

    /// Waits until less than the limit waits.
    pub(crate) async fn opened(&self) {
        loop {
            // Made before the check, so that an opening in between is not missed.
            let notified = self.has_opened.notified();
            if self.num_bytes.load(Ordering::Acquire) < self.limit {
                return;
            }
            notified.await;
        }
    }

    /// Counts what was read.
    pub(crate) fn enter(&self, num_bytes: usize) {
        self.num_bytes.fetch_add(num_bytes, Ordering::AcqRel);
    }

    /// Counts what was taken.
    pub(crate) fn leave(&self, num_bytes: usize) {
        let before = self.num_bytes.fetch_sub(num_bytes, Ordering::AcqRel);
        if before >= self.limit && before - num_bytes < self.limit {
            self.has_opened.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn it_closes_at_the_limit_and_opens_below_it() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let gate = Arc::new(Gate::new(10));
            gate.enter(9);
            gate.opened().await;
            gate.enter(5);
            let waiting = Arc::clone(&gate);
            let task = tokio::spawn(async move { waiting.opened().await });
            tokio::task::yield_now().await;
            assert!(!task.is_finished());
            gate.leave(4);
            tokio::task::yield_now().await;
            assert!(!task.is_finished(), "10 bytes still wait");
            gate.leave(1);
            task.await.unwrap();
        });
    }
}
