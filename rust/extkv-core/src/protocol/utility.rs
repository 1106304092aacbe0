//! Calls of engine methods, and their results.

use super::codec::{
    DecodeProblem, DecodeResult, Part, Reader, Record, Source, Untyped, Visible, Wire, Writer,
};

/// Identity of a call: chosen by the caller up to 2^64 - 1, negative for notices nobody asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CallId(i128);

impl CallId {
    /// A result under this id is a notice of elastic expert parallelism: `[kind, rank]`.
    pub const ELASTIC_EP_NOTICE: Self = Self(-1);
    /// A result under this id is a fault-tolerance status map.
    pub const FAULT_TOLERANCE_STATUS: Self = Self(-2);

    /// Whether the result was not asked for.
    #[must_use]
    pub const fn is_notice(self) -> bool {
        self.0 < 0
    }

    /// The id as a number in [-2^63, 2^64).
    #[must_use]
    pub const fn number(self) -> i128 {
        self.0
    }
}

impl From<u64> for CallId {
    fn from(number: u64) -> Self {
        Self(i128::from(number))
    }
}

impl From<i64> for CallId {
    fn from(number: i64) -> Self {
        Self(i128::from(number))
    }
}

impl Wire for CallId {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        reader.int().map(Self)
    }

    fn write(&self, writer: &mut Writer) {
        match (u64::try_from(self.0), i64::try_from(self.0)) {
            (Ok(number), _) => writer.u64(number),
            (_, Ok(number)) => writer.i64(number),
            // Both constructors take 64-bit numbers, and msgpack has no wider ones.
            _ => writer.nil(),
        }
    }
}

wire_array! {
    /// Front end to engine, request type 03: call a method.
    pub struct UtilityCall {
        /// Which output socket gets the result.
        client_index: i64 [required];
        /// Identity of the call.
        call_id: CallId [required];
        /// Name of the engine's method.
        method: String [required];
        /// Positional arguments, one array.
        args: Untyped [required];
    }
}

/// What a method returned. The type information beside it is ignored: nothing is imported by it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UtilityResult {
    /// The value.
    pub value: Untyped,
}

impl Wire for UtilityResult {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let mut elements = reader.elements("an array, [type information, value]")?;
        reader.field(&mut elements, "type_info", Reader::check)?;
        let value = reader.field(&mut elements, "value", Untyped::read)?;
        reader.skip_extra(&elements)?;
        Ok(Self { value })
    }

    fn write(&self, writer: &mut Writer) {
        writer.array_len(2);
        writer.nil();
        self.value.write(writer);
    }
}

wire_array! {
    /// Engine to front end: how a call ended.
    pub struct UtilityOutput {
        /// Identity of the call.
        call_id: CallId [required];
        /// Why it failed; "Call to METHOD method failed: REASON", where the reason may be empty.
        failure_message: Option<String> [or None];
        /// What it returned, unless it failed.
        result: Option<UtilityResult> [or None];
    }
}

impl UtilityCall {
    /// The arguments as an array of values.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem::WrongType`] if they are no array.
    pub fn arg_values(&self) -> DecodeResult<Vec<rmpv::Value>> {
        match self.args.to_value() {
            rmpv::Value::Array(values) => Ok(values),
            _ => {
                let wrong = DecodeProblem::WrongType {
                    expected: "an array of arguments",
                    found: "another type",
                };
                Err(super::DecodeError::from(wrong).in_field("args"))
            }
        }
    }
}

impl Visible for CallId {
    fn part(&self) -> Part<'_> {
        Part::Int(self.0)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        let found = source.int()?;
        let is_64_bit = u64::try_from(found).is_ok() || i64::try_from(found).is_ok();
        let expected = "an int in [-2**63, 2**64)";
        if is_64_bit {
            Ok(Self(found))
        } else {
            Err(DecodeProblem::OutOfRange { expected, found }.into())
        }
    }
}

impl Record for UtilityResult {
    fn name(&self) -> &'static str {
        "UtilityResult"
    }

    fn parts(&self) -> Vec<(&'static str, Part<'_>)> {
        vec![("result", self.value.part())]
    }
}

impl Visible for UtilityResult {
    fn part(&self) -> Part<'_> {
        Part::Record(self)
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        let Some(value) = source.field("result")? else {
            return Err(source.is_not("a UtilityResult"));
        };
        let value = Untyped::from_source(&value).map_err(|error| error.in_field("result"))?;
        Ok(Self { value })
    }
}
