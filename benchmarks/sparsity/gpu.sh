#!/usr/bin/env bash
# The study on a GPU machine that takes 64 MiB of files per call and has no network. From the repository root:
#   bash benchmarks/sparsity/gpu.sh stash            # once per part of the packed model
#   bash benchmarks/sparsity/gpu.sh smoke 3          # everything, a few documents and steps; minutes
#   bash benchmarks/sparsity/gpu.sh first 7.5
#   bash benchmarks/sparsity/gpu.sh second 7.5
# Results go to $OUT. An adapter in .whl/smol/adapter is taken, else made.
set -euo pipefail
SCRATCH=${TMPDIR:-/tmp}/oomb-study # outside of the tree, which a call may replace
MODEL=$SCRATCH/model WORK=$SCRATCH/work PACKAGES=$SCRATCH/packages
mkdir -p "$MODEL" "$WORK"
cp -n .whl/smol/smol.part* "$MODEL"/ 2>/dev/null || true
if ls .whl/liger_kernel-*.whl >/dev/null 2>&1; then
  python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$PACKAGES" .whl/liger_kernel-*.whl
fi
ls -la "$MODEL"
[ "$1" = stash ] && exit 0
size=full
[ "$1" = smoke ] && size=smoke && WORK=$SCRATCH/smoke
if [ -d .whl/smol/adapter ]; then mkdir -p "$WORK/adapter" && cp .whl/smol/adapter/* "$WORK/adapter"/; fi
export PYTHONPATH="$PWD:$PWD/kernels:$PACKAGES" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
jobs=$1
[ "$1" = smoke ] && jobs=all
# shellcheck disable=SC2086
python3 -m benchmarks.sparsity.run $jobs --source "$MODEL" --work "$WORK" --out "$OUT" --size "$size" --minutes "${2:-7.5}" 2>&1 | tee "$OUT/log.txt"
