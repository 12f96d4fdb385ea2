"""Runs INSIDE a vLLM server, in vLLM's own Python: imports torch, vllm and the standard library,
nothing of ours. Known there as `reinforge_vllm`.

`ControlMiddleware` (--middleware) answers POST /reinforge/* in the API process: tokens in, tokens
and log-probs out, and the phases of a weight update; everything but /health wants the key.
`WorkerExtension` (--worker-extension-cls) stages and loads weights where the model lives. Both
sides of the wire are in this repository: `engines/served/vllm.py` speaks to it, `weights/` writes
what it reads. vLLM 0.26 and 0.32.
"""

from __future__ import annotations

import array
import asyncio
import base64
import hmac
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

GROUP = "reinforge_group"
WAIT = timedelta(minutes=5)
KEY = "VLLM_API_KEY"
PREFIX = "/reinforge/"
TELL_EVERY = 0.1  # seconds, where tokens are told as they come


def packed(code: str, values: Any) -> str:
    return base64.b64encode(array.array(code, values).tobytes()).decode()


def routes_of(done: Any) -> list[Any] | None:
    """Shape, kind and bytes of the experts that the tokens of an answer and its prompt went to:
    [T, layers, k].
    """
    found = getattr(done, "routed_experts", None)
    if found is None:
        return None
    found = found.astype("<i2")
    return [list(found.shape), "<i2", base64.b64encode(found.tobytes()).decode()]


def tells_routes(config: Any) -> bool:
    """Whether the server was started with --enable-return-routed-experts."""
    holders = (getattr(config, "aux_output_config", None), config.model_config)
    return any(bool(getattr(h, "enable_return_routed_experts", False)) for h in holders)


@dataclass
class WrittenAnswer:
    """What a server has written of one completion. `ControlMiddleware` makes it, tells what is new
    of it where it `streams`, and otherwise the whole at its end.
    """

    streams: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # how many tokens there were when weights became those that drew the next
    cuts: list[list[int]] = field(default_factory=list)
    told: int = 0  # tokens

    def add(self, done: Any) -> None:
        """All tokens so far; where it streams, those since the last time."""
        new = list(done.token_ids)
        flat = done.logprobs
        # at each of them the sampled token's comes first
        places = [] if flat is None else flat.start_indices[: len(new)]
        if [flat.token_ids[at] for at in places] != new:
            raise RuntimeError("the log-probs that came back are of other tokens than were sampled")
        self.tokens += new
        self.logprobs += [flat.logprobs[at] for at in places]

    def new(self, reason: str | None = None) -> dict[str, Any]:
        """What was not told yet. `reason`: why it ended; None: it goes on, and the newest token,
        which may be the last, waits for what comes next.
        """
        start = self.told
        self.told = len(self.tokens) if reason else max(start, len(self.tokens) - 1)
        return {
            "tokens": packed("q", self.tokens[start : self.told]),
            "logprobs": packed("f", self.logprobs[start : self.told]),
            "reason": reason,
            "cuts": [[max(0, at - start), version] for at, version in self.cuts],
        }


class ControlMiddleware:
    """ASGI middleware around vLLM's own application: it answers the paths below /reinforge and asks
    for the key. vLLM makes it (`--middleware`).
    """

    def __init__(self, app: Any):
        self.app = app
        self.running = 0  # completions being written
        # a part of the hash of every cached block: what was computed under other weights is not
        # found, also where it cannot be dropped because something that was kept still needs it
        self.salt = ""
        self.version: int | None = None  # of the weights that were committed last
        # of each completion: how many tokens it had when weights became those that drew the next
        self.cuts: dict[str, list[list[int]]] = {}

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http" or scope["path"] == "/health":
            return await self.app(scope, receive, send)
        if not self._allowed(scope):
            return await self._reply(send, 401, {"error": "the API key is missing or wrong"})
        if not scope["path"].startswith(PREFIX):
            return await self.app(scope, receive, send)
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        name = scope["path"].removeprefix(PREFIX)
        verb = getattr(self, "do_" + name, None)
        if name == "stream":
            verb = partial(self._stream, send)
        if verb is None:
            return await self._reply(send, 404, {"error": f"no such path: {scope['path']}"})
        work = asyncio.ensure_future(
            verb(scope["app"].state.engine_client, json.loads(body or b"{}"))
        )
        gone = asyncio.ensure_future(receive())  # the next message is that the client has left
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait({work})
            return
        gone.cancel()
        if name == "stream":
            return work.result()
        error = work.exception()
        if error is not None:
            status = 400 if isinstance(error, ValueError) else 500
            return await self._reply(send, status, {"error": f"{type(error).__name__}: {error}"})
        await self._reply(send, 200, work.result())

    def _allowed(self, scope: dict[str, Any]) -> bool:
        key = os.environ.get(KEY, "")
        given = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        return not key or hmac.compare_digest(given.encode(), f"Bearer {key}".encode())

    async def _reply(
        self, send: Callable[[Any], Awaitable[None]], status: int, content: Any
    ) -> None:
        body = json.dumps(content).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    # ---- verbs: (engine client, request) -> reply ----

    async def do_generate(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """items: [{tokens, seed, max_tokens}], one completion each; params: what they share.

        Aborted ones return what they have.
        """
        answers = [WrittenAnswer() for _ in asked["items"]]
        async with self._completing(engine, asked, answers) as tasks:
            return {"items": list(await asyncio.gather(*tasks))}

    @asynccontextmanager
    async def _completing(
        self, engine: Any, asked: dict[str, Any], answers: list[WrittenAnswer]
    ) -> AsyncIterator[list[asyncio.Task[dict[str, Any]]]]:
        """Inside, the answers are being written."""
        self.running += len(answers)
        tasks = [
            asyncio.ensure_future(self._complete(engine, item, asked["params"], answer))
            for item, answer in zip(asked["items"], answers, strict=True)
        ]
        try:
            yield tasks
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            self.running -= len(tasks)

    async def _stream(
        self, send: Callable[[Any], Awaitable[None]], engine: Any, asked: dict[str, Any]
    ) -> None:
        """As `do_generate`, in lines: what is new of each answer, several times a second, and its
        rest when it ends, with a `reason`. A line with an `error` is the last.
        """
        headers = [(b"content-type", b"application/x-ndjson")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        answers = [WrittenAnswer(streams=True) for _ in asked["items"]]
        lines: list[dict[str, Any]] = []
        async with self._completing(engine, asked, answers) as tasks:
            left = dict(enumerate(tasks))
            while left:
                await asyncio.wait(
                    left.values(), timeout=TELL_EVERY, return_when=asyncio.FIRST_COMPLETED
                )
                try:
                    for place, task in list(left.items()):
                        if task.done():
                            del left[place]
                        new = task.result() if task.done() else answers[place].new()
                        if new["reason"] or new["tokens"]:
                            lines.append({"place": place, **new})
                except Exception as error:
                    left = {}
                    lines.append({"error": f"{type(error).__name__}: {error}"})
                if lines:
                    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    lines.clear()
        await send({"type": "http.response.body", "body": b""})

    async def _complete(
        self, engine: Any, item: dict[str, Any], params: dict[str, Any], answer: WrittenAnswer
    ) -> dict[str, Any]:
        """What was not told of the answer, once it has ended."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.DELTA if answer.streams else RequestOutputKind.FINAL_ONLY
        params = dict(params)
        if form := params.pop("structured_outputs", None):
            from vllm.sampling_params import StructuredOutputsParams

            params["structured_outputs"] = StructuredOutputsParams(**form)
        sampling = SamplingParams(
            **params,
            seed=item["seed"],
            max_tokens=item["max_tokens"],
            logprobs=0,
            ignore_eos=True,
            detokenize=bool(params.get("stop")),
            output_kind=kind,
            flat_logprobs=True,
        )
        name = uuid.uuid4().hex
        if self.version is not None:
            answer.cuts.append([0, self.version])
        self.cuts[name] = answer.cuts
        done = None
        try:
            async for output in engine.generate(self._prompt(item["tokens"]), sampling, name):
                if output.outputs:
                    done = output.outputs[0]
                    answer.add(done)
        finally:
            del self.cuts[name]
        reason = "abort" if done is None else done.finish_reason or "abort"
        return {**answer.new(reason), "routes": None if done is None else routes_of(done)}

    def _prompt(self, tokens: list[int]) -> dict[str, Any]:
        salt = {"cache_salt": self.salt} if self.salt else {}
        return {"prompt_token_ids": tokens, **salt}

    async def do_score(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """Log-probs of the given tokens at temperature 1; 0 for the first, which
        nothing precedes.
        """
        from vllm import SamplingParams

        tokens = asked["tokens"]
        last = None
        sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        async for output in engine.generate(self._prompt(tokens), sampling, uuid.uuid4().hex):
            last = output
        if last is None or last.prompt_logprobs is None:
            raise RuntimeError("no log-probs of the prompt came back")
        found = [0.0] + [
            chosen[token].logprob
            for token, chosen in zip(tokens[1:], list(last.prompt_logprobs)[1:], strict=True)
        ]
        return {"logprobs": packed("f", found)}

    async def do_call(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """A method of `WorkerExtension` on every worker."""
        found = await engine.collective_rpc(
            "reinforge_" + asked["method"], args=tuple(asked.get("args", []))
        )
        return {"results": [json.loads(result) for result in found]}

    async def do_commit(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """The staged weights become the served ones, and what was cached under the old ones is
        dropped. `keep`: what is being written goes on with its own cache.
        """
        if asked["keep"]:
            await engine.pause_generation(mode="keep", clear_cache=False)
            try:
                await self._cut(engine, asked["version"])
                results = await self._commit(engine, asked)
            finally:
                await engine.resume_generation()
            return {"results": results}
        results = await self._commit(engine, asked)
        for _ in range(500):  # blocks of what was aborted may still be on their way back
            if await engine.reset_prefix_cache() is not False:
                return {"results": results}
            await asyncio.sleep(0.01)
        raise RuntimeError("the prefix cache could not be reset: something still runs")

    async def _commit(self, engine: Any, asked: dict[str, Any]) -> Any:
        results = (
            await self.do_call(
                engine, {"method": "commit", "args": [asked["version"], asked["fix_head"]]}
            )
        )["results"]
        self.version = asked["version"]
        self.salt = f"version {self.version}"
        return results

    async def _cut(self, engine: Any, version: int) -> None:
        """Notes where the tokens of the new weights begin. The scheduler stands still; what has
        ended leaves soon, and what was sent arrives.
        """
        while True:
            states = {
                getattr(state, "external_req_id", name): state
                for name, state in engine.output_processor.request_states.items()
            }
            if all(name in states for name in self.cuts):
                break
            await asyncio.sleep(0.005)
        for name, cuts in self.cuts.items():
            cuts.append([len(states[name].detokenizer.output_token_ids), version])

    async def do_abort(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        """Everything that is being written ends now; who waits for it gets what there is."""
        names = list(engine.output_processor.request_states)
        await engine.abort(names, internal=True)
        while self.running:
            await asyncio.sleep(0.002)
        return {"aborted": len(names)}

    async def do_status(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        from vllm import __version__

        config = engine.vllm_config
        workers = (await self.do_call(engine, {"method": "facts"}))["results"]
        return {
            "vllm": __version__,
            "running": self.running,
            "held": len(engine.output_processor.request_states),
            "sleeps": bool(config.model_config.enable_sleep_mode),
            "asleep": bool(await engine.is_sleeping()),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "logprobs": str(
                getattr(
                    config.model_config.logprobs_mode, "value", config.model_config.logprobs_mode
                )
            ),
            "context": config.model_config.max_model_len,
            "routes": tells_routes(config),
            "workers": len(workers),
            **workers[0],
        }

    async def do_sleep(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        if asked["level"] > 1:  # its weights will be gone
            await self.do_call(engine, {"method": "forget"})
        await engine.sleep(asked["level"])
        return {}

    async def do_wake(self, engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
        await engine.wake_up(asked["tags"])
        return {}


class WorkerExtension:
    """What vLLM's workers can do beside their own: receive weights, look at the head. vLLM mixes it
    into its worker (`--worker-extension-cls`), so `self` has its `model_runner`. Replies are JSON
    text.
    """

    def reinforge_facts(self) -> str:
        runner = self.model_runner  # type: ignore[attr-defined]
        head, embedding = head_of(runner.get_model())
        return json.dumps(
            {
                "device": self._reinforge_device().type,
                "tied": embedding is not None and head is not None,
                "version": getattr(self, "_reinforge_version", 0),
                "pid": os.getpid(),
            }
        )

    def _reinforge_device(self) -> torch.device:
        return next(self.model_runner.get_model().parameters()).device  # type: ignore[attr-defined]

    def _reinforge_direct(self) -> bool:
        """Whether weights can be written one by one into what kernels read."""
        quantised = self.model_runner.model_config.quantization is not None  # type: ignore[attr-defined]
        return self._reinforge_device().type == "cuda" and not quantised

    def _reinforge_by_api(self, asked: dict[str, Any]) -> bool:
        """Whether vLLM's own API for weight transfers loads them (--weight-transfer-config)."""
        engine = getattr(self, "weight_transfer_engine", None)
        return engine is not None and asked["kind"] in ("ipc", "group")

    def reinforge_join(self, message: str) -> str:
        """Makes a process group with the trainer."""
        place = json.loads(message)
        del place["kind"]
        rank = 1 + self.rank  # type: ignore[attr-defined]
        self.init_weight_transfer_engine({**place, "rank": rank})  # type: ignore[attr-defined]
        return json.dumps({"rank": rank})

    def reinforge_stage(self, message: str) -> str:
        """Phase one: everything that is new is here, whole and proved; what is served has not
        changed. What goes through vLLM's own API comes with phase two.
        """
        asked = json.loads(message)
        if self._reinforge_by_api(asked):
            self._reinforge_staged = (asked["version"], asked)
            self._reinforge_next = None
            return json.dumps({})
        staged = (
            from_files(Path(asked["folder"]))
            if asked["kind"] == "files"
            else from_ipc(asked["tensors"])
        )
        base = asked.get("base")
        if base is not None:
            known = getattr(self, "_reinforge_base", None)
            if known is None or known[0] != base:
                known = self._reinforge_base = (base, dict(from_files(Path(base))))
            changed_only = (
                getattr(self, "_reinforge_below", None) == base and self._reinforge_direct()
            )
            staged = on_base(known[1], dict(staged), self._reinforge_device(), changed_only)
        self._reinforge_staged = (asked["version"], staged)
        self._reinforge_next = base
        return json.dumps(
            {"tensors": len(staged), "bytes": sum(t.numel() * t.element_size() for _, t in staged)}
        )

    @torch.no_grad()
    def reinforge_commit(self, version: int, fix_head: bool) -> str:
        """Phase two.

        Reports how far the head's logits are from those of the embedding that it is tied to.
        """
        found, staged = getattr(self, "_reinforge_staged", (None, []))
        if found != version:
            raise RuntimeError(
                f"weights of version {version} were to be served, but {found} are staged"
            )
        runner = self.model_runner  # type: ignore[attr-defined]
        model = runner.get_model()
        device = self._reinforge_device().type
        if device == "cpu":
            forget_expert_kernels(model)
        if isinstance(staged, dict):
            self.start_weight_update()  # type: ignore[attr-defined]
            self.update_weights(update_info(staged))  # type: ignore[attr-defined]
            self.finish_weight_update()  # type: ignore[attr-defined]
        elif self._reinforge_direct():  # into the parameters that kernels and graphs read
            model.load_weights(iter(staged))
        else:  # packed for the CPU's kernels, or quantised: vLLM's own way, layer by layer
            runner.reload_weights(weights_iterator=iter(staged))
        if fix_head:
            point_head(model)
        if device == "cuda":
            torch.cuda.synchronize()  # from now on the trainer may change what was read
        self._reinforge_staged = (None, [])
        self._reinforge_version = version
        self._reinforge_below = self._reinforge_next
        return json.dumps({"version": version, "head_error": head_error(model)})

    def reinforge_forget(self) -> str:
        """The next weights must be all of them."""
        self._reinforge_below = None
        return json.dumps({})

    def reinforge_drop(self) -> str:
        self._reinforge_staged = (None, [])
        return json.dumps({})


def forget_expert_kernels(model: Any) -> None:
    """vLLM packs the experts of a mixture for a CPU when it makes their kernel, and not at a reload
    (0.32): without one it makes it anew.
    """
    for part in model.modules():
        method: Any = getattr(part, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def head_of(model: Any) -> tuple[Any, Any]:
    """(output head, the embedding that it is tied to).

    The second is None where they are two, or the same module.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    heads = [m for m in model.modules() if isinstance(m, ParallelLMHead)]
    embeddings = [
        m
        for m in model.modules()
        if isinstance(m, VocabParallelEmbedding) and not isinstance(m, ParallelLMHead)
    ]
    if (
        not heads
        or len(embeddings) != 1
        or not getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    ):
        return (heads[0] if heads else None), None
    return heads[0], embeddings[0]


def point_head(model: Any) -> None:
    """A tied head keeps the old weights through a reload: it is pointed at the new ones, and its
    CPU kernel packs them again.
    """
    head, embedding = head_of(model)
    if head is not None and embedding is not None and embedding.weight.numel():
        if head.weight is not embedding.weight:
            head.weight = embedding.weight
        head.quant_method.process_weights_after_loading(head)


def head_error(model: Any) -> float:
    """Largest difference of the head's logits from the embedding's, relative to the largest logit,
    for a few random states.
    """
    head, embedding = head_of(model)
    if head is None or embedding is None:
        return 0.0
    weight = embedding.weight
    states = torch.randn(4, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(
        weight.device, weight.dtype
    )
    want = torch.nn.functional.linear(states, weight).float()
    found = head.quant_method.apply(head, states, bias=None).float()
    return float((found - want).abs().max() / want.abs().max().clamp_min(1e-20))


def from_files(folder: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a published folder, mapped and not copied, each file's sum checked."""
    manifest = json.loads((folder / "manifest.json").read_text())
    found: list[tuple[str, torch.Tensor]] = []
    for bucket in manifest["buckets"]:
        flat = torch.from_file(
            str(folder / bucket["file"]), shared=False, size=bucket["bytes"], dtype=torch.uint8
        )
        if int(flat.view(torch.int64).sum()) != bucket["sum"]:
            raise RuntimeError(f"{bucket['file']} does not hold what the trainer wrote")
        for name, dtype, shape, start, size in bucket["tensors"]:
            found.append((name, flat[start : start + size].view(getattr(torch, dtype)).view(shape)))
    return found


def on_base(
    base: dict[str, torch.Tensor],
    low: dict[str, torch.Tensor],
    device: torch.device,
    changed_only: bool,
) -> list[tuple[str, torch.Tensor]]:
    """Base weights, and for each NAME with `NAME/a` and `NAME/b` the sum of base and b @ a, rounded
    once.
    """
    found = (
        []
        if changed_only
        else [(name, tensor) for name, tensor in base.items() if f"{name}/a" not in low]
    )
    for name in sorted({key.rpartition("/")[0] for key in low}):
        weight, a, b = (
            tensor.to(device) for tensor in (base[name], low[f"{name}/a"], low[f"{name}/b"])
        )
        found.append((name, (weight.float() + b @ a).to(weight.dtype)))
    return found


def update_info(asked: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's own transfer engines are told about one update."""
    if asked["kind"] == "group":
        return {"buckets": asked["buckets"]}
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from vllm.distributed.weight_transfer import ipc_engine

    device = torch.cuda.current_device()
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    # older ones want the function too
    alone = hasattr(ipc_engine, "rebuild_cuda_tensor")
    handles = [handle_arguments(entry, device) for entry in asked["tensors"]]
    return {
        "names": [entry[0] for entry in asked["tensors"]],
        "dtype_names": [entry[1] for entry in asked["tensors"]],
        "shapes": [entry[2] for entry in asked["tensors"]],
        "ipc_handles": [{gpu: h if alone else (rebuild_cuda_tensor, h)} for h in handles],
    }


def from_ipc(tensors: list[list[Any]]) -> list[tuple[str, torch.Tensor]]:
    """The trainer's own tensors on the same GPU, opened by their handles."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    device = torch.cuda.current_device()
    return [(entry[0], rebuild_cuda_tensor(*handle_arguments(entry, device))) for entry in tensors]


def handle_arguments(entry: list[Any], device: int) -> tuple[Any, ...]:
    """Of `rebuild_cuda_tensor`, from what `weights/ipc.py` wrote."""

    def raw(value: str) -> bytes:
        return base64.b64decode(value)

    (
        _,
        dtype,
        shape,
        stride,
        offset,
        handle,
        size,
        at,
        counter,
        counter_at,
        event,
        sync,
    ) = entry
    return (
        torch.Tensor,
        torch.Size(shape),
        tuple(stride),
        offset,
        torch.UntypedStorage,
        getattr(torch, dtype),
        device,
        raw(handle),
        size,
        at,
        False,
        raw(counter),
        counter_at,
        raw(event),
        sync,
    )


def load_ipc_engine() -> None:
    """vLLM 0.26 imports Ray beside its `ipc` engine, for a sender that is not used here: without
    Ray the engine is loaded with an empty module in its place.
    """
    name = "vllm.distributed.weight_transfer.ipc_engine"
    try:
        import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "ray":
            return  # who asks for the engine is told
        sys.modules["ray"] = ModuleType("ray")
        try:
            import_module(name)
        finally:
            del sys.modules["ray"]


def register_group_engine() -> None:
    """Tells vLLM how to receive weights through a process group that both torch's NCCL and its gloo
    can make: `--weight-transfer-config {"backend": "reinforge_group"}`.
    """
    try:
        from vllm.distributed.weight_transfer.base import (
            WeightTransferEngine,
            WeightTransferInitInfo,
            WeightTransferUpdateInfo,
        )
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:  # one that has no such API
        return
    load_ipc_engine()

    @dataclass
    class GroupInit(WeightTransferInitInfo):
        address: str
        port: int
        size: int
        rank: int
        device: str

    @dataclass
    class GroupUpdate(WeightTransferUpdateInfo):
        buckets: list[Any]

    class GroupEngine(WeightTransferEngine[Any, Any]):
        """A worker's end: `weights/group.py` has the trainer's."""

        init_info_cls = GroupInit
        update_info_cls = GroupUpdate

        def init_transfer_engine(self, init_info: Any) -> None:
            store = dist.TCPStore(
                init_info.address, init_info.port, init_info.size, is_master=False, timeout=WAIT
            )
            prefix = dist.PrefixStore("reinforge", store)
            place = (prefix, init_info.rank, init_info.size)
            self.group: Any = (
                dist.ProcessGroupNCCL(*place, dist.ProcessGroupNCCL.Options())
                if init_info.device == "cuda"
                else dist.ProcessGroupGloo(*place, WAIT)
            )

        def start_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

        def finish_weight_update(self) -> None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

        def update_weights(self, update_info: dict[str, Any]) -> None:
            self.receive_weights(self.parse_update_info(update_info))
            if self.device.type == "cuda":
                torch.cuda.synchronize()

        def receive_weights(self, update_info: Any) -> None:
            how = dist.BroadcastOptions()
            how.rootRank = 0
            how.rootTensor = 0
            for places, total in update_info.buckets:
                flat = torch.empty(total, dtype=torch.uint8, device=self.device)
                self.group.broadcast([flat], how).wait()
                self.model.load_weights(
                    (name, flat[start : start + size].view(getattr(torch, dtype)).view(shape))
                    for name, dtype, shape, start, size in places
                )

        def shutdown(self) -> None:
            self.group = None

        @staticmethod
        def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
            """vLLM 0.26 asks every engine for it, and calls it in no worker."""
            raise RuntimeError("weights/group.py sends them")

    WeightTransferEngineFactory.register_engine(GROUP, GroupEngine)


register_group_engine()
