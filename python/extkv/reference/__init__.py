"""The ops of `extkv.kernels` in plain PyTorch: same files, names and signatures.

They define what a kernel must compute, and the CPU engine runs them. Arithmetic is float32. Unlike
the kernels they may allocate, and on a CUDA device they may wait for it.
"""
