"""The production example: valid as it stands, and served with a CPU's models in place of a GPU's."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from app.api_keys import key_line, new_key
from app.config import ServiceConfig
from app.requirements import KIND, MissingResources, check_cluster
from tests.e2e.conftest import ROOT, started

PROD = ROOT / "serve_configs" / "prod.yaml"


def production() -> dict[str, Any]:
    return yaml.safe_load(PROD.read_text())


def test_it_is_valid_and_its_replicas_have_gpus() -> None:
    schema = ServeDeploySchema.model_validate(production())
    config = ServiceConfig.model_validate(schema.applications[0].args)
    assert [model.engine_config().device for model in config.models] == ["cuda", "cuda"]
    assert config.ingress.num_replicas > 1
    longest = config.ingress.request_timeout_s
    assert longest is not None
    for model in config.models:
        assert longest <= model.graceful_shutdown_timeout_s <= config.ingress.graceful_shutdown_timeout_s
    checked = subprocess.run(
        [str(Path(sys.executable).parent / "manta"), "check", str(PROD)], capture_output=True, text=True, check=False
    )
    if checked.returncode != 0:  # then nothing is wrong but that another program has one of its ports
        assert re.fullmatch(r"\S*/prod\.yaml itself is right, but port \d+ [^\n]*in use; [^\n]*\n", checked.stderr)
    else:
        assert f"{PROD} is right" in checked.stderr


def test_a_cluster_without_gpus_is_told_at_once() -> None:
    config = ServiceConfig.model_validate(production()["applications"][0]["args"])
    nodes = [{"Alive": True, "Labels": {}, "Resources": {"CPU": 64.0}}]
    with pytest.raises(MissingResources, match="model 'small' needs a GPU with 24 GB or more; the cluster has none"):
        check_cluster(config.models, config.ingress, nodes)


def test_a_cluster_with_too_few_cpus_is_told_at_once() -> None:
    config = ServiceConfig.model_validate(production()["applications"][0]["args"])
    for cpus, fits in ((8.0, True), (7.0, False)):
        nodes = [{"Alive": True, "Labels": {KIND: "H100"}, "Resources": {"CPU": cpus, "GPU": 4.0}}]
        with nullcontext() if fits else pytest.raises(MissingResources, match="all need 8 CPU, the cluster has 7"):
            check_cluster(config.models, config.ingress, nodes)


def test_both_models_answer_where_models_and_devices_are_a_cpu_s(
    demo_folder: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = production()
    key = new_key()
    monkeypatch.setenv(config["applications"][0]["args"]["access"]["keys_env"], key_line("tests", key))
    mine = {"authorization": f"Bearer {key}"}
    config["http_options"]["host"] = "127.0.0.1"
    args = config["applications"][0]["args"]
    small, large = args["models"]
    small["model"], large["model"] = str(demo_folder), str(tiny_folder)
    large["engine"]["load_format"] = "dummy"
    for model in (small, large):
        for name in ("num_gpus", "gpu_memory_gb"):
            del model[name]
        model["num_cpus"] = 0.2
        model["engine"].pop("kv_cache_dtype", None)
        model["engine"] |= {"max_model_len": 512, "num_kv_blocks": 128, "num_threads": 1}
    args["ingress"]["num_cpus"] = 0.1
    with started(config, tmp_path) as service, httpx.Client(base_url=service.url, timeout=120, headers=mine) as http:
        assert httpx.get(f"{service.url}/v1/models").status_code == 401
        # `serve run` alone leaves the proxy to its clients, which a service with keys is told.
        assert "proxy_obeys_clients" in service.log.read_text()
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["small", "large"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        for name in ("small", "large"):
            body = {"model": name, "messages": question, "max_tokens": 12, "temperature": 0}
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["usage"]["completion_tokens"] > 0
            if name == "small":
                assert "Paris" in answer.json()["choices"][0]["message"]["content"]
        # A service is ready with one replica of each model; the others follow.
        expected = small["autoscaling"]["min_replicas"] + large["num_replicas"]
        deadline = time.monotonic() + 120
        while len(replicas := replicas_of(http)) < expected and time.monotonic() < deadline:
            time.sleep(0.5)
        assert len(replicas) == expected


def replicas_of(http: httpx.Client) -> set[str]:
    """Engines that /metrics tells of."""
    lines = http.get("/metrics").text.splitlines()
    return {line.split('replica="')[1].split('"')[0] for line in lines if line.startswith("manta_engine_steps_total")}
