// How a curve, a stack of bars and a sparkline are drawn: the app and report.html share it.
// Only SVG elements and classes (draw.css), no style attributes: the app's content policy allows none.

/** [step, minutes, value]; evaluations have the ends of their interval too. null: the value was not finite. */
export type Point = [number, number, number | null, (number | null)?, (number | null)?];

export interface Series {
  points: Point[];
  tint?: number; // one of the eight colours; without it the accent
  label?: string;
}

export interface CurveOptions {
  axis: 0 | 1; // step or minutes
  smoothing: number;
  evaluation: boolean;
  width: number;
  name: string; // for those who do not see it
  healthy?: [number | null, number | null] | null;
  spread?: boolean; // intervals as an area
  raw?: boolean; // at rest the last value is said, not the smoothed one
  unit?: boolean; // what never moves between 0 and 1 gets that whole range
  say(text: string): void; // what stands under the cursor, or the last value
}

const left = 52;
const right = 12;
const top = 8;
const bottom = 22;
const height = 170;
const tall = 220;
const tints = 8;

const shapes = ["svg", "path", "line", "text", "circle", "rect", "g", "title"];

export function node(name: string, attributes: Record<string, string | number> = {}, text?: string): Element {
  const made = shapes.includes(name) ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  if (text !== undefined) made.textContent = text;
  return made;
}

export function show(value: number | null | undefined): string {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

/** Exponential moving average, corrected for its start; gaps stay gaps and do not move it. */
export function smooth(values: (number | null)[], weight: number): (number | null)[] {
  let sum = 0;
  let mass = 0;
  return values.map(value => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    mass = mass * weight + (1 - weight);
    return sum / mass;
  });
}

interface Ticks { low: number; high: number; marks: number[] }

/** `round`: both ends are marks, so that nothing lies beyond the last one. */
export function ticks(low: number, high: number, count: number, round = false): Ticks {
  if (low === high) {
    const pad = Math.abs(low) * 0.1;
    low -= pad;
    high += pad || 1; // most of what is 0 throughout cannot be less
  }
  const rough = (high - low) / count;
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map(m => m * power).find(s => s >= rough) ?? rough;
  if (round) {
    low = Number((Math.floor(low / step + 1e-9) * step).toPrecision(12));
    high = Number((Math.ceil(high / step - 1e-9) * step).toPrecision(12));
  }
  const marks: number[] = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) marks.push(Number((i * step).toPrecision(12)));
  return { low, high, marks };
}

type Scale = (value: number) => number;

function scale(low: number, high: number, from: number, to: number): Scale {
  return value => from + ((value - low) / (high - low || 1)) * (to - from);
}

function axes(svg: Element, x: Scale, y: Scale, width: number, across: number[], up: number[], bottomAt: number): void {
  for (const mark of up) {
    svg.append(node("line", { class: "rule", x1: left, x2: width - right, y1: y(mark), y2: y(mark) }));
    svg.append(node("text", { x: left - 8, y: y(mark) + 4, "text-anchor": "end" }, show(mark)));
  }
  for (const mark of across) {
    if (x(mark) <= width - right + 1) svg.append(node("text", { x: x(mark), y: bottomAt - 4, "text-anchor": "middle" }, show(mark)));
  }
}

function path(points: [number, number | null][], x: Scale, y: Scale): string {
  let text = "";
  let pen = "M";
  for (const [a, b] of points) {
    if (b === null) {
      pen = "M";
      continue;
    }
    text += pen + x(a).toFixed(1) + " " + y(b).toFixed(1);
    pen = "L";
  }
  return text;
}

function extent(values: number[], fallback: [number, number]): [number, number] {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : fallback;
}

const known = (value: number | null | undefined): value is number => value !== null && value !== undefined;

/** One chart of one or several series, with a cursor for the mouse and the arrow keys. */
export function curve(series: Series[], options: CurveOptions): SVGSVGElement {
  const { axis, evaluation, width } = options;
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0, "aria-label": options.name }) as SVGSVGElement;
  const lines = series.map(one => ({
    ...one,
    at: one.points.map(p => p[axis]),
    curve: evaluation ? one.points.map(p => p[2]) : smooth(one.points.map(p => p[2]), options.smoothing),
  }));
  const across = lines.flatMap(line => line.at);
  const seen = series.flatMap(one => one.points.flatMap(p => [p[2], p[3], p[4]])).filter(known);
  const xs = ticks(...extent(across, [0, 1]), 6);
  const [low, high] = extent(seen, [0, 1]);
  const share = options.unit && low === high && low >= 0 && high <= 1;
  const ys = ticks(...((share ? [0, 1] : [low, high]) as [number, number]), 4, true);
  if (across.length === 1) xs.marks = across;
  const x = scale(xs.low, xs.high, left, width - right);
  const y = scale(ys.low, ys.high, height - bottom, top);
  if (options.healthy) {
    const from = Math.max(options.healthy[0] ?? ys.low, ys.low);
    const to = Math.min(options.healthy[1] ?? ys.high, ys.high);
    if (to > from) svg.append(node("rect", { class: "healthy", x: left, width: width - left - right, y: y(to), height: y(from) - y(to) }));
  }
  axes(svg, x, y, width, xs.marks, ys.marks, height);
  for (const line of lines) {
    const own = line.tint === undefined ? svg : node("g", { class: `tint${line.tint % tints}` });
    if (own !== svg) svg.append(own);
    drawLine(own, line.points, line.at, line.curve, x, y, options);
  }
  const cursor = node("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  listen(svg, lines, cursor, x, options);
  return svg;
}

function drawLine(home: Element, points: Point[], at: number[], drawn: (number | null)[], x: Scale, y: Scale, options: CurveOptions): void {
  const pairs = (values: (number | null)[]) => values.map((value, i): [number, number | null] => [at[i]!, value]);
  if (options.evaluation && options.spread) {
    const known_ = points.map((p, i) => [at[i]!, p[3], p[4]] as const).filter(([, low, high]) => known(low) && known(high));
    const there = known_.map(([a, , high]): [number, number] => [a, high as number]);
    const back = known_.map(([a, low]): [number, number] => [a, low as number]).reverse();
    if (there.length > 1) home.append(node("path", { class: "spread", d: path([...there, ...back], x, y) + "Z" }));
  }
  if (!options.evaluation) home.append(node("path", { class: "raw", d: path(pairs(points.map(p => p[2])), x, y) }));
  home.append(node("path", { class: "smooth", d: path(pairs(drawn), x, y) }));
  points.forEach((p, i) => {
    const a = x(at[i]!);
    if (p[2] === null) home.append(node("rect", { class: "nan", x: a - 1.5, y: height - bottom - 6, width: 3, height: 6 }));
    if (options.evaluation && known(p[3]) && known(p[4])) home.append(node("line", { class: "whisker", x1: a, x2: a, y1: y(p[3]), y2: y(p[4]) }));
    if (p[2] !== null && (options.evaluation || points.length === 1)) home.append(node("circle", { class: "dot", cx: a, cy: y(p[2]), r: 3.5 }));
  });
}

interface Line extends Series { at: number[]; curve: (number | null)[] }

function listen(svg: SVGSVGElement, lines: Line[], cursor: Element, x: Scale, options: CurveOptions): void {
  const { evaluation, width } = options;
  const several = lines.length > 1;
  const named = (line: Line, text: string) => (several && line.label ? `${line.label} ${text}` : text);
  const last = lines.map(line => named(line, show((options.raw ? line.points.map(p => p[2]) : line.curve).filter(known).at(-1)))).join(" · ");
  const places = [...new Set(lines.flatMap(line => line.at))].sort((a, b) => a - b);
  let place = places.length - 1;
  options.say(last);

  function tell(): void {
    const at = places[place];
    if (at === undefined) return;
    for (const end of ["x1", "x2"]) cursor.setAttribute(end, String(x(at)));
    cursor.setAttribute("visibility", "visible");
    const texts: string[] = [];
    let step: number | undefined;
    for (const line of lines) {
      const i = nearest(line.at, at);
      const p = line.points[i];
      if (!p) continue;
      step ??= p[0];
      const range = evaluation && known(p[3]) ? ` [${show(p[3])}, ${show(p[4])}]` : "";
      const smoothed = evaluation || p[2] === null ? "" : " ~ " + show(line.curve[i]);
      texts.push(named(line, `${p[2] === null ? "not finite" : show(p[2])}${range}${smoothed}`));
    }
    options.say(`step ${step}: ${texts.join(" · ")}`);
  }
  function rest(): void {
    cursor.setAttribute("visibility", "hidden");
    options.say(last);
  }
  svg.onmousemove = event => {
    const box = svg.getBoundingClientRect();
    const mouse = ((event.clientX - box.left) * width) / box.width;
    place = nearest(places.map(x), mouse);
    tell();
  };
  svg.onmouseleave = rest;
  svg.onblur = rest;
  svg.onkeydown = event => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    place = Math.min(Math.max(place + by, 0), places.length - 1);
    tell();
  };
}

function nearest(values: number[], wanted: number): number {
  let best = 0;
  values.forEach((value, i) => {
    if (Math.abs(value - wanted) < Math.abs(values[best]! - wanted)) best = i;
  });
  return best;
}

/** bars: [first step, last step, seconds of each phase]. */
export interface Phases { names: string[]; bars: number[][] }

/** Seconds per step by phase, stacked. */
export function phaseBars({ names, bars }: Phases, width: number): SVGSVGElement {
  const svg = node("svg", { viewBox: `0 0 ${width} ${tall}`, height: tall, role: "img", "aria-label": "seconds per step by phase" }) as SVGSVGElement;
  const totals = bars.map(bar => bar.slice(2).reduce((a, b) => a + b, 0));
  const ys = ticks(0, Math.max(...totals, 1e-9), 5);
  const x = (i: number) => left + ((i + 0.5) * (width - left - right)) / bars.length;
  const y = scale(0, ys.high, tall - bottom, top);
  const thick = Math.max(((width - left - right) / bars.length) * 0.8, 1);
  axes(svg, x, y, width, [], ys.marks, tall);
  const every = Math.ceil(bars.length / 10);
  bars.forEach((bar, i) => {
    if (i % every === 0) svg.append(node("text", { x: x(i), y: tall - 4, "text-anchor": "middle" }, String(bar[0])));
  });
  bars.forEach((bar, i) => {
    let base = 0;
    const column = node("g");
    names.forEach((_, k) => {
      const part = bar[k + 2] ?? 0;
      column.append(node("rect", { class: `part tint${k % tints}`, x: x(i) - thick / 2, width: thick, y: y(base + part), height: Math.max(y(base) - y(base + part), 0) }));
      base += part;
    });
    const rows = names.map((name, k) => `${name}: ${show(bar[k + 2])}`).join("\n");
    column.append(node("title", {}, `steps ${bar[0]} to ${bar[1]}, seconds per step\n${rows}`));
    svg.append(column);
  });
  return svg;
}

/** Which share of all seconds each phase took. */
export function phaseShares({ names, bars }: Phases): { name: string; tint: number; share: number }[] {
  const sums = names.map((_, k) => bars.reduce((a, bar) => a + (bar[k + 2] ?? 0) * ((bar[1] ?? 0) - (bar[0] ?? 0) + 1), 0));
  const all = sums.reduce((a, b) => a + b, 0) || 1;
  return names.map((name, k) => ({ name, tint: k % tints, share: sums[k]! / all }));
}

/** A curve as small as a word. */
export function spark(points: [number, number | null][], width = 120, high = 28): string {
  const xs = extent(points.map(p => p[0]), [0, 1]);
  const ys = extent(points.map(p => p[1]).filter(known), [0, 1]);
  const flat = ys[0] === ys[1];
  return path(points, scale(xs[0], xs[1], 2, width - 2), flat ? () => high / 2 : scale(ys[0], ys[1], high - 3, 3));
}
