"""What the checks on a GPU found: rows, the JSON of a run, and its table."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, ParamSpec

P = ParamSpec("P")
Value = float | int | str
Status = Literal["passed", "failed", "crashed", "out of time", "not run"]
_MARKS: dict[bool | None, str] = {True: "ok", False: "FAILED", None: "-"}


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at.

    Attributes:
        name: what it was: `rms_norm bfloat16 [3, 4096]`.
        ok: whether it is as it must be; None where nothing is demanded of it (figures).
        values: what was measured.
        aim: what a figure should reach, in words; aim_met says whether it does. Missing an aim fails no run.
        note: why it is not ok.
    """

    name: str
    ok: bool | None = None
    values: Mapping[str, Value] = field(default_factory=dict)
    aim: str = ""
    aim_met: bool | None = None
    note: str = ""


@dataclass(slots=True)
class CheckResult:
    """The rows of one check. It passes when it came to its end and no row of it is wrong."""

    name: str
    status: Status = "not run"
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


class RowFile:
    """What checks found, one JSON object a line, so that a process that dies leaves what it had."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, check: str) -> None:
        self._append({"begin": check})

    def add(self, check: str, row: Row) -> None:
        self._append({"check": check, "row": asdict(row)})

    def end(self, check: str, seconds: float) -> None:
        self._append({"end": check, "seconds": seconds})

    def read(self, names: Iterable[str], *, stopped: bool = False) -> dict[str, CheckResult]:
        """The results of some checks, by name and in order.

        Args:
            stopped: the process was ended when its time was up: a check without an end did not crash.
        """
        found = {name: CheckResult(name) for name in names}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            try:
                entry = json.loads(line)
            except ValueError:  # the process died while it wrote its last line
                continue
            if "begin" in entry:
                found[entry["begin"]].status = "out of time" if stopped else "crashed"
            elif "row" in entry:
                found[entry["check"]].rows.append(Row(**entry["row"]))
            else:
                check = found[entry["end"]]
                check.seconds = entry["seconds"]
                check.status = "failed" if any(row.ok is False for row in check.rows) else "passed"
        return found

    def _append(self, entry: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(entry, default=float) + "\n")  # also the numbers of numpy


def attempt(name: str, look: Callable[P, Iterator[Row]], *args: P.args, **kwargs: P.kwargs) -> Iterator[Row]:
    """What look(...) finds; where it raises, a wrong row that says so, and whatever comes after it goes on."""
    try:
        yield from look(*args, **kwargs)
    except Exception as error:  # whatever it raises
        yield failure(name, error)


def failure(name: str, error: Exception) -> Row:
    """A wrong row that says what was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return Row(name, False, note=f"{type(error).__name__}: {str(error)[:600]} ({places})")


def line_of(row: Row) -> str:
    """A row for the eye, not too long for one; the JSON has all of it."""
    values = "  ".join(f"{name} {_shown(value)}" for name, value in row.values.items())
    aim = (
        f"  [aim: {row.aim}{'' if row.aim_met is None else ', met' if row.aim_met else ', NOT MET'}]" if row.aim else ""
    )
    return f"{_MARKS[row.ok]:<6} {row.name:<44} {row.note + '  ' if row.note else ''}{values[:160]}{aim}"


def table_of(parts: Mapping[str, Mapping[str, CheckResult]]) -> str:
    """All figures, what went wrong, and one line for each check."""
    lines = []
    for part, checks in parts.items():
        for check in checks.values():
            shown = [row for row in check.rows if row.ok is not True]
            if shown:
                lines += ["", f"{part}: {check.name}", *(f"  {line_of(row)}" for row in shown)]
    lines += ["", f"{'part':<10} {'check':<40} {'status':<12} {'rows':>6} {'wrong':>6} {'seconds':>8}"]
    for part, checks in parts.items():
        for check in checks.values():
            wrong = sum(row.ok is False for row in check.rows)
            lines.append(
                f"{part:<10} {check.name:<40} {check.status:<12} {len(check.rows):>6} {wrong:>6} {check.seconds:>8.1f}"
            )
    return "\n".join(lines)


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}" if 0.01 <= abs(value) < 1e6 else f"{value:.3g}"
