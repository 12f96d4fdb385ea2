"""The memory model and the roofline against what was measured on an H200, the budget that follows
from them, and predictions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers.tiny_runs import launch, lines, tensors
from helpers.toys import make_model, make_module
from reinforge.backends import memory_model, roofline
from reinforge.backends.memory_model import GIB
from reinforge.backends.microbatch import auto_budget, facts_of
from reinforge.backends.roofline import StepWork
from reinforge.build.predict import predict, shown
from reinforge.checkpoint import store
from reinforge.config.adapter import AdapterConfig
from reinforge.config.schema import Config
from reinforge.core.batch import Batch
from reinforge.core.model_facts import ModelFacts
from reinforge.core.sample import Sample
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.watch.report import compare_prediction, write_report
from reinforge.watch.runs import read_json

SMALL = ModelFacts(24, 896, 4864, 14, 2, 64, 151936, tied=True)  # the shape of Qwen2.5-0.5B
BIG = ModelFacts(28, 1536, 8960, 12, 2, 128, 151936, tied=True)  # of Qwen2.5-1.5B
WIDE = ModelFacts(28, 3584, 18944, 28, 4, 128, 152064, tied=False)  # of Qwen2.5-7B
# of benchmarks/gpu_step.py: a Qwen3-MoE of 8.5B
MIXTURE = ModelFacts(24, 2048, 768, 32, 4, 128, 151936, tied=False, experts=64, active=8)
H200 = roofline.gpu("NVIDIA H200", int(139.8 * GIB))
STEP = StepWork(samples=512, prompt_tokens=256, new_tokens=1024, group=8)  # benchmarks/gpu_step.py
CACHE = 512 * 1280 * memory_model.kv_token_bytes(SMALL)


def compiled(f: ModelFacts) -> ModelFacts:
    return replace(f, compiled=True)


def fused(f: ModelFacts) -> ModelFacts:
    """As it trains on a GPU when nothing is set."""
    return replace(f, fused=True)


# against measurements: docs/lab-notebook.md and benchmarks/results


@pytest.mark.parametrize(
    ("facts", "tokens", "cache", "measured"),
    [
        (compiled(SMALL), 25600, CACHE, 40.9),
        (compiled(SMALL), 25600, 0, 33.0),
        (fused(SMALL), 24576, CACHE, 39.9),
        (SMALL, 25600, 0, 47.0),
        (compiled(BIG), 11520, 0, 50.2),
    ],
    ids=["0.5b compiled, cache kept", "0.5b compiled", "0.5b", "0.5b eager", "1.5b compiled"],
)
def test_peak_of_training(facts: ModelFacts, tokens: int, cache: int, measured: float) -> None:
    assert (
        memory_model.total(memory_model.training(facts, tokens)) + cache
    ) / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("facts", "generate", "train"),
    [(compiled(SMALL), 2.61, 4.68), (SMALL, 2.63, 6.4)],
    ids=["0.5b compiled", "0.5b eager"],
)
def test_seconds_of_a_step(facts: ModelFacts, generate: float, train: float) -> None:
    assert roofline.generate_seconds(facts, H200, STEP) == pytest.approx(generate, rel=0.1)
    assert roofline.train_seconds(facts, H200, STEP) == pytest.approx(train, rel=0.1)


@pytest.mark.parametrize(
    ("facts", "more", "measured"),
    [
        (SMALL, {}, 3.78),
        (BIG, {}, 9.6),
        (replace(WIDE, rank=16), {"samples": 256}, 14.5),
        (replace(WIDE, rank=16), {"samples": 256, "fp8_products": True}, 10.4),
        (MIXTURE, {"samples": 256}, 11.5),
        (replace(MIXTURE, rank=16), {"samples": 256}, 8.4),
        (
            replace(WIDE, rank=16, checkpointing=True),
            {"samples": 1, "prompt_tokens": 1 << 18, "new_tokens": 0, "group": 1},
            325.7,
        ),
    ],
    ids=[
        "0.5b",
        "1.5b",
        "7b LoRA",
        "7b LoRA in FP8",
        "mixture",
        "mixture LoRA",
        "7b LoRA, one row of 262,144 tokens",
    ],
)
def test_seconds_of_training_as_it_is_by_default(
    facts: ModelFacts, more: dict[str, Any], measured: float
) -> None:
    """On an H200 with FlashAttention 4: docs/measured.md."""
    work = replace(STEP, shared=True, **more)
    assert roofline.train_seconds(fused(facts), H200, work) == pytest.approx(measured, rel=0.07)


@pytest.mark.parametrize(("rows", "measured"), [(4, 4.05), (16, 4.15), (64, 4.63)])
def test_seconds_of_a_decode_step(rows: int, measured: float) -> None:
    """7B, `gpu_generate.py --workloads rows4 rows16 rows64`."""
    large = ModelFacts(28, 3584, 18944, 28, 4, 128, 151936, tied=False, fused=True)
    work = StepWork(samples=rows, prompt_tokens=256, new_tokens=512, group=min(8, rows // 2))
    assert roofline.generate_seconds(large, H200, work) / 512 == pytest.approx(
        measured / 1000, rel=0.1
    )


def test_seconds_of_decoding_in_fp8() -> None:
    """Generation of a GRPO step, `gpu_train.py` with 0.5B (cache in FP8 too) and LoRA on 7B."""
    for facts, work, measured in (
        (fused(SMALL), replace(STEP, fp8=True, fp8_cache=True), 3.57),
        (replace(WIDE, rank=16, fused=True), replace(STEP, samples=256, fp8=True), 8.64),
    ):
        found = roofline.generate_seconds(facts, H200, work)
        assert found == pytest.approx(measured, rel=0.25)
    # few sequences read weights, which are half as large
    few = replace(STEP, samples=4, group=2)
    plain, halved = (
        roofline.generate_seconds(fused(WIDE), H200, work) for work in (few, replace(few, fp8=True))
    )
    assert halved / plain == pytest.approx(2.97 / 4.13, rel=0.2)


# first principles


def test_parameters_are_those_of_the_model() -> None:
    assert SMALL.parameters() == pytest.approx(
        494e6, rel=0.001
    ) and BIG.parameters() == pytest.approx(1.543e9, rel=0.001)
    for arch, left_out in (
        ("llama", 0),
        ("qwen3", 2 * 2 * 16),
        ("gpt2", 128 * 32 + 2 * (9 + 2) * 32 + 32),
    ):  # norms of heads; positions, biases
        module = make_module(arch)
        assert (
            ModelFacts.of(module.config).parameters()
            == sum(p.numel() for p in module.parameters()) - left_out
        ), arch
    adapted = add_adapter(make_module("llama"), AdapterConfig(rank=4), seed=0)
    learning = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert (
        ModelFacts.of(adapted.config, rank=4).learning()
        == learning
        == facts_of(CausalModel(adapted)).learning()
    )
    only_q = ModelFacts.of(adapted.config, rank=4, targets=("q_proj",))
    assert only_q.learning() == 2 * 4 * (32 + 32)


@pytest.mark.parametrize("rank", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(dtype: torch.dtype, rank: int | None) -> None:
    """The saved tensors of a real layer, each storage once and weights left out, against the list
    of `saved`. CPU attention is another kernel than the GPU's and keeps the same tensors.
    """
    shape = {
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    module: Any = make_module("llama", **shape).to(dtype)
    if rank is not None:
        module = add_adapter(module, AdapterConfig(rank=rank), seed=0)
    model = CausalModel(module)
    facts = facts_of(model)
    assert facts.itemsize == dtype.itemsize and facts.rank == rank
    tokens = 512
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights and x.numel() >= tokens:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    from reinforge.models.attention import PackedLayout

    layout = PackedLayout(
        [tokens // 2] * 2, torch.tensor([0, tokens // 2, tokens], dtype=torch.int32)
    )
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        hidden = model.hidden(
            torch.arange(tokens) % 50, torch.arange(tokens) % (tokens // 2), layout
        )
    assert hidden.requires_grad
    assert sum(kept.values()) / tokens == pytest.approx(
        memory_model.activation_bytes(facts), rel=0.2
    )


def test_an_mlp_with_adapters_keeps_gate_and_up_alone_where_it_is_one_function() -> None:
    """tests/gpu/test_lora_linear_cuda.py has the tensors."""
    adapted = replace(WIDE, rank=16)
    wide = 2 * WIDE.wide
    assert memory_model.saved(adapted)["product"] == wide
    found = memory_model.saved(fused(adapted))
    assert "product" not in found and found["gate"] == found["up"] == wide
    assert "product" in memory_model.saved(fused(replace(adapted, experts=8, active=2)))
    assert "product" in memory_model.saved(fused(replace(adapted, packed=1)))  # NF4
    more = memory_model.backward_bytes(fused(adapted)) - memory_model.backward_bytes(adapted)
    assert more == 2 * wide  # it is there, with its gradient, while its own backward is


def hybrid(kind: str) -> Any:
    """A shape with one layer that keeps state and one that attends."""
    import transformers as t

    from reinforge.models.toy_shapes import shrunken

    sizes = {"hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 512}
    own: dict[str, tuple[Any, dict[str, Any]]] = {
        "delta": (
            t.Qwen3_5TextConfig,
            {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 48,
                "linear_value_head_dim": 32,
            },
        ),
        "convolution": (t.Lfm2Config, {}),
        "mamba2": (
            t.BambaConfig,
            {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 24, "mamba_chunk_size": 64},
        ),
        "mamba": (t.JambaConfig, {"mamba_d_state": 12, "num_experts": 1}),
    }
    made, more = own[kind]
    return shrunken(made, **sizes, **more)


@pytest.mark.parametrize("kind", ["delta", "convolution", "mamba2", "mamba"])
def test_activations_of_hybrids_are_what_autograd_keeps(kind: str) -> None:
    """The same of layers that keep state, and what they would be if all of them attended."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_config(hybrid(kind), attn_implementation="eager")
    model = CausalModel(module)
    facts = facts_of(model)
    assert facts.state is not None and facts.state.layers < facts.layers
    tokens = 512
    rows = [
        Sample.from_tokens(f"s{i}", [3 + j % 200 for j in range(256)], [True] * 256)
        for i in range(2)
    ]
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in weights and x.numel() >= tokens:
            kept[x.untyped_storage().data_ptr()] = x  # alive: no other may have its place
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model.states(Batch.pack(rows))
    found = sum(x.untyped_storage().nbytes() for x in kept.values()) / tokens
    assert memory_model.activation_bytes(facts) == pytest.approx(found, rel=0.2)
    if kind != "convolution":  # whose layers are as small as those that attend
        attending = memory_model.activation_bytes(replace(facts, state=None))
        assert attending < 0.8 * found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"block_ffn_dim_multiplier": 1.3, "block_multiple_of": 64},
        {"block_auto_adjust_ff_dim": False},
    ],
    ids=str,
)
def test_lfm2_adjusts_its_inner_size(settings: dict[str, Any]) -> None:
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

    config = Lfm2Config(hidden_size=32, intermediate_size=1000)
    for name, value in settings.items():
        setattr(config, name, value)
    assert ModelFacts.of(config).inner == Lfm2MLP(config).w1.out_features


def test_what_makes_activations_smaller_and_larger() -> None:
    tokens = memory_model.activation_bytes
    assert tokens(compiled(SMALL)) < tokens(SMALL) < 1.6 * tokens(compiled(SMALL))
    assert tokens(replace(SMALL, checkpointing=True)) < tokens(SMALL) / 10
    assert tokens(replace(SMALL, itemsize=4)) > 1.5 * tokens(SMALL)
    assert (
        sum(memory_model.saved(compiled(SMALL)).values())
        == 2 * (4 * 896 + 2 * 896 + 2 * 128 + 3 * 4864) + 4 * 14
    )


def test_optimizer_gradients_and_copies() -> None:
    n = SMALL.parameters()
    assert (
        memory_model.weight_bytes(SMALL) == 2 * n and memory_model.optimizer_bytes(SMALL) == 12 * n
    )
    assert memory_model.gradient_bytes(SMALL) == 4 * n + 2 * 151936 * 896
    whole = replace(SMALL, itemsize=4)
    assert (
        memory_model.weight_bytes(whole) == 4 * n
        and memory_model.optimizer_bytes(whole) == 8 * n
        and memory_model.gradient_bytes(whole) == 4 * n
    )
    adapter = replace(SMALL, rank=16)
    assert memory_model.optimizer_bytes(adapter) == 8 * adapter.learning() < n / 5
    assert memory_model.optimizer_bytes(replace(SMALL, offload=True)) == 0
    parts = memory_model.training(SMALL, 1000, reference=True, critic=True)
    assert (
        parts["reference"] == 2 * n
        and parts["critic"] == 18 * n + 2 * 151936 * 896
        and memory_model.training(adapter, 1000, reference=True)["reference"] == 0
    )
    assert memory_model.kv_token_bytes(SMALL) == 2 * 24 * 2 * 64 * 2
    ends = 151936 * 896
    # of several chunks of logits two; of little the gradient as the weights are takes more
    assert memory_model.head_bytes(SMALL, 100_000) == 2 * 2 * (1 << 28) + 4 * ends
    assert memory_model.head_bytes(SMALL, 100) == 6 * ends


def test_logits_that_stay() -> None:
    """All of them, where they are at most a quarter of what is left."""
    logits = 2 * 16_384 * 151936
    assert memory_model.kept_logits(SMALL, 16_384, 4 * logits) == logits
    assert memory_model.kept_logits(SMALL, 16_384, 4 * logits - 1) == 0
    before, after = (memory_model.training(SMALL, 16_384, logits=n) for n in (0, logits))
    assert memory_model.head_bytes(SMALL, 16_384, logits=logits) == logits + 4 * 151936 * 896
    assert 0 <= memory_model.total(after) - memory_model.total(before) <= logits


def test_a_rank_has_its_share_and_what_is_gathered() -> None:
    """Shards are float32 and their own masters; tests/unit/benchmarks/test_rank_of_many.py holds
    the rest against what FSDP2 allocates.
    """
    n = SMALL.parameters()
    rank = replace(SMALL, shards=64)
    assert memory_model.weight_bytes(rank) == 4 * n // 64 == memory_model.gradient_bytes(rank)
    assert memory_model.optimizer_bytes(rank) == 8 * n // 64
    parts = memory_model.training(rank, 1000, reference=True)
    assert parts["reference"] == 2 * n // 64
    assert parts["gathered"] > 2 * 151936 * 896 > 8 * parts["weights"]
    # an adapter has no gradients of what is gathered
    adapted = memory_model.gathered_bytes(replace(rank, rank=16))
    assert adapted == 2 * 151936 * 896 + 4 * (SMALL.body() // 24)
    assert memory_model.gathered_bytes(SMALL) == 0


def test_the_pool_is_the_engines() -> None:
    """Computed here without the engine, and by the engine itself."""
    from reinforge.engines.native import NativeEngine

    model = make_model("llama")
    facts = facts_of(model)
    for options in (
        {"max_batch": 16, "longest": 100},
        {"max_batch": 16, "longest": 100, "kv_gib": 0.01},
        {"max_batch": 16, "longest": 100, "at_once": 3},
        {"max_batch": 10**9, "longest": 100},
        {"max_batch": 10**9, "longest": 100, "cache_precision": "fp8"},
    ):
        blocks = NativeEngine(model, **options).blocks
        fp8 = "cache_precision" in options
        found = memory_model.kv_pool(
            facts,
            None,
            options["max_batch"],
            options["longest"],
            at_once=options.get("at_once"),
            kv_gib=options.get("kv_gib"),
            fp8=fp8,
        )
        assert found.bytes == blocks * 16 * memory_model.kv_token_bytes(facts, fp8)
        assert (found.tokens, found.slots) == (blocks * 16, 0)
        if options["max_batch"] == 16 and "kv_gib" not in options:
            assert blocks == 7 * options.get("at_once", 16)


def test_heads_of_several_sizes_are_counted_with_that_of_most() -> None:
    """Gemma 4: transformers does not say which head_dim a whole model has, and raises."""
    from transformers import Gemma4TextConfig

    facts = ModelFacts.of(Gemma4TextConfig())
    assert (facts.head_dim, facts.heads, facts.kv_heads, facts.layers) == (256, 8, 4, 30)
    assert facts.state is None and facts.attending == 30


def test_the_copies_are_the_engines() -> None:
    from reinforge.models.fp8_layers import Fp8Layers

    model = make_model("llama")
    assert memory_model.fp8_bytes(facts_of(model)) == Fp8Layers.of(model, "x").size


# the budget


def test_the_budget_fits_and_grows_with_memory() -> None:
    sizes = [8, 16, 24, 40, 80, 140, 1000]
    for facts in (
        SMALL,
        compiled(SMALL),
        BIG,
        replace(BIG, rank=16),
        replace(BIG, checkpointing=True),
        replace(BIG, offload=True),
    ):
        enough = memory_model.far_enough(facts)
        found = [
            memory_model.budget(facts, gib * GIB - memory_model.weight_bytes(facts))
            for gib in sizes
        ]
        assert (
            found == sorted(found)
            and all(n % 1024 == 0 and 1024 <= n <= enough for n in found)
            and found[-1] == enough
        )
        for gib, n in zip(sizes, found, strict=True):
            assert n == 1024 or memory_model.total(memory_model.training(facts, n)) <= gib * GIB
            if 1024 < n < enough:  # and is not needlessly small
                assert (
                    memory_model.total(memory_model.training(facts, int(1.5 * n))) > 0.9 * gib * GIB
                )
    free = 48 * GIB
    assert (
        memory_model.budget(BIG, free)
        > memory_model.budget(BIG, free, reference=True)
        > memory_model.budget(BIG, free, critic=True)
    )
    assert (
        memory_model.budget(BIG, free)
        < memory_model.budget(compiled(BIG), free)
        < memory_model.budget(replace(BIG, checkpointing=True), free)
    )
    assert memory_model.budget(BIG, free) < memory_model.budget(replace(BIG, offload=True), free)
    assert memory_model.budget(BIG, 1 << 20) == 1024


def test_small_models_stop_early_unless_a_row_is_longer() -> None:
    free = 1000 * GIB
    assert (
        memory_model.budget(SMALL, free) == 19456 > memory_model.budget(WIDE, free) == 10240
        and memory_model.budget(SMALL, free, longest=70_000) == 70_656
    )
    assert memory_model.budget(SMALL, free, longest=10**6) == 131072


def test_a_cpu_takes_4096_and_a_gpu_asks_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    assert auto_budget(model) == 4096
    fake: Any = SimpleNamespace(
        device=torch.device("cuda"),
        module=model.module,
        plain=model.plain,
        trunk=model.trunk,
        config=model.config,
        dtype=model.dtype,
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (400 << 20, 1200 << 20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 5 << 20)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1 << 20)
    want = memory_model.budget(facts_of(model), 404 << 20, reserved=100 << 20)
    assert auto_budget(fake) == want and 1024 < want < 65536
    assert auto_budget(fake, paired=True) <= want and auto_budget(fake, reference=True) <= want


def test_the_model_needs_no_torch() -> None:
    code = (
        "import sys; import reinforge.backends.memory_model, reinforge.backends.roofline;"
        " sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": str(Path(memory_model.__file__).parents[2])},
            timeout=60,
        ).returncode
        == 0
    )


# machines and predictions


def test_gpus_by_name() -> None:
    assert (
        roofline.gpu("NVIDIA H100 80GB HBM3", 1).bandwidth == 3.35e12
        and roofline.gpu("NVIDIA H100 PCIe", 1).flops == 756e12
    )
    assert (
        roofline.gpu("NVIDIA L40S", 1).flops == 362e12
        and roofline.gpu("NVIDIA L4", 1).flops == 121e12
    )
    assert (
        roofline.gpu("NVIDIA A100-SXM4-80GB", 1).known
        and roofline.gpu("NVIDIA GeForce RTX 4090", 24 * GIB).memory == 24 * GIB
    )
    assert not roofline.gpu("Some GPU", 1).known
    slow = roofline.gpu("NVIDIA L4", 24 * GIB)
    assert roofline.train_seconds(SMALL, slow, STEP) == pytest.approx(
        989 / 121 * roofline.train_seconds(SMALL, H200, STEP)
    )


def test_the_cpu_is_timed_once() -> None:
    found = roofline.this_cpu()
    assert found is roofline.this_cpu() and found.kind == "cpu"
    assert 1e8 < found.flops < 1e14 and 1e8 < found.bandwidth < 1e13 and found.memory > 1 << 30


def test_work_that_is_left_out_takes_no_time() -> None:
    assert roofline.generate_seconds(SMALL, H200, replace(STEP, new_tokens=0)) == 0
    train = roofline.train_seconds(SMALL, H200, STEP)
    assert roofline.train_seconds(replace(SMALL, rank=8), H200, STEP) == pytest.approx(
        train * 2 / 3
    )
    assert roofline.train_seconds(SMALL, H200, replace(STEP, passes=1)) == pytest.approx(
        train * 4 / 3
    )
    assert roofline.train_seconds(
        SMALL, H200, replace(STEP, epochs=2, critic=True)
    ) == pytest.approx(train * 4)
    assert roofline.train_seconds(SMALL, H200, replace(STEP, shared=True)) == pytest.approx(
        train * (1024 + 32) / 1280
    )


def test_products_in_fp8_are_those_of_the_layers_without_gradients_of_weights() -> None:
    in_fp8 = replace(STEP, fp8_products=True)
    flops = STEP.tokens * 2 * SMALL.body(active=True)
    speed = H200.flops * roofline.TRAIN_SHARE[roofline.mode_of(SMALL, H200)]
    saved = flops * (1 - 1 / roofline.FP8_GAIN) / speed
    for facts, work, passes in (
        (SMALL, in_fp8, 2),
        (replace(SMALL, rank=8), in_fp8, 2),
        (replace(SMALL, checkpointing=True), in_fp8, 3),
        (SMALL, replace(in_fp8, passes=1), 3),
        (SMALL, replace(in_fp8, epochs=2, critic=True), 4),  # the critic is not
    ):
        plain = roofline.train_seconds(facts, H200, replace(work, fp8_products=False))
        assert plain - roofline.train_seconds(facts, H200, work) == pytest.approx(passes * saved)
    # an H200: 14.5 and 10.4 s of LoRA on 7B
    adapted = replace(WIDE, rank=16, fused=True)
    times = [roofline.train_seconds(adapted, H200, work) for work in (in_fp8, STEP)]
    assert times[0] / times[1] == pytest.approx(10.45 / 14.53, rel=0.07)
    cpu = roofline.Machine("a CPU", 1e11, 1e10, GIB, "cpu")
    assert roofline.train_seconds(SMALL, cpu, in_fp8) == roofline.train_seconds(SMALL, cpu, STEP)


def test_a_prediction_has_every_part(make: Callable[..., Config]) -> None:
    cfg = make(
        "run",
        "grpo",
        "train.prompts_per_step=64",
        "rollout.max_new_tokens=1024",
        "algorithm.kl.coefficient=0.1",
        "train.share_prompts=false",
        "rollout={max_new_tokens: 1024}",
        "algorithm.group_size=8",
    )
    found = predict(cfg, compiled(SMALL), H200, (256.0, 256), budget=25600)
    assert {
        "weights",
        "optimizer",
        "gradients",
        "activations",
        "head",
        "reference",
        "kv",
        "peak",
    } == found["memory_gib"]["train"].keys()
    assert (
        found["memory_gib"]["generate"]["kv"]
        == found["memory_gib"]["train"]["kv"]
        == pytest.approx(7.5)
    )
    # and the reference, and logits that stay in the place of two chunks
    assert found["memory_gib"]["train"]["peak"] == pytest.approx(40.9 + 0.92 + 6.2, rel=0.1)
    assert found["seconds"]["generate"] == pytest.approx(2.61, rel=0.2) and found["seconds"][
        "train"
    ] == pytest.approx(4.87 * 4 / 3, rel=0.2)
    text = dict(shown(found))
    assert (
        text["memory to train"].startswith(
            "48.2 of 139.8 GiB on NVIDIA H200: activations 23.5, head 7.8, kv 7.5"
        )
        and "generate 2.5 s" in text["time of a step"]
    )
    small_gpu = predict(cfg, BIG, roofline.gpu("NVIDIA L4", 22 * GIB), (256.0, 256))
    assert (
        small_gpu["memory_gib"]["train"]["peak"] > 22
        and small_gpu["assumed"]["tokens_per_microbatch"] == 1024
    )


def test_a_prediction_of_generating_while_a_step_trains(make: Callable[..., Config]) -> None:
    """Training has what generating has beside it: a copy of what is trained, and the cache."""
    adapted = replace(SMALL, rank=16)

    def found(facts: ModelFacts, machine: roofline.Machine, *overrides: str) -> dict[str, Any]:
        cfg = make("run", "grpo", "rollout={max_new_tokens: 1024}", *overrides)
        return predict(cfg, facts, machine, (256.0, 256))

    overlap = ("rollout.staleness=1", "rollout.overlap=true")
    before, beside = found(SMALL, H200), found(SMALL, H200, *overlap)
    trains, alone = beside["memory_gib"]["train"], before["memory_gib"]["train"]
    assert trains["copy"] == trains["weights"] and "copy" not in alone
    assert trains["kv"] == beside["memory_gib"]["generate"]["kv"] == before["kv_cache"]["gib"]
    assert beside["kv_cache"]["stays"] and trains["prefill"] > 0 and "prefill" not in alone
    assert "(at the same time" in dict(shown(beside))["time of a step"]
    assert "(at the same time" not in dict(shown(before))["time of a step"]
    narrow = found(adapted, H200, *overlap)["memory_gib"]["train"]
    assert narrow["copy"] < trains["copy"] / 20

    card = roofline.gpu("NVIDIA L40S", 46 * GIB)
    large = replace(BIG, rank=16)
    many = ("train.prompts_per_step=64", "algorithm.group_size=8")
    before, beside = found(large, card, *many), found(large, card, *many, *overlap)
    size = "tokens_per_microbatch"
    assert beside["assumed"][size] < before["assumed"][size]  # it leaves room for the cache
    assert not before["kv_cache"]["stays"] and beside["kv_cache"]["stays"]
    assert beside["memory_gib"]["train"]["peak"] < 46


def test_a_prediction_has_the_share_of_a_server_beside_the_trainer(
    make: Callable[..., Config],
) -> None:
    """While it generates, training keeps its weights and moments; where it never sleeps, always."""

    def parts(*overrides: str) -> dict[str, dict[str, float]]:
        cfg = make("run", "grpo", "rollout.engine=vllm", "engine.memory=0.5", *overrides)
        found: dict[str, dict[str, float]] = predict(cfg, SMALL, H200, (256.0, 256))["memory_gib"]
        return found

    asleep, awake = parts(), parts("engine.sleep=never")
    assert asleep["generate"]["server"] == pytest.approx(0.5 * 139.8, rel=1e-3)
    assert asleep["generate"].keys() == {"weights", "optimizer", "server", "peak"}
    assert "server" not in asleep["train"] and "server" not in parts("engine.devices=['1']")
    assert awake["train"]["server"] == asleep["generate"]["server"]
    assert "server" not in parts("train.backend=fsdp")["generate"]  # a rank's part is not predicted


def test_a_prediction_is_of_one_rank(make: Callable[..., Config]) -> None:
    """64 ranks: the work of training is divided; rank 0 has a copy to generate with, and does that
    alone unless all ranks do.
    """
    given = ("train.backend=fsdp", "train.ranks=64", "rollout={max_new_tokens: 1024}")
    cfg = make("run", "grpo", *given, "rollout.all_ranks=false")
    one = predict(make("run", "grpo", given[2]), BIG, H200, (256.0, 256), budget=8192)
    rank = predict(cfg, replace(BIG, shards=64), H200, (256.0, 256), budget=8192, devices=64)
    weights = 2 * BIG.parameters() / GIB
    for phase in ("train", "generate"):
        parts = rank["memory_gib"][phase]
        assert parts["copy"] == pytest.approx(weights, rel=1e-3)
        assert parts["optimizer"] < one["memory_gib"][phase]["optimizer"] / 64
    assert "gathered" in rank["memory_gib"]["train"]
    assert "gathered" not in rank["memory_gib"]["generate"]
    assert rank["seconds"]["train"] == pytest.approx(one["seconds"]["train"] / 64, rel=1e-3)
    assert rank["seconds"]["generate"] == one["seconds"]["generate"]
    assert "on NVIDIA H200, one of 64: " in dict(shown(rank))["memory to train"]
    everyone = make("run", "grpo", *given)  # auto: on GPUs all of them
    shared = predict(everyone, replace(BIG, shards=64), H200, (256.0, 256), devices=64)
    # a rank reads all weights for each token, however few sequences are its share
    assert (
        one["seconds"]["generate"] / 2 < shared["seconds"]["generate"] < one["seconds"]["generate"]
    )


def test_a_prediction_says_what_the_cache_holds(make: Callable[..., Config]) -> None:
    """0.5B: 512 sequences of 1,280 tokens are 7.5 GiB, which is little. With 32,768 tokens all of
    them are 193 GiB: the cache takes nine tenths of what the weights, the optimizer and the work of
    the engine leave of the GPU, and training needs that too. Where nobody evaluates, it holds what
    a step samples.
    """

    def made(tokens: int, *more: str) -> Config:
        return make("run", "grpo", f"rollout={{max_new_tokens: {tokens}}}", *more)

    held_out = "data.eval.size=4"
    short = predict(made(1024, held_out), compiled(SMALL), H200, (256.0, 256))
    assert dict(shown(short))["KV cache"] == (
        "7.5 GiB hold 655,360 tokens: 512 of 512 sequences of 1,280 tokens at once; it stays while"
        " training"
    )
    step = predict(made(1024, "train.prompts_per_step=32"), compiled(SMALL), H200, (256.0, 256))
    assert dict(shown(step))["KV cache"].startswith(
        "1.9 GiB hold 163,840 tokens: 128 of 128 sequences of 1,280 tokens at once"
    )
    cfg = made(32512, held_out, "train.prompts_per_step=64")
    long = predict(cfg, compiled(SMALL), H200, (256.0, 256))
    generate = long["memory_gib"]["generate"]
    rest = sum(value for name, value in generate.items() if name not in ("kv", "peak"))
    # logits of 256 sequences that are sampled, and the pool leaves room for those of 512
    left = 0.97 * 139.8 - rest - 16 * 256 * 151936 / GIB
    assert generate["kv"] == pytest.approx(0.9 * left, rel=1e-3) == pytest.approx(114.7, abs=0.1)
    assert "kv" not in long["memory_gib"]["train"]
    assert dict(shown(long))["KV cache"] == (
        "114.7 GiB hold 10,023,104 tokens: 305 of 512 sequences of 32,768 tokens at once (more"
        " while they are short); it is given back while training"
    )
    middle = predict(made(7936, held_out), compiled(SMALL), H200, (256.0, 256))
    assert middle["kv_cache"]["gib"] == 48 and middle["kv_cache"]["stays"]
    assert "kv_cache" not in predict(make("run", "sft"), SMALL, H200, (256.0, 256))


def test_a_prediction_counts_fp8(make: Callable[..., Config]) -> None:
    """SMALL: 358 million weights in its layers, a byte each and a float32 for every output."""

    def found(**settings: str) -> dict[str, Any]:
        cfg = make(
            "run",
            "grpo",
            "train.prompts_per_step=64",
            "algorithm.group_size=8",
            rollout={"max_new_tokens": 1024, **settings},
        )
        predicted: dict[str, Any] = predict(cfg, SMALL, H200, (256.0, 256), budget=25600)
        return predicted["memory_gib"]

    plain = found()
    weights = found(precision="fp8")
    cache = found(cache_precision="fp8")
    copies = memory_model.fp8_bytes(SMALL)
    assert copies == SMALL.body() + 24 * 4 * (896 + 2 * 128 + 896 + 2 * 4864 + 896)
    for phase in ("train", "generate"):
        assert "fp8" not in plain[phase]
        assert weights[phase]["fp8"] == pytest.approx(copies / GIB, rel=1e-3)
        # heads of 64: 68 bytes instead of 128
        assert cache[phase]["kv"] == pytest.approx(7.5 * 68 / 128, rel=1e-3)


def test_fp8_is_read_in_half_the_time() -> None:
    """Few sequences wait for the weights, many long ones for their keys and values."""

    def ratio(work: StepWork, **change: bool) -> float:
        shape = ModelFacts(28, 3584, 18944, 28, 4, 128, 152064, tied=False)  # of Qwen2.5-7B
        whole = roofline.generate_seconds(shape, H200, work)
        return roofline.generate_seconds(shape, H200, replace(work, **change)) / whole

    few = StepWork(samples=8, prompt_tokens=256, new_tokens=1024)
    long = StepWork(samples=256, prompt_tokens=256, new_tokens=16384)
    assert ratio(few, fp8=True) < 0.82 < 0.98 < ratio(few, fp8_cache=True)
    assert ratio(long, fp8_cache=True) < 0.65 < 0.9 < ratio(long, fp8=True)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_a_run_records_its_prediction_and_the_report_compares(
    make: Callable[..., Config], algorithm: str
) -> None:
    cfg = make("run", algorithm, "train.steps=2")
    launch(cfg)
    prediction = read_json(Path(cfg.run.dir) / "prediction.json")
    measured = lines(cfg)
    phases = {"train", "generate"} if algorithm == "grpo" else {"train"}
    assert (
        prediction["seconds"].keys() == prediction["memory_gib"].keys() == phases
        and prediction["machine"]["kind"] == "cpu"
    )
    rows = {
        what: (predicted, found)
        for what, _, predicted, found in compare_prediction(prediction, measured)
    }
    assert rows.keys() == {"memory, peak"} | {f"{phase}, one step" for phase in phases}
    assert (
        rows["memory, peak"][1]
        == max(m["memory/peak_gib"] for m in measured if "memory/peak_gib" in m)
        > 0.1
    )
    assert all(
        predicted > 0 and found is not None and found > 0 for predicted, found in rows.values()
    )
    page = write_report(Path(cfg.run.dir)).read_text()
    assert "<h2>Prediction</h2>" in page and f"{rows['memory, peak'][1]:.3g} GiB" in page


def test_a_gpu_is_compared_phase_by_phase() -> None:
    prediction = {
        "memory_gib": {"train": {"peak": 40.0}, "generate": {"peak": 10.0}},
        "seconds": {"train": 5.0, "generate": 4.0},
    }
    measured = [
        {
            "step": i,
            "memory/train_gib": 38.0 + i,
            "memory/generate_gib": 9.0,
            "time/train": float(i),
            "time/generate": 3.0,
        }
        for i in (1, 2, 9)
    ]
    assert compare_prediction(prediction, measured) == [
        ("memory, train", "GiB", 40.0, 47.0),
        ("memory, generate", "GiB", 10.0, 9.0),
        ("train, one step", "s", 5.0, 2.0),
        ("generate, one step", "s", 4.0, 3.0),
    ]
    assert compare_prediction({}, measured) == []


def test_a_resumed_run_keeps_the_cache_it_had(make: Callable[..., Config]) -> None:
    """Scheduling depends on the pool's size: another limit, or other free memory, at the time of
    the resume does not change it.
    """
    launch(make("run", "grpo", "train.steps=2"))
    cfg = make("run", "grpo", "train.steps=3", "rollout.kv_gib=0.02")
    launch(cfg)
    checkpoint = store.latest(Path(cfg.run.dir))
    assert checkpoint is not None
    per_block = 16 * memory_model.kv_token_bytes(
        ModelFacts(2, 32, 64, 4, 2, 8, 1, tied=True, itemsize=4)
    )
    assert store.load(checkpoint)[1]["counters"]["engine/blocks"] == int(0.01 * GIB) // per_block


def test_offloaded_runs_come_out_the_same(make: Callable[..., Config]) -> None:
    """On a CPU bit for bit, also where the two kinds continue each other."""
    found = []
    for name, first, second in (
        ("plain", "false", "false"),
        ("offload", "true", "true"),
        ("mixed", "true", "false"),
        ("other", "false", "true"),
    ):
        launch(make(name, "grpo", "train.steps=2", f"train.optimizer.offload={first}"))
        cfg = make(name, "grpo", "train.steps=3", f"train.optimizer.offload={second}")
        launch(cfg)
        found.append(tensors(cfg))
    assert all(
        f.keys() == found[0].keys() and all(torch.equal(f[k], found[0][k]) for k in f)
        for f in found[1:]
    )


def test_a_long_pack_has_a_tile_of_its_mlp() -> None:
    """Gate, up, their product and two gradients of all tokens but one tile's are not there."""
    f = replace(SMALL, checkpointing=True)
    long = 100 * 1024

    def layer(facts: ModelFacts, tokens: int) -> int:
        return memory_model.total(memory_model.stages(facts, tokens)["layer"])

    saved = memory_model.saved(f)
    wide = sum(saved[name] for name in ("gate", "activated", "up", "product") if name in saved)
    assert wide >= 3 * 2 * 4864
    apart = layer(f, long) - 100 * layer(f, 1024)
    assert apart == -(long - 8192) * (wide + 2 * 2 * 4864)
    assert layer(f, 32 * 1024) == 32 * layer(f, 1024)
    assert layer(SMALL, long) == 100 * layer(SMALL, 1024)


def test_inputs_of_layers_that_wait_in_host_memory() -> None:
    """Of all layers but three they are not on the device, whatever else is there."""
    kept = replace(SMALL, checkpointing=True, rank=16)
    away = replace(kept, on_host=True)
    for tokens in (1024, 256 * 1024):
        there, left = (memory_model.training(f, tokens) for f in (kept, away))
        assert there["activations"] - left["activations"] == tokens * (24 - 3) * 896 * 2
        assert all(n >= 0 for n in left.values())
        assert {k: v for k, v in there.items() if k != "activations"} == {
            k: v for k, v in left.items() if k != "activations"
        }
    few = replace(kept, layers=2)
    assert memory_model.training(few, 1024) == memory_model.training(
        replace(few, on_host=True), 1024
    )
