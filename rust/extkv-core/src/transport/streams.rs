//! What a front end's callers hold: the stream of a request, and a call of an engine's method.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::protocol::{EngineCoreOutput, UtilityResult};

use super::error::TransportError;
use super::frontend::FrontShared;
use super::mailbox::Mailbox;

/// Why a stream has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamEnd {
    /// Its last output was there.
    Finished,
    /// It was aborted on this side; engines do not answer that.
    Aborted,
    /// Its engine died, or the connection to it broke so that outputs may be lost.
    EngineDead {
        /// Index of the engine.
        engine: u16,
        /// How that was found.
        reason: String,
    },
    /// The engine sent outputs that cannot be read, and this request's may have been among them.
    Garbled {
        /// Index of the engine.
        engine: u16,
        /// What is wrong.
        reason: String,
    },
    /// Too much waited and nobody took it.
    SlowReader {
        /// Bytes that waited.
        waiting_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// The front end was closed.
    Closed,
}

/// One thing that a stream brings.
#[derive(Debug)]
pub enum StreamItem {
    /// Tokens, or the end with its reason.
    Output {
        /// The output.
        output: Box<EngineCoreOutput>,
        /// The engine's monotonic clock when it was made.
        timestamp: f64,
        /// Which engine made it.
        engine: u16,
    },
    /// The end. It comes once, after all outputs.
    End(StreamEnd),
}

/// Outputs of one request. Dropping an unfinished one aborts the request.
#[derive(Debug)]
pub struct Stream {
    pub(super) request_id: String,
    pub(super) engine: u16,
    pub(super) mailbox: Arc<Mailbox<StreamItem>>,
    pub(super) shared: Weak<FrontShared>,
}

impl Stream {
    /// The request.
    #[must_use]
    pub fn request_id(&self) -> &str {
        &self.request_id
    }

    /// Index of the engine that has it.
    #[must_use]
    pub fn engine(&self) -> u16 {
        self.engine
    }

    /// The key under which the notifier tells of it.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.mailbox.key()
    }

    /// The next item, if it is there; if not, the notifier will tell.
    #[must_use]
    pub fn take_or_await(&self) -> Option<StreamItem> {
        self.mailbox.take_or_await()
    }

    /// The next item; waits for it at most this long.
    #[must_use]
    pub fn wait(&self, limit: Duration) -> Option<StreamItem> {
        self.mailbox.wait(limit)
    }

    /// Ends the stream and tells the engine; nothing happens after the end.
    pub fn abort(&self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.abort_stream(&self.request_id, self.key());
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.abort();
    }
}

/// How a call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallOutcome {
    /// What the method returned; None for a result without a value.
    Returned(Option<UtilityResult>),
    /// The engine's text about a failure.
    Failed(String),
    /// The engine died before it answered.
    EngineDead {
        /// Index of the engine.
        engine: u16,
        /// How that was found.
        reason: String,
    },
    /// The front end was closed.
    Closed,
}

/// A call of an engine's method. Dropping it forgets the answer.
#[derive(Debug)]
pub struct Call {
    pub(super) id: u64,
    pub(super) method: String,
    pub(super) mailbox: Arc<Mailbox<CallOutcome>>,
    pub(super) shared: Weak<FrontShared>,
}

impl Call {
    /// The key under which the notifier tells of it.
    #[must_use]
    pub fn key(&self) -> u64 {
        self.mailbox.key()
    }

    /// The outcome, if it is there; if not, the notifier will tell.
    #[must_use]
    pub fn take_or_await(&self) -> Option<CallOutcome> {
        self.mailbox.take_or_await()
    }

    /// Waits for the outcome.
    ///
    /// # Errors
    ///
    /// [`TransportError::TimedOut`] if it does not come in time. The engine may still do the call.
    pub fn wait(&self, limit: Duration) -> Result<CallOutcome, TransportError> {
        self.mailbox.wait(limit).ok_or_else(|| TransportError::TimedOut {
            what: format!("answer to {}", self.method),
            waited: limit,
        })
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.forget_call(self.id);
        }
    }
}
