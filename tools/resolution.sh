#!/usr/bin/env bash
# Runs tests with the lowest or the newest versions of our dependencies that pyproject.toml allows, torch as installed.
# They go into .venv-lowest or .venv-newest, in front of the packages of .venv.
#   tools/resolution.sh lowest|newest [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
kind=${1:?usage: tools/resolution.sh lowest|newest [pytest arguments]}
shift
case $kind in
  lowest) rule=lowest-direct ;;
  newest) rule=highest ;;
  *) echo "unknown resolution $kind: lowest or newest" >&2; exit 2 ;;
esac
python=.venv/bin/python
site=.venv-$kind
key=$(cksum <pyproject.toml)
if [ "$(cat "$site/.key" 2>/dev/null)" != "$key" ]; then
  $python -m uv --version >/dev/null 2>&1 || $python -m pip install -q uv
  rm -rf "$site"
  mkdir "$site"
  $python -c 'import torch; print("torch==" + torch.__version__.split("+")[0])' >"$site/.torch"
  $python -m uv pip compile pyproject.toml --resolution "$rule" --constraint "$site/.torch" --no-header --no-annotate -q -o "$site/.all"
  # what we depend on by name, and pydantic's other half, which must match it exactly
  sed -n '/^dependencies = \[/,/^\]/s/^  "\([A-Za-z0-9_-]*\).*/\1/p' pyproject.toml | tr '_' '-' >"$site/.named"
  echo pydantic-core >>"$site/.named"
  grep -iE "^($(paste -sd '|' "$site/.named"))==" "$site/.all" | grep -v '^torch==' >"$site/.ours"
  $python -m pip install -q --no-deps --target "$site" -r "$site/.ours"
  echo "$key" >"$site/.key"
fi
paste -sd ' ' "$site/.ours"
[ $# -gt 0 ] || set -- tests/unit tests/arch tests/parity tests/contract
PYTHONPATH=$PWD/$site OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
  $python -m pytest -q -x "$@"
