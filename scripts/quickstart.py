"""A long dependency in real data: read a digit row by row, wait a hundred steps, name it.

Trains the same model three times on scikit-learn's 1,797 handwritten digits (8 x 8), with a different recurrent
layer each time, and shows in TensorBoard, in a table and in a picture what became of the gradient.
"""

import argparse
import os
import pathlib
import time
from functools import partial

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_gated as kg

SILENT_STEPS = 100
MAX_NORM = 1.0
SMALLEST = 1e-30  # drawn in place of 0 on a log scale
LAYERS = {
    "SimpleRNN(64)": partial(kg.SimpleRNN, 64),
    "LSTM(64, forget_bias=1)": partial(kg.LSTM, 64, forget_bias=1),
    "LSTM(64, forget_bias=5)": partial(kg.LSTM, 64, forget_bias=5),
}


def load():
    """Rows of a digit as steps, then silence: x (B, 108, 8) with gray levels 0 to 16, and the digit."""
    digits = load_digits()
    x = np.pad(digits.images, ((0, 0), (0, SILENT_STEPS), (0, 0))).astype("float32")
    return train_test_split(x, digits.target, test_size=0.2, random_state=0, stratify=digits.target)


def build(layer, shape):
    keras.utils.set_random_seed(0)
    # Equal names put the curves of all models into the same cards of TensorBoard.
    layers = [keras.Input(shape), layer(name="recurrent"), keras.layers.Dense(10, name="read_out")]
    model = keras.Sequential(layers, name="digits")
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, global_clipnorm=MAX_NORM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def train(name, layer, data, folder, epochs, progress):
    x_train, x_test, y_train, y_test = data
    model = build(layer, x_train.shape[1:])
    task = progress.add_task(name, total=epochs, note="")
    seconds = []

    def epoch_ended(epoch, logs):
        seconds.append(time.perf_counter())
        progress.update(task, advance=1, note=f"test accuracy {logs['val_accuracy']:.2f}")

    norms = kg.GradientNorms(folder)
    started = time.perf_counter()
    history = model.fit(
        x_train,
        y_train,
        batch_size=32,
        epochs=epochs,
        validation_data=(x_test, y_test),
        verbose=0,
        callbacks=[
            keras.callbacks.TensorBoard(folder),
            norms,
            keras.callbacks.LambdaCallback(on_epoch_end=epoch_ended),
        ],
    )
    per_epoch = np.median(np.diff([started, *seconds]))
    return history.history["val_accuracy"], norms.records, per_epoch


def draw(results, path):
    """Three panels: what was learnt, the whole gradient, and the part of it that came back to the digit."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.8), layout="constrained")
    for (name, (accuracy, records, _)), color, style in zip(
        results.items(), ("#d55e00", "#0072b2", "#009e73"), ("-", "--", "-"), strict=True
    ):
        left.plot(range(1, len(accuracy) + 1), accuracy, color=color, linestyle=style, linewidth=2, label=name)
        for axes, norms in ((middle, records.raw), (right, input_kernel(records))):
            axes.plot(records.step, np.maximum(norms, SMALLEST), ".", color=color, markersize=2.5, alpha=0.6)
    left.axhline(0.1, color="0.5", linewidth=0.8, linestyle=":")
    left.annotate("chance", (25, 0.1), (0, -4), textcoords="offset points", color="0.4", va="top", ha="right")
    left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1), title=f"A digit, named {SILENT_STEPS} steps later")
    middle.axhline(MAX_NORM, color="0.3", linewidth=1, linestyle=":")
    middle.annotate("clipped above", (0, MAX_NORM), (0, 3), textcoords="offset points", backgroundcolor="1", fontsize=8)
    middle.set(title="The whole gradient, before clipping", ylabel="norm")
    right.set(title="What of it came back to the digit (input kernel)", ylabel="norm")
    for axes in (middle, right):
        axes.set(xlabel="training step", yscale="log")
    figure.legend(loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def input_kernel(records):
    """Norms of the recurrent layer's kernel, which sees x alone: in the silent steps its gradient is 0."""
    (norms,) = (n for path, n in records.variables.items() if path.endswith("_cell/kernel"))
    return norms


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("logs/quickstart"), help="output folder")
    parser.add_argument("--epochs", type=int, default=25, help="epochs of each model (25 show the contrast)")
    arguments = parser.parse_args()
    if arguments.epochs < 1:
        parser.error(f"--epochs expects a positive number, received {arguments.epochs}")
    console = Console()
    console.print("Handwritten digits, one row per step, then 100 silent steps, then the answer.\n")
    data, results = load(), {}
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    run = arguments.logs / time.strftime("%Y-%m-%d_%H-%M-%S")
    with Progress(*columns, console=console) as progress:
        for name, layer in LAYERS.items():
            folder = run / name.replace("(", "_").replace(", ", "_").replace(")", "")
            results[name] = train(name, layer, data, folder, arguments.epochs, progress)

    table = Table(
        title=f"After {arguments.epochs} epochs (clipped at norm {MAX_NORM:g})",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    table.add_column("layer", no_wrap=True)
    headers = ("test\naccuracy", "median\nnorm", "largest\nnorm", "steps\nclipped", "median,\nkernel", "s per\nepoch")
    for column in headers:
        table.add_column(column, justify="right")
    for name, (accuracy, records, seconds) in results.items():
        raw = records.raw
        table.add_row(
            name,
            f"{accuracy[-1]:.2f}",
            f"{np.median(raw):.3g}",
            f"{raw.max():.3g}",
            f"{np.mean(raw > MAX_NORM):.0%}",
            f"{np.median(input_kernel(records)):.0e}",
            f"{seconds:.2f}",
        )
    console.print()
    console.print(table)
    console.print("The kernel of x is fed by the digit alone: its gradient is what came back.")
    picture = arguments.logs / "quickstart.png"
    draw(results, picture)
    console.print(f"\nPicture:  {picture}")
    console.print("Every training step in TensorBoard:")
    console.print(
        f"  .venv/bin/tensorboard --logdir {run} --samples_per_plugin scalars=100000,images=100",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
