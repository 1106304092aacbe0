"""Tiny random models of transformers, and a tokenizer to save with them."""

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 5000.0}

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 3.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-attention_factor": YARN | {"attention_factor": 0.7},
    "yarn-mscale": YARN | {"mscale": 0.8, "mscale_all_dim": 1.3},
    "yarn-beta": YARN | {"beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-truncate": YARN | {"truncate": False},
    "yarn-no-factor": YARN | {"factor": None},
}

SHAPE = {
    "vocab_size": 300,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_reference(family, **options):
    # Imported late: importing transformers takes five seconds.
    import transformers

    settings = SHAPE | {"rope_parameters": dict(DEFAULT_ROPE)} | options
    config = getattr(transformers, f"{family}Config")(**settings)
    torch.manual_seed(0)
    reference = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, weight in reference.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif "bias" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return reference


def write_tokenizer(directory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    encoder = Tokenizer(models.BPE(vocabulary, []))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.add_special_tokens([AddedToken("<end>", normalized=False)])
    encoder.save(str(directory / "tokenizer.json"))
