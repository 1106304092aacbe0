//! Bytes to frames to messages, and back.

use std::time::Instant;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::{Frames, ZmtpError};

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;
/// Bytes reserved at a time, at least.
const BLOCK_BYTES: usize = 4096;
/// Most bytes reserved ahead of what the peer has sent.
const READ_AHEAD_BYTES: usize = 64 * 1024;

/// What a peer may send at most.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Bytes of all frames of a message.
    pub(crate) message_bytes: usize,
    /// Frames of a message.
    pub(crate) num_frames: usize,
}

/// One thing that a peer sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Received {
    /// A message.
    Message(Frames),
    /// A command: its name and its data.
    Command(Bytes, Bytes),
}

/// Reads messages; a call that is dropped half-way loses nothing.
#[derive(Debug)]
pub(crate) struct FrameReader<R> {
    source: R,
    buffer: BytesMut,
    limits: Limits,
    parts: Frames,
    num_part_bytes: usize,
    last_read: Instant,
}

impl<R: AsyncRead + Unpin> FrameReader<R> {
    pub(crate) fn new(source: R, limits: Limits) -> Self {
        Self {
            source,
            buffer: BytesMut::new(),
            limits,
            parts: Vec::new(),
            num_part_bytes: 0,
            last_read: Instant::now(),
        }
    }

    /// When the latest bytes came.
    pub(crate) fn last_read(&self) -> Instant {
        self.last_read
    }

    /// Changes what the peer may send from now on.
    pub(crate) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
    }

    /// The next `num_bytes` bytes.
    pub(crate) async fn take(&mut self, num_bytes: usize) -> Result<Bytes, ZmtpError> {
        self.fill(num_bytes).await?;
        Ok(self.buffer.split_to(num_bytes).freeze())
    }

    /// The next message or command.
    pub(crate) async fn next(&mut self) -> Result<Received, ZmtpError> {
        loop {
            self.fill(2).await?;
            let flags = self.buffer[0];
            if flags & !(MORE | LONG | COMMAND) != 0 {
                return Err(ZmtpError::Frame("reserved bits of the flags are set"));
            }
            let header_len = if flags & LONG == 0 { 2 } else { 9 };
            self.fill(header_len).await?;
            let mut header = &self.buffer[1..header_len];
            let length = if flags & LONG == 0 { u64::from(header[0]) } else { header.get_u64() };
            let length = self.checked_length(length)?;
            self.fill(header_len + length).await?;
            self.buffer.advance(header_len);
            let body = self.buffer.split_to(length).freeze();
            if let Some(received) = self.accept(flags, body)? {
                return Ok(received);
            }
        }
    }

    fn accept(&mut self, flags: u8, body: Bytes) -> Result<Option<Received>, ZmtpError> {
        if flags & COMMAND != 0 {
            if flags & MORE != 0 {
                return Err(ZmtpError::Frame("a command says that more follows"));
            }
            return split_command(body).map(|(name, data)| Some(Received::Command(name, data)));
        }
        self.num_part_bytes += body.len();
        if self.parts.is_empty() {
            // Most messages have one frame, and a vector that grows has room for four.
            self.parts.reserve_exact(1);
        }
        self.parts.push(body);
        if self.parts.len() > self.limits.num_frames {
            return Err(ZmtpError::TooManyFrames { limit: self.limits.num_frames });
        }
        if flags & MORE != 0 {
            return Ok(None);
        }
        self.num_part_bytes = 0;
        Ok(Some(Received::Message(std::mem::take(&mut self.parts))))
    }

    fn checked_length(&self, length: u64) -> Result<usize, ZmtpError> {
        let limit = self.limits.message_bytes;
        usize::try_from(length)
            .ok()
            .filter(|&length| length <= limit.saturating_sub(self.num_part_bytes))
            .ok_or(ZmtpError::MessageTooLarge { limit })
    }

    async fn fill(&mut self, num_bytes: usize) -> Result<(), ZmtpError> {
        while self.buffer.len() < num_bytes {
            let missing = num_bytes - self.buffer.len();
            // A block is filled before the next one is taken: else each small message that comes
            // alone would keep a block of its own.
            if self.buffer.capacity() - self.buffer.len() < missing.min(READ_AHEAD_BYTES) {
                self.buffer.reserve(missing.clamp(BLOCK_BYTES, READ_AHEAD_BYTES));
            }
            if self.source.read_buf(&mut self.buffer).await? == 0 {
                let is_border = self.buffer.is_empty() && self.parts.is_empty();
                return Err(if is_border {
                    ZmtpError::Closed
                } else {
                    ZmtpError::Truncated { missing }
                });
            }
            self.last_read = Instant::now();
        }
        Ok(())
    }
}

fn split_command(mut body: Bytes) -> Result<(Bytes, Bytes), ZmtpError> {
    let length = body.first().map(|&length| usize::from(length));
    match length {
        Some(length) if length > 0 && length < body.len() => {
            body.advance(1);
            let name = body.split_to(length);
            Ok((name, body))
        }
        _ => Err(ZmtpError::Frame("a command without a name")),
    }
}

/// Appends the header of a frame of a message.
pub(crate) fn put_header(buffer: &mut BytesMut, length: usize, has_more: bool) {
    put_flagged(buffer, length, if has_more { MORE } else { 0 });
}

/// Appends a command.
pub(crate) fn put_command(buffer: &mut BytesMut, name: &[u8], data: &[u8]) {
    put_flagged(buffer, 1 + name.len() + data.len(), COMMAND);
    buffer.put_u8(u8::try_from(name.len()).unwrap_or(u8::MAX));
    buffer.put_slice(name);
    buffer.put_slice(data);
}

fn put_flagged(buffer: &mut BytesMut, length: usize, flags: u8) {
    match u8::try_from(length) {
        Ok(length) => buffer.put_slice(&[flags, length]),
        Err(_) => {
            buffer.put_u8(flags | LONG);
            buffer.put_u64(length as u64);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::io::AsyncWriteExt;

    const LIMITS: Limits = Limits { message_bytes: 1 << 20, num_frames: 8 };

    fn read_all(bytes: &[u8], limits: Limits) -> (Vec<Received>, ZmtpError) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let mut reader = FrameReader::new(bytes, limits);
            let mut all = Vec::new();
            loop {
                match reader.next().await {
                    Ok(received) => all.push(received),
                    Err(error) => return (all, error),
                }
            }
        })
    }

    fn written(messages: &[Vec<Vec<u8>>]) -> Vec<u8> {
        let mut buffer = BytesMut::new();
        for message in messages {
            for (index, frame) in message.iter().enumerate() {
                put_header(&mut buffer, frame.len(), index + 1 < message.len());
                buffer.put_slice(frame);
            }
        }
        buffer.to_vec()
    }

    #[test]
    fn a_length_of_2_to_the_62_is_refused_before_memory_is_taken() {
        let mut bytes = vec![LONG];
        bytes.extend_from_slice(&(1u64 << 62).to_be_bytes());
        let (all, error) = read_all(&bytes, LIMITS);
        assert!(all.is_empty());
        assert!(matches!(error, ZmtpError::MessageTooLarge { limit: 1_048_576 }), "{error}");
    }

    #[test]
    fn the_limit_counts_all_frames_of_a_message() {
        let bytes = written(&[vec![vec![0; 600_000], vec![0; 600_000]]]);
        assert!(matches!(read_all(&bytes, LIMITS).1, ZmtpError::MessageTooLarge { .. }));
        let bytes = written(&[vec![vec![0; 600_000]], vec![vec![0; 600_000]]]);
        assert_eq!(read_all(&bytes, LIMITS).0.len(), 2);
    }

    #[test]
    fn the_ninth_frame_is_refused() {
        assert!(matches!(
            read_all(&written(&[vec![vec![]; 9]]), LIMITS).1,
            ZmtpError::TooManyFrames { limit: 8 }
        ));
        assert_eq!(read_all(&written(&[vec![vec![]; 8]]), LIMITS).0.len(), 1);
    }

    #[test]
    fn reserved_bits_and_nameless_commands_are_refused() {
        assert!(matches!(read_all(&[0x80, 0], LIMITS).1, ZmtpError::Frame(_)));
        assert!(matches!(read_all(&[COMMAND, 1, 0], LIMITS).1, ZmtpError::Frame(_)));
        assert!(matches!(read_all(&[COMMAND, 0, 0], LIMITS).1, ZmtpError::Frame(_)));
        assert!(matches!(read_all(&[COMMAND | MORE, 2, 1, 65], LIMITS).1, ZmtpError::Frame(_)));
        assert!(matches!(read_all(&[COMMAND, 2, 9, 65], LIMITS).1, ZmtpError::Frame(_)));
    }

    #[test]
    fn an_end_within_a_message_is_told_from_an_end_between_two() {
        let bytes = written(&[vec![vec![1; 10]], vec![vec![2; 10], vec![3; 10]]]);
        for length in 0..=bytes.len() {
            let (_, error) = read_all(&bytes[..length], LIMITS);
            let is_border = length == 0 || length == 12 || length == bytes.len();
            assert_eq!(matches!(error, ZmtpError::Closed), is_border, "{length}: {error}");
        }
    }

    #[test]
    fn a_message_of_one_frame_has_room_for_one() {
        let (all, _) = read_all(&written(&vec![vec![vec![]]; 100]), LIMITS);
        for received in all {
            let Received::Message(frames) = received else { panic!("{received:?}") };
            assert_eq!((frames.len(), frames.capacity()), (1, 1));
        }
    }

    #[test]
    fn small_messages_that_come_one_by_one_share_memory() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let starts: Vec<usize> = runtime.block_on(async {
            let (mut peer, ours) = tokio::io::duplex(16);
            let mut reader = FrameReader::new(ours, LIMITS);
            let mut held = Vec::new();
            for _ in 0..300 {
                peer.write_all(&written(&[vec![vec![7; 10]]])).await.unwrap();
                let Received::Message(frames) = reader.next().await.unwrap() else { panic!() };
                held.push(frames);
            }
            held.iter().map(|frames| frames[0].as_ptr() as usize).collect()
        });
        let num_neighbours = starts.windows(2).filter(|pair| pair[1] == pair[0] + 12).count();
        assert!(num_neighbours > 290, "only {num_neighbours} of 299 lie beside the one before");
    }

    /// Bytes, and then an error.
    struct Failing(Vec<u8>);

    impl AsyncRead for Failing {
        fn poll_read(
            mut self: std::pin::Pin<&mut Self>,
            _context: &mut std::task::Context<'_>,
            buffer: &mut tokio::io::ReadBuf<'_>,
        ) -> std::task::Poll<std::io::Result<()>> {
            let bytes = std::mem::take(&mut self.0);
            buffer.put_slice(&bytes);
            let reset = Err(std::io::ErrorKind::ConnectionReset.into());
            std::task::Poll::Ready(if bytes.is_empty() { reset } else { Ok(()) })
        }
    }

    #[test]
    fn a_network_that_fails_ends_the_connection_with_its_reason() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let mut reader = FrameReader::new(Failing(vec![0, 5, 1]), LIMITS);
        let error = runtime.block_on(reader.next()).unwrap_err();
        assert_eq!(error.to_string(), "the connection failed: connection reset");
        assert!(matches!(error, ZmtpError::Io(_)));
    }

    proptest! {
        #[test]
        fn messages_come_out_as_they_went_in(
            messages in prop::collection::vec(
                prop::collection::vec(prop::collection::vec(any::<u8>(), 0..400), 1..8), 0..8
            )
        ) {
            let (all, error) = read_all(&written(&messages), LIMITS);
            let expected: Vec<_> = messages
                .into_iter()
                .map(|m| Received::Message(m.into_iter().map(Bytes::from).collect()))
                .collect();
            prop_assert_eq!(all, expected);
            prop_assert!(matches!(error, ZmtpError::Closed));
        }

        #[test]
        fn random_bytes_end_in_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let (_, error) = read_all(&bytes, LIMITS);
            prop_assert!(!error.to_string().is_empty());
        }
    }
}
