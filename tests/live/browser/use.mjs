// Uses the live page of a server with keys as a visitor does, and prints what it shows as JSON:
// node use.mjs CHROMIUM URL KEY MESSAGE OTHERS-REQUEST
import puppeteer from "puppeteer-core";

const [chromium, url, key, message, others] = process.argv.slice(2);
const browser = await puppeteer.launch({
  executablePath: chromium, headless: true, protocolTimeout: 240000, timeout: 240000,
  args: ["--no-sandbox", "--disable-dev-shm-usage"],
});
const page = await browser.newPage();
page.setDefaultTimeout(240000);
const seen = { errors: [] };
const text = (selector) => page.$eval(selector, (element) => element.textContent);
page.on("pageerror", (error) => seen.errors.push(error.message));
page.on("response", (response) => {
  const asked = response.request().postData();
  if (asked && JSON.parse(asked).messages) seen.type = response.headers()["content-type"];
});
await page.goto(url, { waitUntil: "domcontentloaded" });
await page.waitForSelector("#login:not([hidden])");
seen.beforeKey = await text("#requests");
await page.type("#key", key);
await page.click("#login button");
await page.waitForFunction(() => document.getElementById("state").textContent.startsWith("serving"));
seen.state = await text("#state");
seen.events = await page.$eval("#events-part", (part) => part.hidden ? "" : part.textContent);
seen.payers = await page.$eval("#payers-part", (part) => part.hidden ? "" : part.textContent);
// The chat is the other view: by the keyboard, as without a mouse.
await page.focus("#tab-cluster");
await page.keyboard.press("ArrowRight");
seen.views = await page.$$eval("[role=tabpanel]", (all) => all.map((each) => each.hidden));
await page.$eval("#most", (field) => { field.value = "24"; });
await page.type("#say", message);
await page.keyboard.press("Enter");
await page.waitForSelector("#turns .turn .bar");
seen.answer = await text("#turns .turn .text");
seen.sources = await text("#turns .turn .key");
seen.note = await text("#turns .turn .note");
// A long answer is stopped; what came stays, and the next one can be asked.
await page.$eval("#most", (field) => { field.value = "4000"; });
await page.type("#say", message);
await page.keyboard.press("Enter");
await page.waitForFunction(() => document.querySelectorAll("#turns .turn .text p").length > 1);
await page.click("#stop");
await page.waitForFunction(() => document.getElementById("stop").hidden);
await page.waitForFunction(() => document.querySelectorAll("#turns .turn .note .bar").length > 1);
seen.stopped = await page.$$eval("#turns .turn .note", (all) => all[all.length - 1].textContent);
// What a model writes becomes elements of Markdown, and never of HTML.
seen.markdown = await page.evaluate(() => {
  const box = document.createElement("div");
  box.append(...markdown("# A\n**b** `c` [d](https://e.f/)\n\n- g\n- h\n\n```\n<i>j</i>\n```\n| k |\n|---|\n| l |\n[m](javascript:n)"));
  return { tags: [...box.querySelectorAll("*")].map((each) => each.tagName.toLowerCase()), text: box.textContent };
});
await page.click("#tab-cluster");
await page.waitForSelector("#requests button");
const rows = await page.$$eval("#requests button", (all) => all.map((each) => each.dataset.id));
seen.rows = rows;
await page.click("#requests button");
await page.waitForSelector("#why[open] pre");
seen.why = await text("#why-text");
await page.click("#close");
seen.others = await page.evaluate(async (id, bearer) => {
  const answer = await fetch("explain/" + id, { headers: { Authorization: "Bearer " + bearer } });
  return answer.status;
}, others, key);
await browser.close();
console.log(JSON.stringify(seen));
