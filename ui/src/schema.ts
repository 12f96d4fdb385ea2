// A configuration and its JSON schema: values by dotted keys, and what a form needs to know about each.

export interface Schema {
  $ref?: string;
  $defs?: Record<string, Schema>;
  type?: string;
  title?: string;
  description?: string;
  default?: unknown;
  enum?: unknown[];
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
