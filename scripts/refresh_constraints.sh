#!/bin/sh
# Writes constraints/py3XX.txt: the newest versions that setup.cfg allows,
# as installed into a fresh environment of each supported Python.

set -eu
cd "$(dirname "$0")/.."

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
missing=

for version in 3.11 3.12 3.13; do
  file=constraints/py$(echo $version | tr -d .).txt
  if ! python=$(scripts/find_python.sh $version); then
    missing="$missing $file"
    continue
  fi
  echo "$file"
  venv=$folder/$version
  "$python" -m venv "$venv"
  "$venv/bin/python" -m pip install -qq --disable-pip-version-check \
    --upgrade -e '.[dev]'
  {
    echo "# Versions that work together on Python $version."
    echo "# Written by \`make constraints\`; do not edit."
    "$venv/bin/python" -m pip freeze --exclude-editable
  } >"$folder/frozen"
  mv "$folder/frozen" "$file"
done

if [ -n "$missing" ]; then
  echo "error: left as they were, for want of their Python:$missing" >&2
  exit 1
fi
