//! Bytes in and out over TCP or a Unix socket.

use std::net::TcpListener as StdTcpListener;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};

use super::endpoint::Endpoint;
use super::zmtp::{FrameReader, Limits};

/// What a peer may send before it has said who it is.
const HANDSHAKE_LIMITS: Limits = Limits { message_bytes: 64 * 1024, num_frames: 1 };

/// Messages in.
pub(crate) type Reader = FrameReader<Box<dyn AsyncRead + Send + Unpin>>;
/// Bytes out.
pub(crate) type Writer = Box<dyn AsyncWrite + Send + Unpin>;

/// Where connections come in.
pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    pub(crate) fn open(endpoint: &Endpoint) -> std::io::Result<(Self, Endpoint)> {
        match endpoint {
            Endpoint::Tcp { host, port } => {
                let name = if host == "*" { "0.0.0.0" } else { host };
                let listener = StdTcpListener::bind((name, *port))?;
                listener.set_nonblocking(true)?;
                let port = listener.local_addr()?.port();
                let endpoint = Endpoint::Tcp { host: host.clone(), port };
                Ok((Self::Tcp(TcpListener::from_std(listener)?), endpoint))
            }
            Endpoint::Ipc(path) => {
                // A socket file that nobody listens on is left over from a process that was killed.
                if path.exists() && std::os::unix::net::UnixStream::connect(path).is_err() {
                    std::fs::remove_file(path)?;
                }
                Ok((Self::Unix(UnixListener::bind(path)?), endpoint.clone()))
            }
        }
    }

    pub(crate) async fn accept(&self) -> std::io::Result<(Reader, Writer)> {
        match self {
            Self::Tcp(listener) => split_tcp(listener.accept().await?.0),
            Self::Unix(listener) => Ok(split_unix(listener.accept().await?.0)),
        }
    }
}

fn split_tcp(stream: TcpStream) -> std::io::Result<(Reader, Writer)> {
    stream.set_nodelay(true)?;
    let (read, write) = stream.into_split();
    Ok((FrameReader::new(Box::new(read), HANDSHAKE_LIMITS), Box::new(write)))
}

fn split_unix(stream: UnixStream) -> (Reader, Writer) {
    let (read, write) = stream.into_split();
    (FrameReader::new(Box::new(read), HANDSHAKE_LIMITS), Box::new(write))
}

/// Connects once.
pub(crate) async fn connect(endpoint: &Endpoint) -> std::io::Result<(Reader, Writer)> {
    match endpoint {
        Endpoint::Tcp { host, port } => {
            split_tcp(TcpStream::connect((host.as_str(), *port)).await?)
        }
        Endpoint::Ipc(path) => Ok(split_unix(UnixStream::connect(path).await?)),
    }
}
