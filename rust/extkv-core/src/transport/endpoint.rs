//! Addresses as ZeroMQ writes them: `tcp://host:port` and `ipc://path`.

use std::fmt;
use std::path::PathBuf;

use super::error::{TransportError, TransportResult};

/// A place to listen on or to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A TCP port. Host `*` listens on every interface, port 0 or `*` on a free port.
    Tcp {
        /// Name or number; an IPv6 number without brackets.
        host: String,
        /// The port.
        port: u16,
    },
    /// A Unix socket.
    Ipc(PathBuf),
}

impl Endpoint {
    /// Reads an address.
    ///
    /// # Errors
    ///
    /// [`TransportError::Address`] if it is neither `tcp://host:port` nor `ipc://path`.
    pub fn parse(address: &str) -> TransportResult<Self> {
        let bad = |expected| TransportError::Address { address: address.to_owned(), expected };
        if let Some(path) = address.strip_prefix("ipc://") {
            return match path {
                "" | "*" => Err(bad("expected a path after ipc://")),
                _ if path.starts_with('@') => Err(bad("abstract Unix sockets are not supported")),
                _ => Ok(Self::Ipc(PathBuf::from(path))),
            };
        }
        let rest = address
            .strip_prefix("tcp://")
            .ok_or_else(|| bad("expected tcp://host:port or ipc://path"))?;
        let (host, port) = rest.rsplit_once(':').ok_or_else(|| bad("expected tcp://host:port"))?;
        let port = match port {
            "*" => 0,
            _ => port.parse().map_err(|_| bad("expected a port below 65536 after the host"))?,
        };
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        if host.is_empty() {
            return Err(bad("expected a host before the port"));
        }
        Ok(Self::Tcp { host: host.to_owned(), port })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "tcp://[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "tcp://{host}:{port}"),
            Self::Ipc(path) => write!(f, "ipc://{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for text in ["tcp://127.0.0.1:5555", "tcp://[::1]:80", "tcp://*:0", "ipc:///tmp/a b.sock"] {
            assert_eq!(Endpoint::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Endpoint::parse("tcp://*:*").unwrap().to_string(), "tcp://*:0");
    }

    #[test]
    fn rejects_what_is_no_endpoint() {
        for text in [
            "",
            "udp://x:1",
            "tcp://",
            "tcp://x",
            "tcp://:1",
            "tcp://x:70000",
            "tcp://x:-1",
            "ipc://",
            "ipc://@x",
        ] {
            let error = Endpoint::parse(text).unwrap_err();
            assert!(matches!(error, TransportError::Address { .. }), "{text}");
            assert!(error.to_string().contains(&format!("{text:?}")));
        }
    }
}
