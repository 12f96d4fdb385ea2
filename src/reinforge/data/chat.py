"""From rows to tokens.

Prompts of rollouts and evaluations, and the prompt part of SFT rows, are the same ids by
construction.

Exactly one BOS: where the tokenizer would put one, and never a second. Ends are trained because the
template or we put them there; nothing is ever masked by token id, so pad == eos does no harm.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from reinforge.config.chat_templates import fitting
from reinforge.core.errors import InputError
from reinforge.core.sample import Row, Sample, Stop
from reinforge.core.token_text import token_text
from reinforge.data.sources import check_messages, check_text
from reinforge.data.templates import MARKER, RenderedChat, Span, Template, adds_bos, turn_end
from reinforge.data.templates import check_prefix as check_prefix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from reinforge.config.data import DataConfig

# what `Renderer.counts` counts, in words
UNUSUAL = {
    "special_text": "the text spells special tokens; it is kept as text",
    "split_token": (
        "a token would have spanned the end of the prompt; it is cut there, as in a rollout"
    ),
    "template_reads_special_text": (
        "the chat template would have treated special text in its own way; it does not get to"
        " see it"
    ),
    "calls_left_out": (
        "the chat template has no place for tool calls: they are not in the text; use another"
        " one (model.chat_template)"
    ),
    "glued": (
        "as plain text nothing stands between prompt and answer; model.chat_template=alpaca (or"
        " another) puts a template around them"
    ),
}
SEPARATORS = tuple(":=>]|#-")  # with which a prompt may end that is written to be gone on with


class Renderer:
    """Turns rows into ids for one tokenizer. `counts` says what was unusual:
    special_text (rows that spell special tokens; kept as text), split_token (a token that would
    have spanned the end of a prompt was cut there, as it is in a rollout),
    template_reads_special_text (the template would have treated such text in its own way, e.g.
    split at it; it did not get to see it), calls_left_out (the template does not write the tool
    calls of a conversation), glued (plain text, with nothing between prompt and answer).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, cfg: DataConfig):
        if cfg.chat == "always" and not tokenizer.chat_template:
            raise InputError(
                "the tokenizer has no chat template",
                where="data.chat: always",
                fix=f"Set model.chat_template ({_fitting(tokenizer)}), or data.chat: auto.",
            )
        self.tokenizer = tokenizer
        self.cfg = cfg
        self.chat = cfg.chat != "never" and bool(tokenizer.chat_template)
        self.template = Template(tokenizer)
        self.counts: Counter[str] = Counter()
        self._glued_row: str | None = None  # the last one that was counted
        self.bos = [tokenizer.bos_token_id] if adds_bos(tokenizer) else []

    # what the rest of the house calls

    def prompt(self, row: Row, *, header: bool = True) -> list[int]:
        """What the model is given: up to and including the header of its own turn, or without."""
        self._count(row, [row.prompt, row.columns.get("tools")])
        if not self.chat:
            return self.bos + self.template.plain(self._text(row))
        rendered = self._render(row, self._messages(row), generation_prompt=header)
        return self._with_bos(self.template.encode(rendered, _where(row)))

    def training_row(self, row: Row) -> Sample:
        """An SFT row.

        Trained are: the assistant turns, or the completion, or everything (`data.loss_on`).
        """
        columns = row.columns
        everything = self.cfg.loss_on == "all"
        if columns.get("completion") is not None:
            self._count(row, [row.prompt, columns["completion"], columns.get("tools")])
            ids, trained = self._chat_completion(row) if self.chat else self._text_completion(row)
        elif columns.get("messages") is not None:
            self._count(row, [columns["messages"], columns.get("tools")])
            ids, trained = self._conversation(
                row, check_messages(columns["messages"], _where(row), "messages")
            )
        elif everything and not isinstance(row.prompt, str):
            self._count(row, [row.prompt, columns.get("tools")])
            ids, trained = self._conversation(row, self._messages(row))
        elif everything:
            ids = self.document(row)
            trained = []
        elif columns.get("text") is not None:
            raise InputError(
                "is one whole text, and nothing says which part the assistant wrote",
                where=_where(row),
                fix="Set data.loss_on: all, or data.blocks: true to train on blocks of it.",
            )
        elif "completion" in columns:
            raise InputError(
                "completion is missing (null)", where=_where(row), fix="Repair or remove the row."
            )
        else:
            raise InputError(
                "has no answer to train on: no column completion, messages or text, only"
                f" {', '.join(columns) or 'the prompt'}",
                where=_where(row),
                fix="Name it with data.columns, e.g. {completion: answer}.",
            )
        mask = [True] * len(ids) if everything else trained
        self.counts["calls_left_out"] += self._loses_calls(row)
        if not any(mask[1:]):
            raise InputError("has no token to train on", where=_where(row), fix="Remove the row.")
        return Sample.from_tokens(row.id, ids, mask)

    def document(self, row: Row) -> list[int]:
        """A whole text, with EOS behind it."""
        self._count(row, row.prompt)
        return self.bos + self.template.plain(self._text(row)) + self._eos()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of a completion, without control tokens."""
        return token_text(self.tokenizer, tokens, special=False)

    def decode_all(self, answers: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of each: of a tokenizer that adds nothing to its library's, on all cores."""
        from transformers import PreTrainedTokenizerFast as Fast

        kind = type(self.tokenizer)
        plain = issubclass(kind, Fast) and (kind.decode, kind._decode) == (
            Fast.decode,
            Fast._decode,
        )
        if not plain:
            return [self.decode(tokens) for tokens in answers]
        found: list[str] = self.tokenizer.backend_tokenizer.decode_batch(
            [list(tokens) for tokens in answers], skip_special_tokens=True
        )
        return found

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The ids that end a completion: EOS, and what the template puts at the end of an assistant
        turn.
        """
        end = turn_end(self.template) if self.chat else None
        return tuple(dict.fromkeys(i for i in (self.tokenizer.eos_token_id, end) if i is not None))

    # plain text

    def _text(self, row: Row) -> str:
        if not isinstance(row.prompt, str):
            why = (
                "data.chat is never"
                if self.tokenizer.chat_template
                else "the tokenizer has no chat template"
            )
            raise InputError(
                f"its prompt is chat messages, but {why}",
                where=_where(row),
                fix=(
                    f"Use a chat model, set model.chat_template ({_fitting(self.tokenizer)}), or"
                    " give text prompts without data.system."
                ),
            )
        return check_text(row.prompt, _where(row), "prompt")

    def _eos(self) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            raise InputError(
                "the tokenizer has no EOS token, so that the model would never learn to stop",
                where="model.tokenizer",
            )
        return [self.tokenizer.eos_token_id]

    def _text_completion(self, row: Row) -> tuple[list[int], list[bool]]:
        """Prompt, completion, EOS.

        Encoded together where that leaves the prompt's ids alone (some tokenizers begin every text
        with a space), otherwise apart, as a rollout would.
        """
        text = check_text(row.columns["completion"], _where(row), "completion")
        asked = self._text(row)
        if not self.tokenizer.chat_template and _is_glued(asked, text):
            self.counts["glued"] += self._glued_row != row.id  # a pair is one row
            self._glued_row = row.id
        prompt = self.template.plain(asked)
        joint = self.template.plain(asked + text)
        if joint[: len(prompt)] != prompt:
            self.counts["split_token"] += 1
            joint = prompt + self.template.plain(text)
        ids = self.bos + joint + self._eos()
        start = len(self.bos) + len(prompt)
        return ids, [False] * start + [True] * (len(ids) - start)

    # chat

    def _messages(self, row: Row) -> list[dict[str, Any]]:
        if isinstance(row.prompt, str):
            return [{"role": "user", "content": check_text(row.prompt, _where(row), "prompt")}]
        return check_messages(row.prompt, _where(row), "prompt")

    def _render(
        self,
        row: Row,
        messages: list[dict[str, Any]],
        *,
        generation_prompt: bool = False,
        mark: bool = False,
    ) -> RenderedChat:
        rendered = self.template.render(
            _with_arguments(messages, as_text=self.template.text_arguments),
            _tools(row),
            generation_prompt=generation_prompt,
            where=_where(row),
            mark=mark,
        )
        self.counts["template_reads_special_text"] += rendered.differs
        return rendered

    def _chat_completion(self, row: Row) -> tuple[list[int], list[bool]]:
        value = row.columns["completion"]
        if isinstance(value, str):
            answer = [
                {"role": "assistant", "content": check_text(value, _where(row), "completion")}
            ]
        else:
            answer = check_messages(value, _where(row), "completion")
        prompt = self._messages(row)
        turns = [len(prompt) + i for i, m in enumerate(answer) if m["role"] == "assistant"]
        return self._trained_turns(row, prompt + answer, turns)

    def _conversation(
        self, row: Row, messages: list[dict[str, Any]]
    ) -> tuple[list[int], list[bool]]:
        if not self.chat:
            self._text(Row(row.id, messages, place=row.place))  # raises: there is no template
        turns = [
            i
            for i, m in enumerate(messages)
            if m["role"] == "assistant" and _weight(m, f"messages[{i}]", row)
        ]
        if self.cfg.loss_on == "all":
            rendered = self._render(row, messages)
            return self._with_bos(self.template.encode(rendered, _where(row))), []
        if (
            self.cfg.loss_on == "assistant"
            and turns
            and not any("weight" in m for m in messages)  # markers tell no turn from another
            and MARKER.search(self.template.source(_tools(row)))
        ):
            rendered = self._render(row, messages, mark=True)
            return self._with_mask(row, rendered, rendered.generated, trim=False)
        return self._trained_turns(
            row, messages, turns[-1:] if self.cfg.loss_on == "completion" else turns
        )

    def _trained_turns(
        self, row: Row, messages: list[dict[str, Any]], turns: list[int]
    ) -> tuple[list[int], list[bool]]:
        """Trains the given assistant turns, found by rendering what comes before each: that must be
        a prefix of the whole.
        """
        if not turns:
            raise InputError("has no assistant turn to train on", where=_where(row))
        whole = self._render(row, messages)
        spans: list[Span] = []
        for turn in turns:
            before = self._render(row, messages[:turn], generation_prompt=True).text
            after = (
                self._render(row, messages[: turn + 1]).text
                if turn + 1 < len(messages)
                else whole.text
            )
            if not whole.text.startswith(before) or not whole.text.startswith(after):
                raise InputError(
                    f"the chat template renders messages 0 to {turn} differently once more follow"
                    " or the assistant answers: what would be trained is not what a rollout sees",
                    where=_where(row),
                    fix=(
                        "Set data.loss_on: completion (only the last turn), or model.chat_template"
                        " to one that does not rewrite earlier turns."
                    ),
                )
            spans.append((len(before), len(after)))
        return self._with_mask(row, whole, spans, trim=True)

    def _with_mask(
        self, row: Row, whole: RenderedChat, spans: Sequence[Span], *, trim: bool
    ) -> tuple[list[int], list[bool]]:
        """Ids of the whole, and the mask of the given character spans.

        Where a token would span the begin or end of a turn it is cut there, as it is in a rollout,
        which has the prompt's ids before there is an answer. `trim`: what follows the last control
        token of a turn (a newline) is the template's, and no policy samples it.
        """
        encode = self.template.encode
        where = _where(row)
        done: list[int] = []  # ids before the last cut
        rest = encode(whole, where)  # ids after it
        cut = 0  # its character
        controls = self.template.controls(rest)
        index = {0: 0}  # character of a boundary -> index of the token that begins there
        for position in sorted({p for span in spans for p in span}):
            prefix = encode(whole.until(position).since(cut), where)
            if rest[: len(prefix)] != prefix:
                done = done + prefix
                rest = encode(whole.since(position), where)
                cut = position
                self.counts["split_token"] += 1
                prefix = []
            index[position] = len(done) + len(prefix)
        ids = done + rest
        assert self.template.controls(ids) == controls, (
            f"row {row.id}: cutting at a turn changed the control tokens"
        )
        trained = [False] * len(ids)
        for start, end in spans:
            first = index[start]
            last = index[end]
            last = self._trim(ids, first, last) if trim else last
            trained[first:last] = [True] * (last - first)
        complete = self._with_bos(ids)
        return complete, [False] * (len(complete) - len(ids)) + trained

    def _trim(self, ids: list[int], first: int, last: int) -> int:
        end = next(
            (i + 1 for i in reversed(range(first, last)) if ids[i] in self.template.special_ids),
            last,
        )
        return end if not token_text(self.tokenizer, ids[end:last]).strip() else last

    def _with_bos(self, ids: list[int]) -> list[int]:
        return self.bos + ids if ids[:1] != self.bos else ids

    def _loses_calls(self, row: Row) -> bool:
        turns = [*_turns(row.columns.get("messages")), *_turns(row.columns.get("completion"))]
        called = any(turn.get("tool_calls") for turn in turns)
        return self.chat and called and not self.template.writes_calls

    def _count(self, row: Row, value: Any) -> None:
        self.counts["special_text"] += self.template.has_special_text(value)


def _is_glued(prompt: str, answer: str) -> bool:
    """Whether nothing tells where the prompt ends and the answer begins.

    >>> _is_glued("What is 1+1?", "2"), _is_glued("1+1=", "2"), _is_glued("One", " two")
    (True, False, False)
    """
    ends = prompt[-1:]
    return bool(ends) and not (ends.isspace() or ends in SEPARATORS or answer[:1].isspace())


def _fitting(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat templates that the tokenizer can write, as words."""
    return f"{', '.join(fitting(tokenizer.get_vocab()))}, or a file"


def _where(row: Row) -> str:
    return row.where


def _turns(value: Any) -> list[dict[str, Any]]:
    return value if isinstance(value, list) else []


def _weight(message: dict[str, Any], where: str, row: Row) -> bool:
    """Whether a turn is trained: OpenAI's `weight`, which is 0 or 1, and 1 where it is missing."""
    weight = message.get("weight", 1)
    if weight not in (0, 1):
        raise InputError(
            f"{where}.weight is {weight!r}, neither 0 nor 1",
            where=_where(row),
            fix="0 leaves the turn out of training.",
        )
    return bool(weight)


def _with_arguments(messages: list[dict[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    """Messages whose tool calls have their arguments as the template wants them: as an object, or
    as JSON text, which is how OpenAI writes them.
    """
    if not any(m.get("tool_calls") for m in messages):
        return messages
    return [
        {**m, "tool_calls": [_call(call, as_text) for call in m["tool_calls"]]}
        if isinstance(m.get("tool_calls"), list)
        else m
        for m in messages
    ]


def _call(call: Any, as_text: bool) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    arguments = function["arguments"]
    if as_text and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif not as_text and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call  # no JSON: the template gets what the row says
    return {**call, "function": {**function, "arguments": arguments}}


def _tools(row: Row) -> list[Any] | None:
    """The tools column: a list of JSON schemas, or the same as JSON text. A schema may come without
    what chat templates expect around it, as in LLaMA-Factory's files.
    """
    tools = row.columns.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise InputError(f"tools is text but not JSON: {error}", where=_where(row)) from None
    if tools is not None and not (
        isinstance(tools, list) and all(isinstance(t, dict) for t in tools)
    ):
        raise InputError(
            f"tools is {type(tools).__name__}, not a list of JSON schemas", where=_where(row)
        )
    return [_wrapped(tool) for tool in tools] if tools else None


def _wrapped(tool: dict[str, Any]) -> dict[str, Any]:
    bare = "name" in tool and "function" not in tool and "type" not in tool
    return {"type": "function", "function": tool} if bare else tool


def fit_prompt(cfg: DataConfig, row: Row, ids: list[int], limit: int) -> list[int] | None:
    """The ids of a prompt, at most `limit` of them, by the policy `data.length`; None where it is
    dropped. A prompt loses its beginning: the header of the answer must stay.
    """
    if len(ids) <= limit:
        return ids
    if cfg.length == "error":
        raise InputError(
            f"has {len(ids)} tokens, more than {limit}",
            where=f"row {row.id}",
            fix="Set data.length: drop or truncate, or raise data.max_length.",
        )
    return ids[-limit:] if cfg.length == "truncate" else None


def truncate(sample: Sample, limit: int) -> Sample | None:
    """Its first `limit` tokens; None where nothing trained would be left."""
    if not bool(sample.trained[:limit].any()):
        return None
    streams = {name: stream[:limit] for name, stream in sample.streams.items()}
    rewards = None if sample.token_rewards is None else sample.token_rewards[:limit]
    return sample.with_(
        tokens=sample.tokens[:limit],
        trained=sample.trained[:limit],
        logprobs=sample.logprobs[:limit],
        versions=sample.versions[:limit],
        streams=streams,
        token_rewards=rewards,
        stop=Stop.LENGTH,
    )
