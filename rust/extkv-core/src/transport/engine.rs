//! An engine's end: it connects to its front ends and to the coordinator.
//!
//! Start-up is [`EngineEnd::connect`] (HELLO, INIT), then the model is loaded, then
//! [`EngineEnd::start`] (ready response to every client, the coordinator's marker, READY). After
//! that [`EngineEnd::receive`] gives decoded input and [`EngineEnd::send`] takes encoded outputs.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;

use crate::protocol::coordinator::SUBSCRIBE_ALL;
use crate::protocol::output::ENGINE_CORE_DEAD;
use crate::protocol::{
    CallId, EngineCoreReadyResponse, EngineHandshakeMetadata, HandshakeStatus, Profile, Skipped,
    Wire, decode, encode,
};

use super::endpoint::Endpoint;
use super::engine_input::{CoordinatorHandler, EngineInput, InputHandler, OutputHandler};
use super::engine_options::{EngineOptions, check_addresses, handshake_frames, identity};
use super::error::{TransportError, TransportResult};
use super::gate::Gate;
use super::inbox::Inbox;
use super::io::IoThread;
use super::replies;
use super::slot::Slot;
use super::socket::{Handler, Link, Socket, SocketOptions};
use super::zmtp::{Frames, SocketKind};

/// What the sockets' handlers and the engine share.
pub(super) struct EngineShared {
    pub(super) engine_index: u16,
    pub(super) profile: Profile,
    pub(super) inbox: Inbox<EngineInput>,
    pub(super) coordinator_ready: Slot<Result<(), String>>,
    outputs: OnceLock<Vec<Arc<Link>>>,
    lost_clients: Mutex<Vec<usize>>,
    is_refusing: AtomicBool,
    num_skipped: AtomicU64,
}

impl EngineShared {
    pub(super) fn is_refusing(&self) -> bool {
        self.is_refusing.load(Ordering::Acquire)
    }

    pub(super) fn note_skipped(&self, skipped: Skipped) {
        self.num_skipped.fetch_add(skipped.elements() + skipped.keys(), Ordering::Relaxed);
    }

    pub(super) fn reply_error(&self, client: usize, request_id: &str, reason: &str) {
        self.reply(client, replies::error(self, request_id, reason));
    }

    pub(super) fn reply_abort(&self, client: usize, request_id: &str) {
        self.reply(client, replies::abort(self, request_id));
    }

    pub(super) fn reply_failure(&self, client: usize, call_id: CallId, text: &str) {
        self.reply(client, replies::failure(self, call_id, text));
    }

    fn reply(&self, client: usize, frames: Option<Frames>) {
        if let (Some(link), Some(frames)) = (self.output(client), frames) {
            // A client that reads nothing gets no answers either.
            let _ = link.send(&client_name(client), frames);
        }
    }

    fn output(&self, client: usize) -> Option<&Arc<Link>> {
        self.outputs.get().and_then(|links| links.get(client))
    }

    /// Tells of a lost client once, though it has two sockets.
    pub(super) fn lose_client(&self, client: usize, reason: &str) {
        let mut lost = self.lost_clients.lock();
        if !lost.contains(&client) {
            lost.push(client);
            self.inbox.push(EngineInput::ClientLost { client, reason: reason.to_owned() }, 0);
        }
    }
}

/// Waits for INIT on the handshake socket.
#[derive(Default)]
struct HandshakeHandler(Slot<Result<EngineHandshakeMetadata, String>>);

impl Handler for HandshakeHandler {
    fn message(&self, _link: &Arc<Link>, frames: Frames) {
        let read = decode::<EngineHandshakeMetadata>(&frames, Profile::default());
        self.0.put(read.map(|decoded| decoded.message).map_err(|error| error.to_string()));
    }

    fn lost(&self, _link: &Arc<Link>, reason: &str) {
        self.0.put(Err(format!("the front end is gone: {reason}")));
    }
}

/// An engine's connections.
pub struct EngineEnd {
    // Sockets go before the thread that serves them.
    sockets: Mutex<Vec<Socket>>,
    handshake: Mutex<Option<(Socket, Arc<Link>)>>,
    coordinator: OnceLock<Arc<Link>>,
    metadata: EngineHandshakeMetadata,
    options: EngineOptions,
    shared: Arc<EngineShared>,
    started: Instant,
    io: IoThread,
}

impl EngineEnd {
    /// Says HELLO and waits for INIT.
    ///
    /// # Errors
    ///
    /// [`TransportError::Address`], [`TransportError::TimedOut`] if the front end does not answer,
    /// [`TransportError::Malformed`] if its answer cannot be read or it goes away.
    pub fn connect(options: EngineOptions) -> TransportResult<Self> {
        let endpoint = Endpoint::parse(&options.handshake_address)?;
        let io = IoThread::start(&format!("extkv-engine-{}", options.engine_index))?;
        let shared = Arc::new(EngineShared {
            engine_index: options.engine_index,
            profile: options.profile,
            inbox: Inbox::new(options.max_waiting_bytes),
            coordinator_ready: Slot::default(),
            outputs: OnceLock::new(),
            lost_clients: Mutex::default(),
            is_refusing: AtomicBool::new(false),
            num_skipped: AtomicU64::new(0),
        });
        let handler = Arc::new(HandshakeHandler::default());
        let socket_options = SocketOptions {
            kind: SocketKind::Dealer,
            identity: identity(options.engine_index),
            limits: options.limits,
            gate: Arc::new(Gate::new(usize::MAX)),
        };
        let (socket, link) =
            Socket::connect(&io, &endpoint, socket_options, Arc::clone(&handler) as _)?;
        link.send("the front end", handshake_frames(&options, HandshakeStatus::Hello)?)?;
        let started = Instant::now();
        let metadata = handler
            .0
            .wait(options.handshake_timeout)
            .ok_or_else(|| timed_out("INIT from the front end", options.handshake_timeout))?
            .map_err(|reason| TransportError::Malformed { what: "INIT", reason })?;
        check_addresses(&metadata)?;
        Ok(Self {
            sockets: Mutex::default(),
            handshake: Mutex::new(Some((socket, link))),
            coordinator: OnceLock::new(),
            metadata,
            options,
            shared,
            started,
            io,
        })
    }

    /// What the front end said at start-up.
    #[must_use]
    pub fn metadata(&self) -> &EngineHandshakeMetadata {
        &self.metadata
    }

    /// How requests are read.
    #[must_use]
    pub fn profile(&self) -> Profile {
        self.options.profile
    }

    /// Number of clients.
    #[must_use]
    pub fn num_clients(&self) -> usize {
        self.metadata.addresses.inputs.len()
    }

    /// Connects to all clients and the coordinator and tells them that the engine is ready.
    ///
    /// # Errors
    ///
    /// [`TransportError::Address`] for an address from INIT, [`TransportError::TimedOut`] if the
    /// coordinator does not answer, [`TransportError::Malformed`] if it goes away before that,
    /// [`TransportError::Closed`] if it was called before.
    pub fn start(&self, ready: &EngineCoreReadyResponse) -> TransportResult<()> {
        let (handshake, link) = self.handshake.lock().take().ok_or(TransportError::Closed)?;
        let response = frames_of("the ready response", ready, self.options.profile)?;
        self.connect_clients(&response)?;
        self.connect_coordinator()?;
        link.send("the front end", handshake_frames(&self.options, HandshakeStatus::Ready)?)?;
        let _ = self.io.run_for(Duration::from_secs(5), handshake.drained());
        Ok(())
    }

    fn connect_clients(&self, response: &Frames) -> TransportResult<()> {
        let addresses = &self.metadata.addresses;
        let mut outputs = Vec::new();
        for (client, address) in addresses.outputs.iter().enumerate() {
            let shared = Arc::clone(&self.shared);
            let handler = Arc::new(OutputHandler { shared, client });
            outputs.push(self.connect_socket(SocketKind::Push, address, handler)?);
        }
        // Set before any input can come, which may be answered at once.
        let _ = self.shared.outputs.set(outputs);
        for (client, address) in addresses.inputs.iter().enumerate() {
            let shared = Arc::clone(&self.shared);
            let handler = Arc::new(InputHandler { shared, client });
            let link = self.connect_socket(SocketKind::Dealer, address, handler)?;
            link.send(&client_name(client), response.clone())?;
        }
        Ok(())
    }

    fn connect_coordinator(&self) -> TransportResult<()> {
        let addresses = &self.metadata.addresses;
        let handler = |tells_loss| {
            Arc::new(CoordinatorHandler { shared: Arc::clone(&self.shared), tells_loss })
        };
        if let Some(address) = &addresses.coordinator_output {
            let link = self.connect_socket(SocketKind::Push, address, handler(false))?;
            let _ = self.coordinator.set(link);
        }
        if let Some(address) = &addresses.coordinator_input {
            let link = self.connect_socket(SocketKind::Xsub, address, handler(true))?;
            link.send("the coordinator", vec![Bytes::from_static(SUBSCRIBE_ALL)])?;
            let limit = self.options.handshake_timeout.saturating_sub(self.started.elapsed());
            self.shared
                .coordinator_ready
                .wait(limit)
                .ok_or_else(|| timed_out("READY from the coordinator", limit))?
                .map_err(|reason| TransportError::Malformed { what: "the coordinator", reason })?;
        }
        Ok(())
    }

    fn connect_socket(
        &self,
        kind: SocketKind,
        address: &str,
        handler: Arc<dyn Handler>,
    ) -> TransportResult<Arc<Link>> {
        let options = SocketOptions {
            kind,
            identity: identity(self.options.engine_index),
            limits: self.options.limits,
            gate: self.shared.inbox.gate(),
        };
        let endpoint = Endpoint::parse(address)?;
        let (socket, link) = Socket::connect(&self.io, &endpoint, options, handler)?;
        self.sockets.lock().push(socket);
        Ok(link)
    }

    /// Takes all input that is there, and waits for some at most this long. Also returns, perhaps
    /// with nothing, when [`Self::wake`] is called or the end is closed.
    pub fn receive(&self, limit: Duration) -> Vec<EngineInput> {
        self.shared.inbox.take_all(limit)
    }

    /// Makes a waiting [`Self::receive`] return.
    pub fn wake(&self) {
        self.shared.inbox.wake();
    }

    /// Queues encoded outputs for a client.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownClient`], [`TransportError::NotConnected`] if the client is gone,
    /// [`TransportError::Stalled`] if it does not read: nothing was queued then.
    pub fn send(&self, client: i64, frames: Frames) -> TransportResult<()> {
        let (link, name) = self.client(client)?;
        link.send(&name, frames)
    }

    /// Queues a message that ends requests, whatever waits for the client already.
    ///
    /// # Errors
    ///
    /// As [`Self::send`], but never [`TransportError::Stalled`].
    pub fn send_over_limit(&self, client: i64, frames: Frames) -> TransportResult<()> {
        let (link, name) = self.client(client)?;
        link.send_over_limit(&name, frames)
    }

    fn client(&self, client: i64) -> TransportResult<(&Arc<Link>, String)> {
        let links = self.shared.outputs.get().map_or(&[][..], Vec::as_slice);
        usize::try_from(client)
            .ok()
            .and_then(|index| links.get(index).map(|link| (link, client_name(index))))
            .ok_or(TransportError::UnknownClient { client, num_clients: links.len() })
    }

    /// Queues encoded outputs for the coordinator; nothing happens where there is none.
    ///
    /// # Errors
    ///
    /// As [`Self::send`].
    pub fn send_to_coordinator(&self, frames: Frames) -> TransportResult<()> {
        self.coordinator.get().map_or(Ok(()), |link| link.send("the coordinator", frames))
    }

    /// Whether there is a coordinator to send to.
    #[must_use]
    pub fn has_coordinator(&self) -> bool {
        self.coordinator.get().is_some()
    }

    /// Bytes that wait for a client.
    ///
    /// # Errors
    ///
    /// [`TransportError::UnknownClient`].
    pub fn num_queued_bytes(&self, client: i64) -> TransportResult<usize> {
        self.client(client).map(|(link, _)| link.num_queued_bytes())
    }

    /// Elements and keys of requests that were skipped because this profile does not know them.
    #[must_use]
    pub fn num_skipped(&self) -> u64 {
        self.shared.num_skipped.load(Ordering::Relaxed)
    }

    /// From now on answers new requests with an abort and calls with a failure.
    pub fn refuse_work(&self) {
        self.shared.is_refusing.store(true, Ordering::Release);
    }

    /// Tells every client that the engine's loop has failed.
    pub fn send_dead(&self) {
        for link in self.shared.outputs.get().into_iter().flatten() {
            let _ = link.send_over_limit("", vec![Bytes::from_static(ENGINE_CORE_DEAD)]);
        }
    }

    /// Sends what waits, at most this long, and ends the connections.
    pub fn close(&self, linger: Duration) {
        self.refuse_work();
        self.shared.inbox.close();
        let sockets = std::mem::take(&mut *self.sockets.lock());
        let drained: Vec<_> = sockets.iter().map(Socket::drained).collect();
        let _ = self.io.run_for(linger, async {
            for one in drained {
                one.await;
            }
        });
    }

    /// Whether [`Self::close`] was called.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.inbox.is_closed()
    }
}

impl std::fmt::Debug for EngineEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EngineEnd").field("options", &self.options).finish_non_exhaustive()
    }
}

fn client_name(client: usize) -> String {
    format!("client {client}")
}

fn timed_out(what: &str, waited: Duration) -> TransportError {
    TransportError::TimedOut { what: what.to_owned(), waited }
}

/// A message's frames.
pub(super) fn frames_of<T: Wire>(
    what: &'static str,
    message: &T,
    profile: Profile,
) -> TransportResult<Frames> {
    encode(message, profile)
        .map_err(|error| TransportError::Unencodable { what, reason: error.to_string() })
}
