# Sourced by the other scripts: `environment EXTRA` makes .venv with the package and one of its extras, once;
# `quietly COMMAND` runs without the lines on oneDNN and CUDA that TensorFlow greets with and no setting switches off.

quietly() {
  "$@" 2> >(grep --line-buffered -v -e absl::InitializeLog -e port.cc -e cudart_stub >&2 || true)
}

suits() {
  "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11 python; do
    if suits "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  echo "keras_gated needs Python 3.11, 3.12 or 3.13, and found $(python3 --version 2>/dev/null || echo none). Install one and run this again." >&2
  return 1
}

environment() {
  local extra=$1 python stamp wanted
  stamp=.venv/installed-$extra
  wanted=$(pwd && cat setup.cfg pyproject.toml)
  if ! suits .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    python=$(find_python) || return 1
    if ! "$python" -m venv --clear .venv; then
      rm -rf .venv
      echo "$python could not make .venv: install its venv module (on Debian: apt install python3-venv) and run this again." >&2
      return 1
    fi
  fi
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "Installing keras_gated[$extra] into .venv (once, a few minutes) ..."
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[$extra]" || return 1
    printf '%s\n' "$wanted" >"$stamp"
  fi
}
