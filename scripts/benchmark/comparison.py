"""Numbers out of the results: medians, ratios of neighbours in time, who was the fastest."""

import statistics

from benchmark.plan import CELLS, GROWING_N, GROWING_T, SHAPES

KERAS = ("keras", "keras, jit", "keras, unroll")
TORCH = ("torch", "torch, oneDNN")
PRODUCTS = ("products", "products, torch")
GROWING = {"ours": ("ours",), "Keras": KERAS, "torch": TORCH}


def of_part(results, part):
    """The results of a part, in the order of cells and shapes."""

    def order(r):
        shape = tuple(r["arguments"]["shape"])
        return CELLS.index(r["arguments"]["cell"]), SHAPES.index(shape) if shape in SHAPES else -1

    return sorted((r for r in results if r["part"] == part), key=order)


def ms(measured, name):
    """Median of the rounds, or None for a contender that was not timed."""
    return statistics.median(measured[name]["ms"]) if "ms" in measured.get(name, {}) else None


def ratio(measured, name, ours="ours"):
    """How many times faster ours is: the median over the rounds of the ratio in each."""
    if ms(measured, name) is None or ms(measured, ours) is None:
        return None
    return statistics.median(a / b for a, b in zip(measured[name]["ms"], measured[ours]["ms"], strict=True))


def fastest(measured, names):
    """The fastest of these contenders, or None if none was timed."""
    return min((n for n in names if ms(measured, n) is not None), key=lambda name: ms(measured, name), default=None)


def against_fastest(measured, names):
    """(ratio to the fastest of them, its name), or (None, None)."""
    name = fastest(measured, names)
    return (None, None) if name is None else (ratio(measured, name), name)


def geometric_mean(numbers):
    numbers = [n for n in numbers if n is not None]
    return statistics.geometric_mean(numbers) if numbers else None


def spread(measured, name="ours"):
    """How far apart the middle half of the rounds is, relative to their median."""
    low, middle, high = statistics.quantiles(measured[name]["ms"], n=4)
    return (high - low) / middle


def growth(results, axis, names):
    """{cell: [(T or N, ms of the fastest of these)]}"""
    shapes, place = {"T": (GROWING_T, 1), "N": (GROWING_N, 3)}[axis]
    curves = {}
    for r in of_part(results, "growth"):
        shape, measured = tuple(r["arguments"]["shape"]), r["result"]["train"]
        if shape in shapes and (name := fastest(measured, names)):
            curves.setdefault(r["arguments"]["cell"], []).append((shape[place], ms(measured, name)))
    return {cell: sorted(points) for cell, points in curves.items()}
