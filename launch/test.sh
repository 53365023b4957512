#!/usr/bin/env bash
# Runs every check: lint, format, types, tests. Arguments go to pytest, for example:
#
#   launch/test.sh                        all tests but the slow and the multi-GPU ones
#   launch/test.sh -m slow                the full grids
#   launch/test.sh tests/test_loss.py -n 0
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

incomplete=0
bash launch/setup.sh test demo deepspeed trl || incomplete=$?
# Where nothing can be fetched, some tools may be missing; CI has to run them all.
if [ "$incomplete" -ne 0 ] && { [ "$incomplete" -ne 3 ] || [ "${CI:-}" = true ]; }; then
  exit "$incomplete"
fi
python="$(bash launch/setup.sh --print-python)"
has() { "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)' "$1"; }

failed=""
check() {
  local name="$1"
  shift
  echo "== $name"
  if [ "$1" != pytest ] && ! has "$1"; then
    echo "skipped: $1 is not installed in $python"
  elif ! "$python" -m "$@"; then
    failed="$failed, $name"
  fi
}

check "lint" ruff check .
check "format" ruff format --check .
check "types" mypy

options=(-m "not slow and not multigpu" --durations=10)
# Two workers halve the time on two cores; on a GPU they would share its memory.
if has xdist && ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  options+=(-n 2)
fi
if has pytest_timeout; then
  options+=(--timeout=600)
fi
check "tests" pytest "${options[@]}" "$@"

if [ -n "$failed" ]; then
  echo "failed: ${failed#, }"
  exit 1
fi
