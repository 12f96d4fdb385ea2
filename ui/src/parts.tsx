// Small pieces that several pages use.
import type { ComponentChildren } from "preact";
import type { Answer, Failure, Knob, State } from "./api";
import { spark } from "./draw";
import { link } from "./route";
import { setting, visible } from "./words";

export function Badge({ state }: { state: State }) {
  return <span class={`badge ${state}`}>{state}</span>;
}

export function Trouble({ failure, again }: { failure: Failure; again?(): void }) {
  return (
    <div class="failure" role="alert">
      <b>{failure.where ? `${failure.where}: ` : ""}{failure.what}</b>
      {failure.fix && <span> <Coded text={failure.fix} /></span>}
      {failure.status === 404 && failure.where === "run" && <a href={link("")}>All runs</a>}
      {again && <button type="button" class="quiet" onClick={again}>Try again</button>}
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <b>{title}</b>
      {children && <p>{children}</p>}
    </div>
  );
}

/** What an answer is while it is asked for, when it fails, and when it is there. */
export function Shown<T>({ answer, children }: { answer: Answer<T>; children(value: T): ComponentChildren }) {
  return (
    <>
      {answer.failure && <Trouble failure={answer.failure} again={answer.again} />}
      {answer.value !== null ? children(answer.value) : answer.failure ? null : <div class="loading" role="status">Reading …</div>}
    </>
  );
}

export function Spark({ points, name }: { points: [number, number | null][]; name: string | null }) {
  const known = points.filter(p => p[1] !== null);
  if (known.length < 2) return null;
  return (
    <svg class="spark" viewBox="0 0 120 28" width="120" height="28" role="img" aria-label={`${name ?? "curve"} from ${known[0]![1]} to ${known.at(-1)![1]}`}>
      <path class="smooth" d={spark(points)} />
    </svg>
  );
}

export function Progress({ share, label }: { share: number; label: string }) {
  return <progress max={1} value={share} aria-label={label} />;
}

/** What a model or a data set wrote: text, and nothing else. */
export function Said({ text, class: name = "" }: { text: string; class?: string }) {
  return <div class={`said ${name}`} dir="auto">{visible(text)}</div>;
}

/** Our own texts: what stands between backticks is code. */
export function Coded({ text }: { text: string }) {
  return <>{text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part))}</>;
}

/** A setting to turn: what it is, and what to try. */
export function Turned({ knob }: { knob: Knob }) {
  const was = knob.was !== null && knob.was !== undefined;
  return <code class="turned">{knob.key} = {was && <><s>{setting(knob.was)}</s> </>}<b>{setting(knob.value)}</b></code>;
}

export function Field({ label, help, children, class: name = "" }: { label: string; help?: string; children: ComponentChildren; class?: string }) {
  return (
    <label class={`field ${name}`} title={help}>
      <span>{label}</span>
      {children}
    </label>
  );
}

export function Keys({ rows, name }: { rows: [string, ComponentChildren][]; name?: string }) {
  return (
    <div class="panel" tabIndex={0} role="region" aria-label={name ?? "Table"}>
      <table class="keys">
        <tbody>
          {rows.map(([key, value]) => (
            <tr key={key}>
              <th scope="row">{key}</th>
              <td>{value}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
