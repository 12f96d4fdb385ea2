// Numbers, times and sizes in words.

export function ago(seconds: number): string {
  const passed = Math.max(Date.now() / 1000 - seconds, 0);
  return passed < 10 ? "just now" : `${duration(passed)} ago`;
}

export function duration(seconds: number): string {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  if (seconds < 90 * 60) return `${Math.round(seconds / 60)} min`;
  if (seconds < 36 * 3600) return `${(seconds / 3600).toFixed(1)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function when(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
}

/** Day and time, as short as a row of a table wants them. */
export function moment(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString(undefined, { day: "numeric", month: "short", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** One token, several tokens. */
export function counted(count: number, thing: string): string {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;
}

export function bytes(size: number): string {
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 1000) return `${size < 10 && unit !== "B" ? size.toFixed(1) : Math.round(size)} ${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)} TB`;
}

export function percent(share: number): string {
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%`;
}

/** The last part of a path: a model's folder or name. */
export function short(path: string): string {
  return path.replace(/\/+$/, "").split("/").at(-1) ?? path;
}

/** A setting as it would be written. */
export function setting(value: unknown): string {
  if (typeof value === "string") return value;
  if (typeof value === "number") return String(Number(value.toPrecision(6)));
  return JSON.stringify(value);
}

/** What cannot be seen is shown by its code: control characters, direction marks, lone surrogates. */
export function visible(text: string): string {
  return text.replace(/[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g, character => {
    const code = character.charCodeAt(0).toString(16).padStart(4, "0");
    return `\\u${code}`;
  });
}
