// The page: conversations at the left, the open one with the form below it, and the live view at the right.

import { readModel } from "./api.js";
import { Chat } from "./chat.js";
import { newConversation } from "./conversation.js";
import { byId, say } from "./dom.js";
import { describeModel, startHints } from "./hints.js";
import { allowImages, hasAttached, setAttached, startImages, takeAttached } from "./images.js";
import { ConversationList } from "./list.js";
import { startLive } from "./live.js";
import { apiKey, startSettings } from "./settings.js";
import { Shelf } from "./shelf.js";

/** null where the browser keeps nothing, as some do in private windows. */
const shelf = Shelf.open().catch(() => null);
const chat = new Chat(shelf, refresh);
const list = new ConversationList(shelf, chat, open);

function refresh() {
  const isRunning = Boolean(chat.running);
  byId("stop").hidden = !isRunning;
  byId("send").disabled = isRunning;
  byId("regenerate").hidden = isRunning || !chat.turns.length;
  byId("hints").hidden = chat.turns.length > 0;
  byId("turns").toggleAttribute("data-busy", isRunning);
  // Each tab has its own conversation open, which a reload finds again here.
  const place = chat.conversation.revision ? `#${chat.conversation.id}` : "";
  if (location.hash !== place) history.replaceState(null, "", location.pathname + location.search + place);
  list.draw();
}

function send() {
  const text = byId("message").value.trim();
  if (chat.running || (!text && !hasAttached())) return;
  byId("message").value = "";
  byId("offer").hidden = true;
  chat.send(text, takeAttached(), takeBack);
}

/** A message that was refused is in the form again; what was typed meanwhile stays below it. */
function takeBack({ content, images }) {
  const typed = byId("message").value;
  byId("message").value = typed ? `${content}\n${typed}` : content;
  setAttached(images);
}

async function open(id) {
  chat.open((id && (await (await shelf)?.read(id))) || newConversation());
  if (matchMedia("(max-width: 800px)").matches) setOpen("show-list", "conversations", false);
  byId("message").focus();
}

/** Another tab wrote or removed a conversation. */
async function follow(id) {
  const isFree = !chat.running && !document.querySelector(".turn.edit");
  if (id === chat.conversation.id && isFree) {
    const { scrollTop } = byId("turns");
    const newer = await (await shelf).read(id);
    if (newer && newer.revision > chat.conversation.revision) {
      chat.conversation = newer;
      chat.draw();
      byId("turns").scrollTop = scrollTop;
    }
  }
  list.draw();
}

function onMessageKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
}

function setOpen(button, panel, isOpen) {
  byId(panel).hidden = !isOpen;
  byId(button).setAttribute("aria-expanded", String(isOpen));
}

function startPanel(button, panel, isOpen) {
  setOpen(button, panel, isOpen);
  byId(button).addEventListener("click", () => setOpen(button, panel, byId(panel).hidden));
}

async function meetServer() {
  try {
    const model = await readModel(apiKey());
    byId("model").textContent = `${model.id}, ${model.max_model_len.toLocaleString()} tokens of context`;
    allowImages(Boolean(model.input_modalities?.includes("image")));
    describeModel(model);
    say(byId("notice"), null);
  } catch (error) {
    say(byId("notice"), error.status === 401 ? "This server asks for an API key; give it in Settings." : error.message);
  }
}

async function start() {
  const isNarrow = matchMedia("(max-width: 800px)").matches;
  startPanel("show-list", "conversations", !isNarrow);
  startPanel("show-settings", "settings", false);
  startPanel("show-live", "live", !isNarrow);
  startSettings(meetServer);
  startImages();
  startHints();
  byId("compose").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  byId("message").addEventListener("keydown", onMessageKey);
  byId("stop").addEventListener("click", () => chat.stop());
  byId("regenerate").addEventListener("click", () => chat.regenerate());
  byId("new-chat").addEventListener("click", () => open(null));
  document.addEventListener("keydown", (event) => event.key === "Escape" && chat.stop());
  byId("message").focus();
  meetServer();
  startLive(apiKey, () => !byId("live").hidden);
  (await shelf)?.onChange(follow);
  const kept = await (await shelf)?.read(location.hash.slice(1));
  // Who was quick has begun another one.
  if (kept && !chat.turns.length) chat.open(kept);
  else refresh();
}

start();
