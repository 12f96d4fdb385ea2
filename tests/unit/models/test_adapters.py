"""LoRA: begins as the identity, and the base model underneath never moves."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from helpers.toy_architectures import make_architecture, make_config
from helpers.toys import make_module, make_samples, parameters, run, tokens_of, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.config.train import TrainConfig
from reinforge.core.batch import Batch, Totals, pack
from reinforge.core.engine import Sampling
from reinforge.core.errors import InputError
from reinforge.engines.native import NativeEngine
from reinforge.models.adapters import adapter_off, add_adapter, is_adapted, merged
from reinforge.models.causal import CausalModel
from reinforge.models.meta_model import count_on_meta
from reinforge.models.named_weights import named_weights


def adapted(arch: str = "llama", seed: int = 3, **changes: object) -> CausalModel:
    return CausalModel(add_adapter(make_module(arch), AdapterConfig(rank=4, **changes), seed=seed))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ["llama", "qwen3", "gpt2", "gemma2"])
def test_begins_as_the_identity(arch: str) -> None:
    batch = Batch.pack(make_samples())
    with torch.no_grad():
        assert torch.equal(
            adapted(arch).logprobs(batch, temperature=1.0)[0],
            CausalModel(make_module(arch)).logprobs(batch, temperature=1.0)[0],
        )


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_reference_is_the_base_model_after_training(arch: str) -> None:
    """The adapter learns, the reference (adapter off) stays bit for bit what it was, and so do the
    base weights.
    """
    samples = make_samples()
    batches = pack(samples, 64)
    model = adapted(arch)
    backend = LocalBackend(model, train_config(learning_rate=1e-2), total_steps=10, reference=True)
    backend.annotate(batches, frozenset({"reference", "old"}))
    before = batches[0].streams["reference"].clone()
    weights = parameters(model.module)
    assert torch.equal(before, batches[0].streams["old"]) and backend.frozen is None
    losses = []
    for _ in range(5):
        losses.append(backend.forward_backward(batches, NLLLoss(), Totals.of(batches))["sft/loss"])
        assert not backend.step().empty
        backend.annotate(batches, frozenset({"reference", "old"}))
        assert torch.equal(batches[0].streams["reference"], before)
    assert losses[-1] < losses[0] - 0.01
    assert float((batches[0].streams["old"] - before).abs().max()) > 0.01
    after = parameters(model.module)
    moved = {name for name in after if not torch.equal(after[name], weights[name])}
    assert (
        moved
        and all("lora_" in name for name in moved)
        and set(backend.optimizer.parameters) == {n for n in after if "lora_" in n}
    )


def test_the_same_seed_gives_the_same_adapter_and_touches_no_global_stream() -> None:
    torch.manual_seed(5)
    want = torch.rand(3)
    torch.manual_seed(5)
    one = adapted()
    two = adapted()
    other = adapted(seed=4)
    assert torch.equal(torch.rand(3), want)
    a, b, c = (parameters(m.module) for m in (one, two, other))
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)


def test_engine_serves_the_adapter() -> None:
    """The module with its adapter on is what generates: log-probs match the trained policy, not the
    base.
    """
    model = adapted()
    with torch.no_grad():
        for name, p in model.module.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    prompt = tokens_of(6)
    done = run(NativeEngine(model).generate(prompt, Sampling(8, ignore_eos=True), key=1))[0]
    from reinforge.core.sample import Sample

    batch = Batch.pack([Sample.from_tokens("s", prompt + done.tokens, [False] * 6 + [True] * 8)])
    with torch.no_grad():
        on = model.logprobs(batch, temperature=1.0)[0]
        with adapter_off(model.module):
            off = model.logprobs(batch, temperature=1.0)[0]
    assert (
        float((on - torch.tensor(done.logprobs)).abs().max())
        < 1e-5
        < 0.1
        < float((off - on).abs().max())
    )


def test_adapter_in_float32_on_a_bfloat16_model() -> None:
    model = CausalModel(add_adapter(make_module().bfloat16(), AdapterConfig(rank=4), seed=0))
    assert {p.dtype for n, p in model.module.named_parameters() if "lora_" in n} == {
        torch.float32
    } and is_adapted(model.module)


def test_saved_adapter_is_continued(tmp_path: Path) -> None:
    model = adapted(seed=8)
    with torch.no_grad():
        for name, p in model.module.named_parameters():
            if "lora_B" in name:
                p.fill_(0.1)
    model.module.save_pretrained(tmp_path)
    again = CausalModel(add_adapter(make_module(), AdapterConfig(path=str(tmp_path)), seed=0))
    a = parameters(model.module)
    b = parameters(again.module)
    assert all(torch.equal(a[k], b[k]) for k in a) and any(
        p.requires_grad for p in again.module.parameters()
    )


def module_of(arch: str) -> Any:
    """A mixture at toy size."""
    of_toys = ("qwen2_moe", "qwen3_moe", "mixtral")
    return make_module(arch) if arch in of_toys else make_architecture(arch)


@pytest.mark.parametrize(
    "arch", ["qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "qwen3_5_moe_text"]
)
def test_an_adapter_of_experts_is_published_and_merged(arch: str, tmp_path: Path) -> None:
    """Matrices of experts lie in one parameter, and one module has several of them: what a server
    is sent, what peft loads and what is exported merged computes what the adapted model computes.
    """
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # as if the experts were left out
        module = add_adapter(module_of(arch), AdapterConfig(rank=3), seed=0)
    adapted = [name for name, p in module.named_parameters() if p.requires_grad]
    assert any(".experts." in name for name in adapted)
    with torch.no_grad():
        for name, p in module.named_parameters():
            if ".experts." in name and "lora_B" in name:
                p.normal_(std=0.3, generator=torch.Generator().manual_seed(len(name)))
        tokens = torch.tensor([tokens_of(9)])
        want = module(tokens).logits
        base = module_of(arch)(tokens).logits
        sent = {name: tensor.clone() for name, tensor in named_weights(module)}
        save_file(
            {name: tensor.contiguous() for name, tensor in sent.items()},
            tmp_path / "model.safetensors",
            {"format": "pt"},
        )
        module.get_base_model().config.save_pretrained(tmp_path)
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        assert (
            float((again.eval()(tokens).logits - want).abs().max())
            < 1e-3
            < 0.1
            < float((base - want).abs().max())
        )
        module.save_pretrained(tmp_path / "adapter")
        loaded = PeftModel.from_pretrained(module_of(arch), tmp_path / "adapter").eval()
        assert float((loaded(tokens).logits - want).abs().max()) < 1e-3
        assert float((merged(module)(tokens).logits - want).abs().max()) < 1e-3


@pytest.mark.parametrize(
    "arch", ["qwen3_moe", "mixtral", "gpt_oss", "granitemoe", "qwen3_5_moe_text"]
)
def test_experts_compute_with_the_matrices_of_an_adapter_as_peft_adds_them(arch: str) -> None:
    """Log-probs and gradients, with the adapter on and off; nobody adds them to the weights. The
    experts of gpt-oss lie the other way round and have biases.
    """
    from peft.tuners.lora import ParamWrapper

    model = CausalModel(add_adapter(module_of(arch), AdapterConfig(rank=4), seed=3))
    assert not any(".gate.lora" in name for name, _ in model.module.named_parameters())
    wrappers = [part for part in model.module.modules() if type(part) is ParamWrapper]
    assert len(wrappers) >= 4
    with torch.no_grad():
        for wrapper in wrappers:
            up = wrapper.lora_B["default"].weight
            up.normal_(std=0.3, generator=torch.Generator().manual_seed(up.numel()))
    batch = Batch.pack(make_samples([12, 30, 5]))

    def seen() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        model.module.zero_grad()
        logprobs, _ = model.logprobs(batch, temperature=1.0)
        logprobs.sum().backward()
        grads = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
        with torch.no_grad(), adapter_off(model.module):
            base, _ = model.logprobs(batch, temperature=1.0)
        return logprobs.detach(), base, grads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParamWrapper, "_activate_lora", None)
        ours, base, grads = seen()
    for wrapper in wrappers:
        del wrapper.forward
    theirs, their_base, others = seen()
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(base, their_base, atol=1e-5, rtol=1e-5)
    assert float((ours - base).abs().max()) > 0.05
    assert grads.keys() == others.keys() and any("experts" in name for name in grads)
    for name, grad in grads.items():
        gap = float((grad - others[name]).norm())
        assert gap <= 1e-3 * float(others[name].norm()) + 1e-6, name


@pytest.mark.parametrize("arch", ["gpt_oss", "granitemoe", "qwen3_5_moe_text"])
def test_gradients_of_adapted_experts_packed_are_those_of_samples_alone(arch: str) -> None:
    """Of a rank too small for a grouped product of the library as it is."""
    model = CausalModel(add_adapter(module_of(arch), AdapterConfig(rank=3), seed=3))
    of_experts = {n: p for n, p in model.module.named_parameters() if ".experts." in n}
    trained = {name: p for name, p in of_experts.items() if p.requires_grad}
    assert len(trained) == 8  # two matrices for each of two parameters in each of two layers
    with torch.no_grad():
        for name, p in trained.items():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    samples = make_samples([12, 30, 5])

    def gradients(batches: list[Batch]) -> dict[str, torch.Tensor]:
        model.module.zero_grad()
        for batch in batches:
            model.logprobs(batch, temperature=1.0)[0].sum().backward()
        return {name: p.grad for name, p in trained.items() if p.grad is not None}

    packed = gradients([Batch.pack(samples)])
    alone = gradients([Batch.pack([sample]) for sample in samples])
    assert packed.keys() == alone.keys() == trained.keys()
    for name, grad in packed.items():
        size = float(alone[name].norm())
        assert size > 0.01 and float((grad - alone[name]).norm()) < 1e-4 * size, name


def adapted_names(arch: str, **asked: Any) -> list[str]:
    wrapped = add_adapter(make_architecture(arch), AdapterConfig(rank=2, **asked), seed=0)
    return [name for name, p in wrapped.named_parameters() if p.requires_grad]


MIXTURES = ["qwen3_next", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "qwen2_moe"]
MIXTURES += ["qwen3_5_moe", "jamba", "nemotron_h", "minimax_m3_vl_text"]


@pytest.mark.parametrize("arch", MIXTURES)
def test_experts_are_among_all_linear_layers_and_routers_are_not(arch: str) -> None:
    names = adapted_names(arch)
    assert any(".experts." in name for name in names)
    assert not any("router" in name or ".gate.lora" in name for name in names)


@pytest.mark.parametrize(
    ("arch", "asked", "said"),
    [
        ("gpt_oss", {}, ""),
        ("llama", {}, ""),
        ("llama4_text", {}, "feed_forward.experts.gate_up_proj"),
        ("gpt_oss", {"kind": "dora"}, "mlp.experts.gate_up_proj"),
        ("gpt_oss", {"init": "pissa"}, "mlp.experts.gate_up_proj"),
        ("deepseek_v3", {}, "mlp.shared_experts.down_proj"),
    ],
)
def test_what_all_linear_leaves_out_is_said(
    arch: str, asked: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As docs/adapters.md says."""
    names = adapted_names(arch, **asked)
    told = [r.getMessage() for r in caplog.records if "adapter.targets" in r.getMessage()]
    assert len(told) == bool(said)
    if said:
        assert f"model.layers.*.{said}" in told[0]
        assert not any(said.rpartition(".")[0] in name for name in names)
    if arch == "llama4_text":
        named = adapted_names(arch, targets=["q_proj", "gate_up_proj", "down_proj"])
        assert any(".experts." in name for name in named)


@pytest.mark.parametrize("arch", ["gpt_oss", "qwen3_5_moe_text"])
def test_adapted_experts_are_counted_and_continued(arch: str, tmp_path: Path) -> None:
    """What a plan counts without numbers is what a run trains, of a new adapter and a saved."""
    module = add_adapter(make_architecture(arch), AdapterConfig(rank=3), seed=0)
    module.save_pretrained(tmp_path)
    saved = AdapterConfig(path=str(tmp_path))
    again = add_adapter(make_architecture(arch), saved, seed=0)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert trained == sum(p.numel() for p in again.parameters() if p.requires_grad)
    for cfg in (AdapterConfig(rank=3), saved):
        assert count_on_meta(make_config(arch), TrainConfig(steps=1), cfg).trained == trained


def test_a_saved_router_is_counted(tmp_path: Path) -> None:
    new = AdapterConfig(rank=3, targets=["q_proj", "gate_up_proj", "down_proj", "gate"])
    module = add_adapter(make_architecture("qwen3_moe"), new, seed=0)
    module.save_pretrained(tmp_path)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    for cfg in (new, AdapterConfig(path=str(tmp_path))):
        counts = count_on_meta(make_config("qwen3_moe"), TrainConfig(steps=1), cfg)
        assert counts.trained == trained


def test_unknown_targets_are_an_input_error() -> None:
    with pytest.raises(InputError, match=r"adapter\.targets"):
        adapted(targets=["nothing_like_this"])
    with pytest.raises(InputError, match="lm_head"):
        adapted(targets=["lm_head"])
    with pytest.raises(InputError, match=r"adapter\.init"):
        adapted("qwen3_moe", init="pissa")
    with pytest.raises(InputError) as told:
        adapted("qwen3_moe", targets=["q_proj", "experts"])
    assert str(told.value) == (
        "adapter.targets: experts cannot have an adapter: no linear layer, and no weight. Use"
        " all-linear, or linear layers of the model (k_proj, lm_head, o_proj, q_proj, v_proj), or"
        " weights of its experts (down_proj, gate_up_proj), or its routers (gate)."
    )
    assert "not supported" in str(told.value.__cause__)


@pytest.mark.parametrize(
    ("arch", "name"), [("qwen3_moe", "gate"), ("mixtral", "gate"), ("gpt_oss", "router.weight")]
)
def test_routers_that_are_offered_can_be_named(arch: str, name: str) -> None:
    with pytest.raises(InputError, match=rf"or its routers \({name}\)"):
        adapted_names(arch, targets=["nothing_like_this"])
    assert any(f".{name.partition('.')[0]}." in one for one in adapted_names(arch, targets=[name]))


def test_a_full_model_keeps_a_frozen_copy_as_reference() -> None:
    batches = pack(make_samples(), 64)
    model = CausalModel(make_module())
    backend = LocalBackend(model, train_config(learning_rate=1e-2), total_steps=10, reference=True)
    backend.annotate(batches, frozenset({"reference"}))
    before = batches[0].streams["reference"].clone()
    backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    backend.step()
    backend.annotate(batches, frozenset({"reference", "old"}))
    assert (
        torch.equal(batches[0].streams["reference"], before)
        and float((batches[0].streams["old"] - before).abs().max()) > 0.01
    )
    assert backend.frozen is not None and not any(
        p.requires_grad for p in backend.frozen.module.parameters()
    )


def test_the_lean_forward_is_pefts_in_float32_and_close_in_bfloat16() -> None:
    """With the adapter on, off and merged; gradients too."""
    from peft.tuners.lora import Linear

    for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.05)):
        base = make_module().to(dtype)
        wrapped = add_adapter(base, AdapterConfig(rank=4), seed=0)
        layer = next(m for m in wrapped.modules() if type(m) is Linear)
        with torch.no_grad():
            for p in layer.lora_B.parameters():
                p.normal_(0, 0.3, generator=torch.Generator().manual_seed(0))
        x = torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(1)).to(dtype)
        results = []
        for forward in (layer.forward, lambda x, layer=layer: Linear.forward(layer, x)):
            wrapped.zero_grad()
            y = forward(x)
            y.float().square().sum().backward()
            results.append(
                (
                    y.detach().float(),
                    *(p.grad.clone() for n, p in layer.named_parameters() if p.grad is not None),
                )
            )
        assert len(results[0]) == 3 and results[0][1].dtype == torch.float32
        for a, b in zip(*results, strict=True):
            assert float((a - b).abs().max()) <= tolerance * float(b.abs().max())
        with wrapped.disable_adapter():
            assert torch.equal(layer.forward(x), layer.base_layer(x))
        layer.merge()
        assert float((layer.forward(x).float() - results[0][0]).abs().max()) <= max(
            tolerance, 1e-5
        ) * float(results[0][0].abs().max())
