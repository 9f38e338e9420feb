"""What all parts of a service's configuration have in common."""

from difflib import get_close_matches
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

UNKNOWN_KEY = "unknown_key"
"""The type of the errors that show a key of what was given."""


class StrictModel(BaseModel):
    """Refuses unknown keys, saying which known one may have been meant.

    Attributes:
        HINTS: what to say of keys that others know by this name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False)

    HINTS: ClassVar[dict[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _no_unknown_keys(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for key in given:
                if key not in cls.model_fields:
                    near = get_close_matches(str(key), cls.model_fields, n=1)
                    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(cls.model_fields)}"
                    text = f"unknown key '{key}'; {cls.HINTS.get(str(key), hint)}"
                    raise PydanticCustomError(UNKNOWN_KEY, "{message}", {"message": text})
        return given
