# Sourced by the other scripts: makes .venv where it is not there, and installs into it what has changed.
# PYTHON=… chooses the interpreter that .venv is made with.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_venv() {
  local python=${PYTHON:-python3}
  if [ -x .venv/bin/python ] && [ -n "${PYTHON:-}" ]; then
    local wanted have
    wanted=$("$python" -c 'import sys; print(sys.version)') || { echo "error: cannot run PYTHON=$python" >&2; exit 1; }
    have=$(.venv/bin/python -c 'import sys; print(sys.version)' 2>/dev/null || true)
    if [ "$wanted" != "$have" ]; then
      echo "== .venv is of another Python than $python: making it anew"
      rm -rf .venv
    fi
  fi
  if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || {
      echo "error: kvprune needs Python 3.11 or newer, and $python is $("$python" --version 2>&1); set PYTHON=/path/to/python3.11" >&2
      exit 1
    }
    echo "== making .venv with $("$python" --version 2>&1)"
    rm -rf .venv
    "$python" -m venv .venv || {
      echo "error: $python cannot make a virtual environment; on Debian: apt-get install python3-venv" >&2
      exit 1
    }
  fi
}

# install NAME ARGUMENTS…: pip install, unless the same was installed from the same files before.
install() {
  local stamp=.venv/.installed-$1 now
  shift
  now=$(cat pyproject.toml scripts/constraints.txt; echo "$*")
  if [ "$now" != "$(cat "$stamp" 2>/dev/null || true)" ]; then
    echo "== pip install $*"
    .venv/bin/python -m pip install --quiet --disable-pip-version-check -c scripts/constraints.txt "$@"
    echo "$now" >"$stamp"
  fi
}
