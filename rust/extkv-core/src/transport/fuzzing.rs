//! What holds for any bytes of a peer: a bounded end of its connection, the same one however the
//! bytes are cut, and messages that come back from what is written for them.

#![allow(clippy::panic, clippy::expect_used, reason = "a broken property ends the fuzzer's run")]

use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use tokio::io::{AsyncRead, ReadBuf};

use super::gate::Gate;
use super::outbox::Outbox;
use super::zmtp::{
    FrameReader, Frames, Limits, PeerInfo, SocketKind, ZmtpError, greeting, read_messages,
    shake_hands, write_messages,
};
use crate::fuzzing::Meter;

const LIMITS: Limits = Limits { message_bytes: 4096, num_frames: 8 };
const KINDS: [SocketKind; 5] =
    [SocketKind::Router, SocketKind::Dealer, SocketKind::Push, SocketKind::Pull, SocketKind::Xsub];
/// Bytes allocated for each byte of a peer: the record of a frame without data, which has two.
const ALLOCATED_PER_BYTE: usize = 64;
/// What a connection needs, of which most is room for the next read.
const ALLOCATED_FIXED: usize = 16 * 1024;
const LIMIT: (usize, usize) = (ALLOCATED_PER_BYTE, ALLOCATED_FIXED);

/// Bytes of a peer, of which each read takes only some.
struct Pieces<'a> {
    bytes: &'a [u8],
    piece_len: usize,
}

impl AsyncRead for Pieces<'_> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let len = self.piece_len.min(buffer.remaining()).min(self.bytes.len());
        let (piece, rest) = self.bytes.split_at(len);
        buffer.put_slice(piece);
        self.bytes = rest;
        Poll::Ready(Ok(()))
    }
}

/// A peer's greeting and READY command. The first byte chooses our kind of socket and the size of
/// the pieces.
pub(crate) fn handshake(data: &[u8], meter: &Meter) {
    let (choice, bytes) = data.split_first().unwrap_or((&0, &[]));
    let kind = KINDS[usize::from(*choice) % KINDS.len()];
    let whole = meter.measure(bytes.len(), LIMIT, || greet(kind, bytes, usize::MAX));
    let in_pieces = greet(kind, bytes, 1 + usize::from(*choice) / KINDS.len());
    match (whole, in_pieces) {
        (Ok(peer), Ok(again)) => {
            assert_eq!(peer, again);
            assert!(peer.identity.len() <= 255);
        }
        (Err(error), Err(again)) => assert_eq!(error.to_string(), again.to_string()),
        (whole, in_pieces) => panic!("{whole:?} at once, {in_pieces:?} in pieces"),
    }
}

/// What a peer sends after the handshake. The first byte chooses the size of the pieces.
pub(crate) fn messages(data: &[u8], meter: &Meter) {
    let (choice, bytes) = data.split_first().unwrap_or((&0, &[]));
    let piece_len = 1 + usize::from(*choice);
    let (found, end) = meter.measure(bytes.len(), LIMIT, || read(bytes, usize::MAX));
    let (in_pieces, end_in_pieces) = meter.measure(bytes.len(), LIMIT, || read(bytes, piece_len));
    assert_eq!((&found, end.to_string()), (&in_pieces, end_in_pieces.to_string()));
    assert!(!matches!(end, ZmtpError::Io(_) | ZmtpError::Silent(_)), "{end}");

    let outbox = Outbox::new(usize::MAX);
    for frames in &found {
        outbox.push(frames.clone()).expect("the outbox is open and has no limit");
    }
    outbox.close();
    let mut written = Vec::new();
    at_once(write_messages(&mut written, &outbox)).expect("a vector takes everything");
    let (again, end) = read(&written, usize::MAX);
    assert_eq!(again, found);
    assert!(matches!(end, ZmtpError::Closed), "{end}");
}

fn greet(kind: SocketKind, bytes: &[u8], piece_len: usize) -> Result<PeerInfo, ZmtpError> {
    let mut reader = FrameReader::new(Pieces { bytes, piece_len }, LIMITS);
    let mut written = Vec::new();
    let result = at_once(shake_hands(&mut reader, &mut written, kind, &[7, 0]));
    assert!(written.starts_with(&greeting()));
    result
}

fn read(bytes: &[u8], piece_len: usize) -> (Vec<Frames>, ZmtpError) {
    let mut reader = FrameReader::new(Pieces { bytes, piece_len }, LIMITS);
    let (gate, outbox) = (Gate::new(usize::MAX), Outbox::new(1024));
    let mut found = Vec::new();
    let end = at_once(read_messages(&mut reader, &gate, &outbox, None, |frames| {
        assert!(frames.len() <= LIMITS.num_frames);
        assert!(frames.iter().map(Bytes::len).sum::<usize>() <= LIMITS.message_bytes);
        found.push(frames);
    }));
    assert!(outbox.num_bytes() <= 1024);
    (found, end)
}

/// The result of a future that never waits.
fn at_once<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => panic!("it waits for bytes that are there"),
    }
}
