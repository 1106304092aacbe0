"""Benches of the engine against transformers, both in one process and on the same weights."""
