// One run, live: what the doctor found, curves by question, time, memory, events; and its settings.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { offers, useAnswer, type ConfigPage, type Curve, type Curves, type Finding, type PhasePage, type RunEvent, type RunPage as RunData } from "../api";
import { CurveCard, PhaseChart, VIEW, ViewControls, outside, type View } from "../chart";
import type { Point } from "../draw";
import { Coded, Empty, Keys, Shown, Trouble, Turned } from "../parts";
import { link } from "../route";
import { isDefault, type Schema } from "../schema";
import { bytes, counted, moment, percent, setting, when } from "../words";
import { POLL, RunHead, useRun } from "./head";
import { Beginning, Branch, Log } from "./steer";

export function RunPage({ run, view, query }: { run: string; view: string; query: URLSearchParams }) {
  const answer = useRun(run);
  const here = ["settings", "branch", "log"].includes(view) ? view : "overview";
  return (
    <>
      <RunHead run={run} page={answer.value} here={here} again={answer.again} />
      {answer.failure?.status === 404 && offers("log") ? <Beginning run={run} otherwise={<Trouble failure={answer.failure} again={answer.again} />} /> : (
        <Shown answer={answer}>
          {page => {
            if (here === "settings") return <Settings run={run} page={page} />;
            if (here === "branch") return <Branch page={page} query={query} />;
            if (here === "log") return <Log page={page} />;
            return <Overview run={run} page={page} />;
          }}
        </Shown>
      )}
    </>
  );
}

function Overview({ run, page }: { run: string; page: RunData }) {
  const live = page.state === "running" ? POLL : 0;
  const curves = useAnswer<Curves>("api/curves", { run, points: 400 }, live);
  const phases = useAnswer<PhasePage>("api/phases", { run }, live && 5000);
  const [view, setView] = useState<View>(VIEW);
  return (
    <>
      {page.uncontained.length > 0 && (
        <p class="finding bad"><b>Uncontained.</b> {page.uncontained.join(", ")} ran what the model wrote without a sandbox: programs could read and change whatever the run could, its rewards included.</p>
      )}
      <Findings page={page} />
      {page.tiles.length > 0 && (
        <dl class="tiles">
          {page.tiles.map(([label, value]) => <div key={label} class="tile"><dt>{label}</dt><dd>{value}</dd></div>)}
        </dl>
      )}
      <ViewControls view={view} change={setView} />
      <Shown answer={curves}>{found => <Questions curves={found} view={view} learning={page.learning} />}</Shown>
      <Shown answer={phases}>{found => <Time phases={found} view={view} />}</Shown>
      <div class="columns">
        <section>
          <h2>Events</h2>
          <Events page={page} />
        </section>
        <section>
          <h2>Checkpoints</h2>
          {page.checkpoints.length ? (
            <Keys rows={page.checkpoints.map(one => [`step ${one.step}`, <>
              {bytes(one.bytes)}
              <span class="ways">
                {offers("branch") && <a href={link("run", { run, view: "branch", step: one.step })}>branch from it</a>}
                {offers("chat") && <a href={link("chat", { run, step: one.step })}>chat with it</a>}
              </span>
            </>])} />
          ) : <Empty title="No checkpoint yet.">One is written every run.checkpoint.every steps, and when a run ends or is stopped.</Empty>}
        </section>
      </div>
    </>
  );
}

function Findings({ page }: { page: RunData }) {
  const { findings, state } = page;
  const causes = findings.filter(one => one.action !== "note" && !one.because);
  const others = findings.filter(one => !causes.includes(one));
  return (
    <section class="findings" aria-label="What the doctor found">
      {causes.map((one, i) => <FindingCard key={one.kind} page={page} finding={one} open={i === 0} />)}
      {causes.length === 0 && (
        <p class="finding fine"><b>Nothing speaks against this run{state === "running" ? " so far" : ""}.</b> The doctor looks at rewards, gradients, entropy, lengths, KL, speed and memory after every step.</p>
      )}
      {others.length > 0 && (
        <details class="more">
          <summary>{others.length} {others.length === 1 ? "note" : "notes"}</summary>
          {others.map(one => <FindingCard key={one.kind} page={page} finding={one} />)}
        </details>
      )}
    </section>
  );
}

function FindingCard({ page, finding, open = false }: { page: RunData; finding: Finding; open?: boolean }) {
  const run = page.run;
  const knob = finding.because ? null : finding.knob; // what only follows is mended with its cause
  const change = knob && `${knob.key}=${setting(knob.value)}`;
  const last = page.checkpoints.at(-1)?.step;
  const note = finding.action === "note" || finding.because !== null;
  return (
    <article class={`finding ${note ? "note" : "bad"}`} data-kind={finding.kind}>
      {finding.because ? (
        <>
          <p><b>Follows from {finding.because.replaceAll("_", " ")}: fix that first.</b> {finding.what}</p>
          <p class="soft"><Coded text={finding.fix} /></p>
        </>
      ) : (
        <>
          <p><b>{finding.what}</b></p>
          <p><Coded text={finding.fix} /></p>
        </>
      )}
      {knob && (
        <p class="knob">
          <span>Try</span> <Turned knob={knob} />
          {offers("launch") && <a href={link("launch", { from: run, set: change, name: `${run}-${knob.key.split(".").at(-1)}` })}>Start over with it</a>}
          {offers("branch") && last !== undefined && <a href={link("run", { run, view: "branch", set: change })}>Branch with it from step {last}</a>}
        </p>
      )}
      {finding.evidence.length > 0 && (
        <details open={open}>
          <summary>Evidence{finding.since !== null ? `, since step ${finding.since}` : ""}</summary>
          <ul>{finding.evidence.map(line => <li key={line}>{line.replaceAll("->", "→")}</li>)}</ul>
        </details>
      )}
      <p class="links">
        <a href={link("samples", { run, finding: finding.kind })}>Samples that show it</a>
        {offers("rewards") && ["constant_reward", "unscored", "no_gradient"].includes(finding.kind) && <a href={link("data", { run, view: "rewards" })}>Try its rewards on an answer</a>}
      </p>
    </article>
  );
}

const QUIET = "Everything else";
const COLUMNS = 3;
const FIRST = 2 * COLUMNS; // curves of a question that are seen at once
const ALWAYS = ["eval/accuracy", "eval/loss", "reward/mean"]; // the same ones come first on every run

/** Whether a curve has a shape at all. */
function moved(one: Curve): boolean {
  const values = one.points.map(p => p[2]).filter(value => value !== null);
  const low = Math.min(...values);
  const high = Math.max(...values);
  return high - low > 1e-4 * Math.max(Math.abs(low), Math.abs(high));
}

/** What says something comes first; what never moved can wait, unless that is the trouble. */
function ranked(curves: Curve[], view: View): [Curve[], Curve[]] {
  const scored = curves.some(one => one.name === "reward/mean");
  const bad = (one: Curve) => outside(one, view.smoothing);
  // the loss of a policy gradient says nothing
  const telling = (one: Curve) => bad(one) || ALWAYS.includes(one.name) || (one.says !== "" && moved(one) && !(scored && one.name === "train/loss"));
  const ahead = curves.filter(telling);
  const whole = ahead.length > COLUMNS ? Math.min(FIRST, ahead.length - (ahead.length % COLUMNS)) : ahead.length;
  const shown = ahead.slice(0, whole).concat(ahead.slice(whole).filter(bad));
  const all = shown.length ? shown : curves.slice(0, COLUMNS);
  return [all, curves.filter(one => !all.includes(one))];
}

function Questions({ curves, view, learning }: { curves: Curves; view: View; learning: RunData["learning"] }) {
  const asked = curves.questions.filter(question => question.curves.length);
  if (!asked.length) return <Empty title="No metrics yet.">The first line is written after the first step.</Empty>;
  const titles = asked.flatMap(question => question.curves.map(one => one.title));
  // two curves of one title are told apart by their names
  const named = (one: Curve) => (titles.filter(title => title === one.title).length > 1 ? { ...one, title: `${one.title}: ${one.name.split("/").at(-1)!.replaceAll("_", " ")}` } : one);
  const grid = (list: Curve[]) => <div class="grid">{list.map(one => <CurveCard key={one.name} curve={named(one)} view={view} />)}</div>;
  return (
    <>
      {asked.map(({ title, curves }, i) => {
        if (title === QUIET) return <Folded key={title} title={title} count={curves.length}>{() => grid(curves)}</Folded>;
        const [shown, rest] = ranked(curves, view);
        const out = curves.filter(one => outside(one, view.smoothing)).length;
        return (
          <section key={title} class="question">
            <h2>
              {title} {i === 0 && <span class={`verdict ${learning.answer === "no" ? "bad" : ""}`}>{learning.answer}</span>}
              {out > 0 && <span class="range out">{out} outside the healthy range</span>}
            </h2>
            {i === 0 && learning.reasons.length > 0 && <ul class="reasons">{learning.reasons.map(text => <li key={text}>{text.replaceAll("->", "→")}</li>)}</ul>}
            {grid(shown)}
            {rest.length > 0 && <Folded title={`${rest.length} more`}>{() => grid(rest)}</Folded>}
          </section>
        );
      })}
    </>
  );
}

/** Its content is made when it is opened for the first time. */
function Folded({ title, count, children }: { title: string; count?: number; children(): ComponentChildren }) {
  const [open, setOpen] = useState(false);
  return (
    <details class="question" onToggle={event => event.currentTarget.open && setOpen(true)}>
      <summary>{count === undefined ? title : <><h2>{title}</h2> <span class="soft">{count} curves</span></>}</summary>
      {open && children()}
    </details>
  );
}

function Time({ phases, view }: { phases: PhasePage; view: View }) {
  const memory: Curve | null = phases.memory.length ? {
    name: "memory", title: "Memory", says: "Peak of each step in GiB. Growth without an end means a leak.", healthy: null, evaluation: false,
    points: phases.memory.map(([step, value]): Point => [step, step, value]),
  } : null;
  const idle = Object.entries(phases.idle ?? {});
  return (
    <section class="question">
      <h2>Where the time goes</h2>
      <div class="grid">
        <article class="chart wide">
          <h3><span class="name">Seconds per step by phase</span></h3>
          <p class="says">
            A step is as slow as its phases together, unless they overlap.
            {idle.map(([name, share]) => <span key={name} class="range">{name} idle {percent(share)}</span>)}
          </p>
          {phases.bars.length ? <PhaseChart phases={phases} /> : <Empty title="The run recorded no timings." />}
        </article>
        {memory && <CurveCard curve={memory} view={{ ...view, axis: 0 }} />}
      </div>
    </section>
  );
}

/** Where an event, or several that are the same, happened. */
function steps({ step, until, count }: RunEvent): string {
  if (step === null) return count > 1 ? `${count} times` : "";
  if (count === 1 || until === null) return `step ${step}`;
  return until - step + 1 === count ? `steps ${step} to ${until}` : `${count} times, steps ${step} to ${until}`;
}

function Events({ page }: { page: RunData }) {
  if (!page.events.length) return <Empty title="No events." />;
  return (
    <div class="panel tall" tabIndex={0} role="region" aria-label="Events">
      <table class="events">
        <tbody>
          {[...page.events].reverse().map((event, i) => (
            <tr key={i}>
              <th scope="row" title={event.time === null ? "" : when(event.time)}>{event.time === null ? "" : moment(event.time)}</th>
              <td class="steps">{steps(event)}</td>
              <td><b>{event.kind.replaceAll("_", " ")}</b> <span class="soft">{event.text}</span></td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Settings({ run, page }: { run: string; page: RunData }) {
  const config = useAnswer<ConfigPage>("api/config", { run });
  const schema = useAnswer<Schema>("api/schema").value;
  const [search, setSearch] = useState("");
  return (
    <>
      <div class="filters"><input type="search" class="wide" placeholder="Search all settings" aria-label="Search settings" value={search} onInput={event => setSearch(event.currentTarget.value)} /></div>
      <Shown answer={config}>
        {found => {
          const all = Object.entries(found.flat);
          const fit = all.filter(([key, value]) => `${key} ${setting(value)}`.toLowerCase().includes(search.toLowerCase()));
          const changed = schema ? all.filter(([key, value]) => !isDefault(schema, key, value)) : all;
          return (
            <>
              {search ? (
                fit.length ? <Rows rows={fit} name="Settings that fit" /> : <Empty title={`No setting contains “${search}”.`} />
              ) : (
                <>
                  <h2>Changed from the default</h2>
                  <Rows rows={changed} name="Changed settings" />
                  <h2>All settings</h2>
                  {sectionsOf(all).map(([name, rows]) => (
                    <details key={name} class="section">
                      <summary><b>{name}</b> <span class="soft">{counted(rows.length, "setting")}</span></summary>
                      <Rows rows={rows} name={name} />
                    </details>
                  ))}
                </>
              )}
              <details class="more"><summary>As YAML</summary><pre class="code" tabIndex={0}>{found.yaml}</pre></details>
            </>
          );
        }}
      </Shown>
      <details class="more"><summary>Versions</summary><Keys rows={Object.entries(page.versions).map(([key, value]) => [key, setting(value)])} /></details>
    </>
  );
}

function Rows({ rows, name }: { rows: [string, unknown][]; name: string }) {
  return <Keys name={name} rows={rows.map(([key, value]) => [key, setting(value)])} />;
}

function sectionsOf(rows: [string, unknown][]): [string, [string, unknown][]][] {
  const found = new Map<string, [string, unknown][]>();
  for (const row of rows) {
    const name = row[0].split(".")[0]!;
    found.set(name, [...(found.get(name) ?? []), row]);
  }
  return [...found];
}
