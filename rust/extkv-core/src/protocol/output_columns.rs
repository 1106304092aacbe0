//! A batch of outputs as columns: arrays at once, everything else when it is asked for.
//!
//! Decoding checks every field of every output, and keeps tokens, finish reasons, and where request
//! ids, arrays and whole outputs lie in the frames. [`OutputColumns::output`] reads one output out
//! again.

mod stack;

use std::collections::BTreeSet;

use bytes::Bytes;

use super::codec::{
    DecodeProblem, DecodeResult, Elements, Part, Reader, Source, Visible, Wire, Writer,
};
use super::logprobs::LogprobsSpans;
use super::output::{EngineCoreOutput, EngineCoreOutputs, FinishReason, OutputsKind, wire_outputs};
use super::output_rows::PlainTail;
use super::profile::Profile;
use super::stats::SchedulerStats;
use super::tensor::{ArraySpan, NumpyArray, NumpyDtype};
use super::utility::UtilityOutput;

pub use stack::StackError;

use stack::stack_spans;

/// Outputs by column.
#[derive(Debug, Clone, Default)]
pub struct OutputColumns {
    frames: Vec<Bytes>,
    profile: Profile,
    /// Where each output begins in the first frame.
    starts: Vec<u32>,
    /// Where each request id lies in the first frame.
    id_spans: Vec<(u32, u32)>,
    token_ids: Vec<i32>,
    token_ends: Vec<u32>,
    finish_reasons: Vec<Option<FinishReason>>,
    logprobs: Vec<(u32, LogprobsSpans)>,
    detailed: Vec<u32>,
}

wire_outputs! {
    /// One message of an engine, its outputs as columns.
    pub struct ColumnarOutputs of OutputColumns;
}

impl ColumnarOutputs {
    /// The same message with its outputs one by one.
    ///
    /// # Errors
    ///
    /// None for columns that were decoded; [`super::DecodeError`] is what reading an output returns.
    pub fn to_rows(&self) -> DecodeResult<EngineCoreOutputs> {
        let outputs = (0..self.outputs.len()).filter_map(|index| self.outputs.output(index));
        Ok(EngineCoreOutputs {
            engine_index: self.engine_index,
            outputs: outputs.collect::<DecodeResult<_>>()?,
            scheduler_stats: self.scheduler_stats.clone(),
            timestamp: self.timestamp,
            utility_output: self.utility_output.clone(),
            finished_requests: self.finished_requests.clone(),
            wave_complete: self.wave_complete,
            start_wave: self.start_wave,
            weight_version: self.weight_version.clone(),
        })
    }
}

impl OutputColumns {
    /// Number of outputs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.starts.len()
    }

    /// Whether there is no output.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.starts.is_empty()
    }

    /// New tokens of all outputs, one output after the other.
    #[must_use]
    pub fn token_ids(&self) -> &[i32] {
        &self.token_ids
    }

    /// Where each output's tokens end in [`Self::token_ids`].
    #[must_use]
    pub fn token_ends(&self) -> &[u32] {
        &self.token_ends
    }

    /// Where each output's tokens begin, and the end of the last.
    pub fn token_offsets(&self) -> impl ExactSizeIterator<Item = u32> {
        let num_offsets = self.token_ends.len() + 1;
        (0..num_offsets).map(|index| match index.checked_sub(1) {
            Some(before) => self.token_ends.get(before).copied().unwrap_or(0),
            None => 0,
        })
    }

    /// The new tokens of one output; none past the last output.
    #[must_use]
    pub fn tokens_of(&self, index: usize) -> &[i32] {
        let end = self.token_ends.get(index).map_or(0, |end| *end as usize);
        let before = index.checked_sub(1).and_then(|before| self.token_ends.get(before));
        let start = before.map_or(0, |start| *start as usize);
        self.token_ids.get(start..end).unwrap_or_default()
    }

    /// Whether an output holds nothing but tokens and a finish reason.
    #[must_use]
    pub fn is_plain(&self, index: usize) -> bool {
        let Ok(index) = u32::try_from(index) else { return false };
        self.detailed.binary_search(&index).is_err()
            && self.logprobs.binary_search_by_key(&index, |(owner, _)| *owner).is_err()
    }

    /// Copies one array of all log-probabilities into one, row after row.
    ///
    /// # Errors
    ///
    /// [`StackError::Differ`] if the arrays differ in more than their first dimension.
    pub fn stack(
        &self,
        array: impl Fn(&LogprobsSpans) -> &ArraySpan<NumpyDtype>,
    ) -> Result<NumpyArray, StackError> {
        let spans = self.logprobs.iter().map(|(index, spans)| (*index, array(spans)));
        stack_spans(spans, &self.frames)
    }

    /// Why each request ended, if it did.
    #[must_use]
    pub fn finish_reasons(&self) -> &[Option<FinishReason>] {
        &self.finish_reasons
    }

    /// The request of each output.
    pub fn request_ids(&self) -> impl ExactSizeIterator<Item = &str> {
        self.id_spans.iter().map(|span| self.text(*span))
    }

    /// The request of one output.
    #[must_use]
    pub fn request_id(&self, index: usize) -> Option<&str> {
        self.id_spans.get(index).map(|span| self.text(*span))
    }

    /// The request of one output as UTF-8, for those that check it themselves.
    #[must_use]
    pub fn request_id_bytes(&self, index: usize) -> Option<&[u8]> {
        self.id_spans.get(index).and_then(|span| self.bytes(*span))
    }

    /// Outputs with log-probabilities, rising by index.
    #[must_use]
    pub fn logprobs(&self) -> &[(u32, LogprobsSpans)] {
        &self.logprobs
    }

    /// Indices of outputs that hold more than tokens, log-probabilities and a finish reason.
    #[must_use]
    pub fn detailed(&self) -> &[u32] {
        &self.detailed
    }

    /// The frames that the spans refer to.
    #[must_use]
    pub fn frames(&self) -> &[Bytes] {
        &self.frames
    }

    /// Reads one output; `None` past the last one.
    ///
    /// # Errors
    ///
    /// None for columns that were decoded, since they were checked.
    #[must_use]
    pub fn output(&self, index: usize) -> Option<DecodeResult<EngineCoreOutput>> {
        let start = *self.starts.get(index)? as usize;
        let read = Reader::at(&self.frames, self.profile, start)
            .and_then(|mut reader| EngineCoreOutput::read(&mut reader));
        Some(read)
    }

    fn bytes(&self, (start, end): (u32, u32)) -> Option<&[u8]> {
        self.frames.first().and_then(|frame| frame.get(start as usize..end as usize))
    }

    fn text(&self, span: (u32, u32)) -> &str {
        self.bytes(span).and_then(|bytes| std::str::from_utf8(bytes).ok()).unwrap_or_default()
    }

    fn read_output(&mut self, reader: &mut Reader<'_>) -> DecodeResult<()> {
        let start = reader.mark();
        let index = position_of(self.starts.len())?;
        self.starts.push(position(reader)?);
        let mut elements = reader.elements("an array, EngineCoreOutput")?;
        reader.field(&mut elements, "request_id", |reader| self.read_request_id(reader))?;
        reader.field(&mut elements, "new_token_ids", |reader| self.read_token_ids(reader))?;
        let mut is_plain = true;
        if elements.take() && !reader.take_nil() {
            let (spans, has_counts) =
                LogprobsSpans::read(reader).map_err(|error| error.in_field("new_logprobs"))?;
            self.logprobs.push((index, spans));
            is_plain = !has_counts;
        }
        let tail = if is_plain { self.read_plain_tail(reader, &mut elements) } else { None };
        if let Some(reason) = tail {
            self.finish_reasons.push(reason);
            return reader.skip_extra(&elements);
        }
        reader.rewind(start);
        let output = EngineCoreOutput::read(reader)?;
        self.finish_reasons.push(output.finish_reason);
        self.detailed.push(index);
        Ok(())
    }

    fn read_request_id(&mut self, reader: &mut Reader<'_>) -> DecodeResult<()> {
        let len = reader.str()?.len();
        let end = position(reader)?;
        self.id_spans.push((end.saturating_sub(u32::try_from(len).unwrap_or(end)), end));
        Ok(())
    }

    fn read_token_ids(&mut self, reader: &mut Reader<'_>) -> DecodeResult<()> {
        for index in 0..reader.array_len("an array of token ids")? {
            let id = read_token_id(reader).map_err(|error| error.at_index(index))?;
            self.token_ids.push(id);
        }
        self.token_ends.push(u32::try_from(self.token_ids.len()).unwrap_or(u32::MAX));
        Ok(())
    }

    /// Takes the fields after the log-probabilities if they are one byte each: nil, a finish reason,
    /// no NaN values. Takes nothing and returns `None` if the output holds more.
    fn read_plain_tail(
        &self,
        reader: &mut Reader<'_>,
        elements: &mut Elements,
    ) -> Option<Option<FinishReason>> {
        let num_known = EngineCoreOutput::num_elements(self.profile).min(elements.len());
        let num_nans_at = num_nans_field(self.profile);
        let tail = reader.peek_bytes(num_known.saturating_sub(FIRST_TAIL_FIELD))?;
        let mut reason = None;
        for (field, byte) in (FIRST_TAIL_FIELD..).zip(tail) {
            match byte {
                0xc0 if field != num_nans_at => {}
                0 if field == num_nans_at => {}
                number if field == FINISH_REASON_FIELD => {
                    reason = Some(FinishReason::from_number(*number)?);
                }
                _ => return None,
            }
        }
        elements.take_many(tail.len());
        reader.advance(tail.len());
        Some(reason)
    }

    fn write_detailed(&self, writer: &mut Writer, index: usize) {
        match self.output(index) {
            Some(Ok(output)) => output.write(writer),
            _ => writer.nil(),
        }
    }

    fn reserve(&mut self, num_outputs: usize) {
        self.starts.reserve(num_outputs);
        self.id_spans.reserve(num_outputs);
        self.token_ids.reserve(num_outputs);
        self.token_ends.reserve(num_outputs);
        self.finish_reasons.reserve(num_outputs);
    }
}

/// Position of the number of NaN values.
pub(crate) fn num_nans_field(profile: Profile) -> usize {
    if profile >= Profile::V0_26 { 13 } else { 12 }
}

/// The field after the log-probabilities.
const FIRST_TAIL_FIELD: usize = 3;
pub(crate) const FINISH_REASON_FIELD: usize = 5;

fn position(reader: &Reader<'_>) -> DecodeResult<u32> {
    position_of(reader.position())
}

fn position_of(position: usize) -> DecodeResult<u32> {
    u32::try_from(position).map_err(|_| {
        let found = position as i128;
        DecodeProblem::OutOfRange { expected: "a frame of less than 4 GiB", found }.into()
    })
}

fn read_token_id(reader: &mut Reader<'_>) -> DecodeResult<i32> {
    let id = reader.u32()?;
    i32::try_from(id).map_err(|_| {
        let found = i128::from(id);
        DecodeProblem::OutOfRange { expected: "an int in [0, 2**31)", found }.into()
    })
}

impl PartialEq for OutputColumns {
    /// Whether both hold the same outputs, wherever they lie.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len()
            && (0..self.len()).all(|index| self.output(index) == other.output(index))
    }
}

impl Visible for OutputColumns {
    /// The request ids; outputs are read one by one.
    fn part(&self) -> Part<'_> {
        Part::List(self.request_ids().map(Part::Text).collect())
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        source.native().ok_or_else(|| source.is_not("decoded outputs"))
    }
}

impl Wire for OutputColumns {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        let len = reader.array_len("an array of outputs")?;
        let mut columns =
            Self { frames: reader.frames().to_vec(), profile: reader.profile(), ..Self::default() };
        columns.reserve(len.min(reader.left() / 16 + 1));
        for index in 0..len {
            columns.read_output(reader).map_err(|error| error.at_index(index))?;
        }
        Ok(columns)
    }

    fn write(&self, writer: &mut Writer) {
        let tail = PlainTail::of(writer.profile());
        let mut detailed = self.detailed.iter().copied().peekable();
        let mut logprobs = self.logprobs.iter().peekable();
        let mut first_token = 0;
        writer.array_len(self.len());
        writer.reserve(self.len() * 32);
        for (index, end) in (0_u32..).zip(self.token_ends.iter().map(|end| *end as usize)) {
            let spans = logprobs.next_if(|(owner, _)| *owner == index).map(|(_, spans)| spans);
            if detailed.next_if_eq(&index).is_some() {
                self.write_detailed(writer, index as usize);
            } else {
                writer.array_len(tail.num_elements);
                writer.str(self.request_id(index as usize).unwrap_or_default());
                let tokens = self.token_ids.get(first_token..end).unwrap_or_default();
                writer.array_len(tokens.len());
                tokens.iter().for_each(|id| writer.u32(id.unsigned_abs()));
                match spans {
                    Some(spans) => spans.write(writer, &self.frames),
                    None => writer.nil(),
                }
                let reason = self.finish_reasons.get(index as usize).copied().flatten();
                tail.write(writer, reason);
            }
            first_token = end;
        }
    }
}
