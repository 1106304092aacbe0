//! Messages on their way to one peer, counted in bytes until the network has taken them.
//!
//! A message is owned by the outbox until it is written, so its memory cannot be used for anything
//! else before.

use std::collections::VecDeque;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::zmtp::Frames;

/// Most messages that one write may join.
const MAX_BATCH_LEN: usize = 64;
/// Bytes at which a batch is large enough.
const BATCH_BYTES: usize = 256 * 1024;

/// One thing to send.
#[derive(Debug)]
pub(crate) enum Item {
    /// A message.
    Message(Frames),
    /// A command, as it goes over the wire.
    Command(Bytes),
}

impl Item {
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::Message(frames) => num_bytes(frames),
            Self::Command(command) => command.len(),
        }
    }
}

/// Bytes of a message, with something for each frame's own record.
pub(crate) fn num_bytes(frames: &[Bytes]) -> usize {
    frames.iter().map(|frame| frame.len() + 32).sum()
}

/// A message that was not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PushError {
    /// Too much waits already.
    Full {
        /// Bytes that wait.
        queued_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The connection is gone or closing.
    Closed,
}

#[derive(Debug, Default)]
struct State {
    queue: VecDeque<Item>,
    num_queued_bytes: usize,
    // What is being written. If the connection breaks meanwhile, it is lost.
    num_written_bytes: usize,
    is_closed: bool,
}

impl State {
    fn num_bytes(&self) -> usize {
        self.num_queued_bytes + self.num_written_bytes
    }
}

/// Queue of one peer: many threads push, one task writes.
#[derive(Debug)]
pub(crate) struct Outbox {
    state: Mutex<State>,
    limit: usize,
    has_changed: Notify,
}

impl Outbox {
    pub(crate) fn new(limit: usize) -> Self {
        Self { state: Mutex::default(), limit, has_changed: Notify::new() }
    }

    /// Bytes that wait or are being written.
    pub(crate) fn num_bytes(&self) -> usize {
        self.state.lock().num_bytes()
    }

    /// Queues a message. One that is larger than the limit is taken when nothing waits.
    pub(crate) fn push(&self, frames: Frames) -> Result<(), PushError> {
        let size = num_bytes(&frames);
        let mut state = self.state.lock();
        let queued_bytes = state.num_bytes();
        if queued_bytes > 0 && queued_bytes + size > self.limit {
            return Err(PushError::Full { queued_bytes, limit_bytes: self.limit });
        }
        self.push_item(&mut state, Item::Message(frames), size)
    }

    /// Queues a message whatever waits: for few and small ones that must not be lost.
    pub(crate) fn push_over_limit(&self, frames: Frames) -> Result<(), PushError> {
        let size = num_bytes(&frames);
        self.push_item(&mut self.state.lock(), Item::Message(frames), size)
    }

    /// Queues a command, unless so much waits that the peer would not see it in time.
    pub(crate) fn push_command(&self, command: Bytes) {
        let size = command.len();
        let mut state = self.state.lock();
        if state.num_bytes() + size <= self.limit {
            let _ = self.push_item(&mut state, Item::Command(command), size);
        }
    }

    fn push_item(&self, state: &mut State, item: Item, size: usize) -> Result<(), PushError> {
        if state.is_closed {
            return Err(PushError::Closed);
        }
        state.num_queued_bytes += size;
        state.queue.push_back(item);
        self.has_changed.notify_one();
        Ok(())
    }

    /// Takes no more; what waits is still sent.
    pub(crate) fn close(&self) {
        self.state.lock().is_closed = true;
        self.has_changed.notify_one();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state.lock().is_closed
    }

    /// Waits for what is to be written next; None when it is closed and empty.
    pub(crate) async fn next_batch(&self) -> Option<Vec<Item>> {
        loop {
            {
                let mut state = self.state.lock();
                if !state.queue.is_empty() {
                    let batch = take_batch(&mut state.queue);
                    let size = batch.iter().map(Item::num_bytes).sum();
                    state.num_queued_bytes -= size;
                    state.num_written_bytes = size;
                    return Some(batch);
                }
                if state.is_closed {
                    return None;
                }
            }
            self.has_changed.notified().await;
        }
    }

    /// The batch is written.
    pub(crate) fn note_written(&self) {
        self.state.lock().num_written_bytes = 0;
    }

    /// Takes no more and forgets what waits: nobody will read it.
    pub(crate) fn discard(&self) {
        {
            let mut state = self.state.lock();
            state.queue.clear();
            state.num_queued_bytes = 0;
            state.num_written_bytes = 0;
        }
        self.close();
    }
}

fn take_batch(queue: &mut VecDeque<Item>) -> Vec<Item> {
    let mut batch = Vec::new();
    let mut size = 0;
    while batch.len() < MAX_BATCH_LEN && size < BATCH_BYTES {
        let Some(item) = queue.pop_front() else { break };
        size += item.num_bytes();
        batch.push(item);
    }
    batch
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(length: usize) -> Frames {
        vec![Bytes::from(vec![0; length])]
    }

    #[test]
    fn a_full_outbox_names_what_waits_and_the_limit() {
        let outbox = Outbox::new(100);
        outbox.push(message(50)).unwrap();
        let error = outbox.push(message(50)).unwrap_err();
        assert_eq!(error, PushError::Full { queued_bytes: 82, limit_bytes: 100 });
        outbox.push_over_limit(message(50)).unwrap();
        assert_eq!(outbox.num_bytes(), 164);
    }

    #[test]
    fn a_message_above_the_limit_passes_alone() {
        let outbox = Outbox::new(100);
        outbox.push(message(1000)).unwrap();
        assert!(matches!(outbox.push(message(1)), Err(PushError::Full { .. })));
    }

    #[test]
    fn a_closed_outbox_gives_what_waits_and_takes_nothing() {
        let outbox = Outbox::new(100);
        outbox.push(message(1)).unwrap();
        outbox.close();
        assert_eq!(outbox.push(message(1)), Err(PushError::Closed));
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            assert_eq!(outbox.next_batch().await.unwrap().len(), 1);
            assert!(outbox.next_batch().await.is_none());
        });
    }

    #[test]
    fn bytes_count_until_they_are_written_or_their_connection_is_gone() {
        let outbox = Outbox::new(100);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        outbox.push(message(50)).unwrap();
        runtime.block_on(outbox.next_batch()).unwrap();
        assert_eq!(outbox.num_bytes(), 82);
        outbox.note_written();
        assert_eq!(outbox.num_bytes(), 0);
        outbox.push(message(1)).unwrap();
        runtime.block_on(outbox.next_batch()).unwrap();
        // The connection broke; another one takes what came since.
        outbox.push(message(2)).unwrap();
        runtime.block_on(outbox.next_batch()).unwrap();
        assert_eq!(outbox.num_bytes(), 34);
        outbox.push(message(3)).unwrap();
        outbox.discard();
        assert_eq!(outbox.num_bytes(), 0);
        assert_eq!(outbox.push(message(1)), Err(PushError::Closed));
    }
}
