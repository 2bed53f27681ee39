#!/usr/bin/env bash
# Format check, lint, all tests.  Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
environment test
.venv/bin/ruff format --check .
.venv/bin/ruff check .
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal "$@"
