"""Contenders on PyTorch: torch.nn with oneDNN and without, and the bare matrix products."""

import numpy as np
import torch
from benchmark.problem import Contender, products

import keras_gated as kg

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
    _, T, _, N = problem.shape
    x, W, h, U, da, da_step = (_tensors(a) for a in products(problem, problem.shape[0]))
    U_T = [u.T.contiguous() for u in U]
    out = [d.clone() for d in da_step]
    h_prev = out[0][:, :N]

    @torch.inference_mode()
    def infer():
        for _ in range(T):
            for u, result in zip(U, out, strict=True):
                result[:] = h_prev @ u
        return x @ W

    @torch.inference_mode()
    def train():
        infer()
        for _ in range(T):
            for d, u in zip(da_step, U_T, strict=True):
                d[:, :N] = d @ u
        return x.T @ da, h.T @ da, da @ W.T

    return Contender(infer, train)


def _tensors(a):
    return [torch.from_numpy(part) for part in a] if isinstance(a, list) else torch.from_numpy(a)
