"""A target that repeats what stood some tokens before, and drafters that know it; nothing trained.

The next token is, mostly, the one `LAG` tokens back. A drafter finds it in its context: `fc` reads
the token out of the tapped layers, and queries turn by RoPE to the distance where it stands. A tap,
a norm, a position, a mask or a layout other than the one it was made for costs acceptance.
"""

from __future__ import annotations

import torch
from extkv.models import DecoderModel, ModelConfig, random_model
from extkv.models.dspark import DSparkModel, drafter_config, random_drafter
from support.plain_cache import PlainCache
from torch.nn import functional

LAG = 9
VOCAB_SIZE = 16
SIZE, HEAD_DIM, NUM_LAYERS = 64, 16, 5
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=VOCAB_SIZE,
    hidden_size=SIZE,
    intermediate_size=96,
    num_layers=NUM_LAYERS,
    num_heads=1,
    num_kv_heads=1,
    head_dim=HEAD_DIM,
    context_length=160,
    rope_theta=50.0,
)
BLOCK_SIZE = 4
# Ordinary tokens end before the mask.
MASK = VOCAB_SIZE - 4
TAPS = (1, 2)
# Dimensions of the residual stream: the token, what all tokens share, what sets words apart from
# masks, and what the head reads.
TOKENS, CONSTANT, WORD = slice(0, VOCAB_SIZE), VOCAB_SIZE, VOCAB_SIZE + 1
OUTPUT = slice(VOCAB_SIZE + 2, 2 * VOCAB_SIZE + 2)


def looking_back(distance: int) -> torch.Tensor:
    """Return a query whose product with `ones, zeros` peaks that many tokens back, after RoPE."""
    half = HEAD_DIM // 2
    angles = distance * CONFIG.rope_theta ** (-torch.arange(half) / half)
    return torch.cat((angles.cos(), -angles.sin()))


def echo_target() -> DecoderModel:
    """Build the target: layer 0 looks `LAG` - 1 tokens back, the others stir the stream."""
    model = random_model(CONFIG, seed=0)
    generator = torch.Generator().manual_seed(1)
    weights = model.weights
    weights.embedding.normal_(generator=generator).mul_(0.3)
    weights.embedding[:, TOKENS] = torch.eye(VOCAB_SIZE) * 2
    weights.embedding[:, CONSTANT] = 2.0
    weights.embedding[MASK + 1 :, CONSTANT] = -2.0
    weights.embedding[:, WORD] = 2.0
    weights.embedding[MASK:, WORD] = -2.0
    weights.embedding[:, OUTPUT] = 0.0
    for layer_id, layer in enumerate(weights.layers):
        layer.o_proj.zero_()
        layer.down_proj.mul_(4.0 if layer_id else 0.0)
        layer.down_proj[OUTPUT] = 0.0
    first = weights.layers[0]
    first.qkv_proj.zero_()
    first.qkv_proj[:HEAD_DIM, CONSTANT] = looking_back(LAG - 1) * 4
    first.qkv_proj[HEAD_DIM : HEAD_DIM + HEAD_DIM // 2, CONSTANT] = 4.0
    # Orthogonal codes of tokens.
    codes = torch.linalg.qr(torch.randn(VOCAB_SIZE, HEAD_DIM, generator=generator))[0]
    first.qkv_proj[2 * HEAD_DIM :, TOKENS] = codes.T
    first.o_proj[OUTPUT, :] = codes * 3
    weights.lm_head.zero_()
    weights.lm_head[:, OUTPUT] = torch.eye(VOCAB_SIZE) * 1.5
    # Tokens that no text has, masks among them.
    weights.lm_head[MASK:, CONSTANT] = 0.0
    return model


def echo_texts(
    target: DecoderModel, num_texts: int, num_tokens: int, *, seed: int
) -> list[list[int]]:
    """Draw texts at temperature 1, after prompts of LAG random tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(num_texts):
        cache = PlainCache(CONFIG)
        tokens = torch.randint(MASK, (LAG,), generator=generator).tolist()
        num_done = 0
        while len(tokens) < num_tokens:
            feed, at = torch.tensor(tokens[num_done:]), torch.arange(num_done, len(tokens))
            num_done = len(tokens)
            logits = target.compute_logits(target.forward(feed, at, cache)[-1:])[0, :MASK]
            tokens.append(int(torch.multinomial(logits.softmax(0), 1, generator=generator)))
        texts.append(tokens)
    return texts


def echo_drafter(
    target: DecoderModel,
    *,
    distance: int = LAG - 1,
    word_distance: int = 2 * LAG - 1,
    context_norm: str = "after",
    samples_from_anchor: bool = True,
) -> DSparkModel:
    """Build a drafter.

    Args:
        target: From `echo_target`.
        distance: How far back masks look.
        word_distance: How far back words look; by default one period further, so that a word is a
            worse mask.
        context_norm: What `fc` is made for.
        samples_from_anchor: Its layout. In fill-in layout, words look nowhere.
    """
    config = drafter_config(
        CONFIG,
        num_layers=1,
        block_size=BLOCK_SIZE,
        markov_rank=4,
        tap_layer_ids=TAPS,
        mask_token_id=MASK,
        samples_from_anchor=samples_from_anchor,
    )
    drafter = random_drafter(config, target, seed=3)
    weights, (layer,) = drafter.weights, drafter.weights.backbone.layers
    generator = torch.Generator().manual_seed(4)
    weights.markov_w2.zero_()
    norm = torch.rand(SIZE, generator=generator) + 0.5
    norm *= torch.randint(2, (SIZE,), generator=generator) * 2 - 1
    weights.hidden_norm.copy_(norm)
    # Orthonormal features of tokens, and one that all have.
    features = torch.linalg.qr(torch.randn(SIZE, VOCAB_SIZE + 1, generator=generator))[0].T
    taps, tokens = _training_taps(target)
    if context_norm == "before":
        taps = functional.rms_norm(taps, (SIZE,), weights.hidden_norm, CONFIG.rms_norm_eps)
    wanted = features[tokens] + features[-1]
    weights.fc.copy_(_ridge(taps.transpose(0, 1).flatten(1), wanted).T)
    readout = features / norm if context_norm == "after" else features
    words = looking_back(word_distance) if samples_from_anchor else torch.zeros(HEAD_DIM)
    masks = looking_back(distance)
    layer.qkv_proj.zero_()
    layer.qkv_proj[:HEAD_DIM, CONSTANT] = (words + masks) / 2
    layer.qkv_proj[:HEAD_DIM, WORD] = (words - masks) / 2
    layer.qkv_proj[HEAD_DIM : HEAD_DIM + HEAD_DIM // 2] = readout[-1]
    layer.qkv_proj[2 * HEAD_DIM :] = readout[:-1]
    layer.q_norm.fill_(8.0)
    layer.k_norm.fill_(8.0)
    layer.o_proj.zero_()
    layer.o_proj[OUTPUT] = torch.eye(VOCAB_SIZE) * 3
    layer.down_proj.zero_()
    drafter.refresh()
    return drafter


def _ridge(inputs: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return the matrix that fits outputs best, one that rounding does not choose."""
    wide = inputs.double()
    square = wide.T @ wide + 1e-2 * torch.eye(wide.shape[1], dtype=wide.dtype)
    return torch.linalg.solve(square, wide.T @ outputs.double())


def _training_taps(target: DecoderModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return taps of echoing text, and its tokens."""
    generator = torch.Generator().manual_seed(5)
    parts = []
    for _ in range(12):
        tokens = torch.randint(MASK, (120,), generator=generator)
        is_echo = torch.rand(120, generator=generator) < 0.85
        for place in range(LAG, 120):
            if is_echo[place]:
                tokens[place] = tokens[place - LAG]
        _, taps = target.forward(tokens, torch.arange(120), PlainCache(CONFIG), taps=TAPS)
        parts.append((taps, tokens))
    taps, tokens = zip(*parts, strict=True)
    return torch.cat(taps, dim=1), torch.cat(tokens)
