# Sourced by demo and test: leaves $python pointing into an environment that has speclocal and its extras installed.
# An active environment ($VIRTUAL_ENV) is taken as it is; else .venv is used, and made if it is not there.
say() { printf '%s\n' "$*" >&2; }

find_python() {
  local candidate
  for candidate in python3.13 python3.12 python3.11 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s\n' "$candidate"
      return
    fi
  done
  say "No Python 3.11 or newer was found. Install one, then run this again."
  exit 1
}

prepare() { # prepare EXTRAS, e.g. "" or "[test]"
  if [ -n "${VIRTUAL_ENV:-}" ]; then
    say "Using the active environment $VIRTUAL_ENV"
    python="$VIRTUAL_ENV/bin/python"
  else
    if [ ! -x .venv/bin/python ]; then
      say "Making a virtual environment in .venv"
      "$(find_python)" -m venv .venv
    fi
    python=.venv/bin/python
  fi
  # What was installed from which pyproject.toml: an unchanged environment is not touched.
  local stamp mark
  mark="$("$python" -c 'import sys; print(sys.prefix)')/speclocal-installed$1"
  stamp="$(cksum <pyproject.toml) $PWD"
  if [ "$(cat "$mark" 2>/dev/null)" != "$stamp" ]; then
    say "Installing speclocal$1 and what it needs (PyTorch is the large part; once)"
    "$python" -m pip install --quiet --disable-pip-version-check --editable ".$1" >&2
    printf '%s' "$stamp" >"$mark"
  fi
}
