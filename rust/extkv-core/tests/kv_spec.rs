//! Specs: bytes per block, blocks per request, recurrent state, and every refusal.
#![allow(clippy::unwrap_used, reason = "a test may fail by panicking")]

use extkv_core::dtype::Dtype::{self, BFloat16, Float16, Float32, UInt8};
use extkv_core::kv::{
    AttentionSpec, KvSpec, LayoutError, MambaSpec, MlaFormat, MlaSpec, RequestShape, StateBlock,
    StateSpec, StateTensor,
};
use extkv_core::units::Bytes;
use proptest::prelude::*;

fn conv(dtype: Dtype) -> StateSpec {
    StateSpec::new("conv", [8192, 3], dtype).unwrap().widened_along(1).unwrap()
}

fn ssm() -> StateSpec {
    StateSpec::new("ssm", [128, 64, 128], Float32).unwrap()
}

fn state(name: &str, offset_bytes: u64, shape: &[u64], dtype: Dtype) -> StateTensor {
    StateTensor { name: name.to_owned(), offset_bytes, shape: shape.to_vec(), dtype }
}

#[test]
fn attention_block_is_tokens_by_heads_by_both_widths() {
    let spec = AttentionSpec::new(16, 8, 128, BFloat16).unwrap();
    assert_eq!(spec.bytes_per_block(), 65_536);
    let wider_keys = AttentionSpec::new(16, 8, 192, BFloat16).unwrap();
    assert_eq!(wider_keys.with_head_dim_v(128).unwrap().bytes_per_block(), 16 * 8 * 320 * 2);
    let odd = AttentionSpec::new(1, 1, 1, UInt8).unwrap();
    assert_eq!(odd.bytes_per_block(), 2);
}

#[test]
fn mla_token_is_576_elements_or_656_packed_bytes() {
    let latent = MlaFormat::Latent { latent_dim: 576, dtype: BFloat16 };
    assert_eq!(MlaSpec::new(64, latent).unwrap().bytes_per_block(), 64 * 1152);
    let packed = MlaSpec::new(64, MlaFormat::Fp8DsMla).unwrap();
    assert_eq!(packed.bytes_per_block(), 64 * 656);
    assert_eq!(packed.content(), (656, UInt8));
    let packed = KvSpec::Mla(packed);
    assert_eq!(packed.alignment_bytes(), 16);
    assert!(packed.bytes_per_block().is_multiple_of(packed.alignment_bytes()));
}

#[test]
fn block_shape_is_heads_tokens_content() {
    let attention = AttentionSpec::new(16, 8, 128, Float16).unwrap();
    let shape = KvSpec::FullAttention(attention).block_shape().unwrap();
    assert_eq!((shape.num_heads, shape.num_tokens, shape.content), (8, 16, 256));
    let mla = MlaSpec::new(64, MlaFormat::Fp8DsMla).unwrap();
    let shape = KvSpec::Mla(mla).block_shape().unwrap();
    assert_eq!((shape.num_heads, shape.num_tokens, shape.content), (1, 64, 656));
    let mamba = MambaSpec::new(4096, &[ssm()], 0).unwrap();
    assert_eq!(KvSpec::Mamba(mamba).block_shape(), None);
}

#[test]
fn blocks_per_request_follow_the_kind_of_layer() {
    let request = RequestShape { max_model_len: 10_000, max_num_batched_tokens: 512 };
    let attention = AttentionSpec::new(16, 8, 128, BFloat16).unwrap();
    assert_eq!(KvSpec::FullAttention(attention).blocks_per_request(&request), 625);
    let window = KvSpec::sliding_window(attention, 1024).unwrap();
    // 1,023 old and 512 new tokens fill 96 blocks and may touch one more.
    assert_eq!(window.blocks_per_request(&request), 97);
    let short = RequestShape { max_model_len: 40, max_num_batched_tokens: 512 };
    assert_eq!(window.blocks_per_request(&short), 3);
    let mamba = KvSpec::Mamba(MambaSpec::new(10_000, &[ssm()], 3).unwrap());
    assert_eq!(mamba.blocks_per_request(&request), 4);
    assert!(window.block_shape().is_some() && !window.grows_with_length());
}

/// B91: one source of truth; the block grows with K in both; a mismatch names both sizes.
#[test]
fn b91_recurrent_block_grows_with_speculative_tokens() {
    let plain = MambaSpec::new(4096, &[conv(BFloat16), ssm()], 0).unwrap();
    let speculative = MambaSpec::new(4096, &[conv(BFloat16), ssm()], 3).unwrap();
    let ssm_bytes = 128 * 64 * 128 * 4;
    assert_eq!(plain.bytes_per_block(), 8192 * 3 * 2 + ssm_bytes);
    assert_eq!(speculative.bytes_per_block(), 8192 * 6 * 2 + ssm_bytes);
    assert_eq!(speculative.block().tensors()[0].shape, [8192, 6]);

    let planned_without = plain.bytes_per_block();
    let error = speculative.check_planned_bytes(planned_without).unwrap_err();
    let (planned, actual) = (Bytes(4_243_456), Bytes(4_292_608));
    assert_eq!(error, LayoutError::BlockMismatch { planned, actual, num_speculative_tokens: 3 });
    for number in ["4243456", "4292608", "3 speculative"] {
        assert!(error.to_string().contains(number), "{error}");
    }
    let padding = speculative.clone().padded_to(planned_without).unwrap_err();
    let needed = Bytes(4_292_608);
    let num_speculative_tokens = 3;
    let bytes = planned;
    assert_eq!(padding, LayoutError::BlockTooSmall { bytes, needed, num_speculative_tokens });
    assert_eq!(plain.check_planned_bytes(planned_without), Ok(()));
}

#[test]
fn padding_keeps_states_where_they_are() {
    let spec = MambaSpec::new(4096, &[conv(BFloat16), ssm()], 0).unwrap();
    let padded = spec.clone().padded_to(5 << 20).unwrap();
    assert_eq!(padded.bytes_per_block(), 5 << 20);
    assert_eq!(padded.block().tensors(), spec.block().tensors());
    // Padding is not counted as needed, so it can be made smaller again.
    assert!(padded.padded_to(spec.bytes_per_block()).is_ok());
}

#[test]
fn packing_aligns_each_state_to_its_elements() {
    let odd = StateSpec::new("conv", [3], BFloat16).unwrap();
    let wide = StateSpec::new("ssm", [2], Float32).unwrap();
    let block = StateBlock::pack(&[odd.clone(), wide.clone()], 0).unwrap();
    assert_eq!(block.tensors()[1].offset_bytes, 8);
    assert_eq!(block.bytes_per_block(), 16);
    let block = StateBlock::pack(&[wide, odd], 0).unwrap();
    assert_eq!((block.tensors()[1].offset_bytes, block.bytes_per_block()), (8, 16));
    let scalar = StateSpec::new("count", [], UInt8).unwrap();
    assert_eq!(StateBlock::pack(&[scalar], 7).unwrap().bytes_per_block(), 1);
}

#[test]
fn states_are_taken_from_reported_offsets() {
    let tensors = vec![state("ssm", 8, &[2], Float32), state("conv", 0, &[3], BFloat16)];
    let block = StateBlock::from_offsets(tensors, 16).unwrap();
    let spec = MambaSpec::from_block(4096, block, 0).unwrap();
    assert_eq!((spec.bytes_per_block(), spec.alignment_bytes()), (16, 4));
    assert_eq!(spec.num_speculative_tokens(), 0);
    assert_eq!(KvSpec::Mamba(spec).block_size(), 4096);
}

#[test]
fn rejects_sizes_of_zero() {
    let zero = |what| Err(LayoutError::ZeroSize { what });
    assert_eq!(AttentionSpec::new(0, 8, 128, BFloat16), zero("block_size"));
    assert_eq!(AttentionSpec::new(16, 0, 128, BFloat16), zero("num_kv_heads"));
    assert_eq!(AttentionSpec::new(16, 8, 0, BFloat16), zero("head_dim"));
    let spec = AttentionSpec::new(16, 8, 128, BFloat16).unwrap();
    assert_eq!(spec.with_head_dim_v(0), zero("head_dim_v"));
    let window = Err(LayoutError::ZeroSize { what: "window" });
    assert_eq!(KvSpec::sliding_window(spec, 0), window);
    let latent = MlaFormat::Latent { latent_dim: 0, dtype: BFloat16 };
    assert_eq!(MlaSpec::new(64, latent), Err(LayoutError::ZeroSize { what: "latent_dim" }));
    let mamba = MambaSpec::new(0, &[ssm()], 0);
    assert_eq!(mamba, Err(LayoutError::ZeroSize { what: "block_size" }));
    let dim = "ssm[1]".to_owned();
    assert_eq!(StateSpec::new("ssm", [4, 0], Float32), Err(LayoutError::ZeroDim { dim }));
}

#[test]
fn rejects_blocks_that_overflow() {
    let attention = AttentionSpec::new(1 << 32, 1 << 30, 1, BFloat16);
    assert!(matches!(attention, Err(LayoutError::Overflow { .. })));
    let wide = AttentionSpec::new(1, 1, u64::MAX, UInt8);
    assert!(matches!(wide, Err(LayoutError::Overflow { .. })));
    let mla = MlaSpec::new(u64::MAX / 600, MlaFormat::Fp8DsMla);
    assert!(matches!(mla, Err(LayoutError::Overflow { .. })));
    let state = StateSpec::new("s", [u64::MAX / 2, 3], UInt8).unwrap();
    assert!(matches!(MambaSpec::new(1, &[state], 0), Err(LayoutError::Overflow { .. })));
    let state = StateSpec::new("s", [2], UInt8).unwrap().widened_along(0).unwrap();
    assert!(matches!(state.shape_with(u64::MAX), Err(LayoutError::Overflow { .. })));
}

#[test]
fn rejects_a_recurrent_layer_without_states() {
    assert_eq!(MambaSpec::new(4096, &[], 0), Err(LayoutError::NoStates));
}

#[test]
fn rejects_widening_a_dim_that_is_not_there() {
    let error = ssm().widened_along(3).unwrap_err();
    let state = "ssm".to_owned();
    assert_eq!(error, LayoutError::SpeculativeDim { state, dim: 3, num_dims: 3 });
}

#[test]
fn rejects_a_misaligned_state() {
    let tensors = vec![state("ssm", 6, &[2], Float32)];
    let error = StateBlock::from_offsets(tensors, 16).unwrap_err();
    let state = "ssm".to_owned();
    assert_eq!(error, LayoutError::StateMisaligned { state, offset: 6, dtype: Float32 });
}

#[test]
fn rejects_a_block_that_misaligns_the_next() {
    let tensors = vec![state("ssm", 0, &[2], Float32)];
    let error = StateBlock::from_offsets(tensors, 10).unwrap_err();
    let (bytes, alignment) = (Bytes(10), Bytes(4));
    assert_eq!(error, LayoutError::BlockMisaligned { bytes, alignment });
}

#[test]
fn rejects_a_state_that_ends_outside_its_block() {
    let tensors = vec![state("ssm", 8, &[3], Float32)];
    let error = StateBlock::from_offsets(tensors, 16).unwrap_err();
    let state = "ssm".to_owned();
    assert_eq!(error, LayoutError::StateOutsideBlock { state, end: 20, bytes_per_block: 16 });
}

#[test]
fn rejects_states_that_overlap() {
    let tensors = vec![state("b", 4, &[2], Float32), state("a", 0, &[3], BFloat16)];
    let error = StateBlock::from_offsets(tensors, 16).unwrap_err();
    let (first, second) = ("a".to_owned(), "b".to_owned());
    assert_eq!(error, LayoutError::StatesOverlap { first, second });
}

#[test]
fn states_may_touch_but_not_share_a_byte() {
    let with_second_at = |offset| {
        let tensors = vec![state("a", 0, &[3], UInt8), state("b", offset, &[3], UInt8)];
        StateBlock::from_offsets(tensors, 8)
    };
    assert!(with_second_at(3).is_ok());
    assert!(matches!(with_second_at(2), Err(LayoutError::StatesOverlap { .. })));
}

proptest! {
    #[test]
    fn packed_states_are_aligned_disjoint_and_inside(
        sizes in prop::collection::vec((1_u64..9, 1_u64..5, 0_usize..4), 1..6),
        num_speculative_tokens in 0_u64..4,
    ) {
        let dtypes = [UInt8, BFloat16, Float32, Dtype::Float64];
        let states: Vec<StateSpec> = sizes
            .iter()
            .map(|&(a, b, dtype)| {
                StateSpec::new("s", [a, b], dtypes[dtype]).unwrap().widened_along(1).unwrap()
            })
            .collect();
        let block = StateBlock::pack(&states, num_speculative_tokens).unwrap();
        let mut end = 0;
        for (tensor, (a, b, _)) in block.tensors().iter().zip(&sizes) {
            let size = tensor.dtype.size_bytes();
            prop_assert!(tensor.offset_bytes >= end && tensor.offset_bytes < end + size);
            prop_assert!(tensor.offset_bytes.is_multiple_of(size));
            end = tensor.offset_bytes + a * (b + num_speculative_tokens) * size;
        }
        prop_assert!(block.bytes_per_block() >= end);
        prop_assert!(block.bytes_per_block().is_multiple_of(block.alignment_bytes()));
    }
}

#[test]
fn a_spec_gives_out_the_kind_it_is_and_refuses_others() {
    let attention = AttentionSpec::new(16, 8, 128, BFloat16).unwrap();
    let mla = MlaSpec::new(64, MlaFormat::Fp8DsMla).unwrap();
    let mamba = KvSpec::Mamba(MambaSpec::new(64, &[ssm()], 0).unwrap());
    assert_eq!(KvSpec::FullAttention(attention).attention(), Ok(&attention));
    assert_eq!(KvSpec::sliding_window(attention, 8).unwrap().attention(), Ok(&attention));
    assert_eq!(KvSpec::Mla(mla).mla(), Ok(&mla));
    let refused = |needed, found| LayoutError::SpecKind { needed, found };
    assert_eq!(KvSpec::Mla(mla).attention(), Err(refused("attention", "MLA")));
    assert_eq!(mamba.attention(), Err(refused("attention", "recurrent")));
    assert_eq!(mamba.mla(), Err(refused("MLA", "recurrent")));
    assert_eq!(KvSpec::FullAttention(attention).mla(), Err(refused("MLA", "attention")));
}
