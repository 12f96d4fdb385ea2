// Data as the trainer sees it (template, trained tokens, what is dropped and why), and rewards tried on typed text.
import { useEffect, useState } from "preact/hooks";
import { Failure, get, send, useAnswer, type ConfigPage, type RunLine, type SampleLine, type Samples } from "../api";
import { show } from "../draw";
import { Empty, Field, Said, Trouble } from "../parts";
import { link } from "../route";
import { counted, visible } from "../words";

interface Piece { text: string; trained: boolean }
interface RowText { title: string; pieces: Piece[]; tokens: number; trained: number }
interface Row { where: string; texts: RowText[]; answer: string | null }
interface Rows {
  read_as: string[];
  serves: string;
  trains: string;
  rendered: string;
  rows: number;
  whole: boolean;
  shown: Row[];
  page: number;
  size: number;
  lengths: Record<string, number>; // min, median, p95 and max, in tokens
  tokens: number;
  trained: number;
  limit: number | null;
  long: { where: string; tokens: number }[];
  long_rows: number;
  policy: string;
  bad: string[];
  bad_rows: number;
  fixes: string[];
  dropped: boolean;
  unusual: Record<string, number>;
}
interface Score { name: string; value: number | null; weight: number; error: string | null }

type Source = { run: string } | { yaml: string };

const SIZE = 20;
const EXAMPLE = "model: {path: runs/demo/sft-model}\nalgorithm: {name: sft}\ndata: {source: train.jsonl}\ntrain: {steps: 10}\nrun: {dir: runs/look}\n";

export function DataPage({ query }: { query: URLSearchParams }) {
  const runs = useAnswer<RunLine[]>("api/runs").value ?? [];
  const [run, setRun] = useState(query.get("run") ?? "");
  const [yaml, setYaml] = useState("");
  const [view, setView] = useState<"data" | "rewards">(query.get("view") === "rewards" ? "rewards" : "data");
  const source: Source | null = run ? { run } : yaml.trim() ? { yaml } : null;
  return (
    <>
      <div class="title"><h1>Data and rewards</h1></div>
      <div class="filters">
        <Field label="Of a run">
          <select value={run} onChange={event => setRun(event.currentTarget.value)}>
            <option value="">none: a configuration below</option>
            {runs.map(one => <option key={one.run} value={one.run}>{one.run}</option>)}
          </select>
        </Field>
        <div class="chips" role="group" aria-label="What to look at">
          <button type="button" aria-pressed={view === "data"} onClick={() => setView("data")}>Data</button>
          <button type="button" aria-pressed={view === "rewards"} onClick={() => setView("rewards")}>Rewards</button>
        </div>
      </div>
      {!run && (
        <label class="field">
          <span>A configuration as YAML</span>
          <textarea class="yaml" rows={8} spellcheck={false} placeholder={EXAMPLE} value={yaml} onInput={event => setYaml(event.currentTarget.value)} />
        </label>
      )}
      {view === "data" ? <Browse key={run} source={source} /> : <Rewards key={run} source={source} />}
    </>
  );
}

function Browse({ source }: { source: Source | null }) {
  const [found, setFound] = useState<Rows | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const [asking, setAsking] = useState(false);
  async function ask(page: number): Promise<void> {
    setAsking(true);
    try {
      const yaml = source && "run" in source ? (await get<ConfigPage>("api/config", { run: source.run })).yaml : source?.yaml;
      setFound(await send<Rows>("api/data", { yaml, page, size: SIZE }));
      setFailure(null);
    } catch (error) {
      setFailure(error as Failure);
    }
    setAsking(false);
  }
  const last = found ? Math.max(Math.ceil(found.rows / found.size), 1) : 1;
  return (
    <section>
      <div class="pages">
        <button type="button" disabled={!source || asking} onClick={() => void ask(0)}>{asking ? "Reading …" : "Show the rows"}</button>
        {found && <span class="number">{found.whole ? "" : "the first "}{found.rows.toLocaleString("en")} rows</span>}
        {found && last > 1 && (
          <>
            <button type="button" class="quiet" disabled={found.page <= 0 || asking} onClick={() => void ask(found.page - 1)}>Previous</button>
            <span class="number">page {found.page + 1} of {last.toLocaleString("en")}</span>
            <button type="button" class="quiet" disabled={found.page + 1 >= last || asking} onClick={() => void ask(found.page + 1)}>Next</button>
          </>
        )}
      </div>
      {failure && <Trouble failure={failure} />}
      {!found && !failure && <Empty title="Rows as the trainer will see them.">With the chat template around them, the tokens that are trained marked, how many tokens there are, and what is dropped and why.</Empty>}
      {found && (
        <>
          <p class="soft">{[...found.read_as, `shown: ${found.trains}`, found.rendered && `rendered: ${found.rendered}`].filter(Boolean).join("; ")}</p>
          {found.tokens > 0 && (
            <p class="soft">
              {found.tokens.toLocaleString("en")} tokens{found.trained ? `, ${found.trained.toLocaleString("en")} of them trained` : ""}; of a text {Object.entries(found.lengths).map(([name, n]) => `${name} ${n.toLocaleString("en")}`).join(", ")}
              {found.limit !== null && `; at most ${counted(found.limit, "token")} of a text fit`}
            </p>
          )}
          {found.bad_rows > 0 && (
            <div class="finding warn">
              <p><b>{found.bad_rows.toLocaleString("en")} rows cannot be used{found.dropped ? " and are dropped" : ""}.</b> {found.bad.join("; ")}</p>
              {found.fixes.map(one => <p key={one}>{one}</p>)}
            </div>
          )}
          {found.long_rows > 0 && (
            <div class="finding warn">
              <p><b>{found.long_rows.toLocaleString("en")} texts are too long</b> and become what data.length={found.policy} says.</p>
              <ul>{found.long.slice(0, 5).map(one => <li key={one.where}>{one.where}: {one.tokens.toLocaleString("en")} tokens</li>)}</ul>
            </div>
          )}
          {Object.entries(found.unusual).map(([what, count]) => <p key={what} class="soft">{what}: {count.toLocaleString("en")} rows</p>)}
          {found.shown.some(row => row.texts.some(text => text.trained > 0)) && <p class="legend"><span><mark>trained</mark> counts in the loss</span><span>the rest is context</span></p>}
          <ol class="rows">{found.shown.map((row, i) => <RowCard key={i} row={row} />)}</ol>
        </>
      )}
    </section>
  );
}

function RowCard({ row }: { row: Row }) {
  return (
    <li>
      {row.texts.map((text, i) => (
        <div key={i}>
          <p class="soft number">{i === 0 && <>{row.where}{row.answer !== null && <> · the answer is <b>{row.answer}</b></>} · </>}{[text.title, text.tokens ? `${text.tokens.toLocaleString("en")} tokens` : "", text.trained ? `${text.trained.toLocaleString("en")} trained` : ""].filter(Boolean).join(" · ")}</p>
          <div class="said" dir="auto">{text.pieces.map((piece, k) => (piece.trained ? <mark key={k}>{visible(piece.text)}</mark> : <span key={k}>{visible(piece.text)}</span>))}</div>
        </div>
      ))}
    </li>
  );
}

function Rewards({ source }: { source: Source | null }) {
  const [prompt, setPrompt] = useState("");
  const [completion, setCompletion] = useState("");
  const [columns, setColumns] = useState("");
  const [scores, setScores] = useState<Score[] | null>(null);
  const [failure, setFailure] = useState<Failure | null>(null);
  const run = source && "run" in source ? source.run : null;
  const [from, setFrom] = useState<SampleLine | null>(null); // the sample of the run that it begins with
  useEffect(() => {
    if (run === null) return;
    const control = new AbortController();
    get<Samples>("api/samples", { run, size: 1 }, control.signal).then(found => {
      const first = found.rows[0];
      if (!first) return;
      setFrom(first);
      setPrompt(first.prompt);
      setCompletion(first.completion);
      setColumns(first.answer === null ? "" : JSON.stringify({ answer: first.answer }));
    }, () => undefined); // without samples there is only what is typed
    return () => control.abort();
  }, [run]);
  const missing = !source ? "Choose a run, or give a configuration." : completion ? "" : "Type an answer.";
  async function score(): Promise<void> {
    try {
      const given: unknown = columns.trim() ? JSON.parse(columns) : {};
      setScores(await send<Score[]>("api/rewards", { ...source, prompt, completion, columns: given }));
      setFailure(null);
    } catch (error) {
      setFailure(error instanceof Failure ? error : new Failure("The columns are no JSON object.", "columns", 'For example {"answer": "12"}.'));
    }
  }
  return (
    <section class="try">
      {from && <p class="soft">Filled with <a href={link("sample", { run, line: from.line })}>the newest sample of {run}</a>. Change the answer: a right one and a wrong one should not get the same.</p>}
      <Field label="Prompt"><textarea rows={3} value={prompt} onInput={event => setPrompt(event.currentTarget.value)} /></Field>
      <Field label="Answer to score"><textarea rows={5} value={completion} onInput={event => setCompletion(event.currentTarget.value)} /></Field>
      <Field label="Columns of the row that rewards read, as JSON"><input type="text" spellcheck={false} placeholder={'{"answer": "12"}'} value={columns} onInput={event => setColumns(event.currentTarget.value)} /></Field>
      <div class="pages"><button type="button" disabled={missing !== ""} onClick={() => void score()}>Score it</button><span>{missing}</span></div>
      {failure && <Trouble failure={failure} />}
      {scores === null && !failure && <Empty title="Try a reward before it trains anything.">Type an answer that should score, then one that should not.</Empty>}
      {scores && (
        <div class="panel">
          <table>
            <thead><tr><th>Reward</th><th class="number">Value</th><th class="number">Weight</th><th>What went wrong</th></tr></thead>
            <tbody>
              {scores.map(one => <tr key={one.name}><th scope="row">{one.name}</th><td class="number">{show(one.value)}</td><td class="number">{show(one.weight)}</td><td><Said text={one.error ?? ""} /></td></tr>)}
            </tbody>
          </table>
        </div>
      )}
    </section>
  );
}
