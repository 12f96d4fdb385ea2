// What the model wrote: one line a sample, filtered by the address, so that a filter can be sent to somebody.
import type { ComponentChildren } from "preact";
import { useAnswer, type Query, type SampleLine, type Samples } from "../api";
import { show } from "../draw";
import { Empty, Field, Said, Shown } from "../parts";
import { link, replace } from "../route";
import { RunHead, useRun } from "./head";

export const SIZE = 50;
const SOON = 700; // milliseconds
const orders: [string, string][] = [
  ["", "newest first"],
  ["oldest", "oldest first"],
  ["reward", "lowest reward first"],
  ["-reward", "highest reward first"],
  ["advantage", "lowest advantage first"],
  ["-advantage", "highest advantage first"],
  ["-length", "longest first"],
  ["length", "shortest first"],
];

/** Whether a list has less than all samples. */
export function filtered(asked: Query): boolean {
  return Object.keys(asked).some(name => !["page", "order", "size"].includes(name));
}

export function SamplesPage({ run, query }: { run: string; query: URLSearchParams }) {
  const page = useRun(run).value;
  const asked: Query = Object.fromEntries([...query.entries()].filter(([name]) => name !== "run"));
  const answer = useAnswer<Samples>("api/samples", { run, size: SIZE, ...asked }, found => (found.facets === null || page === null ? SOON : page.state === "running" ? 5000 : 0));
  const set = (changes: Query) => replace(link("samples", { run, ...asked, page: null, ...changes }));
  const value = (name: string) => query.get(name) ?? "";
  const facets = answer.value?.facets;
  const some = filtered(asked);
  const kinds = [...new Set([...(page?.findings.map(one => one.kind) ?? []), value("finding")])].filter(Boolean);
  return (
    <>
      <RunHead run={run} page={page} here="samples" />
      <div class="filters" role="search">
        <Field label="Text in prompt or answer" class="grow"><input type="search" value={value("text")} onInput={event => set({ text: event.currentTarget.value })} /></Field>
        <Choice label="Step" value={value("step")} options={(facets?.steps ?? []).map(step => [String(step), String(step)])} change={step => set({ step })} />
        <Field label="Reward" class="pair">
          <input type="number" step="any" placeholder="from" aria-label="Reward from" value={value("reward_min")} onChange={event => set({ reward_min: event.currentTarget.value })} />
          <input type="number" step="any" placeholder="to" aria-label="Reward to" value={value("reward_max")} onChange={event => set({ reward_max: event.currentTarget.value })} />
        </Field>
        <Field label="Tokens" class="pair">
          <input type="number" placeholder="from" aria-label="Tokens from" value={value("length_min")} onChange={event => set({ length_min: event.currentTarget.value })} />
          <input type="number" placeholder="to" aria-label="Tokens to" value={value("length_max")} onChange={event => set({ length_max: event.currentTarget.value })} />
        </Field>
        <Choice label="Stop" value={value("stop")} options={Object.entries(facets?.stops ?? {}).map(([stop, count]) => [stop, `${stop} (${count.toLocaleString("en")})`])} change={stop => set({ stop })} />
        {(facets?.components.length ?? 0) > 1 && <Choice label="Reward component" value={value("component")} options={facets!.components.map(name => [name, name])} change={component => set({ component })} />}
        {kinds.length > 0 && <Choice label="Finding" value={value("finding")} options={kinds.map(kind => [kind, kind.replaceAll("_", " ")])} change={finding => set({ finding })} />}
        {(facets?.evaluations ?? 0) > 0 && <Choice label="From" value={value("eval")} none="both" options={[["false", "training"], ["true", "evaluation"]]} change={from => set({ eval: from })} />}
        <Field label="Order">
          <select value={value("order")} onChange={event => set({ order: event.currentTarget.value })}>
            {orders.map(([name, text]) => <option key={name} value={name}>{text}</option>)}
          </select>
        </Field>
      </div>
      <Shown answer={answer}>
        {found => found.total ? (
          <>
            <Pages found={found} set={set}>
              {some && <Clear run={run} />}
              {found.facets === null && <span class="soft" role="status">The rest is being read, filters follow …</span>}
            </Pages>
            <Table run={run} rows={found.rows} list={asked} />
            {found.total > SIZE && <Pages found={found} set={set} />}
          </>
        ) : some ? (
          <Empty title="No sample fits these filters."><Clear run={run} /></Empty>
        ) : (
          <Empty title="The run recorded no samples.">Samples are written every run.log.samples_every steps; a run of fine-tuning on given answers has none but those of its evaluations.</Empty>
        )}
      </Shown>
    </>
  );
}

function Choice({ label, value, options, change, none = "all" }: { label: string; value: string; options: [string, string][]; change(value: string): void; none?: string }) {
  const known = options.some(([name]) => name === value) || value === "" ? options : [...options, [value, value] as [string, string]];
  return (
    <Field label={label}>
      <select value={value} onChange={event => change(event.currentTarget.value)}>
        <option value="">{none}</option>
        {known.map(([name, text]) => <option key={name} value={name}>{text}</option>)}
      </select>
    </Field>
  );
}

function Clear({ run }: { run: string }) {
  return <button type="button" class="link" onClick={() => replace(link("samples", { run }))}>Clear filters</button>;
}

function Pages({ found, set, children }: { found: Samples; set(changes: Query): void; children?: ComponentChildren }) {
  const last = Math.max(Math.ceil(found.total / SIZE), 1);
  return (
    <div class="pages" role="group" aria-label="Pages of samples">
      <span class="number">{found.total.toLocaleString("en")} {found.total === 1 ? "sample" : "samples"}</span>
      {children}
      {last > 1 && (
        <>
          <button type="button" class="quiet" disabled={found.page <= 0} onClick={() => set({ page: found.page - 1 })}>Previous</button>
          <span class="number">page {found.page + 1} of {last.toLocaleString("en")}</span>
          <button type="button" class="quiet" disabled={found.page + 1 >= last} onClick={() => set({ page: found.page + 1 })}>Next</button>
        </>
      )}
    </div>
  );
}

function Table({ run, rows, list }: { run: string; rows: SampleLine[]; list: Query }) {
  return (
    <div class="panel" tabIndex={0} role="region" aria-label="Samples">
      <table class="samples">
        <thead>
          <tr><th>Step</th><th>Prompt</th><th>Answer</th><th class="number">Reward</th><th class="number">Advantage</th><th class="number">Tokens</th><th>Stop</th><th><span class="hidden">Open</span></th></tr>
        </thead>
        <tbody>
          {rows.map(row => {
            const where = link("sample", { run, line: row.line, ...list, page: null });
            return (
              <tr key={row.line} onClick={() => { if (!String(getSelection())) location.hash = where; }}>
                <td class="number" data-label="Step">{row.step}</td>
                <td data-label="Prompt"><Said text={row.prompt} class="cut" /></td>
                <td data-label="Answer"><Said text={row.completion} class="cut" />{row.answer !== null && <div class="soft right">right: <Said text={row.answer} class="cut" /></div>}</td>
                <td class="number" data-label="Reward"><Reward row={row} /></td>
                <td class="number" data-label="Advantage">{show(row.advantage)}</td>
                <td class="number" data-label="Tokens">{row.length ?? "–"}{row.turns > 1 ? <span class="soft"> {row.turns} turns</span> : null}</td>
                <td data-label="Stop">{row.stop}</td>
                <td class="open"><a href={where} aria-label={`Open the sample of step ${row.step}, line ${row.line}`}>Open</a></td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function Reward({ row }: { row: SampleLine }) {
  const parts = Object.entries(row.components ?? {});
  return (
    <>
      <b>{row.reward === null ? "unscored" : show(row.reward)}</b>
      {parts.length > 1 && <span class="soft parts">{parts.map(([name, value]) => `${name} ${show(value)}`).join(", ")}</span>}
    </>
  );
}
