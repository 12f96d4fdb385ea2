"""The load-balancing loss of mixtures of experts: transformers' own value and gradient, and how it
is averaged over a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from helpers.split_backends import LENGTHS, summed
from helpers.toy_architectures import make_architecture
from helpers.toys import ToyTokenizer, gradients, make_module, make_samples, relative, train_config
from reinforge.algorithms.losses.supervised import NLLLoss
from reinforge.backends.distributed.ranks import Ranks
from reinforge.backends.fsdp.backend import FsdpBackend
from reinforge.backends.local import LocalBackend
from reinforge.config.adapter import AdapterConfig
from reinforge.config.load import config_from_dict
from reinforge.core import routes
from reinforge.core.batch import Totals, pack
from reinforge.core.errors import InputError
from reinforge.loops.expert_load import ExpertLoad
from reinforge.models.adapters import add_adapter
from reinforge.models.causal import CausalModel
from reinforge.models.scalar import ScalarModel

# large: what is forgotten is seen
SAID = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
KINDS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss")


def experts(kind: str, **changes: Any) -> Any:
    said = {**SAID, **changes}
    if kind in ("mixtral", "qwen2_moe", "qwen3_moe"):
        return make_module(kind, **said)
    module = make_architecture(kind)
    module.config.update(said)
    module.router_aux_loss_coef = said["router_aux_loss_coef"]
    return module


def backend_of(module: Any, **changes: Any) -> LocalBackend:
    return LocalBackend(CausalModel(module), train_config(**changes), total_steps=10)


def one_pass(
    backend: Any, samples: Any, budget: int = 10_000, *, share: bool = False
) -> dict[str, float]:
    batches = pack(samples, budget, share=share)
    found: dict[str, float] = backend.forward_backward(batches, NLLLoss(), Totals.of(batches))
    return found


def theirs(module: Any, rows: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss with the router's share in it, the router's loss alone) by transformers, for rows of
    one length.
    """
    tokens = torch.stack([row.tokens for row in rows])
    labels = torch.where(torch.stack([row.trained for row in rows]), tokens, -100)
    out = module(input_ids=tokens, labels=labels, use_cache=False)
    return out.loss, out.aux_loss


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3], ids=["one row", "three rows"])
def test_value_and_gradient_are_those_of_transformers(kind: str, rows: int) -> None:
    samples = make_samples([14] * rows)
    module = experts(kind)
    loss, routed = theirs(module, samples)
    loss.backward()
    want = {name: p.grad.clone() for name, p in module.named_parameters()}
    backend = backend_of(experts(kind))
    metrics = one_pass(backend, samples)
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=2e-6)
    assert metrics["train/router_aux_loss"] == pytest.approx(routed.item(), abs=2e-6)
    assert relative(gradients(backend), want) < 1e-5


def test_the_coefficient_is_the_models_unless_told() -> None:
    """None: as the model's config says.

    Otherwise the number that is asked for, whatever the config says.
    """
    samples = make_samples([14, 14])
    parts: dict[Any, float] = {}
    for name, said, asked in (
        ("said", True, None),
        ("silent", False, None),
        ("off", True, 0.0),
        ("asked", False, 0.25),
    ):
        metrics = one_pass(
            backend_of(experts("mixtral", output_router_logits=said), router_aux_loss=asked),
            samples,
        )
        parts[name] = metrics["train/loss"]
        assert ("train/router_aux_loss" in metrics) == (name in ("said", "asked"))
    routed = theirs(experts("mixtral"), samples)[1].item()
    assert parts["silent"] == parts["off"]
    assert parts["said"] - parts["off"] == pytest.approx(0.5 * routed, abs=1e-5)
    assert parts["asked"] - parts["off"] == pytest.approx(0.25 * routed, abs=1e-5)


def test_micro_batches_count_by_their_trained_tokens() -> None:
    """The loss of a batch is the mean of its micro-batches', each weighted with its share of the
    trained tokens.
    """
    samples = make_samples([20, 5, 12])
    backend = backend_of(experts("qwen2_moe"))
    alone = [one_pass(backend, [s])["train/router_aux_loss"] for s in samples]
    together = one_pass(backend, samples, 1)["train/router_aux_loss"]
    trained = [s.n_trained for s in samples]
    mean = sum(a * n for a, n in zip(alone, trained, strict=True)) / sum(trained)
    assert together == pytest.approx(mean, abs=1e-6) and max(alone) - min(alone) > 1e-2


def test_rows_that_are_left_out_do_not_thin_it() -> None:
    """Rows without gradient are not computed, and the rest still counts for 1."""
    samples = make_samples([20, 5])
    backend = backend_of(experts("mixtral"))
    alone = one_pass(backend, samples[:1])["train/router_aux_loss"]
    batches = pack(samples[:1], 100)
    whole = Totals.of(pack(samples, 100))
    totals = Totals(
        whole.tokens,
        whole.sequences,
        whole.max_length,
        whole.episode_tokens,
        left_out=samples[1].n_trained,
    )
    metrics = backend.forward_backward(batches, NLLLoss(), totals)
    assert metrics["train/router_aux_loss"] == pytest.approx(alone, abs=1e-6)


def test_a_shared_prompt_is_routed_once() -> None:
    """What is averaged is what is computed: a prompt that a group shares counts as one, and packs
    never see each other.
    """
    rows = make_samples([14, 14], prompt=6)
    rows = [row.with_(tokens=torch.cat([rows[0].tokens[:6], row.tokens[6:]])) for row in rows]
    backend = backend_of(experts("mixtral"))
    (packed,) = pack(rows, 1000, share=True)
    assert packed.n_tokens == 22
    module = experts("mixtral")
    own = module(input_ids=torch.stack([r.tokens for r in rows]), use_cache=False).router_logits
    once = [torch.cat([logits[:14], logits[14 + 6 :]]) for logits in own]
    want = load_balancing_loss_func(tuple(once), 4, 2).item()
    assert one_pass(backend, rows, share=True)["train/router_aux_loss"] == pytest.approx(
        want, abs=2e-6
    )
    assert one_pass(backend, rows)["train/router_aux_loss"] != pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize(
    "how", ["checkpointed", "adapter", pytest.param("compiled", marks=pytest.mark.long)]
)
def test_it_reaches_the_gradient_however_layers_run(how: str) -> None:
    """Recomputed layers, an adapter (the router itself is frozen), compiled layers: the gradient is
    that of the plain way.
    """
    samples = make_samples([14, 9])

    def gradient(changed: bool, asked: float) -> dict[str, torch.Tensor]:
        module = experts("qwen2_moe")
        if how == "adapter":
            module = add_adapter(
                module, AdapterConfig(rank=3, targets=["q_proj", "v_proj"]), seed=0
            )
            for name, p in module.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.constant_(p, 0.1)
        if changed and how == "checkpointed":
            module.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        backend = backend_of(module, router_aux_loss=asked)
        if changed and how == "compiled":
            for layer in backend.model.layers:
                layer.compile(dynamic=True, backend="eager")
        one_pass(backend, samples)
        return gradients(backend)

    plain = gradient(False, 0.5)
    without = gradient(False, 0.0)
    assert relative(gradient(True, 0.5), plain) < 1e-5 < 1e-3 < relative(without, plain)


def test_experts_that_the_router_forgot_are_counted_whether_its_load_is_balanced_or_not() -> None:
    """Two rows of a router that point against each other and are long take every token between
    them: the other two of four experts are dead, in one of two layers.
    """
    samples = make_samples([14, 9, 20])

    def told(module: Any, coefficient: float) -> Any:
        return one_pass(backend_of(module, router_aux_loss=coefficient), samples, 1)

    for coefficient in (0.0, 0.5):
        plain = told(experts("mixtral", num_experts_per_tok=1), coefficient)
        assert ExpertLoad().finish(plain)["experts/dead"] == 0
        module = experts("mixtral", num_experts_per_tok=1)
        gates = [p for name, p in module.named_parameters() if name.endswith("gate.weight")]
        assert len(gates) == 2
        with torch.no_grad():
            gates[1][0] *= 1000
            gates[1][1] = -gates[1][0]
        metrics = ExpertLoad().finish(told(module, coefficient))
        assert metrics["experts/dead"] == pytest.approx(0.25)
        assert ("train/router_aux_loss" in metrics) == bool(coefficient)


def test_an_evaluation_is_the_loss_alone() -> None:
    samples = make_samples([14, 9])
    backend = backend_of(experts("mixtral"))
    batches = pack(samples, 100)
    metrics = backend.evaluate(batches, NLLLoss(), Totals.of(batches))
    assert "train/router_aux_loss" not in metrics and metrics["train/loss"] == pytest.approx(
        metrics["sft/loss"], abs=1e-6
    )


def test_what_has_no_router_refuses_it() -> None:
    with pytest.raises(
        InputError, match=r"train\.router_aux_loss.*LlamaForCausalLM has no experts"
    ):
        backend_of(make_module("llama"), router_aux_loss=0.1)
    assert backend_of(make_module("llama"), router_aux_loss=0.0).experts.loss is None
    with pytest.raises(
        InputError, match=r"train\.router_aux_loss: a reward model has no load-balancing loss"
    ):
        config_from_dict(
            {
                "model": {"path": "x"},
                "algorithm": {"name": "bradley_terry"},
                "data": {"source": "x.jsonl"},
                "train": {"steps": 1, "router_aux_loss": 0.1},
                "run": {"dir": "y"},
            }
        )
    # as in transformers: a classifier has none
    critic = ScalarModel.on_trunk(experts("mixtral"), ToyTokenizer())
    assert LocalBackend(critic, train_config(), total_steps=1).experts.loss is None


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks.open(2, "cpu") as opened:
        yield opened


def loaded(kind: str = "qwen2_moe") -> CausalModel:
    return CausalModel(experts(kind))


@pytest.mark.parametrize(
    ("kind", "replay"),
    [(kind, "off") for kind in (*KINDS, "deepseek_v3", "granitemoe")] + [("qwen2_moe", "on")],
)
def test_two_ranks_give_the_gradient_of_one(ranks: Ranks, kind: str, replay: str) -> None:
    """The same micro-batches, dealt to two processes: the same loss and gradient, with tokens that
    go to given experts too.
    """
    chosen = torch.tensor([[[0, 3]], [[2, 1]]]).repeat(50, 2, 1)
    samples = [
        s.with_(extras={routes.NAME: routes.narrow(chosen[: len(s.tokens)], 4)})
        for s in make_samples(LENGTHS)
    ]
    asked = {"router_replay": replay, "router_aux_loss": 0.5}
    local = LocalBackend(loaded(kind), train_config(**asked), total_steps=10)
    sharded = FsdpBackend(
        ranks, partial(loaded, kind), train_config(backend="fsdp", **asked), total_steps=10
    )
    metrics, again = (one_pass(backend, samples, 1) for backend in (local, sharded))
    assert again == pytest.approx(metrics, abs=1e-5) and metrics["train/router_aux_loss"] > 0.1
    assert relative(sharded.ranks.call(sharded.id, summed)[0], gradients(local)) < 1e-6
    assert (metrics.get("experts/disagreement", 0.0) > 0.5) == (replay == "on")
    sharded.close()


def test_cut_packs_refuse_it(ranks: Ranks) -> None:
    make = partial(
        FsdpBackend,
        ranks,
        loaded,
        train_config(backend="fsdp", sequence_parallel=2),
        total_steps=10,
    )
    with pytest.raises(InputError, match=r"train\.router_aux_loss.*sequence parallelism cuts them"):
        make()


@pytest.mark.parametrize("kind", ["granitemoe", "deepseek_v3"])
def test_routers_that_transformers_does_not_ask(kind: str) -> None:
    """Granite's config has a coefficient and its model tells no logits; DeepSeek's scores are
    sigmoids. Packed it is what transformers' own forwards of each sample give with the loss by
    hand: value and gradient.
    """
    samples = make_samples([14, 9])
    model = CausalModel(make_architecture(kind))
    backend = LocalBackend(model, train_config(router_aux_loss=0.3), total_steps=10)
    found = one_pass(backend, samples)
    module = make_architecture(kind)
    routers = [part for part in module.modules() if "Router" in type(part).__name__]
    seen: dict[Any, list[torch.Tensor]] = {router: [] for router in routers}
    for router in routers:
        router.register_forward_pre_hook(lambda at, args: seen[at].append(args[0].flatten(0, -2)))
    said = []
    for sample in samples:
        logits = module(input_ids=sample.tokens[None], use_cache=False).logits[0, :-1]
        picked = logits.log_softmax(-1).gather(1, sample.tokens[1:, None])[:, 0]
        said.append(picked[sample.trained[1:]])
    share, load = [], []
    for router, hidden in seen.items():
        logits = torch.cat(hidden) @ router.weight.T
        scores = logits.sigmoid() if kind == "deepseek_v3" else logits.softmax(-1)
        share.append(scores / scores.sum(-1, keepdim=True))
        load.append(torch.zeros_like(scores).scatter(1, scores.topk(2).indices, 1.0))
    want = 4 * (torch.cat(share).mean(0) * torch.cat(load).mean(0)).sum()
    assert len(routers) > 0
    assert found["train/router_aux_loss"] == pytest.approx(want.item(), abs=1e-5)
    (0.3 * want - torch.cat(said).mean()).backward()
    alone = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert relative(gradients(backend), alone) < 1e-5
    assert all(router.weight.grad.abs().max() > 1e-5 for router in routers)


def test_the_square_of_the_logits() -> None:
    """ST-MoE's loss of the router: its value and its gradient."""
    samples = make_samples([14, 9])
    with_it, without = (
        backend_of(experts("mixtral"), router_aux_loss=0.0, router_z_loss=c) for c in (0.5, 0.0)
    )
    metrics, plain = one_pass(with_it, samples), one_pass(without, samples)
    module = experts("mixtral")
    own = [
        module(input_ids=s.tokens[None], use_cache=False, output_router_logits=True).router_logits
        for s in samples
    ]
    want = torch.cat([logits for row in own for logits in row]).logsumexp(-1).square().mean()
    assert metrics["train/router_z_loss"] == pytest.approx(want.item(), rel=1e-5)
    assert metrics["train/loss"] - plain["train/loss"] == pytest.approx(0.5 * want.item(), rel=1e-4)
    (0.5 * want).backward()
    added = {
        name: gradient - gradients(without)[name] for name, gradient in gradients(with_it).items()
    }
    expected = {name: p.grad for name, p in module.named_parameters() if name in added}
    routers = [name for name in expected if name.endswith("gate.weight")]
    assert routers
    for name in routers:
        assert torch.allclose(added[name], expected[name], atol=1e-5)


def test_a_router_that_says_nothing_of_its_load_is_refused_by_name() -> None:
    backend = backend_of(make_architecture("phimoe"), router_aux_loss=0.01)
    with pytest.raises(
        InputError, match="PhimoeForCausalLM does not say how it routes.*Set it to 0"
    ):
        one_pass(backend, make_samples([9, 6]))
