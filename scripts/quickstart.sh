#!/usr/bin/env bash
# Trains three recurrent layers on a long dependency in real data, and shows their gradients.  Takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment tutorials
quietly .venv/bin/python scripts/quickstart.py "$@"
