"""What is held against published numbers: claims, the runs they rest on, and what is demanded of these."""

import statistics
from typing import NamedTuple


class Run(NamedTuple):
    """One training.  `family` is the module that does it; `setting` holds everything that decides its outcome."""

    family: str
    setting: dict
    seed: int
    seconds: float  # about how long it takes on one core: for the estimate alone


class Check(NamedTuple):
    """One pass mark."""

    demanded: str
    found: str
    holds: bool


class Claim(NamedTuple):
    """A row of the report."""

    name: str
    says: str
    published: str  # number and source
    setting: str  # ours, in words
    runs: list  # of `Run`
    judge: object  # a function [(Run, its result)] -> [Check], called once all runs are there


def verdict(claim, results):
    """("holds", "does not hold" or "incomplete", [Check])."""
    if len(results) < len(claim.runs):
        return "incomplete", []
    checks = claim.judge(results)
    return "holds" if all(check.holds for check in checks) else "does not hold", checks


def of(results, **wanted):
    """The results of those runs whose settings are as wanted."""
    return [r for run, r in results if all(run.setting.get(key) == value for key, value in wanted.items())]


def enough(right, share):
    """Whether of these booleans at least that share is true, and how to say it."""
    return sum(right) >= share * len(right) - 1e-9, f"{sum(right)} of {len(right)}"


def median_or_more(numbers):
    """The median of numbers of which None is larger than every other one; None if it is one of these."""
    numbers = [float("inf") if n is None else n for n in numbers]
    middle = statistics.median(numbers)
    return None if middle == float("inf") else middle


def counted(number):
    """A number of sequences or updates; None is one that was not reached."""
    return "never" if number is None else f"{number:,.0f}"


def listed(numbers):
    return ", ".join(counted(n) for n in sorted(numbers, key=lambda n: float("inf") if n is None else n))


def percent(share):
    return f"{100 * share:.1f} %"
