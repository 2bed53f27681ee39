#!/usr/bin/env bash
# Which of the chapter's claims hold, against published numbers.  Arguments: --help tells.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/scripts/environment.sh"
(cd "$root" && environment tutorials)
PYTHONPATH=$root/scripts${PYTHONPATH:+:$PYTHONPATH} quietly "$root/.venv/bin/python" -m reproduce "$@"
