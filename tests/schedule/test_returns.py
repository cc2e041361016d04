"""Predicted answer times: medians of the last ones, per source."""

import math

from headrace.schedule.returns import ReturnTimes


def test_the_median_of_the_last_answers_per_source() -> None:
    times = ReturnTimes(window=3)
    assert times.predict("search") is None
    for seconds in (1.0, 100.0, 2.0):
        times.record("search", seconds)
    times.record("other", 7.0)
    assert times.predict("search") == 2.0
    for seconds in (50.0, 60.0):
        times.record("search", seconds)  # 1 and 100 are out
    assert times.predict("search") == 50.0
    assert times.predict("other") == 7.0


def test_what_is_no_time_is_ignored() -> None:
    times = ReturnTimes()
    for seconds in (math.nan, math.inf, -1.0):
        times.record("tool", seconds)
    assert times.predict("tool") is None
