// One answer from asking to its end, with its figures.

import { streamChat } from "./api.js";
import { addDelta } from "./conversation.js";

/** What came within a shorter time came in one piece, and says nothing about speed. */
const SHORTEST_S = 0.1;

/** Fills `turn` from the stream and calls `onGrowth` whenever it has grown. What goes wrong becomes its `problem`. */
export async function readAnswer(turn, body, key, signal, onGrowth) {
  const clock = new Clock();
  const asked = { ...body, stream_options: { include_usage: true, continuous_usage_stats: true } };
  try {
    for await (const chunk of streamChat(asked, key, signal)) {
      const choice = chunk.choices[0];
      if (choice) {
        addDelta(turn, choice.delta);
        clock.end = choice.finish_reason;
      }
      clock.take(chunk.usage, turn.reasoning || turn.content || turn.calls.length);
      turn.figures = clock.figures();
      onGrowth();
    }
  } catch (error) {
    clock.end = "stopped";
    turn.figures = clock.figures();
    if (error.name !== "AbortError") turn.problem = error.message;
  }
}

/** Times of one answer, in seconds as the browser sees them. */
class Clock {
  #began = performance.now();
  #first = null;
  #last = null;
  #firstTokens = 0;
  #usage = null;
  end = null;

  take(usage, hasText) {
    this.#usage = usage ?? this.#usage;
    if (!hasText) return;
    if (this.#first === null) {
      this.#first = performance.now();
      this.#firstTokens = this.#usage?.completion_tokens ?? 0;
    }
    // The last chunk of all carries no token, only the final usage.
    if (!usage?.completion_tokens_details) this.#last = performance.now();
  }

  /** null before the first word. */
  figures() {
    if (this.#first === null) return null;
    const tokens = this.#usage?.completion_tokens ?? 0;
    const seconds = (this.#last - this.#first) / 1000;
    return {
      firstSeconds: (this.#first - this.#began) / 1000,
      tokens,
      perSecond: seconds > SHORTEST_S ? (tokens - this.#firstTokens) / seconds : 0,
      cached: this.#usage?.prompt_tokens_details?.cached_tokens ?? 0,
      accepted: this.#usage?.completion_tokens_details?.accepted_prediction_tokens ?? 0,
      end: this.end,
    };
  }
}
