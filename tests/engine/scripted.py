"""A runner with scripted tokens: the engine around it is the real one."""

import threading

from onebox.engine.batch import Batch, StepOutput


class ScriptedRunner:
    """Answers with `script` from its beginning, token by token, and then over again; keeps account of its slots.

    `gate` holds every step until it is set. A prompt token equal to `fails_on` raises in its row.
    """

    vocab_size = 384

    def __init__(self, script=(1, 2, 3), fails_on=None):
        self.script = script
        self.fails_on = fails_on
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[Batch] = []
        self.in_use: dict[int, int] = {}
        self._drawn: dict[int, int] = {}

    def run(self, batch):
        self.gate.wait()
        self.batches.append(batch)
        return StepOutput(tuple(self._row(row) for row in batch.rows))

    def release(self, slot):
        del self.in_use[slot]

    def _row(self, row):
        if row.start == 0:
            assert row.slot not in self.in_use, "a slot was given away while held"
            self.in_use[row.slot], self._drawn[row.slot] = 0, 0
        assert self.in_use[row.slot] == row.start, "a token was skipped or fed twice"
        self.in_use[row.slot] = row.end
        if self.fails_on in row.token_ids:
            return ArithmeticError("a scripted failure")
        if row.sampling is None:
            return ()
        index, self._drawn[row.slot] = self._drawn[row.slot], self._drawn[row.slot] + 1
        return (self.script[index % len(self.script)],)
