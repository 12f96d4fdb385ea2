"""The proof at load on a GPU, where bfloat16 goes through kernels of its own: it accepts what is
right and refuses the rest.
"""

from __future__ import annotations

import pytest
import torch

from helpers.toy_architectures import REFUSED, RIGHT, make_architecture
from reinforge.core.errors import InputError
from reinforge.models import attention, proof
from reinforge.models.causal import CausalModel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_is_accepted(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    kernel = attention.varlen_attention
    monkeypatch.setattr(
        attention, "varlen_attention", lambda *a, **k: calls.append(1) or kernel(*a, **k)
    )
    assert CausalModel(make_architecture(name, dtype=dtype).cuda()).verify() < 1e-5
    # the kernel of training was among what was shown
    assert bool(calls) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name: str) -> None:
    module = make_architecture(name, dtype=torch.bfloat16).cuda()
    with pytest.raises(InputError, match=r"model\.path: "), proof.refusing(module):
        CausalModel(module).verify()
