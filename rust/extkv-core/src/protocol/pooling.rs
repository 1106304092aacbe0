//! Parameters of requests that want an embedding, a class or a score instead of text.

use super::codec::Untyped;
use super::sampling::RequestOutputKind;

wire_array! {
    /// How late-interaction scores share a query.
    pub struct LateInteractionParams {
        /// Which part of the exchange this is.
        mode: String [required];
        /// Name of the query.
        query_key: String [required];
        /// How often the query will be used.
        query_uses: Option<i64> [or None];
    }
}

wire_array! {
    /// Mean pooling over chunks of tokens.
    pub struct LateChunkingParams {
        /// Tokens of a chunk.
        chunk_size: i64 [required];
    }
}

wire_array! {
    /// Parameters of a pooling request.
    pub struct PoolingParams {
        /// Whether the head's activation is applied; `None` leaves it to the model.
        use_activation: Option<bool> [or None];
        /// Dimensions to keep of an embedding.
        dimensions: Option<i64> [or None];
        /// Token whose step rewards are returned.
        step_tag_id: Option<i64> [or None];
        /// Tokens whose scores are returned.
        returned_token_ids: Option<Vec<u32>> [or None];
        /// `embed`, `classify`, `token_embed`, `token_classify`, `plugin` or another.
        task: Option<String> [or None];
        /// Whether the pooler reads the prompt's token ids.
        requires_token_ids: bool [or false];
        /// Whether the prefix cache is not read; `None` leaves it to the task.
        skip_reading_prefix_cache: Option<bool> [or None];
        /// Late interaction.
        late_interaction_params: Option<LateInteractionParams> [or None];
        /// Further arguments of the pooler, a map.
        extra_kwargs: Option<Untyped> [or None];
        /// When output is wanted.
        output_kind: RequestOutputKind [or RequestOutputKind::FinalOnly];
        /// Late chunking.
        late_chunking_params: Option<LateChunkingParams> [or None, since V0_33];
    }
}
