"""A long dependency in real data: read a digit row by row, wait a hundred steps, name it.

Trains the same model three times on scikit-learn's 1,797 handwritten digits (8 x 8), with a different recurrent
layer each time, and shows in TensorBoard, in a table and in a picture what became of the gradient.
"""

import argparse
import os
import pathlib
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import keras_gated as kg

SILENT_STEPS = 100
MAX_NORM = 1.0
LAYERS = {
    "SimpleRNN(64)": lambda: kg.SimpleRNN(64),
    "LSTM(64, forget_bias=1)": lambda: kg.LSTM(64, forget_bias=1),
    "LSTM(64, forget_bias=5)": lambda: kg.LSTM(64, forget_bias=5),
}


def load():
    """Rows of a digit as steps, then silence: x (B, 108, 8) with gray levels 0 to 16, and the digit."""
    digits = load_digits()
    x = np.pad(digits.images, ((0, 0), (0, SILENT_STEPS), (0, 0))).astype("float32")
    return train_test_split(x, digits.target, test_size=0.2, random_state=0, stratify=digits.target)


def train(name, layer, data, folder, epochs, progress):
    x_train, x_test, y_train, y_test = data
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(x_train.shape[1:]), layer(), keras.layers.Dense(10)])
    model.compile(
        optimizer=keras.optimizers.Adam(3e-3, global_clipnorm=MAX_NORM),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
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
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for (name, (accuracy, records, _)), color, style in zip(
        results.items(), ("#d55e00", "#0072b2", "#009e73"), ("-", "--", "-"), strict=True
    ):
        left.plot(range(1, len(accuracy) + 1), accuracy, color=color, linestyle=style, label=name)
        right.plot(records.step, records.raw, ".", color=color, markersize=2, alpha=0.6, label=name)
    left.axhline(0.1, color="0.5", linewidth=0.8, linestyle=":")
    left.text(1, 0.11, "chance", color="0.4", va="bottom")
    left.set(xlabel="epoch", ylabel="test accuracy", ylim=(0, 1), title=f"A digit, named {SILENT_STEPS} steps later")
    left.legend(loc="upper left", bbox_to_anchor=(0.0, 0.95))
    right.axhline(MAX_NORM, color="0.5", linewidth=0.8, linestyle=":")
    right.text(0, MAX_NORM * 1.1, "clipped above this line", color="0.4", va="bottom")
    right.set(
        xlabel="training step",
        ylabel="gradient norm before clipping",
        yscale="log",
        title="The raw gradient of every step",
    )
    right.legend(markerscale=5, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
    run = time.strftime("%Y-%m-%d_%H-%M-%S")
    with Progress(*columns, console=console) as progress:
        for name, layer in LAYERS.items():
            folder = arguments.logs / run / name.replace("(", "_").replace(", ", "_").replace(")", "")
            results[name] = train(name, layer, data, folder, arguments.epochs, progress)

    table = Table(title=f"After {arguments.epochs} epochs (clipped at norm {MAX_NORM:g})")
    table.add_column("layer")
    for column in ("test accuracy", "median norm", "largest norm", "clipped steps", "s / epoch"):
        table.add_column(column, justify="right")
    for name, (accuracy, records, seconds) in results.items():
        raw = records.raw
        table.add_row(
            name,
            f"{accuracy[-1]:.2f}",
            f"{np.median(raw):.3g}",
            f"{raw.max():.3g}",
            f"{np.mean(raw > MAX_NORM):.0%}",
            f"{seconds:.2f}",
        )
    console.print()
    console.print(table)
    picture = arguments.logs / "quickstart.png"
    draw(results, picture)
    console.print(f"\nPicture:  {picture}")
    console.print("Every training step in TensorBoard:")
    console.print(
        f"  .venv/bin/tensorboard --logdir {arguments.logs} --samples_per_plugin scalars=100000,images=100",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
