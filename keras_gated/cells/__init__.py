"""One module per cell: its equations, their transpose, and the layer."""
