"""What is compiled is what is launched: every kernel has variants, and they fit its parameters."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kernels.compile import VARIANTS
from kernels.gpu.variants import Variant
from tests.kernels.small_kernels import normed

ROOT = Path(__file__).parents[2]


def kernels() -> set[str]:
    """Names of the @triton.jit functions that no other one calls."""
    trees = [ast.parse(path.read_text()) for path in (ROOT / "kernels/gpu").glob("*.py")]
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    compiled = [each for each in functions if any("triton.jit" in ast.unparse(at) for at in each.decorator_list)]
    calls = [node.func for each in compiled for node in ast.walk(each) if isinstance(node, ast.Call)]
    return {each.name for each in compiled} - {ast.unparse(call) for call in calls}


ALL = [variant for source in VARIANTS for variant in source()]


def test_every_kernel_is_compiled() -> None:
    assert kernels() == {variant.kernel.__name__ for variant in ALL}


def test_what_is_launched_is_what_is_compiled() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "error::UserWarning", "-m", "tests.kernels.gpu_launches"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"not compiled": [], "not launched": []}


def test_no_argument_has_a_name_that_tritons_launcher_uses() -> None:
    """On a GPU the launcher would pass its own value instead, a dict for `params`; its interpreter does not mind."""
    taken = {"params", "options", "backend", "specialize_impl", "grid", "warmup"}
    assert {(v.kernel.__name__, name) for v in ALL for name in v.kernel.arg_names if name in taken} == set()


def test_names_of_variants_are_unique() -> None:
    counts = Counter((variant.kernel.__name__, variant.name) for variant in ALL)
    assert [name for name, count in counts.items() if count > 1] == []


def test_variants_differ() -> None:
    def what(variant: Variant) -> str:
        signature, constants = sorted(variant.signature.items()), sorted(variant.constants.items(), key=str)
        return str((variant.kernel.__name__, signature, constants, variant.num_warps, variant.num_stages))

    counts = Counter(map(what, ALL))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_number_makes_a_launch_compile_a_variant_of_its_own() -> None:
    """Triton compiles again for an integer that is 1, or a multiple of 16, unless it is told not to look."""
    looked_at = {
        f"{variant.kernel.__name__}({name})"
        for variant in ALL
        for name, kind in variant.signature.items()
        if kind[0] in "iu" and name not in variant.kernel.kwargs.get("do_not_specialize", ())
    }
    assert looked_at == set()


@pytest.mark.parametrize(
    ("signature", "constants", "wrong"),
    [
        ({"x": "*fp32"}, {"BLOCK": 16}, "bias"),
        ({"x": "*fp32", "bias": "*fp32"}, {"BLOCK": 16, "STEP": 1}, "STEP"),
        ({"x": "*fp32", "bias": "*fp32"}, {"BLOCK": 16, "bias": None}, "bias"),
    ],
)
def test_a_variant_covers_exactly_the_parameters(
    signature: dict[str, str], constants: dict[str, object], wrong: str
) -> None:
    with pytest.raises(ValueError, match=rf"^normed \[odd\]: arguments missing, unknown or given twice: {wrong}$"):
        Variant(name="odd", kernel=normed, signature=signature, constants=constants, num_warps=1, num_stages=1)
