"""What a kernel is compiled to: one of its specialisations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CAPABILITIES = (80, 90, 100)
"""What every variant is compiled for by `python -m kernels.compile`."""

FP8_CAPABILITY = 89
"""From this compute capability on there are conversions of FP8 e4m3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One kernel with the types and constants that a launch can give it.

    Attributes:
        name: of the variant within its kernel: `d128 bf16 block16`.
        kernel: the @triton.jit function.
        signature: each runtime argument's type as Triton writes it: `*bf16`, `i32`, `fp32`. Pointers count as aligned
            to 16 bytes, as torch's are.
        constants: each tl.constexpr argument's value, and None for each pointer that this variant does without.
        enable_fp_fusion: whether `a * b + c` may become one instruction that rounds once.
        spill_bytes: spill stores and loads that it may have, in bytes per thread as ptxas counts them.
        min_capability: of the GPUs that it can be asked for on.

    Raises:
        ValueError: signature and constants are not, each once, the kernel's parameters.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    enable_fp_fusion: bool = True
    spill_bytes: int = 0
    min_capability: int = 80

    def __post_init__(self) -> None:
        given, taken = sorted([*self.signature, *self.constants]), sorted(self.kernel.arg_names)
        if given != taken:
            wrong = ", ".join(sorted(set(given) ^ set(taken)) or [n for n in taken if given.count(n) > 1])
            raise ValueError(
                f"{self.kernel.__name__} [{self.name}]: arguments missing, unknown or given twice: {wrong}"
            )
