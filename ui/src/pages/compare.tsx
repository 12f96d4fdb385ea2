// Several runs over each other: their curves, what they were told differently, and where they part.
import { useEffect, useMemo, useState } from "preact/hooks";
import { useAnswer, type RunLine } from "../api";
import { Drawn, VIEW, ViewControls, type View } from "../chart";
import type { Point, Series } from "../draw";
import { Empty, Shown, Turned } from "../parts";
import { link, replace } from "../route";
import { setting } from "../words";

interface Shared { name: string; evaluation: boolean; series: Point[][] }

interface Compared {
  runs: string[];
  names: string[]; // of all curves that they share
  curves: Shared[];
  config: { key: string; values: unknown[] }[];
  parting: { compared: number; step: number | null; what: string | null; cause: string | null; evidence: string[] } | null;
}

const MOST = 8; // colours
const SHOWN = 12; // curves that are found by their names

export function ComparePage({ runs }: { runs: string[] }) {
  const all = useAnswer<RunLine[]>("api/runs", {}, 10000).value ?? [];
  const set = (wanted: string[]) => replace(link("compare", { run: wanted }));
  const others = all.filter(one => !runs.includes(one.run));
  return (
    <>
      <div class="title"><h1>Compare</h1></div>
      <div class="chosen-runs">
        {runs.map((run, i) => (
          <span key={run} class={`pick tint${i % MOST}`}>
            <i />
            <a href={link("run", { run })}>{run}</a>
            <button type="button" class="link" aria-label={`Take ${run} out`} onClick={() => set(runs.filter(one => one !== run))}>×</button>
          </span>
        ))}
        {others.length > 0 && runs.length < MOST && (
          <select aria-label="Add a run" value="" onChange={event => set([...runs, event.currentTarget.value])}>
            <option value="">Add a run …</option>
            {others.map(one => <option key={one.run} value={one.run}>{one.run}</option>)}
          </select>
        )}
      </div>
      {runs.length < 2 ? <Empty title="Choose two runs or more.">Their curves are drawn over each other, and settings that differ stand side by side.</Empty> : <>
        <Against lines={runs.map(run => all.find(one => one.run === run)).filter(one => one !== undefined)} />
        <Both runs={runs} />
      </>}
    </>
  );
}

/** What the doctor found in each of them. */
function Against({ lines }: { lines: RunLine[] }) {
  if (!lines.some(one => one.causes.length)) return null;
  return (
    <section class="findings" aria-label="What the doctor found">
      {lines.map((one, i) => (
        <p key={one.run} class={`finding ${one.causes.length ? "bad" : "fine"}`}>
          <span class={`pick tint${i % MOST}`}><i /><a href={link("run", { run: one.run })}><b>{one.run}</b></a></span>{" "}
          {one.causes[0]?.what ?? "Nothing speaks against it."}
          {one.causes[0]?.knob && <span class="knob"><span>Try</span> <Turned knob={one.causes[0].knob} /></span>}
        </p>
      ))}
    </section>
  );
}

function Both({ runs }: { runs: string[] }) {
  const [view, setView] = useState<View>(VIEW);
  const [search, setSearch] = useState("");
  const [known, setKnown] = useState<string[]>([]);
  const names = search ? known.filter(name => name.includes(search)).slice(0, SHOWN) : [];
  const answer = useAnswer<Compared>("api/compare", { run: runs, points: 400, names: names.join(",") });
  useEffect(() => {
    if (answer.value) setKnown(answer.value.names);
  }, [answer.value]);
  return (
    <Shown answer={answer}>
      {found => (
        <>
          <Parting parting={found.parting} />
          <h2>What was set differently</h2>
          {found.config.length ? <Differences found={found} /> : <Empty title="All settings are the same." />}
          <h2>Curves</h2>
          <div class="bar-row">
            <ViewControls view={view} change={setView} />
            <input type="search" placeholder={`Find one of ${found.names.length} curves`} aria-label="Find a curve" value={search} onInput={event => setSearch(event.currentTarget.value)} />
          </div>
          {found.curves.length && (!search || names.length) ? (
            <div class="grid">{found.curves.map(one => <Card key={one.name} shared={one} runs={found.runs} view={view} />)}</div>
          ) : <Empty title={search ? `No curve has “${search}” in its name.` : "They share no curve."} />}
        </>
      )}
    </Shown>
  );
}

function Parting({ parting }: { parting: Compared["parting"] }) {
  if (!parting || !parting.compared) return null;
  if (parting.step === null) return <p class="finding fine"><b>They do not part.</b> {parting.compared} steps are equal, bit for bit.</p>;
  return (
    <p class="finding note">
      <b>They part at step {parting.step}.</b> {[parting.what, parting.cause && `Why: ${parting.cause}`, ...parting.evidence].filter(Boolean).join("; ")}
    </p>
  );
}

function Card({ shared, runs, view }: { shared: Shared; runs: string[]; view: View }) {
  const [said, setSaid] = useState("");
  const series = useMemo<Series[]>(() => shared.series.map((points, i) => ({ points, tint: i % MOST, label: runs[i] })).filter(one => one.points.length), [shared]);
  return (
    <article class="chart">
      <h3><span class="name" title={shared.name}>{shared.name}</span></h3>
      <Drawn series={series} view={view} name={`${shared.name} of ${runs.join(", ")}`} evaluation={shared.evaluation} spread say={setSaid} />
      <p class="says readout">{said}</p>
    </article>
  );
}

function Differences({ found }: { found: Compared }) {
  return (
    <div class="panel" tabIndex={0} role="region" aria-label="Settings that differ">
      <table class="differ">
        <thead><tr><th>Setting</th>{found.runs.map((run, i) => <th key={run} class={`tint${i % MOST}`}><span class="pick"><i /><a href={link("run", { run })}>{run}</a></span></th>)}</tr></thead>
        <tbody>
          {found.config.map(({ key, values }) => (
            <tr key={key}><th scope="row">{key}</th>{values.map((value, i) => <td key={i}><code>{value === null || value === undefined ? "–" : setting(value)}</code></td>)}</tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
