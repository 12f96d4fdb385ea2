#!/usr/bin/env bash
# Packs what the library and tests/gpu need beside torch, transformers, peft and triton, for a GPU host
# without a package index: Linux, x86_64, the given version of Python.
#   tools/host_packages.sh OUT.tar.xz [3.12]        on a machine with an index
# There:
#   mkdir site && tar -C site -xJf OUT.tar.xz
#   PYTHONPATH=$PWD/site:$PWD/src:$PWD/tests python -m pytest -n 8 tests/gpu
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: tools/host_packages.sh OUT.tar.xz [PYTHON_VERSION]}")
version=${2:-3.12}
names="datasets gguf dill multiprocess pydantic pydantic-core annotated-types annotated-doc
  typing-inspection httpx2 httpcore2 truststore
  typer rich markdown-it-py mdurl pygments shellingham llguidance starlette uvicorn h11 anyio sniffio
  math-verify latex2sympy2-extended antlr4-python3-runtime optuna
  pytest pytest-xdist execnet pytest-timeout hypothesis sortedcontainers iniconfig pluggy"
flags=(--no-deps --only-binary=:all: --python-version "$version" --implementation cp)
flags+=(--abi "cp${version/./}" --abi abi3 --abi none)
for kind in manylinux_2_{5,12,17,24,26,27,28,31,34,35}_x86_64 manylinux{1,2010,2014}_x86_64 linux_x86_64 any; do
  flags+=(--platform "$kind")
done
wanted=()
for name in $names; do
  pinned=$(grep -i -m 1 "^$name==" constraints.txt | sed 's/ *;.*//' || true)
  wanted+=("${pinned:-$name}")
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pip install -q "${flags[@]}" --target "$work" "${wanted[@]}"
mkdir -p "$(dirname "$out")"
tar -C "$work" -cf - . | xz -T0 -3 >"$out"
ls -l "$out"
