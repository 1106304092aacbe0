//! A front end's end: it listens, any number of engines connect.
//!
//! Each request is a [`Stream`] that ends exactly once: with its last output, by an abort on this
//! side, or with the reason why nothing more can come. Messages on a broken connection may be lost,
//! so an engine that is only interrupted loses its streams as well, and is then used again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::{Condvar, Mutex};

use crate::protocol::coordinator::SUBSCRIBE_ALL;
use crate::protocol::{
    CallId, CoordinatorCommand, EngineCoreReadyResponse, EngineCoreRequest,
    EngineHandshakeMetadata, EngineZmqAddresses, Exclusion, Profile, RequestType, Untyped,
    UtilityCall,
};

use super::endpoint::Endpoint;
use super::engine::frames_of;
use super::error::{TransportError, TransportResult};
use super::front_state::{Counts, FrontState, StreamEntry};
use super::frontend_input::{HandshakeHandler, InputHandler, NewsHandler, OutputHandler};
use super::frontend_options::FrontEndOptions;
use super::gate::Gate;
use super::io::IoThread;
use super::mailbox::Mailbox;
use super::notifier::Notifier;
use super::registry::{EngineStatus, Registry};
use super::socket::{Handler, Link, Socket, SocketOptions};
use super::streams::{Call, CallOutcome, Stream, StreamEnd};
use super::zmtp::{Frames, SocketKind};

/// What handlers, streams and the front end share.
#[derive(Debug)]
pub(super) struct FrontShared {
    pub(super) state: Mutex<FrontState>,
    pub(super) has_changed: Condvar,
    pub(super) notifier: Arc<Notifier>,
    pub(super) max_stream_bytes: usize,
}

impl FrontShared {
    /// Ends a stream on this side. The key tells it from a later one of the same id.
    pub(super) fn abort_stream(&self, request_id: &str, key: u64) {
        let mut state = self.state.lock();
        if state.streams.get(request_id).is_some_and(|entry| entry.mailbox.key() == key) {
            state.abort_streams(&[request_id.to_owned()], &StreamEnd::Aborted);
        }
    }

    pub(super) fn forget_call(&self, id: u64) {
        self.state.lock().calls.remove(&id);
    }
}

/// A front end's sockets.
#[derive(Debug)]
pub struct FrontEnd {
    // Sockets go before the thread that serves them.
    sockets: Mutex<Vec<Socket>>,
    coordinator: Option<Arc<Link>>,
    handshake_address: String,
    addresses: EngineZmqAddresses,
    shared: Arc<FrontShared>,
    io: IoThread,
}

impl FrontEnd {
    /// Listens for engines.
    ///
    /// # Errors
    ///
    /// [`TransportError::Address`] and [`TransportError::Bind`] for each address.
    pub fn bind(options: &FrontEndOptions) -> TransportResult<Self> {
        let io = IoThread::start("extkv-front-end")?;
        let registry =
            Registry::new(options.num_engines, options.expects_local, options.default_profile);
        let notifier = Arc::new(Notifier::new()?);
        let shared = Arc::new(FrontShared {
            state: Mutex::new(FrontState::new(registry)),
            has_changed: Condvar::new(),
            notifier,
            max_stream_bytes: options.max_stream_bytes,
        });
        let open = |kind, address: &str, handler: Arc<dyn Handler>| {
            Socket::bind(&io, &Endpoint::parse(address)?, socket_options(kind, options), handler)
        };
        let handler = InputHandler { shared: Arc::clone(&shared) };
        let input = open(SocketKind::Router, &options.input_address, Arc::new(handler))?;
        let handler = OutputHandler { shared: Arc::clone(&shared) };
        let output = open(SocketKind::Pull, &options.output_address, Arc::new(handler))?;
        let coordinator = options.coordinator.as_ref();
        let addresses = EngineZmqAddresses {
            inputs: vec![input.endpoint().to_string()],
            outputs: vec![output.endpoint().to_string()],
            coordinator_input: coordinator.map(|c| c.to_engines.clone()),
            coordinator_output: coordinator.map(|c| c.from_engines.clone()),
            frontend_stats_publish_address: coordinator.map(|c| c.to_front_ends.clone()),
        };
        let metadata = EngineHandshakeMetadata {
            addresses: addresses.clone(),
            parallel_config: crate::protocol::Map::default(),
        };
        let init = frames_of("INIT", &metadata, options.default_profile)?;
        let handler = HandshakeHandler { shared: Arc::clone(&shared), init };
        let handshake = open(SocketKind::Router, &options.handshake_address, Arc::new(handler))?;
        let handshake_address = handshake.endpoint().to_string();
        let mut sockets = vec![handshake, input, output];
        let mut coordinator_link = None;
        if let Some(coordinator) = coordinator {
            let handler = NewsHandler { shared: Arc::clone(&shared) };
            let endpoint = Endpoint::parse(&coordinator.to_front_ends)?;
            let own = socket_options(SocketKind::Xsub, options);
            let (socket, link) = Socket::connect(&io, &endpoint, own, Arc::new(handler))?;
            link.send(COORDINATOR, vec![Bytes::from_static(SUBSCRIBE_ALL)])?;
            sockets.push(socket);
            coordinator_link = Some(link);
        }
        Ok(Self {
            sockets: Mutex::new(sockets),
            coordinator: coordinator_link,
            handshake_address,
            addresses,
            shared,
            io,
        })
    }

    /// Where engines say HELLO, with the port that was chosen.
    #[must_use]
    pub fn handshake_address(&self) -> &str {
        &self.handshake_address
    }

    /// What engines are told.
    #[must_use]
    pub fn addresses(&self) -> &EngineZmqAddresses {
        &self.addresses
    }

    /// Tells an event loop which streams and calls have something.
    #[must_use]
    pub fn notifier(&self) -> &Arc<Notifier> {
        &self.shared.notifier
    }

    /// Waits until every engine takes requests.
    ///
    /// # Errors
    ///
    /// [`TransportError::TimedOut`] with the engines that are missing and what was refused last,
    /// [`TransportError::EngineDead`] if one dies meanwhile, [`TransportError::Closed`].
    pub fn wait_ready(&self, limit: Duration) -> TransportResult<()> {
        let until = Instant::now() + limit;
        let mut state = self.shared.state.lock();
        loop {
            if state.is_closed {
                return Err(TransportError::Closed);
            }
            if let Some((engine, reason)) = state.first_dead() {
                return Err(TransportError::EngineDead { engine, reason });
            }
            let missing = state.missing_engines();
            if missing.is_empty() {
                return Ok(());
            }
            if self.shared.has_changed.wait_until(&mut state, until).timed_out() {
                let last = state.last_notice().map(|text| format!(" ({text})")).unwrap_or_default();
                let what = format!("ready response of engines {missing:?}{last}");
                return Err(TransportError::TimedOut { what, waited: limit });
            }
        }
    }

    /// How far each engine is.
    #[must_use]
    pub fn statuses(&self) -> Vec<EngineStatus> {
        let state = self.shared.state.lock();
        (0..state.registry.engines.len()).map(|index| state.registry.status(index)).collect()
    }

    /// What an engine said of itself; None before that, and of old engines.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownEngine`].
    pub fn response(&self, engine: u16) -> TransportResult<Option<Arc<EngineCoreReadyResponse>>> {
        let state = self.shared.state.lock();
        let index = state.checked_index(engine)?;
        Ok(state.registry.engines[index].response.clone())
    }

    /// The same as it came; empty before that, and of old engines.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownEngine`].
    pub fn response_frames(&self, engine: u16) -> TransportResult<Frames> {
        let state = self.shared.state.lock();
        let index = state.checked_index(engine)?;
        Ok(state.registry.engines[index].response_frames.clone())
    }

    /// The wire profile that an engine speaks.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownEngine`].
    pub fn profile(&self, engine: u16) -> TransportResult<Profile> {
        let state = self.shared.state.lock();
        let index = state.checked_index(engine)?;
        Ok(state.registry.engines[index].profile)
    }

    /// Sends a request to this engine, to the one that its `data_parallel_rank` names, or to the
    /// one with least to do. Client index and wave are filled in.
    ///
    /// # Errors
    ///
    /// [`TransportError::DuplicateRequest`], [`TransportError::UnknownEngine`],
    /// [`TransportError::EngineDead`] (also if all are), [`TransportError::NotConnected`],
    /// [`TransportError::Stalled`] if the engine does not read,
    /// [`TransportError::Unencodable`]. Nothing is left of the request then.
    pub fn add(
        &self,
        mut request: EngineCoreRequest,
        engine: Option<u16>,
    ) -> TransportResult<Stream> {
        let mut state = self.shared.state.lock();
        let request_id = request.request_id.clone();
        if state.streams.contains_key(&request_id) {
            return Err(TransportError::DuplicateRequest { request_id });
        }
        let rank = request.data_parallel_rank.and_then(|rank| u16::try_from(rank).ok());
        let (index, engine) = state.choose_engine(engine.or(rank))?;
        request.client_index = 0;
        request.current_wave = state.wave;
        let profile = state.registry.engines[index].profile;
        let frames = typed(RequestType::Add, frames_of("the request", &request, profile)?);
        let link = state.live_link(index)?;
        link.send(&engine_name(engine), frames)?;
        let key = state.next_key();
        let mailbox = Arc::new(Mailbox::new(key, Arc::clone(&self.shared.notifier)));
        let entry = StreamEntry { engine: index, mailbox: Arc::clone(&mailbox) };
        state.streams.insert(request_id.clone(), entry);
        state.registry.engines[index].load.num_in_flight += 1;
        self.tell_coordinator(&state, engine);
        let shared = Arc::downgrade(&self.shared);
        Ok(Stream { request_id, engine, mailbox, shared })
    }

    /// Wakes paused engines: this one has a request that the others must step with.
    fn tell_coordinator(&self, state: &FrontState, engine: u16) {
        let Some(link) = self.coordinator.as_ref().filter(|_| !state.is_running) else { return };
        let exclude = Exclusion::Engine(i64::from(engine));
        let command = CoordinatorCommand::FirstRequest { exclude, wave: state.wave };
        if let Ok(frames) = frames_of("a notice", &command, Profile::default()) {
            let _ = link.send(COORDINATOR, frames);
        }
    }

    /// Ends streams on this side and tells their engines. Unknown ids mean nothing.
    pub fn abort(&self, request_ids: &[String]) {
        self.shared.state.lock().abort_streams(request_ids, &StreamEnd::Aborted);
    }

    /// Calls a method of an engine.
    ///
    /// # Errors
    ///
    /// As [`Self::add`].
    pub fn call(&self, engine: u16, method: &str, args: Untyped) -> TransportResult<Call> {
        let mut state = self.shared.state.lock();
        let (index, engine) = state.choose_engine(Some(engine))?;
        let id = state.next_key();
        let call = UtilityCall {
            client_index: 0,
            call_id: CallId::from(id),
            method: method.to_owned(),
            args,
        };
        let profile = state.registry.engines[index].profile;
        let frames = typed(RequestType::Utility, frames_of("the call", &call, profile)?);
        state.live_link(index)?.send(&engine_name(engine), frames)?;
        let mailbox = Arc::new(Mailbox::new(id, Arc::clone(&self.shared.notifier)));
        state.calls.insert(id, (index, Arc::clone(&mailbox)));
        let shared = Arc::downgrade(&self.shared);
        Ok(Call { id, method: method.to_owned(), mailbox, shared })
    }

    /// Marks an engine as dead, for those who watch its process.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownEngine`].
    pub fn declare_dead(&self, engine: u16, reason: &str) -> TransportResult<()> {
        let mut state = self.shared.state.lock();
        let index = state.checked_index(engine)?;
        state.lose_engine(index, reason);
        self.shared.has_changed.notify_all();
        Ok(())
    }

    /// What is open, and what was passed over.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.shared.state.lock().counts()
    }

    /// What was refused or lost since the last call, in words, the last thousand of it.
    #[must_use]
    pub fn take_notices(&self) -> Vec<String> {
        self.shared.state.lock().take_notices()
    }

    /// Ends all streams and calls, sends what waits at most this long, and stops listening.
    pub fn close(&self, linger: Duration) {
        {
            let mut state = self.shared.state.lock();
            state.is_closed = true;
            let request_ids = state.streams_of(None);
            state.abort_streams(&request_ids, &StreamEnd::Closed);
            for (_, (_, mailbox)) in state.calls.drain() {
                mailbox.push(CallOutcome::Closed, 0);
            }
            self.shared.has_changed.notify_all();
        }
        let sockets = std::mem::take(&mut *self.sockets.lock());
        let drained: Vec<_> = sockets.iter().map(Socket::drained).collect();
        let _ = self.io.run_for(linger, async {
            for one in drained {
                one.await;
            }
        });
    }
}

const COORDINATOR: &str = "the coordinator";

pub(super) fn engine_name(engine: impl std::fmt::Display) -> String {
    format!("engine {engine}")
}

fn socket_options(kind: SocketKind, options: &FrontEndOptions) -> SocketOptions {
    SocketOptions {
        kind,
        identity: Bytes::new(),
        limits: options.limits,
        // Every message is handed on at once; streams have limits of their own.
        gate: Arc::new(Gate::new(usize::MAX)),
    }
}

/// Puts the type frame before a payload.
pub(super) fn typed(kind: RequestType, payload: Frames) -> Frames {
    let mut frames = vec![Bytes::copy_from_slice(&kind.frame())];
    frames.extend(payload);
    frames
}
