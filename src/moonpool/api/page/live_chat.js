// The chat: Markdown, a system prompt, a stop, and the story of each request.
const USUAL = 0.8;  // as the chat of `moonpool run`: at the API's 1, small models ramble
let told = [], asking = null;
const hello = $("hello");
$("anew").onclick = () => { if (asking) asking.abort(); told = []; $("turns").replaceChildren(hello); $("say").focus(); };
$("stop").onclick = () => { if (asking) asking.abort(); };
$("say").onkeydown = e => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) { e.preventDefault(); $("chat").requestSubmit(); } };

function newTurn(said) {
  const turn = { text: "", thought: "", answer: el("div", "text"), thinking: el("details", "thinking"), note: el("div", "note") };
  turn.thinking.append(el("summary", "", "Reasoning"), el("div", "")); turn.thinking.hidden = true;
  const box = el("article", "turn", el("p", "said-by", "You"), el("p", "mine", said), el("p", "said-by", $("model").value || model), turn.thinking, turn.answer, turn.note);
  hello.remove();
  $("turns").append(box); $("turns").scrollTop = $("turns").scrollHeight;
  return turn;
}
// Whoever reads the end goes on to see it.
function following(change) {
  const box = $("turns"), near = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  change();
  if (near) box.scrollTop = box.scrollHeight;
}
function add(turn, delta) {
  turn.text += delta.content || ""; turn.thought += delta.reasoning_content || delta.reasoning || "";
  if (turn.thought) { turn.thinking.hidden = false; turn.thinking.lastChild.textContent = turn.thought; }
  following(() => turn.answer.replaceChildren(...markdown(turn.text)));
}
function bodyOf(messages) {
  const body = { model: $("model").value || model || undefined, messages, stream: true, max_tokens: Number($("most").value) || 512 };
  if ($("warm").value !== "") body.temperature = Number($("warm").value);
  else if (body.model && !stated.has(body.model)) body.temperature = USUAL;
  return body;
}
// Where the request went, what was cached, and what was predicted, from /explain.
async function story(turn, id, ended) {
  await pause(.1);
  const asked = await fetch("explain/" + id, { headers: headers() });
  if (!asked.ok) { turn.note.append(ended); return; }
  const r = await asked.json(), fetched = Math.min(r.fetched_tokens, r.cached_tokens), ssd = Math.min(r.loaded_tokens, r.cached_tokens - fetched);
  const k = { dram: r.cached_tokens - fetched - ssd, fetched, ssd, computed: r.prompt_tokens - r.cached_tokens };
  const why = el("button", "id", "why there?"); why.type = "button"; why.onclick = () => explain(id, "");
  const place = r.prefill_instance ? r.prefill_instance + (r.decode_instance && r.decode_instance !== r.prefill_instance ? " → " + r.decode_instance : "") + ". " : "";
  following(() => turn.note.append(tierBar(k), tierKey(k), (ended ? ended + " " : "") + place + timesOf(r) + (r.attempts > 1 ? `; ${r.attempts} attempts, because an instance failed` : "") + ". ", why));
}
$("chat").onsubmit = async e => {
  e.preventDefault();
  const said = $("say").value.trim(); if (!said || asking) return;
  $("say").value = "";
  const turn = newTurn(said), id = "page-" + Date.now().toString(36) + Math.random().toString(36).slice(2, 8);
  const system = $("system").value.trim(), messages = [...told, { role: "user", content: said }];
  asking = new AbortController(); $("stop").hidden = false; $("send").disabled = true;
  let ended = "";
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", signal: asking.signal, headers: headers({ "Content-Type": "application/json", "X-Request-Id": id }),
      body: JSON.stringify(bodyOf(system ? [{ role: "system", content: system }, ...messages] : messages)) });
    if (!response.ok) {
      const refused = (await response.json()).error, later = response.headers.get("Retry-After");
      throw new Error(`${response.status}: ${refused.message}${later ? ` Try again in ${later} s.` : ""}`);
    }
    for await (const data of eventsOf(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data); if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0]; if (!choice) continue;
      add(turn, choice.delta || {});
      if (choice.finish_reason === "length") ended = "It ends at the limit of tokens.";
    }
  } catch (error) {
    if (error.name !== "AbortError") { turn.note.className = "note bad"; turn.note.append(el("p", "", error.message)); ended = null; }
    else ended = "Stopped.";
  } finally { asking = null; $("stop").hidden = true; $("send").disabled = false; $("say").focus(); }
  if (turn.text) told = [...messages, { role: "assistant", content: turn.text }];
  if (ended !== null || turn.text) await story(turn, id, ended || "");
};
watch();
