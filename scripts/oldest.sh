#!/usr/bin/env bash
# Runs the tests that lean most on Keras with the oldest version that setup.cfg allows.  Arguments: as pytest takes them.
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
modules=(tests/cells/test_layers.py tests/cells/test_keras_contract.py tests/clipping tests/monitor
  tests/seq2seq/test_seq2seq_training.py)

environment test
oldest=$(sed -n 's/^ *keras>=\([0-9.]*\).*/\1/p' setup.cfg)
folder=.keras-oldest
if [ "$(cat "$folder/installed" 2>/dev/null)" != "$oldest" ]; then
  echo "Installing keras $oldest into $folder (once) ..."
  rm -rf "$folder"
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "keras==$oldest"
  echo "$oldest" >"$folder/installed"
fi
# In front of .venv's own Keras, for the processes that tests start as well.
export PYTHONPATH=$PWD/$folder TF_CPP_MIN_LOG_LEVEL=3
found=$(.venv/bin/python -W ignore -c 'import keras; print(keras.__version__)')
if [[ $found. != "$oldest".* ]]; then
  echo "oldest.sh expects Keras $oldest, as in setup.cfg, and Python imports $found. Remove $folder and run this again." >&2
  exit 1
fi
echo "Keras $found:"
.venv/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal -m 'not slow' "${modules[@]}" "$@"
