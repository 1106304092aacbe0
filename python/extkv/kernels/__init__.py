"""Triton kernels, one op per file: kernel, launcher, public function.

Every function has a twin of the same name and signature in `extkv.reference`, in plain PyTorch, and
must agree with it. Functions are imported from their modules: this package loads nothing, so that
a machine without Triton can import it. Nothing here waits for the device. Memory is allocated only
where a result or a workspace was not passed, so that a caller who passes both can capture.
"""
