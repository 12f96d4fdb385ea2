"""Tool calls as models write them: one format per family, found by what its chat
template writes.
"""

from __future__ import annotations

from reinforge.core.errors import InputError
from reinforge.data.chat import Renderer
from reinforge.data.templates import takes_system, takes_tools
from reinforge.envs.calls.base import CallFormat
from reinforge.envs.calls.deepseek import DeepSeek
from reinforge.envs.calls.harmony import Harmony
from reinforge.envs.calls.hermes import Hermes
from reinforge.envs.calls.llama import LlamaJson
from reinforge.envs.calls.mistral import Mistral
from reinforge.envs.calls.pythonic import LFM2, LLAMA_PYTHONIC, PYTHONIC
from reinforge.envs.calls.tool_template import ToolTemplate
from reinforge.envs.calls.xml import GLM, QWEN_XML

_ALL: tuple[CallFormat, ...] = (
    Hermes(),
    LlamaJson(),
    LLAMA_PYTHONIC,
    Mistral(),
    PYTHONIC,
    Harmony(),
    DeepSeek(),
    QWEN_XML,
    GLM,
    LFM2,
)
FORMATS: dict[str, CallFormat] = {format.name: format for format in _ALL}
SIGNS = (
    ("<|channel|>", "harmony"),
    ("<｜tool▁call", "deepseek"),
    ("[TOOL_CALLS]", "mistral"),
    ("<function=", "qwen_xml"),
    ("<arg_key>", "glm"),
    ("<tool_call>", "hermes"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|python_start|>", "llama_pythonic"),
    ("<|python_tag|>", "llama_json"),
    ('"parameters": ', "llama_json"),
)


def detect(template: str | None) -> str | None:
    """The format that a chat template writes; None where it writes none that we know."""
    return next((name for sign, name in SIGNS if template and sign in template), None)


def tool_template_of(wanted: str, renderer: Renderer) -> ToolTemplate:
    """How conversations with tools are had through this chat template.

    `auto` with a template that has tools but writes calls in no way that we know leaves the format
    open: the first environment with tools is refused.
    """
    if not renderer.chat:
        return ToolTemplate(format_of(wanted, None))
    source = renderer.template.source()
    native = takes_tools(renderer.template)
    unknown = wanted == "auto" and native and detect(source) is None
    return ToolTemplate(
        None if unknown else format_of(wanted, source), native, takes_system(renderer.template)
    )


def format_of(wanted: str, template: str | None) -> CallFormat:
    """`auto`: as the template; a template that says nothing gets hermes, the commonest."""
    name = (detect(template) or "hermes") if wanted == "auto" else wanted
    if name not in FORMATS:
        raise InputError(
            f"there is no format of tool calls {wanted!r}.",
            where="env.calls",
            fix=f"There are: auto, {', '.join(FORMATS)}.",
        )
    return FORMATS[name]
