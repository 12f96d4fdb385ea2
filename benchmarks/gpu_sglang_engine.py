"""An SGLang server through our engine, on the trainer's GPU: everything that a run asks of one,
checked against the trainer's own module.

    python benchmarks/gpu_sglang_engine.py --model DIR [--engine-path SITE] [--attention fa3]
                                           [--sleep all] [--out FILE]

Prints a line of JSON for each of: start (seconds, error of the first proof in nats), sample
(log-probs of sampled tokens against the trainer's, at two temperatures; whether a seed repeats
them), stop (ends at stop tokens), update (seconds, with 32 answers under way that are interrupted
and go on), left (an update right after the caller of a request has gone), cache (tokens of a prompt
that the prefix cache had, before and after an update), form (an answer of a given form), sleep (GiB
of the GPU before, asleep and awake), speed (tokens per second). A check that fails is printed as
`failed`, and the others go on. The server's PYTHONPATH may be another than ours.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from reinforge.build.served import trainer_score
from reinforge.config.engine import EngineConfig
from reinforge.config.model import ModelConfig
from reinforge.core.batch import Batch
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Completion, Sampling
from reinforge.core.sample import Sample, Stop
from reinforge.core.weights import Weights
from reinforge.engines.served.dialect import ServerSetup
from reinforge.engines.served.engine import ServedEngine
from reinforge.engines.served.make import make_served
from reinforge.models.causal import CausalModel
from reinforge.models.load import load_model

PROMPT = list(range(300, 340))
FREE = Sampling(64, ignore_eos=True)
Result = dict[str, Any]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a model's directory, with its tokenizer")
    parser.add_argument("--engine-python", help="the server's Python; default: this one")
    parser.add_argument("--engine-path", default="", help="the server's PYTHONPATH; default: ours")
    parser.add_argument("--engine-memory", type=float, default=0.3, help="share of the GPU")
    parser.add_argument("--attention", help="SGLang's --attention-backend; default: its own choice")
    parser.add_argument("--engine-args", default="{}", help="more options of SGLang's, as JSON")
    parser.add_argument("--unseeded", action="store_true", help="no deterministic inference")
    parser.add_argument("--sleep", choices=("never", "cache", "all"), default="all")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.5,
        help="of the proof, in nats: more than a run allows, so that a check can tell what differs",
    )
    parser.add_argument("--start-seconds", type=float, default=120.0)
    parser.add_argument("--check-seconds", type=float, default=30.0, help="for each check")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_engine(args: argparse.Namespace, model: CausalModel, folder: Path) -> ServedEngine:
    extra = json.loads(args.engine_args)
    if args.attention:
        extra["attention-backend"] = args.attention
    cfg = EngineConfig.model_validate(
        {
            "python": args.engine_python,
            "env": {"PYTHONPATH": args.engine_path} if args.engine_path else {},
            "memory": args.engine_memory,
            "sleep": args.sleep,
            "seeded": not args.unseeded,
            "start_seconds": args.start_seconds,
            "tolerance": args.tolerance,
            "args": extra,
        }
    )
    setup = ServerSetup(
        kind="sglang",
        cfg=cfg,
        model=args.model,
        folder=folder,
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        context=2048,
        vocabulary=int(model.head.weight.shape[0]),
        max_batch=256,
    )
    return make_served(setup, trainer_score(model))


class Checks:
    """The engine, the trainer's module that its weights come from, and what is found."""

    def __init__(self, args: argparse.Namespace, model: CausalModel, engine: ServedEngine):
        self.args = args
        self.model = model
        self.engine = engine
        self.version = 0
        self.results: dict[str, Result] = {}

    async def all(self) -> None:
        await self.run("start", self.update, self.args.start_seconds)
        if "failed" in self.results["start"]:
            return
        names = ["sample", "stop", "update", "left", "cache", "form", "speed"]
        if self.args.sleep != "never":
            names.insert(-1, "sleep")
        for name in names:
            await self.run(name, getattr(self, f"_{name}"), self.args.check_seconds)

    async def run(self, name: str, check: Callable[[], Awaitable[Result]], seconds: float) -> None:
        began = time.perf_counter()
        try:
            found = await asyncio.wait_for(check(), seconds)
        except Exception as error:  # the other checks are made all the same
            found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        found = {**found, "took_s": time.perf_counter() - began, "restarts": self.engine.restarts}
        self.results[name] = found
        print(json.dumps({name: found}), flush=True)

    async def update(self) -> Result:
        began = time.perf_counter()
        await self.engine.update(Weights("shared", module=self.model.module), self.version)
        return {
            "seconds": time.perf_counter() - began,
            "probe_error": self.engine.measured["weights/probe_error"],
        }

    @torch.no_grad()
    def change(self) -> None:
        """A step of training, as far as an engine can tell."""
        self.version += 1
        torch.manual_seed(self.version)
        for p in self.model.module.parameters():
            p.add_(torch.randn_like(p) * 0.02 * p.float().std().to(p.dtype))

    async def _sample(self) -> Result:
        found: Result = {}
        for temperature in (1.0, 0.7):
            params = Sampling(64, temperature, ignore_eos=True)
            done = await self.engine.generate(PROMPT, params, key=1, n=8)
            found[f"difference_{temperature}"] = differences(self.model, done, temperature)
        again = await self.engine.generate(PROMPT, params, key=1, n=8)
        same = [a.tokens == b.tokens for a, b in zip(done, again, strict=True)]
        return {**found, "repeated": sum(same) / len(same)}

    async def _stop(self) -> Result:
        """At tokens that a free answer had."""
        [free] = await self.engine.generate(PROMPT, FREE, key=2)
        stops = frozenset(free.tokens[8:40])
        params = Sampling(200, stop_tokens=tuple(stops))
        found = await self.engine.generate(PROMPT, params, key=2, n=32)
        for done in found:
            assert not stops.intersection(done.tokens[:-1]), "went on after a stop token"
            assert (done.stop is Stop.EOS) == (done.tokens[-1] in stops)
        return {"stopped": sum(done.stop is Stop.EOS for done in found), "of": len(found)}

    async def _update(self) -> Result:
        """Under answers that are being written."""
        old = copy.deepcopy(self.model)
        before = self.version
        params = Sampling(1000, ignore_eos=True)
        task = asyncio.ensure_future(self.engine.generate(PROMPT, params, key=3, n=32))
        await asyncio.sleep(1.0)
        self.change()
        found = await self.update()
        answers = await task
        cuts = [done.versions.count(before) for done in answers]
        newer = self.version
        gaps = [
            differences(old, answers, version=before),
            differences(self.model, answers, version=newer),
        ]
        # what is rounding, on either side, and what would be weights that did not arrive
        precise = CausalModel(copy.deepcopy(self.model.module).float())
        apart = {
            "float32": differences(precise, answers, version=newer),
            "float32_and_trainer": self.noise(precise, answers, newer),
            "weights_before": differences(old, answers, version=newer),
        }
        del precise
        seconds = [found["seconds"]]
        for _ in range(3):
            self.change()
            seconds.append((await self.update())["seconds"])
        return {
            "seconds": seconds,
            "probe_error": self.engine.measured["weights/probe_error"],
            "tokens_before": [min(cuts), max(cuts)],
            "difference_before_after": gaps,
            "difference_from": apart,
            "lengths": sorted({len(done.tokens) for done in answers}),
        }

    def noise(
        self, precise: CausalModel, answers: Sequence[Completion], version: int
    ) -> dict[str, float]:
        """Of the trainer's log-probs from those in float32."""
        told = [replace(a, logprobs=logprobs_of(self.model, a, 1.0).tolist()) for a in answers]
        return differences(precise, told, version=version)

    async def _left(self) -> Result:
        params = Sampling(1500, ignore_eos=True)
        task = asyncio.ensure_future(self.engine.generate(PROMPT, params, key=4, n=16))
        await asyncio.sleep(0.5)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self.change()
        return await self.update()

    async def _cache(self) -> Result:
        prompt = [300 + i % 1000 for i in range(1500)]
        cached = [await self._cached(prompt), await self._cached(prompt)]
        self.change()
        await self.update()
        return {"cached_tokens": [*cached, await self._cached(prompt)], "prompt": len(prompt)}

    async def _cached(self, prompt: Sequence[int]) -> int:
        http = self.engine.replicas[0].http
        assert http is not None
        asked = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": 1}}
        answer = await http.post("/generate", asked)
        return int(answer["meta_info"]["cached_tokens"])

    async def _form(self) -> Result:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.args.model)
        params = Sampling(32, constraint=Constraint("regex", "(yes|no): [0-9]{4}"))
        found = await self.engine.generate(PROMPT, params, key=5, n=4)
        return {"texts": [tokenizer.decode(done.tokens) for done in found]}

    async def _sleep(self) -> Result:
        taken = [used()]
        began = time.perf_counter()
        await self.engine.sleep()
        seconds = [time.perf_counter() - began]
        taken.append(used())
        began = time.perf_counter()
        [done] = await self.engine.generate(PROMPT, FREE, key=6)  # wakes, with its weights
        seconds.append(time.perf_counter() - began)
        taken.append(used())
        found = {"difference": differences(self.model, [done])}
        await self.engine.sleep()
        self.change()
        found |= await self.update()  # in its sleep
        return {**found, "gib": taken, "asleep_and_awake_s": seconds}

    async def _speed(self) -> Result:
        params = Sampling(256, ignore_eos=True)
        began = time.perf_counter()
        asked = (self.engine.generate([300 + i, *PROMPT], params, key=i, n=8) for i in range(32))
        found = await asyncio.gather(*asked)
        seconds = time.perf_counter() - began
        tokens = sum(len(done.tokens) for group in found for done in group)
        return {"tokens": tokens, "tokens_per_second": tokens / seconds}


def used() -> float:
    """GiB of the GPU that are taken, by whomever."""
    if not torch.cuda.is_available():
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 2**30


@torch.no_grad()
def logprobs_of(model: CausalModel, done: Completion, temperature: float) -> torch.Tensor:
    whole = [*PROMPT, *done.tokens]
    sample = Sample.from_tokens("x", whole, [i >= len(PROMPT) for i in range(len(whole))])
    batch = Batch.pack([sample]).to(model.device)
    return model.logprobs(batch, temperature=temperature)[0].float().cpu()


def differences(
    model: CausalModel,
    found: Sequence[Completion],
    temperature: float = 1.0,
    version: int | None = None,
) -> dict[str, float]:
    """Of the log-probs of sampled tokens from the trainer's, in nats. `version`: of the tokens that
    these weights drew.
    """
    gaps = []
    for done in found:
        want = logprobs_of(model, done, temperature)
        mine = torch.tensor([version is None or v == version for v in done.versions])
        gaps.append((torch.tensor(done.logprobs) - want).abs()[mine])
    gap = torch.cat(gaps)
    return {"mean": float(gap.mean()), "max": float(gap.max())}


def main() -> None:
    args = arguments()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(ModelConfig(path=args.model, device=device))
    engine = make_engine(args, model, Path(tempfile.mkdtemp(prefix="sglang-engine-")))
    checks = Checks(args, model, engine)
    try:
        asyncio.run(checks.all())
        if any("failed" in found for found in checks.results.values()):
            for replica in engine.replicas:
                words = replica.process.tail(60) if replica.process else replica.last_words
                print(words, file=sys.stderr)
    finally:
        engine.close()
    if args.out:
        args.out.write_text(json.dumps(checks.results, indent=1) + "\n")


if __name__ == "__main__":
    main()
