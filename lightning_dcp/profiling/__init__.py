"""Measuring a model: two layers of it, a few sizes, no trace left (paper 3.5)."""

from lightning_dcp.profiling.flops import count_flops
from lightning_dcp.profiling.measure import Survey, measure
from lightning_dcp.profiling.obtain import obtain_profile
from lightning_dcp.profiling.probe import Subject
from lightning_dcp.profiling.probes import LengthProbes, Probe, plan_probes
from lightning_dcp.profiling.snapshot import ProbeSideEffectError, untouched
from lightning_dcp.profiling.static import static_bytes
from lightning_dcp.profiling.store import Wanted, load_or_measure, profile_identity, write_profile

__all__ = [
    "LengthProbes",
    "Probe",
    "ProbeSideEffectError",
    "Subject",
    "Survey",
    "Wanted",
    "count_flops",
    "load_or_measure",
    "measure",
    "obtain_profile",
    "plan_probes",
    "profile_identity",
    "static_bytes",
    "untouched",
    "write_profile",
]
