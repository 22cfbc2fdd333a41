"""What of SGLang's verifies requests of one length only, where, and what would change that. Imported when asked."""

from __future__ import annotations

from typing import Any

# By class: where in 0.5.23, below layers/attention.
_PLACES = {
    "GDNAttnBackend": "linear/gdn_backend.py:1042 divides rows by the width; SGLang 38897, open, changes that",
    "Mamba2AttnBackend": "mamba/mamba.py:670 lays rows out by the width",
    "DeepseekSparseAttnBackend": "dsa_backend.py:1101 gives each request the width; SGLang 32010, open, changes that",
}
# Linear layers whose verification takes lengths, and the one of its kernels that is known to.
_LINEAR, _KERNEL = "KDAAttnBackend", "TritonKDAKernel"


def reason(backend: Any) -> str:
    """backend: of attention, that packs no rows."""
    kind, version = type(backend).__name__, getattr(backend, "fa_impl_ver", 3)
    if version != 3:
        return f"{kind} by fa{version} has not been tried on packed rows: use --attention-backend fa3 where it runs"
    where = f" ({_PLACES[kind]})" if kind in _PLACES else ""
    return f"{kind} verifies requests of one length only{where}"


def linear_obstacle(linear: Any, masked: bool) -> str | None:
    """Why rows cannot be packed beside these linear layers; None: they can. linear: their backend. masked: of trees.

    KDA lays packed rows out as windows itself and keeps the state behind each row, of which SGLang takes the one behind
    the last accepted row; of its kernels one takes where each request's rows begin.
    """
    kind = type(linear).__name__
    if kind != _LINEAR:
        return reason(linear)
    kernel = type(linear.kernel_dispatcher.verify_kernel).__name__
    if kernel != _KERNEL:
        return f"{kind} is packed by {_KERNEL} only, not by {kernel}: leave --linear-attn-verify-backend out"
    return f"{kind} is packed for chains only" if masked else None
