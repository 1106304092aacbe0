//! What a front end knows, behind one lock: engines, streams, calls, waves.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;

use crate::protocol::{AbortRequests, EngineCoreOutput, RequestType, UtilityOutput};

use super::balance;
use super::engine::frames_of;
use super::error::{TransportError, TransportResult};
use super::frontend::{engine_name, typed};
use super::mailbox::Mailbox;
use super::registry::{EngineStatus, Registry};
use super::socket::Link;
use super::streams::{CallOutcome, StreamEnd, StreamItem};

const MAX_NOTICES: usize = 1000;

/// An open stream.
#[derive(Debug)]
pub(super) struct StreamEntry {
    pub(super) engine: usize,
    pub(super) mailbox: Arc<Mailbox<StreamItem>>,
}

/// What is open, and what was passed over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Streams that have not ended.
    pub num_streams: usize,
    /// Calls without an outcome.
    pub num_calls: usize,
    /// Outputs of requests that had ended on this side.
    pub num_late_outputs: u64,
    /// Messages that could not be read or did not fit.
    pub num_rejected: u64,
    /// Elements and keys of outputs that the profile does not know.
    pub num_skipped: u64,
}

/// See the module.
#[derive(Debug)]
pub(super) struct FrontState {
    pub(super) registry: Registry,
    pub(super) links: Vec<Option<Arc<Link>>>,
    pub(super) streams: HashMap<String, StreamEntry>,
    pub(super) calls: HashMap<u64, (usize, Arc<Mailbox<CallOutcome>>)>,
    /// Which engine is behind a connection of the output socket, once it has said so.
    pub(super) output_engines: HashMap<Bytes, usize>,
    pub(super) wave: i64,
    pub(super) is_running: bool,
    pub(super) is_closed: bool,
    pub(super) counts: Counts,
    notices: VecDeque<String>,
    num_keys: u64,
    turn: usize,
}

impl FrontState {
    pub(super) fn new(registry: Registry) -> Self {
        Self {
            links: vec![None; registry.engines.len()],
            registry,
            streams: HashMap::new(),
            calls: HashMap::new(),
            output_engines: HashMap::new(),
            wave: 0,
            is_running: false,
            is_closed: false,
            counts: Counts::default(),
            notices: VecDeque::new(),
            num_keys: 0,
            turn: 0,
        }
    }

    pub(super) fn next_key(&mut self) -> u64 {
        self.num_keys += 1;
        self.num_keys
    }

    pub(super) fn checked_index(&self, engine: u16) -> TransportResult<usize> {
        let num_engines = u16::try_from(self.registry.engines.len()).unwrap_or(u16::MAX);
        if engine < num_engines {
            return Ok(usize::from(engine));
        }
        Err(TransportError::UnknownEngine { engine, num_engines })
    }

    /// The engine that was asked for, or the one with least to do.
    pub(super) fn choose_engine(&mut self, asked: Option<u16>) -> TransportResult<(usize, u16)> {
        if self.is_closed {
            return Err(TransportError::Closed);
        }
        let index = match asked {
            Some(engine) => self.checked_index(engine)?,
            None => {
                self.turn = self.turn.wrapping_add(1);
                balance::choose(&self.registry.loads(), 1, self.turn).unwrap_or(0)
            }
        };
        let engine = number(index);
        match self.registry.status(index) {
            EngineStatus::Ready => Ok((index, engine)),
            EngineStatus::Dead => {
                let reason = self.registry.engines[index].death.clone().unwrap_or_default();
                Err(TransportError::EngineDead { engine, reason })
            }
            _ => Err(TransportError::NotConnected { peer: engine_name(engine) }),
        }
    }

    pub(super) fn live_link(&self, index: usize) -> TransportResult<Arc<Link>> {
        self.links[index]
            .clone()
            .ok_or_else(|| TransportError::NotConnected { peer: engine_name(index) })
    }

    pub(super) fn missing_engines(&self) -> Vec<usize> {
        (0..self.registry.engines.len())
            .filter(|&index| self.registry.status(index) != EngineStatus::Ready)
            .collect()
    }

    pub(super) fn first_dead(&self) -> Option<(u16, String)> {
        let engines = self.registry.engines.iter().enumerate();
        engines.filter_map(|(index, engine)| Some((number(index), engine.death.clone()?))).next()
    }

    /// Ends a stream: its entry goes, its consumer learns why. Returns the engine that had it.
    pub(super) fn end_stream(&mut self, request_id: &str, end: StreamEnd) -> Option<usize> {
        let entry = self.streams.remove(request_id)?;
        let load = &mut self.registry.engines[entry.engine].load;
        load.num_in_flight = load.num_in_flight.saturating_sub(1);
        let gives_up_what_waits = matches!(end, StreamEnd::SlowReader { .. });
        let item = StreamItem::End(end);
        if gives_up_what_waits {
            entry.mailbox.replace(item);
        } else {
            entry.mailbox.push(item, 0);
        }
        Some(entry.engine)
    }

    /// Ends streams on this side and tells their engines, which do not answer that.
    pub(super) fn abort_streams(&mut self, request_ids: &[String], end: &StreamEnd) {
        let mut by_engine: HashMap<usize, Vec<String>> = HashMap::new();
        for request_id in request_ids {
            if let Some(index) = self.end_stream(request_id, end.clone()) {
                by_engine.entry(index).or_default().push(request_id.clone());
            }
        }
        for (index, request_ids) in by_engine {
            self.tell_abort(index, request_ids);
        }
    }

    /// Tells an engine to stop requests. If that cannot be sent, it is when the engine is back.
    pub(super) fn tell_abort(&mut self, index: usize, request_ids: Vec<String>) {
        let engine = &mut self.registry.engines[index];
        let message = AbortRequests { request_ids };
        let sent = frames_of("an abort", &message, engine.profile).and_then(|payload| {
            let link = self.links[index].as_ref();
            let link = link.ok_or(TransportError::NotConnected { peer: engine_name(index) })?;
            link.send_over_limit(&engine_name(index), typed(RequestType::Abort, payload))
        });
        if sent.is_err() {
            engine.orphans.extend(message.request_ids);
        }
    }

    /// Hands an output to its stream.
    pub(super) fn deliver(&mut self, output: Delivery, limit_bytes: usize) {
        let Delivery { engine, output, timestamp, num_bytes } = output;
        let entry = self.streams.get(&output.request_id).filter(|entry| entry.engine == engine);
        let Some(entry) = entry else {
            self.counts.num_late_outputs += 1;
            return;
        };
        let (request_id, is_last) = (output.request_id.clone(), output.finish_reason.is_some());
        let item =
            StreamItem::Output { output: Box::new(output), timestamp, engine: number(engine) };
        let waiting_bytes = entry.mailbox.push(item, num_bytes);
        if is_last {
            self.end_stream(&request_id, StreamEnd::Finished);
        } else if waiting_bytes > limit_bytes {
            let end = StreamEnd::SlowReader { waiting_bytes, limit_bytes };
            self.abort_streams(&[request_id], &end);
        }
    }

    /// Hands a result to its call. Results that nobody asked for become notices.
    pub(super) fn answer(&mut self, output: UtilityOutput) {
        let number = output.call_id.number();
        let call = u64::try_from(number).ok().and_then(|id| self.calls.remove(&id));
        let outcome = match output.failure_message {
            Some(text) => CallOutcome::Failed(text),
            None => CallOutcome::Returned(output.result),
        };
        match call {
            Some((_, mailbox)) => {
                mailbox.push(outcome, 0);
            }
            None if output.call_id.is_notice() => {
                self.note(format!("notice {number}: {outcome:?}"))
            }
            // Its caller has stopped waiting.
            None => self.counts.num_late_outputs += 1,
        }
    }

    /// An engine is gone, or its connection broke: its streams and calls end.
    pub(super) fn lose_engine(&mut self, index: usize, reason: &str) {
        if !self.registry.bury(index, reason) {
            return;
        }
        self.links[index] = None;
        self.note(format!("engine {index} is dead: {reason}"));
        let engine = number(index);
        let end = StreamEnd::EngineDead { engine, reason: reason.to_owned() };
        let request_ids = self.streams_of(Some(index));
        for request_id in &request_ids {
            self.end_stream(request_id, end.clone());
        }
        self.registry.engines[index].orphans.extend(request_ids);
        self.end_calls(index, reason);
    }

    /// An engine's output connection broke: what was on it is lost, though the engine may live.
    pub(super) fn break_outputs(&mut self, index: usize, reason: &str) {
        let reason = format!("its output connection broke: {reason}");
        let request_ids = self.streams_of(Some(index));
        let end = StreamEnd::EngineDead { engine: number(index), reason: reason.clone() };
        self.abort_streams(&request_ids, &end);
        self.end_calls(index, &reason);
    }

    fn end_calls(&mut self, index: usize, reason: &str) {
        let engine = number(index);
        let ids: Vec<u64> =
            self.calls.iter().filter(|(_, call)| call.0 == index).map(|(&id, _)| id).collect();
        for (_, mailbox) in ids.into_iter().filter_map(|id| self.calls.remove(&id)) {
            mailbox.push(CallOutcome::EngineDead { engine, reason: reason.to_owned() }, 0);
        }
    }

    /// Outputs of an engine, or of nobody knows which, were lost: no stream may wait for them.
    pub(super) fn lose_outputs(&mut self, index: Option<usize>, reason: &str) {
        self.reject(format!("outputs that cannot be read: {reason}"));
        for request_id in self.streams_of(index) {
            let engine = self.streams.get(&request_id).map_or(0, |entry| number(entry.engine));
            let end = StreamEnd::Garbled { engine, reason: reason.to_owned() };
            self.abort_streams(&[request_id], &end);
        }
    }

    /// Requests of an engine, or of all.
    pub(super) fn streams_of(&self, index: Option<usize>) -> Vec<String> {
        let streams = self.streams.iter();
        let chosen = streams.filter(|(_, entry)| index.is_none_or(|index| entry.engine == index));
        chosen.map(|(request_id, _)| request_id.clone()).collect()
    }

    /// An engine that was only interrupted is used again, without the requests that it had.
    pub(super) fn revive(&mut self, index: usize) {
        if self.registry.revive(index) {
            self.note(format!("engine {index} is back after an interruption"));
            let orphans = std::mem::take(&mut self.registry.engines[index].orphans);
            if !orphans.is_empty() {
                self.tell_abort(index, orphans);
            }
        }
    }

    pub(super) fn reject(&mut self, text: String) {
        self.counts.num_rejected += 1;
        self.note(text);
    }

    pub(super) fn note(&mut self, text: String) {
        if self.notices.len() == MAX_NOTICES {
            self.notices.pop_front();
        }
        self.notices.push_back(text);
    }

    pub(super) fn last_notice(&self) -> Option<&String> {
        self.notices.back()
    }

    pub(super) fn take_notices(&mut self) -> Vec<String> {
        self.notices.drain(..).collect()
    }

    pub(super) fn counts(&self) -> Counts {
        Counts { num_streams: self.streams.len(), num_calls: self.calls.len(), ..self.counts }
    }
}

/// An output on its way to its stream.
#[derive(Debug)]
pub(super) struct Delivery {
    pub(super) engine: usize,
    pub(super) output: EngineCoreOutput,
    pub(super) timestamp: f64,
    pub(super) num_bytes: usize,
}

pub(super) fn number(index: usize) -> u16 {
    u16::try_from(index).unwrap_or(u16::MAX)
}
