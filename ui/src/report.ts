// What report.html does: its curves and bars, smoothing, the axis, and which samples are shown.
import { curve, node, phaseBars, phaseShares, type Phases, type Point } from "./draw";

interface Data {
  series: Record<string, Point[]>;
  first: string[];
  sections: [string, string[]][];
  says: Record<string, string>; // of some curves, what they are
  phases: Phases;
}

const byId = <T extends HTMLElement = HTMLElement>(name: string) => document.getElementById(name) as T;
const data: Data = JSON.parse(byId("data").textContent ?? "{}");
const state: { smoothing: number; axis: 0 | 1 } = { smoothing: 0.6, axis: 0 };
const cards: [HTMLElement, Point[], string][] = [];

function draw(card: HTMLElement, points: Point[], name: string): void {
  const readout = card.querySelector("h3 span")!;
  const drawn = curve([{ points }], {
    ...state,
    name,
    evaluation: name.startsWith("eval/"),
    width: Math.max(card.clientWidth - 28, 240),
    say: text => (readout.textContent = text),
  });
  card.querySelector("svg")?.remove();
  card.append(drawn);
}

function drawPhases(): void {
  const home = byId("phases");
  home.replaceChildren();
  if (!data.phases.bars.length) {
    home.append(node("p", { class: "soft" }, "The run recorded no timings."));
    return;
  }
  home.append(phaseBars(data.phases, Math.max(home.clientWidth, 240)));
  const items = phaseShares(data.phases).map(({ name, tint, share }) => {
    const item = node("span", { class: `tint${tint}` });
    item.append(node("i"), `${name} ${(100 * share).toFixed(0)}%`);
    return item;
  });
  byId("legend").replaceChildren(...items);
}

function charts(home: Element, names: string[]): void {
  const grid = node("div", { class: "grid" });
  home.append(grid);
  for (const name of names) {
    const card = node("div", { class: "chart" }) as HTMLElement;
    const head = node("h3", {}, name);
    head.append(node("span"));
    card.append(head);
    const says = data.says[name];
    if (says) card.append(node("p", { class: "says" }, says));
    grid.append(card);
    cards.push([card, data.series[name] ?? [], name]);
  }
}

// the curves to look at first, then the others by section, each behind a click
function build(): void {
  const home = byId("curves");
  charts(home, data.first);
  for (const [title, names] of data.sections) {
    const section = node("details", { class: "more" }) as HTMLDetailsElement;
    section.append(node("summary", {}, `${title} (${names.length})`));
    section.ontoggle = redraw; // what was folded has had no width
    home.append(section);
    charts(section, names);
  }
  if (!cards.length) home.append(node("p", { class: "soft" }, "The run recorded no metrics."));
}

function redraw(): void {
  for (const card of cards) draw(...card);
  drawPhases();
}

byId<HTMLInputElement>("smoothing").oninput = event => {
  state.smoothing = Number((event.target as HTMLInputElement).value);
  byId("amount").textContent = state.smoothing.toFixed(2);
  redraw();
};
byId<HTMLSelectElement>("axis").onchange = event => {
  state.axis = (event.target as HTMLSelectElement).value === "1" ? 1 : 0;
  redraw();
};
byId<HTMLSelectElement>("step").onchange = event => {
  const wanted = (event.target as HTMLSelectElement).value;
  for (const row of document.querySelectorAll<HTMLElement>("#samples tbody tr")) row.hidden = wanted !== "" && row.dataset.step !== wanted;
};
let timer: number;
window.onresize = () => {
  clearTimeout(timer);
  timer = window.setTimeout(redraw, 100);
};
build();
redraw();
