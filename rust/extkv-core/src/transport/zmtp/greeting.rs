//! The first bytes of a connection: greeting and READY command.

use bytes::{Buf, BufMut, Bytes, BytesMut};

use super::{SocketKind, ZmtpError};

pub(crate) const GREETING_LEN: usize = 64;
/// Longest identity that the length byte of ZMTP 2 could say.
pub(crate) const MAX_IDENTITY_LEN: usize = 255;

/// What a peer said of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerInfo {
    /// Its identity; empty if it gave none.
    pub(crate) identity: Bytes,
    /// Whether it answers PING.
    pub(crate) has_heartbeats: bool,
}

/// Our greeting: ZMTP 3.1, NULL.
pub(crate) fn greeting() -> [u8; GREETING_LEN] {
    let mut bytes = [0; GREETING_LEN];
    bytes[0] = 0xff;
    bytes[9] = 0x7f;
    bytes[10] = 3;
    bytes[11] = 1;
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Checks a peer's greeting and tells whether it knows heartbeats.
pub(crate) fn check_greeting(bytes: &[u8]) -> Result<bool, ZmtpError> {
    if bytes.len() != GREETING_LEN || bytes[0] != 0xff || bytes[9] & 1 == 0 {
        return Err(ZmtpError::Greeting("the signature is not ZMTP's"));
    }
    if bytes[10] < 3 {
        return Err(ZmtpError::Greeting("the peer speaks a ZMTP older than 3.0"));
    }
    if &bytes[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(ZmtpError::Greeting("the peer wants another mechanism than NULL"));
    }
    Ok(bytes[10] > 3 || bytes[11] >= 1)
}

/// Data of our READY command.
pub(crate) fn ready_properties(kind: SocketKind, identity: &[u8]) -> BytesMut {
    let mut data = BytesMut::new();
    put_property(&mut data, b"Socket-Type", kind.name().as_bytes());
    if matches!(kind, SocketKind::Router | SocketKind::Dealer) {
        put_property(&mut data, b"Identity", identity);
    }
    data
}

/// Checks the data of a peer's READY command and returns its identity.
pub(crate) fn check_ready(kind: SocketKind, mut data: Bytes) -> Result<Bytes, ZmtpError> {
    let (mut peer_kind, mut identity) = (Bytes::new(), Bytes::new());
    while !data.is_empty() {
        let name = take_short(&mut data)?;
        let value = take_long(&mut data)?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            peer_kind = value;
        } else if name.eq_ignore_ascii_case(b"identity") {
            identity = value;
        }
    }
    if !kind.accepts(&peer_kind) {
        let peer = String::from_utf8_lossy(&peer_kind).into_owned();
        return Err(ZmtpError::Kind { own: kind.name(), peer });
    }
    if identity.len() > MAX_IDENTITY_LEN {
        return Err(ZmtpError::Handshake("an identity of more than 255 bytes"));
    }
    Ok(identity)
}

fn put_property(data: &mut BytesMut, name: &[u8], value: &[u8]) {
    data.put_u8(u8::try_from(name.len()).unwrap_or(u8::MAX));
    data.put_slice(name);
    data.put_u32(u32::try_from(value.len()).unwrap_or(u32::MAX));
    data.put_slice(value);
}

fn take_short(data: &mut Bytes) -> Result<Bytes, ZmtpError> {
    let length = usize::from(data.get_u8());
    if length > data.len() {
        return Err(ZmtpError::Handshake("a property's name exceeds the command"));
    }
    Ok(data.split_to(length))
}

fn take_long(data: &mut Bytes) -> Result<Bytes, ZmtpError> {
    if data.len() < 4 {
        return Err(ZmtpError::Handshake("a property without a value"));
    }
    let length = usize::try_from(data.get_u32()).unwrap_or(usize::MAX);
    if length > data.len() {
        return Err(ZmtpError::Handshake("a property's value exceeds the command"));
    }
    Ok(data.split_to(length))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn our_own_greeting_passes() {
        assert!(check_greeting(&greeting()).unwrap());
    }

    #[test]
    fn version_3_0_has_no_heartbeats() {
        let mut bytes = greeting();
        bytes[11] = 0;
        assert!(!check_greeting(&bytes).unwrap());
    }

    #[test]
    fn other_greetings_are_refused() {
        for (place, value) in [(0, 1), (9, 0x7e), (10, 2), (12, b'P'), (31, 1)] {
            let mut bytes = greeting();
            bytes[place] = value;
            assert!(matches!(check_greeting(&bytes), Err(ZmtpError::Greeting(_))), "{place}");
        }
        assert!(check_greeting(b"GET / HTTP/1.1\r\n").is_err());
    }

    #[test]
    fn identity_comes_through() {
        let data = ready_properties(SocketKind::Dealer, &[7, 0]).freeze();
        assert_eq!(check_ready(SocketKind::Router, data).unwrap(), Bytes::from_static(&[7, 0]));
    }

    #[test]
    fn a_socket_of_the_wrong_kind_is_refused() {
        let data = ready_properties(SocketKind::Push, &[]).freeze();
        let error = check_ready(SocketKind::Router, data).unwrap_err();
        assert_eq!(error.to_string(), "a ROUTER socket does not talk to a PUSH socket");
    }

    #[test]
    fn an_identity_of_256_bytes_is_refused() {
        let data = ready_properties(SocketKind::Dealer, &[1; 256]).freeze();
        assert!(matches!(check_ready(SocketKind::Router, data), Err(ZmtpError::Handshake(_))));
    }

    #[test]
    fn every_truncation_of_the_properties_is_refused() {
        let data = ready_properties(SocketKind::Dealer, &[7, 0]).freeze();
        for length in 0..data.len() {
            let whole = length == 1 + 11 + 4 + 6;
            assert_eq!(check_ready(SocketKind::Router, data.slice(..length)).is_ok(), whole);
        }
    }

    proptest! {
        #[test]
        fn random_properties_never_panic(data in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = check_ready(SocketKind::Router, Bytes::from(data));
        }
    }
}
