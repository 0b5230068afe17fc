// Opens a page in Chromium, light and dark, on a laptop and a phone, and prints what is wrong with
// it as JSON: node look.mjs CHROMIUM URL FOLDER [SELECTOR-TO-WAIT-FOR]. Screenshots go to FOLDER.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import puppeteer from "puppeteer-core";

const [chromium, url, folder, awaited] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const browser = await puppeteer.launch({
  executablePath: chromium, headless: true, protocolTimeout: 240000, timeout: 240000,
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
});
const views = [];
for (const scheme of ["light", "dark"]) for (const width of [1400, 390]) {
  const page = await browser.newPage();
  page.setDefaultTimeout(240000);
  const seen = { scheme, width, outside: [], errors: [] };
  page.on("request", (request) => {
    const to = request.url();
    if (!to.startsWith(new URL(url).origin) && !to.startsWith("data:")) seen.outside.push(to);
  });
  page.on("pageerror", (error) => seen.errors.push(error.message));
  page.on("console", (message) => { if (message.type() === "error") seen.errors.push(message.text()); });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.setViewport({ width, height: 900 });
  await page.goto(url, { waitUntil: "domcontentloaded" });
  if (awaited) await page.waitForSelector(awaited);
  await page.evaluate(axe);
  const found = await page.evaluate(() => axe.run(document));
  seen.violations = found.violations.map((each) => `${each.id}: ${each.nodes.map((n) => n.target).join(", ")}`);
  seen.passes = found.passes.length;
  seen.wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  seen.cut = await page.evaluate(() => [...document.querySelectorAll("svg text")].filter((text) => {
    const inner = text.getBoundingClientRect(), outer = text.ownerSVGElement.getBoundingClientRect();
    return inner.left < outer.left - 1 || inner.right > outer.right + 1;
  }).map((text) => text.textContent));
  await page.screenshot({ path: `${folder}/${scheme}-${width}.png` });
  views.push(seen);
  await page.close();
}
await browser.close();
console.log(JSON.stringify(views));
