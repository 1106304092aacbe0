"""Structured outputs: texts that a JSON schema, an expression, a list or a grammar allows.

`params` says what a request asks for, `grammar` writes it in llguidance's words, `compiler` checks
it and keeps it, `matcher` follows one output, and `masks` makes the bits that the sampler applies.
"""
