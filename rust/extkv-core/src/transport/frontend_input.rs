//! What reaches a front end, and how its frames are read. Runs on the transport's thread.

use std::sync::Arc;

use bytes::Bytes;

use crate::protocol::coordinator::READY_MARKER;
use crate::protocol::output::is_dead_marker;
use crate::protocol::{
    CoordinatorNews, EngineCoreOutput, EngineCoreOutputs, EngineCoreReadyResponse,
    HandshakeMessage, HandshakeStatus, Part, Profile, Visible, decode,
};

use super::front_state::{Delivery, FrontState};
use super::frontend::{FrontShared, engine_name};
use super::peek::engine_index;
use super::socket::{Handler, Link};
use super::zmtp::Frames;

/// Answers HELLO with INIT.
#[derive(Debug)]
pub(super) struct HandshakeHandler {
    pub(super) shared: Arc<FrontShared>,
    pub(super) init: Frames,
}

impl HandshakeHandler {
    fn accept(&self, link: &Link, frames: &[Bytes]) -> Result<(), String> {
        let identity = link.identity();
        let message = decode::<HandshakeMessage>(frames, Profile::default())
            .map_err(|error| format!("handshake message of {identity:02x?}: {error}"))?
            .message;
        let mut state = self.shared.state.lock();
        let index = state.registry.index_of(&identity)?;
        match message.status {
            HandshakeStatus::Ready => state.registry.confirm(index),
            HandshakeStatus::Hello => {
                state.registry.greet(index, &message)?;
                link.send(&engine_name(index), self.init.clone()).map_err(|error| error.to_string())
            }
        }
    }
}

impl Handler for HandshakeHandler {
    fn message(&self, link: &Arc<Link>, frames: Frames) {
        if let Err(reason) = self.accept(link, &frames) {
            self.shared.state.lock().reject(reason);
        }
        self.shared.has_changed.notify_all();
    }

    fn refused(&self, reason: &str) {
        self.shared.state.lock().reject(format!("handshake socket: {reason}"));
    }
}

/// Registers engines, and notices when they go.
#[derive(Debug)]
pub(super) struct InputHandler {
    pub(super) shared: Arc<FrontShared>,
}

impl InputHandler {
    fn accept(&self, link: &Arc<Link>, frames: &[Bytes]) -> Result<(), String> {
        let mut state = self.shared.state.lock();
        let index = state.registry.index_of(&link.identity())?;
        // Old engines register with an empty payload.
        let is_empty = frames.iter().all(Bytes::is_empty);
        let response = if is_empty {
            None
        } else {
            let decoded = decode::<EngineCoreReadyResponse>(frames, Profile::default())
                .map_err(|error| format!("ready response of engine {index}: {error}"))?;
            Some(decoded.message)
        };
        state.registry.register(index, response, frames.to_vec())?;
        state.links[index] = Some(Arc::clone(link));
        Ok(())
    }
}

impl Handler for InputHandler {
    fn connected(&self, link: &Arc<Link>) {
        let mut state = self.shared.state.lock();
        if let Ok(index) = state.registry.index_of(&link.identity()) {
            state.links[index] = Some(Arc::clone(link));
            state.revive(index);
        }
        self.shared.has_changed.notify_all();
    }

    fn message(&self, link: &Arc<Link>, frames: Frames) {
        if let Err(reason) = self.accept(link, &frames) {
            self.shared.state.lock().reject(reason);
        }
        self.shared.has_changed.notify_all();
    }

    fn lost(&self, link: &Arc<Link>, reason: &str) {
        let mut state = self.shared.state.lock();
        if let Ok(index) = state.registry.index_of(&link.identity()) {
            state.lose_engine(index, reason);
        }
        self.shared.has_changed.notify_all();
    }

    fn refused(&self, reason: &str) {
        self.shared.state.lock().reject(format!("input socket: {reason}"));
    }
}

/// Hands outputs to their streams.
#[derive(Debug)]
pub(super) struct OutputHandler {
    pub(super) shared: Arc<FrontShared>,
}

impl OutputHandler {
    fn accept(&self, link: &Link, frames: &[Bytes]) {
        let said = engine_index(frames);
        let mut state = self.shared.state.lock();
        let num_engines = state.registry.engines.len();
        let index = said.filter(|&index| index < num_engines);
        let profile =
            index.map_or(Profile::default(), |index| state.registry.engines[index].profile);
        drop(state);
        // Without the lock: this is the long part.
        let decoded = decode::<EngineCoreOutputs>(frames, profile);
        state = self.shared.state.lock();
        let known = index.or_else(|| sender(&state, link));
        match (decoded, index) {
            (Ok(decoded), Some(index)) => {
                state.output_engines.insert(link.identity(), index);
                state.counts.num_skipped += decoded.skipped.elements() + decoded.skipped.keys();
                self.hand_out(&mut state, index, decoded.message);
            }
            (Ok(decoded), None) => {
                let index = decoded.message.engine_index;
                let reason = format!("engine index {index}, expected one below {num_engines}");
                state.lose_outputs(known, &reason);
            }
            (Err(error), _) => state.lose_outputs(known, &error.to_string()),
        }
    }

    fn hand_out(&self, state: &mut FrontState, engine: usize, batch: EngineCoreOutputs) {
        if let Some(stats) = &batch.scheduler_stats {
            let load = &mut state.registry.engines[engine].load;
            load.num_waiting = stats.num_waiting_reqs;
            load.num_running = stats.num_running_reqs;
            load.kv_cache_usage = stats.kv_cache_usage;
        }
        if let Some(output) = batch.utility_output {
            state.answer(output);
        }
        let timestamp = batch.timestamp;
        for output in batch.outputs {
            let num_bytes = num_bytes_of(&output);
            let delivery = Delivery { engine, output, timestamp, num_bytes };
            state.deliver(delivery, self.shared.max_stream_bytes);
        }
    }
}

impl Handler for OutputHandler {
    fn message(&self, link: &Arc<Link>, frames: Frames) {
        if is_dead_marker(&frames) {
            let mut state = self.shared.state.lock();
            // From a sender that never said which engine it is, the marker counts for all.
            let dead = match sender(&state, link) {
                Some(index) => vec![index],
                None => (0..state.registry.engines.len()).collect(),
            };
            for index in dead {
                state.lose_engine(index, "it said so");
            }
            self.shared.has_changed.notify_all();
        } else {
            self.accept(link, &frames);
        }
    }

    fn lost(&self, link: &Arc<Link>, reason: &str) {
        let mut state = self.shared.state.lock();
        let index = sender(&state, link);
        state.output_engines.remove(&link.identity());
        if let Some(index) = index {
            state.break_outputs(index, reason);
        }
    }

    fn refused(&self, reason: &str) {
        self.shared.state.lock().reject(format!("output socket: {reason}"));
    }
}

fn sender(state: &FrontState, link: &Link) -> Option<usize> {
    let known = state.output_engines.get(&link.identity()).copied();
    known.or_else(|| (state.registry.engines.len() == 1).then_some(0))
}

/// What an output takes in memory, near enough for a limit.
fn num_bytes_of(output: &EngineCoreOutput) -> usize {
    let parts = [
        output.new_logprobs.part(),
        output.new_prompt_logprobs_tensors.part(),
        output.pooling_output.part(),
        output.stop_reason.part(),
        output.events.part(),
        output.kv_transfer_params.part(),
        output.ec_transfer_params.part(),
        output.trace_headers.part(),
        output.prefill_stats.part(),
        output.routed_experts.part(),
        output.mm_cache_miss_hashes.part(),
        output.new_sampling_mask.part(),
        output.spec_decode_metrics.part(),
        output.prompt_token_id_logprobs.part(),
        output.error.part(),
    ];
    let num_token_bytes = output.new_token_ids.len() * size_of::<u32>();
    let num_part_bytes: usize = parts.iter().map(Part::num_bytes).sum();
    size_of::<EngineCoreOutput>() + output.request_id.len() + num_token_bytes + num_part_bytes
}

/// Follows the coordinator's waves and loads.
#[derive(Debug)]
pub(super) struct NewsHandler {
    pub(super) shared: Arc<FrontShared>,
}

impl Handler for NewsHandler {
    fn message(&self, _link: &Arc<Link>, frames: Frames) {
        if frames.len() == 1 && frames[0] == READY_MARKER {
            return;
        }
        let mut state = self.shared.state.lock();
        match decode::<CoordinatorNews>(&frames, Profile::default()) {
            Ok(decoded) => {
                let news = decoded.message;
                state.wave = news.wave;
                state.is_running = news.is_running;
                for (index, load) in news.loads.into_iter().flatten().enumerate() {
                    if let Some(engine) = state.registry.engines.get_mut(index) {
                        engine.load.num_waiting = load.num_waiting;
                        engine.load.num_running = load.num_running;
                        engine.load.kv_cache_usage = load.kv_cache_usage;
                    }
                }
            }
            Err(error) => state.reject(format!("news of the coordinator: {error}")),
        }
    }

    fn lost(&self, _link: &Arc<Link>, reason: &str) {
        self.shared.state.lock().note(format!("the coordinator is gone: {reason}"));
    }
}
