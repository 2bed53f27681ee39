#!/usr/bin/env bash
# Checks the layers on another backend of Keras against TensorFlow's values: ./scripts/backends.sh jax|torch
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
if [ "$(cat "$stamp" 2>/dev/null)" != "$(pwd)" ]; then
  echo "Installing $packages into $other (once) ..."
  .venv/bin/python -m venv --clear "$other"
  "$other/bin/python" -m pip install --quiet --disable-pip-version-check $packages 'keras>=3.13,<4' numpy pytest
  pwd >"$stamp"
fi
export PYTHONPATH=.:tests TF_CPP_MIN_LOG_LEVEL=3
KERAS_BACKEND=tensorflow .venv/bin/python tests/backends/values.py "$other/tensorflow.npz"
export KERAS_BACKEND=$1 TENSORFLOW_VALUES=$other/tensorflow.npz JAX_PLATFORMS=cpu
"$other/bin/python" -m pytest -q -c /dev/null --rootdir . -p no:cacheprovider tests/backends/check_backend.py
