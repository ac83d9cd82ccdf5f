"""Short ways to write a setting on the command line, turned into what jsonargparse understands."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_dcp.planners import PLANNERS, class_path_of

STRATEGY = "lightning_dcp.DCPStrategy"
_STRATEGY_KEYS = ("--trainer.strategy", "--trainer.strategy.class_path")
_PLANNER_KEYS = tuple(
    f"--trainer.strategy{inner}.planner{own}" for inner in ("", ".init_args") for own in ("", ".class_path")
)


def written_out(words: Sequence[str]) -> list[str]:
    """The words, with the strategy's name as a class path, and those of planners where options of theirs follow.

    ``--trainer.strategy=dcp --trainer.strategy.memory_limit=20GB`` and ``--trainer.strategy.planner=static
    --trainer.strategy.planner.sp_size=2`` are refused by jsonargparse, since text has no options.
    """
    found = _renamed(list(words), _STRATEGY_KEYS, {"dcp": STRATEGY, "DCPStrategy": STRATEGY})
    if any(_has_option_of(found, f"{key}.") for key in _PLANNER_KEYS):
        found = _renamed(found, _PLANNER_KEYS, {name: class_path_of(name) for name in PLANNERS})
    return found


def _has_option_of(words: Sequence[str], prefix: str) -> bool:
    return any(word.startswith(prefix) for word in words)


def _renamed(words: Sequence[str], keys: Sequence[str], names: dict[str, str]) -> list[str]:
    """The words with the values of some keys replaced, in both forms: ``--key=value`` and ``--key value``."""
    found: list[str] = []
    for word in words:
        key, equals, value = word.partition("=")
        if equals and key in keys:
            found.append(f"{key}={names.get(value, value)}")
        else:
            found.append(names.get(word, word) if found and found[-1] in keys else word)
    return found
