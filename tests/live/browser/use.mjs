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
await page.waitForFunction(() => document.getElementById("state").textContent.startsWith("live"));
seen.state = await text("#state");
await page.$eval("#most", (field) => { field.value = "24"; });
await page.type("#say", message);
await page.keyboard.press("Enter");
await page.waitForSelector("#turns .turn .bar");
seen.answer = await text("#turns .turn p:nth-of-type(2)");
seen.sources = await text("#turns .turn .key");
seen.note = await text("#turns .turn div.soft");
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
