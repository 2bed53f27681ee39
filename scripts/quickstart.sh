#!/usr/bin/env bash
# Trains three recurrent layers on a long dependency in real data, and shows their gradients.  Takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment tutorials
# TensorFlow greets with lines on oneDNN and CUDA that no setting switches off.
.venv/bin/python scripts/quickstart.py "$@" \
  2> >(grep --line-buffered -v -e absl::InitializeLog -e port.cc -e cudart_stub >&2 || true)
