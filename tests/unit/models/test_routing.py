"""Where the tokens of a mixture go: what its routers chose, and choices that are given to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.toy_architectures import make_architecture, names
from helpers.toys import make_module, make_samples
from reinforge.core import routes
from reinforge.core.batch import Batch
from reinforge.core.errors import InputError
from reinforge.core.routes import OPEN
from reinforge.models.causal import CausalModel
from reinforge.models.routing import Replay, Routers, differs

KINDS = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "granitemoe", "llama4")
LENGTHS = [9, 6, 12]


def routed(kind: str) -> tuple[CausalModel, Routers, Batch]:
    model = CausalModel(make_architecture(kind))
    found = Routers.of(model)
    assert found is not None
    return model, found, Batch.pack(make_samples(LENGTHS))


def own_choice(model: CausalModel, routers: Routers, batch: Batch) -> Tensor:
    with torch.no_grad(), routers.watched():
        model.states(batch)
        return routers.taken()


def any_choice(like: Tensor, experts: int, seed: int = 0) -> Tensor:
    """[N, L, k] different experts for every token."""
    drawn = torch.rand(*like.shape[:2], experts, generator=torch.Generator().manual_seed(seed))
    return drawn.argsort(-1)[..., : like.shape[2]]


def by_hand(module: Any, router: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """The weights [N, k] of the chosen experts, as each architecture defines them."""
    logits = torch.nn.functional.linear(hidden, router.weight, getattr(router, "bias", None))
    kind = type(router).__name__
    if kind.startswith(("GptOss", "Granite")):
        return logits.gather(-1, chosen).softmax(-1)
    if kind.startswith("Deepseek"):
        scores = logits.sigmoid().gather(-1, chosen)
        return scores / scores.sum(-1, keepdim=True) * router.routed_scaling_factor
    weights = logits.softmax(-1).gather(-1, chosen)
    norm = kind.startswith("Mixtral") or router.norm_topk_prob
    return weights / weights.sum(-1, keepdim=True) if norm else weights


@pytest.mark.parametrize("kind", KINDS)
def test_its_own_choice_given_back_changes_no_bit(kind: str) -> None:
    model, routers, batch = routed(kind)
    plain = model.states(batch)
    chosen = own_choice(model, routers, batch)
    assert chosen.shape[:2] == (sum(LENGTHS), len(routers.choices))
    routers.give(chosen, Replay.ON)
    assert torch.equal(model.states(batch), plain)
    routers.give(any_choice(chosen, routers.choices[0].experts), Replay.ON)
    assert not torch.allclose(model.states(batch), plain, atol=1e-4)
    routers.give(None, Replay.ON)
    assert torch.equal(model.states(batch), plain)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "llama4"])
def test_a_given_choice_is_weighed_by_the_routers_own_rule(kind: str) -> None:
    """What reaches the experts of the first block: those that were given, with the weights that the
    architecture defines, and a gradient of these.
    """
    model, routers, batch = routed(kind)
    chosen = any_choice(own_choice(model, routers, batch), routers.choices[0].experts)
    block = next(part for part in model.trunk.modules() if hasattr(part, "_choice"))
    router = getattr(block, "gate", None) or block.router
    seen: list[tuple[Tensor, ...]] = []
    block.experts.register_forward_pre_hook(lambda _, args: seen.append(args))
    routers.give(chosen, Replay.ON)
    model.states(batch)
    hidden, index, weights = seen[0]
    assert torch.equal(index, chosen[:, 0])
    want = by_hand(block, router, hidden.detach(), chosen[:, 0])
    assert torch.allclose(weights, want, atol=1e-6)
    (found,) = torch.autograd.grad(weights.square().sum(), router.weight, retain_graph=True)
    (expected,) = torch.autograd.grad(want.square().sum(), router.weight)
    assert torch.allclose(found, expected, atol=1e-5) and expected.abs().max() > 1e-4


def test_open_tokens_choose_for_themselves() -> None:
    model, routers, batch = routed("qwen3_moe")
    own = own_choice(model, routers, batch)
    given = any_choice(own, 4)
    given[5:] = OPEN
    routers.give(given, Replay.ON)
    model.states(batch)
    assert torch.equal(routers.taken()[:5], given[:5])
    # of the first block alone: what comes after sees other hidden states
    assert torch.equal(routers.taken()[5:, 0], own[5:, 0])


def test_differing_takes_other_experts_and_leaves_another_order() -> None:
    model, routers, batch = routed("qwen3_moe")
    own = own_choice(model, routers, batch)
    given = own.flip(-1)
    given[3] = any_choice(own, 4, seed=1)[3]
    assert differs(given, own)[3, 0] and not differs(given, own)[4].any()
    routers.give(given, Replay.DIFFERING)
    model.states(batch)
    assert torch.equal(routers.taken()[3], given[3])
    assert torch.equal(routers.taken()[:3], own[:3])


def test_counting_changes_nothing() -> None:
    model, routers, batch = routed("mixtral")
    plain = model.states(batch)
    routers.give(any_choice(own_choice(model, routers, batch), 4), Replay.COUNT)
    assert torch.equal(model.states(batch), plain)


def test_two_views_of_one_module_share_its_routers() -> None:
    """The engine and the trainer each ask; the module is wrapped once."""
    module = make_architecture("mixtral")
    first, second = (Routers.of(CausalModel(module)) for _ in range(2))
    assert first is not None and second is not None
    assert all(a is b for a, b in zip(first.choices, second.choices, strict=True))


def test_what_has_no_experts_and_what_chooses_otherwise() -> None:
    assert Routers.of(CausalModel(make_module("llama"))) is None
    model, routers, batch = routed("phimoe")
    with (
        routers.watched(),
        pytest.raises(InputError, match=r"router_replay: PhimoeForCausalLM does not choose"),
    ):
        model.states(batch)
        routers.taken()


def test_other_blocks_are_refused() -> None:
    _, routers, _ = routed("mixtral")
    with pytest.raises(InputError, match=r"routed through 3 blocks.*MixtralForCausalLM has 2"):
        routers.give(torch.zeros(4, 3, 2, dtype=torch.int64), Replay.ON)


# ---- how they travel ----


@pytest.mark.parametrize(
    ("experts", "dtype"), [(254, torch.uint8), (255, torch.int16), (512, torch.int16)]
)
def test_narrow_and_wide(experts: int, dtype: torch.dtype) -> None:
    chosen = torch.tensor([[[0, experts - 1]], [[OPEN, OPEN]]])
    small = routes.narrow(chosen, experts)
    assert small.dtype == dtype and torch.equal(routes.wide(small), chosen)
    back = routes.from_json(routes.to_json(small))
    assert back is not None and back.dtype == dtype and torch.equal(back, small)
    longer = routes.wide(routes.padded(small, 4))
    assert torch.equal(longer[:2], chosen) and (longer[2:] == OPEN).all() and len(longer) == 4


def test_a_pack_has_them_where_its_tokens_are() -> None:
    """Prompts that are shared, rows without routes, another order than that of the samples."""
    rows = make_samples([9, 9, 7], prompt=4)
    rows = [
        row.with_(tokens=torch.cat([rows[0].tokens[:4], row.tokens[4:]]), group="one")
        for row in rows[:2]
    ] + rows[2:]

    def marked(row: Any) -> Any:
        told = row.tokens[:, None, None].expand(-1, 3, 2) % 200
        return row.with_(extras={routes.NAME: routes.narrow(told, 200)})

    packed = Batch.pack([marked(rows[0]), marked(rows[1]), rows[2]], share=True)
    assert packed.routes is not None and len(packed.routes) == packed.n_tokens == 9 + 5 + 7
    found = routes.wide(packed.routes)
    known = found[:, 0, 0] != OPEN
    assert torch.equal(found[known][:, 1, 1], packed.tokens[known] % 200)
    assert int(known.sum()) == 9 + 5
    assert Batch.pack(rows).routes is None


OTHERWISE = {"aria_text", "deepseek_v4", "longcat_flash", "phimoe", "zaya"}


@pytest.mark.long
def test_every_mixture_among_the_toys() -> None:
    """Its own choice given back changes no bit, and another one is taken; or it is refused by
    name. docs/experts.md has the numbers.
    """
    right, refused = set(), set()
    for kind in names():
        try:
            model = CausalModel(make_architecture(kind))
            found = Routers.of(model)
            batch = Batch.pack(make_samples(LENGTHS))
            plain = model.states(batch)
        except (InputError, AttributeError, TypeError, ValueError):
            continue  # the table of models says that it does not run here
        if found is None:
            continue
        try:
            chosen = own_choice(model, found, batch)
        except InputError:
            refused.add(kind)
            continue
        found.give(chosen, Replay.ON)
        assert torch.equal(model.states(batch), plain), kind
        other = any_choice(chosen, found.choices[0].experts)
        found.give(other, Replay.ON)
        model.states(batch)
        assert torch.equal(found.taken(), other), kind
        right.add(model.config.model_type)
    assert refused == OTHERWISE
    assert len(right) == 39, sorted(right)
