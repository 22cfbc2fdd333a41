"""What vLLM calls in each of its processes."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed in this environment")
pytestmark = pytest.mark.vllm

from c2t_plugin.engines import learning  # noqa: E402
from c2t_plugin.engines.vllm.plugin import log_as_vllm  # noqa: E402


@pytest.fixture
def vllms() -> Iterator[io.StringIO]:
    """What vLLM's log says, as it is set up without options."""
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("c2t_plugin")
    before = [(each, each.handlers, each.propagate, each.level) for each in (theirs, ours)]
    said = io.StringIO()
    theirs.handlers, theirs.propagate = [logging.StreamHandler(said)], False
    theirs.setLevel(logging.INFO)
    # as if no engine of this process had registered us
    ours.handlers, ours.propagate = [], True
    ours.setLevel(logging.NOTSET)
    yield said
    for each, handlers, propagate, level in before:
        each.handlers, each.propagate = handlers, propagate
        each.setLevel(level)


def test_what_is_learnt_is_said_in_vllms_log(vllms: io.StringIO):
    learning.logger.info("C2T: lost")
    for _ in range(2):
        log_as_vllm()
    learning.logger.info("C2T: learnt from 32 draft tokens")
    learning.logger.debug("C2T: too much")
    assert vllms.getvalue() == "C2T: learnt from 32 draft tokens\n"


def test_a_log_of_the_users_own_stays(vllms: io.StringIO):
    """VLLM_CONFIGURE_LOGGING=0, or handlers of ours that somebody has set."""
    ours, mine = logging.getLogger("c2t_plugin"), logging.NullHandler()
    ours.handlers = [mine]
    log_as_vllm()
    assert ours.handlers == [mine]
    ours.handlers, ours.propagate = [], True
    logging.getLogger("vllm").handlers = []
    log_as_vllm()
    assert not ours.handlers and ours.propagate
