// The drawing of draw.ts as elements of the app: they draw anew when their data or their width changes.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { Curve } from "./api";
import { curve, phaseBars, phaseShares, show, smooth, type Phases, type Series } from "./draw";
import { percent } from "./words";

export interface View { smoothing: number; axis: 0 | 1 }

export const VIEW: View = { smoothing: 0.6, axis: 0 }; // how curves are drawn at first

export function useWidth<T extends HTMLElement>(): [{ current: T | null }, number] {
  const home = useRef<T>(null);
  const [width, setWidth] = useState(0);
  useLayoutEffect(() => {
    const here = home.current;
    if (!here) return;
    const look = () => setWidth(here.clientWidth);
    const watcher = new ResizeObserver(look);
    watcher.observe(here);
    look();
    return () => watcher.disconnect();
  }, []);
  return [home, width];
}

/** Draws only once it comes near the screen: a page may have a hundred curves. */
function useNear(home: { current: HTMLElement | null }): boolean {
  const [near, setNear] = useState(false);
  useEffect(() => {
    const here = home.current;
    if (!here || near) return;
    const watcher = new IntersectionObserver(seen => seen.some(one => one.isIntersecting) && setNear(true), { rootMargin: "400px" });
    watcher.observe(here);
    return () => watcher.disconnect();
  }, [near]);
  return near;
}

interface DrawnProps {
  series: Series[];
  view: View;
  name: string;
  evaluation: boolean;
  healthy?: Curve["healthy"];
  spread?: boolean;
  say(text: string): void;
}

export function Drawn({ series, view, name, evaluation, healthy = null, spread = false, say }: DrawnProps) {
  const [home, width] = useWidth<HTMLDivElement>();
  const near = useNear(home);
  useLayoutEffect(() => {
    if (!home.current || !width || !near) return;
    home.current.replaceChildren(curve(series, { ...view, name, evaluation, healthy, spread, width, say, raw: true, unit: true }));
  }, [series, view.smoothing, view.axis, width, near, healthy]);
  return <div ref={home} class="drawn" />;
}

function rangeText([low, high]: [number | null, number | null]): string {
  if (low === null) return `up to ${show(high)}`;
  if (high === null) return `from ${show(low)}`;
  return `${show(low)} to ${show(high)}`;
}

/** Whether a curve, as it is drawn, ends outside its healthy range. */
export function outside(one: Curve, smoothing: number): boolean {
  const last = (one.evaluation ? one.points.map(p => p[2]) : smooth(one.points.map(p => p[2]), smoothing)).filter(v => v !== null).at(-1);
  if (last === undefined || last === null || !one.healthy) return false;
  const [low, high] = one.healthy;
  return (low !== null && last < low) || (high !== null && last > high);
}

export function CurveCard({ curve: one, view }: { curve: Curve; view: View }) {
  const [said, setSaid] = useState("");
  const series = useRef<Series[]>([]);
  if (series.current[0]?.points !== one.points) series.current = [{ points: one.points }];
  const bad = outside(one, view.smoothing);
  return (
    <article class="chart">
      <h3><span class="name" title={one.name}>{one.title || one.name}</span><output>{said}</output></h3>
      <p class="says">
        {one.says}
        {one.healthy && <span class={bad ? "range out" : "range"}>{bad ? (outside(one, 0) ? "outside: healthy " : "lately outside: healthy ") : "healthy "}{rangeText(one.healthy)}</span>}
      </p>
      <Drawn series={series.current} view={view} name={`${one.title || one.name} over ${view.axis ? "minutes" : "steps"}`} evaluation={one.evaluation} healthy={one.healthy} say={setSaid} />
    </article>
  );
}

export function PhaseChart({ phases }: { phases: Phases }) {
  const [home, width] = useWidth<HTMLDivElement>();
  useLayoutEffect(() => {
    if (home.current && width) home.current.replaceChildren(phaseBars(phases, width));
  }, [phases, width]);
  return (
    <>
      <div ref={home} class="drawn tall" />
      <div class="legend">
        {phaseShares(phases).map(({ name, tint, share }) => (
          <span key={name} class={`tint${tint}`}><i />{name} {percent(share)}</span>
        ))}
      </div>
    </>
  );
}

export function ViewControls({ view, change }: { view: View; change(view: View): void }) {
  return (
    <div class="controls" role="group" aria-label="How curves are drawn">
      <label>
        Smoothing
        <input type="range" min="0" max="0.98" step="0.01" value={view.smoothing} onInput={event => change({ ...view, smoothing: Number(event.currentTarget.value) })} />
        <output>{view.smoothing.toFixed(2)}</output>
      </label>
      <label>
        Across
        <select value={String(view.axis)} onChange={event => change({ ...view, axis: event.currentTarget.value === "1" ? 1 : 0 })}>
          <option value="0">step</option>
          <option value="1">minutes</option>
        </select>
      </label>
    </div>
  );
}
