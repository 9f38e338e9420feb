"""Triton kernels for GPUs, each with a reference of the same name in kernels.reference.

Their wrappers take tensors on a GPU, or on a CPU where Triton interprets its kernels (TRITON_INTERPRET=1, set before
the first import).
"""
