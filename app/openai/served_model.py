"""What the HTTP interface serves, and how much of it one client may ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.transport import EngineClient
    from engine.config import ModelConfig
    from engine.processor import Processor
    from engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One model under the name that clients ask for.

    Attributes:
        created: seconds since the epoch, as /v1/models shows it.
    """

    name: str
    model_config: ModelConfig
    processor: Processor
    tokenizer: Tokenizer
    client: EngineClient
    created: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on one HTTP request.

    Attributes:
        max_body_bytes: a longer body is refused with 413 before it is read whole.
        body_timeout: seconds in which a body must have arrived; then 408, see body.BodyDeadline.
        max_choices: prompts times n.
        max_logprobs: that an answer may have of its outputs, and again of its prompts.
        request_timeout: seconds until a request that still runs is given up with 504; None is never.
        idle_timeout: seconds without a token after which a request is given up with 504; None is never.
        cors_origins: web pages whose scripts may call; `*` is all.
        heartbeat: seconds between SSE comments on a stream that has nothing to say yet.
        coalesce: twice the most seconds that a token after the first waits for others of its stream here, when many
            streams are open; in its replica it may have waited as long as this.
    """

    max_body_bytes: int = 8 << 20
    body_timeout: float = 30.0
    max_choices: int = 256
    max_logprobs: int = 1 << 17
    request_timeout: float | None = None
    idle_timeout: float | None = None
    cors_origins: Sequence[str] = ()
    heartbeat: float = 15.0
    coalesce: float = 0.08
