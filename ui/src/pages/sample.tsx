// One sample: what was asked and answered, what every token got, and what became of the reward.
import { offers, useAnswer, type Query, type Sample, type Turn } from "../api";
import { show } from "../draw";
import { Empty, Keys, Said, Shown } from "../parts";
import { link } from "../route";
import { TokenView } from "../tokens";
import { GroupView, PromptView } from "./group";
import { counted } from "../words";
import { RunHead, useRun } from "./head";
import { filtered, SIZE } from "./samples";

export function SamplePage({ run, line, query }: { run: string; line: number; query: URLSearchParams }) {
  const page = useRun(run).value;
  // the list that it was opened from
  const list: Query = Object.fromEntries([...query.entries()].filter(([name]) => !["run", "line", "page"].includes(name)));
  const answer = useAnswer<Sample>("api/sample", { run, line, ...list });
  return (
    <>
      <RunHead run={run} page={page} here="samples" />
      <Shown answer={answer}>{sample => <Whole key={sample.line} run={run} sample={sample} list={list} />}</Shown>
    </>
  );
}

function Whole({ run, sample, list }: { run: string; sample: Sample; list: Query }) {
  const training = sample.training;
  const told: [string, string][] = [
    ["reward", sample.reward === null ? "unscored" : show(sample.reward)],
    ...Object.entries(sample.components).map(([name, value]): [string, string] => [name, value === null ? "unscored" : show(value)]),
    ...["advantage", "loss", "ratio"].filter(name => name in training).map((name): [string, string] => [name, brief(training[name])]),
    ["stop", sample.stop ?? "–"],
    ["tokens", String(sample.length ?? "–")],
  ];
  return (
    <>
      <div class="pages">
        <Beside line={sample.previous} run={run} list={list} name="Previous" />
        {sample.at !== null && <a class="number" href={link("samples", { run, ...list, page: Math.floor(sample.at / SIZE) || null })}>{(sample.at + 1).toLocaleString("en")} of {counted(sample.total, "sample")}{filtered(list) ? " that fit" : ""}</a>}
        <Beside line={sample.next} run={run} list={list} name="Next" />
        <span>{sample.eval ? "evaluation" : "training"}, step {sample.step}{sample.uid ? <span class="soft path"> {sample.uid}</span> : null}</span>
      </div>
      <dl class="tiles small">
        {told.map(([label, value]) => <div key={label} class="tile"><dt>{label}</dt><dd>{value}</dd></div>)}
      </dl>
      {sample.turns.length > 0 ? <Transcript turns={sample.turns} /> : (
        <div class="asked">
          <section><h2>Prompt</h2><Said text={sample.prompt} class="block" /></section>
          <section><h2>Answer</h2><Said text={sample.completion} class="block" /></section>
        </div>
      )}
      {sample.answer !== null && <section class="right"><h2>Right answer</h2><Said text={sample.answer} class="block" /></section>}
      <h2>Token by token</h2>
      {sample.tokens && sample.tokens.ids.length ? (
        <TokenView tokens={sample.tokens} />
      ) : (
        <Empty title="This sample has no numbers of single tokens.">A run records them with <code>run.log.tokens=all</code>; without it, means and extremes per answer.</Empty>
      )}
      {offers("group") && sample.group && sample.step !== null && !sample.eval && (
        <>
          <h2>Its group: from reward to advantage to loss</h2>
          <GroupView run={run} step={sample.step} group={sample.group} uid={sample.uid} />
        </>
      )}
      {offers("prompt") && sample.row && (
        <>
          <h2>This prompt over training</h2>
          <PromptView run={run} prompt={sample.row} />
        </>
      )}
      {Object.keys(training).length > 0 && (
        <details class="more">
          <summary>Everything that was recorded of it</summary>
          <Keys rows={Object.entries(training).filter(([name]) => name !== "by_token").map(([name, value]) => [name, brief(value)])} />
        </details>
      )}
    </>
  );
}

/** The way to the sample before or after it; at an end of the list there is none. */
function Beside({ line, run, list, name }: { line: number | null; run: string; list: Query; name: string }) {
  if (line === null) return <button type="button" class="quiet" disabled>{name}</button>;
  return <a class="quiet button" href={link("sample", { run, line, ...list })}>{name}</a>;
}

function brief(value: unknown): string {
  if (typeof value === "number") return show(value);
  if (value === null || value === undefined) return "–";
  if (typeof value === "object" && "mean" in value && "min" in value && "max" in value && value.min === value.max) return typeof value.mean === "number" ? show(value.mean) : String(value.mean);
  if (typeof value === "object" && !Array.isArray(value)) return Object.entries(value).map(([name, one]) => `${name} ${typeof one === "number" ? show(one) : String(one)}`).join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}

function Transcript({ turns }: { turns: Turn[] }) {
  return (
    <>
      <h2>Conversation</h2>
      <ol class="turns">
        {turns.map((turn, i) => (
          <li key={i} class={`turn ${turn.role}`}>
            <span class="role">{turn.role}{turn.name ? ` (${turn.name})` : ""}</span>
            {turn.role === "tool" ? <details><summary>{turn.text.length.toLocaleString("en")} characters</summary><Said text={turn.text} /></details> : <Said text={turn.text} />}
            {turn.calls.map((call, k) => (
              <details key={k} class="call"><summary>calls <code>{call.name}</code></summary><Said text={call.arguments} /></details>
            ))}
          </li>
        ))}
      </ol>
    </>
  );
}
