#!/usr/bin/env python3
"""How fast the layers are: makes .venv with what is needed, once, and runs `python -m benchmarks` in it."""

from launch import launch

if __name__ == "__main__":
    launch("benchmarks", "benchmark", "torch")
