"""Proofs of `plan --deep` on rows, chat template and tokenizer: what the model is given and trained
on is what the rows say.

Each goes through the run's own rows, rendered by the run's own `Renderer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reinforge.config.schema import Config
from reinforge.core.errors import InputError
from reinforge.core.row import Row
from reinforge.core.sample import Sample
from reinforge.core.token_text import token_text
from reinforge.data.chat import Renderer
from reinforge.data.templates import check_prefix
from reinforge.plan.gold_answers import sample
from reinforge.plan.proofs import Proof, failed_by

ROWS = 64  # that are looked at, spread over all of them
ANSWER = "4"  # stands in for an answer where a row has none
ANSWERS = ("completion", "chosen", "rejected")
THOUGHT = "</think>"
OTHER_TEMPLATE = "Use another template (model.chat_template)."

Message = dict[str, Any]


@dataclass(frozen=True)
class RenderedConversation:
    """A row as it is trained, or as it is asked with a stand-in for the answer: its messages, its
    ids and which of them are trained. The proofs are about these.
    """

    row: Row
    messages: list[Message]
    first: int  # the message with which the answer begins
    prompt: list[int]
    sample: Sample
    given: bool  # the answer is the row's own

    @property
    def ids(self) -> list[int]:
        return [int(token) for token in self.sample.tokens]


def template_proofs(config: Config, renderer: Renderer, rows: Sequence[Row]) -> list[Proof]:
    """All of them. Where rows cannot be rendered there is one, which says why."""
    try:
        seen = [
            conversation
            for row in sample(rows, ROWS)
            for conversation in conversations(config, renderer, row)
        ]
    except InputError as error:
        return [failed_by("template", error)]
    if not seen:
        return []
    tried: list[Callable[[Config, Renderer, list[RenderedConversation]], Proof]] = [
        _keeps_turns,
        _round_trip,
        _prefix,
        _bos,
        _ends,
        _mask,
    ]
    return [proof(config, renderer, seen) for proof in tried]


def conversations(config: Config, renderer: Renderer, row: Row) -> Iterator[RenderedConversation]:
    """Of a row: with each of its answers, or with a stand-in."""
    columns = row.columns
    if columns.get("text") is not None or config.data.blocks:
        return
    asked = _messages(row.prompt)
    named = [name for name in ANSWERS if columns.get(name) is not None]
    if not config.algorithm.rl and not named and columns.get("messages") is not None:
        whole = _messages(columns["messages"])
        last = max((i for i, m in enumerate(whole) if m["role"] == "assistant"), default=None)
        if last is None:
            return
        before = replace(row, prompt=whole[:last])
        yield RenderedConversation(
            row, whole, last, renderer.prompt(before), renderer.training_row(row), True
        )
        return
    answers: list[Any] = [columns[name] for name in named]
    given = bool(answers) and not config.algorithm.rl
    kept = {name: columns[name] for name in ("tools",) if name in columns}
    for answer in answers if given else [ANSWER]:
        told = _messages(answer, "assistant")
        trained = renderer.training_row(replace(row, columns={**kept, "completion": answer}))
        yield RenderedConversation(
            row, [*asked, *told], len(asked), renderer.prompt(row), trained, given
        )


def _messages(value: Any, role: str = "user") -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _count(seen: Sequence[RenderedConversation]) -> str:
    rows = len({one.row.id for one in seen})
    return f"{rows:,} rows" if rows == len(seen) else f"{len(seen):,} answers of {rows:,} rows"


def _said(message: Message) -> str:
    """What of a message must be in the text. Of an earlier answer templates leave the thinking
    out.
    """
    content = message.get("content")
    return content.rpartition(THOUGHT)[2].strip() if isinstance(content, str) else ""


def _keeps_turns(config: Config, renderer: Renderer, seen: list[RenderedConversation]) -> Proof:
    """Every message is in what the model reads, in its place."""
    name = "every turn is rendered"
    turns = 0
    for one in seen:
        text = token_text(renderer.tokenizer, one.ids)
        at = 0
        for i, message in enumerate(one.messages):
            said = _said(message)
            found = _squeezed(text).find(_squeezed(said), at)
            if found < 0:
                what = (
                    f"the chat template leaves out message {i}, which the {message['role']} says:"
                    f" {said[:60]!r} is not in what the model reads."
                )
                return Proof(name, False, what, one.row.where, _without(message["role"], config))
            at = found + len(_squeezed(said))
            turns += 1
    return Proof(name, True, f"{turns:,} messages in {_count(seen)}, each in its place")


def _squeezed(text: str) -> str:
    """Without space, which templates strip and tokenizers add."""
    return "".join(text.split())


def _without(role: str, config: Config) -> str:
    if role != "system":
        return OTHER_TEMPLATE
    key = "data.system" if config.data.system is not None else "the system message"
    return f"{OTHER_TEMPLATE[:-1]}, or say in the user's message what {key} says."


def _round_trip(config: Config, renderer: Renderer, seen: list[RenderedConversation]) -> Proof:
    """The tokenizer writes every character of the rows."""
    name = "tokenizer round trip"
    unknown = renderer.tokenizer.unk_token_id
    tokens = 0
    for one in seen:
        tokens += len(one.ids)
        for message in one.messages:
            said = message.get("content")
            if not isinstance(said, str):
                continue
            ids = renderer.template.plain(said)
            again = token_text(renderer.tokenizer, ids)
            if unknown in ids or _squeezed(again) != _squeezed(said):
                lost = next((c for c in said if unknown in renderer.template.plain(c)), said[:20])
                what = (
                    f"the tokenizer cannot write {lost!r}: what it decodes is not what the row"
                    " says."
                )
                return Proof(
                    name,
                    False,
                    what,
                    one.row.where,
                    "Use the model's own tokenizer (model.tokenizer), or remove such text.",
                )
    return Proof(name, True, f"{tokens:,} tokens give back the text of {_count(seen)}")


def _prefix(config: Config, renderer: Renderer, seen: list[RenderedConversation]) -> Proof:
    """A prompt is how the same prompt with its answer begins."""
    name = "prompt is a prefix"
    for one in seen:
        if one.ids[: len(one.prompt)] != one.prompt:
            at = next(
                (
                    i
                    for i, pair in enumerate(zip(one.ids, one.prompt, strict=False))
                    if pair[0] != pair[1]
                ),
                min(len(one.ids), len(one.prompt)),
            )
            tail = token_text(renderer.tokenizer, one.prompt[at : at + 12])
            what = (
                f"with its answer the conversation begins otherwise from token {at} of"
                f" {len(one.prompt)}: a rollout sees {tail!r} there, and training does not."
            )
            fix = "Use a template that does not rewrite what came before (model.chat_template)."
            return Proof(name, False, what, one.row.where, fix)
    facts = check_prefix(renderer.tokenizer)
    several = any(sum(m["role"] == "assistant" for m in one.messages) > 1 for one in seen) or (
        config.env is not None
    )
    if several and facts["chat"] and not facts["prefix"] and config.data.loss_on == "assistant":
        what = (
            "the chat template renders earlier turns differently once more follow: the model would"
            " be trained on a history that it never saw."
        )
        return Proof(name, False, what, "model.chat_template", OTHER_TEMPLATE)
    longest = max(len(one.prompt) for one in seen)
    return Proof(name, True, f"of {_count(seen)}; the longest prompt has {longest:,} tokens")


def _bos(config: Config, renderer: Renderer, seen: list[RenderedConversation]) -> Proof:
    name = "BOS once"
    bos = renderer.tokenizer.bos_token_id
    if bos is None:
        return Proof(name, True, "the tokenizer has none")
    ends_too = bos == renderer.tokenizer.eos_token_id
    for one in seen:
        many = one.ids[:2].count(bos) if ends_too else one.ids.count(bos)
        if many > 1:
            return Proof(
                name,
                False,
                f"{renderer.tokenizer.bos_token} is {many} times in one conversation.",
                one.row.where,
                "Remove it from data.template, from the rows or from the chat template.",
            )
    begins = sum(one.ids[:1] == [bos] for one in seen)
    who = check_prefix(renderer.tokenizer)["bos"]
    who = f"; the {who} writes it" if begins else ""
    return Proof(name, True, f"{begins:,} of {_count(seen)} begin with one, none with two{who}")


def _ends(config: Config, renderer: Renderer, seen: list[RenderedConversation]) -> Proof:
    """An answer ends with a token that is a token of the model, and that ends a rollout."""
    name = "end of turn"
    tokenizer = renderer.tokenizer
    stops = renderer.stop_tokens
    where = "model.chat_template" if renderer.chat else "model.tokenizer"
    if not stops:
        what = "there is neither an EOS token nor a control token with which the template ends one."
        return Proof(name, False, what, where, "Give a tokenizer with an EOS (model.tokenizer).")
    size = len(tokenizer)
    beyond = [i for i in stops if i >= size]
    if beyond:
        what = f"the stop token {beyond[0]} is none of the tokenizer's {size:,} tokens."
        return Proof(name, False, what, where, "Use the model's own tokenizer (model.tokenizer).")
    shown = ", ".join(f"{tokenizer.convert_ids_to_tokens(i)} ({i})" for i in stops)
    if renderer.chat and check_prefix(tokenizer)["turn_end"] is None:
        last = token_text(tokenizer, seen[0].ids[-6:])
        what = (
            f"rollouts stop at {shown}, which the chat template never writes: it ends a turn with"
            f" {last[-24:]!r}. A model that is taught by it does not learn to stop."
        )
        fix = (
            "End the assistant's turns in the template with {{ eos_token }}, or set"
            " model.chat_template to one that does."
        )
        return Proof(name, False, what, where, fix)
    written = sum(any(token in stops for token in one.ids[len(one.prompt) :]) for one in seen)
    return Proof(name, True, f"{written:,} of {_count(seen)} end with a stop token: {shown}")


def _mask(config: Config, renderer: Renderer, seen: list[RenderedConversation]) -> Proof:
    """What is trained is what the assistant says, with the end of its turns."""
    name = "loss mask"
    if config.algorithm.rl:
        return Proof(name, True, "trained is what was sampled, token by token")
    if config.data.loss_on == "all":
        return Proof(name, True, "everything is trained (data.loss_on: all)")
    tokens = trained = around = 0
    for one in seen:
        tokens += len(one.ids)
        mask = [bool(x) for x in one.sample.trained]
        trained += sum(mask)
        found = _squeezed(_trained_text(renderer, one.ids, mask))
        wanted = _squeezed("".join(_answers(config, one)))
        if any(m.get("tool_calls") for m in one.messages):
            continue  # the template writes calls in its own words
        if wanted not in found:
            what = (
                f"trained is {_trained_text(renderer, one.ids, mask)[:60]!r}, and the assistant"
                f" says {''.join(_answers(config, one))[:60]!r}."
            )
            return Proof(name, False, what, one.row.where, OTHER_TEMPLATE)
        around += found != wanted
    more = f"; {around:,} with text that the template adds" if around else ""
    return Proof(
        name,
        True,
        f"{trained:,} of {tokens:,} tokens, which are the answers of {_count(seen)}{more}",
    )


def _trained_text(renderer: Renderer, ids: list[int], mask: list[bool]) -> str:
    chosen = [token for token, on in zip(ids, mask, strict=True) if on]
    return renderer.decode(chosen)


def _answers(config: Config, one: RenderedConversation) -> list[str]:
    """What of a conversation is to be trained, by `data.loss_on` and the weights of turns."""
    turns = [
        m
        for i, m in enumerate(one.messages)
        if m["role"] == "assistant" and (i >= one.first or "messages" in one.row.columns)
    ]
    if config.data.loss_on == "completion":
        turns = turns[-1:]
    return [str(m.get("content") or "") for m in turns if m.get("weight", 1)]
