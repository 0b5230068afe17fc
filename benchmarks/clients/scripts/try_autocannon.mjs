import autocannon from "autocannon";
import { MODEL, QUESTION, URL, check, run } from "./probe.mjs";

await run({
  async load() {
    const body = { model: MODEL, max_tokens: 8, messages: [{ role: "user", content: QUESTION }] };
    const found = await autocannon({
      url: `${URL}/v1/chat/completions`, connections: 4, amount: 20, method: "POST", timeout: 60,
      headers: { "content-type": "application/json" }, body: JSON.stringify(body),
    });
    check(found["2xx"] === 20 && !found.errors, found.statusCodeStats);
  },
});
