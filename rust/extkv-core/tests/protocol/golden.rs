//! Golden messages made by vLLM's own encoders: each decodes, and encodes to the same bytes.

use std::path::PathBuf;

use bytes::Bytes;
use extkv_core::protocol::Profile;

/// One line of a golden file.
pub(crate) struct Golden {
    pub(crate) name: String,
    pub(crate) request_type: Option<u8>,
    pub(crate) frames: Vec<Bytes>,
    pub(crate) line: serde_json::Value,
}

/// The lines of `tests/protocol/golden/FILE`.
pub(crate) fn golden(file: &str) -> Vec<Golden> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/protocol/golden");
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    text.lines().map(parse).collect()
}

/// The lines of a file in both versions, with the profile of each.
pub(crate) fn golden_of_both(file: &str) -> Vec<(Profile, Golden)> {
    let new = golden(&format!("{file}.jsonl")).into_iter().map(|line| (Profile::V0_32, line));
    let old =
        golden(&format!("v0.25.1/{file}.jsonl")).into_iter().map(|line| (Profile::V0_25, line));
    new.chain(old).collect()
}

fn parse(line: &str) -> Golden {
    let line: serde_json::Value = serde_json::from_str(line).unwrap();
    let frames = line["frames_hex"].as_array().unwrap();
    Golden {
        name: line["name"].as_str().unwrap().to_owned(),
        request_type: line["request_type_hex"].as_str().map(|hex| from_hex(hex)[0]),
        frames: frames.iter().map(|hex| from_hex(hex.as_str().unwrap()).into()).collect(),
        line,
    }
}

fn from_hex(hex: &str) -> Vec<u8> {
    (0..hex.len() / 2)
        .map(|index| u8::from_str_radix(&hex[index * 2..index * 2 + 2], 16).unwrap())
        .collect()
}
