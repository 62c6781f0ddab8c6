#!/bin/sh
# wheel_test.sh PYTHON: builds the sdist, and the wheel from it; installs the wheel alone into two fresh environments
# (newest and oldest NumPy and ml_dtypes that the metadata allow) and, from a folder outside the tree, decodes with
# the launchers and the Decoder on the emulator and runs the commands.
set -eu
python=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$(pwd)

# `build` without a choice makes the wheel from the sdist, so both are tested.
"$python" -m build --quiet --outdir "$work/dist" .
"$python" tools/check_dist.py "$work"/dist/*.tar.gz "$work"/dist/*.whl

# The lower bounds of pyproject.toml, as pip takes them.
oldest=$("$python" tools/check_dist.py --oldest)

try() {
  name=$1
  shift
  echo "cupaged: the wheel with ${*:-the newest of what it needs}"
  "$python" -m venv "$work/$name"
  "$work/$name/bin/python" -m pip install --quiet --disable-pip-version-check "$work"/dist/*.whl "$@"
  mkdir -p "$work/outside"
  cp "$root/examples/minimal.py" "$root/examples/decoder.py" "$work/outside/"
  cd "$work/outside"
  "$work/$name/bin/python" minimal.py
  "$work/$name/bin/python" decoder.py
  "$work/$name/bin/cupaged" doctor
  "$work/$name/bin/cupaged" inspect --format nvfp4 --token 37 > /dev/null
  "$work/$name/bin/cupaged" bench --backend emulator --q-heads 4 --kv-heads 2 --head-dim 64 --seqs 1 --length 40 \
    --formats bf16 --replays 1
  # Without the repository's examples the demo says what is missing: exit status 3.
  status=0
  "$work/$name/bin/cupaged" demo 2> /dev/null || status=$?
  [ "$status" = 3 ]
  cd "$root"
}

try newest
# The oldest NumPy has no wheel for newer Pythons.
if "$python" -c 'import sys; sys.exit(sys.version_info >= (3, 13))'; then
  # shellcheck disable=SC2086
  try oldest $oldest
fi
