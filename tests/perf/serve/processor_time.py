"""Which of a service's processes used the processor."""

from __future__ import annotations

from collections import Counter

import psutil

PARTS = {
    "ray::ServeReplica:manta:model-demo": "replica",
    "ray::ServeReplica:manta:ingress": "ingress",
    "ray::ProxyActor": "proxy",
    "ray::HAProxy": "proxy",
    "ray::ServeController": "controller",
    "haproxy": "HAProxy",
    "gcs_server": "GCS",
    "raylet/raylet": "raylet",
    "vllm": "vLLM",
    "VLLM": "vLLM",
}
"""What is found in a process's command, to what it is; all others are the `rest`, which is mostly Ray's dashboard."""

Times = dict[tuple[int, float], tuple[str, float]]
"""A process's id and when it began, to its part and the seconds of processor time that it has used."""


def times(root: int) -> Times:
    """Of this process, which is the client, and of the process `root` and all that descend from it.

    Raises:
        psutil.NoSuchProcess: `root` has ended.
    """
    own = psutil.Process()
    found: Times = {(own.pid, own.create_time()): ("client", _seconds(own))}
    first = psutil.Process(root)
    for process in (first, *first.children(recursive=True)):
        try:
            found[process.pid, process.create_time()] = (_part(process), _seconds(process))
        except psutil.Error:  # it has just ended
            continue
    return found


def between(before: Times, after: Times, tokens: int) -> dict[str, float]:
    """Microseconds a token, by part; those of processes that ended in between are lost."""
    seconds: Counter[str] = Counter()
    for process, (part, until) in after.items():
        seconds[part] += until - before.get(process, (part, 0.0))[1]
    return {part: 1e6 * each / tokens for part, each in seconds.most_common()}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _part(process: psutil.Process) -> str:
    command = " ".join(process.cmdline())
    return next((part for word, part in PARTS.items() if word in command), "rest")
