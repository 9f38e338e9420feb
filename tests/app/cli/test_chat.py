from __future__ import annotations

import os
import pty
import select
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from app.api_keys import hash_key
from app.cli.main import app
from app.config import ApiKey
from app.openai.auth import KeyRing
from app.transport import EngineFailed
from engine.tokenizer import Tokenizer
from tests.app.cli.conftest import Serve
from tests.app.openai.conftest import AppOver, saying
from tests.certificates import write_certificate

COMMAND = [sys.executable, "-c", "from app.cli.main import app; app()", "chat"]


def test_lines_are_answered_and_the_conversation_is_kept(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there")
    args = ["chat", "--url", serve(engine), "--system", "Be kind.", "--temperature", "0", "--top-k", "3"]
    done = CliRunner().invoke(app, args, input="first\n\nsecond\n/reset\nthird\n")
    assert (done.exit_code, done.stdout) == (0, "Hello there\n" * 3)
    prompts = [tokenizer.decode(each.prompt_token_ids) for each in engine.requests]
    assert all("Be kind." in prompt for prompt in prompts)
    assert "first" in prompts[1]
    assert "Hello there" in prompts[1]
    assert "first" not in prompts[2]
    assert (engine.requests[0].params.temperature, engine.requests[0].params.top_k) == (0, 3)


def test_answer_that_is_cut_is_told(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there", ends=False)
    num_tokens = len(tokenizer.encode("Hello")) + len(tokenizer.encode(" there"))
    url = serve(engine)
    at_limit = CliRunner().invoke(app, ["chat", "--url", url, "--max-tokens", str(num_tokens)], input="x\n")
    assert at_limit.stdout == "Hello there\n"
    assert at_limit.stderr == f"… cut at {num_tokens} tokens; --max-tokens allows more\n"
    before = CliRunner().invoke(app, ["chat", "--url", url], input="x\n")
    assert before.stderr == f"… cut at {num_tokens} tokens; the context is full\n"


def test_answer_that_ends_is_not_told_to_be_cut(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello")
    done = CliRunner().invoke(app, ["chat", "--url", serve(engine)], input="x\n")
    assert (done.stdout, done.stderr) == ("Hello\n", "")


def test_no_service_is_one_line() -> None:
    done = CliRunner().invoke(app, ["chat", "--url", "http://127.0.0.1:9"], input="x\n")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: no service answers at http://127.0.0.1:9")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("given", ["option", "environment"])
def test_key_is_shown_to_the_service(
    app_over: AppOver, serve_app: Callable[[Any], str], tokenizer: Tokenizer, given: str
) -> None:
    keys = KeyRing([ApiKey(name="me", hash=hash_key(b"my-key"))], time.time)
    url = serve_app(app_over(saying(tokenizer, "Hello"), keys=keys))
    args, environment = (["--api-key", "my-key"], {}) if given == "option" else ([], {"MANTA_API_KEY": "my-key"})
    done = CliRunner().invoke(app, ["chat", "--url", url, *args], input="x\n", env=environment)
    assert (done.exit_code, done.stdout) == (0, "Hello\n")
    refused = CliRunner().invoke(app, ["chat", "--url", url, "--api-key", "other"], input="x\n")
    assert (refused.exit_code, refused.stderr) == (1, "error: the API key is not known to this service\n")
    keyless = CliRunner().invoke(app, ["chat", "--url", url], input="x\n")
    assert (keyless.exit_code, keyless.stderr) == (1, "error: the service wants a key: --api-key or MANTA_API_KEY\n")


def test_certificate_that_is_not_trusted_is_not_taken_for_silence(tmp_path: Path) -> None:
    files = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files["ssl_certfile"], files["ssl_keyfile"])
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def shake_hands() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                context.wrap_socket(connection, server_side=True).close()

        server = threading.Thread(target=shake_hands)
        server.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        done = CliRunner().invoke(app, ["chat", "--url", url], input="x\n")
        server.join()
    assert done.exit_code == 1
    assert done.stderr.startswith(f"error: {url} answers, but its certificate is not trusted (")
    assert "SSL_CERT_FILE=" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("url", ["ftp://here", "http://", "https://here:port"])
def test_address_that_is_none_is_one_line(url: str) -> None:
    done = CliRunner().invoke(app, ["chat", "--url", url], input="x\n")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: url='{url.rstrip('/')}")
    assert done.stderr.count("\n") == 1


def test_unknown_model_is_one_line(serve: Serve, tokenizer: Tokenizer) -> None:
    url = serve(saying(tokenizer, "Hello"))
    done = CliRunner().invoke(app, ["chat", "--url", url, "--model", "gpt"], input="x\n")
    assert (done.exit_code, done.stderr) == (2, f"error: the service at {url} has demo, not gpt\n")


def test_failures_of_the_service_are_told_and_the_question_is_taken_back(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello")
    engine.error = EngineFailed("the engine failed")
    done = CliRunner().invoke(app, ["chat", "--url", serve(engine)], input="one\ntwo\n")
    assert done.exit_code == 1
    assert done.stderr == "error: the engine failed\n" * 2
    assert "one" not in tokenizer.decode(engine.requests[-1].prompt_token_ids)


def test_ctrl_c_stops_the_answer_and_ctrl_d_ends(serve: Serve, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "Hello", " there")
    engine.pauses = [0.0, 3600.0]
    master, slave = pty.openpty()
    process = subprocess.Popen([*COMMAND, "--url", serve(engine)], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = b""

    def read_until(text: bytes) -> None:
        nonlocal seen
        deadline = time.monotonic() + 180
        while text not in seen:
            assert time.monotonic() < deadline, seen
            if select.select([master], [], [], 0.1)[0]:
                seen += os.read(master, 4096)
        seen = seen[seen.index(text) + len(text) :]

    try:
        read_until(b"> ")
        os.write(master, b"one\n")
        read_until(b"Hello")
        process.send_signal(signal.SIGINT)
        read_until(b"> ")
        deadline = time.monotonic() + 60
        while engine.closed == 0:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        engine.pauses = []
        os.write(master, b"two\n")
        read_until(b"Hello there")
        read_until(b"> ")
        os.write(master, b"\x04")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(master)
    prompt = tokenizer.decode(engine.requests[1].prompt_token_ids)
    assert "one" in prompt
    assert "Hello" in prompt
