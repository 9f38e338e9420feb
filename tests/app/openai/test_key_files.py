"""Where keys come from, and what is said of those that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.api_keys import KeysUnreadable, hash_key, key_line, load_keys, new_key
from app.config import Access, ApiKey
from app.openai.auth import KeyRing
from tests.app.openai.access import ALICE, Now


def test_new_key_is_known_by_its_line(tmp_path: Path, now: Now) -> None:
    file = tmp_path / "keys.yaml"
    keys = {name: new_key() for name in ("true", "1.5", "a-b")}
    file.write_text("\n".join(["# ours", *(key_line(name, key) for name, key in keys.items())]))
    loaded = load_keys(Access(keys_file=str(file)), {})
    assert loaded is not None
    assert len(set(keys.values())) == 3
    for name, key in keys.items():
        assert KeyRing(loaded, now).client(f"Bearer {key}").name == name
        assert key not in file.read_text()


def test_keys_come_from_the_environment_or_nowhere() -> None:
    loaded = load_keys(Access(keys_env="KEYS"), {"KEYS": key_line("alice", ALICE)})
    assert loaded == [ApiKey(name="alice", hash=hash_key(ALICE.encode()))]
    assert load_keys(Access(open=True), {}) is None


HASH = hash_key(b"x")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "list"),
        ("[]", "has no key"),
        ("- {", "is not YAML in line 1"),
        ("secret", "list"),
        ("- {name: a, hash: secret}", "0.hash: String should match"),
        (f"- {{name: a, hash: '{HASH}', rpm: 3}}", "0: unknown key; known: name, hash, requests_per_minute"),
        ("- {sk-manta-secret: alice}", "0: unknown key; known: name, hash"),
        ("- {sk-manta-secret}", "0: unknown key; known: name, hash"),
        ("- {name: a, hash: !!int 'sk-manta-secret'}", "is not YAML"),
        ("- {name: a, hash: !!bool 'sk-manta-secret'}", "is not YAML"),
        ("- {name: a, hash: !!timestamp 'sk-manta-secret'}", "is not YAML"),
        ("- {name: a, hash: !secret x}", "is not YAML in line 1"),
        ("- {name: 2026-13-45, hash: secret}", "is not YAML"),
        ("[" * 5000, "is not YAML"),
        (
            f"- {{name: a, hash: '{HASH}', requests_per_minute: .inf}}",
            "0.requests_per_minute: Input should be a finite",
        ),
        (f"- {{name: a, hash: '{HASH}', requests_per_minute: 0}}", "0.requests_per_minute: Input should be greater"),
        (f"- {{name: a b, hash: '{HASH}'}}", "0.name: String should match"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: b, hash: '{HASH}'}}", "1.hash: is used twice"),
        (f"- {{name: a, hash: '{HASH}'}}\n- {{name: a, hash: '{hash_key(b'y')}'}}", "1.name: is used twice"),
    ],
)
def test_wrong_keys_are_refused_without_being_shown(text: str, says: str) -> None:
    with pytest.raises(KeysUnreadable) as refused:
        load_keys(Access(keys_env="KEYS"), {"KEYS": text})
    assert says in str(refused.value)
    assert str(refused.value).startswith("keys_env KEYS: ")
    assert "secret" not in str(refused.value)
    assert HASH not in str(refused.value)


def test_missing_source_of_keys_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeysUnreadable, match="No such file"):
        load_keys(Access(keys_file=str(tmp_path / "none")), {})
    with pytest.raises(KeysUnreadable, match="no such environment variable"):
        load_keys(Access(keys_env="NONE"), {})
