"use strict";
const told = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const messages = [];
const rates = [];
// `first`: the first message that the model still has room for.
let key = "", stopping = null, first = 0;

const dark = matchMedia("(prefers-color-scheme: dark)");
const paint = () => { document.documentElement.dataset.theme = dark.matches ? "dark" : "light"; };
dark.addEventListener("change", paint);
paint();

const headers = () => ({ "Content-Type": "application/json", ...(key ? { Authorization: "Bearer " + key } : {}) });

function show(role, text) {
  const box = document.createElement("div");
  box.className = "message " + role;
  const name = document.createElement("b");
  name.textContent = role;
  const body = document.createElement("span");
  body.textContent = text;
  box.append(name, body);
  at("messages").append(box);
  at("messages").scrollTop = at("messages").scrollHeight;
  return body;
}

// One server-sent event is a line `data: ...` and an empty one.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
  }
}

// An answer to the conversation, which begins later if it is too long for the model. What is refused was not said.
async function answer() {
  for (;;) {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: stopping.signal,
      body: JSON.stringify({ model: told.model, messages: messages.slice(first), stream: true }),
    });
    if (response.ok) return response;
    const error = (await response.json()).error;
    if (error.code !== "context_length_exceeded" || first >= messages.length - 1) {
      messages.pop();
      throw new Error(error.message);
    }
    first += 2;
    show("note", "The conversation is too long for the model: it begins later now.");
  }
}

async function ask(text) {
  messages.push({ role: "user", content: text });
  show("user", text);
  stopping = new AbortController();
  at("send").hidden = true;
  at("stop").hidden = false;
  let written = "";
  try {
    const response = await answer();
    const body = show("assistant", "");
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      written += event.choices[0]?.delta?.content ?? "";
      body.textContent = written;
      at("messages").scrollTop = at("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    if (written) messages.push({ role: "assistant", content: written });
    stopping = null;
    at("send").hidden = false;
    at("stop").hidden = true;
  }
}

at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("text").value.trim();
  if (!text || stopping) return;
  at("text").value = "";
  ask(text);
});
at("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    at("form").requestSubmit();
  }
});
at("stop").addEventListener("click", () => stopping?.abort());
at("key-form").hidden = !told.needsKey;
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value;
  look();
});

const count = (value) => Math.round(value).toLocaleString("en");

function draw(now) {
  at("state").textContent = now.failure ?? "ready";
  at("state").className = now.failure ? "failed" : "";
  at("rate").textContent = count(now.tokens_per_second);
  at("running").textContent = count(now.num_running);
  at("waiting").textContent = count(now.num_waiting);
  at("hits").textContent = now.prefix_cache_queries ? count(100 * now.prefix_cache_hits / now.prefix_cache_queries) + " %" : "-";
  at("blocks").style.width = 100 * now.num_used_blocks / Math.max(1, now.num_blocks) + "%";
  at("blocks-said").textContent = count(now.num_used_blocks) + " of " + count(now.num_blocks) + " in use";
  rates.push(now.tokens_per_second);
  if (rates.length > 120) rates.shift();
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, place) => (place * 2 + 240 - rates.length * 2) + " " + (46 - 44 * rate / top).toFixed(1));
  at("curve").firstElementChild.setAttribute("d", points.length > 1 ? "M" + points.join("L") : "");
  at("requests").replaceChildren(...now.requests.map((request) => {
    const row = document.createElement("li"), bar = document.createElement("i");
    const left = document.createElement("span"), right = document.createElement("span");
    row.className = request.state;
    bar.style.width = 100 * request.written / request.most + "%";
    left.textContent = request.state + ", " + count(request.prompt) + " in";
    right.textContent = count(request.written) + " of " + count(request.most);
    row.append(bar, left, right);
    return row;
  }));
  at("more").textContent = now.num_more ? "and " + count(now.num_more) + " more" : now.requests.length ? "" : "none";
}

async function look() {
  try {
    const response = await fetch("/live", { headers: headers() });
    if (response.status === 401) {
      at("state").textContent = "wants a key";
      return;
    }
    draw(await response.json());
  } catch {
    at("state").textContent = "not reachable";
    at("state").className = "failed";
  }
}
if (told.needsKey) at("state").textContent = "wants a key";
else look();
setInterval(() => { if (!told.needsKey || key) look(); }, 500);
