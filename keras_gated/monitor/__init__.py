"""Takes gradients out of a running model.fit and writes them down."""
