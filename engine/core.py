"""The engine's loop body: schedule → execute → update, one step after another."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from engine.config import EngineConfig, ModelConfig
from engine.executor.uniproc import UniProcExecutor
from engine.hub import load_model_config
from engine.kv_cache.block_hash import root_hash
from engine.kv_cache.events import BlockStored, KVEvent
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.metrics import EngineMetrics
from engine.outputs import EngineLoad, EngineOutput
from engine.protocols import Executor
from engine.request import Clock, EngineRequest, Request
from engine.sampling_params import InvalidParameter
from engine.scheduler import Scheduler
from engine.scheduler.results import last_output

logger = logging.getLogger(__name__)

MAX_FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class CoreStep:
    """What a step gave.

    Attributes:
        outputs: one for each request that has news.
        kv_events: how the set of cached blocks changed, in order.
        load: after the step.
    """

    outputs: list[EngineOutput]
    kv_events: list[KVEvent]
    load: EngineLoad


class EngineCore:
    """Scheduler, KV blocks and executor of one replica. Tokens in, tokens out.

    All methods are called on one thread. The GIL is released in the executor's tensor work and nowhere else.

    Raises:
        InvalidParameter: a request of max_model_len would not fit the KV blocks that there is memory for.
    """

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, executor: Executor, *, clock: Clock = time.time
    ) -> None:
        self.config = config
        self.model_config = model_config
        self._executor = executor
        self._clock = clock
        num_blocks = _num_kv_blocks(config, model_config, executor)
        executor.allocate_kv_cache(num_blocks)
        self._kv_cache = KVCacheManager(
            num_blocks,
            block_size=config.block_size,
            root=root_hash(model_config, config.block_size),
            enable_prefix_caching=config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            self._kv_cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=model_config.max_model_len,
            policy=config.scheduling_policy,
            clock=clock,
        )
        self.metrics = EngineMetrics()
        self.metrics.observe_load(self._scheduler.load())
        self._aborted: list[EngineOutput] = []
        self._failures_in_a_row = 0

    @classmethod
    def from_config(cls, config: EngineConfig, *, clock: Clock = time.time) -> EngineCore:
        """Finds the model, loads it and reserves the KV blocks."""
        model_config = load_model_config(config)
        return cls(config, model_config, UniProcExecutor(config, model_config), clock=clock)

    def add_request(self, spec: EngineRequest) -> None:
        """Queues a request.

        Raises:
            InvalidParameter: this engine cannot run it.
            ValueError: its id is in use.
        """
        self.check_request(spec)
        self._scheduler.add(Request.of(spec, self._clock()))
        self.metrics.observe_start(len(spec.prompt_token_ids))

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests and frees their blocks at once; unknown ids are ignored. The next step reports the end."""
        for request_id in request_ids:
            request = self._scheduler.abort(request_id)
            if request is not None:
                self._aborted.append(last_output(request, None))

    def has_work(self) -> bool:
        """Whether a step would do or report something."""
        return bool(self._aborted) or self._scheduler.has_unfinished()

    def step(self) -> CoreStep:
        """Runs one step. One that fails costs the requests that were in it, and no others.

        Raises:
            Exception: of the executor, at the third failure in a row. The engine is of no more use then.
        """
        outputs, self._aborted = self._aborted, []
        if self._scheduler.has_unfinished():
            outputs += self._run()
        load = self._scheduler.load()
        self.metrics.observe_load(load)
        self.metrics.observe_step(outputs, **self._scheduler.take_counts()._asdict())
        if self.config.debug_integrity and not self._scheduler.has_unfinished():
            self.check_integrity()
        return CoreStep(outputs, self._scheduler.take_events(), load)

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached blocks; False, and nothing done, while requests run."""
        return self._kv_cache.reset_prefix_cache()

    def kv_snapshot(self) -> list[BlockStored]:
        """The blocks that are cached now, in no particular order."""
        return self._kv_cache.snapshot()

    def check_integrity(self) -> None:
        """Checks all bookkeeping; AssertionError where it contradicts itself."""
        self._scheduler.check_integrity()

    def check_request(self, spec: EngineRequest) -> None:
        """Refuses what this engine cannot run. Reads constants only, so any thread may call it.

        Raises:
            InvalidParameter: the prompt is empty or does not fit, a token is none of the model's, or the request stands
                for several.
        """
        limit = self.model_config.max_model_len
        num_tokens = len(spec.prompt_token_ids) + len(spec.output_token_ids)
        if not spec.prompt_token_ids:
            raise InvalidParameter("prompt", "prompt: must have at least one token")
        if num_tokens >= limit:
            raise InvalidParameter("prompt", f"prompt has {num_tokens:,} tokens; the model's context is {limit:,}")
        # One such token would fail the step of all requests beside it.
        size = self.model_config.vocab_size
        for token_ids in (spec.prompt_token_ids, spec.output_token_ids):
            if token_ids and not (min(token_ids) >= 0 and max(token_ids) < size):
                raise InvalidParameter(
                    "prompt", f"prompt has token ids beyond the model's, which are 0 to {size - 1:,}"
                )
        if spec.params.n != 1:
            raise InvalidParameter.of("n", spec.params.n, "an engine request is one sequence; the Processor splits n")

    def shutdown(self) -> None:
        """Gives the executor's memory back. May be called twice."""
        self._executor.shutdown()

    def _run(self) -> list[EngineOutput]:
        work = self._scheduler.schedule()
        try:
            sampled = self._executor.execute(work)
        except Exception as error:
            self._failures_in_a_row += 1
            logger.exception("step_failed requests=%d in_a_row=%d", len(work.steps), self._failures_in_a_row)
            if self._failures_in_a_row >= MAX_FAILURES_IN_A_ROW:
                raise
            self._executor.reset()
            return self._scheduler.fail_step(work, f"a step of the engine failed: {error}")
        except BaseException:
            # Ctrl-C: nobody knows how far the step came, so that both sides must forget its requests.
            self._executor.reset()
            self._aborted += self._scheduler.fail_step(work, "the step was interrupted")
            raise
        self._failures_in_a_row = 0
        return self._scheduler.update(work, sampled)


def _num_kv_blocks(config: EngineConfig, model_config: ModelConfig, executor: Executor) -> int:
    fitting = executor.kv_blocks_that_fit() if config.num_kv_blocks is None else config.num_kv_blocks
    needed = -(-model_config.max_model_len // config.block_size)
    if fitting < needed:
        room = fitting * config.block_size
        needed_bytes = needed * model_config.kv_block_bytes(config.block_size)
        raise InvalidParameter(
            "max_model_len",
            f"max_model_len={model_config.max_model_len:,}: one request of that length needs {needed:,} KV blocks "
            f"({needed_bytes:,} bytes) and there is room for {fitting:,}; set max_model_len to {room:,} or less, or "
            f"raise {'num_kv_blocks' if config.num_kv_blocks is not None else 'kv_cache_memory_bytes'} "
            "(on a GPU also gpu_memory_utilization)",
        )
    return fitting
