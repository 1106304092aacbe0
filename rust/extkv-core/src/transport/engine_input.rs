//! What reaches an engine, and how its frames are read. Runs on the transport's thread.

use std::sync::Arc;

use bytes::Bytes;

use crate::protocol::{
    AbortRequests, CallId, EngineCoreRequest, Exclusion, Profile, RequestType, StartDpWave,
    UtilityCall, decode,
};

use super::engine::EngineShared;
use super::outbox::num_bytes;
use super::peek;
use super::replies;
use super::socket::{Handler, Link};
use super::zmtp::Frames;

/// One thing that an engine has to act upon.
#[derive(Debug)]
pub enum EngineInput {
    /// A request.
    Request {
        /// Which client sent it.
        client: usize,
        /// The request.
        request: Box<EngineCoreRequest>,
    },
    /// Requests to stop. Nothing is answered.
    Abort {
        /// Their ids; unknown ones mean nothing.
        request_ids: Vec<String>,
    },
    /// A method to call.
    Utility {
        /// Which client sent it.
        client: usize,
        /// The call.
        call: UtilityCall,
    },
    /// The coordinator starts a wave.
    StartDpWave {
        /// Its number.
        wave: i64,
        /// Whether this engine is told that it knows already.
        is_excluded: bool,
    },
    /// A client is gone for good: nobody waits for its requests.
    ClientLost {
        /// Which one.
        client: usize,
        /// How that was found.
        reason: String,
    },
    /// The coordinator is gone for good.
    CoordinatorLost {
        /// How that was found.
        reason: String,
    },
    /// Frames that cannot be read; the sender was answered where that is possible.
    Rejected {
        /// Who sent them, in words.
        source: String,
        /// What is wrong.
        reason: String,
    },
}

/// Reads one client's input socket.
pub(super) struct InputHandler {
    pub(super) shared: Arc<EngineShared>,
    pub(super) client: usize,
}

impl InputHandler {
    fn accept(&self, frames: &[Bytes]) -> Result<EngineInput, String> {
        let (kind, payload) =
            frames.split_first().ok_or_else(|| "a message without frames".to_owned())?;
        let kind = RequestType::from_frame(kind).map_err(|error| error.to_string())?;
        if payload.is_empty() {
            return Err(format!("request type {kind:?} without a payload"));
        }
        match kind {
            RequestType::Add => self.accept_request(payload),
            RequestType::Abort => {
                let AbortRequests { request_ids } = read(payload, self.shared.profile)?;
                Ok(EngineInput::Abort { request_ids })
            }
            RequestType::Utility => {
                let call = read::<UtilityCall>(payload, self.shared.profile)
                    .inspect_err(|reason| self.reject_call(payload, reason))?;
                Ok(EngineInput::Utility { client: self.client, call })
            }
            RequestType::StartDpWave => {
                Err("a wave on an input socket: only the coordinator starts them".to_owned())
            }
        }
    }

    fn accept_request(&self, payload: &[Bytes]) -> Result<EngineInput, String> {
        match decode::<EngineCoreRequest>(payload, self.shared.profile) {
            Ok(decoded) => {
                self.shared.note_skipped(decoded.skipped);
                Ok(EngineInput::Request { client: self.client, request: Box::new(decoded.message) })
            }
            Err(error) => {
                if let Some(request_id) = peek::request_id(payload) {
                    self.shared.reply_error(self.client, &request_id, &error.to_string());
                }
                Err(error.to_string())
            }
        }
    }

    fn reject_call(&self, payload: &[Bytes], reason: &str) {
        if let Some(id) = peek::call_id(payload).and_then(|id| u64::try_from(id).ok()) {
            let text = format!("the call cannot be read: {reason}");
            self.shared.reply_failure(self.client, CallId::from(id), &text);
        }
    }

    /// Answers at once what a closing engine does not do any more; the rest passes.
    fn refuse(&self, input: EngineInput) -> Option<EngineInput> {
        match input {
            EngineInput::Request { request, .. } => {
                self.shared.reply_abort(self.client, &request.request_id);
                None
            }
            EngineInput::Utility { call, .. } => {
                self.shared.reply_failure(self.client, call.call_id, replies::SHUTTING_DOWN);
                None
            }
            other => Some(other),
        }
    }
}

impl Handler for InputHandler {
    fn message(&self, _link: &Arc<Link>, frames: Frames) {
        let size = num_bytes(&frames);
        let input = match self.accept(&frames) {
            Ok(input) if self.shared.is_refusing() => self.refuse(input),
            Ok(input) => Some(input),
            Err(reason) => Some(rejected(format!("client {}", self.client), reason)),
        };
        if let Some(input) = input {
            self.shared.inbox.push(input, size);
        }
    }

    fn lost(&self, _link: &Arc<Link>, reason: &str) {
        self.shared.lose_client(self.client, reason);
    }
}

/// Watches one client's output socket, which brings nothing.
pub(super) struct OutputHandler {
    pub(super) shared: Arc<EngineShared>,
    pub(super) client: usize,
}

impl Handler for OutputHandler {
    fn message(&self, _link: &Arc<Link>, frames: Frames) {
        let source = format!("output socket of client {}", self.client);
        let reason = "a message on a socket that only sends".to_owned();
        self.shared.inbox.push(rejected(source, reason), num_bytes(&frames));
    }

    fn lost(&self, _link: &Arc<Link>, reason: &str) {
        self.shared.lose_client(self.client, reason);
    }
}

/// Reads the coordinator's socket.
pub(super) struct CoordinatorHandler {
    pub(super) shared: Arc<EngineShared>,
    /// Whether this is the one of its two sockets that tells of its loss.
    pub(super) tells_loss: bool,
}

impl CoordinatorHandler {
    fn accept(&self, frames: &[Bytes]) -> Result<Option<EngineInput>, String> {
        if let [only] = frames
            && only == crate::protocol::coordinator::READY_MARKER
        {
            // It can come again, when engines are added.
            self.shared.coordinator_ready.put(Ok(()));
            return Ok(None);
        }
        let (kind, payload) =
            frames.split_first().ok_or_else(|| "a message without frames".to_owned())?;
        match RequestType::from_frame(kind).map_err(|error| error.to_string())? {
            RequestType::StartDpWave => {
                let StartDpWave { wave, exclude } = read(payload, self.shared.profile)?;
                let own = i64::from(self.shared.engine_index);
                // An identity excludes nobody: the coordinator forwards it, engines compare numbers.
                let is_excluded = exclude == Exclusion::Engine(own);
                Ok(Some(EngineInput::StartDpWave { wave, is_excluded }))
            }
            other => Err(format!("request type {other:?} from the coordinator")),
        }
    }
}

impl Handler for CoordinatorHandler {
    fn message(&self, _link: &Arc<Link>, frames: Frames) {
        let input = self
            .accept(&frames)
            .unwrap_or_else(|reason| Some(rejected("the coordinator".to_owned(), reason)));
        if let Some(input) = input {
            self.shared.inbox.push(input, num_bytes(&frames));
        }
    }

    fn lost(&self, _link: &Arc<Link>, reason: &str) {
        if self.tells_loss {
            // Nobody need wait for its marker any more.
            self.shared.coordinator_ready.put(Err(format!("it is gone: {reason}")));
            let input = EngineInput::CoordinatorLost { reason: reason.to_owned() };
            self.shared.inbox.push(input, 0);
        }
    }
}

fn rejected(source: String, reason: String) -> EngineInput {
    EngineInput::Rejected { source, reason }
}

fn read<T: crate::protocol::Wire>(payload: &[Bytes], profile: Profile) -> Result<T, String> {
    decode::<T>(payload, profile).map(|decoded| decoded.message).map_err(|error| error.to_string())
}
