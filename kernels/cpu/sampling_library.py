"""Sampling as the C++ kernels do it: a request's parameters and a batch of rows, as Python sees them.

What is drawn is said by engine/sampling/sampler.py; kernels/cpu/sample.cpp draws the same.
"""

from __future__ import annotations

import ctypes


class SamplingRow(ctypes.Structure):
    """One request's parameters; fields as in sample.cpp. Arrays are given by their addresses; their owner keeps them.

    Attributes:
        temperature: 0 takes the best token.
        repetition, seen_ids, frequency_losses, presence_losses, seen: the penalties. The ids are distinct; their logits
            are divided by repetition (multiplied where negative), then both losses are taken from them.
        top_k: the vocabulary's size where it is off. top_p: 1 where it is off. min_p: 0 where it is off.
        seed: 64 bits.
        logprobs: alternatives to report; negative is nothing at all.
        min_length, stop_ids, stops: a sequence with fewer tokens cannot go on with those ids.
        bias_ids, bias_values, biases: what is added to the logits of distinct ids.
    """

    _fields_ = (
        ("temperature", ctypes.c_float),
        ("repetition", ctypes.c_float),
        ("top_k", ctypes.c_int64),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("seed", ctypes.c_uint64),
        ("logprobs", ctypes.c_int64),
        ("min_length", ctypes.c_int64),
        ("stop_ids", ctypes.c_void_p),
        ("stops", ctypes.c_int64),
        ("bias_ids", ctypes.c_void_p),
        ("bias_values", ctypes.c_void_p),
        ("biases", ctypes.c_int64),
        ("seen_ids", ctypes.c_void_p),
        ("frequency_losses", ctypes.c_void_p),
        ("presence_losses", ctypes.c_void_p),
        ("seen", ctypes.c_int64),
    )


class SamplingBatch(ctypes.Structure):
    """The rows of one step and where their tokens go; fields and shapes as in sample.cpp."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("vocab", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("params", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("num_tokens", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("broken", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("logprob_ids", ctypes.c_void_p),
        ("logprobs", ctypes.c_void_p),
        ("ranks", ctypes.c_void_p),
    )
