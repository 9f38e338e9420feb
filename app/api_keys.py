"""API keys as their owners get them and as a service knows them: by their hashes alone.

A key is 256 random bits, so that a plain SHA-256 of it cannot be turned back and needs no salt.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from app.config import Access, ApiKey
from app.strict_model import UNKNOWN_KEY

_KEYS = TypeAdapter(list[ApiKey])


class KeysUnreadable(ValueError):
    """The keys that a service is to know cannot be read. Its text shows nothing of what was read."""


def new_key() -> str:
    return f"sk-manta-{secrets.token_urlsafe(32)}"


def hash_key(key: bytes) -> str:
    """As it stands in a file of keys."""
    return f"sha256:{hashlib.sha256(key).hexdigest()}"


def key_line(name: str, key: str) -> str:
    """A key's line for a file of keys; limits may be added to it."""
    return f"- {{name: {json.dumps(name)}, hash: {json.dumps(hash_key(key.encode()))}}}"


def load_keys(access: Access, environ: Mapping[str, str]) -> list[ApiKey] | None:
    """The keys of a service; None where it is open.

    Raises:
        KeysUnreadable: there is no such file or variable, or it is not a list of keys.
    """
    if access.keys_file is not None:
        where = f"keys_file {access.keys_file}"
        try:
            text = Path(access.keys_file).read_text()
        except UnicodeDecodeError:
            raise KeysUnreadable(f"{where}: is not UTF-8") from None
        except OSError as error:
            raise KeysUnreadable(f"{where}: {error.strerror}") from None
        return _parse(text, where)
    if access.keys_env is not None:
        where = f"keys_env {access.keys_env}"
        if access.keys_env not in environ:
            raise KeysUnreadable(f"{where}: the ingress has no such environment variable")
        return _parse(environ[access.keys_env], where)
    return None


def _parse(text: str, where: str) -> list[ApiKey]:
    """From YAML. Of what is wrong the place is told and the rule, never the text: it may be a key."""
    try:
        content = yaml.safe_load(text)
    except Exception as error:  # a value that is not what its tag says is a ValueError, KeyError or AttributeError
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f" in line {mark.line + 1}"
        raise KeysUnreadable(f"{where}: is not YAML{line}") from None
    try:
        keys = _KEYS.validate_python(content)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        rule = first["msg"] if first["type"] != UNKNOWN_KEY else f"unknown key; known: {', '.join(ApiKey.model_fields)}"
        raise KeysUnreadable(": ".join(filter(None, (where, place, rule)))) from None
    if not keys:
        raise KeysUnreadable(f"{where}: has no key, so that nobody could use the service")
    for attribute in ("name", "hash"):
        seen = set()
        for index, key in enumerate(keys):
            value = getattr(key, attribute)
            if value in seen:
                raise KeysUnreadable(f"{where}: {index}.{attribute}: is used twice")
            seen.add(value)
    return keys
