"""Every tutorial runs from top to bottom as it stands, and what its text claims is so: it asserts that itself."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TUTORIALS = {path.stem: path for path in (ROOT / "tutorials").glob("*.py")}
EXPECTED = [
    "01_a_cell_by_hand",
    "02_backpropagation_through_time",
    "03_why_the_simple_rnn_forgets",
    "04_clipping",
    "05_gates_as_memory",
    "06_lstm_or_gru",
    "07_reading_the_future",
    "08_addition",
    "09_attention",
    "10_watching_a_run",
    "11_several_replicas",
    "12_bringing_a_model_along",
    "13_a_cell_of_your_own",
]
ONE_THREAD = dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), "1")


def test_there_are_as_many_as_we_think():
    assert sorted(TUTORIALS) == EXPECTED


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_it_runs_and_shows_a_figure(name, tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "MPLBACKEND": "agg",
        **ONE_THREAD,
    }
    run = subprocess.run(
        [sys.executable, TUTORIALS[name]], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / f"logs/{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", EXPECTED)
def test_it_uses_the_public_names_alone(name):
    text = TUTORIALS[name].read_text()
    assert "import keras_gated as kg" in text and not re.search(r"from keras_gated|\._(?!asdict|replace)[^_]", text)
