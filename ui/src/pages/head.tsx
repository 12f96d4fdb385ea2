// The head of every page about one run: its name, how it stands, and the way to its other pages.
import { offers, useAnswer, type RunPage } from "../api";
import { Badge, Progress } from "../parts";
import { link } from "../route";
import { Actions, Tags } from "./steer";
import { ago, duration, short, when } from "../words";

export const POLL = 2000;

export function useRun(run: string) {
  return useAnswer<RunPage>("api/run", { run }, page => (page.state === "running" ? POLL : 0));
}

export function RunHead({ run, page, here, again }: { run: string; page: RunPage | null; here: string; again?(): void }) {
  const tabs: [string, string, string][] = [
    ["overview", "Overview", link("run", { run })],
    ["samples", "Samples", link("samples", { run })],
    ["settings", "Settings", link("run", { run, view: "settings" })],
    ...(offers("branch") ? [["branch", "Branch", link("run", { run, view: "branch" })] as [string, string, string]] : []),
    ...(page?.launched && offers("log") ? [["log", "Log", link("run", { run, view: "log" })] as [string, string, string]] : []),
  ];
  return (
    <>
      <div class="title">
        <p class="crumbs"><a href={link("")}>Runs</a> /</p>
        <h1>{run}</h1>
        {page && <Badge state={page.state} />}
        {page && again && <Actions page={page} again={again} />}
      </div>
      {page && (
        <p class="standing">
          {page.steps ? <Progress share={page.share ?? Math.min(page.step / page.steps, 1)} label="Progress" /> : null}
          <span class="number">step {page.step.toLocaleString("en")}{page.steps ? ` of ${page.steps.toLocaleString("en")}` : ""}</span>
          <span title={when(page.updated)}>{page.state === "running" ? (page.eta_seconds === null ? "" : `about ${duration(page.eta_seconds)} left`) : `ended ${ago(page.updated)}`}</span>
          <span>{[page.algorithm, page.model && short(page.model)].filter(Boolean).join(" · ")}</span>
          {page.lineage.length > 0 && <span>branch of {page.lineage[0]}</span>}
          {again && offers("tags") && <Tags page={page} again={again} />}
          {page.why && <span class={page.state === "failed" ? "bad" : ""}>{page.why}</span>}
        </p>
      )}
      <nav class="tabs" aria-label="This run">
        {tabs.map(([name, text, where]) => <a key={name} href={where} aria-current={here === name ? "page" : undefined}>{text}</a>)}
      </nav>
    </>
  );
}
