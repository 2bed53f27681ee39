"""A clipping threshold that leaves the usual training step alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Suggestion(NamedTuple):
    """A threshold for ClipNorm, and what it would have done."""

    max_norm: float
    clipped_share: float  # of the updates with a finite gradient


def suggest_max_norm(records: Any, percentile: float = 90.0) -> Suggestion:
    """A max_norm that leaves the usual step alone: a percentile of the norms that a run without clipping had.

    Args:
        records: `GradientNorms.records`; steps that made no update, or whose norm is not finite, are left out.
        percentile: between 0 and 100.

    Returns:
        `Suggestion(max_norm, clipped_share)`.

    Raises:
        ValueError: without a finite norm, or where the percentile is 0.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"suggest_max_norm expects a percentile from 0 to 100, received {percentile!r}.")
    norms = np.asarray(records.raw, float)[records.updated]
    norms = norms[np.isfinite(norms)]
    if not len(norms):
        raise ValueError(
            "suggest_max_norm expects records with a finite norm, received none. Train some steps with GradientNorms."
        )
    max_norm = float(np.percentile(norms, percentile))
    if max_norm == 0:
        raise ValueError(
            f"suggest_max_norm expects gradients above 0, received 0 as their percentile {percentile}. "
            "Take a higher percentile, or see why nothing reaches the weights."
        )
    return Suggestion(max_norm, float(np.mean(norms > max_norm)))
