// One sample: what was asked and answered, what every token got, and what became of the reward.
import { offers, useAnswer, type Sample, type Turn } from "../api";
import { show } from "../draw";
import { Empty, Keys, Said, Shown } from "../parts";
import { link } from "../route";
import { TokenView } from "../tokens";
import { GroupView, PromptView } from "./group";
import { RunHead, useRun } from "./head";

export function SamplePage({ run, line }: { run: string; line: number }) {
  const page = useRun(run).value;
  const answer = useAnswer<Sample>("api/sample", { run, line });
  return (
    <>
      <RunHead run={run} page={page} here="samples" />
      <Shown answer={answer}>{sample => <Whole key={sample.line} run={run} sample={sample} />}</Shown>
    </>
  );
}

function Whole({ run, sample }: { run: string; sample: Sample }) {
  const training = sample.training;
  const told: [string, string][] = [
    ["reward", sample.reward === null ? "unscored" : String(sample.reward)],
    ...Object.entries(sample.components).map(([name, value]): [string, string] => [name, value === null ? "unscored" : String(value)]),
    ...["advantage", "loss", "ratio"].filter(name => name in training).map((name): [string, string] => [name, brief(training[name])]),
    ["stop", sample.stop ?? "–"],
    ["tokens", String(sample.length ?? "–")],
  ];
  return (
    <>
      <div class="pages">
        <a class="quiet button" href={link("sample", { run, line: sample.line - 1 })} aria-disabled={sample.line <= 0}>Previous</a>
        <span>{sample.eval ? "evaluation" : "training"}, step {sample.step}{sample.uid ? <span class="soft path"> {sample.uid}</span> : null}</span>
        <a class="quiet button" href={link("sample", { run, line: sample.line + 1 })}>Next</a>
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

function brief(value: unknown): string {
  if (typeof value === "number") return String(value);
  if (value === null || value === undefined) return "–";
  if (typeof value === "object" && "mean" in value && "min" in value && "max" in value && value.min === value.max) return String(value.mean);
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
