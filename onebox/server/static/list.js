// The list of conversations beside the open one.

import { byId, make, offer, say } from "./dom.js";
import { download, fileName, toJson, toMarkdown } from "./exports.js";
import { systemPrompt } from "./settings.js";

/** `shelf` is promised. `open` shows the conversation of an id; null a new one. */
export class ConversationList {
  #shelf;
  #chat;
  #open;
  #numDraws = 0;

  constructor(shelf, chat, open) {
    this.#shelf = shelf;
    this.#chat = chat;
    this.#open = open;
    byId("export-markdown").addEventListener("click", () => this.#export(toMarkdown, "text/markdown", ".md"));
    byId("export-json").addEventListener("click", () => this.#export(toJson, "application/json", ".json"));
  }

  async draw() {
    byId("export-row").hidden = !this.#chat.turns.length;
    const draw = ++this.#numDraws;
    const shelf = await this.#shelf;
    if (!shelf) say(byId("list-problem"), "This browser keeps nothing here: conversations end with the tab.");
    const heads = (await shelf?.heads()) ?? [];
    // An older look at the shelf that came late shows nothing.
    if (draw !== this.#numDraws) return;
    byId("list").replaceChildren(...heads.map((head) => this.#item(head)));
    byId("list-empty").hidden = heads.length > 0;
  }

  #item({ id, title }) {
    const isOpen = id === this.#chat.conversation.id;
    const open = make("button", { type: "button", class: "title", title }, title);
    if (isOpen) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => this.#open(id));
    const remove = make("button", { type: "button", class: "remove", "aria-label": `Delete ${title}` }, "×");
    remove.addEventListener("click", () => this.#remove(id, title));
    return make("li", {}, open, remove);
  }

  async #remove(id, title) {
    const shelf = await this.#shelf;
    const removed = await shelf.read(id);
    await shelf.remove(id);
    if (removed) {
      removed.revision = 0;
      offer(`“${title}” was deleted.`, "Undo", async () => {
        await this.#chat.keep(removed);
        await this.#open(id);
      });
    }
    if (id === this.#chat.conversation.id) await this.#open(null);
    else await this.draw();
  }

  #export(write, type, suffix) {
    const { conversation } = this.#chat;
    download(fileName(conversation, suffix), type, write(conversation, systemPrompt()));
  }
}
