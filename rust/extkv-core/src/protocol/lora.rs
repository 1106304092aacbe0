//! The adapter that a request asks for.

use super::codec::{
    DecodeProblem, DecodeResult, Part, Reader, Source, Untyped, Visible, Wire, Writer,
};

wire_array! {
    /// Fields of [`LoraRequest`] before its rules are checked.
    pub struct LoraFields {
        /// The adapter's name.
        lora_name: String [required];
        /// Its number, at least 1.
        lora_int_id: i64 [required];
        /// Where its weights lie.
        lora_path: String [or String::new()];
        /// The model it belongs to.
        base_model_name: Option<String> [or None];
        /// How tensorizer loads it.
        tensorizer_config_dict: Option<Untyped> [or None, until V0_26];
        /// Whether it replaces a loaded adapter of the same name.
        load_inplace: bool [or false];
        /// Whether its expert weights are three-dimensional.
        is_3d_lora_weight: bool [or false];
    }
}

/// The adapter that a request asks for: number at least 1, path not empty.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraRequest(LoraFields);

impl LoraRequest {
    /// Checks the fields.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem::Invalid`] if the number is below 1 or the path is empty.
    pub fn new(fields: LoraFields) -> DecodeResult<Self> {
        let broken =
            |field, rule| super::DecodeError::from(DecodeProblem::Invalid { rule }).in_field(field);
        if fields.lora_int_id < 1 {
            return Err(broken("lora_int_id", "the id of an adapter is at least 1"));
        }
        if fields.lora_path.is_empty() {
            return Err(broken("lora_path", "the path of an adapter is not empty"));
        }
        Ok(Self(fields))
    }

    /// The fields.
    #[must_use]
    pub fn fields(&self) -> &LoraFields {
        &self.0
    }
}

impl Wire for LoraRequest {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        LoraFields::read(reader).and_then(Self::new)
    }

    fn write(&self, writer: &mut Writer) {
        self.0.write(writer);
    }
}

impl Visible for LoraRequest {
    fn part(&self) -> Part<'_> {
        self.0.part()
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        LoraFields::from_source(source).and_then(Self::new)
    }
}
