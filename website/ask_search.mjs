// Asks the search of a built site, by the code that its pages run, and prints the addresses found,
// best first, as JSON: node ask.mjs SITE QUERY...
import { readFileSync, readdirSync } from "node:fs";
import vm from "node:vm";

const [site, ...queries] = process.argv.slice(2);
const folder = `${site}/assets/javascripts/workers`;
const code = readdirSync(folder).find((name) => /^search\..*\.js$/.test(name));
const index = JSON.parse(readFileSync(`${site}/search/search_index.json`, "utf8"));
const listeners = [];
let answer;
const scope = vm.createContext({ console, importScripts: () => {}, URL,
  addEventListener: (kind, listener) => kind === "message" && listeners.push(listener),
  postMessage: (message) => answer(message) });
scope.self = scope;
try {
  vm.runInContext(readFileSync(`${folder}/${code}`, "utf8"), scope);
} catch (error) {
  throw new Error(error.message);  // without the whole minified line
}

function send(type, data) {
  return new Promise((resolve) => {
    answer = (message) => resolve(message.data);
    for (const each of listeners) each({ data: { type, data } });
  });
}

await send(0, { config: index.config, docs: index.docs, options: { suggest: false } });
const found = {};
for (const query of queries) {
  const { items } = await send(2, query);
  found[query] = items.map((sections) => sections[0].location);
}
console.log(JSON.stringify(found));
