//! How a request wants its tokens chosen, and when it ends.
//!
//! On the wire this is the only map that leaves keys out. Python decides by identity with the
//! default, so a peer may also send defaults; here the canonical form leaves out equal values, and
//! always writes the four keys that Python fills in.

use std::collections::BTreeSet;

use super::codec::{
    DecodeResult, Map, NullableList, Part, Reader, Source, Untyped, Visible, Wire, Writer,
};
use super::profile::Profile;
use super::structured_outputs::StructuredOutputsParams;
use super::tensor::NumpyArray;

wire_enum! {
    /// When output of a request is wanted.
    #[derive(Default)]
    pub enum RequestOutputKind {
        /// Everything so far, each time.
        #[default]
        Cumulative = 0,
        /// What is new, each time.
        Delta = 1,
        /// Everything, at the end.
        FinalOnly = 2,
    }
}

/// Stop strings. A peer may send one string instead of a list.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStrings(pub Vec<String>);

impl Wire for StopStrings {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        if reader.take_nil() {
            Ok(Self::default())
        } else if reader.is_str() {
            String::read(reader).map(|stop| Self(vec![stop]))
        } else {
            Vec::read(reader).map(Self)
        }
    }

    fn write(&self, writer: &mut Writer) {
        self.0.write(writer);
    }
}

wire_map! {
    /// When repeated text ends a request.
    pub struct RepetitionDetectionParams {
        /// Longest pattern looked for; 0 looks for none.
        max_pattern_size: i64 [or 0];
        /// Shortest pattern looked for.
        min_pattern_size: i64 [or 0];
        /// Repetitions that end the request.
        min_count: i64 [or 0];
    }
}

wire_sparse_map! {
    /// Sampling parameters. Engines stop by `eos_token_id`, `all_stop_token_ids` and
    /// `bad_words_token_ids`, which the front end fills in.
    pub struct SamplingParams {
        /// Outputs per prompt.
        n: i64 [or 1];
        /// Penalty of tokens that were generated.
        presence_penalty: f64 [or 0.0];
        /// Penalty per time a token was generated.
        frequency_penalty: f64 [or 0.0];
        /// Factor on tokens that were seen.
        repetition_penalty: f64 [or 1.0];
        /// 0 is greedy.
        temperature: f64 [or 1.0];
        /// Whether text is watermarked.
        watermarking: Option<bool> [or None, since V0_32];
        /// Probability mass kept.
        top_p: f64 [or 1.0];
        /// Tokens kept; 0 keeps all.
        top_k: i64 [or 0];
        /// Least probability kept, relative to the best.
        min_p: f64 [or 0.0];
        /// Seed of the request's own generator.
        seed: Option<i64> [or None];
        /// Texts that end the request.
        stop: StopStrings [or StopStrings::default()];
        /// Tokens that end the request.
        stop_token_ids: NullableList<u32> [or NullableList::default()];
        /// Whether the end-of-sequence token does not end the request.
        ignore_eos: bool [or false];
        /// Most tokens; `None` for as many as fit.
        max_tokens: Option<i64> [or Some(16)];
        /// Fewest tokens before anything ends the request.
        min_tokens: i64 [or 0];
        /// Log-probabilities per token; -1 for the whole vocabulary.
        logprobs: Option<i64> [or None];
        /// Log-probabilities per prompt token; -1 for the whole vocabulary.
        prompt_logprobs: Option<i64> [or None];
        /// Tokens whose log-probability is wanted at each prompt position.
        prompt_logprob_token_ids: Option<NumpyArray> [or None, since V0_32];
        /// First prompt position of interest.
        prompt_logprob_start: Option<i64> [or None, since V0_32];
        /// Tokens whose log-probability is wanted at each position.
        logprob_token_ids: Option<Vec<u32>> [or None];
        /// Whether log-probabilities come in one flat list.
        flat_logprobs: bool [or false];
        /// Whether tokens become text.
        detokenize: bool [or true];
        /// Whether special tokens are left out of the text.
        skip_special_tokens: bool [or true];
        /// Whether special tokens are set apart by spaces.
        spaces_between_special_tokens: bool [or true];
        /// Whether the text keeps the stop string.
        include_stop_str_in_output: bool [or false];
        /// When output is wanted.
        output_kind: RequestOutputKind [or RequestOutputKind::Cumulative];
        /// Tokens between two outputs.
        stream_interval: Option<i64> [or None, since V0_32];
        /// Whether the front end need not copy these parameters.
        skip_clone: bool [or false];
        /// Characters that the front end holds back to look for stop strings.
        output_text_buffer_length: i64 [or 0];
        /// The token that ends the request, unless `ignore_eos`.
        eos_token_id as "_eos_token_id": Option<u32> [or None];
        /// Every token that ends the request.
        all_stop_token_ids as "_all_stop_token_ids": BTreeSet<u32> [or BTreeSet::new()];
        /// Whether the front end turned watermarking off.
        watermarking_skipped as "_watermarking_skipped": bool [or false, since V0_32];
        /// Constraint on the text.
        structured_outputs: Option<StructuredOutputsParams> [or None];
        /// Added to logits, by token.
        logit_bias: Option<Map<u32, f64>> [or None];
        /// The only tokens allowed.
        allowed_token_ids: Option<Vec<u32>> [or None];
        /// Arguments of plug-ins, a map.
        extra_args: Option<Untyped> [or None];
        /// Words that must not come.
        bad_words: NullableList<String> [or NullableList::default()];
        /// Their tokens.
        bad_words_token_ids as "_bad_words_token_ids": Option<Vec<Vec<u32>>> [or None];
        /// Whether the prefix cache is not read; `None` decides by whether prompt log-probabilities
        /// are wanted.
        skip_reading_prefix_cache: Option<bool> [or None];
        /// Most tokens spent thinking.
        thinking_token_budget: Option<i64> [or None];
        /// When repeated text ends the request.
        repetition_detection: Option<RepetitionDetectionParams> [or None];
        /// First prompt position whose routed experts are wanted.
        routed_experts_prompt_start: i64 [or 0];
        /// Tokens to decode instead of sampling.
        trace_decode_token_ids: Option<Vec<u32>> [or None, since V0_32];
    }
}

const ALWAYS_WRITTEN: [&str; 4] =
    ["stop", "stop_token_ids", "bad_words", "skip_reading_prefix_cache"];
const ROUTED_EXPERTS: &str = "routed_experts_prompt_start";
/// Keys that came after `routed_experts_prompt_start` before 0.32.
const AFTER_ROUTED_EXPERTS: [&str; 5] = [
    "bad_words",
    "_bad_words_token_ids",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
    "repetition_detection",
];

impl SamplingParams {
    /// Whether the prefix cache is not read for this request.
    #[must_use]
    pub fn skips_prefix_cache(&self) -> bool {
        let wants_prompt_logprobs =
            self.prompt_logprobs.is_some() || self.prompt_logprob_token_ids.is_some();
        self.skip_reading_prefix_cache.unwrap_or(wants_prompt_logprobs)
    }

    /// The same parameters with what Python fills in: stop tokens are among all stop tokens, and
    /// the use of the prefix cache is decided.
    #[must_use]
    pub fn filled_in(mut self) -> Self {
        self.all_stop_token_ids.extend(&self.stop_token_ids.0);
        self.skip_reading_prefix_cache = Some(self.skips_prefix_cache());
        self
    }

    fn write_all(&self, writer: &mut Writer) -> u16 {
        let is_written = |key, is_default: bool| !is_default || ALWAYS_WRITTEN.contains(&key);
        if writer.profile() >= Profile::V0_32 {
            return self.write_entries(writer, is_written);
        }
        let is_after = |key| AFTER_ROUTED_EXPERTS.contains(&key);
        let before = self.write_entries(writer, |key, is_default| {
            is_written(key, is_default) && !is_after(key) && key != ROUTED_EXPERTS
        });
        let routed = self.write_entries(writer, |key, is_default| {
            is_written(key, is_default) && key == ROUTED_EXPERTS
        });
        let after = self
            .write_entries(writer, |key, is_default| is_written(key, is_default) && is_after(key));
        before + routed + after
    }
}

impl Wire for SamplingParams {
    fn read(reader: &mut Reader<'_>) -> DecodeResult<Self> {
        Self::read_entries(reader).map(Self::filled_in)
    }

    fn write(&self, writer: &mut Writer) {
        // msgspec reserves the header for all declared fields, so it never has the short form.
        let start = writer.begin_map16();
        let num_entries = if self.skip_reading_prefix_cache.is_none() {
            let skip_reading_prefix_cache = Some(self.skips_prefix_cache());
            Self { skip_reading_prefix_cache, ..self.clone() }.write_all(writer)
        } else {
            self.write_all(writer)
        };
        writer.end_map16(start, num_entries);
    }
}

impl Visible for StopStrings {
    fn part(&self) -> Part<'_> {
        self.0.part()
    }

    fn from_source<S: Source>(source: &S) -> DecodeResult<Self> {
        if source.is_nil() {
            Ok(Self::default())
        } else if source.is_text() {
            source.text().map(|stop| Self(vec![stop]))
        } else {
            Vec::from_source(source).map(Self)
        }
    }
}
