"""Chat templates: an honest one renders as transformers renders it, a hostile one is refused before
it costs anything."""

from __future__ import annotations

import resource
import threading
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from helpers.attack_lists.templates import CONVERSATIONS, HONEST, HOSTILE, TOOL
from reinforge.core.errors import InputError
from reinforge.data import bounded
from reinforge.data.bounded import RenderBudget, TemplateLimitError, compiled, spending
from reinforge.data.templates import Template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


class Tokenizer:
    """As far as a template needs one."""

    added_tokens_decoder: dict[int, Any] = {}
    all_special_tokens: list[str] = []
    all_special_ids: list[int] = []
    special_tokens_map = SPECIAL

    def __init__(self, chat_template: str):
        self.chat_template = chat_template

    def get_chat_template(self, tools: Any = None) -> str:
        return self.chat_template


def template(source: str) -> Template:
    return Template(Tokenizer(source))  # type: ignore[arg-type]


def theirs(
    source: str, messages: Any, tools: Any, generation_prompt: bool, mark: bool
) -> tuple[str, Any]:
    texts, spans = render_jinja_template(
        conversations=[messages],
        tools=tools,
        chat_template=source,
        add_generation_prompt=generation_prompt,
        return_assistant_tokens_mask=mark,
        **SPECIAL,
    )
    return texts[0], tuple(spans[0]) if mark else ()


@pytest.mark.parametrize("mark", [False, True])
@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("source", HONEST, ids=lambda s: repr(s)[:30])
def test_an_honest_template_renders_as_transformers_renders_it(
    source: str, tools: Any, generation_prompt: bool, mark: bool
) -> None:
    for messages in CONVERSATIONS:
        try:
            want = theirs(source, messages, tools, generation_prompt, mark)
        except TypeError:  # a list where the template wants a text
            with pytest.raises(InputError, match="fails on the messages: TypeError"):
                template(source)._render(messages, tools, generation_prompt, "row", mark)
            continue
        assert template(source)._render(messages, tools, generation_prompt, "row", mark) == want


@pytest.mark.parametrize("source", HOSTILE, ids=lambda s: repr(s)[:60])
def test_a_hostile_template_is_refused_before_it_costs_anything(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By count, not by the clock; and in a few hundred megabytes."""
    monkeypatch.setattr(bounded, "SECONDS", 1e9)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        InputError,
        match="the chat template (costs more than it may|fails on the messages: RecursionError)",
    ):
        template(source).render(
            [{"role": "user", "content": "hi"}], None, generation_prompt=True, where="row 1"
        )
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kilobytes


def test_a_long_conversation_may_cost_more() -> None:
    """A template that builds its text in a variable, over two thousand turns."""
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t ~ m.content %}{%"
        " endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": f"{i} " * 200} for i in range(2000)]
    rendered = template(source).render(messages, None, generation_prompt=False, where="row 1")
    assert rendered.text == "".join(str(m["content"]) for m in messages)


def test_the_clock_stops_what_no_count_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "SECONDS", -1.0)
    with pytest.raises(InputError, match="it runs on"):
        template("{% for i in range(1000) %}{% endfor %}").render(
            [], None, generation_prompt=False, where="row 1"
        )


def test_what_one_render_costs_is_not_charged_to_the_next() -> None:
    source = "{% for i in range(99999) %}x{% endfor %}"
    for _ in range(25):
        assert (
            len(template(source).render([], None, generation_prompt=False, where="row 1").text)
            == 99999
        )


def test_renders_of_several_threads_pay_for_themselves() -> None:
    """One that is refused does not take the others with it."""
    source = (
        "{% for i in range(messages[0].n) %}{% for j in range(9999) %}{% endfor %}{% endfor %}done"
    )
    found: dict[int, str] = {}

    def one(n: int) -> None:
        with spending([]):
            try:
                found[n] = compiled(source).render(messages=[{"n": n}])
            except TemplateLimitError:
                found[n] = "refused"

    threads = [threading.Thread(target=one, args=(n,)) for n in (1, 9999, 2, 9998)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: "done", 2: "done", 9999: "refused", 9998: "refused"}


def test_what_is_shared_weighs_as_often_as_it_is_written() -> None:
    one: Any = ["ab"]
    assert RenderBudget().weigh([one, one]) == 24 + 2 * 18
    deep: Any = ["ab"]
    for _ in range(60):
        deep = [deep, deep]
    with pytest.raises(TemplateLimitError):
        RenderBudget().weigh(deep)


def test_what_the_caller_gave_is_weighed_once_and_as_it_would_be_in_a_template() -> None:
    shared = {"type": "text", "text": "ab"}
    given: Any = {
        "messages": [{"role": "user", "content": [shared, shared, None, 3, (b"abc", "d")]}],
        "tools": None,
    }
    remembered = RenderBudget.of(given)
    plain = RenderBudget().weigh(given)
    assert remembered.known[id(given)] == plain
    assert remembered.known[id(shared)] == RenderBudget().weigh(shared)
    assert remembered.size == bounded.SIZE + 16 * plain
    before = remembered.steps
    assert remembered.weigh(given) == plain and before - remembered.steps == 1, "not walked again"
    given["messages"].append(given)
    with pytest.raises(TemplateLimitError, match="too large to be written out"):
        RenderBudget.of(given)


def test_a_comparison_pays_for_what_it_reads() -> None:
    """No further than a short constant; all of a text that is searched, or compared
    with another.
    """

    def steps(source: str) -> int:
        with spending([]):
            before = bounded.budget().steps
            compiled(source).render(t="x" * 6400, u="x" * 6400)
            return before - bounded.budget().steps

    for free in ("t == 'user'", "'user' != t", "t < 'user'", "t == none"):
        assert steps("{% if " + free + " %}{% endif %}") == 0
    for paid in ("'user' in t", "t == u", "'a' < t < u", "t == '" + "x" * 65 + "'"):
        assert steps("{% if " + paid + " %}{% endif %}") >= 100


def test_a_message_that_is_to_be_continued() -> None:
    """As transformers does it, whether or not the template strips."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so far "}]
    for source in (
        "{% for m in messages %}[{{ m.content }}]{% endfor %}",
        "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}",
    ):
        want = render_jinja_template([messages], chat_template=source, continue_final_message=True)[
            0
        ][0]
        assert template(source).continued(messages, "row") == want
    with pytest.raises(InputError, match="drops the last message"):
        template("{{ messages[0].content }}").continued(messages, "row")
