#!/usr/bin/env bash
# Packs packages for a GPU host without a package index that has torch, transformers, peft and triton: Linux, x86_64,
# the given version of Python. SET is one of
#   tests       what else the library and tests/gpu need (without a name)
#   flash4      FlashAttention 4 (the extra `hopper`) for CUDA 13
#   deepspeed   what `train.backend: deepspeed` needs
#   tools/host_packages.sh OUT.tar.xz [3.12] [SET]        on a machine with an index
# There:
#   mkdir site && tar -C site -xJf OUT.tar.xz
#   PYTHONPATH=$PWD/site:$PWD/site/nvidia_cutlass_dsl/dsl_packages:$PWD/src:$PWD/tests python -m pytest -n 8 tests/gpu
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:?usage: tools/host_packages.sh OUT.tar.xz [PYTHON_VERSION] [tests|flash4|deepspeed]}")
version=${2:-3.12}
case ${3:-tests} in
tests) names="datasets gguf dill multiprocess pydantic pydantic-core annotated-types annotated-doc
  typing-inspection httpx2 httpcore2 truststore
  typer rich markdown-it-py mdurl pygments shellingham llguidance starlette uvicorn h11 anyio sniffio
  math-verify latex2sympy2-extended antlr4-python3-runtime optuna
  pytest pytest-xdist execnet pytest-timeout hypothesis sortedcontainers iniconfig pluggy" ;;
flash4) names="flash-attn-4==4.0.0b36 nvidia-cutlass-dsl==4.8.1 nvidia-cutlass-dsl-libs-base==4.8.1
  nvidia-cutlass-dsl-libs-cu13==4.8.1 nvidia-cutlass-dsl-libs-core==4.8.1 quack-kernels apache-tvm-ffi<0.2
  torch-c-dlpack-ext einops protobuf" ;;
deepspeed) names="deepspeed hjson msgpack ninja psutil py-cpuinfo einops" ;;
*) echo "there is no set ${3}: tests, flash4 or deepspeed" >&2; exit 2 ;;
esac
flags=(--no-deps --python-version "$version" --implementation cp)
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
mkdir "$work/wheels" "$work/site"
for one in "${wanted[@]}"; do # what has no wheel is built: it is Python alone
  python3 -m pip download -q "${flags[@]}" --only-binary=:all: -d "$work/wheels" "$one" ||
    python3 -m pip wheel -q --no-deps -w "$work/wheels" "$one"
done
for wheel in "$work"/wheels/*.whl; do # packages that share a folder are merged, as pip's --target would not
  python3 -m zipfile -e "$wheel" "$work/site"
done
mkdir -p "$(dirname "$out")"
tar -C "$work/site" -cf - . | xz -T0 -3 >"$out"
ls -l "$out"
