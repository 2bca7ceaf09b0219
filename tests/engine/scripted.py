"""A runner with scripted tokens: the engine around it is the real one."""

import threading

from onebox.engine.step import StepPlan, Result, StepOutput


class ScriptedRunner:
    """Answers with `script` from its beginning, token by token, and then over again; checks that no token is lost.

    `gate` holds every step until it is set. A prompt token equal to `fails_on` raises in its piece.
    """

    vocab_size = 384

    def __init__(self, script=(1, 2, 3), fails_on=None):
        self.script = script
        self.fails_on = fails_on
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[StepPlan] = []
        self._held: dict[int, int] = {}
        self._drawn: dict[str, int] = {}

    def run(self, batch, meanwhile):
        meanwhile()
        self.gate.wait()
        self.batches.append(batch)
        for slot in batch.cleared_slots:
            self._held[slot] = 0
        pieces = tuple(self._piece(piece) for piece in batch.pieces)
        return StepOutput(pieces, tuple(self._rows(rows) for rows in batch.rows))

    @property
    def pieces(self):
        """Every piece of a prompt that was computed."""
        return [piece for batch in self.batches for piece in batch.pieces]

    def _piece(self, piece):
        assert self._held[piece.slot] == piece.start, "a token was skipped or fed twice"
        self._held[piece.slot] = piece.end
        if self.fails_on in piece.token_ids:
            return ArithmeticError("a scripted failure")
        return Result(self._next(piece.request_id) if piece.draw else ())

    def _rows(self, rows):
        assert self._held[rows.slot] == rows.start, "a token was skipped or fed twice"
        self._held[rows.slot] = rows.end
        return Result(self._next(rows.request_id), num_kept=1)

    def _next(self, request_id):
        index = self._drawn.get(request_id, 0)
        self._drawn[request_id] = index + 1
        return (self.script[index % len(self.script)],)
