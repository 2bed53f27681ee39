#!/usr/bin/env bash
# Format check, lint, all tests, the quick form of reproduce.py, and the tests that matter with the oldest Keras and on JAX.
# With arguments: those tests only, as pytest takes them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment test
.venv/bin/ruff format --check .
.venv/bin/ruff check .
run() {
  .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
}
if [ $# -gt 0 ]; then
  run "$@"
else
  run tests/test_[a-l]*.py  # in two runs, as a process never gives back the programs that it has compiled
  run tests/test_[m-z]*.py
  ./scripts/reproduce.sh --quick --out "$(mktemp -d)"  # made anew each time
  ./scripts/oldest.sh
  ./scripts/backends.sh jax
fi
