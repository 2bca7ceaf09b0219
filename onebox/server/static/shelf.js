// The conversations that this browser keeps, in IndexedDB: titles apart from turns, so that the list is read quickly.
// Bounded; what does not fit is said, and nothing else is thrown away for it. Other tabs are told of every change.

import { branchOf, checkedTurns, titleOf } from "./conversation.js";

const NAME = "onebox";
const STORES = ["heads", "bodies"];
const LIMITS = { conversations: 500, characters: 200_000_000 };

/** The conversation is not kept: the browser has no room, or the bounds are reached. */
export class ShelfFullError extends Error {}

const result = (request) =>
  new Promise((resolve, reject) => {
    request.addEventListener("success", () => resolve(request.result));
    request.addEventListener("error", () => reject(request.error));
  });

const finished = (transaction) =>
  new Promise((resolve, reject) => {
    transaction.addEventListener("complete", resolve);
    for (const event of ["abort", "error"]) transaction.addEventListener(event, () => reject(transaction.error));
  });

export class Shelf {
  #database;
  #limits;
  #channel;
  /** The last write: each sees the revision that the one before it left. */
  #written = Promise.resolve();

  static async open(name = NAME, limits = LIMITS) {
    const request = indexedDB.open(name, 1);
    request.addEventListener("upgradeneeded", () => {
      for (const store of STORES) request.result.createObjectStore(store, { keyPath: "id" });
    });
    return new Shelf(await result(request), limits, new BroadcastChannel(name));
  }

  constructor(database, limits, channel) {
    this.#database = database;
    this.#limits = limits;
    this.#channel = channel;
  }

  /** Calls back with the id of a conversation that another tab wrote or removed. */
  onChange(callback) {
    this.#channel.addEventListener("message", ({ data }) => callback(data));
  }

  /** {id, title, updated, revision, size} of each, the newest first. */
  async heads() {
    const all = await result(this.#database.transaction("heads").objectStore("heads").getAll());
    return all.sort((one, other) => other.updated - one.updated);
  }

  /** A conversation, or null. */
  async read(id) {
    const transaction = this.#database.transaction(STORES);
    const [head, body] = await Promise.all(STORES.map((store) => result(transaction.objectStore(store).get(id))));
    if (!head || !body) return null;
    return { id, title: String(head.title), revision: Number(head.revision) || 0, turns: checkedTurns(body.turns) };
  }

  /**
   * Writes a conversation. Where another tab has written it since it was read, both are kept: this one becomes a branch
   * (its id and title change), and true says so. Without turns it is removed.
   */
  write(conversation) {
    const written = this.#written.catch(() => null).then(() => this.#write(conversation));
    this.#written = written;
    return written;
  }

  async #write(conversation) {
    if (!conversation.turns.length) {
      if (conversation.revision) await this.remove(conversation.id);
      conversation.revision = 0;
      return false;
    }
    const body = JSON.stringify(conversation.turns);
    const transaction = this.#database.transaction(STORES, "readwrite");
    const done = finished(transaction);
    const [heads, bodies] = STORES.map((store) => transaction.objectStore(store));
    const known = await result(heads.getAll());
    const stored = known.find(({ id }) => id === conversation.id);
    const isElsewhere = (stored?.revision ?? 0) > conversation.revision;
    if (isElsewhere) Object.assign(conversation, branchOf(conversation, 0), { turns: conversation.turns });
    try {
      this.#refuseOverflow(known.filter(({ id }) => id !== conversation.id), body.length);
    } catch (error) {
      transaction.abort();
      await done.catch(() => null);
      throw error;
    }
    const { id } = conversation;
    const revision = conversation.revision + 1;
    heads.put({ id, title: titleOf(conversation), updated: Date.now(), revision, size: body.length });
    bodies.put({ id, turns: JSON.parse(body) });
    await done.catch((error) => {
      throw new ShelfFullError(`This browser has no room for the conversation (${error?.name ?? "unknown error"}).`);
    });
    conversation.revision = revision;
    this.#channel.postMessage(id);
    return isElsewhere;
  }

  async remove(id) {
    const transaction = this.#database.transaction(STORES, "readwrite");
    for (const store of STORES) transaction.objectStore(store).delete(id);
    await finished(transaction);
    this.#channel.postMessage(id);
  }

  #refuseOverflow(others, size) {
    const used = others.reduce((sum, head) => sum + (Number(head.size) || 0), size);
    const { conversations, characters } = this.#limits;
    if (others.length >= conversations) {
      throw new ShelfFullError(`This browser keeps ${conversations} conversations at most.`);
    }
    if (used > characters) {
      throw new ShelfFullError(`This browser keeps ${Math.round(characters / 1e6)} MB of conversations at most.`);
    }
  }
}
