"""The gradient norms of training steps, as arrays for whoever reads them in Python."""

from typing import NamedTuple

import numpy as np

CLIPPED = 1 - 1e-5  # what is longer was rounded, not clipped


class Records(NamedTuple):
    """Norms of S training steps of which R replicas took part."""

    step: np.ndarray  # (S,) true training steps
    raw: np.ndarray  # (S,) of the whole gradient before clipping
    clipped: np.ndarray  # (S,) of the whole gradient as the optimizer used it
    updated: np.ndarray  # (S,) whether the optimizer made an update: not where it accumulated or left the step out
    loss_scale: np.ndarray  # (S,) that was taken out, 1 without loss scaling
    learning_rate: np.ndarray  # (S,) NaN where there are several, or only a Python function knows
    replicas: np.ndarray  # (S, R) of what each replica adds to the whole gradient
    variables: dict[str, np.ndarray]  # path: (S,) of one variable's gradient before clipping, NaN where it had none

    @property
    def finite(self):
        """(S,) whether the whole gradient has neither inf nor NaN."""
        return np.isfinite(self.raw)

    @classmethod
    def of(cls, norms, paths):
        """From the `Norms` of a reader and its variables' paths."""
        raw, clipped = (np.sqrt(np.sum(n**2, axis=1)) for n in (norms.raw, norms.clipped))
        each = np.where(norms.present, norms.raw, np.nan).astype(np.float32).T
        rest = (norms.updated, norms.loss_scale, norms.learning_rate, norms.replicas)
        return cls(norms.step, raw, clipped, *rest, dict(zip(paths, each, strict=True)))

    @classmethod
    def joined(cls, pieces):
        """One after the other."""
        if len(pieces) == 1:
            return pieces[0]
        none = [np.zeros(0), np.zeros(0), np.zeros(0, bool), np.zeros(0), np.zeros(0)]
        if not pieces:
            return cls(np.zeros(0, np.int64), *none, np.zeros((0, 1)), {})
        absent = [np.full(len(r.step), np.nan, np.float32) for r in pieces]
        variables = {
            path: np.concatenate([r.variables.get(path, nan) for r, nan in zip(pieces, absent, strict=True)])
            for path in dict.fromkeys(path for r in pieces for path in r.variables)
        }
        replicas = max(r.replicas.shape[1] for r in pieces)
        widened = [
            np.pad(r.replicas, ((0, 0), (0, replicas - r.replicas.shape[1])), constant_values=np.nan) for r in pieces
        ]
        columns = [np.concatenate(column) for column in list(zip(*pieces, strict=True))[:-2]]
        return cls(*columns, np.concatenate(widened), variables)

    def summary(self):
        """What goes into the logs of an epoch: of its updates with a finite gradient, and how many were not."""
        used = self.updated & self.finite
        raw, clipped = self.raw[used], self.clipped[used]
        some = len(raw) > 0
        return {
            "gradient_norm": float(np.median(raw)) if some else np.nan,
            "gradient_norm_max": float(np.max(raw)) if some else np.nan,
            "clipped_share": float(np.mean(clipped < raw * CLIPPED)) if some else 0.0,
            "nonfinite_steps": int(np.sum(~self.finite)),
        }
