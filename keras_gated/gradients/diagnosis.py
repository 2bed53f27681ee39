"""Why a model does not learn a long dependency: what is measured of its recurrent layers, put into words.

Hidden here: when a gradient counts as vanishing or exploding, and what to change then.  All is by lag, the number of
steps that an example has between a step and the loss; padding is left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import keras
import numpy as np

from keras_gated.cells.meaning import meaning_of
from keras_gated.gradients.gates import activity_of, gates_on, retention_of
from keras_gated.gradients.horizon import FADED
from keras_gated.gradients.jacobians import spectrum
from keras_gated.gradients.loss_gradient import error_signal, uppermost
from keras_gated.gradients.trajectory import layer_input, mean_of_valid, recurrent_layers

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROWN = 10.0  # times the error at the loss: above, it has exploded, as below FADED it has vanished
SATURATED = 0.5  # share of units whose gate is shut or open
SMALLEST = 1e-30  # norms below are too close to what float32 cannot hold to show a slope


class LayerDiagnosis(NamedTuple):
    """One recurrent layer."""

    regime: Literal["vanishing", "exploding", "healthy"]
    advice: str
    norms: dict[str, np.ndarray]  # state: (L,) ‖∂L/∂state‖ by lag, mean over the examples that have so many steps
    steps: int  # L of the longest example
    horizon: int | None  # the lag at which the error has fallen below 1 % of what it is at the loss; None if nowhere
    growth: float  # factor per step away from the loss, geometric mean
    growth_interval: tuple[float, float]  # 95 % confidence, from the spread over the examples; NaN for a single one
    exploding: float  # share of steps at which it is over 10 times what it is at the loss, or not finite
    sigma_max: dict[str | int, float]  # block of the recurrent kernel: largest singular value; {} without a kernel
    radius: dict[str | int, float]  # block: spectral radius
    low: dict[str, float]  # gate: share of units and steps below 0.05
    high: dict[str, float]  # gate: share above 0.95
    retention: tuple[float, float] | None  # median and longest retention time of the units, -1 / ln f, in steps

    def __str__(self):
        fades = "nowhere below 1 %" if self.horizon is None else f"below 1 % after {self.horizon} of {self.steps} steps"
        low, high = self.growth_interval
        lines = [
            f"{self.regime}: {self.advice}",
            f"  error            {fades}; x {self.growth:.3g} a step ({low:.3g} to {high:.3g})",
            f"  exploding steps  {self.exploding:.0%}",
        ]
        if self.radius:
            blocks = "; ".join(f"{b} {self.sigma_max[b]:.3g}, {r:.3g}" for b, r in self.radius.items())
            lines.append(f"  recurrent kernel σ_max, spectral radius: {blocks}")
        if self.low:
            gates = "; ".join(f"{g} {low:.0%}, {self.high[g]:.0%}" for g, low in self.low.items())
            lines.append(f"  gates            below 0.05, above 0.95: {gates}")
        if self.retention:
            median, longest = self.retention
            lines.append(f"  retention        {median:.3g} steps (median of the units), {longest:.3g} (longest)")
        return "\n".join(lines)


class Diagnosis(NamedTuple):
    """A model on one batch.  Prints as a report."""

    loss: float
    layers: dict[str, LayerDiagnosis]  # by label

    def __str__(self):
        return "\n\n".join([f"loss {self.loss:.4g}", *(f"{label}: {layer}" for label, layer in self.layers.items())])

    def to_dict(self) -> dict[str, Any]:
        """Of lists, numbers, strings and None, as JSON takes them but for inf and NaN."""
        return {"loss": self.loss, "layers": {label: _plain(layer) for label, layer in self.layers.items()}}

    def plot(self) -> Figure:
        """The error of every layer by lag, as a matplotlib Figure."""
        from keras_gated.plots import norms_over_time

        norms = {f"‖∂L/∂{s}_t‖ of {label}": d for label, layer in self.layers.items() for s, d in layer.norms.items()}
        title = "Error by lag: " + ", ".join(f"{label} {layer.regime}" for label, layer in self.layers.items())
        return norms_over_time(norms, title=title, unit="lag: steps before the loss")


def diagnose(model: keras.Model, x: Any, y: Any) -> Diagnosis:
    """Says of every recurrent layer how far the error reaches, why not further, and what to change.

    The error is ‖∂L/∂c_t‖ where there is a cell state, which carries it, and ‖∂L/∂h_t‖ elsewhere.  It vanishes where
    it falls below 1 % of what it is at the loss, and explodes where it exceeds that 10 times or is not finite,
    whichever comes first on the way from the loss.

    Args:
        model: a compiled model with recurrent layers, as trained or not.  It stays as it was.
        x, y: one batch of its inputs and targets, sequences as long as the dependency; some dozens of examples do.

    Returns:
        `Diagnosis`, which prints as a report.

    Raises:
        ValueError: for a model that is not compiled or has no recurrent layer, and for a layer that cannot be
            measured (see `time_step_norms`).
    """
    layers = recurrent_layers(model)
    if not layers:
        raise ValueError(f"diagnose expects a model with recurrent layers; {model.name!r} has none.")
    found = {}
    for label, layer in layers.items():
        signal = error_signal(model, x, y, layer)
        cause = _not_finite(model, x, signal.loss)
        found[label] = _diagnosis(layer, signal, layer_input(model, x, layer), cause)
    return Diagnosis(signal.loss, found)


def _diagnosis(layer, signal, given, cause):
    _, memory = uppermost(layer)
    of_states = {s: _by_lag(n, signal.valid, layer.go_backwards) for s, n in signal.norms.items()}
    carrier, by_lag = of_states[memory], {s.split("/")[-1]: n for s, n in of_states.items()}
    profiles = {state: mean_of_valid(norms, ~np.isnan(norms)) for state, norms in by_lag.items()}
    with np.errstate(invalid="ignore", over="ignore"):
        relative = _relative(mean_of_valid(carrier, ~np.isnan(carrier))[None])[0]
        grown = _relative(carrier) > GROWN
    exploded, faded = _first(relative > GROWN), _first(relative < FADED)
    regime = "exploding" if exploded < faded else "healthy" if faded == np.inf and len(relative) else "vanishing"
    found = LayerDiagnosis(
        regime=regime,
        advice="",
        norms=profiles,
        steps=carrier.shape[1],
        horizon=None if faded == np.inf else int(faded),
        growth=_growth(carrier)[0],
        growth_interval=_growth(carrier)[1:],
        exploding=float(grown.sum() / max(1, np.sum(~np.isnan(carrier)))),
        **_spectra(layer),
        **_gates(layer, given),
    )
    return found._replace(advice=_advice(layer, found, cause))


def _by_lag(norms, valid, backwards):
    """(B, T) -> (B, L), one column for each lag, NaN where an example has fewer steps; what is not finite is inf.

    Lag 0 is the step nearest to the loss at which a gradient arrives.
    """
    rows = []
    for norm, there in zip(norms, valid, strict=True):
        row = norm[there] if backwards else norm[there][::-1]
        row = np.where(np.isnan(row), np.inf, row)
        rows.append(np.trim_zeros(row, "f") if row.any() else row[:0])
    return np.stack([np.pad(row, (0, max(map(len, rows)) - len(row)), constant_values=np.nan) for row in rows])


def _relative(norms):
    """To the one at the loss; inf where either is not finite."""
    relative = norms / norms[:, :1]
    return np.where(np.isinf(norms) | np.isinf(norms[:, :1]), np.inf, relative)


def _first(where):
    """The first lag at which it is so, inf if it is nowhere."""
    return np.flatnonzero(where)[0] if where.any() else np.inf


def _growth(norms):
    """Per step away from the loss, the geometric mean over the examples, and its 95 % confidence interval."""
    slopes = []
    for row in norms[:, 1:]:
        lags = np.flatnonzero(np.isfinite(row) & (row > SMALLEST))
        if len(lags) > 2:
            slopes.append(np.polyfit(lags, np.log(row[lags]), 1)[0])
    B, mean = len(slopes), np.mean(slopes) if slopes else np.nan
    if B < 2:
        return float(np.exp(mean)), np.nan, np.nan
    z, freedom = 1.96, B - 1
    t = z + (z + z**3) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)  # Student's, nearly
    half = t * np.std(slopes, ddof=1) / np.sqrt(B)
    return tuple(float(np.exp(v)) for v in (mean, mean - half, mean + half))


def _spectra(layer):
    if getattr(layer.cell, "recurrent_kernel", None) is None:
        return {"sigma_max": {}, "radius": {}}
    of = spectrum(layer)
    names = meaning_of(layer.cell).blocks or range(len(of.radius))
    return {kind: dict(zip(names, map(float, values), strict=True)) for kind, values in of._asdict().items()}


def _gates(layer, given):
    found = gates_on(*given) if meaning_of(layer.cell).read else None
    if found is None:
        return {"low": {}, "high": {}, "retention": None}
    activity = activity_of(found)
    times = None if found.retained is None else retention_of(found)
    shares = {
        share: {g: float(np.nanmean(getattr(s, share))) for g, s in activity.items()} for share in ("low", "high")
    }
    return {**shares, "retention": None if times is None else (float(np.median(times)), float(np.max(times)))}


def _advice(layer, found, cause):
    words = {"exploding": _on_exploding, "vanishing": _on_vanishing, "healthy": _on_healthy}[found.regime]
    shut = {g: found.low[g] + found.high[g] for g in found.low}
    meaning = meaning_of(layer.cell)
    gate = meaning.retaining_gate and meaning.retaining_gate.gate
    if gate in shut:  # saturated so as to remember, it does its work
        shut[gate] -= (found.high if meaning.remembers_open else found.low)[gate]
    saturated = [g for g, share in shut.items() if share > SATURATED]
    said = cause or words(layer, found)
    if saturated:
        said += f" Most units have {' and '.join(saturated)} shut or open, through which hardly anything is learnt."
    return said


def _on_exploding(layer, found):
    largest = max((n.max() / n[0] for n in found.norms.values()), default=np.inf)
    known = [radius for radius in found.radius.values() if not np.isnan(radius)]
    radius = f" The recurrent kernel has spectral radius {max(known):.3g}." if known else ""
    return (
        f"the error grows by {found.growth:.3g} a step, up to {largest:.3g} times what it is at the loss.{radius} "
        "Clip it, kg.ClipNorm(optimizer, max_norm=1.0), and start from recurrent_initializer='orthogonal', whose "
        "radius is 1."
    )


def _on_vanishing(layer, found):
    if not found.steps:
        return "no gradient arrives at this layer. Look for what lies between it and the loss."
    said = f"the error fades to 1 % after {found.horizon} of {found.steps} steps."
    bias, kept = _bias_that_retains(found.steps)
    if found.retention and found.retention[0] > found.steps:
        return f"{said} Its units retain for {found.retention[0]:.3g} steps (median): the gates are not the cause."
    retaining = meaning_of(layer.cell).retaining_gate
    if retaining is None:
        change = f"LSTM(units, forget_bias={bias})"
    elif retaining.option:
        change = f"{retaining.option}={bias * retaining.sign}"
    else:
        change = f"A bias of {bias * retaining.sign} of the gate {retaining.gate}"
    return f"{said} {change} would retain {kept:.2f} of it over all {found.steps}."


def _on_healthy(layer, found):
    return f"the error reaches all {found.steps} steps; nothing to change."


def _bias_that_retains(steps):
    """The smallest whole forget bias with σ(bias)^steps ≥ 0.5, and that power."""
    bias = next(b for b in range(1, 40) if (1 + np.exp(-b)) ** -steps >= 0.5)
    return bias, (1 + np.exp(-bias)) ** -steps


def _not_finite(model, x, loss):
    """In words, what makes gradients inf or NaN, if it is not the way through time."""
    clean = "Train anew from weights that are finite, with kg.ClipNorm(optimizer, nonfinite='skip')."
    if not all(np.all(np.isfinite(np.asarray(a, np.float64))) for a in keras.tree.flatten(x)):
        return "x holds numbers that are inf or NaN, and so do the gradients. Mask or replace them."
    if not all(np.all(np.isfinite(w)) for w in model.get_weights()):
        return f"the model has weights that are inf or NaN. {clean}"
    if not np.isfinite(loss):
        return f"the loss is {loss}, and so no gradient is finite. {clean}"
    return ""


def _plain(value):
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, LayerDiagnosis):
        value = value._asdict()
    if isinstance(value, dict):
        return {key: _plain(v) for key, v in value.items()}
    return list(value) if isinstance(value, tuple) else value
