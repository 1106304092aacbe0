//! How a front end listens.

use crate::protocol::Profile;

use super::socket::SocketLimits;

/// Addresses of a data-parallel coordinator that somebody else runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CoordinatorAddresses {
    /// Where it publishes to engines.
    pub to_engines: String,
    /// Where engines push to it.
    pub from_engines: String,
    /// Where it publishes to front ends.
    pub to_front_ends: String,
}

/// How a front end listens.
#[derive(Debug, Clone)]
pub struct FrontEndOptions {
    /// Where engines say HELLO.
    pub handshake_address: String,
    /// Where engines take requests.
    pub input_address: String,
    /// Where engines send outputs.
    pub output_address: String,
    /// How many engines there are.
    pub num_engines: u16,
    /// What engines must say of running on this node; None for either.
    pub expects_local: Option<bool>,
    /// The profile of engines that do not say their version.
    pub default_profile: Profile,
    /// The coordinator, where there is one.
    pub coordinator: Option<CoordinatorAddresses>,
    /// Bytes that may wait in one stream before it is given up.
    pub max_stream_bytes: usize,
    /// For all sockets.
    pub limits: SocketLimits,
}

impl FrontEndOptions {
    /// Usual options for one engine on this node.
    #[must_use]
    pub fn new(handshake_address: &str) -> Self {
        Self {
            handshake_address: handshake_address.to_owned(),
            input_address: "tcp://127.0.0.1:0".to_owned(),
            output_address: "tcp://127.0.0.1:0".to_owned(),
            num_engines: 1,
            expects_local: None,
            default_profile: Profile::default(),
            coordinator: None,
            max_stream_bytes: 64 << 20,
            limits: SocketLimits::default(),
        }
    }
}
