"""What figures show: the data, their axes, and marks for what a logarithm cannot show."""

import re
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from keras_gated import plots
from keras_gated.gradients.gates import GateStatistics

matplotlib = pytest.importorskip("matplotlib")

AWKWARD = np.array([0, 2e-6, 1e-3, np.nan, 0.4, np.inf, 0, 3.0])


def drawn(figure):
    """The figure, laid out and painted: what cannot be drawn fails here."""
    plots.png(figure)
    return figure


def lines(axes):
    return {line.get_label(): line for line in axes.lines}


def assert_marks(line, x, height, marker):
    assert list(line.get_xdata()) == x and set(line.get_ydata()) == {height} and line.get_marker() == marker
    assert line.get_linestyle() == "None" and not line.get_clip_on()


def test_norms_over_time():
    bound = np.array([1.0, 2, np.inf, 8, 16, 32, 64, 128])
    (axes,) = drawn(plots.norms_over_time({"h": AWKWARD, "c": 2 * AWKWARD[::-1]}, bound)).axes
    shown = lines(axes)
    np.testing.assert_array_equal(shown["h"].get_ydata(), [np.nan, 2e-6, 1e-3, np.nan, 0.4, np.nan, np.nan, 3])
    np.testing.assert_array_equal(shown["c"].get_ydata(), [6, np.nan, np.nan, 0.8, np.nan, 2e-3, 4e-6, np.nan])
    assert_marks(shown["h: 0"], [0, 6], 0, "v")
    assert_marks(shown["h: inf"], [5], 1, "^")
    assert_marks(shown["c: 0"], [1, 7], 0, "v")
    (of_bound,) = (line for name, line in shown.items() if name.startswith("bound"))
    np.testing.assert_array_equal(of_bound.get_ydata(), np.where(np.isinf(bound), np.nan, bound))
    assert axes.get_yscale() == "log" and axes.get_xlabel() == "time step t" and "norm" in axes.get_ylabel()
    assert len(axes.figure.legends[0].texts) == len(shown)
    styles = {(shown[name].get_color(), str(shown[name]._dash_pattern)) for name in ("h", "c")}
    assert all(len(set(each)) == 2 for each in zip(*styles, strict=True))


@pytest.mark.parametrize("values", [[0, 0], [np.inf, np.nan], [np.nan, np.nan], [5.0], [1e-200, 1e200]])
def test_norms_that_no_logarithm_shows_are_drawn_all_the_same(values):
    figure = drawn(plots.norms_over_time({"h": np.array(values)}))
    assert ("h: 0" in lines(figure.axes[0])) == (0 in values)


def test_a_point_between_gaps_is_visible():
    (axes,) = plots.norms_over_time({"alone": np.array([np.nan, 2, np.nan]), "line": np.ones(3)}).axes
    assert [lines(axes)[name].get_marker() for name in ("alone", "line")] == ["o", "None"]


def test_lag_map():
    norms = np.tril(np.full((5, 5), 1e-3))
    norms[1, 0], norms[3, 1], norms[4, 2], norms[2, 2] = 0, np.inf, np.nan, 1
    figure = drawn(plots.lag_map(norms))
    axes, colours = figure.axes
    pixels = axes.images[0].get_array()
    to_rgba = matplotlib.colors.to_rgba
    expected = {(1, 0): "black", (3, 1): plots.COLOURS[1], (4, 2): "lightgray", (0, 3): "white"}
    for place, colour in expected.items():
        assert tuple(pixels[place]) == to_rgba(colour)
    viridis = matplotlib.colormaps["viridis"]
    np.testing.assert_allclose([pixels[2, 2], pixels[4, 0]], [viridis(1.0), viridis(0.0)])
    assert colours.get_yscale() == "log" and colours.get_ylim() == pytest.approx((1e-3, 1))
    assert [text.get_text() for text in figure.legends[0].texts] == ["0", "inf", "no example", "k > t"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("from step k", "to step t")
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # t downwards, as in a matrix


@pytest.mark.parametrize("value", [0.0, 1.0, np.nan, np.inf])
def test_a_map_of_one_value(value):
    drawn(plots.lag_map(np.tril(np.full((3, 3), value))))


def test_gates_over_time():
    t = np.linspace(0, 1, 6)
    mean = np.where(t > 0.9, np.nan, t)
    activity = {g: GateStatistics(mean / k, 0.1 * mean, 0.2 * mean, 0.3 * mean) for k, g in enumerate("ifo", 1)}
    means, shares = drawn(plots.gates_over_time(activity)).axes
    np.testing.assert_array_equal(lines(means)["f: mean ± std"].get_ydata(), mean / 2)
    band = means.collections[1].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(0.8 * 0.6) and band[:, 1].min() == 0
    np.testing.assert_allclose(lines(shares)["o above 0.95"].get_ydata(), 30 * mean)
    np.testing.assert_allclose(lines(shares)["i below 0.05"].get_ydata(), 20 * mean)
    assert "%" in shares.get_ylabel() and shares.get_xlim() == (-0.5, 5.5)


def test_norms_over_training():
    records = SimpleNamespace(step=np.arange(8) + 100, raw=AWKWARD, clipped=np.minimum(AWKWARD, 1))
    (axes,) = drawn(plots.norms_over_training(records)).axes
    shown = lines(axes)
    np.testing.assert_array_equal(shown["clipped"].get_ydata()[[1, 2, 5, 7]], [2e-6, 1e-3, 1, 1])
    assert_marks(shown["raw: inf"], [105], 1, "^")
    assert_marks(shown["raw: NaN"], [103], 1, "x")
    assert_marks(shown["clipped: 0"], [100, 106], 0, "v")
    assert axes.get_xlabel() == "training step"


def test_without_matplotlib_one_sentence_says_what_to_install(monkeypatch):
    for module in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, module, None)
    sentence = "Figures need matplotlib, which is not installed: pip install 'keras_gated[plots]'."
    with pytest.raises(ImportError, match=f"^{re.escape(sentence)}$"):
        plots.lag_map(np.eye(3))
