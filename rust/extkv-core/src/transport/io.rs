//! The one thread that serves all sockets of a transport.

use std::future::Future;
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use super::error::{TransportError, TransportResult};

/// A thread with an event loop. Dropping it ends every task on it.
#[derive(Debug)]
pub(crate) struct IoThread {
    handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl IoThread {
    pub(crate) fn start(name: &str) -> TransportResult<Self> {
        let runtime =
            Builder::new_current_thread().enable_all().build().map_err(TransportError::Thread)?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                // A dropped sender ends the thread as well as a sent value does.
                let _ = runtime.block_on(stopped);
                // A look-up of a host name may hang in a thread of its own; nobody waits for it.
                runtime.shutdown_background();
            })
            .map_err(TransportError::Thread)?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs a future on the thread and waits for it, at most `limit`; None if that passes.
    ///
    /// Must not be called on the thread itself.
    pub(crate) fn run_for<F>(&self, limit: Duration, future: F) -> Option<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        let (done, result) = std::sync::mpsc::channel();
        self.handle.spawn(async move {
            let _ = done.send(tokio::time::timeout(limit, future).await.ok());
        });
        result.recv_timeout(limit + Duration::from_secs(1)).ok().flatten()
    }
}

impl Drop for IoThread {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        let Some(thread) = self.thread.take() else { return };
        // The last owner may be a task on the thread itself, which cannot wait for its own end.
        if thread.thread().id() != std::thread::current().id() {
            let _ = thread.join();
        }
    }
}
