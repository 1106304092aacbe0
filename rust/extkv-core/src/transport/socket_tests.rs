//! Sockets against each other, on loopback.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::endpoint::Endpoint;
use super::inbox::Inbox;
use super::io::IoThread;
use super::outbox::num_bytes;
use super::socket::{Handler, Link, Socket, SocketLimits, SocketOptions};
use super::zmtp::{Frames, SocketKind};
use super::{HeartbeatOptions, TransportError};

const LONG: Duration = Duration::from_secs(20);

#[derive(Debug)]
enum Event {
    Up(Arc<Link>),
    Message(Arc<Link>, Frames),
    Lost(String),
    Refused(String),
}

struct Recorder(Inbox<Event>);

impl Recorder {
    fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self(Inbox::new(limit)))
    }

    fn next(&self) -> Event {
        let mut events = self.0.take_all(LONG);
        assert!(!events.is_empty(), "nothing came");
        let first = events.remove(0);
        for event in events {
            self.0.push(event, 0);
        }
        first
    }

    fn up(&self) -> Arc<Link> {
        match self.next() {
            Event::Up(link) => link,
            other => panic!("{other:?}"),
        }
    }

    fn message(&self) -> (Arc<Link>, Frames) {
        match self.next() {
            Event::Message(link, frames) => (link, frames),
            other => panic!("{other:?}"),
        }
    }
}

impl Handler for Recorder {
    fn connected(&self, link: &Arc<Link>) {
        self.0.push(Event::Up(Arc::clone(link)), 0);
    }

    fn message(&self, link: &Arc<Link>, frames: Frames) {
        let size = num_bytes(&frames);
        self.0.push(Event::Message(Arc::clone(link), frames), size);
    }

    fn lost(&self, _link: &Arc<Link>, reason: &str) {
        self.0.push(Event::Lost(reason.to_owned()), 0);
    }

    fn refused(&self, reason: &str) {
        self.0.push(Event::Refused(reason.to_owned()), 0);
    }
}

fn options(kind: SocketKind, identity: &'static [u8], recorder: &Recorder) -> SocketOptions {
    SocketOptions {
        kind,
        identity: Bytes::from_static(identity),
        limits: SocketLimits { reconnect_for: LONG, ..SocketLimits::default() },
        gate: recorder.0.gate(),
    }
}

fn frames(parts: &[&'static [u8]]) -> Frames {
    parts.iter().map(|&part| Bytes::from_static(part)).collect()
}

fn loopback() -> Endpoint {
    Endpoint::parse("tcp://127.0.0.1:0").unwrap()
}

fn bind(io: &IoThread, kind: SocketKind, recorder: &Arc<Recorder>, at: &Endpoint) -> Socket {
    let handler: Arc<dyn Handler> = Arc::clone(recorder) as _;
    Socket::bind(io, at, options(kind, b"", recorder), handler).unwrap()
}

fn connect(
    io: &IoThread,
    kind: SocketKind,
    identity: &'static [u8],
    recorder: &Arc<Recorder>,
    to: &Endpoint,
) -> (Socket, Arc<Link>) {
    let handler: Arc<dyn Handler> = Arc::clone(recorder) as _;
    Socket::connect(io, to, options(kind, identity, recorder), handler).unwrap()
}

#[test]
fn a_dealer_queues_before_a_router_listens_and_gets_its_answer() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1 << 20), Recorder::new(1 << 20));
    // A port that is free now: bind, note, drop.
    let at = bind(&io, SocketKind::Router, &ours, &loopback()).endpoint().clone();
    io.run_for(LONG, async {}).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let (_dealer, link) = connect(&io, SocketKind::Dealer, &[5, 0], &theirs, &at);
    link.send("router", frames(&[b"hello", b""])).unwrap();
    let router = bind(&io, SocketKind::Router, &ours, &at);
    assert_eq!(ours.up().identity(), Bytes::from_static(&[5, 0]));
    assert_eq!(ours.message().1, frames(&[b"hello", b""]));
    router.link(&[5, 0]).unwrap().send("dealer", frames(&[b"back"])).unwrap();
    theirs.up();
    assert_eq!(theirs.message().1, frames(&[b"back"]));
}

#[test]
fn unix_sockets_carry_the_same_and_stale_files_are_replaced() {
    let io = IoThread::start("test").unwrap();
    let recorder = Recorder::new(1 << 20);
    let path = std::env::temp_dir().join(format!("extkv-socket-{}", std::process::id()));
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let at = Endpoint::parse(&format!("ipc://{}", path.display())).unwrap();
    let socket = bind(&io, SocketKind::Pull, &recorder, &at);
    let (_push, link) = connect(&io, SocketKind::Push, b"", &Recorder::new(1), &at);
    link.send("pull", frames(&[b"x"])).unwrap();
    recorder.up();
    assert_eq!(recorder.message().1, frames(&[b"x"]));
    drop(socket);
    assert!(!path.exists(), "its file goes with the socket");
}

#[test]
fn a_second_peer_of_the_same_identity_is_refused_and_the_first_stays() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1 << 20), Recorder::new(1 << 20));
    let router = bind(&io, SocketKind::Router, &ours, &loopback());
    let (_first, link) = connect(&io, SocketKind::Dealer, &[1, 0], &theirs, router.endpoint());
    ours.up();
    let second = connect(&io, SocketKind::Dealer, &[1, 0], &theirs, router.endpoint());
    assert!(matches!(ours.next(), Event::Refused(text) if text.contains("is taken")));
    drop(second);
    link.send("router", frames(&[b"still here"])).unwrap();
    loop {
        match ours.next() {
            Event::Refused(_) => {}
            Event::Message(_, message) => break assert_eq!(message, frames(&[b"still here"])),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn sockets_that_do_not_fit_refuse_each_other() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1), Recorder::new(1));
    let router = bind(&io, SocketKind::Router, &ours, &loopback());
    let _push = connect(&io, SocketKind::Push, b"", &theirs, router.endpoint());
    assert!(matches!(ours.next(), Event::Refused(text) if text.contains("ROUTER")));
}

#[test]
fn bytes_that_are_not_zmtp_end_only_their_own_connection() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1 << 20), Recorder::new(1 << 20));
    let router = bind(&io, SocketKind::Router, &ours, &loopback());
    let Endpoint::Tcp { port, .. } = router.endpoint().clone() else { panic!() };
    let mut stream = std::net::TcpStream::connect(("127.0.0.1", port)).unwrap();
    let request = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: x\r\nAccept: */*\r\n\r\n....";
    stream.write_all(request).unwrap();
    assert!(matches!(ours.next(), Event::Refused(text) if text.contains("greeting")));
    let mut rest = Vec::new();
    // A reset is as good an end as an orderly one.
    let _ = stream.read_to_end(&mut rest);
    let (_dealer, link) = connect(&io, SocketKind::Dealer, &[1, 0], &theirs, router.endpoint());
    link.send("router", frames(&[b"x"])).unwrap();
    ours.up();
    assert_eq!(ours.message().1, frames(&[b"x"]));
}

#[test]
fn what_nobody_takes_stays_with_the_sender_up_to_its_limit() {
    let io = IoThread::start("test").unwrap();
    let ours = Recorder::new(1 << 16);
    let pull = bind(&io, SocketKind::Pull, &ours, &loopback());
    let theirs = Recorder::new(1);
    let handler: Arc<dyn Handler> = Arc::clone(&theirs) as _;
    let mut narrow = options(SocketKind::Push, b"", &theirs);
    narrow.limits.max_queued_bytes = 1 << 20;
    let (_push, link) = Socket::connect(&io, pull.endpoint(), narrow, handler).unwrap();
    let block = Bytes::from(vec![7; 1 << 16]);
    let mut num_sent = 0;
    let error = loop {
        match link.send("the reader", vec![block.clone()]) {
            Ok(()) => num_sent += 1,
            // The kernel may still be taking some.
            Err(_)
                if {
                    std::thread::sleep(Duration::from_millis(100));
                    num_sent == 0
                } => {}
            Err(error) if link.num_queued_bytes() > (1 << 20) - (1 << 17) => break error,
            Err(_) => {}
        }
    };
    assert!(matches!(error, TransportError::Stalled { limit_bytes: 1_048_576, .. }), "{error}");
    let mut num_received = 0;
    while num_received < num_sent {
        let events = ours.0.take_all(LONG);
        num_received += events.iter().filter(|e| matches!(e, Event::Message(..))).count();
    }
    assert_eq!(num_received, num_sent);
}

#[test]
fn a_connected_socket_comes_back_and_sends_what_waited() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1 << 20), Recorder::new(1 << 20));
    let pull = bind(&io, SocketKind::Pull, &ours, &loopback());
    let at = pull.endpoint().clone();
    let (_push, link) = connect(&io, SocketKind::Push, b"", &theirs, &at);
    ours.up();
    drop(pull);
    // The listener is gone at the latest when the thread has done something else.
    io.run_for(LONG, async {}).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    link.send("pull", frames(&[b"later"])).unwrap();
    let ours = Recorder::new(1 << 20);
    let _pull = bind(&io, SocketKind::Pull, &ours, &at);
    ours.up();
    assert_eq!(ours.message().1, frames(&[b"later"]));
}

#[test]
fn a_connected_socket_gives_up_when_nobody_comes_back() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1), Recorder::new(1));
    let router = bind(&io, SocketKind::Router, &ours, &loopback());
    let mut hasty = options(SocketKind::Dealer, &[1, 0], &theirs);
    hasty.limits.reconnect_for = Duration::from_millis(30);
    let handler: Arc<dyn Handler> = Arc::clone(&theirs) as _;
    let (_dealer, link) = Socket::connect(&io, router.endpoint(), hasty, handler).unwrap();
    theirs.up();
    drop(router);
    assert!(matches!(theirs.next(), Event::Lost(_)));
    let error = link.send("the router", frames(&[b"x"])).unwrap_err();
    assert!(matches!(error, TransportError::NotConnected { .. }), "{error}");
}

#[test]
fn a_frozen_peer_is_noticed() {
    let io = IoThread::start("test").unwrap();
    let ours = Recorder::new(1 << 20);
    let mut watchful = options(SocketKind::Router, b"", &ours);
    watchful.limits.heartbeat = Some(HeartbeatOptions {
        interval: Duration::from_millis(20),
        timeout: Duration::from_millis(100),
    });
    let handler: Arc<dyn Handler> = Arc::clone(&ours) as _;
    let router = Socket::bind(&io, &loopback(), watchful, handler).unwrap();
    let other_io = IoThread::start("frozen").unwrap();
    let theirs = Recorder::new(1);
    let _dealer = connect(&other_io, SocketKind::Dealer, &[1, 0], &theirs, router.endpoint());
    ours.up();
    std::thread::sleep(Duration::from_millis(300));
    assert!(ours.0.take_all(Duration::ZERO).is_empty(), "it answers while it lives");
    // A task that never yields stands for a stopped process.
    let (go_on, freeze) = std::sync::mpsc::channel::<()>();
    other_io.handle().spawn(async move {
        while freeze.try_recv().is_err() {
            std::thread::sleep(Duration::from_millis(5));
        }
    });
    assert!(matches!(ours.next(), Event::Lost(text) if text.contains("no sign of life")));
    go_on.send(()).unwrap();
}

#[test]
fn draining_sends_everything_before_the_end() {
    let io = IoThread::start("test").unwrap();
    let (ours, theirs) = (Recorder::new(1 << 24), Recorder::new(1));
    let pull = bind(&io, SocketKind::Pull, &ours, &loopback());
    let (push, link) = connect(&io, SocketKind::Push, b"", &theirs, pull.endpoint());
    let block = Bytes::from(vec![1; 1 << 20]);
    for _ in 0..8 {
        link.send("pull", vec![block.clone()]).unwrap();
    }
    io.run_for(LONG, push.drained()).unwrap();
    drop(push);
    ours.up();
    for _ in 0..8 {
        assert_eq!(ours.message().1, vec![block.clone()]);
    }
}

#[test]
fn addresses_in_use_and_long_identities_are_typed_errors() {
    let io = IoThread::start("test").unwrap();
    let ours = Recorder::new(1);
    let router = bind(&io, SocketKind::Router, &ours, &loopback());
    let handler: Arc<dyn Handler> = Arc::clone(&ours) as _;
    let again = options(SocketKind::Router, b"", &ours);
    let error = Socket::bind(&io, router.endpoint(), again, Arc::clone(&handler)).unwrap_err();
    assert!(matches!(&error, TransportError::Bind { .. }), "{error}");
    let long = options(SocketKind::Dealer, &[0; 256], &ours);
    let error = Socket::connect(&io, router.endpoint(), long, handler).unwrap_err();
    assert!(matches!(error, TransportError::Identity { length: 256, limit: 255 }));
}
