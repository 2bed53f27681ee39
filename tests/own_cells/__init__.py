"""Cells that the package does not have, each in one file that touches nothing else: the proof of the contract."""

from functools import partial

import reference
from table import Cell, N

from own_cells.layer_norm_lstm import LayerNormLSTM
from own_cells.minimal_gated import MinimalGated
from own_cells.peephole_lstm import PeepholeLSTM
from own_cells.projected_lstm import ProjectedLSTM

P = 2  # the width of h of the projected LSTM

OWN_CELLS = {
    "minimal_gated": Cell(partial(MinimalGated, N), reference.minimal_gated, 2, 1),
    "peephole_lstm": Cell(partial(PeepholeLSTM, N), reference.peephole_lstm, 4, 2),
    "layer_norm_lstm": Cell(partial(LayerNormLSTM, N), reference.layer_norm_lstm, 4, 2),
    "projected_lstm": Cell(partial(ProjectedLSTM, N, projection=P), reference.projected_lstm, 4, 2),
}
