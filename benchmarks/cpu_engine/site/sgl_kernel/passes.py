"""How the stub's attention is computed: in as few calls as can be, by what all layers of a pass share.

Shapes are those of attention.py. On a CPU an operation of torch takes longer than the arithmetic of a few queries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

# Queries of a request up to which those of several heads are computed together.
FEW = 64
# Queries that are nobody's in a call of requests of unequal lengths, at most: another call takes more than they do.
MOST_FILLED = 64


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, sm_scale: float
) -> torch.Tensor:
    """Softmax attention of query [B, q, H, D] over key [B, L, G, D], value [B, L, G, E] under mask [B, q, L]."""
    batch, length, heads, _ = query.shape
    groups = key.shape[2]
    if not 1 < length <= FEW:
        gqa = heads != groups
        asked = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        found = scaled_dot_product_attention(*asked, attn_mask=mask[:, None], scale=sm_scale, enable_gqa=gqa)
        return found.transpose(1, 2)
    # Queries of the heads that share a key as rows of one head: half the time, since no key is repeated.
    share = heads // groups
    rows = query.unflatten(2, (groups, share)).permute(0, 2, 3, 1, 4).reshape(batch, groups, share * length, -1)
    seen = mask[:, None].expand(-1, share, -1, -1).reshape(batch, 1, share * length, -1)
    found = scaled_dot_product_attention(
        rows, key.transpose(1, 2), value.transpose(1, 2), attn_mask=seen, scale=sm_scale
    )
    return found.unflatten(2, (share, length)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def slots_of(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> torch.Tensor:
    """Slots [B, L] of the longest request's positions; those past a request's length are stale and must be masked."""
    return req_to_token[:, : int(seq_lens.max())].index_select(0, rows)


# Where keys and values are read to, by which of them and by type and shape of a token's: fresh pages would take several
# times as long as what is written to them.
_ROOMS: dict[tuple[Any, ...], torch.Tensor] = {}


def read(buffer: torch.Tensor, slots: torch.Tensor, which: str) -> torch.Tensor:
    """What stands in slots [B, L]: [B, L, ...], until the next call of `which`."""
    asked, kind = slots.reshape(-1), (which, buffer.dtype, *buffer.shape[1:])
    if kind not in _ROOMS or len(_ROOMS[kind]) < len(asked):
        _ROOMS[kind] = buffer.new_empty(len(asked), *buffer.shape[1:])
    found = torch.index_select(buffer, 0, asked, out=_ROOMS[kind][: len(asked)])
    return found.view(*slots.shape, *buffer.shape[1:])


class Part(NamedTuple):
    """Requests whose queries are computed in one call, of which shorter ones are filled up.

    slots: [B, L] of the first L positions. seen: [B, q, L] what each query sees. rows: of all queries those of each
    request, None for the first ones in their order. own: places of real queries among the B * q, None for all.
    """

    slots: torch.Tensor
    seen: torch.Tensor
    rows: torch.Tensor | None
    own: torch.Tensor | None

    def attend(
        self, query: torch.Tensor, buffers: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor, sm_scale: float
    ) -> None:
        """Fill in the rows of [T, H, E] output that are these requests'."""
        batch, length, _ = self.seen.shape
        count = batch * length
        asked = query[:count] if self.rows is None else query.index_select(0, self.rows)
        key, value = (read(buffer, self.slots, which) for buffer, which in zip(buffers, "kv", strict=True))
        found = attend(asked.unflatten(0, (batch, length)), key, value, self.seen, sm_scale)
        found = found.reshape(-1, *output.shape[1:])
        if self.rows is None:
            output[:count] = found
        elif self.own is None:
            output.index_copy_(0, self.rows, found)
        else:
            output.index_copy_(0, self.rows[self.own], found[self.own])


class Shared:
    """What layers of one pass have in common, made by the first and used by the others.

    A layer that comes again belongs to another pass, whose slots may be others while all else is the same. (To look at
    the slots of each layer would take longer than to read its keys.)
    """

    def __init__(self) -> None:
        self._asked: tuple[torch.Tensor, ...] = ()
        self._how: Any = None
        self._table: torch.Tensor | None = None
        # kept, so that no other has the place of one
        self._layers: list[torch.Tensor] = []
        self._made: Any = None

    def get(
        self,
        layer: torch.Tensor,
        table: torch.Tensor,
        asked: tuple[torch.Tensor, ...],
        make: Callable[[], Any],
        how: Any = None,
    ) -> Any:
        """layer: its keys. table, asked, how: all that `make` depends on."""
        alike = table is self._table and how == self._how and len(asked) == len(self._asked)
        again = any(layer is each for each in self._layers)
        if again or not (alike and all(map(torch.equal, asked, self._asked))):
            self._table, self._asked, self._how = table, tuple(each.clone() for each in asked), how
            self._layers, self._made = [], make()
        self._layers.append(layer)
        return self._made


def parts_of(
    lengths: list[int],
    starts: list[int],
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    tree_mask: torch.Tensor | None,
    is_causal: bool,
) -> list[Part]:
    """What to call for queries of so many a request, the first of each at `starts`. slots: [B, L], see slots_of."""
    trees = None if tree_mask is None else tree_mask.split([length**2 for length in lengths])
    found = []
    for requests in _together(lengths):
        some, new = torch.tensor(requests), torch.tensor([lengths[request] for request in requests])[:, None]
        lens, places = seq_lens[some][:, None], torch.arange(int(new.max()))
        # a query that is nobody's is its request's last one again
        query, prefix = torch.minimum(places, new - 1), lens - new
        positions = torch.arange(int(lens.max()))
        if trees is not None:
            seen = (positions < prefix[..., None]).repeat(1, len(places), 1)
            for row, request in enumerate(requests):
                first, mask = int(prefix[row]), trees[request].view(lengths[request], -1).bool()
                seen[row, :, first : first + len(mask)] = mask[query[row]]
        else:
            last = prefix + query if is_causal else (lens - 1).expand_as(query)
            seen = positions <= last[..., None]
        rows = (torch.tensor([starts[request] for request in requests])[:, None] + query).flatten()
        own = (places < new).flatten().nonzero().flatten()
        straight, full = torch.equal(rows, torch.arange(len(rows))), len(own) == len(rows)
        kept = slots[some, : len(positions)]
        found.append(Part(kept, seen, None if straight else rows, None if full else own))
    return found


def _together(lengths: list[int]) -> list[list[int]]:
    """Requests to compute in one call each, those of length 0 left out: all where filling the shorter ones up takes
    less than another call would, as in decoding, else those of one length."""
    some = [request for request, length in enumerate(lengths) if length]
    if not some:
        return []
    if max(lengths) * len(some) - sum(lengths) <= MOST_FILLED:
        return [some]
    found: dict[int, list[int]] = {}
    for request in some:
        found.setdefault(lengths[request], []).append(request)
    return list(found.values())
