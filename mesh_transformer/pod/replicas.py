"""Replicas of a server on a Ray cluster: Ray Serve starts, checks, scales and replaces them.

Ray Serve's own HTTP proxy is not used, because it chooses a replica before it has read the body of
a request.  The process that calls `Replicas.ask` is the address of all replicas; `PrefixRouter`
chooses one for each request in this process.
"""

import asyncio
import collections
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, ClassVar

from ray import exceptions, serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from mesh_transformer.pod.prefixes import Routes
from mesh_transformer.util import StoppedError, last_line

log = logging.getLogger(__name__)
HEALTH_SECONDS = 2.0  # between two health checks, so also to notice that a replica has died
TRIES = 2  # to start the replicas
MOST_REQUESTS = 4096  # of each replica; its server refuses requests before there are so many
# The scope of a request.  With this version, an application notices by `receive` that the client
# has left.
GET = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "root_path": "",
    "query_string": b"",
    "headers": [],
}

Application = contextlib.AbstractContextManager[Any]  # yields an ASGI application
Messages = list[dict[str, Any]]  # what an ASGI application sends


class Replica:
    """Runs an ASGI application, which is built by `build`, in the process of a Ray actor."""

    async def __init__(self, build: Callable[[], Application], folder: str):
        with contextlib.suppress(OSError):  # this machine may lack the driver's folder
            os.chdir(folder)
        self._stack = contextlib.AsyncExitStack()  # never closed: Ray ends the process
        # In a thread, as it may wait for other machines by Ray.
        self._app = await asyncio.to_thread(self._stack.enter_context, build())
        await self._stack.enter_async_context(self._app.router.lifespan_context(self._app))
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(
        self, scope: dict[str, Any], body: bytes, **_: object
    ) -> AsyncGenerator[Messages]:
        """Yield the messages of the application's response to a request."""
        messages: asyncio.Queue[Any] = asyncio.Queue()
        read, left = False, asyncio.Event()

        async def receive() -> dict[str, Any]:
            nonlocal read
            if read:
                await left.wait()
                return {"type": "http.disconnect"}
            read = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def respond() -> None:
            try:
                await self._app(scope, receive, messages.put)
            except Exception:  # after an error response, if any could be sent
                log.exception("the application failed")
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(respond())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            running = True
            while running:
                batch = [await messages.get()]
                while not messages.empty():
                    batch.append(messages.get_nowait())
                running = batch[-1] is not None
                yield batch if running else batch[:-1]
        finally:
            left.set()  # if the client has left, the application ends the request itself

    async def check_health(self) -> None:
        """Raise StoppedError if the application's own /health fails; Ray then replaces it."""
        async for messages in self.call(_get("/health"), b""):
            for message in messages:
                if message.get("status", 200) != 200:
                    raise StoppedError(f"/health has status {message['status']}")


def _get(path: str) -> dict[str, Any]:
    """Return the ASGI scope of a GET request."""
    return GET | {"path": path, "raw_path": path.encode()}


class PrefixRouter(RequestRouter):
    """Chooses replicas by `Routes`.

    Attributes:
      current: the router that has chosen a replica last.
    """

    current: ClassVar["PrefixRouter | None"] = None

    def initialize_state(self, rows: int) -> None:  # type: ignore[override]
        """Set up the router, before its first request."""
        self._routes = Routes(rows)
        self._requests: dict[str, str] = {}  # {id of a request in progress: its replica}

    @property
    def names(self) -> list[str]:
        """Names of the running replicas."""
        return sorted(replica.unique_id for replica in self.curr_replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        PrefixRouter.current = self
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        if pending_request is None:
            return [candidate_replicas]
        wanted = pending_request.kwargs["replica"]
        if wanted is not None:
            return [[replicas.get(wanted) or candidate_replicas[0]]]
        counts = collections.Counter(self._requests.values())
        ongoing = {name: counts[name] for name in replicas}
        return [
            [replicas[name]]
            for name in self._routes.order(pending_request.kwargs["prefixes"], ongoing)
        ]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        self._requests[pending_request.metadata.internal_request_id] = replica_id.unique_id

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._requests.pop(internal_request_id, None)


class Replicas:
    """Replicas of an application on the Ray cluster to which this process is connected.

    Args:
      name: the name of the application in the cluster.
      counts: minimum and maximum number of replicas.
      rows: requests that a replica serves at the same time.
      resources: Ray's resources of each replica, such as {"CPU": 1, "TPU": 4}; of each machine of a
        replica if it has several.
      drain_seconds: maximum time for a replica that is replaced to finish its requests.
      spare: whether `deploy` starts a new replica before an old one ends, not after it.
      hosts: the number of machines of each replica; with 1, it shares its machine.
    """

    def __init__(
        self,
        name: str,
        counts: tuple[int, int],
        rows: int,
        resources: Mapping[str, float],
        drain_seconds: float,
        spare: bool = False,
        hosts: int = 1,
    ):
        custom, group = dict(resources), dict[str, Any]()
        if hosts > 1:  # each bundle is for the process of a host, which the replica starts
            group["placement_group_bundles"] = [custom or {"CPU": 1}] * hosts
            group["placement_group_strategy"] = "STRICT_SPREAD"
            custom = {}
        options = {"num_cpus": custom.pop("CPU", 0), "num_gpus": custom.pop("GPU", 0)}
        least, most = counts
        size: dict[str, Any] = {"num_replicas": least}
        if most > least:
            scaling = {"min_replicas": least, "max_replicas": most}
            size = {"autoscaling_config": scaling | {"target_ongoing_requests": rows}}
        self._name = name
        self._handle: Any = None
        deployment: Any = serve.deployment  # Ray's type annotations lack classes
        router: Any = PrefixRouter
        self._deployment = deployment(Replica).options(
            name="replica",
            **size,
            **group,
            ray_actor_options={**options, "resources": custom},
            max_ongoing_requests=MOST_REQUESTS,
            max_constructor_retry_count=TRIES,
            max_surge_percent=int(spare),  # which is rounded up to one replica
            health_check_period_s=HEALTH_SECONDS,
            graceful_shutdown_timeout_s=drain_seconds,
            graceful_shutdown_wait_loop_s=0.5,
            request_router_config=RequestRouterConfig(
                request_router_class=router, request_router_kwargs={"rows": rows}
            ),
        )
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(proxy_location="Disabled")

    def deploy(self, build: Callable[[], Application]) -> None:
        """Start the replicas; or replace those that run, a fifth of them (at least one) at a time.

        A replica that is replaced gets no more requests, and first finishes those that it has.

        Args:
          build: returns a context manager that yields the application, in a replica's process.

        Raises:
          StoppedError: if a replica cannot start.
        """
        try:
            application = self._deployment.bind(build, os.getcwd())
            handle = serve.run(
                application,
                name=self._name,
                route_prefix=None,
                logging_config={"log_level": "WARNING", "enable_access_log": False},
            )
        except RuntimeError as error:
            raise StoppedError(f"the replicas cannot start: {last_line(error)}") from None
        if self._handle is None:  # a new handle would know no routes
            self._handle = handle.options(method_name="call", stream=True)
            for _ in self._handle.remote(_get("/health"), b"", prefixes=(), replica=None):
                pass  # now the handle has its router

    def names(self) -> list[str]:
        """Return the names of the running replicas."""
        return [] if PrefixRouter.current is None else PrefixRouter.current.names

    async def ask(
        self,
        scope: Mapping[str, Any],
        body: bytes = b"",
        prefixes: Sequence[int] = (),
        replica: str | None = None,
    ) -> AsyncGenerator[Messages]:
        """Yield the messages of a response, several at a time; closing this ends the request.

        Args:
          scope: the request's ASGI scope; only its values that can be pickled are sent.
          prefixes: hashes of the beginnings of the prompt, the shortest one first.
          replica: the name of a replica, which answers if it still runs.

        Raises:
          ConnectionError: if the replica died before the end of its response.
        """
        scope = {key: scope.get(key, value) for key, value in _get("/").items()}
        scope["asgi"] = GET["asgi"]
        response: Any = self._handle.remote(scope, body, prefixes=prefixes, replica=replica)
        ended = False
        try:
            async for messages in response:
                yield messages
            ended = True
        except exceptions.RayError as error:
            ended = True
            raise ConnectionError(f"a replica died: {last_line(error)}") from None
        finally:
            if not ended:
                response.cancel()

    def close(self) -> None:
        """End all replicas."""
        serve.delete(self._name)
