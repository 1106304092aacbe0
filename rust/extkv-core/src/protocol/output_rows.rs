//! A batch of outputs written from columns, without an object per request.

use std::ops::Range;

use bytes::Bytes;
use smallvec::SmallVec;
use thiserror::Error as ThisError;

use super::codec::{EncodeError, Wire, Writer};
use super::output::{EngineCoreOutput, EngineCoreOutputs, FinishReason};
use super::output_columns::{FINISH_REASON_FIELD, num_nans_field};
use super::profile::Profile;
use super::tensor::{NumpyArray, NumpyDtype, write_array};

/// Log-probabilities of a batch, rows of one array each. Outputs take them in order, one row per
/// token.
#[derive(Debug, Clone, PartialEq)]
pub struct LogprobsRows {
    num_columns: usize,
    num_rows: usize,
    token_ids: Rows,
    logprobs: Rows,
    ranks: Rows,
}

/// Rows of equal size in one buffer.
#[derive(Debug, Clone, PartialEq)]
struct Rows {
    dtype: NumpyDtype,
    row_bytes: usize,
    data: Bytes,
}

impl Rows {
    fn of(array: &NumpyArray, num_rows: usize) -> Self {
        let data = array.data().clone();
        let row_bytes = data.len().checked_div(num_rows).unwrap_or(0);
        Self { dtype: array.dtype(), row_bytes, data }
    }

    fn write(&self, writer: &mut Writer, rows: Range<usize>, shape: &[u64]) {
        let bytes = rows.start * self.row_bytes..rows.end * self.row_bytes;
        write_array(writer, self.dtype, shape, self.data.slice(bytes));
    }
}

/// Outputs by column, to be written.
#[derive(Debug, Clone, PartialEq)]
pub struct OutputRows<S> {
    request_ids: Vec<S>,
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
    /// An array of log-probabilities whose shape does not fit the others.
    #[error("{array} of shape {found:?}: [tokens, k + 1] expected, and [tokens] of ranks")]
    WrongShape {
        /// The array.
        array: &'static str,
        /// Its shape.
        found: Vec<u64>,
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

impl<S: AsRef<str>> OutputRows<S> {
    /// Puts columns together: per output a request id, the end of its tokens and a finish reason.
    ///
    /// # Errors
    ///
    /// [`RowsError::WrongLength`] if a column does not fit the others, [`RowsError::WrongEnds`] if
    /// the ends do not rise to the number of tokens.
    pub fn new(
        request_ids: Vec<S>,
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
            check_len("logprobs", rows.num_rows, num_tokens)?;
        }
        Ok(Self { request_ids, token_ids, token_ends, finish_reasons, logprobs })
    }
}

impl LogprobsRows {
    /// Puts together token ids and log-probabilities of the shape `[tokens, k + 1]`, and ranks of the
    /// shape `[tokens]`.
    ///
    /// # Errors
    ///
    /// [`RowsError::WrongShape`] if the shapes are others.
    pub fn new(
        token_ids: &NumpyArray,
        logprobs: &NumpyArray,
        ranks: &NumpyArray,
    ) -> Result<Self, RowsError> {
        let &[rows, columns] = token_ids.shape() else {
            return Err(wrong_shape("logprob_token_ids", token_ids));
        };
        if logprobs.shape() != [rows, columns] {
            return Err(wrong_shape("logprobs", logprobs));
        }
        if ranks.shape() != [rows] {
            return Err(wrong_shape("sampled_token_ranks", ranks));
        }
        let too_many = |_| wrong_shape("logprob_token_ids", token_ids);
        let num_rows = usize::try_from(rows).map_err(too_many)?;
        Ok(Self {
            num_columns: usize::try_from(columns).map_err(too_many)?,
            num_rows,
            token_ids: Rows::of(token_ids, num_rows),
            logprobs: Rows::of(logprobs, num_rows),
            ranks: Rows::of(ranks, num_rows),
        })
    }

    fn write(&self, writer: &mut Writer, rows: Range<usize>) {
        let (num_rows, num_columns) = (rows.len() as u64, self.num_columns as u64);
        writer.array_len(4);
        self.token_ids.write(writer, rows.clone(), &[num_rows, num_columns]);
        self.logprobs.write(writer, rows.clone(), &[num_rows, num_columns]);
        self.ranks.write(writer, rows, &[num_rows]);
        writer.nil();
    }
}

fn wrong_shape(array: &'static str, found: &NumpyArray) -> RowsError {
    RowsError::WrongShape { array, found: found.shape().to_vec() }
}

impl<S: AsRef<str>> OutputRows<S> {
    /// Encodes a message whose outputs are these columns: the first frame, and the others.
    /// `envelope` has all other fields; outputs of its own are not written.
    ///
    /// # Errors
    ///
    /// As [`super::encode`].
    pub fn encode(
        &self,
        envelope: &EngineCoreOutputs,
        profile: Profile,
    ) -> Result<(Vec<u8>, Vec<Bytes>), EncodeError> {
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
            writer.str(request_id.as_ref());
            let tokens = self.token_ids.get(start..*end).unwrap_or_default();
            writer.array_len(tokens.len());
            tokens.iter().for_each(|id| writer.u32(*id));
            match &self.logprobs {
                Some(rows) if start < *end => rows.write(writer, start..*end),
                _ => writer.nil(),
            }
            tail.write(writer, *reason);
            start = *end;
        }
    }
}

/// What follows the log-probabilities of an output with nothing else.
#[derive(Debug)]
pub(crate) struct PlainTail {
    pub(crate) num_elements: usize,
    after_reason: SmallVec<[u8; 16]>,
}

impl PlainTail {
    pub(crate) fn of(profile: Profile) -> Self {
        let num_elements = EngineCoreOutput::num_elements(profile);
        let first = FINISH_REASON_FIELD + 1;
        let mut after_reason = SmallVec::from_elem(0xc0, num_elements.saturating_sub(first));
        if let Some(num_nans) = after_reason.get_mut(num_nans_field(profile) - first) {
            *num_nans = 0;
        }
        Self { num_elements, after_reason }
    }

    pub(crate) fn write(&self, writer: &mut Writer, reason: Option<FinishReason>) {
        writer.raw(&[0xc0, 0xc0]);
        reason.write(writer);
        writer.raw(&self.after_reason);
    }
}
