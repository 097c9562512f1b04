"""What is started in place of the program by tests/warm.py: hands its streams, environment and connection to mpiexec to
the process that has imported everything, and ends as the fork that becomes the program. Twenty milliseconds."""

import json
import os
import signal
import socket
import sys

signal.signal(signal.SIGINT, signal.SIG_DFL)
descriptors = [0, 1, 2]
if "PMI_FD" in os.environ:  # MPICH's connection to its launcher
    descriptors.append(int(os.environ["PMI_FD"]))
umask = os.umask(0)
request = json.dumps([sys.argv[2], sys.argv[3:], dict(os.environ), os.getcwd(), umask]).encode()
with socket.socket(socket.AF_UNIX) as connection:
    sockets = sys.argv[1].split(":")
    connection.connect(sockets[int(os.environ.get("PMI_RANK", 0)) % len(sockets)])
    socket.send_fds(connection, [len(request).to_bytes(4, "little")], descriptors)
    connection.sendall(request)
    status = json.loads(connection.recv(16))
sys.exit(128 - status if status < 0 else status)
