"""Manta's policy beside Ray Serve's at its best setting and beside a fleet of constant size."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from multiprocessing import active_children, get_context, parent_process
from typing import Any, Literal

import numpy as np
from ray.serve.config import AutoscalingConfig
from tqdm import tqdm

from app.autoscaling_config import Autoscaling
from app.simulation.autoscaling import Point, ScalingSetup, figures_of, run, setup_for
from app.simulation.demand import ReplicaClass, scaled_requests, superposed
from app.simulation.requests import SCALE
from app.simulation.scaling_policies import MantaPolicy, ScalingPolicy, fixed, ray_default
from app.traces import MOONCAKE_BLOCK, TraceRequest
from engine import EngineRequest

MOST_REPLICAS = 4
"""Times the mean: the upper bound of both policies; the lower one is 1."""

LARGEST_FIXED = 2
"""Times the mean: fleets of constant size up to that are run from the start, larger ones when it takes them."""

AS_GOOD = 0.001
"""A setting of Ray's whose attainment is so near to that of the best one is as good."""

NOT_OVERLOADED = 0.95
"""The attainment of a fleet that is large enough, and whose replicas have a sensible number of requests."""

SHARES = (0.2, 0.3, 0.45, 0.65, 0.9, 1.2)
"""Of that number: what is tried as target_ongoing_requests."""

BETWEEN = (0.85, 1.2)
"""Times the best of these: what is tried then."""

RAY_SETTINGS = ("target_ongoing_requests", "downscale_delay_s", "upscaling_factor", "downscaling_factor")
"""What is tried, by Ray's names."""

DOWNSCALE_DELAYS_S = (60.0, 300.0)
FACTORS = ((1.0, 1.0), (0.3, 0.1))
"""Of the way to what the requests would need, up and down: the whole way at once, or damped."""

DEMAND_S = 60.0
"""Over which the mean demand is shown."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What every policy gets.

    Attributes:
        copies: how many times the trace comes.
        mean_replicas: which these keep busy, about.
        startup_s, ttft_target_s, tpot_target_s: see `app.simulation.autoscaling.ScalingSetup`.
    """

    trace: tuple[TraceRequest, ...]
    copies: float
    replica: ReplicaClass
    mean_replicas: float
    startup_s: float
    ttft_target_s: float
    tpot_target_s: float
    seed: int

    @property
    def bounds(self) -> dict[str, int]:
        return {"min_replicas": 1, "max_replicas": math.ceil(MOST_REPLICAS * self.mean_replicas)}

    @property
    def initial_replicas(self) -> int:
        return math.ceil(self.mean_replicas)

    def requests(self) -> list[TraceRequest]:
        return superposed(self.trace, self.copies, self.seed)

    def setup(self, requests: Iterable[EngineRequest], initial_replicas: int) -> ScalingSetup:
        return setup_for(
            requests,
            self.replica,
            startup_s=self.startup_s,
            initial_replicas=initial_replicas,
            ttft_target_s=self.ttft_target_s,
            tpot_target_s=self.tpot_target_s,
        )

    def demand_over_time(self) -> tuple[list[float], list[float]]:
        """Seconds, and how many replicas what arrives in the DEMAND_S after them keeps busy."""
        requests = self.requests()
        times = [request.arrival_s for request in requests]
        edges = np.arange(0.0, times[-1] + 2 * DEMAND_S, DEMAND_S)
        sums, _ = np.histogram(times, edges, weights=[self.replica.demand([request]) for request in requests])
        return edges[:-1].tolist(), (sums / DEMAND_S).tolist()

    def described(self) -> dict[str, Any]:
        """For a report; seconds are the trace's."""
        cost = self.replica.cost
        return {
            "class": self.replica.name,
            "step_s": cost.step_s,
            "token_s": cost.token_s,
            "read_token_s": cost.block_s / MOONCAKE_BLOCK,
            "kv_tokens": self.replica.num_kv_blocks * MOONCAKE_BLOCK,
            "max_num_batched_tokens": self.replica.max_num_batched_tokens,
            "requests": len(self.requests()),
            "copies": self.copies,
            "lengths_divided_by": SCALE,
            "initial_replicas": self.initial_replicas,
            **self.bounds,
        }


@dataclass(frozen=True, slots=True)
class Settings:
    """A policy, and what it is told beside the bounds."""

    policy: Literal["manta", "ray_default", "fixed"]
    values: Mapping[str, float]

    def make(self, scenario: Scenario, setup: ScalingSetup) -> ScalingPolicy:
        match self.policy:
            case "fixed":
                return fixed(setup.initial_replicas)
            case "ray_default":
                return ray_default(AutoscalingConfig.model_validate({**scenario.bounds, **self.values}))
            case "manta":
                goals = Autoscaling.model_validate({**scenario.bounds, **self.values}).goals(setup.config)
                return MantaPolicy(goals, **scenario.bounds)


@dataclass(frozen=True, slots=True)
class Trial:
    """What a policy came to with some settings; figures as of `app.simulation.autoscaling.figures_of`."""

    settings: Settings
    figures: Mapping[str, Any]
    timeline: Sequence[Point]

    @property
    def attainment(self) -> float:
        return self.figures["slo_attainment"]

    @property
    def replica_hours(self) -> float:
        return self.figures["replica_hours"]

    @property
    def mean_ongoing(self) -> float:
        """Requests in the fleet."""
        return sum(point.ongoing for point in self.timeline) / len(self.timeline)

    def described(self) -> dict[str, Any]:
        return {**self.figures, "settings": dict(self.settings.values)}


@dataclass(frozen=True, slots=True)
class Comparison:
    """
    Attributes:
        ray_default, fixed: all that was tried.
    """

    manta: Trial
    ray_default: Sequence[Trial]
    fixed: Sequence[Trial]

    @property
    def best(self) -> dict[str, Trial]:
        """One of each policy: Ray's best, and the smallest fleet of constant size that is as good, if one is."""
        ray = best_of(self.ray_default)
        reaching = [trial for trial in self.fixed if trial.attainment >= ray.attainment]
        smallest = min(reaching, key=lambda trial: trial.replica_hours) if reaching else self.fixed[-1]
        return {"manta": self.manta, "ray_default": ray, "fixed": smallest}

    @property
    def saving(self) -> float:
        """The share of the replica-hours of Ray's best that Manta does without."""
        return 1 - self.manta.replica_hours / best_of(self.ray_default).replica_hours

    @property
    def ray_as_good(self) -> Trial | None:
        """Of Ray's settings that reach Manta's attainment, the one with the fewest replica-hours; None if none does."""
        reaching = [trial for trial in self.ray_default if trial.attainment >= self.manta.attainment]
        return min(reaching, key=lambda trial: trial.replica_hours, default=None)

    def described(self) -> dict[str, Any]:
        best = self.best
        return {
            "policies": {name: trial.described() for name, trial in best.items()},
            "saving": self.saving,
            "ray_default_as_good": self.ray_as_good.described() if self.ray_as_good else None,
            "ray_default_sweep": [trial.described() for trial in self.ray_default],
            "fixed_sweep": [trial.described() for trial in self.fixed],
            "timelines": {name: [list(point) for point in trial.timeline] for name, trial in best.items()},
        }


def best_of(trials: Iterable[Trial]) -> Trial:
    """The one with the fewest replica-hours among those whose attainment is as good as the best."""
    trials = list(trials)
    best = max(trial.attainment for trial in trials)
    return min((t for t in trials if t.attainment >= best - AS_GOOD), key=lambda trial: trial.replica_hours)


def compare(scenario: Scenario, processes: int) -> Comparison:
    """Runs all of it, so many at a time."""
    targets = {"ttft_target_s": scenario.ttft_target_s, "tpot_target_s": scenario.tpot_target_s}
    sizes = range(scenario.initial_replicas, math.ceil(LARGEST_FIXED * scenario.mean_replicas) + 1)
    num_trials = 1 + len(sizes) + len(SHARES) * len(DOWNSCALE_DELAYS_S) * len(FACTORS) + len(BETWEEN)
    with _trials(scenario, processes, num_trials) as run_all:
        manta, *constant = run_all([Settings("manta", targets), *(_of_size(size) for size in sizes)])
        usual = _usual_requests(constant)
        grid = product(SHARES, DOWNSCALE_DELAYS_S, FACTORS)
        swept = run_all([_of_ray(usual * share, down, *factors) for share, down, factors in grid])
        found = best_of(swept).settings.values
        target, *others = (found[name] for name in RAY_SETTINGS)
        swept += run_all([_of_ray(target * factor, *others) for factor in BETWEEN])
        goal = best_of(swept).attainment
        while constant[0].attainment >= goal and (size := _size(constant[0])) > 1:
            constant[:0] = run_all([_of_size(size - 1)])
        while all(trial.attainment < goal for trial in constant):
            size = _size(constant[-1])
            if size >= scenario.bounds["max_replicas"]:
                break
            constant += run_all([_of_size(size + 1)])
    return Comparison(manta, swept, constant)


def try_settings(scenario: Scenario, settings: Settings) -> Trial:
    """One run. Deterministic."""
    requests = _engine_requests(scenario)
    setup = scenario.setup(requests, int(settings.values.get("replicas", scenario.initial_replicas)))
    result = run(requests, setup, settings.make(scenario, setup))
    return Trial(settings, figures_of(result, setup), result.timeline)


def _of_ray(target: float, *others: float) -> Settings:
    return Settings("ray_default", dict(zip(RAY_SETTINGS, (round(target, 2), *others), strict=True)))


def _of_size(replicas: int) -> Settings:
    return Settings("fixed", {"replicas": replicas})


def _size(trial: Trial) -> int:
    return int(trial.settings.values["replicas"])


def _usual_requests(constant: Sequence[Trial]) -> float:
    """What a replica of the smallest fleet that is not overloaded has."""
    trial = next((each for each in constant if each.attainment >= NOT_OVERLOADED), constant[-1])
    return max(trial.mean_ongoing / _size(trial), 1.0)


@lru_cache(maxsize=1)
def _engine_requests(scenario: Scenario) -> list[EngineRequest]:
    """Made once in each process."""
    return scaled_requests(scenario.requests())


@contextmanager
def _trials(scenario: Scenario, processes: int, total: int) -> Iterator[Callable[[Sequence[Settings]], list[Trial]]]:
    """What runs several settings, in this process or in others, behind a bar that expects so many in all."""
    one = partial(try_settings, scenario)
    with tqdm(total=total, desc="runs", disable=not sys.stderr.isatty()) as bar:

        def all_of(settings: Sequence[Settings], trials: Callable[..., Iterator[Trial]]) -> list[Trial]:
            bar.total = max(total, bar.n + len(settings))
            results = []
            for trial in trials(one, settings):
                results.append(trial)
                bar.update()
            return results

        if processes == 1:
            yield partial(all_of, trials=map)
            return
        with ProcessPoolExecutor(processes, get_context("spawn"), end_with_parent) as pool:
            try:
                yield partial(all_of, trials=partial(_submitted, pool))
            except BaseException:
                for worker in active_children():
                    worker.terminate()  # or the pool would wait for all that it was given
                raise


def _submitted(
    pool: ProcessPoolExecutor, one: Callable[[Settings], Trial], settings: Iterable[Settings]
) -> Iterator[Trial]:
    """Like pool.map, which cancels what is left when it is interrupted: a pool without workers then waits for ever."""
    with _ctrl_c_later():  # the first call starts the workers
        futures = [pool.submit(one, each) for each in settings]
    for future in futures:
        yield future.result()


@contextmanager
def _ctrl_c_later() -> Iterator[None]:
    """Ctrl-C is obeyed at the end of this, and never by a process that is started in it."""
    pressed: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: pressed.append(number))
    # What is blocked here is blocked in a new process, too; here it may still come to another thread.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, handler)
    if pressed:
        raise KeyboardInterrupt


def end_with_parent() -> None:
    """Ends this worker when the process that made it does: killed by a signal, it tells its workers nothing."""

    def watch() -> None:
        if (parent := parent_process()) is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
