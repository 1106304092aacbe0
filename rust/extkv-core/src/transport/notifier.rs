//! How an event loop learns which mailboxes have something, through one file descriptor.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use parking_lot::Mutex;

use super::error::{TransportError, TransportResult};

/// A list of keys and a descriptor that is readable while the list has something.
#[derive(Debug)]
pub struct Notifier {
    ready: Mutex<Vec<u64>>,
    reader: UnixStream,
    writer: UnixStream,
}

impl Notifier {
    pub(super) fn new() -> TransportResult<Self> {
        let (reader, writer) = UnixStream::pair().map_err(TransportError::Thread)?;
        for end in [&reader, &writer] {
            end.set_nonblocking(true).map_err(TransportError::Thread)?;
        }
        Ok(Self { ready: Mutex::default(), reader, writer })
    }

    /// The descriptor to wait on. It belongs to the notifier.
    #[must_use]
    pub fn descriptor(&self) -> RawFd {
        self.reader.as_raw_fd()
    }

    pub(super) fn notify(&self, key: u64) {
        let mut ready = self.ready.lock();
        ready.push(key);
        if ready.len() == 1 {
            // One byte per list; a full pipe is readable as well.
            let _ = (&self.writer).write(&[1]);
        }
    }

    /// The keys that came since the last call; each of them is told once per wait.
    pub fn take(&self) -> Vec<u64> {
        let mut bytes = [0; 64];
        // Before the list, so that a key that comes in between makes the descriptor readable again.
        loop {
            match (&self.reader).read(&mut bytes) {
                Ok(1..) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => break,
            }
        }
        std::mem::take(&mut *self.ready.lock())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn every_key_is_told_and_an_empty_list_is_quiet() {
        let notifier = Notifier::new().unwrap();
        assert!(notifier.take().is_empty());
        notifier.notify(3);
        notifier.notify(4);
        assert_eq!(notifier.take(), [3, 4]);
        notifier.notify(5);
        assert_eq!(notifier.take(), [5]);
    }

    #[test]
    fn no_key_is_lost_between_threads() {
        let notifier = Arc::new(Notifier::new().unwrap());
        let telling = Arc::clone(&notifier);
        let thread = std::thread::spawn(move || (0..20_000).for_each(|key| telling.notify(key)));
        let mut blocking = notifier.reader.try_clone().unwrap();
        let mut keys = Vec::new();
        while keys.len() < 20_000 {
            let mut byte = [0];
            // Waits as an event loop does: a byte, or the list has something already.
            while keys.len() < 20_000 && blocking.read(&mut byte).is_err() {
                keys.extend(notifier.take());
                std::thread::yield_now();
            }
            keys.extend(notifier.take());
        }
        thread.join().unwrap();
        keys.sort_unstable();
        assert!(keys.into_iter().eq(0..20_000));
    }
}
