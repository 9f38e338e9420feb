"""What a configuration says of autoscaling."""

from typing import ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.autoscaling import Goals
from app.strict_model import StrictModel
from engine.config import EngineConfig


class Autoscaling(StrictModel):
    """How many replicas there are, by what their load needs (app/autoscaling.py)."""

    HINTS: ClassVar[dict[str, str]] = {
        "target_ongoing_requests": (
            "how many requests a replica can have is measured; say by ttft_target_s and tpot_target_s what is too slow"
        ),
        "upscale_delay_s": "replicas are added as soon as they are needed",
        "downscale_to_zero_delay_s": "downscale_delay_s holds for the last replica, too",
        "initial_replicas": "it starts with min_replicas",
    } | dict.fromkeys(
        ("upscaling_factor", "downscaling_factor", "smoothing_factor"),
        "it goes to the number that is needed at once; target_utilization says how much of a replica is used",
    )

    min_replicas: int = Field(
        default=1, ge=0, description="Replicas that are always there; with 0 the first request waits for one to start."
    )
    max_replicas: int = Field(ge=1, description="Most replicas.")
    ttft_target_s: float = Field(
        default=2.0, gt=0, description="Seconds from a request's arrival at a replica to its first token that are good."
    )
    tpot_target_s: float = Field(
        default=0.1, gt=0, description="Seconds between two tokens of a request that are good."
    )
    target_utilization: float = Field(
        default=0.8,
        gt=0,
        le=1,
        description=(
            "Share of what replicas can do that is to be used when the load is as high as can be expected. Lower is "
            "faster in bursts, and costs more replicas."
        ),
    )
    queue_drain_s: float = Field(
        default=10.0,
        gt=0,
        description=(
            "Seconds in which the prompts that wait are to be worked off; lower adds more replicas in a burst."
        ),
    )
    downscale_delay_s: float = Field(
        default=300.0,
        ge=0,
        description=(
            "Seconds in which a replica was not needed at any time until it is taken away; several times as long as "
            "one takes to start."
        ),
    )

    @model_validator(mode="after")
    def _check_order(self) -> "Autoscaling":
        if self.max_replicas < self.min_replicas:
            text = f"max_replicas={self.max_replicas}: must be at least min_replicas, which is {self.min_replicas}"
            raise PydanticCustomError("replicas", "{message}", {"message": text})
        return self

    def goals(self, engine: EngineConfig) -> Goals:
        """What the policy aims at with replicas of that engine."""
        return Goals(
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            block_size=engine.block_size,
            **self.model_dump(exclude={"min_replicas", "max_replicas"}),
        )
