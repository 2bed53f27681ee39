#!/usr/bin/env bash
# The laws and the contract on another backend of Keras, and TensorFlow's values: ./scripts/backends.sh jax|torch
set -euo pipefail
cd "$(dirname "$0")/.."
source scripts/environment.sh
case "${1:-}" in
  jax) packages="jax" ;;
  torch) packages="torch==2.13.0" ;;
  *) echo "backends.sh expects jax or torch, received '${1:-}'." >&2; exit 2 ;;
esac
environment test
other=.venv-$1
stamp=$other/installed
packages="$packages keras>=3.13,<4 numpy pytest pytest-xdist"
wanted="$PWD: $packages"
modules=(tests/backends/check_backend.py tests/cells/test_laws.py tests/cells/test_keras_contract.py
  tests/cells/test_layers.py tests/cells/test_weights.py tests/seq2seq/test_attention.py tests/seq2seq/test_tokens.py
  tests/seq2seq/test_seq2seq.py::test_it_is_the_reference
  tests/seq2seq/test_seq2seq_training.py::test_every_form_of_data)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  echo "Installing $packages into $other (once) ..."
  .venv/bin/python -m venv --clear "$other"
  "$other/bin/python" -m pip install --quiet --disable-pip-version-check $packages
  echo "$wanted" >"$stamp"
fi
export PYTHONPATH=.:tests TF_CPP_MIN_LOG_LEVEL=3
KERAS_BACKEND=tensorflow .venv/bin/python tests/backends/values.py "$other/tensorflow.npz"
export KERAS_BACKEND=$1 TENSORFLOW_VALUES=$other/tensorflow.npz JAX_PLATFORMS=cpu
# JAX compiles each call anew; what it compiled before it finds there, in the next test as in the next run.
export JAX_COMPILATION_CACHE_DIR=$PWD/$other/compiled
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
"$other/bin/python" -m pytest -q -n auto --maxprocesses 4 --dist worksteal -m 'not slow' "${modules[@]}"
