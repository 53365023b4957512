#!/usr/bin/env bash
# Trains a small real model on one long document, from nothing. Arguments override recipe settings:
#
#   launch/demo.sh [--key value ...]
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
bash launch/setup.sh demo
python="$(bash launch/setup.sh --print-python)"
"$python" launch/prepare_demo.py demo/
exec "$python" -m oomb_accel train configs/demo.yaml "$@"
