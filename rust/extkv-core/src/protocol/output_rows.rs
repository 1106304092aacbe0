//! A batch of outputs written from columns, without an object per request.

use bytes::Bytes;
use thiserror::Error as ThisError;

use super::codec::{EncodeError, Wire, Writer};
use super::output::{EngineCoreOutput, EngineCoreOutputs, FinishReason};
use super::profile::Profile;
use super::tensor::{NumpyDtype, WireDtype, write_array};

/// Log-probabilities of a batch, rows of one array each. Outputs take them in order, one row per
/// token.
#[derive(Debug, Clone, PartialEq)]
pub struct LogprobsRows {
    /// Columns of the first two arrays: k + 1.
    pub num_columns: usize,
    /// Token ids, [tokens, k + 1] in C order.
    pub token_ids: Bytes,
    /// Their element type.
    pub token_ids_dtype: NumpyDtype,
    /// Log-probabilities, float32 [tokens, k + 1].
    pub logprobs: Bytes,
    /// Ranks, [tokens].
    pub ranks: Bytes,
    /// Their element type.
    pub ranks_dtype: NumpyDtype,
}

/// Outputs by column, to be written.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct OutputRows {
    request_ids: Vec<String>,
    token_ids: Vec<u32>,
    token_ends: Vec<usize>,
    finish_reasons: Vec<Option<FinishReason>>,
    logprobs: Option<LogprobsRows>,
}

/// Columns that do not fit together.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum RowsError {
    /// A column of another length.
    #[error("{column} has {found} entries, {expected} expected")]
    WrongLength {
        /// The column.
        column: &'static str,
        /// Its length.
        found: usize,
        /// The length that fits the others.
        expected: usize,
    },
    /// Ends that fall, or pass the last token.
    #[error("token_ends must rise to {num_tokens}, found {found} at {index}")]
    WrongEnds {
        /// Tokens in all.
        num_tokens: usize,
        /// The end that does not fit.
        found: usize,
        /// Its index.
        index: usize,
    },
}

fn check_len(column: &'static str, found: usize, expected: usize) -> Result<(), RowsError> {
    if found == expected {
        return Ok(());
    }
    Err(RowsError::WrongLength { column, found, expected })
}

impl OutputRows {
    /// Puts columns together: per output a request id, the end of its tokens and a finish reason.
    ///
    /// # Errors
    ///
    /// [`RowsError::WrongLength`] if a column does not fit the others, [`RowsError::WrongEnds`] if
    /// the ends do not rise to the number of tokens.
    pub fn new(
        request_ids: Vec<String>,
        token_ids: Vec<u32>,
        token_ends: Vec<usize>,
        finish_reasons: Vec<Option<FinishReason>>,
        logprobs: Option<LogprobsRows>,
    ) -> Result<Self, RowsError> {
        check_len("token_ends", token_ends.len(), request_ids.len())?;
        check_len("finish_reasons", finish_reasons.len(), request_ids.len())?;
        let num_tokens = token_ids.len();
        let mut last = 0;
        for (index, end) in token_ends.iter().copied().enumerate() {
            if end < last || end > num_tokens {
                return Err(RowsError::WrongEnds { num_tokens, found: end, index });
            }
            last = end;
        }
        check_len("token_ids", num_tokens, last)?;
        if let Some(rows) = &logprobs {
            rows.check(num_tokens)?;
        }
        Ok(Self { request_ids, token_ids, token_ends, finish_reasons, logprobs })
    }
}

impl LogprobsRows {
    fn check(&self, num_tokens: usize) -> Result<(), RowsError> {
        let num_values = num_tokens.saturating_mul(self.num_columns);
        let bytes_of = |dtype: NumpyDtype, count: usize| {
            count.saturating_mul(usize::try_from(dtype.size_bytes()).unwrap_or(usize::MAX))
        };
        let ids_bytes = bytes_of(self.token_ids_dtype, num_values);
        check_len("logprob_token_ids (bytes)", self.token_ids.len(), ids_bytes)?;
        let logprobs_bytes = bytes_of(NumpyDtype::FLOAT32, num_values);
        check_len("logprobs (bytes)", self.logprobs.len(), logprobs_bytes)?;
        let ranks_bytes = bytes_of(self.ranks_dtype, num_tokens);
        check_len("sampled_token_ranks (bytes)", self.ranks.len(), ranks_bytes)
    }

    fn write(&self, writer: &mut Writer, start: usize, end: usize) {
        let (rows, columns) = ((end - start) as u64, self.num_columns as u64);
        writer.array_len(4);
        let ids = rows_of(&self.token_ids, self.token_ids_dtype, self.num_columns, start, end);
        write_array(writer, self.token_ids_dtype, &[rows, columns], ids);
        let logprobs = rows_of(&self.logprobs, NumpyDtype::FLOAT32, self.num_columns, start, end);
        write_array(writer, NumpyDtype::FLOAT32, &[rows, columns], logprobs);
        let ranks = rows_of(&self.ranks, self.ranks_dtype, 1, start, end);
        write_array(writer, self.ranks_dtype, &[rows], ranks);
        writer.nil();
    }
}

/// Whole rows of an array that was checked to have them.
fn rows_of(data: &Bytes, dtype: NumpyDtype, columns: usize, start: usize, end: usize) -> Bytes {
    let row_bytes = columns * usize::try_from(dtype.size_bytes()).unwrap_or(0);
    data.slice(start * row_bytes..end * row_bytes)
}

impl OutputRows {
    /// Encodes a message whose outputs are these columns. `envelope` has all other fields; outputs of
    /// its own are not written.
    ///
    /// # Errors
    ///
    /// As [`super::encode`].
    pub fn encode(
        &self,
        envelope: &EngineCoreOutputs,
        profile: Profile,
    ) -> Result<Vec<Bytes>, EncodeError> {
        let mut writer = Writer::new(profile);
        writer.array_len(EngineCoreOutputs::num_elements(profile));
        envelope.engine_index.write(&mut writer);
        self.write(&mut writer);
        envelope.scheduler_stats.write(&mut writer);
        envelope.timestamp.write(&mut writer);
        envelope.utility_output.write(&mut writer);
        envelope.finished_requests.write(&mut writer);
        envelope.wave_complete.write(&mut writer);
        envelope.start_wave.write(&mut writer);
        if profile >= Profile::V0_32 {
            envelope.weight_version.write(&mut writer);
        }
        writer.finish()
    }

    fn write(&self, writer: &mut Writer) {
        let tail = PlainTail::of(writer.profile());
        writer.reserve(self.request_ids.len() * 32 + self.token_ids.len() * 3);
        writer.array_len(self.request_ids.len());
        let mut start = 0;
        let ends = self.token_ends.iter().zip(&self.finish_reasons);
        for (request_id, (end, reason)) in self.request_ids.iter().zip(ends) {
            writer.array_len(tail.num_elements);
            writer.str(request_id);
            let tokens = self.token_ids.get(start..*end).unwrap_or_default();
            writer.array_len(tokens.len());
            tokens.iter().for_each(|id| writer.u32(*id));
            match &self.logprobs {
                Some(rows) if start < *end => rows.write(writer, start, *end),
                _ => writer.nil(),
            }
            writer.raw(&[0xc0, 0xc0]);
            reason.write(writer);
            writer.raw(&tail.bytes);
            start = *end;
        }
    }
}

/// What follows the finish reason of an output with nothing else.
struct PlainTail {
    num_elements: usize,
    bytes: Vec<u8>,
}

impl PlainTail {
    fn of(profile: Profile) -> Self {
        let num_elements = EngineCoreOutput::num_elements(profile);
        let mut bytes = vec![0xc0; num_elements.saturating_sub(6)];
        let num_nans_at = if profile >= Profile::V0_26 { 13 } else { 12 };
        if let Some(num_nans) = bytes.get_mut(num_nans_at - 6) {
            *num_nans = 0;
        }
        Self { num_elements, bytes }
    }
}
