"""Ports for servers that this process starts."""

from __future__ import annotations

import socket

import pytest

from benchmarks.serving import process as server_process


def test_a_free_port_is_one_that_no_outgoing_connection_is_given(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind((server_process.HOST, server_process.free_port()))
        port = taken.getsockname()[1]
        assert port in server_process.PORTS
        monkeypatch.setattr(server_process, "PORTS", range(port, port + 1))
        with pytest.raises(server_process.ServerError, match=f"no port from {port} to {port} is free"):
            server_process.free_port()
    assert server_process.free_port() == port
