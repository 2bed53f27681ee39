"""Which cells and shapes are measured, and in which processes."""

CELLS = ("SimpleRNN", "LSTM", "GRU", "GRU after")  # GRU after: reset gate after the product
SHAPES = (  # (B, T, D, N)
    (32, 50, 32, 64),
    (64, 100, 64, 128),
    (32, 200, 64, 256),
    (128, 100, 128, 512),
    (1, 1000, 8, 64),
    (16, 2000, 8, 32),
)
QUICK_SHAPES = ((32, 20, 32, 64),)
PARTS = ("grid", "masked", "lengths", "first", "memory", "growth", "threads", "callbacks", "sequences")
MODES = ("train", "infer")
WRITING = ("train", "greedy", "beam")
WIDTH = 5  # of the beam
SEQUENCES = (64, 20, 60, 256)  # B, T, vocabulary, units of encoder and decoder
WATCHED = (16, 12, 8, 16)  # two LSTMs, steps of 2 to 5 ms
WATCHED_STEPS = 1000  # of an epoch, at whose end heat maps are drawn
MASKED = (64, 100, 32, 64)
LENGTHS = [round(20 + 180 * i / 59) for i in range(60)]
GROWING_T = [(16, T, 8, 32) for T in (100, 300, 1000, 3000, 10000)]
GROWING_N = [(16, 50, 32, N) for N in (32, 64, 128, 256, 512, 1024)]
SETTINGS = {  # what stands before the command, and environment variables
    "": ([], {}),
    "taskset -c 0": (["taskset", "-c", "0"], {}),
    "OMP_NUM_THREADS=1": ([], {"OMP_NUM_THREADS": "1"}),
    "tf.config.threading": ([], {"TF_THREADS": "1", "OMP_NUM_THREADS": "1"}),
}


def entry(part, name, setting="", repeat=0, **arguments):
    """One measurement, by its name in worker.py."""
    return {"part": part, "setting": setting, "repeat": repeat, "name": name, "arguments": arguments}


def identity(e):
    return [e[key] for key in ("part", "setting", "repeat", "arguments")]


def title(e):
    arguments = e["arguments"]
    shape = "x".join(map(str, arguments["shape"]))
    return " ".join(filter(None, (e["part"], arguments["cell"], shape, arguments.get("contender"), e["setting"])))


def processes(parts, cells, shapes, rounds, seconds):
    """Lists of entries, one list for each process."""
    timing = {"rounds": rounds, "seconds": seconds}
    planned = [entry("grid", "steps", cell=c, shape=s, modes=MODES, **timing) for c in cells for s in shapes]
    for cell in cells:
        if cell != "GRU after":
            planned += _of_cell(cell, shapes, timing)
    for layer in ("ours", "keras"):
        planned.append(entry("callbacks", "watched_epoch", cell="LSTM", contender=layer, shape=WATCHED, rounds=rounds))
    planned.append(entry("sequences", "writers", cell="LSTM", shape=SEQUENCES, modes=WRITING, **timing))
    return [[e] for part in parts for e in planned if e["part"] == part]


def one_process(cells, shapes, rounds, seconds):
    """The same for a look: the grid of these shapes and a masked epoch."""
    grid = [
        entry("grid", "steps", cell=c, shape=s, modes=MODES, rounds=rounds, seconds=seconds)
        for c in cells
        for s in shapes
    ]
    return [grid + [entry("masked", "masked_epoch", cell=cells[-1], shape=shapes[0], batches=4, rounds=rounds)]]


def _of_cell(cell, shapes, timing):
    largest = max(shapes, key=lambda shape: shape[0] * shape[1] * shape[3])
    modes = ["ours", "keras", "keras, jit", *(["keras, unroll"] if largest[1] <= 100 else [])]
    rivals = ["ours", "keras", "keras, jit", "torch", "torch, oneDNN"]
    lengths = {"shape": (32, 200, 16, 64), "lengths": LENGTHS, "last_batch": 13}
    steps = {"modes": ["train"], **timing}
    return [
        entry("masked", "masked_epoch", cell=cell, shape=MASKED, batches=10, rounds=timing["rounds"]),
        *(
            entry("lengths", "lengths_epoch", repeat=i, cell=cell, contender=c, **lengths)
            for i in range(3)
            for c in ("ours", "keras")
        ),
        *(
            entry("first", "first_call", repeat=i, cell=cell, contender=c, shape=shapes[0])
            for i in range(3)
            for c in modes
        ),
        *(entry("memory", "memory", repeat=i, cell=cell, contender=c, shape=largest) for i in range(5) for c in modes),
        *(entry("growth", "steps", cell=cell, shape=s, only=rivals, **steps) for s in GROWING_T + GROWING_N),
        *(
            entry("threads", "steps", setting, cell=cell, shape=shapes[0], only=["ours, jit", *rivals], **steps)
            for setting in SETTINGS
        ),
    ]
