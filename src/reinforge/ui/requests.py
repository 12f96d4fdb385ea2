"""What the web app can be asked to do, beside showing something."""

from __future__ import annotations

from typing import Annotated

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
