// A form made from the JSON schema of the configuration. What is left as it is stays out of the configuration.
import { load, dump } from "js-yaml";
import { useState } from "preact/hooks";
import { Coded } from "./parts";
import { resolve, settings, valueAt, type Config, type Schema, type Setting } from "./schema";

export interface Problem { where: string | null; what: string; fix: string | null }

interface Common {
  root: Schema;
  config: Config;
  problems: Problem[];
  set(key: string, value: unknown): void;
}

export function problemsOf(problems: Problem[], key: string): Problem[] {
  return problems.filter(one => one.where === key || one.where?.startsWith(`${key}[`));
}

export function below(problems: Problem[], key: string): Problem[] {
  return problems.filter(one => one.where === key || one.where?.startsWith(`${key}.`) || one.where?.startsWith(`${key}[`));
}

/** A section with all its settings; `search` keeps those that contain it. */
export function Section({ name, schema, search = "", level = 0, ...common }: Common & { name: string; schema: Schema; search?: string; level?: number }) {
  const all = settings(schema, common.root, name);
  const shown = all.filter(one => one.kind === "section" || matches(one, search));
  return (
    <div class={level ? "fields inner" : "fields"}>
      {shown.map(one => {
        if (one.kind !== "section") return <Input key={one.key} setting={one} {...common} />;
        const inner = settings(one.schema, common.root, one.key);
        if (search && !inner.some(each => each.kind === "section" || matches(each, search))) return null;
        return (
          <fieldset key={one.key} class="group">
            <legend><code>{one.key}</code> <span class="soft">{one.help}</span></legend>
            <Section name={one.key} schema={one.schema} search={search} level={level + 1} {...common} />
          </fieldset>
        );
      })}
    </div>
  );
}

export function matches(one: Setting, search: string): boolean {
  return `${one.key} ${one.help}`.toLowerCase().includes(search.toLowerCase());
}

/** How many settings of a section were set. */
export function countSet(config: Config, name: string): number {
  const value = config[name];
  if (Array.isArray(value)) return value.length;
  return value && typeof value === "object" ? Object.keys(value).length : value === undefined ? 0 : 1;
}

export function Input({ setting, title, ...common }: Common & { setting: Setting; title?: string }) {
  const value = valueAt(common.config, setting.key);
  const wrong = problemsOf(common.problems, setting.key);
  const id = `set-${setting.key}`;
  const described = [setting.help && `${id}-help`, wrong.length && `${id}-wrong`].filter(Boolean).join(" ") || undefined;
  return (
    <div class={`setting ${value !== undefined ? "set" : ""} ${wrong.length ? "wrong" : ""}`}>
      <label for={id}>{title ? <b>{title}</b> : null}<code>{setting.key}</code>{setting.required && <span class="soft"> required</span>}</label>
      {setting.kind === "list" ? <List id={id} setting={setting} {...common} /> : (
        <Control id={id} setting={setting} value={value} change={given => common.set(setting.key, given)} described={described} invalid={wrong.length > 0} />
      )}
      {setting.help && <p id={`${id}-help`} class="help"><Coded text={setting.help} /></p>}
      {wrong.length > 0 && <p id={`${id}-wrong`} class="bad" role="alert"><Coded text={wrong.map(one => [one.what, one.fix].filter(Boolean).join(" ")).join(" ")} /></p>}
    </div>
  );
}

interface ControlProps { id: string; setting: Setting; value: unknown; change(value: unknown): void; described?: string; invalid: boolean }

function Control({ id, setting, value, change, described, invalid }: ControlProps) {
  const common = { id, "aria-describedby": described, "aria-invalid": invalid };
  const unset = setting.required ? "choose …" : setting.fallback === undefined || setting.fallback === null ? "not set" : `default: ${written(setting.fallback)}`;
  if (setting.kind === "switch" || setting.kind === "choice") {
    const choices = setting.kind === "switch" ? ["true", "false"] : setting.choices;
    const own = value === undefined ? "" : String(value);
    const options = (names: string[]) => names.map(name => <option key={name} value={name}>{name}</option>);
    const read = (text: string) => (text === "" ? undefined : setting.kind === "switch" ? text === "true" : setting.schema.enum?.find(one => String(one) === text) ?? text);
    return (
      <select {...common} value={own} onChange={event => change(read(event.currentTarget.value))}>
        <option value="">{unset}</option>
        {own !== "" && !choices.includes(own) && options([own])}
        {setting.groups.length ? setting.groups.map(([name, names]) => <optgroup key={name} label={name}>{options(names)}</optgroup>) : options(choices)}
      </select>
    );
  }
  return <Text {...common} value={value} placeholder={setting.required ? "" : unset} read={text => parse(text, setting)} change={change} numeric={setting.kind === "number"} />;
}

/** Keeps what is typed until it is left or Enter is pressed, so that half a number is no error. */
function Text({ value, read, change, numeric, ...rest }: { id: string; value: unknown; placeholder: string; numeric: boolean; read(text: string): unknown; change(value: unknown): void; "aria-describedby"?: string; "aria-invalid": boolean }) {
  const [typed, setTyped] = useState<string | null>(null);
  const commit = () => {
    if (typed !== null) change(read(typed));
    setTyped(null);
  };
  return (
    <input
      {...rest}
      type="text"
      inputMode={numeric ? "decimal" : undefined}
      spellcheck={false}
      autocomplete="off"
      value={typed ?? written(value)}
      onInput={event => setTyped(event.currentTarget.value)}
      onChange={commit}
      onBlur={commit}
    />
  );
}

function parse(text: string, setting: Setting): unknown {
  const bare = text.trim();
  if (bare === "") return undefined;
  if (setting.kind === "text") return text;
  if (setting.kind === "number") return Number.isFinite(Number(bare)) ? Number(bare) : bare;
  try {
    return load(bare);
  } catch {
    return bare; // the plan will say what is wrong with it
  }
}

export function written(value: unknown): string {
  if (value === undefined) return "";
  if (typeof value === "string") return value;
  return dump(value, { flowLevel: 0, lineWidth: -1 }).trim();
}

/** A list of small sections, such as rewards: what is required or set, the rest behind a click. */
function List({ id, setting, ...common }: Common & { id: string; setting: Setting }) {
  const items = (valueAt(common.config, setting.key) as Config[] | undefined) ?? [];
  const schema = resolve(setting.schema.items ?? {}, common.root);
  const replace = (list: Config[]) => common.set(setting.key, list.length ? list : undefined);
  return (
    <div class="list" id={id} tabIndex={-1}>
      {items.map((item, i) => {
        const key = `${setting.key}.${i}`;
        const fields = settings(schema, common.root, key);
        const near = fields.filter(one => one.required || one.key.endsWith(".weight") || item[one.key.split(".").at(-1)!] !== undefined);
        const rest = fields.filter(one => !near.includes(one) && one.kind !== "section");
        return (
          <div key={i} class="item">
            {near.map(one => <Input key={one.key} setting={one} {...common} />)}
            <details><summary>{rest.length} more settings</summary>{rest.map(one => <Input key={one.key} setting={one} {...common} />)}</details>
            <button type="button" class="quiet" onClick={() => replace(items.filter((_, k) => k !== i))}>Remove</button>
          </div>
        );
      })}
      <button type="button" class="quiet" onClick={() => replace([...items, {}])}>Add</button>
    </div>
  );
}
