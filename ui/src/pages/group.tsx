// The answers to one prompt: those of one step side by side, and how they changed over training.
import { useAnswer, type SampleLine } from "../api";
import { show } from "../draw";
import { Empty, Said, Shown } from "../parts";
import { link } from "../route";
import { counted } from "../words";

interface Member {
  uid: string;
  text: string;
  reward: number | null;
  advantage?: number | { mean: number } | null;
  loss?: number | null;
  stop: string | null;
  tokens?: number | null;
  no_signal?: string | null;
}

interface Explained {
  prompt: string;
  mean: number | null;
  std: number | null;
  algorithm: { equations?: Record<string, string> };
  findings: string[];
  samples: Member[];
}

interface Group { step: number; says: string; group: Explained; lines: Record<string, number> }

/** Reward, advantage and loss of every answer of a group, as they were recorded. */
export function GroupView({ run, step, group, uid }: { run: string; step: number; group: string; uid: string | null }) {
  const answer = useAnswer<Group>("api/group", { run, step, group });
  if (answer.failure && !answer.value) return <Empty title="The group of this sample was not recorded.">Of each recorded step as many groups are kept as <code>run.log.groups</code> says.</Empty>;
  return (
    <Shown answer={answer}>
      {({ group: found, lines }) => {
        const pushes = found.samples.map(one => advantageOf(one));
        const most = Math.max(...pushes.map(push => Math.abs(push ?? 0)), 1e-9);
        const formula = found.algorithm.equations?.["advantage"];
        return (
          <>
            <p class="says">
              {found.samples.length} answers to one prompt. {found.mean !== null && <>Mean reward <b>{show(found.mean)}</b>, spread <b>{show(found.std)}</b>. </>}
              {formula && <code>{formula}</code>}
            </p>
            {found.findings.map(text => <p key={text} class="says">{text}</p>)}
            <ol class="members">
              {found.samples.map((one, i) => (
                <li key={one.uid} class={`member ${one.uid === uid ? "here" : ""}`} aria-current={one.uid === uid ? "true" : undefined}>
                  <Said text={one.text} class="cut six" />
                  <dl>
                    <div><dt>reward</dt><dd>{one.reward === null ? "unscored" : show(one.reward)}</dd></div>
                    <div><dt>advantage</dt><dd>{show(pushes[i])}</dd></div>
                    <div><dt>loss</dt><dd>{show(one.loss)}</dd></div>
                  </dl>
                  <Bar share={(pushes[i] ?? 0) / most} />
                  <p class="soft">{[one.stop, typeof one.tokens === "number" ? counted(one.tokens, "token") : "", one.no_signal?.replaceAll("_", " ")].filter(Boolean).join(", ")}</p>
                  {lines[one.uid] !== undefined && one.uid !== uid && <a href={link("sample", { run, line: lines[one.uid] })}>Open</a>}
                </li>
              ))}
            </ol>
          </>
        );
      }}
    </Shown>
  );
}

/** The mean where the tokens of an answer differ. */
function advantageOf(one: Member): number | null {
  const told = one.advantage ?? null;
  return typeof told === "object" && told !== null ? told.mean : told;
}

/** From the middle to the right: pushed up; to the left: pushed down. */
function Bar({ share }: { share: number }) {
  return (
    <svg class="push" viewBox="-50 0 100 6" preserveAspectRatio="none" aria-hidden="true">
      <rect class={share >= 0 ? "up" : "down"} x={share >= 0 ? 0 : 50 * share} y="0" width={50 * Math.abs(share)} height="6" />
      <line class="rule" x1="0" x2="0" y1="0" y2="6" />
    </svg>
  );
}

interface Over { prompt: string; total: number; rows: SampleLine[] }

/** The answers to one prompt, step by step. */
export function PromptView({ run, prompt }: { run: string; prompt: string }) {
  const answer = useAnswer<Over>("api/prompt", { run, prompt });
  return (
    <Shown answer={answer}>
      {found => {
        const steps = [...new Set(found.rows.map(row => row.step ?? 0))].sort((a, b) => a - b);
        if (steps.length < 2) return <Empty title="This prompt was recorded in one step only.">It comes again when the data are gone through once more.</Empty>;
        return (
          <ol class="over">
            {steps.map(step => (
              <li key={step}>
                <span class="number">step {step}</span>
                <div class="said-list">
                  {found.rows.filter(row => (row.step ?? 0) === step).map(row => (
                    <a key={row.line} class="said-line" href={link("sample", { run, line: row.line })}>
                      <b class="number">{row.reward === null ? "–" : show(row.reward)}</b>
                      <Said text={row.completion} class="cut two" />
                    </a>
                  ))}
                </div>
              </li>
            ))}
          </ol>
        );
      }}
    </Shown>
  );
}
