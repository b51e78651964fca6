"""A fake Cloud TPU API and the SSH servers of TPU hosts, on loopback.

The API is a gRPC server that speaks the real client's messages.  It measures time in requests: a
TPU that is ready after three polls takes three polls, however fast the machine is.
"""

import contextlib
import itertools
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import paramiko
from google.api_core.client_options import ClientOptions
from google.auth.credentials import AnonymousCredentials
from google.cloud import tpu_v2
from google.cloud.tpu_v2.services.tpu.transports import TpuGrpcTransport
from google.longrunning import operations_pb2
from google.protobuf import any_pb2, empty_pb2
from google.rpc import status_pb2
from paramiko.common import AUTH_FAILED, AUTH_SUCCESSFUL, OPEN_SUCCEEDED
from paramiko.sftp import SFTP_OK

Node = tpu_v2.Node
Queue = tpu_v2.QueuedResourceState.State
STOCKOUT = "There is no more capacity in the zone 'europe-west4-a'"
TYPES = ("v3-8", "v4-8", "v4-16", "v5litepod-8", "v6e-8")
RUNTIMES = ("tpu-ubuntu2204-base", "v2-alpha-tpuv6e")


def client(address: str) -> tpu_v2.TpuClient:
    """Return the real client on an insecure loopback channel, without credentials."""
    transport = TpuGrpcTransport(
        host=address,
        channel=grpc.insecure_channel(address),
        credentials=AnonymousCredentials(),  # type: ignore[no-untyped-call]
    )
    return tpu_v2.TpuClient(transport=transport, client_options=ClientOptions())


class FakeTpuApi:
    """The TPUs of one project, which a test controls through the attributes.

    Attributes:
      ready_after, queue_after: polls until a TPU is ready, and until a queued one is created; None
        for never.
      addresses: the hosts of a new TPU.
      create_seconds: duration of a request to create a TPU, which takes effect halfway.
      create_errors: errors for the next requests to create a TPU, (code, message).  With the third
        element "later", the operation fails instead of the request.  With "lost", the TPU is
        created all the same.
      without_capacity: accelerator types for which requests are refused.
      delete_errors, read_errors: errors for the next requests to delete and to read a TPU.

    Args:
      tls: a key and its certificate, as PEM.
    """

    def __init__(self, tls: tuple[bytes, bytes] | None = None) -> None:
        self.nodes: dict[str, Node] = {}
        self.queue: dict[str, tpu_v2.QueuedResource] = {}
        self.operations: dict[str, operations_pb2.Operation] = {}
        self.ready_after: int | None = 2
        self.queue_after: int | None = 2
        self.gone_after = 1
        self.create_errors: list[tuple[Any, ...]] = []
        self.delete_errors: list[tuple[Any, ...]] = []
        self.read_errors: list[tuple[Any, ...]] = []
        self.create_seconds = 0.0
        self.without_capacity: set[str] = set()
        self.addresses = ["127.0.0.1"]
        self.host_keys: list[list[tuple[str, str]]] = []  # by host
        self.calls: list[str] = []
        self.requests: list[Any] = []
        self.authorizations: set[str] = set()
        self.polls: dict[str, int] = {}
        self._numbers = itertools.count()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers(self._handlers())
        anywhere = "127.0.0.1:0"
        if tls is None:
            port = self._server.add_insecure_port(anywhere)
        else:
            port = self._server.add_secure_port(anywhere, grpc.ssl_server_credentials([tls]))
        self.address = f"127.0.0.1:{port}"

    def __enter__(self) -> "FakeTpuApi":
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(0.5).wait()

    def client(self) -> tpu_v2.TpuClient:
        return client(self.address)

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        operation = operations_pb2.Operation.SerializeToString
        methods: dict[str, tuple[Callable[..., Any], Any, Callable[..., bytes]]] = {
            "GetNode": (self._get_node, tpu_v2.GetNodeRequest, Node.serialize),
            "CreateNode": (self._create_node, tpu_v2.CreateNodeRequest, operation),
            "DeleteNode": (self._delete_node, tpu_v2.DeleteNodeRequest, operation),
            "GetQueuedResource": (
                self._get_queued,
                tpu_v2.GetQueuedResourceRequest,
                tpu_v2.QueuedResource.serialize,
            ),
            "CreateQueuedResource": (
                self._create_queued,
                tpu_v2.CreateQueuedResourceRequest,
                operation,
            ),
            "DeleteQueuedResource": (
                self._delete_queued,
                tpu_v2.DeleteQueuedResourceRequest,
                operation,
            ),
            "GetGuestAttributes": (
                self._guest_attributes,
                tpu_v2.GetGuestAttributesRequest,
                tpu_v2.GetGuestAttributesResponse.serialize,
            ),
            "ListAcceleratorTypes": (
                lambda request, context: tpu_v2.ListAcceleratorTypesResponse(
                    accelerator_types=[{"type_": value} for value in TYPES]
                ),
                tpu_v2.ListAcceleratorTypesRequest,
                tpu_v2.ListAcceleratorTypesResponse.serialize,
            ),
            "ListRuntimeVersions": (
                lambda request, context: tpu_v2.ListRuntimeVersionsResponse(
                    runtime_versions=[{"version": value} for value in RUNTIMES]
                ),
                tpu_v2.ListRuntimeVersionsRequest,
                tpu_v2.ListRuntimeVersionsResponse.serialize,
            ),
        }
        tpu = {
            name: grpc.unary_unary_rpc_method_handler(
                self._counted(name, function), request.deserialize, reply
            )
            for name, (function, request, reply) in methods.items()
        }
        get = grpc.unary_unary_rpc_method_handler(
            lambda request, context: self.operations[request.name],
            operations_pb2.GetOperationRequest.FromString,
            operation,
        )
        return [
            grpc.method_handlers_generic_handler("google.cloud.tpu.v2.Tpu", tpu),
            grpc.method_handlers_generic_handler(
                "google.longrunning.Operations", {"GetOperation": get}
            ),
        ]

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            self.calls.append(name)
            self.requests.append(request)
            metadata = dict(context.invocation_metadata())
            self.authorizations.add(metadata.get("authorization", ""))
            return function(request, context)

        return call

    def _operation(self, error: tuple[Any, ...] | None = None) -> operations_pb2.Operation:
        """Return a new operation: one that `_end` completes, or one that failed with `error`."""
        name = f"projects/p/operations/{next(self._numbers)}"
        operation = operations_pb2.Operation(name=name)
        if error:
            operation.done = True
            operation.error.CopyFrom(status_pb2.Status(code=error[0].value[0], message=error[1]))
        self.operations[name] = operation
        return operation

    def _end(self, name: str, result: Any) -> None:
        packed = any_pb2.Any()
        packed.Pack(result)
        self.operations[name].response.CopyFrom(packed)
        self.operations[name].done = True

    def _polled(self, name: str) -> int:
        self.polls[name] = self.polls.get(name, 0) + 1
        return self.polls[name]

    def _missing(self, name: str, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.NOT_FOUND, f"Resource '{name}' was not found")

    def _get_node(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.read_errors:
            context.abort(*self.read_errors.pop(0))
        node = self.nodes.get(request.name)
        if node is None:
            return self._missing(request.name, context)
        polls = self._polled(request.name)
        if node.state == Node.State.DELETING and polls > self.gone_after:
            del self.nodes[request.name]
            return self._missing(request.name, context)
        due = self.ready_after is not None and polls >= self.ready_after
        if node.state == Node.State.CREATING and due:
            node.state = Node.State.READY
            self._end(node.description, Node.pb(node))
        return node

    def _new_node(self, name: str, node: Node, operation: str) -> None:
        node.name, node.state = name, Node.State.CREATING
        node.description = operation
        node.network_endpoints = [
            tpu_v2.NetworkEndpoint(ip_address=address) for address in self.addresses
        ]
        self.nodes[name] = node
        self.polls[name] = 0

    def _refused(self, context: grpc.ServicerContext) -> operations_pb2.Operation | None:
        """Fail with the next of `create_errors`: abort, or return a failed operation; else None."""
        if not self.create_errors or self.create_errors[0][2:] == ("lost",):
            return None
        error = self.create_errors.pop(0)
        if error[2:] == ("later",):
            return self._operation(error)
        context.abort(error[0], error[1])
        return None

    def _create_node(self, request: Any, context: grpc.ServicerContext) -> Any:
        name = f"{request.parent}/nodes/{request.node_id}"
        if name in self.nodes:
            context.abort(grpc.StatusCode.ALREADY_EXISTS, f"{name} already exists")
        refused = self._refused(context)
        if refused is not None:
            return refused
        if request.node.accelerator_type not in TYPES:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f'Accelerator type "{request.node.accelerator_type}" not found.',
            )
        operation = self._operation()
        time.sleep(self.create_seconds / 2)
        if request.node.accelerator_type in self.without_capacity:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, STOCKOUT)
        self._new_node(name, request.node, operation.name)
        time.sleep(self.create_seconds / 2)
        if self.create_errors:
            context.abort(*self.create_errors.pop(0)[:2])
        return operation

    def _delete_node(self, request: Any, context: grpc.ServicerContext) -> Any:
        if self.delete_errors:
            context.abort(*self.delete_errors.pop(0))
        if request.name not in self.nodes:
            return self._missing(request.name, context)
        self.nodes[request.name].state = Node.State.DELETING
        self.polls[request.name] = 0
        operation = self._operation()
        self._end(operation.name, empty_pb2.Empty())
        return operation

    def _create_queued(self, request: Any, context: grpc.ServicerContext) -> Any:
        name = f"{request.parent}/queuedResources/{request.queued_resource_id}"
        refused = self._refused(context)
        if refused is not None:
            return refused
        resource = request.queued_resource
        resource.name, resource.state.state = name, Queue.WAITING_FOR_RESOURCES
        self.queue[name] = resource
        self.polls[name] = 0
        operation = self._operation()
        self._end(operation.name, tpu_v2.QueuedResource.pb(resource))
        return operation

    def _get_queued(self, request: Any, context: grpc.ServicerContext) -> Any:
        resource = self.queue.get(request.name)
        if resource is None:
            return self._missing(request.name, context)
        polls = self._polled(request.name)
        state = resource.state.state
        if state == Queue.DELETING and polls > self.gone_after:
            del self.queue[request.name]
            return self._missing(request.name, context)
        due = self.queue_after is not None and polls >= self.queue_after
        if state == Queue.WAITING_FOR_RESOURCES and due:
            resource.state.state = Queue.ACTIVE
            spec = resource.tpu.node_spec[0]
            node = Node.deserialize(Node.serialize(spec.node))
            name = f"{spec.parent}/nodes/{spec.node_id}"
            self._new_node(name, node, self._operation().name)
        return resource

    def _delete_queued(self, request: Any, context: grpc.ServicerContext) -> Any:
        resource = self.queue.get(request.name)
        if resource is None:
            return self._missing(request.name, context)
        spec = resource.tpu.node_spec[0]
        node = f"{spec.parent}/nodes/{spec.node_id}"
        if node in self.nodes and not request.force:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the queued resource has a node")
        self.nodes.pop(node, None)
        resource.state.state = Queue.DELETING
        self.polls[request.name] = 0
        operation = self._operation()
        self._end(operation.name, empty_pb2.Empty())
        return operation

    def _guest_attributes(self, request: Any, context: grpc.ServicerContext) -> Any:
        host = int(request.worker_ids[0])
        keys = self.host_keys[host] if host < len(self.host_keys) else []
        items = [{"namespace": "hostkeys", "key": kind, "value": text} for kind, text in keys]
        return tpu_v2.GetGuestAttributesResponse(
            guest_attributes=[{"query_value": {"items": items}}]
        )

    def preempt(self) -> None:
        """Take every TPU away, as the service does with spot TPUs."""
        for node in self.nodes.values():
            node.state = Node.State.PREEMPTED
        for resource in self.queue.values():
            resource.state.state = Queue.SUSPENDED
            self.nodes.clear()


class FakeHost(paramiko.ServerInterface):
    """An SSH server on loopback with real commands and files, in a folder that is the user's home.

    Commands run with `environment`, or with this process's own if it is None.  While `silent` is
    set, the server accepts commands and files but does not answer.
    """

    def __init__(
        self,
        home: Path,
        user: str,
        public_key: str,
        address: str = "127.0.0.1",
        port: int = 0,
        environment: dict[str, str] | None = None,
    ):
        self.home, self.user, self.address = home, user, address
        self._environment = environment
        self.silent = threading.Event()
        self._public = public_key.split()[1]
        self.host_key = paramiko.ECDSAKey.generate()
        self.commands: list[str] = []
        self.modes_at_first_write: list[int] = []
        self._busy_until = 0.0
        self._socket = socket.create_server((address, port))
        self.port = self._socket.getsockname()[1]
        self._transports: list[paramiko.Transport] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> "FakeHost":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self.silent.clear()
        self.cut()
        self._thread.join(5)
        kill_marked(self._mark)

    @property
    def _mark(self) -> str:
        """Return a text that only the environments of this host's processes contain."""
        return f"HOME={self.home}\0"

    def cut(self) -> None:
        """Close every connection, as if the host was taken away."""
        for transport in self._transports:
            transport.close()

    def new_key(self) -> None:
        """Change the host key, as if another machine took over the address."""
        self.cut()
        self.host_key = paramiko.ECDSAKey.generate()

    def pause_for(self, seconds: float) -> None:
        """Refuse connections for some seconds, like a host that is still starting."""
        self._busy_until = time.monotonic() + seconds

    def published(self) -> list[tuple[str, str]]:
        return [(self.host_key.get_name(), self.host_key.get_base64())]

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                if time.monotonic() < self._busy_until:
                    connection.close()
                    continue
                transport = paramiko.Transport(connection)
                transport.add_server_key(self.host_key)
                transport.set_subsystem_handler("sftp", paramiko.SFTPServer, _Files, self)
                self._transports.append(transport)
                with contextlib.suppress(paramiko.SSHException, EOFError):
                    transport.start_server(server=self)

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = username == self.user and key.get_base64() == self._public
        return AUTH_SUCCESSFUL if known else AUTH_FAILED

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        self.commands.append(command.decode())
        threading.Thread(target=self._execute, args=(channel, command), daemon=True).start()
        return True

    def _login(self, channel: paramiko.Channel) -> dict[str, str]:
        """Return a command's environment, with SSH_CONNECTION as sshd sets it."""
        line: Any = channel.get_transport().sock
        ends = [*line.getpeername(), *line.getsockname()]
        base = dict(os.environ) if self._environment is None else self._environment
        connection = " ".join(str(end) for end in ends)
        return base | {"HOME": str(self.home), "SSH_CONNECTION": connection}

    def _execute(self, channel: paramiko.Channel, command: bytes) -> None:
        if self.silent.is_set():
            return
        process = subprocess.Popen(
            ["bash", "-c", command.decode()],
            cwd=self.home,
            env=self._login(channel),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        errors = threading.Thread(
            target=_pump, args=(process.stderr, channel.sendall_stderr), daemon=True
        )
        errors.start()
        _pump(process.stdout, channel.sendall)
        errors.join()
        status = process.wait()
        with contextlib.suppress(OSError):
            if status >= 0:  # sshd reports signals differently, and the client ignores it
                channel.send_exit_status(status)
            channel.close()


def kill_marked(mark: str) -> None:
    """Kill every process that has the mark in its environment, like a power cut."""
    for _ in range(3):  # repeated for processes that were just starting
        for process in Path("/proc").glob("[0-9]*"):
            # The process has ended or belongs to another user.
            with contextlib.suppress(OSError):
                if mark.encode() in (process / "environ").read_bytes():
                    os.kill(int(process.name), signal.SIGKILL)
        time.sleep(0.1)


def _pump(source: Any, send: Callable[[bytes], None]) -> None:
    with contextlib.suppress(OSError):
        for line in source:
            send(line)


class _Files(paramiko.SFTPServerInterface):
    """SFTP in a home folder, with only the operations that the client uses."""

    def __init__(self, server: FakeHost, host: FakeHost):
        super().__init__(server)
        self._host = host

    def _path(self, path: str) -> Path:
        return self._host.home / path.lstrip("/")

    def mkdir(self, path: str, attr: paramiko.SFTPAttributes) -> Any:
        return _answer(lambda: self._path(path).mkdir(mode=attr.st_mode or 0o777))

    def posix_rename(self, oldpath: str, newpath: str) -> Any:
        return _answer(lambda: self._path(oldpath).replace(self._path(newpath)))

    def open(self, path: str, flags: int, attr: paramiko.SFTPAttributes) -> Any:
        while self._host.silent.is_set():
            time.sleep(0.05)
        return _answer(lambda: _OpenFile(self._path(path), flags, self._host))


class _OpenFile(paramiko.SFTPHandle):
    """A file that is open for writing."""

    def __init__(self, path: Path, flags: int, host: FakeHost):
        super().__init__(flags)
        self._file = os.fdopen(os.open(path, flags, 0o666), "wb", buffering=0)
        self._modes = host.modes_at_first_write

    def write(self, offset: int, data: bytes) -> int:
        if offset == 0:
            self._modes.append(stat.S_IMODE(os.fstat(self._file.fileno()).st_mode))
        return _answer(lambda: os.pwrite(self._file.fileno(), data, offset) and None)

    def chattr(self, attr: paramiko.SFTPAttributes) -> int:
        return _answer(lambda: os.fchmod(self._file.fileno(), attr.st_mode or 0))

    def stat(self) -> Any:
        return paramiko.SFTPAttributes.from_stat(os.fstat(self._file.fileno()))

    def close(self) -> None:
        self._file.close()


def _answer(action: Callable[[], Any]) -> Any:
    try:
        result = action()
    except OSError as error:
        return paramiko.SFTPServer.convert_errno(error.errno or 0)
    return SFTP_OK if result is None or isinstance(result, Path) else result


def key_pair(folder: Path) -> Path:
    """Create an SSH key without a passphrase, and its .pub file; returns the path of the key."""
    path, key = folder / "key", paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(path))
    path.with_suffix(".pub").write_text(f"{key.get_name()} {key.get_base64()} somebody\n")
    return path
