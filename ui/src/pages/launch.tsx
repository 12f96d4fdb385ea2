// A new run: a recipe to start from, a form made from the schema, the same as YAML, and what `plan` says of it.
import { dump, load, YAMLException } from "js-yaml";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Failure, get, send, useAnswer, type ConfigPage } from "../api";
import { below, countSet, Input, matches, Section, type Problem } from "../form";
import { Coded, Empty, Shown, Trouble } from "../parts";
import { link } from "../route";
import { resolve, settings, withChoices, withoutDefaults, withValue, type Config, type Schema, type Setting } from "../schema";
import { short } from "../words";

interface Algorithm { name: string; family: string }
interface Recipe { name: string; title: string; family: string | null }

interface Plan { ok: boolean; checked: boolean; problems: Problem[]; warnings: string[]; says: string[] }

// what nearly everybody sets, in the order in which it is thought of
const essentials: [string, string][] = [
  ["model.path", "Model"],
  ["data.source", "Training data"],
  ["algorithm.name", "Algorithm"],
  ["rewards", "Rewards"],
  ["train.steps", "Steps"],
  ["train.prompts_per_step", "Prompts per step"],
  ["algorithm.group_size", "Answers per prompt"],
  ["rollout.max_new_tokens", "Longest answer"],
  ["rollout.temperature", "Temperature"],
  ["train.learning_rate", "Learning rate"],
  ["eval.every", "Evaluate every"],
  ["run.checkpoint.every", "Checkpoint every"],
  ["run.log.tokens", "Numbers of single tokens"],
];

const ALGORITHM = "algorithm.name";
const folders: Record<string, string> = { "": "Tasks", algorithms: "Policy gradients on sums", families: "Other families", envs: "Environments", migrate: "From other libraries" };

/** The schema in which the algorithm is chosen from a list, by family. */
function withAlgorithms(schema: Schema, algorithms: Algorithm[]): Schema {
  const families = [...new Set(algorithms.map(one => one.family))];
  const groups = families.map((family): [string, string[]] => [family.replaceAll("_", " "), algorithms.filter(one => one.family === family).map(one => one.name)]);
  return algorithms.length ? withChoices(schema, ALGORITHM, groups) : schema;
}

const WAIT = 600; // milliseconds after the last change until the plan is asked

export function LaunchPage({ query }: { query: URLSearchParams }) {
  const schema = useAnswer<Schema>("api/schema");
  const recipes = useAnswer<Recipe[]>("api/recipes");
  const algorithms = useAnswer<Algorithm[]>("api/algorithms");
  return (
    <>
      <div class="title"><h1>New run</h1></div>
      {!algorithms.loading && <Shown answer={schema}>{found => <Form schema={withAlgorithms(found, algorithms.value ?? [])} recipes={recipes.value ?? []} query={query} />}</Shown>}
    </>
  );
}

function Form({ schema, recipes, query }: { schema: Schema; recipes: Recipe[]; query: URLSearchParams }) {
  const [text, setText] = useState("");
  const [config, setConfig] = useState<Config>({});
  const [mistake, setMistake] = useState<string | null>(null); // of the YAML
  const [shownAs, setShownAs] = useState<"form" | "yaml">("form");
  const [name, setName] = useState(query.get("name") ?? "");
  const [search, setSearch] = useState("");
  const [failure, setFailure] = useState<Failure | null>(null);
  const [starting, setStarting] = useState(false);
  const [recipe, setRecipe] = useState("");
  const [tried, setTried] = useState(""); // the text whose data and rewards are to be tried
  const plan = usePlan(text, name.trim(), tried === text);
  const problems = (plan.value?.problems ?? []).map(one => ({ ...one, where: one.where?.replace(/\[(\d+)\]/g, ".$1") ?? null }));

  function setYaml(given: string): void {
    setText(given);
    try {
      const read = load(given) ?? {};
      if (typeof read !== "object" || Array.isArray(read)) throw new YAMLException("this is not a configuration: it has no keys");
      setConfig(read as Config);
      setMistake(null);
    } catch (error) {
      const told = error as YAMLException;
      setMistake(`${told.reason ?? told.message}${told.mark ? `, line ${told.mark.line + 1}` : ""}`);
    }
  }
  function set(key: string, value: unknown): void {
    const changed = withValue(config, key, value);
    setConfig(changed);
    setText(dump(changed, { lineWidth: -1, noRefs: true }));
    setMistake(null);
  }
  async function begin(chosen: string): Promise<void> {
    setRecipe(chosen);
    if (!chosen) return setYaml("");
    try {
      const found = await get<{ yaml: string }>("api/recipe", { name: chosen });
      setYaml(found.yaml);
      setFailure(null);
    } catch (error) {
      setFailure(error as Failure);
    }
  }
  async function start(): Promise<void> {
    setStarting(true);
    try {
      const { run } = await send<{ run: string }>("api/launch", { yaml: text, name });
      location.hash = link("run", { run });
    } catch (error) {
      setFailure(error as Failure);
    }
    setStarting(false);
  }
  /** The settings of a run that there is, some of them changed. */
  async function copy(run: string, changes: string[]): Promise<void> {
    try {
      const found = await get<ConfigPage>("api/config", { run });
      let own = withValue(withoutDefaults(schema, (load(found.yaml) ?? {}) as Config), "run.dir", undefined);
      for (const change of changes) {
        const [key = "", ...rest] = change.split("=");
        own = withValue(own, key, load(rest.join("=")));
      }
      setYaml(dump(own, { lineWidth: -1, noRefs: true }));
    } catch (error) {
      setFailure(error as Failure);
    }
  }
  const from = query.get("from");
  const changed = query.getAll("set");
  useEffect(() => {
    const wanted = query.get("recipe");
    if (from) void copy(from, changed);
    else if (wanted) void begin(wanted);
  }, []);
  const families = [...new Set(recipes.map(one => one.family ?? ""))].sort((a, b) => Object.keys(folders).indexOf(a) - Object.keys(folders).indexOf(b));
  const title = recipes.find(one => one.name === recipe)?.title;
  const elsewhere = problems.filter(one => shownAs === "yaml" || !known(schema, one.where));
  return (
    <div class="launch">
      <div class="made">
        <div class="filters">
          <label class="field grow">
            <span>Start from</span>
            <select value={recipe} onChange={event => void begin(event.currentTarget.value)}>
              <option value="">{from ? `the run ${from}` : "nothing: I fill in the form"}</option>
              {families.map(family => (
                <optgroup key={family} label={folders[family] ?? family}>
                  {recipes.filter(one => (one.family ?? "") === family).map(one => <option key={one.name} value={one.name}>{short(one.name).replaceAll("_", " ")}</option>)}
                </optgroup>
              ))}
            </select>
          </label>
          <div class="chips" role="group" aria-label="Show as">
            <button type="button" aria-pressed={shownAs === "form"} onClick={() => setShownAs("form")}>Form</button>
            <button type="button" aria-pressed={shownAs === "yaml"} onClick={() => setShownAs("yaml")}>YAML</button>
          </div>
        </div>
        {title && <p class="soft about"><Coded text={title} /></p>}
        {from && !recipe && <p class="finding note">The settings of <a href={link("run", { run: from })}>{from}</a>, from its first step on{changed.length > 0 && <>, with <code>{changed.join(", ")}</code></>}.</p>}
        {shownAs === "yaml" ? (
          <label class="field">
            <span>The configuration as YAML: what <code>reinforge train FILE</code> takes</span>
            <textarea class="yaml" spellcheck={false} rows={28} value={text} onInput={event => setYaml(event.currentTarget.value)} aria-invalid={mistake !== null} />
            {mistake && <span class="bad" role="alert">{mistake}</span>}
          </label>
        ) : (
          <Settings schema={schema} config={config} problems={problems} set={set} search={search} setSearch={setSearch} />
        )}
      </div>
      <aside class="plan" aria-label="What plan says">
        <label class="field">
          <span>Name of the run</span>
          <input type="text" value={name} placeholder="my-first-run" autocomplete="off" spellcheck={false} onInput={event => setName(event.currentTarget.value)} />
        </label>
        <button type="button" class="start" disabled={!name.trim() || !plan.value?.ok || plan.asking || mistake !== null || starting} onClick={() => void start()}>{starting ? "Starting …" : "Start the run"}</button>
        {failure && <Trouble failure={failure} />}
        <Told plan={plan} text={text} elsewhere={elsewhere} problems={problems} named={name.trim() !== ""} tryAll={() => setTried(text)} />
      </aside>
    </div>
  );
}

interface ToldProps { plan: PlanState; text: string; elsewhere: Problem[]; problems: Problem[]; named: boolean; tryAll(): void }

function Told({ plan, text, elsewhere, problems, named, tryAll }: ToldProps) {
  if (!text.trim()) return <Empty title="Nothing to check yet.">Choose a recipe, or name a model, data and an algorithm.</Empty>;
  if (plan.failure) return <Trouble failure={plan.failure} />;
  if (!plan.value) return <p class="soft" role="status">Checking …</p>;
  const { ok, warnings, says } = plan.value;
  return (
    <div aria-live="polite" class={plan.asking ? "stale" : ""}>
      {ok ? (
        <p class="finding fine"><b>This can run.</b>{named ? "" : " Give it a name to start it."}</p>
      ) : (
        <p class="finding bad"><b>{problems.length === 1 ? "One thing" : `${problems.length} things`} to mend.</b>{problems.length > elsewhere.length ? " It is marked in the form." : ""}</p>
      )}
      {elsewhere.map(one => <p key={one.what} class="finding bad">{one.where && <code>{one.where} </code>}<b><Coded text={one.what} /></b> <Coded text={one.fix ?? ""} /></p>)}
      {warnings.map(one => <p key={one} class="finding warn"><Coded text={one} /></p>)}
      {ok && !plan.value.checked && <button type="button" class="quiet" disabled={plan.asking} onClick={tryAll}>{plan.asking ? "Checking …" : "Try its data and rewards too"}</button>}
      {ok && plan.value.checked && <p class="soft">Data and rewards were tried.</p>}
      {says.length > 0 && <pre class="code says-plan" tabIndex={0}>{says.join("\n")}</pre>}
    </div>
  );
}

interface PlanState { value: Plan | null; failure: Failure | null; asking: boolean }

/** What `plan` says of the text, asked once nothing has been typed for a moment. */
function usePlan(text: string, name: string, full: boolean): PlanState {
  const [state, setState] = useState<PlanState>({ value: null, failure: null, asking: false });
  const asked = useRef(0);
  const of = useRef("");
  useEffect(() => {
    const mine = ++asked.current;
    if (!text.trim()) {
      setState({ value: null, failure: null, asking: false });
      return;
    }
    // another name changes nothing that would keep the run from being started
    setState(old => ({ ...old, asking: of.current !== text || full }));
    of.current = text;
    const timer = window.setTimeout(async () => {
      try {
        const value = await send<Plan>("api/plan", { yaml: text, name: name || null, full });
        if (mine === asked.current) setState({ value, failure: null, asking: false });
      } catch (error) {
        if (mine === asked.current) setState({ value: null, failure: error as Failure, asking: false });
      }
    }, WAIT);
    return () => window.clearTimeout(timer);
  }, [text, name, full]);
  return state;
}

/** Whether the form has an input for a key. */
function known(schema: Schema, where: string | null): boolean {
  if (!where) return false;
  let here = schema;
  for (const part of where.split(".")) {
    if (/^\d+$/.test(part)) continue;
    const options = here.anyOf ? here.anyOf.map(one => resolve(one, schema)) : [here];
    const inside = options.map(one => one.properties?.[part] ?? resolve(one.items ?? {}, schema).properties?.[part]).find(Boolean);
    if (!inside) return false;
    here = resolve(inside, schema);
  }
  return true;
}

interface SettingsProps { schema: Schema; config: Config; problems: Problem[]; set(key: string, value: unknown): void; search: string; setSearch(text: string): void }

function Settings({ schema, config, problems, set, search, setSearch }: SettingsProps) {
  const common = { root: schema, config, problems, set };
  const sections = useMemo(() => settings(schema, schema, ""), [schema]);
  const found = (key: string) => find(schema, key);
  return (
    <>
      <section class="card">
        <h2>What matters most</h2>
        <div class="fields">
          {essentials.map(([key, title]) => {
            const setting = found(key);
            return setting && <Input key={key} setting={setting} title={title} {...common} />;
          })}
        </div>
      </section>
      <section>
        <h2>All settings</h2>
        <input type="search" class="find" placeholder="Find a setting: temperature, warmup, kl …" aria-label="Find a setting" value={search} onInput={event => setSearch(event.currentTarget.value)} />
        {sections.map(section => {
          const own: Schema = section.kind === "list" ? { properties: { [section.key]: schema.properties![section.key]! } } : section.schema;
          const fits = search === "" || everySetting(own, schema, section.key).some(one => matches(one, search));
          if (!fits) return null;
          const wrong = below(problems, section.key).length;
          const count = countSet(config, section.key);
          return (
            <details key={`${section.key}-${search !== ""}`} class="section" open={search !== ""}>
              <summary><b>{section.key}</b> <span class="soft">{count ? `${count} set` : "defaults"}</span> {wrong > 0 && <span class="range out">{wrong} to mend</span>}</summary>
              <Section name={section.kind === "list" ? "" : section.key} schema={own} search={search} {...common} />
            </details>
          );
        })}
      </section>
    </>
  );
}

function everySetting(schema: Schema, root: Schema, key: string): Setting[] {
  return settings(schema, root, key).flatMap(one => (one.kind === "section" ? everySetting(one.schema, root, one.key) : [one]));
}

function find(schema: Schema, key: string): Setting | null {
  const parts = key.split(".");
  let here: Schema = schema;
  let setting: Setting | null = null;
  for (let i = 0; i < parts.length; i++) {
    setting = settings(here, schema, parts.slice(0, i).join(".")).find(one => one.key === parts.slice(0, i + 1).join(".")) ?? null;
    if (!setting) return null;
    here = setting.schema;
  }
  return setting;
}
