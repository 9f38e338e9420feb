"""When a service counts as being at rest."""

from __future__ import annotations

import pytest

from tests.faults.service import ENGINE_GAUGES, HTTP_GAUGE, going_on

AT_REST = {f'{name}{{model="tiny",replica="{i}"}}': 0.0 for name in ENGINE_GAUGES for i in "ab"} | {
    f'{HTTP_GAUGE}{{replica="c"}}': 1.0,
    f'{HTTP_GAUGE}{{replica="d"}}': 0.0,
}


def page(samples: dict[str, float]) -> str:
    return "".join(f"{name} {value}\n" for name, value in samples.items())


def test_a_page_without_requests_but_the_one_for_it_is_at_rest() -> None:
    assert going_on(page(AT_REST)) == []


@pytest.mark.parametrize("sample", AT_REST)
def test_one_more_anywhere_is_no_rest(sample: str) -> None:
    assert going_on(page(AT_REST | {sample: AT_REST[sample] + 1})) != []


@pytest.mark.parametrize("sample", AT_REST)
def test_a_page_that_lacks_a_line_does_not_say_that_it_is_at_rest(sample: str) -> None:
    assert going_on(page({name: value for name, value in AT_REST.items() if name != sample})) != []
