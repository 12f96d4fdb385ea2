// An answer token by token, coloured by a number that was recorded of each. The numbers are those of the file.
import { useRef, useState } from "preact/hooks";
import type { Tokens } from "./api";
import { show } from "./draw";
import { visible } from "./words";

// what a field is compared with (its middle colour); without an entry: from the lowest to the highest
const middles: Record<string, number> = { advantage: 0, advantages: 0, ratio: 1, "logprob - behaviour": 0, kl: 0, loss: 0, token_rewards: 0 };

const says: Record<string, string> = {
  advantages: "how much better than expected the answer was: what the gradient is multiplied with",
  advantage: "how much better than expected the answer was: what the gradient is multiplied with",
  ratio: "probability now over probability when it was sampled; 1 in the first update",
  behaviour: "log-probability when it was sampled, as the engine said",
  old: "log-probability that the ratio is taken against",
  reference: "log-probability under the reference model",
  logprob: "log-probability as the trainer computed it",
  "log-probability": "how likely the model found it when it wrote it; 0 is certain",
  entropy: "how undecided the model was, in nats",
  "logprob - behaviour": "the trainer's log-probability minus the engine's: 0 where both agree",
  loss: "what the token adds to the loss",
  clip_fraction: "1 where the clip cut the gradient",
  kl: "divergence from the reference model",
};

const wanted = ["advantages", "advantage", "ratio", "entropy", "logprob", "behaviour"];

/** `others`: what else could have come, most likely first. */
export function TokenView({ tokens, others }: { tokens: Tokens; others?: [string, number][][] }) {
  const fields = { ...tokens.fields, ...tokens.differences };
  const names = Object.keys(fields);
  const [field, setField] = useState(wanted.find(name => names.includes(name)) ?? names[0] ?? "");
  const [at, setAt] = useState(0);
  const home = useRef<HTMLDivElement>(null);
  const values = fields[field] ?? [];
  const colours = colouring(values, middles[field]);

  function move(event: KeyboardEvent): void {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const next = Math.min(Math.max(at + by, 0), tokens.ids.length - 1);
    setAt(next);
    home.current?.querySelectorAll<HTMLElement>("[data-at]")[next]?.focus();
  }

  return (
    <div class="tokens">
      <div class="chips" role="group" aria-label="Colour tokens by">
        <span class="soft">Colour by</span>
        {names.map(name => <button key={name} type="button" aria-pressed={name === field} onClick={() => setField(name)}>{name.replaceAll("_", " ")}</button>)}
      </div>
      <p class="says">{says[field] ?? "as recorded"}{field in tokens.differences ? " (a difference of two recorded numbers)" : ""}</p>
      <Legend colours={colours} />
      <div ref={home} class="pieces" role="listbox" aria-label={`Tokens coloured by ${field}`} aria-orientation="horizontal" onKeyDown={move}>
        {tokens.ids.map((id, i) => (
          <span
            key={i}
            role="option"
            data-at={i}
            aria-selected={i === at}
            tabIndex={i === at ? 0 : -1}
            aria-label={`${piece(tokens.pieces[i])}, ${field} ${exact(values[i])}${others ? "" : `, id ${id}`}`}
            class="piece"
            style={{ background: colours.of(values[i] ?? null) }}
            onMouseEnter={() => setAt(i)}
            onFocus={() => setAt(i)}
            onClick={() => setAt(i)}
          >{piece(tokens.pieces[i])}{tokens.pieces[i]?.includes("\n") ? <br /> : null}</span>
        ))}
      </div>
      <Numbers tokens={tokens} fields={fields} at={at} field={field} others={others?.[at]} />
      <details class="more">
        <summary>All numbers as a table</summary>
        <div class="panel tall" tabIndex={0} role="region" aria-label="Numbers of all tokens">
          <table class="numbers">
            <thead><tr><th>#</th><th>Token</th>{!others && <th class="number">Id</th>}{names.map(name => <th key={name} class="number">{name}</th>)}</tr></thead>
            <tbody>
              {tokens.ids.map((id, i) => (
                <tr key={i}>
                  <td class="number">{i}</td><td class="said">{piece(tokens.pieces[i])}</td>{!others && <td class="number">{id}</td>}
                  {names.map(name => <td key={name} class="number">{exact(fields[name]?.[i])}</td>)}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      </details>
    </div>
  );
}

function Numbers({ tokens, fields, at, field, others }: { tokens: Tokens; fields: Tokens["fields"]; at: number; field: string; others?: [string, number][] }) {
  return (
    <dl class="token-numbers" aria-live="polite">
      <div><dt>token {at + 1} of {tokens.ids.length}</dt><dd class="said">{piece(tokens.pieces[at])}</dd></div>
      {!others && <div><dt>id</dt><dd>{tokens.ids[at]}</dd></div>}
      {Object.entries(fields).map(([name, values]) => (
        <div key={name} class={name === field ? "on" : ""}><dt>{name.replaceAll("_", " ")}</dt><dd>{exact(values[at])}</dd></div>
      ))}
      {others?.map(([text, logprob]) => <div key={text}><dt class="said">{piece(text)}</dt><dd>{(100 * Math.exp(logprob)).toFixed(1)}%</dd></div>)}
    </dl>
  );
}

/** As it is in the file. */
function exact(value: number | null | undefined): string {
  return value === null || value === undefined ? "–" : String(value);
}

/** Spaces and line ends are seen. */
function piece(text: string | null | undefined): string {
  if (text === null || text === undefined) return "?";
  return visible(text.replaceAll(" ", "·").replaceAll("\n", "⏎").replaceAll("\t", "⇥")) || "∅";
}

interface Colours { low: number | null; high: number | null; middle: number | null; of(value: number | null): string }

function colouring(values: (number | null)[], middle: number | undefined): Colours {
  const known = values.filter((value): value is number => typeof value === "number");
  const low = known.length ? Math.min(...known) : null;
  const high = known.length ? Math.max(...known) : null;
  if (middle !== undefined) {
    const reach = Math.max(...known.map(value => Math.abs(value - middle)), 0) || 1;
    const of = (value: number | null) => (value === null ? "transparent" : mix(value >= middle ? "--up" : "--down", Math.abs(value - middle) / reach));
    return { low: middle - reach, high: middle + reach, middle, of };
  }
  const span = (high ?? 0) - (low ?? 0) || 1;
  return { low, high, middle: null, of: value => (value === null ? "transparent" : mix("--accent", (value - (low ?? 0)) / span)) };
}

function mix(name: string, share: number): string {
  return `color-mix(in srgb, var(${name}) ${(Math.min(share, 1) * 42).toFixed(1)}%, transparent)`;
}

function Legend({ colours }: { colours: Colours }) {
  if (colours.low === null || colours.high === null) return null;
  const { low, high } = colours;
  const stops = [0, 0.25, 0.5, 0.75, 1].map(share => low + share * (high - low));
  return (
    <div class="scale" aria-hidden="true">
      <span class="number">{show(low)}</span>
      {stops.map((stop, i) => <i key={i} style={{ background: colours.of(stop) }} />)}
      <span class="number">{show(high)}</span>
    </div>
  );
}
