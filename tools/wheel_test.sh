#!/bin/sh
# wheel_test.sh PYTHON: builds the wheel, installs it alone into a fresh environment, and decodes with it on
# the emulator from a folder outside the tree; the doctor must find it well.
set -eu
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m build --quiet --outdir "$work/dist" .
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$work"/dist/*.whl
cp examples/minimal.py "$work/minimal.py"
cd "$work"
"$work/venv/bin/python" minimal.py
"$work/venv/bin/python" -m cupaged doctor
