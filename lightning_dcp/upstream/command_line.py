"""The types of the command line's settings."""

from __future__ import annotations

from typing import Any, Union, get_args


def sort_types(parser: Any) -> None:
    """Put the types of a command line's settings into an order in which each can be reached.

    Of several types jsonargparse takes the first that a text can be read as:

    - ``--trainer.limit_val_batches=1`` means one batch. Lightning says ``Optional[Union[int, float]]``, but ``typing``
      keeps what it made of equal arguments, and unions are equal in any order: after an ``Optional[Union[float, int]]``
      elsewhere in Lightning the 1 is a 1.0, all batches.
    - ``--trainer.strategy=lightning_dcp.DCPStrategy`` means the class; ``Union[str, Strategy]`` makes a name of it.

    Args:
        parser: of jsonargparse, with its arguments added.
    """
    for action in parser._actions:
        types = get_args(getattr(action, "_typehint", None))
        if int in types and float in types and types.index(float) < types.index(int):
            action._typehint = Union[(int, float, *(t for t in types if t not in (int, float)))]
        if action.dest == "trainer.strategy" and str in types:
            action._typehint = Union[(*(t for t in types if t is not str), str)]
