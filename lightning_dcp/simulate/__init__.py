"""What a cluster would do: planners over the lengths of a dataset on a virtual cluster, without GPU and torch.

All planners train the same samples, so that their tokens per second can be compared::

    cluster = Cluster.build(profile, world_size=32, memory_bytes=80 * 10**9)
    for result in compare(shapes, cluster, [create("bucket"), create("balanced")], steps=50, global_batch_size=512):
        print(result.planner, result.tokens_per_second, result.ratio_to_bucket)
"""

from __future__ import annotations

from lightning_dcp.planners.adapting import for_dataset
from lightning_dcp.simulate.cluster import Cluster
from lightning_dcp.simulate.comparison import compare, with_ratios
from lightning_dcp.simulate.needs import LongestSample, check_lengths, longest_sample
from lightning_dcp.simulate.plain import tuned_static
from lightning_dcp.simulate.plans import plan_record
from lightning_dcp.simulate.price import Deadline, hours_needed, own_work, smallest_world
from lightning_dcp.simulate.run import simulate
from lightning_dcp.simulate.tally import Simulation

__all__ = [
    "Cluster",
    "Deadline",
    "LongestSample",
    "Simulation",
    "check_lengths",
    "compare",
    "for_dataset",
    "hours_needed",
    "longest_sample",
    "own_work",
    "plan_record",
    "simulate",
    "smallest_world",
    "tuned_static",
    "with_ratios",
]
