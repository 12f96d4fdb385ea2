// What the server says (its OpenAPI schema is the contract), and how it is asked.
import { useEffect, useRef, useState } from "preact/hooks";
import type { Phases, Point } from "./draw";

export type State = "running" | "finished" | "stopped" | "terminated" | "failed" | "interrupted";

export interface BestEval { metric: string; value: number; step: number | null; low: number | null; high: number | null }

export interface RunLine {
  run: string;
  state: State;
  why: string | null;
  step: number;
  steps: number | null;
  share: number | null;
  eta_seconds: number | null;
  algorithm: string | null;
  model: string | null;
  reward: number | null;
  best_eval: BestEval | null;
  troubles: string[];
  causes: { what: string; fix: string; knob: Knob | null }[];
  tags: string[];
  updated: number;
  spark: [number, number | null][];
  spark_name: string | null;
}

export interface Knob { key: string; value: unknown; was: unknown }

export interface Finding {
  kind: string;
  what: string;
  fix: string;
  evidence: string[];
  since: number | null;
  action: string;
  because: string | null;
  knob: Knob | null;
}

export interface RunEvent { time: number | null; step: number | null; until: number | null; count: number; kind: string; text: string }

export interface Checkpoint { step: number; bytes: number; path: string }

export interface RunPage extends RunLine {
  tiles: [string, string][];
  findings: Finding[];
  learning: { answer: string; reasons: string[] };
  notes: string[];
  events: RunEvent[];
  checkpoints: Checkpoint[];
  settings: Record<string, unknown>;
  lineage: string[];
  versions: Record<string, string>;
  uncontained: string[];
  launched: boolean;
}

export interface Curve {
  name: string;
  title: string;
  says: string;
  healthy: [number | null, number | null] | null;
  evaluation: boolean;
  points: Point[];
}

export interface Curves { questions: { title: string; curves: Curve[] }[] }

export interface PhasePage extends Phases { idle: Record<string, number>; memory: [number, number][] }

export interface ConfigPage { yaml: string; flat: Record<string, unknown>; changed: { after: number; changed: [string, unknown, unknown][] }[] }

/** What is told of a sample wherever it is shown. */
export interface RecordedSample {
  line: number;
  step: number | null;
  row: string | null;
  uid: string | null;
  group: string | null;
  sample: number | null;
  prompt: string;
  completion: string;
  answer: string | null; // the right one, where the row has one
  reward: number | null;
  components: Record<string, number | null>;
  advantage: number | null;
  length: number | null;
  stop: string | null;
  eval: boolean;
}

export interface SampleLine extends RecordedSample { turns: number; tokens: boolean }

export interface Samples {
  total: number;
  page: number;
  size: number;
  rows: SampleLine[];
  facets: { steps: number[]; stops: Record<string, number>; components: string[]; evaluations: number } | null; // null: they come when it is asked again
}

/** An error that a person can act on. */
export class Failure extends Error {
  constructor(readonly what: string, readonly where: string | null = null, readonly fix: string | null = null, readonly status = 0) {
    super(what);
  }
}

export type Query = Record<string, string | number | boolean | null | undefined | string[]>;

export function address(path: string, query: Query = {}): string {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value === null || value === undefined || value === "") continue;
    for (const one of Array.isArray(value) ? value : [value]) given.append(name, String(one));
  }
  const text = given.toString();
  return text ? `${path}?${text}` : path;
}

async function read<T>(asked: Promise<Response>): Promise<T> {
  let answer: Response;
  try {
    answer = await asked;
  } catch (error) {
    if ((error as Error).name === "AbortError") throw error;
    throw new Failure("The app's server does not answer.", null, "Is `reinforge ui` still running? Runs go on without it.");
  }
  const body: unknown = await answer.json().catch(() => null);
  if (answer.ok) return body as T;
  const told = (body as { error?: { what?: string; where?: string; fix?: string } } | null)?.error;
  throw new Failure(told?.what ?? `The server answered ${answer.status}.`, told?.where ?? null, told?.fix ?? null, answer.status);
}

export function get<T>(path: string, query: Query = {}, signal?: AbortSignal): Promise<T> {
  return read<T>(fetch(address(path, query), { signal, headers: { accept: "application/json" } }));
}

export function send<T>(path: string, body: unknown, method = "POST"): Promise<T> {
  return read<T>(fetch(path, { method, body: JSON.stringify(body), headers: { "content-type": "application/json" } }));
}

let paths: Set<string> | null = null;
let launching = true;

/** Asks once what the server offers: what it does not is not shown. */
export async function learn(): Promise<void> {
  const schema = await get<{ paths: Record<string, unknown> }>("api/openapi.json").catch(() => null);
  const info = await get<{ launching: boolean }>("api/info").catch(() => null);
  paths = schema && new Set(Object.keys(schema.paths));
  launching = info?.launching ?? true;
}

const acting = ["launch", "stop", "resume", "branch", "chat"];

export function offers(name: string): boolean {
  return (launching || !acting.includes(name)) && (paths?.has(`/api/${name}`) ?? true);
}

const RETRY = 3000; // milliseconds

export interface Answer<T> { value: T | null; failure: Failure | null; loading: boolean; again(): void }

/** What an address answers; asked again every `every` milliseconds while the page can be seen (0: once). */
export function useAnswer<T>(path: string | null, query: Query = {}, every: number | ((value: T) => number) = 0): Answer<T> {
  const where = path === null ? null : address(path, query);
  const [found, setFound] = useState<{ where: string; value: T | null; failure: Failure | null }>({ where: "", value: null, failure: null });
  const [round, setRound] = useState(0);
  const text = useRef("");
  const pace = useRef(every);
  pace.current = every; // what is known of the run may change how often it is asked
  useEffect(() => {
    if (where === null) return;
    const control = new AbortController();
    let timer = 0;
    let last: T | null = null;
    // what is not there yet may come
    const wait = () => (typeof pace.current === "function" ? (last === null ? RETRY : pace.current(last)) : pace.current);
    async function ask() {
      window.clearTimeout(timer);
      try {
        const value = await get<T>(where!, {}, control.signal);
        last = value;
        const now = JSON.stringify(value);
        // the same answer draws nothing anew
        if (now !== text.current) {
          text.current = now;
          setFound({ where: where!, value, failure: null });
        } else setFound(old => (old.where === where && !old.failure ? old : { where: where!, value, failure: null }));
      } catch (error) {
        if (control.signal.aborted) return;
        const failure = error instanceof Failure ? error : new Failure(String(error));
        text.current = "";
        setFound(old => ({ where: where!, value: old.where === where ? old.value : null, failure }));
      }
      if (wait() > 0 && !control.signal.aborted) timer = window.setTimeout(look, wait());
    }
    function look() {
      if (!document.hidden) void ask();
    }
    function back() {
      if (!document.hidden && wait() > 0) void ask();
    }
    document.addEventListener("visibilitychange", back);
    void ask();
    return () => {
      control.abort();
      window.clearTimeout(timer);
      document.removeEventListener("visibilitychange", back);
    };
  }, [where, round]);
  const fresh = found.where === where;
  // while another page of the same thing is asked for, the old one stays
  const kept = where !== null && found.where.split("?")[0] === where.split("?")[0];
  return {
    value: fresh || kept ? found.value : null,
    failure: fresh ? found.failure : null,
    loading: where !== null && !fresh,
    again: () => setRound(round + 1),
  };
}

export interface Turn { role: string; text: string; name: string | null; calls: { name: string; arguments: string }[] }

/** Tokens of an answer with what was recorded of each; a field has one number per token. */
export interface Tokens {
  ids: number[];
  pieces: (string | null)[];
  fields: Record<string, (number | null)[]>;
  differences: Record<string, (number | null)[]>;
}

export interface Sample extends RecordedSample {
  at: number | null; // its place in the list that was asked for
  total: number;
  previous: number | null;
  next: number | null;
  training: Record<string, unknown>;
  turns: Turn[];
  tokens: Tokens | null;
}
