"""What the web app can be asked to do, beside showing something."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

NAME = 1000  # characters of a name
TEXT = 1 << 20  # of a configuration
LARGEST = 2**53
RunPath = Annotated[str, Field(min_length=1, max_length=NAME)]
NewName = Annotated[str, Field(min_length=1, max_length=200)]
ConfigText = Annotated[str, Field(max_length=TEXT, description="A configuration as YAML.")]


class AppRequest(BaseModel):
    """What all of them share: nothing unknown is ignored."""

    model_config = ConfigDict(extra="forbid")


class TokenRequest(AppRequest):
    """Who has the token gets a cookie."""

    token: str = Field(max_length=NAME)


class TagsRequest(AppRequest):
    run: RunPath
    tags: list[Annotated[str, Field(min_length=1, max_length=60)]] = Field(max_length=20)


class PlanRequest(AppRequest):
    yaml: ConfigText
    name: NewName | None = None
    full: bool = Field(False, description="Also try data and rewards, which takes seconds.")


class LaunchRequest(AppRequest):
    yaml: ConfigText
    name: NewName


class RunRequest(AppRequest):
    run: RunPath


class BranchRequest(AppRequest):
    run: RunPath
    step: int = Field(ge=0, le=LARGEST)
    name: NewName
    overrides: list[Annotated[str, Field(max_length=10_000)]] = Field([], max_length=100)


class DataRequest(AppRequest):
    """A source (file, hub data set, generator, recipe:NAME) or a configuration."""

    yaml: ConfigText | None = None
    source: str | None = Field(None, max_length=NAME)
    model: str | None = Field(None, max_length=NAME, description="Whose tokenizer and template.")
    page: int = Field(0, ge=0, le=1000)
    size: int = Field(10, ge=1, le=50)


class RewardsRequest(AppRequest):
    """The rewards of a configuration, or of a run."""

    yaml: ConfigText | None = None
    run: RunPath | None = None
    prompt: str = Field("", max_length=TEXT)
    completion: str = Field(max_length=TEXT)
    columns: dict[str, Any] = Field({}, description="Columns of the row, such as answer.")


class ChatSide(AppRequest):
    run: RunPath
    step: int | None = Field(None, ge=0, le=LARGEST)


class ChatMessage(AppRequest):
    role: str = Field(max_length=60)
    content: str = Field(max_length=TEXT)


class ConversationRequest(AppRequest):
    sides: list[ChatSide] = Field(min_length=1, max_length=2)
    messages: list[ChatMessage] = Field(min_length=1, max_length=200)
    temperature: float = Field(1.0, ge=0, le=10, allow_inf_nan=False)
    max_tokens: int = Field(256, ge=1, le=32768)
    logprobs: bool = True
