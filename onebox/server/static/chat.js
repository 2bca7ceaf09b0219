// The open conversation: asking, answering, and changing what was said.

import { readAnswer } from "./answer.js";
import { assistantTurn, branchOf, isEmptyAnswer, newConversation, toMessages, userTurn } from "./conversation.js";
import { byId, offer, say } from "./dom.js";
import { editForm } from "./edit.js";
import { apiKey, requestFields, systemPrompt } from "./settings.js";
import { AssistantView, userView } from "./turns.js";

const KEEP_EVERY_MS = 2000;

export class Chat {
  #shelf;
  #onChange;
  #keptAt = 0;
  conversation = newConversation();
  /** Stops the answer that streams; null when none does. */
  running = null;

  /** `shelf` is promised; null where the browser keeps nothing. `onChange` is called when anything here changed. */
  constructor(shelf, onChange) {
    this.#shelf = shelf;
    this.#onChange = onChange;
  }

  get turns() {
    return this.conversation.turns;
  }

  /** Shows another conversation; an answer that streams into this one is stopped. */
  open(conversation) {
    this.stop();
    this.running = null;
    this.conversation = conversation;
    say(byId("notice"), null);
    this.draw();
    scrollDown();
  }

  stop() {
    this.running?.abort();
  }

  draw() {
    byId("turns").replaceChildren(...this.turns.map((turn) => this.#viewOf(turn)));
    this.#onChange();
  }

  /** Asks. A message that the server refuses is handed to `takeBack` and is no part of the conversation. */
  async send(text, images, takeBack) {
    const turn = userTurn(text, images);
    this.turns.push(turn);
    this.draw();
    scrollDown();
    this.keep();
    await this.#answer((conversation) => {
      conversation.turns.splice(conversation.turns.indexOf(turn), 1);
      takeBack(turn);
    });
  }

  /** Answers the last message again. Where that is refused, the answer from before is back. */
  async regenerate() {
    const before = this.turns.at(-1)?.role === "assistant" ? this.turns.pop() : null;
    this.draw();
    await this.#answer(({ turns }) => before && turns.push(before));
  }

  async keep(conversation = this.conversation) {
    this.#keptAt = performance.now();
    try {
      const isBranch = await (await this.#shelf)?.write(conversation);
      if (isBranch) say(byId("notice"), "Another tab changed this conversation; what is here is kept as a branch of it.");
    } catch (error) {
      say(byId("notice"), `${error.message} This conversation is not kept: delete or export older ones.`);
    }
    this.#onChange();
  }

  /** The model goes on. `takeBack` undoes in the conversation what led here, if there is no word of an answer. */
  async #answer(takeBack) {
    const { conversation } = this;
    let body;
    try {
      body = { messages: toMessages(conversation.turns, systemPrompt()), ...requestFields() };
    } catch (error) {
      await this.#refuse(conversation, error.message, takeBack);
      return;
    }
    say(byId("notice"), null);
    const turn = assistantTurn();
    const view = this.#answerView(turn);
    conversation.turns.push(turn);
    byId("turns").append(view.element);
    const running = new AbortController();
    this.running = running;
    this.#onChange();
    const draw = oncePerFrame(() => this.running === running && this.#showGrowth(view, turn));
    await readAnswer(turn, body, apiKey(), running.signal, draw);
    if (this.running === running) this.running = null;
    if (isEmptyAnswer(turn) && (turn.problem || running.signal.aborted)) {
      conversation.turns.splice(conversation.turns.indexOf(turn), 1);
      await this.#refuse(conversation, turn.problem, takeBack);
      return;
    }
    if (isEmptyAnswer(turn)) turn.problem = "The model ended its turn without a word.";
    view.show(turn, false);
    await this.keep(conversation);
    if (this.conversation === conversation) scrollDown();
  }

  async #refuse(conversation, problem, takeBack) {
    // Left for another conversation before the first word, it stays as it was asked.
    if (this.conversation !== conversation) return;
    takeBack(conversation);
    this.draw();
    await this.keep();
    if (problem) say(byId("notice"), problem);
  }

  #showGrowth(view, turn) {
    const log = byId("turns");
    const wasAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    view.show(turn, true);
    if (wasAtEnd) scrollDown();
    // A tab that is closed or reloaded loses little of a long answer.
    if (performance.now() - this.#keptAt > KEEP_EVERY_MS) this.keep();
  }

  #viewOf(turn) {
    if (turn.role === "user") return userView(turn, this.#actions(turn));
    const view = this.#answerView(turn);
    view.show(turn, false);
    return view.element;
  }

  #answerView(turn) {
    return new AssistantView((results) => this.#goOn(turn, results), this.#actions(turn));
  }

  /** Every call has its result: the model goes on, if it had the last word. */
  async #goOn(turn, results) {
    this.keep();
    if (turn !== this.turns.at(-1) || this.running) return;
    await this.#answer(() => results.forEach((call) => (call.result = null)));
  }

  #actions(turn) {
    const whenIdle = (action) => () => this.running || action();
    return {
      copy: () => turn.content,
      edit: whenIdle(() => this.#edit(turn)),
      branch: whenIdle(() => this.#branch(turn)),
      remove: whenIdle(() => this.#remove(turn)),
    };
  }

  #edit(turn) {
    const place = this.turns.indexOf(turn);
    const later = this.turns.length - place - 1;
    const form = editForm(turn, later, {
      onCancel: () => this.draw(),
      onSave: (text) => {
        turn.content = text;
        this.draw();
        this.keep();
      },
      onSend: (text) => this.#sendAgain(place, text),
    });
    byId("turns").children[place].replaceWith(form);
    form.querySelector("textarea").focus();
  }

  /** The edited message takes the place of itself and of all behind it; refused, all of that is back. */
  async #sendAgain(place, text) {
    const removed = this.turns.splice(place);
    const turn = userTurn(text, removed[0].images);
    this.turns.push(turn);
    this.draw();
    await this.#answer(({ turns }) => turns.splice(turns.indexOf(turn), 1, ...removed));
  }

  async #branch(turn) {
    this.open(branchOf(this.conversation, this.turns.indexOf(turn) + 1));
    await this.keep();
    byId("message").focus();
  }

  /** An answer alone, or a message with all that answers it. */
  async #remove(turn) {
    const { conversation } = this;
    const before = [...this.turns];
    const place = this.turns.indexOf(turn);
    const next = this.turns.findIndex(({ role }, at) => at > place && role === "user");
    const end = turn.role === "assistant" ? place + 1 : next < 0 ? this.turns.length : next;
    this.turns.splice(place, end - place);
    this.draw();
    offer(end - place > 1 ? `${end - place} turns were deleted.` : "The turn was deleted.", "Undo", async () => {
      conversation.turns = before;
      if (this.conversation === conversation) this.draw();
      await this.keep(conversation);
    });
    await this.keep();
  }
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
