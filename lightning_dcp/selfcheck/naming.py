"""Run a case again, recorded, to name the module that is to blame."""

from __future__ import annotations

from lightning_dcp.selfcheck.overlay import Difference, first_in_padding, first_in_repetition, first_in_shards
from lightning_dcp.selfcheck.recording import Recording, recorded
from lightning_dcp.selfcheck.results import Case
from lightning_dcp.selfcheck.runs import Bench
from lightning_dcp.selfcheck.samples import Row, Samples

_NOT_A_MODULE = (
    "No module's input or output differs, so look at what training_step computes outside of them: the loss, its "
    "mean and what is counted"
)


class Naming:
    """Finds the first module whose input or output differs; called by every rank, equal on all.

    Args:
        bench: where cases run.
        samples: the micro-batches.
        threshold: relative difference of a tensor that counts.
    """

    def __init__(self, bench: Bench, samples: Samples, threshold: float) -> None:
        self._bench = bench
        self._samples = samples
        self._threshold = threshold

    def padding(self) -> str:
        """Where padding first has an effect, as a sentence."""
        singles, pair = self._samples.singles, self._samples.pair
        alone, together = self._here(Case(rows=singles)), self._here(Case(rows=(pair,)))
        return self._first(first_in_padding(alone, together, singles, pair, self._threshold))

    def sharding(self, rows: tuple[Row, ...], sp_size: int) -> str:
        """Where shards first are no parts of the whole, as a sentence."""
        shards = Recording()
        self._bench.run(Case(rows=rows, sp_size=sp_size), recorded(self._bench.module, shards))
        block = self._bench.block(sp_size)
        found: Difference | None = None
        if self._bench.rank in block:
            if shards.refused:
                found = Difference(
                    order=(-1, 0, 0), text=f"an exchange that {shards.named(shards.refused[0])} asks for"
                )
            else:
                place = self._bench.rank - block[0]
                whole = self._here(Case(rows=rows))
                found = first_in_shards(whole, shards, rows, sp_size, place, self._threshold)
        return self._first(found)

    def recompute(self, rows: tuple[Row, ...], sp_size: int) -> str:
        """Where a recompute first is not the forward, as a sentence."""
        recording = Recording()
        case = Case(rows=rows, sp_size=sp_size, recompute=self._bench.num_layers)
        self._bench.run(case, recorded(self._bench.module, recording))
        return self._first(first_in_repetition(recording, recording, self._threshold, recompute=True))

    def randomness(self) -> str:
        """Where the seed first has an effect, as a sentence."""
        rows = self._samples.singles
        once, again = self._here(Case(rows=rows)), self._here(Case(rows=rows, step=1))
        return self._first(first_in_repetition(once, again, self._threshold))

    def _here(self, case: Case) -> Recording:
        recording = Recording()
        self._bench.run_here(case, recorded(self._bench.module, recording))
        return recording

    def _first(self, mine: Difference | None) -> str:
        everyone = [found for found in self._bench.everyone(mine) if found is not None]
        if not everyone:
            return _NOT_A_MODULE
        return f"The first difference is in {min(everyone, key=lambda found: found.order).text}"
