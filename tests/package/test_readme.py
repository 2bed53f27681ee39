"""The README says what is true: its example runs, and its map of the equations leads somewhere."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
LABELS = """
    rnn-hidden rnn-output rnn-loss-grad rnn-jacobian rnn-jacobian-bound rnn-clip rnn-bptt
    rnn-lstm-f rnn-lstm-i rnn-lstm-o rnn-lstm-ctilde rnn-lstm-c rnn-lstm-h rnn-lstm-cec
    rnn-gru-z rnn-gru-r rnn-gru-htilde rnn-gru-h rnn-bidir rnn-bidir-out rnn-seq2seq
""".split()


EXAMPLES = dict(zip(("layers", "sequences"), re.findall(r"```python\n(.*?)```", README, re.DOTALL), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    example = EXAMPLES[name]
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "logs/example/gradients").is_dir() == ("logs/example" in example)


@pytest.mark.parametrize("label", LABELS)
def test_an_equation_is_where_the_map_says(label):
    (row,) = re.findall(rf"^\| `{label}`.*", README, re.MULTILINE)
    places = re.findall(r"`(keras_gated/[\w/]+\.py)`: `(\w+)`", row)
    assert places or "to come" in row or "keras.layers" in row
    for path, function in places:
        defined = {n.name for n in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(n, ast.FunctionDef)}
        assert function in defined


def test_every_file_that_is_linked_exists():
    for target in re.findall(r"\]\(([^)#]+)\)|<img src=\"([^\"]+)\"", README):
        target = "".join(target)
        assert target.startswith("https://") or (ROOT / target).exists(), target


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "tutorials").glob("*.py")))
def test_the_map_shows_every_tutorial_and_its_figure(name):
    (row,) = re.findall(rf"^\| \[[^]]+\]\(tutorials/{name}\.py\).*", README, re.MULTILINE)
    assert f"docs/tutorials/{name}.png" in row
