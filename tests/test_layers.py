"""The import rules of the house, read from the source and from a running interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# Lowest first; within a row only what stands to the left may be imported.
ROWS = [
    ["sampling_params", "config", "request", "step_times", "outputs", "metrics", "protocols"],
    ["demo_model", "hub", "tokenizer"],
    ["kv_cache", "structured_output", "scheduler"],
    ["processor", "detokenizer", "output_processor"],
    ["distributed", "attention", "layers", "models"],
    ["sampling", "spec_decode"],
    ["kv_transfer", "worker", "executor"],
    ["core"],
    ["async_engine_core", "async_engine", "llm", "profiling"],
]
PLACE = {name: (row, column) for row, names in enumerate(ROWS) for column, name in enumerate(names)}
NOT_BELOW_APP = {"starlette", "fastapi", "ray", "pydantic", "uvicorn"}
RAY_EXCEPTIONS = {"engine/executor/ray.py", "engine/kv_transfer/ray.py"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Full names of the modules that a file imports anywhere, those for type checkers alone left out."""
    names: set[str] = set()
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module in ("engine", "app", "kernels"):
                names.update(f"{node.module}.{alias.name}" for alias in node.names)
        todo.extend(ast.iter_child_nodes(node))
    return names


THIRD_PARTY = {"torch", "triton", "transformers", "prometheus_client", "tqdm"}
BROUGHT_BY_THOSE = {"numpy", "safetensors", "tokenizers", "huggingface_hub", "filelock", "jinja2"}


@pytest.mark.parametrize("path", sources("engine") + sources("kernels"), ids=lambda path: str(path.relative_to(ROOT)))
def test_engine_and_kernels_need_what_a_gpu_machine_has(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)} - {"engine", "kernels", "ray"}
    assert tops - sys.stdlib_module_names <= THIRD_PARTY | BROUGHT_BY_THOSE


def engine_part(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("path", sources("engine") + sources("kernels"), ids=lambda path: str(path.relative_to(ROOT)))
def test_engine_and_kernels_know_nothing_of_the_application(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    forbidden = NOT_BELOW_APP | {"app"} | ({"engine"} if path.is_relative_to(ROOT / "kernels") else set())
    if str(path.relative_to(ROOT)) in RAY_EXCEPTIONS:
        forbidden -= {"ray"}
    assert not tops & forbidden


@pytest.mark.parametrize(
    "path",
    [path for path in sources("engine") if path != ROOT / "engine" / "__init__.py"],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_engine_modules_import_lower_layers_only(path: Path) -> None:
    part = path.relative_to(ROOT / "engine").parts[0].removesuffix(".py")
    assert part in PLACE, f"{part} has no place in the layers"
    for name in imported(path):
        if name.startswith("engine."):
            other = engine_part(name)
            assert other == part or PLACE[other] < PLACE[part], f"{part} imports {other}, which is not below it"


@pytest.mark.parametrize("path", sources("engine"), ids=lambda path: str(path.relative_to(ROOT)))
def test_rows_one_to_four_do_not_import_torch(path: Path) -> None:
    part = path.relative_to(ROOT / "engine").parts[0].removesuffix(".py")
    if part != "__init__" and PLACE[part][0] < 4:
        assert "torch" not in {name.split(".")[0] for name in imported(path)}


@pytest.mark.parametrize("path", sources("app"), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_application_uses_rows_one_to_four_and_what_engine_exports(path: Path) -> None:
    import engine

    for name in imported(path):
        if name.startswith("engine."):
            part = engine_part(name)
            assert part in engine.__all__ or PLACE[part][0] < 4, f"app may not import engine.{part}"


def test_only_config_reads_the_environment() -> None:
    readers = {
        path.relative_to(ROOT).as_posix()
        for path in sources("engine") + sources("kernels")
        if "environ" in path.read_text() or "getenv" in path.read_text()
    }
    assert readers == {"engine/config.py"}


def test_exports_exist() -> None:
    import engine

    assert all(getattr(engine, name) is not None for name in engine.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = engine.Nothing


def modules_after(code: str) -> set[str]:
    """Names of all modules that are loaded after code ran in a new interpreter."""
    script = f"{code}\nimport sys\nprint('\\n'.join(sys.modules))"
    return set(
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
        .stdout.strip()
        .splitlines()
    )


def test_the_ingress_loads_neither_the_device_side_nor_triton() -> None:
    loaded = modules_after("import app.main, app.ingress, app.openai, app.router")
    parts = {engine_part(name) for name in loaded if name.startswith("engine.")}
    assert parts, "the ingress uses the engine's values"
    assert {part for part in parts if PLACE[part][0] >= 4} == set()
    assert not {name for name in loaded if name.split(".")[0] in ("triton", "kernels")}


def test_transformers_models_import_beside_our_kernels_package() -> None:
    loaded = modules_after(
        "import kernels\nassert not hasattr(kernels, '__version__')\n"
        "from transformers.models.llama.modeling_llama import LlamaForCausalLM"
    )
    assert "transformers.models.llama.modeling_llama" in loaded


def test_our_version_stays_out_of_what_transformers_probes_for() -> None:
    from importlib.metadata import version

    major, minor = (int(part) for part in version("manta-serve").split(".")[:2])
    assert (major, minor) != (0, 18)
