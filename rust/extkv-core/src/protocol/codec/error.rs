//! Why bytes are no message, with the path to the field; and why a message cannot be written.

use std::fmt;

use thiserror::Error as ThisError;

use crate::protocol::Profile;

/// Result of decoding.
pub type DecodeResult<T> = Result<T, DecodeError>;

/// Bytes that are no message. Prints as `outputs[3].new_token_ids[0]: expected …`.
#[derive(Debug, Clone, PartialEq)]
pub struct DecodeError(Box<Located>);

#[derive(Debug, Clone, PartialEq)]
struct Located {
    /// Innermost step first.
    steps: Vec<Step>,
    problem: DecodeProblem,
}

#[derive(Debug, Clone, PartialEq)]
enum Step {
    Field(&'static str),
    Index(usize),
    Key(String),
}

/// What is wrong with the bytes.
#[derive(Debug, Clone, PartialEq, ThisError)]
pub enum DecodeProblem {
    /// The message has no frame.
    #[error("a message needs at least one frame, got none")]
    NoFrames,
    /// The input ends inside a value.
    #[error("the input ends {missing} bytes too early")]
    Truncated {
        /// Bytes that the value still needs.
        missing: u64,
    },
    /// More members are announced than bytes are left.
    #[error("{what} of {len} members announced, but only {left} bytes are left")]
    TooLong {
        /// `array` or `map`.
        what: &'static str,
        /// Members announced.
        len: u64,
        /// Bytes left.
        left: u64,
    },
    /// Bytes are left after the message.
    #[error("{len} bytes are left after the message")]
    TrailingBytes {
        /// Their number.
        len: usize,
    },
    /// A value of another type.
    #[error("expected {expected}, found {found}")]
    WrongType {
        /// What the field holds.
        expected: &'static str,
        /// What the input has.
        found: &'static str,
    },
    /// A foreign value that the field cannot hold.
    #[error("expected {expected}, found {found}")]
    NotA {
        /// What the field holds.
        expected: &'static str,
        /// The type of the value.
        found: String,
    },
    /// A number that the field cannot hold.
    #[error("expected {expected}, found {found}")]
    OutOfRange {
        /// The numbers that the field holds.
        expected: &'static str,
        /// The number found.
        found: i128,
    },
    /// A member that the enumeration does not have.
    #[error("{found} is no {enumeration}")]
    UnknownMember {
        /// Name of the enumeration.
        enumeration: &'static str,
        /// What was found.
        found: String,
    },
    /// An array with fewer elements than the message requires.
    #[error("required, but the array has only {len} elements")]
    MissingElement {
        /// Elements of the array.
        len: usize,
    },
    /// A required key is not in the map.
    #[error("required, but missing")]
    MissingKey,
    /// A string that is not UTF-8.
    #[error("the string is not UTF-8")]
    InvalidUtf8,
    /// A pickled object. It is never unpickled.
    #[error("pickled object (extension type {code}) refused")]
    Pickled {
        /// 1 for pickle, 2 for cloudpickle.
        code: i8,
    },
    /// An extension type that vLLM does not have.
    #[error("unknown extension type {code}")]
    UnknownExtension {
        /// The type.
        code: i8,
    },
    /// A tensor in another process's shared memory.
    #[error("the tensor lies in shared memory (torch_shm), which does not cross this socket")]
    OutOfBandTensor,
    /// An auxiliary frame that the message does not have.
    #[error("auxiliary frame {index} asked for, the message has frames 1 to {last}")]
    NoSuchFrame {
        /// The index found.
        index: i128,
        /// Index of the last auxiliary frame.
        last: usize,
    },
    /// An element type that arrays on the wire do not have.
    #[error("element type {name:?} is not supported")]
    UnknownDtype {
        /// The name found.
        name: String,
    },
    /// The data of an array has another size than dtype and shape say.
    #[error("{dtype} array of shape {shape} has {found} bytes of data")]
    ShapeMismatch {
        /// The element type as written.
        dtype: String,
        /// The shape.
        shape: String,
        /// Bytes of data.
        found: usize,
    },
    /// Values nest too deep.
    #[error("values nest deeper than {limit}")]
    TooDeep {
        /// Levels allowed.
        limit: usize,
    },
    /// A value that breaks a rule of its message.
    #[error("{rule}")]
    Invalid {
        /// The rule.
        rule: &'static str,
    },
}

impl DecodeProblem {
    /// A text that names no member of an enumeration.
    pub(crate) fn unknown_text(enumeration: &'static str, text: &str) -> Self {
        Self::UnknownMember { enumeration, found: shortened(text) }
    }
}

/// The first part of a text of any length, for an error.
pub(crate) fn shortened(text: &str) -> String {
    text.chars().take(40).collect()
}

impl DecodeError {
    /// What is wrong.
    #[must_use]
    pub fn problem(&self) -> &DecodeProblem {
        &self.0.problem
    }

    /// Where it is wrong, such as `outputs[3].new_logprobs`; empty for the message itself.
    #[must_use]
    pub fn path(&self) -> String {
        let mut path = String::new();
        for step in self.0.steps.iter().rev() {
            match step {
                Step::Field(name) if path.is_empty() => path.push_str(name),
                Step::Field(name) => {
                    path.push('.');
                    path.push_str(name);
                }
                Step::Index(index) => path.push_str(&format!("[{index}]")),
                Step::Key(key) => path.push_str(&format!("[{key:?}]")),
            }
        }
        path
    }

    pub(crate) fn in_field(mut self, name: &'static str) -> Self {
        self.0.steps.push(Step::Field(name));
        self
    }

    pub(crate) fn at_index(mut self, index: usize) -> Self {
        self.0.steps.push(Step::Index(index));
        self
    }

    pub(crate) fn at_key(mut self, key: &str) -> Self {
        self.0.steps.push(Step::Key(shortened(key)));
        self
    }
}

impl From<DecodeProblem> for DecodeError {
    #[cold]
    fn from(problem: DecodeProblem) -> Self {
        Self(Box::new(Located { steps: Vec::new(), problem }))
    }
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.steps.is_empty() {
            return self.0.problem.fmt(f);
        }
        write!(f, "{}: {}", self.path(), self.0.problem)
    }
}

impl std::error::Error for DecodeError {}

/// Why a message cannot be written.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum EncodeError {
    /// More members or bytes than a msgpack header can announce.
    #[error("{what} of {len} members or bytes; msgpack holds at most 2**32 - 1")]
    TooLong {
        /// `array`, `map`, `string` or `bytes`.
        what: &'static str,
        /// Its length.
        len: usize,
    },
    /// A field that the profile requires has no value.
    #[error("field {field} needs a value in wire profile {profile}")]
    MissingField {
        /// Its name.
        field: &'static str,
        /// The profile asked for.
        profile: Profile,
    },
}
