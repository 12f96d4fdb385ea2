// Talk to a checkpoint, or to two at once: the same question, both answers, and how sure each was of its tokens.
import { useState } from "preact/hooks";
import { Failure, send, useAnswer, type RunLine, type RunPage } from "../api";
import { Empty, Field, Said, Trouble } from "../parts";
import { TokenView } from "../tokens";
import { counted } from "../words";

interface Side { run: string; step: number | null }
interface Message { role: "user" | "assistant"; content: string }
interface ChatToken { piece: string; logprob: number; top: [string, number][] }
interface ChatAnswer { text: string; tokens: ChatToken[]; seconds: number }
interface Turn { question: string; answers: ChatAnswer[] }

export function ChatPage({ query }: { query: URLSearchParams }) {
  const runs = useAnswer<RunLine[]>("api/runs").value ?? [];
  const [sides, setSides] = useState<Side[]>(query.getAll("run").slice(0, 2).map(run => ({ run, step: query.get("step") ? Number(query.get("step")) : null })));
  const [turns, setTurns] = useState<Turn[]>([]);
  const [typed, setTyped] = useState("");
  const [temperature, setTemperature] = useState("0");
  const [most, setMost] = useState("128");
  const [asking, setAsking] = useState(false);
  const [failure, setFailure] = useState<Failure | null>(null);
  const shown: Side[] = sides.length ? sides : [{ run: "", step: null }];
  const change = (i: number, side: Side | null) => {
    setSides(side === null ? shown.filter((_, k) => k !== i) : shown.map((one, k) => (k === i ? side : one)));
    setTurns([]); // an answer of another model is not its own
  };

  async function ask(): Promise<void> {
    const question = typed.trim();
    if (!question || asking) return;
    setAsking(true);
    setFailure(null);
    try {
      const answers = await Promise.all(shown.map(async (side, i) => {
        const messages: Message[] = turns.flatMap(turn => [
          { role: "user" as const, content: turn.question },
          { role: "assistant" as const, content: turn.answers[i]?.text ?? "" },
        ]);
        const said = await send<{ answers: ChatAnswer[] }>("api/chat", {
          sides: [side], messages: [...messages, { role: "user", content: question }],
          temperature: Number(temperature), max_tokens: Number(most), logprobs: true,
        });
        return said.answers[0]!;
      }));
      setTurns([...turns, { question, answers }]);
      setTyped("");
    } catch (error) {
      setFailure(error as Failure);
    }
    setAsking(false);
  }

  const ready = shown.every(side => side.run);
  return (
    <>
      <div class="title"><h1>Chat</h1></div>
      <div class="filters">
        {shown.map((side, i) => <Choose key={i} side={side} runs={runs} change={one => change(i, one)} remove={i > 0 ? () => change(i, null) : undefined} />)}
        {shown.length < 2 && <button type="button" class="quiet" onClick={() => setSides([...shown, { run: "", step: null }])}>Beside another</button>}
        <Field label="Temperature"><input class="small" type="number" min="0" max="2" step="0.1" value={temperature} onInput={event => setTemperature(event.currentTarget.value)} /></Field>
        <Field label="Longest answer"><input class="small" type="number" min="1" max="4096" value={most} onInput={event => setMost(event.currentTarget.value)} /></Field>
      </div>
      {turns.length === 0 && !asking && <Empty title="Ask a checkpoint something.">The first answer takes as long as loading the model does. At temperature 0 the same question gets the same answer.</Empty>}
      <ol class="talk" aria-live="polite">
        {turns.map((turn, i) => (
          <li key={i}>
            <Said text={turn.question} class="question-said" />
            <div class={`answers of${turn.answers.length}`}>
              {turn.answers.map((answer, k) => <Answer key={k} answer={answer} side={shown[k]} />)}
            </div>
          </li>
        ))}
      </ol>
      {failure && <Trouble failure={failure} />}
      {asking && <p class="soft" role="status">Waiting for the model …</p>}
      <form class="ask" onSubmit={event => { event.preventDefault(); void ask(); }}>
        <textarea rows={2} aria-label="Message" placeholder={ready ? "A message. Enter sends it, Shift+Enter is a new line." : "Choose a run first."} value={typed}
          onInput={event => setTyped(event.currentTarget.value)}
          onKeyDown={event => { if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); void ask(); } }} />
        <button type="submit" disabled={!ready || !typed.trim() || asking}>Send</button>
        {turns.length > 0 && <button type="button" class="quiet" onClick={() => setTurns([])}>Start again</button>}
      </form>
    </>
  );
}

function Choose({ side, runs, change, remove }: { side: Side; runs: RunLine[]; change(side: Side): void; remove?(): void }) {
  const checkpoints = useAnswer<RunPage>(side.run ? "api/run" : null, { run: side.run }).value?.checkpoints ?? [];
  return (
    <>
      <Field label="Run">
        <select value={side.run} onChange={event => change({ run: event.currentTarget.value, step: null })}>
          <option value="">choose …</option>
          {runs.map(one => <option key={one.run} value={one.run}>{one.run}</option>)}
        </select>
      </Field>
      <Field label="Checkpoint">
        <select value={side.step === null ? "" : String(side.step)} onChange={event => change({ ...side, step: event.currentTarget.value ? Number(event.currentTarget.value) : null })}>
          <option value="">newest</option>
          {checkpoints.map(one => <option key={one.step} value={String(one.step)}>step {one.step}</option>)}
        </select>
      </Field>
      {remove && <button type="button" class="quiet" onClick={remove}>Take out</button>}
    </>
  );
}

function Answer({ answer, side }: { answer: ChatAnswer; side?: Side }) {
  return (
    <article class="answer">
      <p class="soft">{side?.run}{side?.step !== null && side?.step !== undefined ? `, step ${side.step}` : ""} <span class="number">{counted(answer.tokens.length, "token")}, {answer.seconds.toFixed(1)} s</span></p>
      <Said text={answer.text} />
      {answer.tokens.length > 0 && (
        <details>
          <summary>Log-probabilities</summary>
          <TokenView tokens={{ ids: answer.tokens.map((_, i) => i), pieces: answer.tokens.map(one => one.piece), fields: { "log-probability": answer.tokens.map(one => one.logprob) }, differences: {} }} others={answer.tokens.map(one => [...one.top].sort((a, b) => b[1] - a[1]))} />
        </details>
      )}
    </article>
  );
}
