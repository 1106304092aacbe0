//! One connection after another's accept or connect: handshake, reading, writing, signs of life.

use std::time::{Duration, Instant};

use bytes::{BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::frames::{Received, put_command, put_header};
use super::greeting::{
    GREETING_LEN, PeerInfo, check_greeting, check_ready, greeting, ready_properties,
};
use super::{FrameReader, Frames, SocketKind, ZmtpError};
use crate::transport::gate::Gate;
use crate::transport::outbox::{Item, Outbox};

/// Frames of at least this many bytes are written from where they lie.
const UNCOPIED_BYTES: usize = 16 * 1024;
/// Longest context of a PING.
const MAX_PING_CONTEXT: usize = 16;

/// When a silent peer is asked for a sign of life, and when it counts as gone.
#[derive(Debug, Clone, Copy)]
pub struct HeartbeatOptions {
    /// Silence after which a PING is sent.
    pub interval: Duration,
    /// Silence after which the connection is given up.
    pub timeout: Duration,
}

/// Greets the peer and exchanges READY commands.
pub(crate) async fn shake_hands<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    reader: &mut FrameReader<R>,
    writer: &mut W,
    kind: SocketKind,
    identity: &[u8],
) -> Result<PeerInfo, ZmtpError> {
    writer.write_all(&greeting()).await?;
    let has_heartbeats = check_greeting(&reader.take(GREETING_LEN).await?)?;
    let mut ready = BytesMut::new();
    put_command(&mut ready, b"READY", &ready_properties(kind, identity));
    writer.write_all(&ready).await?;
    match reader.next().await? {
        Received::Command(name, data) if name == "READY" => {
            Ok(PeerInfo { identity: check_ready(kind, data)?, has_heartbeats })
        }
        Received::Command(name, data) if name == "ERROR" => Err(refusal(&data)),
        _ => Err(ZmtpError::Handshake("expected a READY command")),
    }
}

/// Reads messages until the connection ends, and says why it ended.
///
/// Before each read it waits until `gate` is open, so that what nobody takes stays with the peer.
pub(crate) async fn read_messages<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    gate: &Gate,
    outbox: &Outbox,
    heartbeat: Option<HeartbeatOptions>,
    mut on_message: impl FnMut(Frames),
) -> ZmtpError {
    loop {
        gate.opened().await;
        let received = match next_or_silence(reader, outbox, heartbeat).await {
            Ok(received) => received,
            Err(error) => return error,
        };
        match received {
            Received::Message(frames) => on_message(frames),
            Received::Command(name, data) if name == "PING" => {
                let context = data.get(2..).unwrap_or_default();
                let context = &context[..context.len().min(MAX_PING_CONTEXT)];
                outbox.push_command(command(b"PONG", context));
            }
            Received::Command(name, data) if name == "ERROR" => return refusal(&data),
            // SUBSCRIBE and CANCEL mean nothing to our kinds; PONG has done its work by coming.
            Received::Command(..) => {}
        }
    }
}

async fn next_or_silence<R: AsyncRead + Unpin>(
    reader: &mut FrameReader<R>,
    outbox: &Outbox,
    heartbeat: Option<HeartbeatOptions>,
) -> Result<Received, ZmtpError> {
    let Some(heartbeat) = heartbeat else {
        return reader.next().await;
    };
    let start = Instant::now();
    loop {
        if let Ok(received) = timeout(heartbeat.interval, reader.next()).await {
            return received;
        }
        let silence = reader.last_read().max(start).elapsed();
        if silence >= heartbeat.timeout {
            return Err(ZmtpError::Silent(heartbeat.timeout.as_secs_f64()));
        }
        if silence >= heartbeat.interval {
            outbox.push_command(command(b"PING", &[0, 0]));
        }
    }
}

/// Writes what comes into the outbox until that is closed and empty.
pub(crate) async fn write_messages<W: AsyncWrite + Unpin>(
    writer: &mut W,
    outbox: &Outbox,
) -> Result<(), ZmtpError> {
    let mut buffer = BytesMut::new();
    while let Some(batch) = outbox.next_batch().await {
        for item in batch {
            match item {
                Item::Command(command) => buffer.put_slice(&command),
                Item::Message(frames) => put_message(writer, &mut buffer, &frames).await?,
            }
        }
        writer.write_all(&buffer).await?;
        writer.flush().await?;
        buffer.clear();
        outbox.note_written();
    }
    Ok(())
}

async fn put_message<W: AsyncWrite + Unpin>(
    writer: &mut W,
    buffer: &mut BytesMut,
    frames: &[Bytes],
) -> Result<(), ZmtpError> {
    for (index, frame) in frames.iter().enumerate() {
        put_header(buffer, frame.len(), index + 1 < frames.len());
        if frame.len() < UNCOPIED_BYTES {
            buffer.put_slice(frame);
        } else {
            writer.write_all(buffer).await?;
            buffer.clear();
            writer.write_all(frame).await?;
        }
    }
    Ok(())
}

fn command(name: &[u8], data: &[u8]) -> Bytes {
    let mut bytes = BytesMut::new();
    put_command(&mut bytes, name, data);
    bytes.freeze()
}

fn refusal(data: &Bytes) -> ZmtpError {
    let reason = data.get(1..).unwrap_or_default();
    ZmtpError::Refused(String::from_utf8_lossy(reason).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::zmtp::Limits;

    const LIMITS: Limits = Limits { message_bytes: 1 << 20, num_frames: 8 };

    fn block_on<F: Future>(future: F) -> F::Output {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
    }

    #[test]
    fn two_ends_shake_hands() {
        block_on(async {
            let (a, b) = tokio::io::duplex(4096);
            let (a_read, mut a_write) = tokio::io::split(a);
            let (b_read, mut b_write) = tokio::io::split(b);
            let mut a_read = FrameReader::new(a_read, LIMITS);
            let mut b_read = FrameReader::new(b_read, LIMITS);
            let (a, b) = tokio::join!(
                shake_hands(&mut a_read, &mut a_write, SocketKind::Router, &[]),
                shake_hands(&mut b_read, &mut b_write, SocketKind::Dealer, &[3, 0]),
            );
            assert_eq!(a.unwrap().identity, Bytes::from_static(&[3, 0]));
            assert!(b.unwrap().has_heartbeats);
        });
    }

    #[test]
    fn an_error_command_is_a_refusal_with_its_reason() {
        block_on(async {
            let mut bytes = greeting().to_vec();
            bytes.extend_from_slice(&command(b"ERROR", b"\x04nope"));
            let mut reader = FrameReader::new(&bytes[..], LIMITS);
            let error =
                shake_hands(&mut reader, &mut Vec::new(), SocketKind::Pull, &[]).await.unwrap_err();
            assert_eq!(error.to_string(), "the peer refused: nope");
        });
    }

    #[test]
    fn a_message_instead_of_ready_is_refused() {
        block_on(async {
            let mut bytes = greeting().to_vec();
            bytes.extend_from_slice(&[0, 1, 7]);
            let mut reader = FrameReader::new(&bytes[..], LIMITS);
            let result = shake_hands(&mut reader, &mut Vec::new(), SocketKind::Pull, &[]).await;
            assert!(matches!(result, Err(ZmtpError::Handshake(_))));
        });
    }

    #[test]
    fn ping_is_answered_with_its_context() {
        block_on(async {
            let bytes = command(b"PING", b"\0\0abc");
            let (outbox, gate) = (Outbox::new(1000), Gate::new(1000));
            let mut reader = FrameReader::new(&bytes[..], LIMITS);
            let end = read_messages(&mut reader, &gate, &outbox, None, |_| ()).await;
            assert!(matches!(end, ZmtpError::Closed));
            outbox.close();
            let mut written = Vec::new();
            write_messages(&mut written, &outbox).await.unwrap();
            assert_eq!(written, command(b"PONG", b"abc"));
        });
    }

    #[test]
    fn a_silent_peer_is_pinged_and_then_given_up() {
        block_on(async {
            let (ours, _theirs) = tokio::io::duplex(4096);
            let (outbox, gate) = (Outbox::new(1000), Gate::new(1000));
            let mut reader = FrameReader::new(ours, LIMITS);
            let heartbeat = HeartbeatOptions {
                interval: Duration::from_millis(5),
                timeout: Duration::from_millis(30),
            };
            let end = read_messages(&mut reader, &gate, &outbox, Some(heartbeat), |_| ()).await;
            assert!(matches!(end, ZmtpError::Silent(_)));
            assert!(outbox.num_bytes() > 0, "it was asked for a sign of life");
        });
    }

    #[test]
    fn large_and_small_frames_keep_their_order() {
        block_on(async {
            let frames = vec![
                Bytes::from(vec![1; 10]),
                Bytes::from(vec![2; UNCOPIED_BYTES * 3]),
                Bytes::new(),
                Bytes::from(vec![3; 300]),
            ];
            let outbox = Outbox::new(1 << 20);
            outbox.push(frames.clone()).unwrap();
            outbox.push(frames.clone()).unwrap();
            outbox.close();
            let mut written = Vec::new();
            write_messages(&mut written, &outbox).await.unwrap();
            assert_eq!(outbox.num_bytes(), 0);
            let mut reader = FrameReader::new(&written[..], LIMITS);
            for _ in 0..2 {
                assert_eq!(reader.next().await.unwrap(), Received::Message(frames.clone()));
            }
        });
    }
}
