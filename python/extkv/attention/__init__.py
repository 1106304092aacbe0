"""Attention of a packed batch over the blocks of a cache, on CUDA and on the host."""
