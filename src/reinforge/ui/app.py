"""The routes of the web app."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError

from reinforge.algorithms.catalogue import describe
from reinforge.config.recipes import recipe_names, recipe_text, summary
from reinforge.config.reference import json_schema
from reinforge.core.errors import InputError
from reinforge.serve.http import LOG, HTTPException
from reinforge.serve.options import is_loopback
from reinforge.ui import answers, group_pages, requests, run_pages, sample_pages
from reinforge.ui.access import COOKIE, LOGIN, BodyLimit, BrowserGuard, SafeHeaders, refusal
from reinforge.ui.assets import asset
from reinforge.ui.chats import ChatServers
from reinforge.ui.errors import NoSuchRun
from reinforge.ui.folder import RunsFolder
from reinforge.ui.launcher import Launcher
from reinforge.ui.listing import RunListing
from reinforge.ui.options import AppOptions
from reinforge.ui.plan_pages import plan_page
from reinforge.ui.sample_index import SampleFilter
from reinforge.ui.texts import sound
from reinforge.ui.work import ask_worker, config_file
from reinforge.version import __version__

NAME = 1000  # characters of a name in a request
LARGEST = 2**53  # whole numbers of JavaScript
RunName = Annotated[
    str, Query(max_length=NAME, description="The path of a run, relative to the folder of runs.")
]
Whole = Annotated[int | None, Query(ge=-LARGEST, le=LARGEST)]
Real = Annotated[float | None, Query(allow_inf_nan=False)]
Word = Annotated[str | None, Query(max_length=NAME)]
Words = Annotated[str, Query(max_length=NAME)]
Order = Literal[
    "newest", "oldest", "reward", "-reward", "length", "-length", "advantage", "-advantage"
]


def asked_samples(
    step: Whole = None,
    prompt: Annotated[Word, Query(description="The id of a row.")] = None,
    text: Annotated[Word, Query(description="Part of a prompt or a completion.")] = None,
    reward_min: Real = None,
    reward_max: Real = None,
    length_min: Whole = None,
    length_max: Whole = None,
    stop: Word = None,
    component: Annotated[Word, Query(description="name, name>=0.5, name<1, name=0")] = None,
    finding: Annotated[Word, Query(description="The kind of a finding.")] = None,
    eval: bool | None = None,
) -> tuple[SampleFilter, str]:
    """Which samples a list of them has: a filter, and the kind of a finding that they show."""
    wanted = SampleFilter(
        step=step,
        prompt=prompt,
        text=text,
        reward_min=reward_min,
        reward_max=reward_max,
        length_min=length_min,
        length_max=length_max,
        stop=stop,
        component=component,
        evaluation=eval,
    )
    return wanted, finding or ""


AskedSamples = Annotated[tuple[SampleFilter, str], Depends(asked_samples)]
REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {"model": answers.ErrorAnswer} for code in (400, 401, 403, 404, 405, 408, 413, 422)
}


def make_app(options: AppOptions, token: str | None) -> Any:
    """The whole app as ASGI; `token`: what who asks must show."""
    folder = RunsFolder(options.root)
    listing = RunListing(folder)
    launcher = Launcher(folder)
    chats = ChatServers()
    began = time.monotonic()
    api = FastAPI(
        title="reinforge ui",
        version=__version__,
        description="What `reinforge ui` tells its page, read from run directories.",
        docs_url=None,
        redoc_url=None,
        openapi_url="/api/openapi.json",
        responses=REFUSALS,
    )
    guard = BrowserGuard(api, api_key=token, local=is_loopback(options.host))

    def allowed() -> None:
        """Whether anything may be started or changed."""
        if not options.launching:
            raise HTTPException(403, "this app was started with --read-only")

    @api.exception_handler(InputError)
    async def _refused(request: Request, error: InputError) -> Response:
        status = 404 if isinstance(error, NoSuchRun) else 400
        return refusal(status, error.what, error.where, error.fix)

    @api.exception_handler(RequestValidationError)
    async def _unreadable(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or None
        return refusal(422, str(first["msg"]), where)

    @api.exception_handler(HTTPException)
    async def _other(request: Request, error: HTTPException) -> Response:
        return refusal(error.status_code, str(error.detail), request.url.path)

    @api.exception_handler(Exception)
    async def _failed(request: Request, error: Exception) -> Response:
        LOG.error("a request failed", exc_info=error)
        return refusal(500, f"the app failed: {type(error).__name__}", request.url.path)

    @api.get("/api/info")
    def info() -> answers.AppInfo:
        """The app itself."""
        return answers.AppInfo(
            version=__version__,
            root=str(folder.root),
            launching=options.launching,
            uptime_seconds=time.monotonic() - began,
        )

    @api.post(LOGIN)
    def login(asked: requests.TokenRequest, response: Response) -> answers.LoginAnswer:
        """A cookie for who has the token, which the page finds in the link that opened it."""
        if token is not None and not guard.knows(asked.token):
            raise HTTPException(401, "this is not the token")
        if token is not None:
            response.set_cookie(COOKIE, token, httponly=True, samesite="strict", path="/api")
        return answers.LoginAnswer(ok=True)

    @api.get("/api/runs")
    def runs(search: Words = "", state: Words = "", tag: Words = "") -> list[answers.RunLine]:
        """The runs of the folder, the most recently written first."""
        found = [line for line in listing.lines() if run_pages.fits(line, search, state, tag)]
        return sorted(found, key=lambda line: -line.updated)

    @api.get("/api/run")
    def run(run: RunName) -> answers.RunPage:
        """One run: its state, what the doctor found, events, checkpoints, settings."""
        return run_pages.run_page(folder.record(run), launched=launcher.was_launched(run))

    @api.get("/api/curves")
    def curves(
        run: RunName,
        names: Annotated[Words, Query(description="Only these, with commas between them.")] = "",
        points: Annotated[int, Query(ge=2, le=5000)] = 1000,
    ) -> answers.CurvesPage:
        """Metrics over steps, by the question that they answer."""
        only = [name for name in names.split(",") if name]
        return run_pages.curves_page(folder.record(run), only, points)

    @api.get("/api/phases")
    def phases(run: RunName) -> answers.PhasesPage:
        """Where the seconds of steps go, who waits, and memory."""
        return run_pages.phases_page(folder.record(run))

    @api.get("/api/config")
    def config(run: RunName) -> answers.ConfigPage:
        """The configuration, without secrets, and how it changed where the run was continued."""
        return run_pages.config_page(folder.record(run))

    @api.get("/api/samples")
    def samples(
        run: RunName,
        asked: AskedSamples,
        order: Order = "newest",
        page: Annotated[int, Query(ge=0, le=10**7)] = 0,
        size: Annotated[int, Query(ge=1, le=500)] = 50,
    ) -> answers.SamplesPage:
        """Recorded samples, filtered."""
        wanted, finding = asked
        record = folder.record(run, fresh=bool(finding))
        if finding:
            wanted = sample_pages.fitting(record, finding, wanted)
        return sample_pages.samples_page(record, wanted, order, page, size)

    @api.get("/api/sample")
    def sample(
        run: RunName,
        line: Annotated[int, Query(ge=0, le=LARGEST)],
        asked: AskedSamples,
        order: Order = "newest",
    ) -> answers.SamplePage:
        """All that is recorded of one sample, with its tokens where run.log.tokens is all; its
        place, and the samples before and after it, in the list that the filter and order give.
        """
        wanted, finding = asked
        record = folder.record(run)
        if finding:
            wanted = sample_pages.fitting(record, finding, wanted)
        return sample_pages.sample_page(record, line, wanted, order)

    @api.get("/api/group")
    def group(run: RunName, step: Whole = None, group: Word = None) -> answers.GroupPage:
        """The samples of a group from rewards to advantages to loss."""
        return group_pages.group_page(folder.record(run), step, group)

    @api.get("/api/prompt")
    def prompt(
        run: RunName,
        prompt: Annotated[str, Query(max_length=NAME, description="The id of a row.")],
    ) -> answers.PromptPage:
        """The answers to one prompt over training."""
        return group_pages.prompt_page(folder.record(run, fresh=False), prompt)

    @api.get("/api/compare")
    def compare(
        run: Annotated[list[RunName], Query(min_length=1, max_length=12)],
        names: Words = "",
        points: Annotated[int, Query(ge=2, le=5000)] = 500,
    ) -> answers.ComparePage:
        """Runs over each other."""
        only = [name for name in names.split(",") if name]
        return group_pages.compare_page([folder.record(name) for name in run], only, points)

    @api.get("/api/schema")
    def schema() -> dict[str, Any]:
        """The JSON schema of configurations."""
        return json_schema()

    @api.get("/api/algorithms")
    def algorithms() -> list[answers.AlgorithmLine]:
        """The names that algorithm.name may have."""
        return [answers.AlgorithmLine(name=one["name"], family=one["family"]) for one in describe()]

    @api.get("/api/recipes")
    def recipes() -> list[answers.RecipeLine]:
        """The configurations that come with reinforge."""
        return [
            answers.RecipeLine(
                name=name,
                title=summary(name),
                family=name.rpartition("/")[0] or None,
            )
            for name in recipe_names()
        ]

    @api.get("/api/recipe")
    def recipe(name: Annotated[str, Query(max_length=NAME)]) -> answers.RecipeText:
        """One of them."""
        return answers.RecipeText(name=name, yaml=recipe_text(name))

    @api.post("/api/plan")
    def plan(asked: requests.PlanRequest) -> answers.PlanPage:
        """What is wrong with a configuration."""
        if asked.full:
            allowed()
        place = folder.place(asked.name or "new-run")
        return plan_page(asked.yaml, place, full=asked.full)

    @api.put("/api/tags")
    def tags(asked: requests.TagsRequest) -> answers.TagsAnswer:
        """Names that people give a run."""
        allowed()
        record = folder.record(asked.run)
        record.set_tags(list(dict.fromkeys(asked.tags)))
        return answers.TagsAnswer(run=asked.run, tags=record.tags())

    @api.post("/api/launch")
    def launch(asked: requests.LaunchRequest) -> answers.RunStarted:
        """Starts a run. It can be asked for as soon as it writes; /api/log answers at once."""
        allowed()
        return answers.RunStarted(run=launcher.launch(asked.yaml, asked.name))

    @api.post("/api/stop")
    def stop(asked: requests.RunRequest) -> answers.RunStarted:
        """Asks a run to save a checkpoint and end."""
        allowed()
        launcher.stop(asked.run)
        return answers.RunStarted(run=asked.run)

    @api.post("/api/resume")
    def resume(asked: requests.RunRequest) -> answers.RunStarted:
        """Goes on from the newest checkpoint of a run."""
        allowed()
        return answers.RunStarted(run=launcher.resume(asked.run))

    @api.post("/api/branch")
    def branch(asked: requests.BranchRequest) -> answers.RunStarted:
        """Goes on from a step of a run in a new one, with other settings."""
        allowed()
        started = launcher.branch(asked.run, asked.step, asked.name, asked.overrides)
        return answers.RunStarted(run=started)

    @api.get("/api/log")
    def log(run: RunName) -> answers.LogPage:
        """The end of what a run printed that was started from here."""
        return answers.LogPage(**launcher.log(run))

    @api.post("/api/chat")
    def chat(asked: requests.ConversationRequest) -> answers.ChatPage:
        """What one or two checkpoints say, each served by a process of its own."""
        allowed()
        paths = [(folder.path_of(side.run), side.step) for side in asked.sides]
        body = asked.model_dump(exclude={"sides"})
        found = [chats.answer(path, step, body) for path, step in paths]
        return answers.ChatPage.model_validate({"answers": found})

    @api.post("/api/data")
    def data(asked: requests.DataRequest) -> answers.DataPage:
        """Rows as the trainer sees them."""
        allowed()
        told = {"model": asked.model, "page": asked.page, "size": asked.size}
        if asked.yaml is not None:
            with config_file(asked.yaml) as file:
                found = ask_worker("data", {**told, "source": str(file)})
        elif asked.source:
            found = ask_worker("data", {**told, "source": asked.source})
        else:
            raise InputError("there is neither source nor yaml.", where="source")
        return answers.DataPage.model_validate(sound(found))

    @api.post("/api/rewards")
    def rewards(asked: requests.RewardsRequest) -> list[answers.RewardScore]:
        """What the rewards give an answer that somebody typed."""
        allowed()
        told = asked.model_dump(include={"prompt", "completion", "columns"})
        if asked.yaml is not None:
            with config_file(asked.yaml) as file:
                found = ask_worker("rewards", {**told, "config": str(file)})
        elif asked.run is not None:
            path = folder.path_of(asked.run) / "config.json"
            found = ask_worker("rewards", {**told, "config": str(path)})
        else:
            raise InputError("there is neither run nor yaml.", where="run")
        return [answers.RewardScore.model_validate(sound(one)) for one in found]

    @api.get("/", include_in_schema=False)
    def index() -> Response:
        content, kind = asset("index.html")
        return Response(content, media_type=kind)

    @api.get("/{name}", include_in_schema=False)
    def file(name: str) -> Response:
        content, kind = asset(name)
        return Response(content, media_type=kind)

    guard.app = BodyLimit(api, options.limits)
    return SafeHeaders(guard)
