"""Which cases of a test run every day, and which with `./scripts/test.sh --all` alone."""

import pytest


def daily(cases, *chosen):
    """Parameters of a test: all of the cases, and those that are not chosen marked as slow.

    Args:
        cases: a table by name, whose names are the parameter; or a list of values or of tuples of them.
    """
    absent = [case for case in chosen if case not in cases]
    assert not absent, f"daily expects cases out of {list(cases)}, received {absent}."
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if case in chosen else pytest.mark.slow)
        for case in cases
    ]
