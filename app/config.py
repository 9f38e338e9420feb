"""What a service is told: the `args` of the application in a Serve config file.

Ray ignores keys that it does not know. These models refuse them, and name the field and what it may be.
"""

import re
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from app.autoscaling_config import Autoscaling
from app.strict_model import StrictModel
from engine.config import EngineConfig
from engine.sampling_params import InvalidParameter

CONTROL_CALLS = 64
"""Room in Ray's limit on a replica's calls for its streams (one an ingress) and for short messages."""

REPLICA_WAIT_S = 10.0
"""How long a request waits for replicas that should be there."""

START_WAIT_S = 300.0
"""How long a request waits for a replica to start: a model of some 100 GB takes minutes to load."""

ORIGIN = re.compile(r"https?://(?:[a-z0-9.-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
"""As a browser writes a page's origin."""

KEY_NAME = "[A-Za-z0-9_.-]{1,64}"
"""The pattern of an API key's name, which goes into errors and logs."""


class ModelDeployment(StrictModel):
    """One model and the replicas that serve it."""

    name: str = Field(min_length=1, max_length=200, description="What clients put into `model`.")
    model: str = Field(min_length=1, description="`demo`, a folder, a `.gguf` file or a hub id.")
    engine: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of the engine, all but `model`: max_model_len, max_num_seqs, num_threads, …",
    )
    num_replicas: int = Field(default=1, ge=1, description="Engines that serve it, one a process.")
    autoscaling: Autoscaling | None = Field(
        default=None, description="Let the number of replicas follow the load, in place of num_replicas."
    )
    num_cpus: float = Field(
        default=1.0,
        ge=0,
        description="Logical CPUs that Ray reserves for a replica; rounded down, it bounds the engine's CPU threads.",
    )
    num_gpus: float = Field(
        default=0.0,
        ge=0,
        description="GPUs that Ray reserves for a replica; 0 keeps its engine on the CPU, even where there are GPUs.",
    )
    gpu_memory_gb: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Least memory of the GPUs it runs on. Replicas keep away from kinds that are known to have less, and a "
            "cluster that has no other is told so at once."
        ),
    )
    resources: dict[str, float] = Field(
        default_factory=dict, description="Custom Ray resources of a replica, such as a node type."
    )
    max_queued_requests: int = Field(
        default=256,
        ge=0,
        description="Requests that may wait in a replica beyond those that it runs; more are answered with 429.",
    )
    max_queue_wait_s: float | None = Field(
        default=60.0,
        gt=0,
        description=(
            "Seconds in which a new request must be expected to start; if not, it is answered with 429 at once. Few "
            "clients, and few balancers, wait longer for a first byte. null leaves it to max_queued_requests."
        ),
    )
    max_ongoing_requests: int | None = Field(
        default=None,
        ge=1,
        description=(
            "Ray's own limit on the calls in a replica. By default it is high enough for max_num_seqs and "
            "max_queued_requests, so that the replica decides; a lower value makes requests wait at the ingress."
        ),
    )
    replica_wait_s: float | None = Field(
        default=None,
        ge=0,
        description=(
            "Seconds that a request waits while no replica is up; then 503. By default 10, or 300 where min_replicas "
            "is 0, so that one can start meanwhile."
        ),
    )
    resume_wait_s: float = Field(
        default=120.0,
        ge=0,
        description="Seconds that a request whose replica died waits for another to go on; 0 tries once at least.",
    )
    lease_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds after which a replica aborts the requests of an ingress that does not answer.",
    )
    stall_timeout_s: float | None = Field(
        default=120.0,
        gt=0,
        description=(
            "Seconds in which a replica that has work must end a step; one that does not ends itself and is replaced. "
            "null is never."
        ),
    )
    health_check_period_s: float = Field(
        default=5.0, gt=0, description="Seconds between health checks; the third failure replaces the replica."
    )
    health_check_timeout_s: float = Field(default=30.0, gt=0, description="Seconds a health check may take.")
    graceful_shutdown_timeout_s: float = Field(
        default=120.0, ge=0, description="Seconds that a stopping replica has to finish its requests."
    )

    @field_validator("num_replicas", "autoscaling", mode="before")
    @classmethod
    def _is_not_auto(cls, given: Any) -> Any:
        if given == "auto":
            text = "'auto': for as many replicas as the load needs write `autoscaling: {max_replicas: 4}`"
            raise PydanticCustomError("replicas", "{message}", {"message": text})
        return given

    @model_validator(mode="after")
    def _check_replicas(self) -> "ModelDeployment":
        if self.autoscaling is not None and "num_replicas" in self.model_fields_set:
            text = "num_replicas: autoscaling decides it; leave one of them out"
            raise PydanticCustomError("replicas", "{message}", {"message": text})
        return self

    @property
    def longest_replica_wait_s(self) -> float:
        """What replica_wait_s is, or comes to."""
        if self.replica_wait_s is not None:
            return self.replica_wait_s
        return REPLICA_WAIT_S if self.least_replicas else START_WAIT_S

    @property
    def least_replicas(self) -> int:
        """Replicas that are always there."""
        return self.num_replicas if self.autoscaling is None else self.autoscaling.min_replicas

    @model_validator(mode="after")
    def _check_engine(self) -> "ModelDeployment":
        try:
            self.engine_config()
        except InvalidParameter as error:
            raise PydanticCustomError("engine", "engine: {message}", {"message": str(error)}) from None
        return self

    def engine_config(self) -> EngineConfig:
        """The engine's configuration. Without a GPU of its own it has device `cpu`.

        Raises:
            InvalidParameter: an argument is unknown or out of range, or asks for a GPU that is not reserved.
        """
        if "model" in self.engine:
            raise InvalidParameter("model", "model: belongs beside `engine`, not into it")
        config = EngineConfig.from_args(self.model, self.engine)
        if self.num_gpus == 0 and config.device == "cuda":
            raise InvalidParameter.of("device", config.device, "needs `num_gpus: 1` beside `engine`; num_gpus is 0")
        if config.device != "auto":
            return config
        # Ray hides no GPU from a replica that reserves none, and one that is reserved must not be left idle because
        # PyTorch cannot see it.
        device: Literal["cpu", "cuda"] = "cuda" if self.num_gpus > 0 else "cpu"
        try:
            return replace(config, device=device)
        except InvalidParameter as error:
            rule = f"with num_gpus={self.num_gpus:g} the engine's device is {device!r}"
            raise InvalidParameter(error.param, f"{error}; {rule}") from None

    @property
    def deployment_name(self) -> str:
        """The Serve deployment's name: no character that Ray or a metrics page minds."""
        return "model-" + re.sub(r"[^A-Za-z0-9_.-]+", "-", self.name)

    @property
    def ongoing_limit(self) -> int:
        """Ray's max_ongoing_requests."""
        if self.max_ongoing_requests is not None:
            return self.max_ongoing_requests + CONTROL_CALLS
        return self.engine_config().max_num_seqs + self.max_queued_requests + CONTROL_CALLS


class Ingress(StrictModel):
    """The processes that speak HTTP and gRPC: authorise, tokenize, route, detokenize."""

    num_replicas: int = Field(default=1, ge=1, description="Ingress processes.")
    num_cpus: float = Field(
        default=0.0, ge=0, description="Logical CPUs that Ray reserves for each; 0 lets it run beside the engines."
    )
    max_ongoing_requests: int = Field(
        default=1000, ge=1, description="HTTP requests and gRPC calls together that one answers at a time."
    )
    max_queued_requests: int = Field(
        default=1000,
        ge=1,
        description=(
            "Requests that may wait in each of Serve's proxies, those over gRPC counted apart, while all ingresses "
            "have max_ongoing_requests or none is up; more are answered with 503. Those that come at the same moment "
            "all wait for one, so keep it above what clients send at once."
        ),
    )
    max_body_bytes: int = Field(default=8 << 20, ge=1, description="A longer body is refused with 413.")
    body_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Seconds in which a request's body must have arrived; then 408, and the connection is closed.",
    )
    max_choices: int = Field(default=256, ge=1, description="Most completions of one request: prompts times n.")
    max_logprobs: int = Field(
        default=1 << 17,
        ge=1,
        description=(
            "Most log-probabilities in one answer, of its outputs (choices, times max_tokens, times one and the "
            "alternatives) and again of its prompts. A thousand take some 10 ms of this process and 80 KB."
        ),
    )
    request_timeout_s: float | None = Field(
        default=None,
        gt=0,
        description=(
            "Seconds from a request's arrival at an ingress until it is given up with 504, if it still runs; null is "
            "never."
        ),
    )
    idle_timeout_s: float | None = Field(
        default=600.0,
        gt=0,
        description=(
            "Seconds without a token after which a request is given up with 504, in a queue or between two tokens; "
            "longer than the models' resume_wait_s, in which a request waits for another replica. null is never."
        ),
    )
    cors_origins: list[str] = Field(
        default_factory=list,
        description=(
            "Web pages whose scripts may call the service, by their origins (`https://chat.example.com`); `*` is all. "
            "None by default: browsers then keep the answers from every other page."
        ),
    )
    grpc_clients: Literal["local", "all"] = Field(
        default="local",
        description=(
            "Whose gRPC calls are answered: `local` is programs on the machine of the proxy that they call. Serve's "
            "gRPC proxy listens on all interfaces, whatever `http_options` says, and does not know TLS."
        ),
    )
    heartbeat_s: float = Field(
        default=15.0, gt=0, description="Seconds between SSE comments on a stream that has nothing to say yet."
    )
    coalesce_s: float = Field(
        default=0.08,
        ge=0,
        description=(
            "Most seconds that a replica gathers tokens under load, those between a request's first and its last; an "
            "ingress may add half as many."
        ),
    )
    metrics_timeout_s: float = Field(
        default=2.0,
        gt=0,
        description=(
            "Seconds that /metrics waits for other processes. A replica that is later is left out; if an ingress is, "
            "so are all ingresses but the one that is asked."
        ),
    )
    metrics_max_age_s: float = Field(
        default=1.0, ge=0, description="Seconds for which whoever asks for /metrics gets the page that is there."
    )
    health_check_period_s: float = Field(default=5.0, gt=0, description="Seconds between health checks.")
    health_check_timeout_s: float = Field(default=30.0, gt=0, description="Seconds a health check may take.")
    graceful_shutdown_timeout_s: float = Field(
        default=120.0, ge=0, description="Seconds that a stopping ingress has to finish its requests."
    )
    access_log: bool = Field(default=True, description="Log one line a request.")

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, origins: list[str]) -> list[str]:
        for origin in origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                text = f"'{origin}': must be `*`, or http:// or https:// and a host in lower case, without a path"
                raise PydanticCustomError("origin", "{message}", {"message": text})
        return origins


class ApiKey(StrictModel):
    """One client's key, and what it may ask for. Limits that are null do not hold."""

    name: str = Field(pattern=f"^{KEY_NAME}$", description="Whose it is; errors name it.")
    hash: str = Field(
        pattern="^sha256:[0-9a-f]{64}$", repr=False, description="Of the key, as `manta keys new` prints it."
    )
    requests_per_minute: float | None = Field(
        default=None, gt=0, description="Requests of any kind, but for /health, /ready, /version and /metrics."
    )
    tokens_per_minute: float | None = Field(default=None, gt=0, description="Tokens of prompts and of output together.")
    concurrent_requests: int | None = Field(
        default=None,
        ge=1,
        description="Requests that may run at a time; one for several choices (prompts times n) counts as so many.",
    )
    priority: int = Field(
        default=0,
        description=(
            "Of its requests, where an engine's scheduling_policy is `priority`; a lower number runs first. A "
            "request may ask for a higher one."
        ),
    )


class Access(StrictModel):
    """Who may use the service: exactly one of the three must be said."""

    open: bool = Field(default=False, description="Everyone who reaches its port, without a key.")
    keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="Holders of the keys in this YAML file, a list of ApiKey; each ingress reads it when it starts.",
    )
    keys_env: str | None = Field(
        default=None,
        min_length=1,
        description="The same, the list being in this environment variable of the ingresses.",
    )
    isolate_prefix_cache: bool = Field(
        default=False,
        description=(
            "Whether a prompt shares cached prefixes with prompts of the same key alone. If not, a client can learn "
            "from `cached_tokens` and from the time to a first token that another key has sent a prefix."
        ),
    )

    @model_validator(mode="after")
    def _one_of_three(self) -> "Access":
        if self.open + (self.keys_file is not None) + (self.keys_env is not None) != 1:
            text = "say who may use the service: either `keys_file`, or `keys_env`, or `open: true` for everyone"
            raise PydanticCustomError("access", "{message}", {"message": text})
        if self.open and self.isolate_prefix_cache:
            text = "isolate_prefix_cache: keys tell clients apart, and `open: true` knows none"
            raise PydanticCustomError("access", "{message}", {"message": text})
        return self


class ServiceConfig(StrictModel):
    """Everything that `app.main:build` takes."""

    models: list[ModelDeployment] = Field(min_length=1, description="What is served, the default model first.")
    access: Access = Field(description="Who may use it; nobody is let in unsaid.")
    ingress: Ingress = Field(default_factory=Ingress, description="The side that clients see.")
    cluster_autoscales: bool = Field(
        default=False,
        description="Whether nodes are added when Ray asks for them; if not, a service that does not fit is refused.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Of all processes of the service."
    )

    @model_validator(mode="after")
    def _resumes_before_it_gives_up(self) -> "ServiceConfig":
        idle_s = self.ingress.idle_timeout_s
        for model in self.models:
            waits = {"resume_wait_s": model.resume_wait_s}
            if model.least_replicas == 0:
                waits["replica_wait_s"] = model.longest_replica_wait_s
            for name, wait_s in waits.items():
                if idle_s is not None and idle_s <= wait_s:
                    text = (
                        f"ingress.idle_timeout_s={idle_s:g}: must be longer than {name} of model '{model.name}', which "
                        f"is {wait_s:g}: a request that waits for a replica would be given up"
                    )
                    raise PydanticCustomError("idle_timeout", "{message}", {"message": text})
        return self

    @model_validator(mode="before")
    @classmethod
    def _access_has_no_default(cls, given: Any) -> Any:
        """An absent `access` is refused in the words in which an empty one is."""
        return {"access": {}, **given} if isinstance(given, dict) else given

    @field_validator("models")
    @classmethod
    def _distinct_names(cls, models: list[ModelDeployment]) -> list[ModelDeployment]:
        for attribute in ("name", "deployment_name"):
            seen: set[str] = set()
            for model in models:
                value = getattr(model, attribute)
                if value in seen:
                    text = f"name '{model.name}' is used twice, or differs from another in special characters only"
                    raise PydanticCustomError("duplicate_name", "{message}", {"message": text})
                seen.add(value)
        return models
