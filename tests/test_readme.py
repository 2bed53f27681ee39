"""The README says what is true: its example runs, and its map of the equations leads somewhere."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
LABELS = """
    rnn-hidden rnn-output rnn-loss-grad rnn-jacobian rnn-jacobian-bound rnn-clip rnn-bptt
    rnn-lstm-f rnn-lstm-i rnn-lstm-o rnn-lstm-ctilde rnn-lstm-c rnn-lstm-h rnn-lstm-cec
    rnn-gru-z rnn-gru-r rnn-gru-htilde rnn-gru-h rnn-bidir rnn-bidir-out rnn-seq2seq
""".split()


def examples():
    return re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    watching, translating = examples()
    exec(compile(watching, "README.md", "exec"), {})
    assert (tmp_path / "logs/example/gradients").is_dir()
    exec(compile(translating, "README.md", "exec"), {})
    assert "[[6 5 4 3 2 0 0 0]]" in capsys.readouterr().out


@pytest.mark.parametrize("label", LABELS)
def test_an_equation_is_where_the_map_says(label):
    (row,) = re.findall(rf"^\| `{label}`.*", README, re.MULTILINE)
    places = re.findall(r"`(keras_gated/[\w/]+\.py)`: `(\w+)`", row)
    assert places or "to come" in row or "keras.layers" in row
    for path, function in places:
        defined = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert function in defined


def test_every_file_that_is_linked_exists():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
