"""What is loaded on the way to the first token: every module costs start-up time, and transformers half of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

NEEDLESS = {"transformers", "jinja2", "huggingface_hub", "sympy", "torch._dynamo", "ray", "starlette", "fastapi"}

START = """
import sys
from engine import LLM, SamplingParams
with LLM(sys.argv[1], load_format="dummy", num_kv_blocks=64) as llm:
    output, = llm.generate("The", SamplingParams(temperature=0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 1
    print(*sys.modules)
    assert "<|im_start|>" in llm.get_tokenizer().render_chat([{"role": "user", "content": "Hi"}])
    print(*sys.modules)
"""


def test_the_first_token_needs_neither_transformers_nor_what_it_brings(tiny_folder: Path) -> None:
    done = subprocess.run([sys.executable, "-c", START, str(tiny_folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    at_first_token, after_a_chat = (set(line.split()) for line in done.stdout.splitlines())
    assert "torch" in at_first_token
    assert at_first_token & NEEDLESS == set()
    assert "transformers" in after_a_chat


def test_importing_the_engine_loads_no_library_until_a_name_is_used() -> None:
    code = "import sys, engine; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name for name in loaded if name.split(".")[0] in {"torch", "numpy", "tokenizers", *NEEDLESS}} == set()
    assert {name for name in loaded if name.startswith("engine.")} == set()
