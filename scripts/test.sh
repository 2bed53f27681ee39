#!/usr/bin/env bash
# Format check, lint, and the tests that guard daily work.
# With --all: every test, the quick form of reproduce.sh, and the tests that matter with the oldest Keras, on JAX and on
# PyTorch.  With other arguments: those tests only, as pytest takes them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment test
.venv/bin/ruff format --check .
.venv/bin/ruff check .
run() {
  .venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
}
if [ $# -eq 0 ]; then
  # XLA compiles without LLVM's dear passes: less time for each program, more for each number.
  XLA_FLAGS="--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true" run -m 'not slow'
elif [ "$*" = --all ]; then
  # In several runs, as a process never gives back the programs that it has compiled.
  run tests/cells
  run tests/monitor tests/gradients
  run tests --ignore tests/cells --ignore tests/monitor --ignore tests/gradients
  ./scripts/reproduce.sh --quick --out "$(mktemp -d)"  # made anew each time
  ./scripts/oldest.sh
  ./scripts/backends.sh jax
  ./scripts/backends.sh torch
else
  run "$@"
fi
