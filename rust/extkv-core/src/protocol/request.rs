//! What a front end sends to an engine: the type byte and the payloads it announces.

use super::codec::{DecodeProblem, DecodeResult, Reader, Wire, Writer};

wire_enum! {
    /// What a request frame holds; sent as one byte in a frame before the payload.
    pub enum RequestType {
        /// A new request.
        Add = 0,
        /// Request ids to stop.
        Abort = 1,
        /// Run a wave; only on the coordinator's socket.
        StartDpWave = 2,
        /// Call a method of the engine.
        Utility = 3,
    }
}

impl RequestType {
    /// The type frame.
    #[must_use]
    pub const fn frame(self) -> [u8; 1] {
        [self.number()]
    }

    /// The type that a frame announces. Types 4 and 5 never leave an engine process.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem::UnknownMember`] if the frame is not one known byte.
    pub fn from_frame(frame: &[u8]) -> DecodeResult<Self> {
        let known = match frame {
            [number] => Self::from_number(*number),
            _ => None,
        };
        known.ok_or_else(|| {
            let shown: Vec<String> =
                frame.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
            let found = match frame.len() {
                0 => "an empty frame".to_owned(),
                1 => format!("byte {}", shown.concat()),
                len => format!("a frame of {len} bytes ({}…)", shown.concat()),
            };
            DecodeProblem::UnknownMember { enumeration: "request type", found }.into()
        })
    }
}

/// Payload of [`RequestType::Abort`]. Unknown ids are ignored by engines, and a client's abort gets
/// no answer.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct AbortRequests {
    /// Requests to stop.
    pub request_ids: Vec<String>,
}

impl Wire for AbortRequests {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        Vec::read(reader).map(|request_ids| Self { request_ids })
    }

    fn write(&self, writer: &mut Writer) {
        self.request_ids.write(writer);
    }
}
