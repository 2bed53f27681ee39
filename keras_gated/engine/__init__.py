"""Runs the equations of a cell through time, forward and backward."""
