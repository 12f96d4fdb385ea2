"""Every decoder of transformers at toy size: is it right here, refused by name, or wrong?

    python benchmarks/architectures.py
    python benchmarks/architectures.py --names gpt_oss qwen3_next --precisions float32

The names are those of transformers' MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, without those that are no
decoders of text (listed at the end with the reason), and variants: windows, rotary embeddings,
heads of unequal sizes. Each toy is written to a directory and loaded as `reinforge train` loads a
model, the proof included. Then it is compared with transformers alone, which has eager attention
and knows nothing of packs:

- log-probs of each sample alone, packed, with a shared prompt, and of what the engine samples
- greedy answers of the native engine with `generate`, token by token
- gradients of a pack, with a shared prompt and without, with those of separate forwards
- saved and loaded again: the same bits
- LoRA: all of it again, with the adapter merged into the weights

in float32 and in bfloat16. Each toy has a process of its own. The verdicts are held against the
table of `reinforge models`; the exit code is 1 where anything is wrong, crashes or differs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

# a toy takes seconds; one that hangs is a crash
SECONDS = 300.0
BAD = ("wrong", "crash")
WORST = ("crash", "wrong", "refused", "trains", "right")


def main() -> int:
    arguments = _arguments()
    from helpers.toy_architectures import EXCLUDED, names

    every = names()
    chosen = arguments.names or every
    unknown = [name for name in chosen if name not in every]
    if unknown:
        print(f"no such toy: {', '.join(unknown)}; there are {', '.join(every)}")
        return 2
    began = time.monotonic()
    _import_all()
    with ThreadPoolExecutor(arguments.jobs) as pool:
        found = list(pool.map(lambda name: _in_a_process(name, arguments.precisions), chosen))
    results = [result for part in found for result in part]
    _print_table(results)
    if not arguments.names:
        print("\nnot decoders of text:")
        for reason in dict.fromkeys(EXCLUDED.values()):
            left_out = [name for name, why in EXCLUDED.items() if why == reason]
            print(f"  {reason}: {', '.join(left_out)}")
    verdicts = _verdicts(results)
    counts = Counter(verdicts.values())
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in reversed(WORST))
    print(f"\n{len(verdicts)} toys in {time.monotonic() - began:.0f} s: {told}")
    differ = [line for result in results for line in result["differs"]]
    for line in differ:
        print(f"the table differs: {line}")
    if arguments.out:
        lines = ",\n".join(json.dumps(_rounded(result)) for result in results)
        arguments.out.write_text(f"[\n{lines}\n]\n")
    return 1 if differ or any(counts[bad] for bad in BAD) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--names", nargs="*", help="only these toys")
    parser.add_argument(
        "--precisions", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"]
    )
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, help="write every number here, as JSON")
    return parser.parse_args()


def _import_all() -> None:
    """One trial here, so that the processes forked from it have everything imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a device in use would not survive a fork
    import torch
    import transformers

    from helpers.architecture_trial import try_architecture
    from helpers.toy_architectures import make_config

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    try_architecture("llama", make_config("llama"), "float32")


def _in_a_process(name: str, precisions: Sequence[str]) -> list[dict[str, Any]]:
    """What became of a toy; a process that dies or hangs is a crash."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=_try, args=(name, precisions, theirs), daemon=True)
    began = time.monotonic()
    process.start()
    theirs.close()
    results: list[dict[str, Any]] = []
    try:
        while len(results) < len(precisions) and ours.poll(SECONDS):
            results.append(ours.recv())
    except EOFError:
        pass
    if process.is_alive() and len(results) < len(precisions):
        process.terminate()
    process.join()
    for precision in precisions[len(results) :]:
        said = f"the process ended with {process.exitcode}"
        results.append(_result(name, precision, verdict="crash", said=said))
    worst = _verdicts(results)[name]
    print(f"{worst:8} {name} ({time.monotonic() - began:.1f} s)", flush=True)
    return results


def _try(name: str, precisions: Sequence[str], pipe: Any) -> None:
    import warnings

    from helpers.architecture_trial import differences, try_architecture
    from helpers.toy_architectures import VARIANTS, make_config

    warnings.simplefilter("ignore")
    for precision in precisions:
        try:
            config = make_config(name)
        except Exception as error:
            said = f"no toy: {type(error).__name__}: {error}"
            pipe.send(_result(name, precision, verdict="crash", said=said))
            continue
        result = try_architecture(name, config, precision)  # type: ignore[arg-type]
        # of a variant something else may be true than of its architecture
        differ = [] if name in VARIANTS else differences(result)
        pipe.send({**asdict(result), "differs": differ})


def _result(name: str, precision: str, *, verdict: str, said: str) -> dict[str, Any]:
    return {
        "name": name,
        "precision": precision,
        "verdict": verdict,
        "said": said,
        "known": False,
        "features": {},
        "gaps": {},
        "limits": {},
        "wrong": [],
        "differs": [],
    }


def _rounded(result: dict[str, Any]) -> dict[str, Any]:
    short = {
        key: {name: float(f"{value:.2g}") for name, value in result[key].items()}
        for key in ("gaps", "limits")
    }
    return {**result, **short}


def _verdicts(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """By name, over the precisions: the worst."""
    found: dict[str, str] = {}
    for result in results:
        before = found.get(result["name"], "right")
        found[result["name"]] = min(before, result["verdict"], key=WORST.index)
    return found


def _print_table(results: Sequence[dict[str, Any]]) -> None:
    """One line for each toy and precision, with the largest differences or what was said."""
    print()
    print(f"{'toy':32} {'precision':9} {'verdict':8} what")
    for result in results:
        gaps = result["gaps"]
        told = result["said"] or "; ".join(result["wrong"])
        if result["verdict"] == "right":
            flags = ("gradient", "greedy")
            logprobs = max((v for k, v in gaps.items() if not k.startswith(flags)), default=0.0)
            gradients = max((v for k, v in gaps.items() if "gradient" in k), default=0.0)
            told = f"log-probs {logprobs:.1e}, gradients {gradients:.1e}"
        if result["verdict"] == "wrong":
            told = "; ".join(result["wrong"])
        told = told.splitlines()[0] if told else ""
        line = f"{result['name']:32} {result['precision']:9} {result['verdict']:8} {told}"
        print(line[:300])


if __name__ == "__main__":
    sys.exit(main())
