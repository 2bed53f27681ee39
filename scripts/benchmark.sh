#!/usr/bin/env bash
# How fast the layers are, against keras.layers and torch.nn.  Arguments: --help tells.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/scripts/environment.sh"
(cd "$root" && environment benchmark)
PYTHONPATH=$root/scripts${PYTHONPATH:+:$PYTHONPATH} quietly "$root/.venv/bin/python" -m benchmark "$@"
