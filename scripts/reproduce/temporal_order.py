"""Experiment 6a of Hochreiter & Schmidhuber (1997), where the forget bias starts, and clipping."""

import keras
from reproduce import training
from reproduce.claim import Check, Claim, Run, counted, enough, listed, median_or_more, of, percent

from keras_gated import tasks

PUBLISHED = 31_390
TOLERANCE = 0.3
BIASES = (-1, 0, 1, 2, 5)
ADAM = {"optimizer": "Adam", "rate": 0.01, "clip": 1.0, "batch": 16, "chunk": 800, "window": 2000}
LSTM = {"cell": "LSTM", "units": 16, **ADAM, "length": 100}
SIMPLE = {"cell": "SimpleRNN", "units": 32, **ADAM, "rate": 0.001, "length": 100}
SGD = {"cell": "SimpleRNN", "units": 50, "optimizer": "SGD", "batch": 20, "chunk": 1000, "window": 2000, "length": 20}


def claims(quick):
    return [order(quick), forget_bias(quick), clipping(quick)]


def lstm(bias, limit, seed):
    return Run(
        "temporal_order",
        {**LSTM, "biases": {"f": float(bias), "i": -2.0}, "limit": limit},
        seed,
        limit / 4000 if bias < 2 else 6,
    )


def order(quick):
    limit, seeds = (30_000, 1) if quick else (100_000, 5)
    runs = [lstm(5, limit, seed) for seed in range(seeds)]
    simple_limit, seeds = (8_000, 1) if quick else (60_000, 5)
    runs += [
        Run("temporal_order", {**SIMPLE, "limit": simple_limit}, seed, simple_limit / 2500) for seed in range(seeds)
    ]
    return Claim(
        name="Temporal order",
        says="An LSTM tells the order of two symbols across a hundred steps, a simple RNN does not.",
        published="31,390 sequences, 1 wrong of 2,560 (Hochreiter & Schmidhuber 1997, task 6a, table 9)",
        setting="16 units, biases of forget gate 5 and input gate -2; SimpleRNN(32); Adam 0.01 (0.001), clipped at "
        "1, batches of 16; until 2,000 sequences in a row were within 0.3, these included",
        runs=runs,
        judge=judge_order,
    )


def judge_order(results):
    of_lstm, simple = of(results, cell="LSTM"), of(results, cell="SimpleRNN")
    holds, found = enough([r["accuracy"] >= 0.99 for r in of_lstm], 0.8)
    found += f"; after {listed(r['solved'] for r in of_lstm)} sequences"
    best = max(r["accuracy"] for r in simple)
    return [
        Check("LSTM: at least 99 % of 2,560 right, 4 of 5 seeds", found, holds),
        Check("SimpleRNN: at most 40 % right", f"{percent(best)} at best", best <= 0.4),
    ]


def forget_bias(quick):
    biases, seeds, limit = ((1, 5), 1, 30_000) if quick else (BIASES, 5, 100_000)
    return Claim(
        name="Forget bias",
        says="The higher the forget bias starts, the sooner long dependencies are learnt.",
        published="about 3 times as fast at 5 as at 1 (Gers, Schmidhuber & Cummins 2000)",
        setting="the LSTM of the row above, with these forget biases; updates until 2,000 sequences in a row were "
        f"within 0.3, at most {limit // LSTM['batch']:,}",
        runs=[lstm(bias, limit, seed) for bias in biases for seed in range(seeds)],
        judge=judge_forget_bias,
    )


def judge_forget_bias(results):
    updates = medians(results)
    order = [bias for bias in (5, 1, 0) if bias in updates]
    reached = [float("inf") if updates[bias] is None else updates[bias] for bias in order]
    found = "; ".join(f"{bias}: {counted(updates[bias])}" for bias in updates)
    limit = results[0][0].setting["limit"] / LSTM["batch"]
    factor = min(reached[1], limit) / reached[0]
    more_than = "more than " if reached[1] > limit else ""
    return [
        Check(f"median updates at {' ≤ '.join(map(str, order))}", found, reached == sorted(reached)),
        Check("at 1 at least 1.5 times those at 5", f"{more_than}{factor:.1f} times", factor >= 1.5),
    ]


def medians(results):
    """{forget bias: median updates until solved, or None}"""
    biases = sorted({run.setting["biases"]["f"] for run, _ in results})
    solved = {bias: median_or_more(r["solved"] for r in of(results, biases={"f": bias, "i": -2.0})) for bias in biases}
    return {int(bias): n if n is None else n / LSTM["batch"] for bias, n in solved.items()}


def clipping(quick):
    limit, seeds = (10_000, 1) if quick else (100_000, 5)
    runs = [
        Run("temporal_order", {**SGD, "rate": 0.1, "max_norm": max_norm, "limit": limit}, seed, limit / 10_000)
        for max_norm in (1.0, None)
        for seed in range(seeds)
    ]
    return Claim(
        name="Clipping",
        says="Clipping the gradient's norm keeps a simple RNN from being thrown out of what it learnt.",
        published="100 % at lengths 50 to 200 with clipping and a regulariser; without, failures from about length "
        "20 on (Pascanu, Mikolov & Bengio 2013)",
        setting="temporal order of length 20, SimpleRNN(50), SGD 0.1, batches of 20, ClipNorm at 1 or none, "
        f"{limit:,} sequences; a success is 2,000 in a row",
        runs=runs,
        judge=judge_clipping,
    )


def judge_clipping(results):
    clipped, free = of(results, max_norm=1.0), of(results, max_norm=None)
    successes = [sum(r["solved"] is not None for r in rs) for rs in (clipped, free)]
    not_finite = [sum(r["not_finite"] for r in rs) for rs in (clipped, free)]
    return [
        Check(
            "successes with clipping ≥ without",
            f"{successes[0]} and {successes[1]} of {len(free)}; right in the end "
            f"{percent(mean_accuracy(clipped))} and {percent(mean_accuracy(free))}",
            successes[0] >= successes[1],
        ),
        Check("no NaN with clipping", f"{not_finite[0]} with, {not_finite[1]} without", not_finite[0] == 0),
    ]


def mean_accuracy(results):
    return sum(r["accuracy"] for r in results) / len(results)


def train(setting, rng, note):
    right = training.within(TOLERANCE)

    def draw(n):
        x, y, mask = tasks.temporal_order(rng, n, setting["length"])
        return [x, mask], y

    model = training.compiled(training.network(setting, features=8, outputs=4), setting, training.classes(), right)
    outcome = training.train(model, draw, setting, note)
    accuracy = training.share_right(model, draw, training.largest)
    finite = all(keras.ops.all(keras.ops.isfinite(w)) for w in model.weights)
    return {**outcome, "accuracy": accuracy, "not_finite": not finite}
