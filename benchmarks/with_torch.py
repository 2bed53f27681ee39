"""Contenders on PyTorch: torch.nn with oneDNN and without, and the bare matrix products."""

import numpy as np
import torch

import keras_gated as kg
from benchmarks.problem import Contender, products

MODULES = {"SimpleRNN": torch.nn.RNN, "LSTM": torch.nn.LSTM, "GRU after": torch.nn.GRU}


def contenders(problem):
    """{name: a function that makes the `Contender`}."""
    makers = {"products, torch": lambda: of_products(problem)}
    if problem.cell in MODULES:
        makers["torch"] = lambda: of_module(problem, onednn=False)
        makers["torch, oneDNN"] = lambda: of_module(problem, onednn=True)
    return makers


def of_module(problem, onednn):
    _, _, D, N = problem.shape
    module = MODULES[problem.cell](D, N, batch_first=True)
    state = kg.weights.to_torch(problem.layer)
    module.load_state_dict({name: torch.from_numpy(a.copy()) for name, a in state.items()})
    names, parameters = zip(*module.named_parameters(), strict=True)
    x, R = torch.from_numpy(problem.x), torch.from_numpy(problem.R)
    x_watched = x.clone().requires_grad_()

    def infer():
        with torch.inference_mode(), torch.backends.mkldnn.flags(enabled=onednn):
            return module(x)[0]

    def train():
        with torch.backends.mkldnn.flags(enabled=onednn):
            return torch.autograd.grad((module(x_watched)[0] * R).sum(), [x_watched, *parameters])

    def arrays(h, gradients):
        dx, *d_weights = (g.numpy() for g in gradients)
        state = dict(zip(names, d_weights, strict=True))
        if problem.cell != "GRU after":  # b_ih + b_hh is our b, and each has its gradient
            state["bias_hh_l0"] = np.zeros_like(state["bias_hh_l0"])
        return [h.numpy(), dx, *kg.weights.from_torch(state, problem.ours()).get_weights()]

    return Contender(infer, train, arrays)


def of_products(problem):
    """Each product on all cores."""
    B, T, _, _ = problem.shape
    x, W, h, h_rows, U, da, d_rows = (_tensors(a) for a in products(problem, B))
    U_T = [u.T.contiguous() for u in U]
    out, out_back = [d[0].clone() for d in d_rows], h_rows[0].clone()

    @torch.inference_mode()
    def infer():
        for t in range(T):
            for u, result in zip(U, out, strict=True):
                torch.mm(h_rows[t % 4], u, out=result)
        return x @ W

    @torch.inference_mode()
    def train():
        infer()
        for t in range(T):
            for d, u in zip(d_rows, U_T, strict=True):
                torch.mm(d[t % 4], u, out=out_back)
        return x.T @ da, h.T @ da, da @ W.T

    return Contender(infer, train)


def _tensors(a):
    return [torch.from_numpy(part) for part in a] if isinstance(a, list) else torch.from_numpy(a)
