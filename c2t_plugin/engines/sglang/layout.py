"""Between C2T's chains and SGLang's tensors. Imports no engine."""

from __future__ import annotations

from torch import Tensor


def cut_links(retrieve_next_token: Tensor, kept: Tensor) -> None:
    """Take out, in place, the link behind each request's last kept draft token.

    retrieve_next_token: (rows, width) int64, the engine's first-child links; node 0 is the root, -1 is no child.
    kept: (rows,) int32 in [0, width - 1].
    """
    retrieve_next_token.scatter_(1, kept.long().unsqueeze(1), -1)
