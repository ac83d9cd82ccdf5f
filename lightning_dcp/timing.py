"""When things happened: host clock on CPU, events on CUDA, read once per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass

import torch

from lightning_dcp.records import Span, StepTimes

Mark = float | torch.cuda.Event


class Marker:
    """Marks moments on one device and tells the seconds between them.

    On CUDA a mark is an event in the current stream, so that it stands where the device, not Python, arrives.

    Args:
        device: device that the work runs on.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"

    def now(self) -> Mark:
        """A mark of this moment; nothing is synchronised."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to a later one; on CUDA waits for the later one."""
        if isinstance(start, torch.cuda.Event):
            assert isinstance(end, torch.cuda.Event)
            end.synchronize()
            return float(start.elapsed_time(end)) / 1000.0
        assert not isinstance(end, torch.cuda.Event)
        return end - start


class SpanClock:
    """Records the spans of one step's micro-batches on this rank.

    On CUDA a pair of events per micro-batch goes into the current stream; nothing is synchronised until
    :meth:`spans` is asked for.

    Args:
        device: device that the micro-batches run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._marker = Marker(device)
        self._origin = self._marker.now()
        self._marks: list[tuple[Mark, Mark]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Measure one micro-batch, forward and backward."""
        start = self._marker.now()
        yield
        self._marks.append((start, self._marker.now()))

    def spans(self) -> tuple[Span, ...]:
        """All spans so far; on CUDA waits for the last one to end."""
        since = self._marker.between
        return tuple((since(self._origin, start), since(self._origin, end)) for start, end in self._marks)

    def elapsed(self) -> float:
        """Seconds since this clock was made."""
        return self._marker.between(self._origin, self._marker.now())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTimes:
    """Seconds of one rank from the vote of the step before to the first micro-batch.

    Attributes:
        update: reduction and optimizer of the step before.
        data: waiting for the loader.
        other: everything else before the first agreement.
        start: in the first agreement, where the ranks wait for the one that comes last.
        last: from the first agreement of the step before to its vote.
    """

    update: float
    data: float
    other: float
    start: float
    last: float = 0.0

    def summands(self, busy: float) -> tuple[float, ...]:
        """What is summed over the ranks for :func:`times_of_all`.

        The last four are weighted so that the rank that waited least, for which all others waited, outweighs them.
        """
        weight = (self.start + 1e-4) ** -4
        weighted = (weight, weight * self.data, weight * self.other, weight * self.start)
        return (busy, *astuple(self), *weighted)


def times_of_all(sums: Sequence[float], mine: RankTimes, seconds: float, world_size: int) -> StepTimes:
    """Where the time of all ranks went, from :meth:`RankTimes.summands` summed over them.

    The first agreement ends for all when the last rank arrives. What the others waited in it is waiting for data or
    other time, in the proportion in which the last rank had more of each than the mean of all ranks. What the last
    rank itself spent there is the agreement's own cost.

    From the first agreement to the vote all ranks take as long as this one, but for noise; what that made wrong in the
    step before is known from the sums, and put right in this one.

    Args:
        sums: the summands, summed.
        mine: those of this rank.
        seconds: from the first agreement to the vote on this rank.
        world_size: number of ranks.
    """
    busy, update, data, other, start, last, weight, *weighted = sums
    correction = last - world_size * mine.last
    of_last = [value / weight for value in weighted]
    cost = min(start, world_size * of_last[2])
    late = [max(0.0, of_last[i] - mean / world_size) for i, mean in enumerate((data, other))]
    waited, share = (start - cost, late[0] / sum(late)) if sum(late) > 0 else (0.0, 0.0)
    return StepTimes(
        busy=busy,
        idle=max(0.0, world_size * seconds + correction - busy),
        update=update + start - waited,
        data=data + waited * share,
        other=other + waited * (1.0 - share),
    )


class StepClock:
    """Divides the time of this rank between the votes of two steps; one for all steps of a run.

    Args:
        device: device that the steps run on.
        waited: seconds that were spent in the loader so far.
    """

    def __init__(self, device: torch.device, waited: Callable[[], float]) -> None:
        self._marker = Marker(device)
        self._waited = waited
        self._waited_before = 0.0
        self._last = 0.0
        self._voted: Mark | None = None
        self._updated: Mark | None = None
        self._resumed: Mark | None = None
        self._arrived: Mark | None = None
        self._begun: Mark | None = None

    def resume(self) -> None:
        """Leave out what happened since the last update, such as validation: it is no time of a step."""
        self._resumed = self._marker.now()
        self._waited_before = self._waited()

    def arrived(self) -> None:
        """Note that this rank comes to the first agreement of a step."""
        self._arrived = self._marker.now()

    def begun(self) -> None:
        """All ranks came."""
        self._begun = self._marker.now()

    def before_vote(self) -> RankTimes:
        """The times of the step that is about to end; to be called once per step."""
        assert self._arrived is not None
        assert self._begun is not None
        between = self._marker.between
        left = self._resumed if self._resumed is not None else self._updated
        outside = 0.0 if left is None else max(0.0, between(left, self._arrived))
        waited = self._waited()
        data = min(outside, waited - self._waited_before)
        self._waited_before = waited
        first = self._voted is None or self._updated is None
        update = 0.0 if first else between(self._voted, self._updated)  # type: ignore[arg-type]
        start = between(self._arrived, self._begun)
        return RankTimes(update=update, data=data, other=outside - data, start=start, last=self._last)

    def voted(self, seconds: float) -> None:
        """The vote is over, so many seconds after the first agreement; reduction and update follow."""
        self._last = seconds
        self._voted, self._updated, self._resumed = self._marker.now(), None, None

    def updated(self) -> None:
        """The update is done."""
        self._updated = self._marker.now()
