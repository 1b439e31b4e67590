#!/bin/sh
# Makes a virtual environment with this project and its dev extra in it.
#
#   scripts/make_venv.sh FOLDER [PYTHON]
#
# The environment is complete when its stamp holds the fingerprint of all that
# went into it. A complete one is left alone; one whose making failed half-way,
# or whose Python is gone, is made anew; one whose requirements have changed
# is brought up to date.

set -eu
cd "$(dirname "$0")/.."

venv=$1
python=${2:-}
stamp=$venv/complete

fingerprint() { # VERSION
  cat setup.cfg pyproject.toml "$(constraints "$1")" 2>/dev/null | cksum
  echo "$1 $PWD"
}

constraints() { # VERSION: the path of its pinned versions
  echo "constraints/py$(echo "$1" | tr -d .).txt"
}

refuse() { # REASON
  echo "error: PYTHON=$python $1; name a Python >= 3.11" >&2
  exit 1
}

version_of() {
  "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null
}

if [ -f "$stamp" ] && version=$(version_of "$venv/bin/python"); then
  if [ -z "$python" ] || [ "$(version_of "$python")" = "$version" ]; then
    if [ "$(cat "$stamp")" = "$(fingerprint "$version")" ]; then exit 0; fi
    fresh=no
  fi
fi

if [ -z "${fresh:-}" ]; then
  [ -n "$python" ] || python=$(scripts/find_python.sh)
  version=$(version_of "$python") || refuse "does not run"
  case $version in
    2.* | 3.[0-9] | 3.10) refuse "is version $version" ;;
  esac
  echo "making $venv with $python ($version), a minute or two"
  rm -rf "$venv"
  "$python" -m venv "$venv"
fi

rm -f "$stamp"
set -- -e '.[dev]'
pinned=$(constraints "$version")
if [ -f "$pinned" ]; then
  set -- "$@" -c "$pinned"
else
  echo "no $pinned: installing the newest versions instead of pinned ones"
fi
"$venv/bin/python" -m pip install -qq --disable-pip-version-check "$@"
fingerprint "$version" >"$stamp"
