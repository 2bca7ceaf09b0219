// How turns look: what was asked, thinking in a block that folds, the answer, tool calls as cards, the figures, and
// what can be done with a turn.

import { copyButton } from "./clipboard.js";
import { make, say } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** A user's turn. `actions` are {copy, edit, branch, remove}; `copy` gives the text. */
export function userView({ content, images }, actions) {
  const pictures = images.map((url) => make("img", { src: url, alt: "attached image" }));
  const text = content ? make("p", {}, content) : null;
  return make("article", { class: "turn user", "aria-label": "You" }, ...pictures, text, actionRow(actions));
}

function actionRow({ copy, edit, branch, remove }) {
  const named = [
    ["Edit", edit, "Change this turn"],
    ["Branch", branch, "Go on from here in another conversation"],
    ["Delete", remove, "Take this turn out of the conversation"],
  ];
  const buttons = named.map(([name, action, title]) => {
    const button = make("button", { type: "button", title }, name);
    button.addEventListener("click", action);
    return button;
  });
  return make("div", { class: "actions" }, copyButton(copy, "Copy the text as it was written"), ...buttons);
}

/** An assistant's turn, shown again whenever it has grown. `onResults` gets the calls once each has its result. */
export class AssistantView {
  #answer = new MarkdownView(make("div", { class: "answer" }));
  #thinkingText = make("div", { class: "thinking-text" });
  #thinkingTitle = make("summary", {}, "Thinking");
  #thinking = make("details", { class: "thinking", hidden: true }, this.#thinkingTitle, this.#thinkingText);
  #problem = make("p", { class: "problem", role: "alert", hidden: true });
  #figures = make("p", { class: "figures quiet" });
  #cards = make("div", { class: "cards" });
  #actions;
  #cardViews = [];
  #isSetByHand = false;

  constructor(onResults, actions) {
    this.onResults = onResults;
    this.#actions = actionRow(actions);
    const parts = [this.#thinking, this.#answer.element, this.#cards, this.#problem, this.#figures, this.#actions];
    this.element = make("article", { class: "turn assistant", "aria-label": "Assistant" }, ...parts);
    // Folded or opened by hand it stays so, whatever streams in.
    this.#thinkingTitle.addEventListener("click", () => (this.#isSetByHand = true));
  }

  show(turn, isStreaming) {
    this.element.setAttribute("aria-busy", String(isStreaming));
    this.#showThinking(turn, isStreaming);
    this.#answer.show(turn.content);
    turn.calls.forEach((call, place) => this.#showCall(turn, call, place, isStreaming));
    say(this.#problem, turn.problem);
    this.#figures.textContent = figuresLine(turn.figures);
    this.#actions.hidden = isStreaming;
  }

  #showThinking({ reasoning, content, calls }, isStreaming) {
    const isThinking = isStreaming && !content && !calls.length;
    this.#thinking.hidden = !reasoning.trim();
    this.#thinkingTitle.textContent = isThinking ? "Thinking…" : "Thinking";
    if (this.#thinkingText.textContent !== reasoning) this.#thinkingText.textContent = reasoning;
    if (!this.#isSetByHand) this.#thinking.open = isThinking;
  }

  #showCall(turn, call, place, isStreaming) {
    if (!this.#cardViews[place]) {
      this.#cardViews[place] = new CallCard(() => this.#takeResults(turn));
      this.#cards.append(this.#cardViews[place].element);
    }
    this.#cardViews[place].show(call, isStreaming);
  }

  #takeResults(turn) {
    if (turn.calls.every((call) => call.result !== null)) this.onResults(turn.calls);
  }
}

/** One tool call: its name, its arguments as they stream, and a box for the result that a person types in. */
class CallCard {
  #name = make("span", { class: "call-name" });
  #arguments = make("pre", { class: "call-arguments" });
  #result = make("textarea", { rows: 2, placeholder: "What the tool gives back" });
  #send = make("button", { type: "submit" }, "Give result");
  #form = make("form", { hidden: true }, make("label", {}, "Result ", this.#result), this.#send);
  #given = make("pre", { class: "call-result", hidden: true });

  constructor(onResult) {
    const head = make("div", { class: "call-head" }, "Tool call ", this.#name);
    this.element = make("section", { class: "call" }, head, this.#arguments, this.#form, this.#given);
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.call.result = this.#result.value;
      this.show(this.call, false);
      onResult();
    });
  }

  show(call, isStreaming) {
    this.call = call;
    this.element.setAttribute("aria-label", `Tool call ${call.name}`);
    this.#name.textContent = call.name;
    this.#arguments.textContent = isStreaming ? call.arguments : indented(call.arguments);
    this.#form.hidden = isStreaming || call.result !== null;
    this.#given.hidden = call.result === null;
    this.#given.textContent = call.result ?? "";
  }
}

/** JSON on several lines; what is not JSON, as an answer cut at its limit leaves it, stays as it is. */
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function figuresLine(figures) {
  if (!figures) return "";
  const parts = [`first token after ${figures.firstSeconds.toFixed(2)} s`];
  if (figures.tokens) parts.push(`${figures.tokens} tokens`);
  if (figures.perSecond) parts.push(`${figures.perSecond.toFixed(1)} tokens/s`);
  if (figures.cached) parts.push(`${figures.cached} prompt tokens from the cache`);
  if (figures.accepted) parts.push(`${figures.accepted} drafts accepted`);
  if (figures.end === "length") parts.push("cut at its length limit");
  if (figures.end === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
