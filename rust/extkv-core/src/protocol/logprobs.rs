//! Log-probabilities of sampled tokens (numpy) and of prompt tokens (torch).

use bytes::Bytes;

use super::codec::{DecodeResult, Reader, Wire, Writer};
use super::tensor::{ArraySpan, NumpyArray, NumpyDtype, TorchTensor};

wire_array! {
    /// Log-probabilities at sampled positions. Arrays have the shape `[positions, k + 1]`; column 0 is
    /// the sampled token. Values can be -inf and NaN.
    pub struct LogprobsLists {
        /// Token ids, int32 or int64.
        logprob_token_ids: NumpyArray [required];
        /// Their log-probabilities, float32.
        logprobs: NumpyArray [required];
        /// Rank of each sampled token, shape `[positions]`, int32 or int64.
        sampled_token_ranks: NumpyArray [required];
        /// Running count of tokens per request of the batch.
        cu_num_generated_tokens: Option<Vec<i64>> [or None];
    }
}

wire_array! {
    /// Log-probabilities at prompt positions. Shapes as in [`LogprobsLists`].
    pub struct LogprobsTensors {
        /// Token ids.
        logprob_token_ids: TorchTensor [required];
        /// Their log-probabilities.
        logprobs: TorchTensor [required];
        /// Rank of each prompt token.
        selected_token_ranks: TorchTensor [required];
        /// Running count of tokens per request of the batch.
        cu_num_generated_tokens: Option<Vec<i64>> [or None];
        /// The same as a tensor.
        cu_num_generated_tokens_tensor: Option<TorchTensor> [or None, since V0_32];
    }
}

wire_array! {
    /// Which tokens could be sampled.
    pub struct SamplingMaskLists {
        /// Token ids, one position after the other.
        token_ids: NumpyArray [required];
        /// Where each position begins.
        offsets: Option<NumpyArray> [or None];
        /// Running count of tokens per request of the batch.
        cu_num_generated_tokens: Option<Vec<i64>> [or None];
    }
}

/// [`LogprobsLists`] by where its arrays lie in the message's frames.
#[derive(Debug, Clone, PartialEq)]
pub struct LogprobsSpans {
    /// Token ids.
    pub token_ids: ArraySpan<NumpyDtype>,
    /// Log-probabilities.
    pub logprobs: ArraySpan<NumpyDtype>,
    /// Ranks.
    pub ranks: ArraySpan<NumpyDtype>,
}

impl LogprobsSpans {
    /// Reads the arrays, and whether running counts come with them.
    pub(crate) fn read(reader: &mut Reader<'_>) -> DecodeResult<(Self, bool)> {
        let mut elements = reader.elements("an array, LogprobsLists")?;
        let token_ids = reader.field(&mut elements, "logprob_token_ids", ArraySpan::read)?;
        let logprobs = reader.field(&mut elements, "logprobs", ArraySpan::read)?;
        let ranks = reader.field(&mut elements, "sampled_token_ranks", ArraySpan::read)?;
        let has_counts = elements.take() && !reader.take_nil();
        if has_counts {
            Vec::<i64>::read(reader).map_err(|error| error.in_field("cu_num_generated_tokens"))?;
        }
        reader.skip_extra(&elements)?;
        Ok((Self { token_ids, logprobs, ranks }, has_counts))
    }

    /// Writes the arrays as [`LogprobsLists`] without running counts.
    pub(crate) fn write(&self, writer: &mut Writer, frames: &[Bytes]) {
        writer.array_len(4);
        self.token_ids.write(writer, frames);
        self.logprobs.write(writer, frames);
        self.ranks.write(writer, frames);
        writer.nil();
    }
}
