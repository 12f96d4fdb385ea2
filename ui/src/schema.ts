// A configuration and its JSON schema: values by dotted keys, and what a form needs to know about each.

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  type?: string;
  title?: string;
  description?: string;
  default?: unknown;
  enum?: unknown[];
  groups?: [string, string[]][]; // of what to choose from; not in the server's schema
  const?: unknown;
  anyOf?: Schema[];
  items?: Schema;
  properties?: Record<string, Schema>;
  required?: string[];
  additionalProperties?: boolean | Schema;
  minimum?: number;
  maximum?: number;
}

export type Config = Record<string, unknown>;

export interface Setting {
  key: string;
  kind: "text" | "number" | "switch" | "choice" | "value" | "list" | "section";
  schema: Schema; // without references and without null
  help: string;
  fallback: unknown; // the value that it has when it is not set
  required: boolean;
  optional: boolean; // whether it may be null
  choices: string[];
  groups: [string, string[]][]; // the same by headings, where there are some
}

export function resolve(schema: Schema, root: Schema): Schema {
  let found = schema;
  while (found.$ref) {
    const name = found.$ref.split("/").at(-1)!;
    const { $ref: _, ...own } = found;
    found = { ...(root.$defs?.[name] ?? {}), ...own };
  }
  return found;
}

/** The settings of a section, in the order of the schema. */
export function settings(schema: Schema, root: Schema, prefix: string): Setting[] {
  const section = resolve(schema, root);
  return Object.entries(section.properties ?? {}).map(([name, raw]) => {
    const key = prefix ? `${prefix}.${name}` : name;
    const given = resolve(raw, root);
    const options = (given.anyOf ?? [given]).map(one => resolve(one, root));
    const kinds = options.filter(one => one.type !== "null");
    const one: Schema = kinds.length === 1 ? kinds[0]! : { anyOf: kinds };
    return {
      key,
      kind: kindOf(one),
      schema: one,
      help: given.description ?? one.description ?? "",
      fallback: given.default,
      required: (section.required ?? []).includes(name),
      optional: kinds.length < options.length,
      choices: (one.enum ?? []).map(String),
      groups: one.groups ?? [],
    };
  });
}

function kindOf(schema: Schema): Setting["kind"] {
  if (schema.properties) return "section";
  if (schema.enum) return "choice";
  switch (schema.type) {
    case "string":
      return "text";
    case "integer":
    case "number":
      return "number";
    case "boolean":
      return "switch";
    case "array":
      return schema.items?.$ref ? "list" : "value";
    default:
      return "value";
  }
}

export function valueAt(config: unknown, key: string): unknown {
  let here: unknown = config;
  for (const part of key.split(".")) {
    if (here === null || typeof here !== "object") return undefined;
    here = (here as Record<string, unknown>)[part];
  }
  return here;
}

/** A copy with one value changed; undefined takes it out, and sections that become empty with it. */
export function withValue(config: Config, key: string, value: unknown): Config {
  const [first = "", ...rest] = key.split(".");
  const inside = config[first];
  const copy: Config = { ...config };
  if (!rest.length) {
    if (value === undefined) delete copy[first];
    else copy[first] = value;
    return copy;
  }
  if (Array.isArray(inside)) {
    const at = Number(rest[0]);
    const list = [...inside];
    list[at] = rest.length === 1 ? value : withValue((list[at] ?? {}) as Config, rest.slice(1).join("."), value);
    copy[first] = list;
    return copy;
  }
  const changed = withValue((inside && typeof inside === "object" ? inside : {}) as Config, rest.join("."), value);
  if (Object.keys(changed).length) copy[first] = changed;
  else delete copy[first];
  return copy;
}

/** The schema of one setting; null where there is none of that name. */
function schemaAt(root: Schema, key: string): Schema | null {
  let here: Schema = root;
  for (const part of key.split(".")) {
    const options = (here.anyOf ?? [here]).map(one => resolve(one, root));
    const inside = options.map(one => (/^\d+$/.test(part) ? one.items : one.properties?.[part])).find(Boolean);
    if (!inside) return null;
    here = resolve(inside, root);
  }
  return here;
}

/** Whether a setting has the value that it has when nobody sets it. */
export function isDefault(root: Schema, key: string, value: unknown): boolean {
  const own = schemaAt(root, key);
  return own !== null && "default" in own && JSON.stringify(own.default) === JSON.stringify(value);
}

/** What of a whole configuration was set: sections without their defaults. */
export function withoutDefaults(root: Schema, config: Config, prefix = ""): Config {
  const kept: Config = {};
  for (const [name, value] of Object.entries(config)) {
    const key = prefix ? `${prefix}.${name}` : name;
    if (isDefault(root, key, value)) continue;
    if (Array.isArray(value)) kept[name] = value.map((one, i) => (isSection(one) ? withoutDefaults(root, one, `${key}.${i}`) : one));
    else if (isSection(value)) {
      const inside = withoutDefaults(root, value, key);
      if (Object.keys(inside).length) kept[name] = inside;
    } else kept[name] = value;
  }
  return kept;
}

function isSection(value: unknown): value is Config {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** A copy of the schema in which one setting, of a section that has one place, is chosen from a list. */
export function withChoices(root: Schema, key: string, groups: [string, string[]][]): Schema {
  const [first = "", name = ""] = key.split(".");
  const section = resolve(root.properties?.[first] ?? {}, root);
  const own = section.properties?.[name];
  if (!own) return root;
  const chosen: Schema = { ...own, enum: groups.flatMap(([, names]) => names), groups };
  return { ...root, properties: { ...root.properties, [first]: { ...section, properties: { ...section.properties, [name]: chosen } } } };
}
