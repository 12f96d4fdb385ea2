// Builds the web app into src/reinforge/ui/assets and the report's script and style into src/reinforge/watch.
// stamp.json holds the digest of the sources and of what was made from them: a test compares both.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { dirname, join, relative } from "node:path";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const library = join(here, "..", "src", "reinforge");
const assets = join(library, "ui", "assets");
const watch = join(library, "watch");

const common = { bundle: true, minify: true, target: "es2022", legalComments: "none", charset: "ascii", logLevel: "warning" };

mkdirSync(assets, { recursive: true });
await build({ ...common, entryPoints: [join(here, "src/app.tsx")], outfile: join(assets, "app.js"), format: "iife", jsx: "automatic", jsxImportSource: "preact" });
await build({ ...common, entryPoints: [join(here, "src/app.css")], outfile: join(assets, "app.css") });
await build({ ...common, entryPoints: [join(here, "src/report.ts")], outfile: join(watch, "report.js"), format: "iife" });
await build({ ...common, entryPoints: [join(here, "src/draw.css")], outfile: join(watch, "report.css") });
copyFileSync(join(here, "src/index.html"), join(assets, "index.html"));
copyFileSync(join(here, "src/icon.svg"), join(assets, "icon.svg"));

const digest = (...parts) => {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part);
  return hash.digest("hex");
};
const sources = readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })
  .filter(entry => entry.isFile())
  .map(entry => relative(here, join(entry.parentPath ?? entry.path, entry.name)).replaceAll("\\", "/"))
  .concat("build.mjs", "package-lock.json")
  .sort();
const made = [join(assets, "app.js"), join(assets, "app.css"), join(assets, "index.html"), join(assets, "icon.svg"), join(watch, "report.js"), join(watch, "report.css")];
const stamp = {
  sources: digest(...sources.flatMap(name => [name, "\0", readFileSync(join(here, name)), "\0"])),
  made: Object.fromEntries(made.map(file => [relative(library, file).replaceAll("\\", "/"), digest(readFileSync(file))])),
};
writeFileSync(join(assets, "stamp.json"), JSON.stringify(stamp, null, 1) + "\n");
for (const file of made) console.log(`${relative(library, file)}: ${(readFileSync(file).length / 1000).toFixed(1)} kB`);
