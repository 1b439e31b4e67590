#!/bin/sh
# Prints the path of the newest usable Python, or of a given version.
#
#   scripts/find_python.sh          newest of 3.13, 3.12, else python3 >= 3.11
#   scripts/find_python.sh 3.12     that version or none
#
# Usable means: it starts, it is the version that its name promises, and it
# can make a virtual environment and install into it. A pyenv shim may exist
# and not start; a Debian python3 may lack ensurepip.

set -u

usable() { # PATH VERSION: VERSION is "3.12" or "any"
  "$1" - "$2" <<'PYTHON' >/dev/null 2>&1
import sys
import ensurepip, lzma, ssl, venv, zlib
if sys.argv[1] == "any":
  sys.exit(sys.version_info < (3, 11))
sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])
PYTHON
}

found() { # PATH VERSION: prints the interpreter itself and ends, if usable
  path=$(command -v "$1" 2>/dev/null) || return 0
  if usable "$path" "$2"; then
    "$path" -c 'import sys; print(sys.executable)'
    exit 0
  fi
}

if [ $# -gt 0 ]; then versions=$1; else versions="3.13 3.12"; fi

for version in $versions; do
  found "python$version" "$version"
  for folder in "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version" \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*; do
    found "$folder/bin/python" "$version"
  done
  if [ $# -gt 0 ]; then found python3 "$version"; fi
done
if [ $# -eq 0 ]; then
  found python3 any
  found python3.11 3.11
  versions="3.11 or newer"
fi

echo "error: no usable Python $versions found (it must be able to make a" \
  "virtual environment); install one, e.g. with your package manager or" \
  "pyenv, or name one: make PYTHON=/path/to/python" >&2
exit 1
