"""Whether a drafter is asked for, and whether it fits its target."""

import dataclasses
from pathlib import Path

import pytest
import torch
from extkv.errors import (
    DrafterMismatchError,
    ExtkvError,
    InvalidArgumentError,
    OutOfMemoryError,
    UnsupportedDrafterError,
)
from extkv.models.dspark import (
    DSparkConfig,
    check_pair,
    is_dspark,
    require_draft_path,
)
from extkv.models.dspark.weights import allocate_drafter_weights, stack_context_projection
from support.drafters import TARGET, tiny_config, tiny_drafter


@pytest.mark.parametrize(
    ("method", "path", "architectures", "expected"),
    [
        ("dspark", None, [], True),
        ("dspark", "/models/any", [], True),
        (None, "/models/qwen3-8b-dspark", [], True),
        (None, Path("/models/Qwen3-8B-DSpark-block7"), [], True),
        (None, "/models/any", ["Qwen3DSparkModel"], True),
        (None, "/models/any", ["Qwen3ForCausalLM"], False),
        (None, "/models/any", [], False),
        (None, None, [], False),
        ("eagle3", "/models/dspark", ["Qwen3DSparkModel"], False),
    ],
)
def test_recognises_a_request_for_dspark(method, path, architectures, expected):
    assert is_dspark(method, path, architectures) is expected


def test_a_drafter_inside_its_target_is_not_supported_yet():
    assert require_draft_path("/models/x") == "/models/x"
    with pytest.raises(UnsupportedDrafterError, match=r"inside the target's checkpoint \(mtp"):
        require_draft_path(None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "hidden_size of the drafter is 16, of the target 32"),
        ({"num_layers": 8}, "num_target_layers of the drafter is 6, the target has 8"),
        ({"vocab_size": 30}, "vocab_size of the drafter is 29, of the target 30"),
    ],
)
def test_refuses_a_target_of_another_shape(changes, message):
    with pytest.raises(DrafterMismatchError, match=message):
        check_pair(tiny_config(), dataclasses.replace(TARGET, **changes))


def test_a_larger_vocabulary_than_the_target_s_is_padding():
    check_pair(tiny_config(), dataclasses.replace(TARGET, vocab_size=27))


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ((1, 5), "tap layer 5 is the last of 6 target layers, expected at most 4"),
        ((1, 6), "tap layer is 6, out of range for 6 target layers"),
    ],
)
def test_refuses_taps_that_the_target_does_not_have(taps, message):
    config = tiny_config(tap_layer_ids=taps, num_target_layers=None)
    with pytest.raises(DrafterMismatchError, match=message):
        check_pair(config, TARGET)


def test_refuses_pipeline_parallelism():
    with pytest.raises(DrafterMismatchError, match="pipeline_parallel_size is 2, expected 1"):
        check_pair(tiny_config(), TARGET, pipeline_parallel_size=2)


def test_mismatches_are_argument_errors_of_extkv():
    assert issubclass(DrafterMismatchError, InvalidArgumentError)
    assert issubclass(DrafterMismatchError, ExtkvError)


def test_rejects_a_head_type_that_is_not_known():
    with pytest.raises(InvalidArgumentError, match="markov_head_type is 'lstm', expected one of"):
        tiny_config(markov_head_type="lstm")


def test_the_draft_vocabulary_is_the_backbone_s_by_default():
    assert tiny_config().num_draft_tokens == 29
    assert tiny_config(draft_vocab_size=7).num_draft_tokens == 7
    assert isinstance(tiny_config(), DSparkConfig)


def test_weights_that_do_not_fit_are_refused():
    # 2 ** 55 bytes of embedding.
    huge = dataclasses.replace(tiny_config().backbone, vocab_size=2**49)
    config = dataclasses.replace(tiny_config(), backbone=huge)
    with pytest.raises(
        OutOfMemoryError, match=r"cannot allocate [0-9,]+ bytes of drafter weights"
    ) as caught:
        allocate_drafter_weights(config, torch.float32, torch.device("cpu"))
    assert caught.value.requested > 2**55


def test_a_context_projection_that_does_not_fit_is_refused():
    # 2 ** 56 bytes of keys and values, which take no memory until they are copied.
    rows = torch.zeros(1, 1).expand(2**42 + 32, 2**12)
    layer = dataclasses.replace(
        tiny_drafter(tiny_config()).weights.backbone.layers[0], qkv_proj=rows
    )
    with pytest.raises(
        OutOfMemoryError, match=r"cannot allocate [0-9,]+ bytes for the context's pr"
    ):
        stack_context_projection(tiny_config().backbone, [layer])
