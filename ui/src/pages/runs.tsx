// All runs of the folder: how each stands, where it is going, and what speaks against it.
import { useState } from "preact/hooks";
import { offers, useAnswer, type RunLine } from "../api";
import { show } from "../draw";
import { Badge, Coded, Empty, Progress, Shown, Spark, Turned } from "../parts";
import { link } from "../route";
import { ago, duration, percent, short, when } from "../words";

const filters = ["all", "running", "finished", "stopped", "failed", "interrupted"];

export function RunsPage({ root }: { root: string }) {
  const [search, setSearch] = useState("");
  const [state, setState] = useState("all");
  const [chosen, setChosen] = useState<string[]>([]);
  const alive = (runs: RunLine[]) => (runs.some(run => run.state === "running") ? 2000 : 10000);
  const answer = useAnswer<RunLine[]>("api/runs", { search, state: state === "all" ? null : state }, alive);
  const toggle = (run: string) => setChosen(chosen.includes(run) ? chosen.filter(one => one !== run) : [...chosen, run]);
  return (
    <>
      <div class="title">
        <h1>Runs</h1>
        {offers("launch") && <span class="end"><a class="button" href={link("launch")}>New run</a></span>}
      </div>
      <div class="filters" role="search">
        <input type="search" class="wide" placeholder="Search by name, model, algorithm or tag" aria-label="Search runs" value={search} onInput={event => setSearch(event.currentTarget.value)} />
        <div class="chips" role="group" aria-label="State">
          {filters.map(name => (
            <button key={name} type="button" aria-pressed={state === name} onClick={() => setState(name)}>{name}</button>
          ))}
        </div>
      </div>
      <Shown answer={answer}>
        {runs => runs.length ? (
          <ul class="runs">
            {runs.map(run => <Line key={run.run} run={run} chosen={chosen.includes(run.run)} toggle={() => toggle(run.run)} />)}
          </ul>
        ) : search || state !== "all" ? (
          <Empty title="No run fits.">Change the search, or show <button type="button" class="link" onClick={() => { setSearch(""); setState("all"); }}>all runs</button>.</Empty>
        ) : (
          <Empty title={`No runs in ${root} yet.`}>A run appears here as soon as it has begun. {offers("launch") && <><a href={link("launch")}>Start one</a>, or in a terminal: </>}<code>reinforge demo</code>, or <code>reinforge train recipe:chain_sum</code>.</Empty>
        )}
      </Shown>
      {chosen.length > 0 && (
        <div class="tray" role="region" aria-label="Chosen runs">
          <span>{chosen.length} chosen</span>
          <a class="button" href={link("compare", { run: chosen })} aria-disabled={chosen.length < 2}>Compare</a>
          <button type="button" class="quiet" onClick={() => setChosen([])}>Clear</button>
        </div>
      )}
    </>
  );
}

function Line({ run, chosen, toggle }: { run: RunLine; chosen: boolean; toggle(): void }) {
  const best = run.best_eval;
  return (
    <li class={`run ${chosen ? "chosen" : ""}`}>
      {offers("compare") && <input type="checkbox" checked={chosen} onChange={toggle} aria-label={`Choose ${run.run} to compare`} />}
      <div class="who">
        <a class="name" href={link("run", { run: run.run })}>{run.run}</a>
        <span class="soft">{[run.algorithm, run.model && short(run.model)].filter(Boolean).join(" · ")}</span>
        {run.tags.length > 0 && <span class="tags">{run.tags.map(tag => <span key={tag} class="tag">{tag}</span>)}</span>}
      </div>
      <div class="how">
        <Badge state={run.state} />
        <span class="soft" title={when(run.updated)}>{run.state === "running" && run.eta_seconds !== null ? `${duration(run.eta_seconds)} left` : ago(run.updated)}</span>
      </div>
      <div class="far">
        {run.steps ? <Progress share={run.share ?? Math.min(run.step / run.steps, 1)} label={`Progress of ${run.run}`} /> : null}
        <span class="number">step {run.step.toLocaleString("en")}{run.steps ? ` of ${run.steps.toLocaleString("en")}` : ""}</span>
      </div>
      <div class="curve">
        <Spark points={run.spark} name={run.spark_name} />
        <span class="soft">{run.spark_name}</span>
      </div>
      <div class="best">
        {best ? (
          <>
            <b>{best.metric === "eval/accuracy" ? percent(best.value) : show(best.value)}</b>
            <span class="soft">best {best.metric.replace("eval/", "")}, step {best.step}</span>
          </>
        ) : run.reward !== null ? (
          <>
            <b>{show(run.reward)}</b>
            <span class="soft">last mean reward</span>
          </>
        ) : null}
      </div>
      {(run.troubles.length > 0 || (run.why && run.state !== "finished")) && (
        <div class="against">
          {run.why && run.state !== "finished" && <p>{run.why}</p>}
          {run.causes.slice(0, 1).map(one => (
            <div key={one.what} class="trouble">
              <p>{one.what}</p>
              {one.knob ? <span class="knob"><span>Try</span> <Turned knob={one.knob} /></span> : <p class="advice"><Coded text={one.fix} /></p>}
            </div>
          ))}
          {run.troubles.length > 1 && <p class="soft">and {run.troubles.length - 1} more</p>}
        </div>
      )}
    </li>
  );
}
