"""Draws a benchmark's figures. Needs matplotlib, which is no dependency of Manta's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.sampling_params import InvalidParameter

FORMATS = (".png", ".svg", ".pdf")


class Panel(NamedTuple):
    """Speeds by one size.

    Attributes:
        size: its name, for the axis.
        series: a line's name to its tokens/s, one of each size.
    """

    size: str
    sizes: Sequence[int]
    series: Mapping[str, Sequence[float]]


def check_available(path: Path) -> None:
    """
    Raises:
        InvalidParameter: matplotlib is not there, or does not write such files.
    """
    if path.suffix not in FORMATS:
        raise InvalidParameter.of("plot", str(path), f"must end in one of {', '.join(FORMATS)}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise InvalidParameter("plot", "--plot needs matplotlib, which the extra `bench` brings") from None


def plot_timeline(path: Path, title: str, seconds: Sequence[float], series: Mapping[str, Sequence[float]]) -> None:
    """One line a series over the seconds of a run, each with an axis of its own below the other."""
    figure, axes = _figure(len(series), title)
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        axis.plot(seconds, values, linewidth=1)
        axis.set_ylabel(name)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds")
    _save(figure, path)


def plot_distributions(path: Path, title: str, series: Mapping[str, Sequence[float]]) -> None:
    """One panel a series: which share of the values is below each."""
    figure, axes = _figure(len(series), title)
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        ordered = sorted(values)
        axis.step([0, *ordered], [100 * rank / len(ordered) for rank in range(len(ordered) + 1)], where="post")
        axis.set_xlabel(name)
        axis.set_ylabel("% of requests")
        axis.set_xlim(left=0)
    _save(figure, path)


def plot_growth(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """What becomes of speeds as something doubles, and doubles again."""
    figure, axes = _figure(len(panels), title)
    for axis, panel in zip(axes, panels, strict=True):
        for name, values in panel.series.items():
            axis.plot(panel.sizes, values, marker="o", markersize=4, linewidth=1, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(panel.sizes, [f"{size:,}" for size in panel.sizes])
        axis.set_xlabel(panel.size)
        axis.set_ylabel("tokens/s")
        axis.set_ylim(0, 1.1 * max(map(max, panel.series.values())))
        axis.grid(linewidth=0.3)
        axis.legend(loc="best", fontsize="small")
    _save(figure, path)


def plot_parts(path: Path, title: str, unit: str, bars: Mapping[str, Mapping[str, float]]) -> None:
    """One bar a name, made of its parts."""
    figure, (axis,) = _figure(1, title)
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    left = [0.0] * len(bars)
    for part in parts:
        widths = [bar.get(part, 0.0) for bar in bars.values()]
        axis.barh(list(bars), widths, left=left, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axis.invert_yaxis()
    axis.set_xlabel(unit)
    axis.legend(loc="best", fontsize="small")
    _save(figure, path)


def plot_routing(
    path: Path, title: str, ratios: Mapping[str, float], ideal: float, times_ms: Mapping[str, Sequence[float]]
) -> None:
    """Each router's hit ratio beside the ideal one, and how many of its requests had their first token by when."""
    figure, (bars, lines) = _figure(2, title)
    bars.barh(list(ratios), list(ratios.values()))
    bars.axvline(ideal, color="black", linestyle="--", linewidth=1, label="ideal")
    bars.invert_yaxis()
    bars.set_xlabel("prefix hit ratio")
    bars.legend(loc="best", fontsize="small")
    for name, times in times_ms.items():
        shares = [100 * rank / len(times) for rank in range(1, len(times) + 1)]
        lines.step(sorted(times), shares, where="post", linewidth=1, label=name)
    lines.set_xscale("log")
    lines.set_xlabel("time to first token, ms")
    lines.set_ylabel("% of requests")
    lines.grid(linewidth=0.3)
    lines.legend(loc="best", fontsize="small")
    _save(figure, path)


def plot_replicas(
    path: Path,
    title: str,
    demand: tuple[Sequence[float], Sequence[float]],
    series: Mapping[str, tuple[Sequence[float], Sequence[int]]],
) -> None:
    """One panel for each policy: how many replicas there are, over seconds, beside how many have enough to do."""
    figure, axes = _figure(len(series), title)
    most = max(*demand[1], *(count for _, counts in series.values() for count in counts))
    for axis, (name, (seconds, counts)) in zip(axes, series.items(), strict=True):
        axis.plot(*demand, color="grey", linewidth=1, label="busy, if nothing were cached")
        axis.step(seconds, counts, where="post", linewidth=1, label=name)
        axis.set_ylabel("replicas")
        axis.set_ylim(0, most + 1)
        axis.legend(loc="lower right", fontsize="small")
    axes[-1].set_xlabel("seconds")
    _save(figure, path)


def _figure(panels: int, title: str) -> tuple[Any, Sequence[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.5 + 2.5 * panels), layout="constrained")
    figure.suptitle(title)
    return figure, list(figure.subplots(panels, 1, squeeze=False)[:, 0])


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=150)
