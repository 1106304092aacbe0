//! Sockets: one address each, any number of connections, events to a handler.
//!
//! A bound socket has a [`Link`] per connection. A connected socket has one link, whose outbox
//! outlives interruptions: it connects again for a while, and messages queued meanwhile are sent
//! then. What was being written when the connection broke is lost.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use super::endpoint::Endpoint;
use super::error::{TransportError, TransportResult};
use super::gate::Gate;
use super::io::IoThread;
use super::outbox::{Outbox, PushError};
use super::stream::{Listener, Reader, Writer, connect};
use super::zmtp::{
    Frames, HeartbeatOptions, Limits, SocketKind, ZmtpError, read_messages, shake_hands,
    write_messages,
};

const MAX_IDENTITY_LEN: usize = 255;
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const FIRST_RETRY: Duration = Duration::from_millis(20);
const LONGEST_RETRY: Duration = Duration::from_millis(1000);
const MAX_FRAMES: usize = 1 << 20;

/// What all sockets of a transport share.
#[derive(Debug, Clone, Copy)]
pub struct SocketLimits {
    /// Bytes of one incoming message.
    pub max_message_bytes: usize,
    /// Bytes that may wait for one peer.
    pub max_queued_bytes: usize,
    /// When silent peers are asked for a sign of life and given up; None for never.
    pub heartbeat: Option<HeartbeatOptions>,
    /// How long a connected socket tries to come back after an interruption.
    pub reconnect_for: Duration,
}

impl Default for SocketLimits {
    fn default() -> Self {
        Self {
            max_message_bytes: 1 << 30,
            max_queued_bytes: 256 << 20,
            heartbeat: Some(HeartbeatOptions {
                interval: Duration::from_secs(5),
                timeout: Duration::from_secs(20),
            }),
            reconnect_for: Duration::from_secs(5),
        }
    }
}

/// What a socket is.
#[derive(Debug, Clone)]
pub(crate) struct SocketOptions {
    pub(crate) kind: SocketKind,
    /// Our identity, at most 255 bytes.
    pub(crate) identity: Bytes,
    pub(crate) limits: SocketLimits,
    /// Counts what was read and not taken.
    pub(crate) gate: Arc<Gate>,
}

/// Takes the events of a socket, on the transport's thread: it must not wait.
pub(crate) trait Handler: Send + Sync + 'static {
    /// A peer is there.
    fn connected(&self, _link: &Arc<Link>) {}
    /// A message came.
    fn message(&self, link: &Arc<Link>, frames: Frames);
    /// A peer is gone for good.
    fn lost(&self, _link: &Arc<Link>, _reason: &str) {}
    /// A connection was refused, or ended before its peer had said who it is.
    fn refused(&self, _reason: &str) {}
}

/// The way to one peer.
#[derive(Debug)]
pub(crate) struct Link {
    identity: OnceLock<Bytes>,
    outbox: Outbox,
}

impl Link {
    fn new(limits: &SocketLimits) -> Self {
        Self { identity: OnceLock::new(), outbox: Outbox::new(limits.max_queued_bytes) }
    }

    /// The peer's identity; empty before it came.
    pub(crate) fn identity(&self) -> Bytes {
        self.identity.get().cloned().unwrap_or_default()
    }

    /// Bytes that wait for the peer.
    pub(crate) fn num_queued_bytes(&self) -> usize {
        self.outbox.num_bytes()
    }

    /// Queues a message; `peer` names its receiver in errors.
    pub(crate) fn send(&self, peer: &str, frames: Frames) -> TransportResult<()> {
        self.outbox.push(frames).map_err(|error| push_error(peer, error))
    }

    /// Queues a message that must not be lost, whatever waits.
    pub(crate) fn send_over_limit(&self, peer: &str, frames: Frames) -> TransportResult<()> {
        self.outbox.push_over_limit(frames).map_err(|error| push_error(peer, error))
    }
}

fn push_error(peer: &str, error: PushError) -> TransportError {
    let peer = peer.to_owned();
    match error {
        PushError::Closed => TransportError::NotConnected { peer },
        PushError::Full { queued_bytes, limit_bytes } => {
            TransportError::Stalled { peer, queued_bytes, limit_bytes }
        }
    }
}

/// Live connections of a bound socket by identity.
type Links = Mutex<HashMap<Bytes, Arc<Link>>>;

/// An open socket. Dropping it ends its connections without linger.
#[derive(Debug)]
pub(crate) struct Socket {
    endpoint: Endpoint,
    links: Arc<Links>,
    task: AbortHandle,
}

impl Socket {
    /// Listens on an address.
    pub(crate) fn bind(
        io: &IoThread,
        endpoint: &Endpoint,
        options: SocketOptions,
        handler: Arc<dyn Handler>,
    ) -> TransportResult<Self> {
        check_identity(&options.identity)?;
        let _guard = io.handle().enter();
        let (listener, endpoint) = Listener::open(endpoint)
            .map_err(|source| TransportError::Bind { address: endpoint.to_string(), source })?;
        let links = Arc::new(Links::default());
        let shared = Arc::new(Shared { options, handler, links: Arc::clone(&links) });
        let task = io.handle().spawn(accept(listener, shared)).abort_handle();
        Ok(Self { endpoint, links, task })
    }

    /// Connects to an address, now or when somebody listens there.
    pub(crate) fn connect(
        io: &IoThread,
        endpoint: &Endpoint,
        options: SocketOptions,
        handler: Arc<dyn Handler>,
    ) -> TransportResult<(Self, Arc<Link>)> {
        check_identity(&options.identity)?;
        let link = Arc::new(Link::new(&options.limits));
        let links = Arc::new(Links::default());
        links.lock().insert(Bytes::new(), Arc::clone(&link));
        let shared = Arc::new(Shared { options, handler, links: Arc::clone(&links) });
        let task = io
            .handle()
            .spawn(stay_connected(endpoint.clone(), shared, Arc::clone(&link)))
            .abort_handle();
        Ok((Self { endpoint: endpoint.clone(), links, task }, link))
    }

    /// Where it listens, with the port that was chosen, or where it connects to.
    pub(crate) fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The peer of this identity.
    #[cfg(test)]
    pub(crate) fn link(&self, identity: &[u8]) -> Option<Arc<Link>> {
        self.links.lock().get(identity).cloned()
    }

    /// Takes no more to send, and waits until everything is sent: bound it by a time limit.
    pub(crate) fn drained(&self) -> impl Future<Output = ()> + Send + 'static {
        let links: Vec<_> = self.links.lock().values().cloned().collect();
        async move {
            for link in &links {
                link.outbox.close();
            }
            for link in &links {
                while link.outbox.num_bytes() > 0 {
                    sleep(Duration::from_millis(1)).await;
                }
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.task.abort();
        for link in self.links.lock().values() {
            link.outbox.close();
        }
        if let Endpoint::Ipc(path) = &self.endpoint
            && !self.links.lock().contains_key(&Bytes::new())
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

fn check_identity(identity: &Bytes) -> TransportResult<()> {
    if identity.len() > MAX_IDENTITY_LEN {
        let length = identity.len();
        return Err(TransportError::Identity { length, limit: MAX_IDENTITY_LEN });
    }
    Ok(())
}

struct Shared {
    options: SocketOptions,
    handler: Arc<dyn Handler>,
    links: Arc<Links>,
}

async fn accept(listener: Listener, shared: Arc<Shared>) {
    // Dropping the set with this task ends the connections.
    let mut connections = tokio::task::JoinSet::new();
    loop {
        while connections.try_join_next().is_some() {}
        match listener.accept().await {
            Ok((reader, writer)) => {
                connections.spawn(serve(Arc::clone(&shared), reader, writer));
            }
            Err(error) => {
                shared.handler.refused(&format!("cannot accept a connection: {error}"));
                // Too many open files, perhaps: give others time to close theirs.
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn serve(shared: Arc<Shared>, mut reader: Reader, mut writer: Writer) {
    let (identity, has_heartbeats) = match greet(&shared, &mut reader, &mut writer).await {
        Ok(peer) => peer,
        Err(error) => return shared.handler.refused(&error.to_string()),
    };
    let identity = if identity.is_empty() { made_up_identity() } else { identity };
    let link = Arc::new(Link::new(&shared.options.limits));
    let _ = link.identity.set(identity.clone());
    {
        let mut links = shared.links.lock();
        if links.contains_key(&identity) {
            drop(links);
            let text = format!("identity {identity:02x?} is taken by a peer that is still there");
            return shared.handler.refused(&text);
        }
        links.insert(identity.clone(), Arc::clone(&link));
    }
    let entry = Entry { shared: &shared, identity, link: &link };
    shared.handler.connected(&link);
    let end = exchange(&shared, &link, &mut reader, &mut writer, has_heartbeats).await;
    drop(entry);
    shared.handler.lost(&link, &end.to_string());
}

/// A line in the table of links, which goes with its connection.
struct Entry<'a> {
    shared: &'a Shared,
    identity: Bytes,
    link: &'a Arc<Link>,
}

impl Drop for Entry<'_> {
    fn drop(&mut self) {
        self.link.outbox.discard();
        self.shared.links.lock().remove(&self.identity);
    }
}

fn made_up_identity() -> Bytes {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    // Identities that begin with a zero and have this length are nobody's choice in EngineCore.
    let mut identity = vec![0];
    identity.extend_from_slice(&number.to_be_bytes());
    Bytes::from(identity)
}

async fn greet(
    shared: &Shared,
    reader: &mut Reader,
    writer: &mut Writer,
) -> Result<(Bytes, bool), ZmtpError> {
    let options = &shared.options;
    let peer =
        timeout(HANDSHAKE_TIMEOUT, shake_hands(reader, writer, options.kind, &options.identity))
            .await
            .map_err(|_| ZmtpError::Silent(HANDSHAKE_TIMEOUT.as_secs_f64()))??;
    reader.set_limits(Limits {
        message_bytes: options.limits.max_message_bytes,
        num_frames: MAX_FRAMES,
    });
    Ok((peer.identity, peer.has_heartbeats))
}

async fn exchange(
    shared: &Shared,
    link: &Arc<Link>,
    reader: &mut Reader,
    writer: &mut Writer,
    has_heartbeats: bool,
) -> ZmtpError {
    let heartbeat = shared.options.limits.heartbeat.filter(|_| has_heartbeats);
    let on_message = |frames| shared.handler.message(link, frames);
    tokio::select! {
        end = read_messages(reader, &shared.options.gate, &link.outbox, heartbeat, on_message) => end,
        result = write_messages(writer, &link.outbox) => match result {
            Ok(()) => ZmtpError::Closed,
            Err(error) => error,
        },
    }
}

async fn stay_connected(endpoint: Endpoint, shared: Arc<Shared>, link: Arc<Link>) {
    let mut give_up: Option<Instant> = None;
    let mut delay = FIRST_RETRY;
    loop {
        let end = match open(&endpoint, &shared).await {
            Ok((mut reader, mut writer, identity, has_heartbeats)) => {
                let _ = link.identity.set(identity);
                shared.handler.connected(&link);
                let end = exchange(&shared, &link, &mut reader, &mut writer, has_heartbeats).await;
                give_up = Some(Instant::now() + shared.options.limits.reconnect_for);
                delay = FIRST_RETRY;
                end
            }
            Err(error) => error,
        };
        if link.outbox.is_closed() {
            return;
        }
        if give_up.is_some_and(|at| Instant::now() >= at) {
            link.outbox.discard();
            return shared.handler.lost(&link, &end.to_string());
        }
        sleep(delay).await;
        delay = (delay * 2).min(LONGEST_RETRY);
    }
}

async fn open(
    endpoint: &Endpoint,
    shared: &Shared,
) -> Result<(Reader, Writer, Bytes, bool), ZmtpError> {
    let (mut reader, mut writer) = timeout(CONNECT_TIMEOUT, connect(endpoint))
        .await
        .map_err(|_| ZmtpError::Silent(CONNECT_TIMEOUT.as_secs_f64()))??;
    let (identity, has_heartbeats) = greet(shared, &mut reader, &mut writer).await?;
    Ok((reader, writer, identity, has_heartbeats))
}
