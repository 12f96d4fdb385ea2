// What can be done with a run: stop it, go on with it, branch off one of its checkpoints, tag it.
import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Failure, offers, send, useAnswer, type RunPage } from "../api";
import { Empty, Field, Shown, Trouble } from "../parts";
import { link } from "../route";
import { counted } from "../words";

/** Asks again before something that ends work. */
export function Actions({ page, again }: { page: RunPage; again(): void }) {
  const [sure, setSure] = useState(false);
  const [busy, setBusy] = useState(false);
  const [failure, setFailure] = useState<Failure | null>(null);
  async function post(what: "stop" | "resume"): Promise<void> {
    setBusy(true);
    try {
      await send(`api/${what}`, { run: page.run });
      setFailure(null);
      again();
    } catch (error) {
      setFailure(error as Failure);
    }
    setSure(false);
    setBusy(false);
  }
  const unfinished = offers("resume") && ["stopped", "terminated", "failed", "interrupted"].includes(page.state);
  return (
    <span class="end">
      {page.state === "running" && offers("stop") && !sure && <button type="button" class="danger" disabled={busy} onClick={() => setSure(true)}>Stop</button>}
      {page.state === "running" && sure && (
        <>
          <span class="soft">A checkpoint is written first.</span>
          <button type="button" class="danger" disabled={busy} onClick={() => void post("stop")}>Stop it now</button>
          <button type="button" class="quiet" onClick={() => setSure(false)}>Let it run</button>
        </>
      )}
      {unfinished && <button type="button" disabled={busy} onClick={() => void post("resume")}>Go on with it</button>}
      {page.checkpoints.length > 0 && offers("chat") && <a class="quiet button" href={link("chat", { run: page.run })}>Chat</a>}
      {failure && <Trouble failure={failure} />}
    </span>
  );
}

export function Tags({ page, again }: { page: RunPage; again(): void }) {
  const [typed, setTyped] = useState("");
  const [failure, setFailure] = useState<Failure | null>(null);
  async function put(tags: string[]): Promise<void> {
    try {
      await send("api/tags", { run: page.run, tags }, "PUT");
      setFailure(null);
      setTyped("");
      again();
    } catch (error) {
      setFailure(error as Failure);
    }
  }
  return (
    <form class="tags" onSubmit={event => { event.preventDefault(); if (typed.trim()) void put([...new Set([...page.tags, typed.trim()])]); }}>
      {page.tags.map(tag => (
        <span key={tag} class="tag">{tag} <button type="button" class="link" aria-label={`Remove the tag ${tag}`} onClick={() => void put(page.tags.filter(one => one !== tag))}>×</button></span>
      ))}
      <input type="text" aria-label="Add a tag" placeholder="add a tag" size={10} maxLength={40} value={typed} onInput={event => setTyped(event.currentTarget.value)} />
      {failure && <Trouble failure={failure} />}
    </form>
  );
}

/** A new run from a checkpoint of this one, with other settings. */
export function Branch({ page, query }: { page: RunPage; query: URLSearchParams }) {
  const last = page.checkpoints.at(-1)?.step;
  const [step, setStep] = useState(query.get("step") ?? (last === undefined ? "" : String(last)));
  const [name, setName] = useState(`${page.run}-branch`);
  const [changes, setChanges] = useState(query.getAll("set").join("\n"));
  const [failure, setFailure] = useState<Failure | null>(null);
  const [busy, setBusy] = useState(false);
  if (last === undefined) return <Empty title="There is no checkpoint to branch from.">One is written every run.checkpoint.every steps, and when a run ends.</Empty>;
  const wanted = /^\s*train\.steps\s*=\s*(\d+)\s*$/m.exec(changes)?.[1];
  const end = wanted === undefined ? page.steps : Number(wanted);
  const left = end === null ? null : end - Number(step);
  const more = `train.steps=${Number(step) + (page.steps ?? 0)}`;
  async function start(): Promise<void> {
    setBusy(true);
    try {
      const overrides = changes.split("\n").map(line => line.trim()).filter(Boolean);
      const { run } = await send<{ run: string }>("api/branch", { run: page.run, step: Number(step), name, overrides });
      location.hash = link("run", { run });
    } catch (error) {
      setFailure(error as Failure);
    }
    setBusy(false);
  }
  return (
    <form class="try" onSubmit={event => { event.preventDefault(); void start(); }}>
      <p class="soft">A new run that begins where this one was, and goes on with other settings. This one stays as it is.</p>
      <Field label="From the checkpoint of">
        <select value={step} onChange={event => setStep(event.currentTarget.value)}>{page.checkpoints.map(one => <option key={one.step} value={String(one.step)}>step {one.step}</option>)}</select>
      </Field>
      <Field label="Name of the new run"><input type="text" value={name} spellcheck={false} onInput={event => setName(event.currentTarget.value)} /></Field>
      <Field label="Settings that change, one KEY=VALUE a line"><textarea class="yaml" rows={4} spellcheck={false} placeholder="train.learning_rate=1.0e-5" value={changes} onInput={event => setChanges(event.currentTarget.value)} /></Field>
      {left !== null && (left > 0 ? (
        <p>It does {counted(left, "step")}: from step {step} to step {end}.</p>
      ) : (
        <p class="bad">Nothing is left to do: the run ends with step {end}. Choose an earlier checkpoint, or write a larger number: <button type="button" class="link" onClick={() => setChanges([...changes.split("\n").filter(line => line.trim() && !/^\s*train\.steps\s*=/.test(line)), more].join("\n"))}>{more}</button></p>
      ))}
      <div><button type="submit" disabled={busy || !name.trim() || (left !== null && left <= 0)}>{busy ? "Starting …" : "Start the branch"}</button></div>
      {failure && <Trouble failure={failure} />}
    </form>
  );
}

interface Printed { text: string; alive: boolean; code: number | null }

/** A run that was started and has written nothing yet: what it prints. */
export function Beginning({ run, otherwise }: { run: string; otherwise: ComponentChildren }) {
  const answer = useAnswer<Printed>("api/log", { run }, 1500);
  if (!answer.value) return <>{otherwise}</>;
  const { text, alive, code } = answer.value;
  return (
    <section>
      <p class={`finding ${alive ? "note" : "bad"}`}><b>{alive ? "It is starting." : `It ended before its first step${code === null ? "" : ` (exit code ${code})`}.`}</b> {alive ? "Curves appear after its first step." : "What it printed says why."}</p>
      {text && <pre class="code log" tabIndex={0}>{text}</pre>}
    </section>
  );
}

export function Log({ page }: { page: RunPage }) {
  const answer = useAnswer<Printed>("api/log", { run: page.run }, page.state === "running" ? 2000 : 0);
  return (
    <Shown answer={answer}>
      {found => found.text ? <pre class="code log" tabIndex={0}>{found.text}</pre> : <Empty title="It has printed nothing yet." />}
    </Shown>
  );
}
