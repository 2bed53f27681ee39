#!/usr/bin/env python3
"""What of the chapter holds: makes .venv with what is needed, once, and runs `python -m reproduction` in it."""

from launch import launch

if __name__ == "__main__":
    launch("reproduction", "tutorials", "turkish_treebanks")
