"""What a vLLM server is told, and the plug-in that it loads, without vLLM: the real one is in
tests/scale/test_vllm_engine.py.
"""

from __future__ import annotations

import ast
import asyncio
import json
import pickle
import sys
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers.toy_architectures import make_architecture
from helpers.toys import run
from reinforge.config.engine import EngineConfig
from reinforge.config.load import config_from_dict
from reinforge.config.rules.machine import missing
from reinforge.core import routes
from reinforge.core.constraint import Constraint
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.core.routes import RoutedLayers
from reinforge.engines.served.dialect import SampleOutput, SampleRequest, ServerSetup, options
from reinforge.engines.served.engine import SampleInProgress
from reinforge.engines.served.make import make_served
from reinforge.engines.served.vllm import Vllm, plugin_file, unpacked
from reinforge.engines.served.vllm_plugin import ControlMiddleware, register_group_engine
from reinforge.models.causal import CausalModel
from reinforge.models.routing import Routers, routed_layers

BASE = {
    "model": {"path": "x"},
    "algorithm": {"name": "grpo"},
    "data": {"source": "x.jsonl"},
    "rewards": [{"name": "exact_number"}],
    "train": {"steps": 1},
    "run": {"dir": "r"},
}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"engine": {"replicas": 2}}, "native engine has no server"),
        (
            {"rollout": {"engine": "vllm"}, "model": {"path": "x", "exact": True}},
            "computes log-probs in its own way",
        ),
        (
            {"rollout": {"engine": "sglang"}, "engine": {"channel": "ipc"}},
            "reads weights from files",
        ),
        (
            {"rollout": {"engine": "vllm"}, "engine": {"address": ["http://a"], "channel": "ipc"}},
            "servers that we start",
        ),
        (
            {"rollout": {"engine": "vllm"}, "engine": {"address": ["http://a"], "python": "p"}},
            "have their own python",
        ),
        (
            {"rollout": {"engine": "vllm"}, "engine": {"devices": ["0", "1"], "replicas": 3}},
            "give one for each",
        ),
        ({"rollout": {"engine": "vlm"}}, "native"),
    ],
)
def test_settings_that_contradict_each_other(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        config_from_dict({**BASE, **sections}, where="test")


def test_plan_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(**engine: Any) -> list[str]:
        return [
            where
            for where, _, _ in missing(
                config_from_dict(
                    {**BASE, "rollout": {"engine": "sglang"}, "engine": engine}, where="test"
                )
            )
        ]

    assert (
        told() == ["engine.python"]
        and told(python=str(tmp_path / "no")) == ["engine.python"]
        and told(python=sys.executable) == []
    )
    assert told(address=["http://a"], key_env="NOT_SET_ANYWHERE") == ["engine.key_env"]
    monkeypatch.setenv("NOT_SET_ANYWHERE", "now")
    assert told(address=["http://a"], key_env="NOT_SET_ANYWHERE") == []
    assert list(missing(config_from_dict(BASE, where="test"))) == []


def setup(tmp_path: Path, **changes: Any) -> ServerSetup:
    cfg = changes.pop("cfg", EngineConfig())
    return ServerSetup(
        **{
            "kind": "vllm",
            "cfg": cfg,
            "model": "/m",
            "folder": tmp_path,
            "dtype": "bfloat16",
            "device": "cuda",
            "context": 4096,
            "vocabulary": 100,
            "longest": 1280,
            **changes,
        }
    )


def test_the_command(tmp_path: Path) -> None:
    cfg = EngineConfig(
        memory=0.3,
        args={
            "tensor_parallel_size": 2,
            "max-num-seqs": 7,
            "enforce-eager": True,
            "enable-prefix-caching": False,
        },
    )
    found = Vllm().command(setup(tmp_path, cfg=cfg), "py", 5)
    asked = dict(pairwise(found))
    assert found[:3] == ["py", "-m", "vllm.entrypoints.openai.api_server"]
    assert (
        asked["--logprobs-mode"] == "processed_logprobs"
        and asked["--max-model-len"] == "1281"
        and asked["--dtype"] == "bfloat16"
    )
    assert (
        asked["--gpu-memory-utilization"] == "0.3"
        and asked["--host"] == "127.0.0.1"
        and asked["--worker-extension-cls"] == "reinforge_vllm.WorkerExtension"
    )
    assert (
        asked["--max-num-seqs"] == "7"
        and found.count("--max-num-seqs") == 1
        and asked["--tensor-parallel-size"] == "2"
    )
    assert (
        "--enable-sleep-mode" in found
        and "--enforce-eager" in found
        and "--no-enable-prefix-caching" in found
    )
    apart = Vllm().command(
        setup(tmp_path, cfg=EngineConfig(devices=["1"]), colocated=False), "py", 5
    )
    assert "--enable-sleep-mode" not in apart and "--enforce-eager" not in apart
    host = Vllm().command(setup(tmp_path, device="cpu"), "py", 5)
    assert (
        "--gpu-memory-utilization" not in host
        and "--no-enable-chunked-prefill" in host
        and "--enforce-eager" in host
    )
    assert options({"a_b": 1}) == ["--a-b", "1"]
    sent = setup(tmp_path, cfg=cfg)
    assert pickle.loads(pickle.dumps(sent)) == sent  # servers may be started by another process


@pytest.mark.parametrize(
    ("sleep", "colocated", "level"),
    [
        ("auto", True, 1),
        ("auto", False, 0),
        ("never", True, 0),
        ("cache", False, 1),
        ("all", True, 2),
    ],
)
def test_sleep_levels(sleep: Any, colocated: bool, level: int, tmp_path: Path) -> None:
    assert setup(tmp_path, cfg=EngineConfig(sleep=sleep), colocated=colocated).sleep_level == level
    assert (
        setup(
            tmp_path, cfg=EngineConfig(sleep=sleep), colocated=colocated, device="cpu"
        ).sleep_level
        == 0
    )


def test_the_environment_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no rank of ours, has the plug-in before what was given, and its key is not in its
    command.
    """
    python = tmp_path / "python"
    python.write_text(
        f"#!{sys.executable}\nimport json, os, sys\njson.dump([dict(os.environ), sys.argv],"
        f" open({str(tmp_path / 'told')!r}, 'w'))\nsys.exit('Error: seen')\n"
    )
    python.chmod(0o755)
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "PYTHONPATH": "/trainer",
        "KEPT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    cfg = EngineConfig(
        python=str(python), devices=["3"], env={"PYTHONPATH": "/theirs", "MORE": "2"}
    )
    engine = make_served(setup(tmp_path, cfg=cfg, colocated=False, devices=("3",)))
    with pytest.raises(InputError, match="Error: seen"):
        run(engine.generate([1], Sampling(1), key=0))
    engine.close()
    env, argv = json.loads((tmp_path / "told").read_text())
    assert (
        not {"RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & env.keys()
        and env["KEPT"] == "1"
        and env["MORE"] == "2"
    )
    assert (
        env["PYTHONPATH"] == f"{tmp_path / 'engine-plugin'}:/theirs"
        and env["CUDA_VISIBLE_DEVICES"] == "3"
    )
    assert len(env["VLLM_API_KEY"]) > 20 and env["VLLM_API_KEY"] not in " ".join(argv)
    assert (
        tmp_path / "engine-plugin" / "reinforge_vllm.py"
    ).read_text() == plugin_file().read_text()


def test_the_plug_in_imports_nothing_of_ours() -> None:
    """It runs in a Python that has vLLM, torch and the standard library."""
    found = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(plugin_file().read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {name.split(".")[0] for name in found} - sys.stdlib_module_names == {"torch", "vllm"}


@dataclass
class Client:
    """vLLM's engine client, as far as the plug-in knows it: writes the token 7 until it
    is stopped.
    """

    aborted: list[str] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)  # the sampling of every request
    cancelled: int = 0
    endless: bool = False

    def __post_init__(self) -> None:
        self.output_processor = SimpleNamespace(request_states={})

    async def generate(self, prompt: dict[str, Any], sampling: Any, name: str) -> Any:
        self.output_processor.request_states[name] = self
        self.asked.append(sampling)
        try:
            while self.endless and name not in self.aborted:
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            del self.output_processor.request_states[name]
        n = 2 if self.endless else sampling.max_tokens
        flat = SimpleNamespace(start_indices=list(range(n)), token_ids=[7] * n, logprobs=[-0.5] * n)
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=[7] * n,
                    logprobs=flat,
                    finish_reason="abort" if self.endless else "length",
                )
            ]
        )

    async def abort(self, names: list[str], internal: bool) -> None:
        self.aborted += names


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    vllm = ModuleType("vllm")
    params = ModuleType("vllm.sampling_params")
    vllm.SamplingParams = lambda **named: SimpleNamespace(**named)  # type: ignore[attr-defined]
    params.RequestOutputKind = SimpleNamespace(FINAL_ONLY=2)  # type: ignore[attr-defined]
    params.StructuredOutputsParams = lambda **named: ("form", named)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", params)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    return Client()


async def ask(
    front: ControlMiddleware,
    client: Client,
    path: str,
    body: Any,
    key: str = "secret",
    leave: asyncio.Event | None = None,
) -> tuple[int, Any]:
    """One request through the middleware; with `leave`, the client hangs up when it is set."""
    sent: list[dict[str, Any]] = []
    waiting = [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive() -> dict[str, Any]:
        if waiting:
            return waiting.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    app = SimpleNamespace(state=SimpleNamespace(engine_client=client))
    await front(
        {
            "type": "http",
            "path": path,
            "headers": [(b"authorization", f"Bearer {key}".encode())],
            "app": app,
        },
        receive,
        send,
    )
    return (sent[0]["status"], json.loads(sent[1]["body"])) if sent else (0, None)


ITEMS = {
    "items": [
        {"tokens": [1], "seed": 3, "max_tokens": 4},
        {"tokens": [1, 2], "seed": 4, "max_tokens": 2},
    ],
    "params": {"temperature": 1.0},
}


@pytest.mark.parametrize(
    ("constraint", "words"),
    [
        (Constraint("regex", "a|b"), {"regex": "a|b"}),
        (Constraint("json_schema", '{"a": 1}'), {"json": {"a": 1}}),
        (Constraint("json_object"), {"json_object": True}),
        (Constraint("grammar", 'start: "a"'), {"grammar": 'start: "a"'}),
    ],
)
def test_the_form_of_an_answer_in_its_words(
    client: Client, constraint: Constraint, words: dict[str, Any]
) -> None:
    """From the dialect through the plug-in to vLLM's own class."""
    front = ControlMiddleware(None)

    class Http:
        async def post(self, path: str, body: Any) -> Any:
            return (await ask(front, client, path, body))[1]

    requests = [SampleRequest([1], 3, 4), SampleRequest([1, 2], 4, 2)]
    params = Sampling(4, constraint=constraint)
    run(Vllm().generate(Http(), requests, params, frozenset({7})))  # type: ignore[arg-type]
    assert [asked.structured_outputs for asked in client.asked] == [("form", words)] * 2
    run(Vllm().generate(Http(), requests, Sampling(4), frozenset({7})))  # type: ignore[arg-type]
    assert not any(hasattr(asked, "structured_outputs") for asked in client.asked[2:])


def test_the_front(client: Client) -> None:
    async def vllm_itself(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 299})
        await send({"body": b"{}"})

    async def work() -> None:
        front = ControlMiddleware(vllm_itself)
        status, reply = await ask(front, client, "/reinforge/generate", ITEMS)
        assert status == 200 and [unpacked("q", item["tokens"]) for item in reply["items"]] == [
            [7] * 4,
            [7] * 2,
        ]
        assert (
            unpacked("f", reply["items"][0]["logprobs"]) == [-0.5] * 4
            and reply["items"][0]["reason"] == "length"
        )
        assert (await ask(front, client, "/reinforge/generate", ITEMS, key="wrong"))[0] == 401
        assert (await ask(front, client, "/v1/models", {}, key=""))[0] == 401 and (
            await ask(front, client, "/v1/models", {})
        )[0] == 299
        assert (await ask(front, client, "/health", {}, key=""))[0] == 299 and (
            await ask(front, client, "/reinforge/nothing", {})
        )[0] == 404
        assert (await ask(front, client, "/reinforge/generate", {"items": 3}))[
            0
        ] == 500 and front.running == 0

    run(work())


def test_a_client_that_leaves_takes_its_work_with_it(client: Client) -> None:
    async def work() -> None:
        client.endless = True
        leave = asyncio.Event()
        front = ControlMiddleware(None)
        task = asyncio.ensure_future(ask(front, client, "/reinforge/generate", ITEMS, leave=leave))
        while len(client.output_processor.request_states) < 2:
            await asyncio.sleep(0.001)
        assert front.running == 2
        leave.set()
        assert (
            await task == (0, None)
            and client.cancelled == 2
            and front.running == 0
            and not client.output_processor.request_states
        )

    run(work())


def test_an_abort_returns_what_there_is(client: Client) -> None:
    async def work() -> None:
        client.endless = True
        front = ControlMiddleware(None)
        task = asyncio.ensure_future(ask(front, client, "/reinforge/generate", ITEMS))
        while len(client.output_processor.request_states) < 2:
            await asyncio.sleep(0.001)
        assert (await ask(front, client, "/reinforge/abort", {}))[1] == {
            "aborted": 2
        } and front.running == 0
        _, reply = await task
        assert [item["reason"] for item in reply["items"]] == ["abort", "abort"] and unpacked(
            "q", reply["items"][0]["tokens"]
        ) == [7, 7]

    run(work())


def test_the_experts_of_an_answer_come_back(client: Client, tmp_path: Path) -> None:
    """Of layers 1 and 3 of a mixture of 256 experts, through plug-in and dialect: the last number
    that a byte has is an expert there, not an open choice.
    """
    told = np.random.default_rng(0).integers(0, 256, (5, 4, 2)).astype(np.uint8)
    told[2, 3] = 255

    async def work() -> None:
        front = ControlMiddleware(None)
        usual = client.generate

        async def with_experts(*given: Any) -> Any:
            async for output in usual(*given):
                output.outputs[0].routed_experts = told
                yield output

        client.generate = with_experts  # type: ignore[method-assign]

        class Http:
            async def post(self, path: str, body: Any, **_: Any) -> Any:
                return (await ask(front, client, path, body))[1]

        requests = [SampleRequest([1, 2], 3, 4)]
        [output] = await Vllm().generate(Http(), requests, Sampling(4), frozenset())  # type: ignore[arg-type]
        draft = SampleInProgress(0)
        draft.take(output, 0, 4, frozenset(), RoutedLayers((1, 3), 256))
        assert draft.done.tokens == [7] * 4 and draft.done.routes is not None
        found = routes.wide(draft.done.routes)
        assert torch.equal(found, torch.from_numpy(told[:, [1, 3]].astype(np.int64)))
        # a part that was interrupted has none of its own in the end
        draft.take(SampleOutput([8], [-1.0], "stop"), 0, 9, frozenset())
        assert draft.done.routes is None and draft.done.tokens == [7, 7, 7, 7, 8]

    run(work())


def test_a_server_is_started_to_tell_its_experts(tmp_path: Path) -> None:
    told = "--enable-return-routed-experts"
    asked = setup(tmp_path, routed=RoutedLayers((0,), 4))
    assert told in Vllm().command(asked, "py", 5)
    assert told not in Vllm().command(setup(tmp_path), "py", 5)
    with pytest.raises(InputError, match=r"train\.router_replay"):
        Vllm().command(replace(asked, device="cpu"), "py", 5)

    class Http:
        address = "http://there"

        async def post(self, path: str, **_: Any) -> Any:
            return {"logprobs": "processed_logprobs", "dtype": "bfloat16", "routes": False}

    with pytest.raises(InputError, match="enable-return-routed-experts"):
        run(Vllm().status(Http(), asked))  # type: ignore[arg-type]
    run(Vllm().status(Http(), setup(tmp_path)))  # type: ignore[arg-type]


def test_the_layers_of_a_mixture_that_have_experts() -> None:
    """The first of these is dense."""
    model = CausalModel(make_architecture("deepseek_v3", first_k_dense_replace=1))
    found = routed_layers(model)
    routers = Routers.of(model)
    assert routers is not None and len(found.layers) == len(routers.choices)
    assert found.layers[0] == 1 and found.experts == routers.choices[0].experts


# ---- vLLM 0.26, which asks more of its transfer engines than 0.32 ----

TRANSFER_026 = {
    "vllm/__init__.py": "",
    "vllm/distributed/__init__.py": "",
    "vllm/distributed/weight_transfer/__init__.py": "",
    "vllm/distributed/weight_transfer/base.py": """
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

A, B = TypeVar("A"), TypeVar("B")

class WeightTransferInitInfo: pass
class WeightTransferUpdateInfo: pass

class WeightTransferEngine(ABC, Generic[A, B]):
    @abstractmethod
    def init_transfer_engine(self, init_info): ...
    @abstractmethod
    def start_weight_update(self): ...
    @abstractmethod
    def finish_weight_update(self): ...
    @abstractmethod
    def receive_weights(self, update_info): ...
    @abstractmethod
    def shutdown(self): ...
    @staticmethod
    @abstractmethod
    def trainer_send_weights(iterator, trainer_args): ...
""",
    "vllm/distributed/weight_transfer/factory.py": """
class WeightTransferEngineFactory:
    engines = {}

    @classmethod
    def register_engine(cls, name, engine):
        cls.engines[name] = engine
""",
    "vllm/distributed/weight_transfer/ipc_engine.py": "import ray\nfrom torch import Tensor\n",
}


def test_transfer_engines_of_026_without_ray(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours can be made, and vLLM's own loads where Ray is not installed; whoever looks for Ray
    afterwards does not find it.
    """
    for name, text in TRANSFER_026.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    before = set(sys.modules)
    try:
        register_group_engine()
        factory = sys.modules["vllm.distributed.weight_transfer.factory"]
        factory.WeightTransferEngineFactory.engines["reinforge_group"]()  # nothing is abstract
        assert "vllm.distributed.weight_transfer.ipc_engine" in sys.modules
        assert "ray" not in sys.modules
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "vllm":
                del sys.modules[name]
