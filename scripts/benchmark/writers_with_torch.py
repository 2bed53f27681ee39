"""An encoder-decoder on PyTorch, as its users write it."""

import numpy as np
import torch
from benchmark import sequences
from benchmark.sequences import Writer

import keras_gated as kg


def writers(problem):
    """{name: a function that makes the `Writer`}."""
    return {"torch": lambda: of_torch(problem)}


class Model(torch.nn.Module):
    def __init__(self, problem):
        super().__init__()
        *_, V, N = problem.shape
        self.source, self.target = torch.nn.Embedding(V, N), torch.nn.Embedding(V, N)
        self.encoder = torch.nn.LSTM(N, N, batch_first=True)
        self.decoder = torch.nn.LSTM(N, N, batch_first=True)
        self.logits = torch.nn.Linear(N, V)
        arrays = problem.by_layer()
        kernel, bias = arrays["logits"]
        state = {"logits.weight": kernel.T, "logits.bias": bias}
        state["source.weight"], state["target.weight"] = *arrays["encoder_embedding"], *arrays["decoder_embedding"]
        for name in ("encoder", "decoder"):
            layer = kg.LSTM(N)
            layer.build((None, None, N))
            layer.set_weights(arrays[f"{name}_lstm"])
            state |= kg.weights.to_torch(layer, prefix=f"{name}.")
        self.load_state_dict({key: torch.from_numpy(np.array(a, "float32")) for key, a in state.items()})
        for lstm in (self.encoder, self.decoder):
            lstm.bias_hh_l0.requires_grad_(
                False
            )  # or the sum of both biases, which is our b, would learn twice as fast

    def encode(self, source):
        return self.encoder(self.source(source))[1]

    def decode(self, tokens, state):
        h, state = self.decoder(self.target(tokens), state)
        return self.logits(h), state


def of_torch(problem):
    B, T, *_ = problem.shape
    trained, writing = Model(problem), Model(problem)
    source, target = torch.from_numpy(problem.source).long(), torch.from_numpy(problem.target).long()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)

    def train():
        optimizer.zero_grad()
        logits, _ = trained.decode(target[:, :-1], trained.encode(source))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    def step(tokens, state):
        logits, state = writing.decode(torch.from_numpy(tokens)[:, None], state)
        return torch.log_softmax(logits[:, 0], 1).numpy(), state

    def follow(state, rows):
        return tuple(s[:, rows] for s in state)

    @torch.inference_mode()
    def greedy():
        return sequences.greedy(step, writing.encode(source), B, T)

    @torch.inference_mode()
    def beam():
        return sequences.beam(step, follow, writing.encode(source), B, T)

    return Writer(train, greedy, beam)
