// The app: its frame, and which page is shown.
import { render } from "preact";
import { useEffect } from "preact/hooks";
import { learn, offers, send, useAnswer } from "./api";
import { Empty } from "./parts";
import { link, parse, useRoute, type Route } from "./route";
import { short } from "./words";
import { ChatPage } from "./pages/chat";
import { ComparePage } from "./pages/compare";
import { DataPage } from "./pages/data";
import { LaunchPage } from "./pages/launch";
import { RunPage } from "./pages/run";
import { RunsPage } from "./pages/runs";
import { SamplePage } from "./pages/sample";
import { SamplesPage } from "./pages/samples";

interface Info { version: string; root: string; launching: boolean }

// page, name, pages that belong to it
const places: [string, string, string[]][] = [
  ["", "Runs", ["", "run", "samples", "sample"]],
  ["launch", "New run", ["launch"]],
  ["compare", "Compare", ["compare"]],
  ["chat", "Chat", ["chat"]],
  ["data", "Data", ["data"]],
];

function Page({ route, info }: { route: Route; info: Info | null }) {
  const run = route.query.get("run") ?? "";
  switch (route.page) {
    case "":
      return <RunsPage root={info?.root ?? ""} />;
    case "run":
      return <RunPage key={run} run={run} view={route.query.get("view") ?? ""} query={route.query} />;
    case "samples":
      return <SamplesPage key={run} run={run} query={route.query} />;
    case "sample":
      return <SamplePage key={run} run={run} line={Number(route.query.get("line"))} query={route.query} />;
    case "compare":
      return <ComparePage runs={route.query.getAll("run")} />;
    case "chat":
      return <ChatPage query={route.query} />;
    case "data":
      return <DataPage query={route.query} />;
    case "launch":
      return <LaunchPage query={route.query} />;
    default:
      return <><h1>Not found</h1><Empty title="There is no such page."><a href={link("")}>All runs</a></Empty></>;
  }
}

function App() {
  const route = useRoute();
  const info = useAnswer<Info>("api/info").value;
  useEffect(() => {
    const run = route.query.getAll("run").join(", ");
    document.title = [run, route.page && !run ? route.page : "", "reinforge"].filter(Boolean).join(" · ");
    window.scrollTo(0, 0);
    // a page that was opened by the keyboard is read from its beginning
    document.getElementById("main")?.focus({ preventScroll: true });
  }, [route.page, route.query.get("run"), route.query.get("line"), route.query.get("view")]);
  return (
    <>
      <a class="skip" href="#main" onClick={event => { event.preventDefault(); document.getElementById("main")?.focus(); }}>Skip to the page</a>
      <header class="bar">
        <a class="mark" href={link("")}>reinforge</a>
        <nav aria-label="Pages">
          {places.filter(([page]) => page === "" || offers(page)).map(([page, name, own]) => (
            <a key={page} href={link(page)} aria-current={own.includes(route.page) ? "page" : undefined}>{name}</a>
          ))}
        </nav>
        {info && <span class="where" title={`${info.root}, version ${info.version}`}>{short(info.root)}/</span>}
      </header>
      <main id="main" tabIndex={-1}><Page route={route} info={info} /></main>
    </>
  );
}

/** The link that opened the page may hold the token: it becomes a cookie, and leaves the address. */
async function enter(): Promise<void> {
  const { page, query } = parse(location.hash);
  const token = query.get("token");
  if (token === null) return;
  query.delete("token");
  history.replaceState(null, "", link(page, Object.fromEntries(query)));
  await send("api/login", { token }).catch(() => undefined); // the page says what is refused
}

void enter().then(learn).then(() => render(<App />, document.getElementById("app")!));
