"""The answers of the web app's API. The OpenAPI schema is made from these classes."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

State = Literal["running", "finished", "stopped", "terminated", "failed", "interrupted"]
Number = float | None
CurvePoint = list[Number]  # step, minutes, value, and of an evaluation low and high


class Answer(BaseModel):
    """What all of them share."""

    model_config = ConfigDict(extra="forbid")


class ErrorText(Answer):
    """What is wrong, where, and what to do."""

    what: str
    where: str | None = None
    fix: str | None = None


class ErrorAnswer(Answer):
    """Every answer with a status of 400 or more."""

    error: ErrorText


class AppInfo(Answer):
    """Of the app itself."""

    version: str
    root: str
    launching: bool = Field(description="Whether runs can be started and stopped from here.")
    uptime_seconds: float


class BestEval(Answer):
    metric: str
    value: Number
    step: int | None
    low: Number
    high: Number


class KnobAnswer(Answer):
    key: str
    value: Any
    was: Any


class CauseLine(Answer):
    """What speaks against a run, and the setting to turn."""

    what: str
    fix: str
    knob: KnobAnswer | None


class RunLine(Answer):
    """One run in the list."""

    run: str
    state: State
    why: str | None
    step: int
    steps: int | None
    share: Number = Field(description="Of the steps that are done.")
    eta_seconds: Number
    algorithm: str | None
    model: str | None
    reward: Number
    best_eval: BestEval | None
    troubles: list[str] = Field(description="What speaks against it, the first cause first.")
    causes: list[CauseLine] = Field(description="The same in parts.")
    tags: list[str]
    updated: float = Field(description="When it wrote last, by its own clock.")
    spark: list[list[Number]] = Field(description="[step, value] of its main metric.")
    spark_name: str | None


class DoctorFinding(Answer):
    """What the doctor found."""

    kind: str
    what: str
    fix: str
    evidence: list[str]
    since: int | None
    action: str
    because: str | None
    knob: KnobAnswer | None
    link: str


class RunEvent(Answer):
    """One event, or several that are the same."""

    time: Number
    step: int | None
    until: int | None = Field(description="The step of the last of them.")
    count: int
    kind: str
    text: str


class CheckpointLine(Answer):
    step: int
    bytes: int
    path: str


class LearningAnswer(Answer):
    answer: str
    reasons: list[str]


class RunPage(RunLine):
    """One run."""

    tiles: list[list[str]]
    findings: list[DoctorFinding]
    learning: LearningAnswer
    notes: list[str]
    events: list[RunEvent]
    checkpoints: list[CheckpointLine]
    settings: dict[str, Any]
    lineage: list[str]
    versions: dict[str, str]
    uncontained: list[str]
    launched: bool = Field(description="Whether this app, or an earlier one, started it.")


class CurveAnswer(Answer):
    name: str
    title: str
    says: str
    healthy: list[Number] | None
    evaluation: bool
    points: list[CurvePoint]


class QuestionAnswer(Answer):
    title: str
    curves: list[CurveAnswer]


class CurvesPage(Answer):
    questions: list[QuestionAnswer]


class PhasesPage(Answer):
    """Where the seconds of steps go."""

    names: list[str]
    bars: list[list[Number]] = Field(description="[first step, last step, seconds of each phase].")
    idle: dict[str, float] = Field(description="Shares of the last steps in which a role waits.")
    memory: list[list[Number]] = Field(description="[step, GiB].")


class ConfigPart(Answer):
    """The configuration that steps after `after` were done with."""

    after: int
    changed: list[list[Any]] = Field(description="[key, before, since].")


class ConfigPage(Answer):
    yaml: str
    flat: dict[str, Any]
    changed: list[ConfigPart]


class RecordedSample(Answer):
    """What is told of a sample wherever it is shown."""

    line: int
    step: int | None
    row: str | None
    uid: str | None
    group: str | None
    sample: int | None
    prompt: str
    completion: str
    answer: str | None = Field(description="The right one, where the row has one.")
    reward: Number
    components: dict[str, Number]
    advantage: Number
    length: int | None
    stop: str | None
    eval: bool


class SampleRow(RecordedSample):
    """One sample in a list; texts are cut."""

    turns: int
    tokens: bool = Field(description="Whether its tokens were recorded one by one.")


class SampleFacets(Answer):
    """What there is to filter by, over all samples of the run."""

    steps: list[int]
    stops: dict[str, int]
    components: list[str]
    evaluations: int


class SamplesPage(Answer):
    total: int
    page: int
    size: int
    rows: list[SampleRow]
    facets: SampleFacets | None = Field(
        description="null while a large file is being read: they come when it is asked again."
    )


class ToolCall(Answer):
    name: str
    arguments: str


class TurnAnswer(Answer):
    role: str
    text: str
    name: str | None = None
    calls: list[ToolCall] = []


class TokenTable(Answer):
    """The trained tokens of a sample, as recorded."""

    ids: list[int]
    pieces: list[str | None] = Field(description="Their texts; null where there is no tokenizer.")
    fields: dict[str, list[Number]] = Field(description="Recorded values, one for each token.")
    differences: dict[str, list[Number]] = Field(
        description="Differences of two recorded fields, the only numbers that are computed here."
    )


class SamplePage(RecordedSample):
    """All that is recorded of one sample."""

    at: int | None = Field(description="Its place among the samples that are asked for, from 0.")
    total: int = Field(description="How many these are.")
    previous: int | None = Field(description="The line of the sample before it.")
    next: int | None
    training: dict[str, Any]
    turns: list[TurnAnswer]
    tokens: TokenTable | None


class LoginAnswer(Answer):
    ok: bool


class GroupLine(Answer):
    """One group of a step, in the order in which they are worth a look."""

    group: int
    name: str
    row: str
    status: str
    samples: int
    mean: Number
    std: Number
    advantages: list[Number] | None
    pull: Number = Field(description="The sizes of its samples' parts of the loss.")
    wrong: bool
    checked: bool
    findings: list[str]


class GroupPage(Answer):
    """From rewards to advantages to loss, as `reinforge runs why` tells it."""

    step: int
    steps: list[int] = Field(description="Steps of which groups were recorded.")
    says: str
    verdict: str
    groups: list[GroupLine]
    group: dict[str, Any] = Field(description="What `runs why --group N --json` prints.")
    lines: dict[str, int] = Field(description="Samples of it that /api/sample has, by uid.")


class PromptPage(Answer):
    row: str
    prompt: str
    total: int
    rows: list[SampleRow]


class ComparedCurve(Answer):
    name: str
    evaluation: bool
    series: list[list[CurvePoint]] = Field(description="One curve for each run.")


class ComparedSetting(Answer):
    key: str
    values: list[Any]


class PartingAnswer(Answer):
    """Where two runs part: `step` is null where they do not."""

    compared: int
    step: int | None
    what: str | None
    cause: str | None
    evidence: list[str]


class ComparePage(Answer):
    runs: list[str]
    names: list[str] = Field(description="Curves that all of them have.")
    curves: list[ComparedCurve]
    config: list[ComparedSetting]
    parting: PartingAnswer | None


class TagsAnswer(Answer):
    run: str
    tags: list[str]


class AlgorithmLine(Answer):
    name: str
    family: str


class RecipeLine(Answer):
    name: str
    title: str
    family: str | None


class RecipeText(Answer):
    name: str
    yaml: str


class ConfigProblem(Answer):
    where: str | None = Field(description="The key.")
    what: str
    fix: str | None = None


class PlanPage(Answer):
    """What `reinforge plan` says."""

    ok: bool
    checked: bool = Field(description="Whether data and rewards were tried too.")
    problems: list[ConfigProblem]
    warnings: list[str]
    says: list[str]
    summary: dict[str, Any]


class RunStarted(Answer):
    run: str


class LogPage(Answer):
    """What a run printed that was started from here."""

    text: str
    alive: bool
    code: int | None


class DataText(Answer):
    """A text that a row becomes: pieces that are trained, and pieces that are not."""

    title: str
    pieces: list[dict[str, Any]] = Field(description="{text, trained}.")
    tokens: int
    trained: int


class DataRow(Answer):
    where: str
    texts: list[DataText]
    answer: str | None


class DataPage(Answer):
    """Rows as the trainer sees them, as `reinforge data show` tells it."""

    source: str
    read_as: list[str]
    serves: str
    trains: str
    rendered: str
    rows: int
    whole: bool
    columns: list[dict[str, Any]]
    shown: list[DataRow]
    page: int
    size: int
    lengths: dict[str, int] = Field(description="min, median, p95 and max, in tokens.")
    tokens: int
    trained: int
    limit: int | None
    long: list[dict[str, Any]] = Field(description="{where, tokens} of rows that are too long.")
    long_rows: int
    policy: str
    bad: list[str] = Field(description="Why rows cannot be used.")
    bad_rows: int
    fixes: list[str]
    dropped: bool
    usable: int
    unusual: dict[str, int]


class RewardScore(Answer):
    name: str
    value: Number
    weight: float
    error: str | None


class ChatToken(Answer):
    piece: str
    logprob: Number
    top: list[list[Any]] = Field(description="[piece, logprob] of the likeliest.")


class ChatAnswer(Answer):
    text: str
    tokens: list[ChatToken]
    step: int
    seconds: float


class ChatPage(Answer):
    answers: list[ChatAnswer] = Field(description="One for each side.")
