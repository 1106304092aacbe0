//! The constraint that a request puts on its text.

use super::codec::{
    DecodeProblem, DecodeResult, Part, Reader, Source, Untyped, Visible, Wire, Writer,
};

/// A JSON schema as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JsonSchema {
    /// Its text.
    Text(String),
    /// A map.
    Object(Untyped),
}

impl Wire for JsonSchema {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.is_str() {
            String::read(reader).map(Self::Text)
        } else if reader.is_map() {
            Untyped::read(reader).map(Self::Object)
        } else {
            Err(reader.unexpected("a str or a map"))
        }
    }

    fn write(&self, writer: &mut Writer) {
        match self {
            Self::Text(text) => text.write(writer),
            Self::Object(object) => object.write(writer),
        }
    }
}

wire_map! {
    /// Fields of [`StructuredOutputsParams`] before it is checked that exactly one constraint is set.
    pub struct StructuredOutputsFields {
        /// Text is JSON of this schema.
        json: Option<JsonSchema> [or None];
        /// Text matches this expression.
        regex: Option<String> [or None];
        /// Text is one of these.
        choice: Option<Vec<String>> [or None];
        /// Text is derived from this grammar.
        grammar: Option<String> [or None];
        /// Text is any JSON object.
        json_object: Option<bool> [or None];
        /// No whitespace between JSON tokens.
        disable_any_whitespace: bool [or false];
        /// No properties that the schema does not name.
        disable_additional_properties: bool [or false];
        /// Whitespace between JSON tokens matches this expression.
        whitespace_pattern: Option<String> [or None];
        /// Constraints between tags, as JSON text.
        structural_tag: Option<String> [or None];
        /// The library that applies the constraint: `xgrammar`, `guidance`, `outlines` or
        /// `lm-format-enforcer`.
        backend as "_backend": Option<String> [or None];
        /// Whether the front end chose it.
        backend_was_auto as "_backend_was_auto": bool [or false];
    }
}

/// The constraint of a [`StructuredOutputsParams`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Constraint<'a> {
    /// JSON of a schema.
    Json(&'a JsonSchema),
    /// A regular expression.
    Regex(&'a str),
    /// One of some texts.
    Choice(&'a [String]),
    /// A grammar.
    Grammar(&'a str),
    /// Any JSON object.
    JsonObject(bool),
    /// Constraints between tags.
    StructuralTag(&'a str),
}

/// A constraint and how it is applied. Exactly one constraint is set.
#[derive(Debug, Clone, PartialEq)]
pub struct StructuredOutputsParams(StructuredOutputsFields);

impl StructuredOutputsParams {
    /// Checks that exactly one constraint is set.
    ///
    /// # Errors
    ///
    /// [`DecodeProblem::Invalid`] if none or several are.
    pub fn new(fields: StructuredOutputsFields) -> DecodeResult<Self> {
        match fields.constraints().flatten().count() {
            1 => Ok(Self(fields)),
            0 => Err(DecodeProblem::Invalid { rule: "no constraint is set, one is needed" }.into()),
            _ => {
                let rule = "several constraints are set, exactly one is allowed";
                Err(DecodeProblem::Invalid { rule }.into())
            }
        }
    }

    /// The fields.
    #[must_use]
    pub fn fields(&self) -> &StructuredOutputsFields {
        &self.0
    }

    /// The constraint.
    #[must_use]
    pub fn constraint(&self) -> Constraint<'_> {
        self.0.constraints().flatten().next().unwrap_or(Constraint::JsonObject(false))
    }
}

impl StructuredOutputsFields {
    fn constraints(&self) -> impl Iterator<Item = Option<Constraint<'_>>> {
        [
            self.json.as_ref().map(Constraint::Json),
            self.regex.as_deref().map(Constraint::Regex),
            self.choice.as_deref().map(Constraint::Choice),
            self.grammar.as_deref().map(Constraint::Grammar),
            self.json_object.map(Constraint::JsonObject),
            self.structural_tag.as_deref().map(Constraint::StructuralTag),
        ]
        .into_iter()
    }
}

impl Wire for StructuredOutputsParams {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        StructuredOutputsFields::read(reader).and_then(Self::new)
    }

    fn write(&self, writer: &mut Writer) {
        self.0.write(writer);
    }
}

impl Visible for JsonSchema {
    fn part(&self) -> Part<'_> {
        match self {
            Self::Text(text) => text.part(),
            Self::Object(object) => object.part(),
        }
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_text() {
            source.text().map(Self::Text)
        } else if source.is_map() {
            source.untyped().map(Self::Object)
        } else {
            Err(source.is_not("a str or a map"))
        }
    }
}

impl Visible for StructuredOutputsParams {
    fn part(&self) -> Part<'_> {
        self.0.part()
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        StructuredOutputsFields::from_source(source).and_then(Self::new)
    }
}
