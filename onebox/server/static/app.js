// The page: a conversation, the form below it, and the live view beside it.

import { readAnswer } from "./answer.js";
import { readModel } from "./api.js";
import { assistantTurn, loadTurns, saveTurns, toMessages, userTurn } from "./conversation.js";
import { byId, make, say } from "./dom.js";
import { startLive } from "./live.js";
import { apiKey, requestFields, startSettings, systemPrompt } from "./settings.js";
import { AssistantView, userView } from "./turns.js";

let turns = loadTurns();
let attached = [];
/** Stops the answer that streams; null when none does. */
let running = null;

function showTurns() {
  byId("turns").replaceChildren(...turns.map(viewOf));
  refreshButtons();
  scrollDown();
}

function viewOf(turn) {
  if (turn.role === "user") return userView(turn);
  const view = new AssistantView(answerToResults);
  view.show(turn, false);
  return view.element;
}

function addTurn(turn) {
  turns.push(turn);
  byId("turns").append(viewOf(turn));
  scrollDown();
}

function keepTurns() {
  if (!saveTurns(turns)) say(byId("notice"), "The images are too large to keep in this browser; the text is kept.");
}

/** The tools' results are in: the model goes on, if it had the last word. */
function answerToResults(turn) {
  keepTurns();
  if (turn === turns.at(-1) && !running) answer();
}

async function answer() {
  let body;
  try {
    body = { messages: toMessages(turns, systemPrompt()), ...requestFields() };
  } catch (error) {
    say(byId("notice"), error.message);
    return;
  }
  say(byId("notice"), null);
  const turn = assistantTurn();
  const view = new AssistantView(answerToResults);
  turns.push(turn);
  byId("turns").append(view.element);
  running = new AbortController();
  refreshButtons();
  const draw = oncePerFrame(() => showGrowth(view, turn));
  await readAnswer(turn, body, apiKey(), running.signal, draw);
  running = null;
  view.show(turn, false);
  keepTurns();
  refreshButtons();
  scrollDown();
}

function showGrowth(view, turn) {
  if (!running) return;
  const log = byId("turns");
  const wasAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  view.show(turn, true);
  if (wasAtEnd) scrollDown();
}

/** However often it is asked for, drawn once before the browser next paints. */
function oncePerFrame(draw) {
  let isDue = false;
  return () => {
    if (isDue) return;
    isDue = true;
    requestAnimationFrame(() => {
      isDue = false;
      draw();
    });
  };
}

const scrollDown = () => byId("turns").scrollTo({ top: byId("turns").scrollHeight });

function refreshButtons() {
  byId("stop").hidden = !running;
  byId("send").disabled = Boolean(running);
  byId("regenerate").hidden = Boolean(running) || !turns.length;
}

function send() {
  const text = byId("message").value.trim();
  if (running || (!text && !attached.length)) return;
  addTurn(userTurn(text, attached));
  byId("message").value = "";
  attached = [];
  showAttached();
  keepTurns();
  answer();
}

function regenerate() {
  if (turns.at(-1)?.role === "assistant") turns.pop();
  showTurns();
  answer();
}

function newChat() {
  running?.abort();
  turns = [];
  keepTurns();
  say(byId("notice"), null);
  showTurns();
  byId("message").focus();
}

function onMessageKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function toggle(button, panel) {
  panel.hidden = !panel.hidden;
  button.setAttribute("aria-expanded", String(!panel.hidden));
}

async function attach(files) {
  const images = [...files].filter(({ type }) => type.startsWith("image/"));
  attached.push(...(await Promise.all(images.map(readDataUrl))));
  byId("images").value = "";
  showAttached();
}

function readDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function showAttached() {
  const items = attached.map((url, place) => {
    const remove = make("button", { type: "button", "aria-label": `Remove image ${place + 1}` }, "×");
    remove.addEventListener("click", () => {
      attached.splice(place, 1);
      showAttached();
    });
    return make("li", {}, make("img", { src: url, alt: `image ${place + 1}` }), remove);
  });
  byId("attached").replaceChildren(...items);
}

async function meetServer() {
  try {
    const model = await readModel(apiKey());
    byId("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString()} tokens of context`;
    byId("attach").hidden = !model.input_modalities?.includes("image");
    say(byId("notice"), null);
  } catch (error) {
    say(byId("notice"), error.status === 401 ? "This server asks for an API key; give it in Settings." : error.message);
  }
}

function start() {
  startSettings(meetServer);
  byId("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("message").addEventListener("keydown", onMessageKey);
  byId("message").addEventListener("paste", (event) => {
    if (!byId("attach").hidden) attach(event.clipboardData.files);
  });
  byId("images").addEventListener("change", (event) => attach(event.target.files));
  byId("stop").addEventListener("click", () => running?.abort());
  byId("regenerate").addEventListener("click", regenerate);
  byId("new-chat").addEventListener("click", newChat);
  byId("show-settings").addEventListener("click", (event) => toggle(event.target, byId("settings")));
  byId("show-live").addEventListener("click", (event) => toggle(event.target, byId("live")));
  document.addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
  if (matchMedia("(max-width: 800px)").matches) toggle(byId("show-live"), byId("live"));
  showTurns();
  meetServer();
  startLive(apiKey, () => !byId("live").hidden);
  byId("message").focus();
}

start();
