"""The plainest decoding there is, to compare the engine with: one sequence, greedy, no blocks."""

import torch
from extkv.models.attention import causal_attention


class PlainCache:
    """Keys and values of one sequence, one tensor a layer, that honours sliding windows."""

    has_sliding_windows = True

    def __init__(self, config):
        self.config = config
        self.layers = {}

    def attend(self, layer_id, query, key, value):
        before = self.layers.get(layer_id)
        if before is not None:
            key, value = torch.cat((before[0], key)), torch.cat((before[1], value))
        self.layers[layer_id] = key, value
        window = self.config.layer_window(layer_id)
        return causal_attention(query, key, value, sliding_window=window)


def logits_of(model, token_ids):
    """Return the logits of every token of a sequence."""
    token_ids = torch.as_tensor(token_ids)
    hidden = model.forward(token_ids, torch.arange(len(token_ids)), PlainCache(model.config))
    return model.compute_logits(hidden)


def greedy_tokens(model, prompt, max_tokens):
    """Return the likeliest continuation, token by token."""
    cache, token_ids, num_cached = PlainCache(model.config), list(prompt), 0
    while len(token_ids) < len(prompt) + max_tokens:
        positions = torch.arange(num_cached, len(token_ids))
        hidden = model.forward(torch.tensor(token_ids[num_cached:]), positions, cache)
        num_cached = len(token_ids)
        token_ids.append(int(model.compute_logits(hidden[-1]).argmax()))
    return token_ids[len(prompt) :]
