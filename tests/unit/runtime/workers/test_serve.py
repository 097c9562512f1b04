"""A worker process by itself."""

import socket

import pytest

from rlhf_spmd.runtime.workers.serve import lines_of


def test_a_rank_that_ends_without_reading_the_answer_is_no_error():
    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(b"an answer")
        ours.sendall(b"a line\n")
        ours.close()  # with unread data, so that the worker's next read is reset
        assert list(lines_of(theirs)) == ["a line\n"]
        with pytest.raises(ConnectionResetError):  # so that this is not a connection that was merely closed
            again, other = socket.socketpair()
            other.sendall(b"an answer")
            again.close()
            other.recv(1)
        other.close()
