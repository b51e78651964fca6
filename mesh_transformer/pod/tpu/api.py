"""The Cloud TPU API requests that `TpuVm` makes, with time limits and one-line errors."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from mesh_transformer import extras
from mesh_transformer.pod.tpu.signals import Signals
from mesh_transformer.pod.tpu.spec import TpuSpec
from mesh_transformer.util import HostError, InputError, StoppedError

if TYPE_CHECKING:
    from google.api_core import retry
    from google.api_core.exceptions import GoogleAPICallError
    from google.cloud import tpu_v2

RPC_SECONDS = 30.0  # time limit of one request; `TpuVm` polls operations that take longer
RETRY_SECONDS = 120.0  # for how long a failed read request is repeated
# The environment variable that replaces Google's endpoint.  gcloud reads the same variable, so the
# printed `gcloud ... delete` commands use the same endpoint as this program.
ENDPOINT = "CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU"


class PreemptedError(StoppedError):
    """Google Cloud has preempted the TPU; `TpuVm.recreate` creates it again."""


class CapacityError(StoppedError):
    """The zone currently has no capacity for this TPU."""


class UnavailableError(HostError):
    """The Cloud TPU API did not answer; it may or may not have carried out the request."""


class QuotaError(InputError):
    """The project's quota does not allow this TPU.

    The same request may succeed later, because a deleted TPU counts towards the quota for a while.
    """


def new_client() -> "tpu_v2.TpuClient":
    """Return a Cloud TPU API client with this machine's default credentials.

    The environment variable `CLOUDSDK_API_ENDPOINT_OVERRIDES_TPU` can replace Google's endpoint
    with "https://HOST:PORT/".  The connection always uses TLS.

    Raises:
      InputError: if the package google-cloud-tpu or the credentials are missing, or if the
        environment variable's value is invalid.
    """
    try:
        from google.api_core.client_options import ClientOptions
        from google.auth.exceptions import DefaultCredentialsError
        from google.cloud import tpu_v2
    except ImportError as error:
        raise InputError(f"TPUs: {extras.missing(error) or error}") from error
    endpoint = os.environ.get(ENDPOINT)
    options = ClientOptions(api_endpoint=_host_and_port(endpoint)) if endpoint else None
    try:
        return tpu_v2.TpuClient(client_options=options)
    except DefaultCredentialsError as error:
        raise InputError(
            "no Google Cloud credentials were found; run `gcloud auth application-default login`, "
            "or use a VM with a service account"
        ) from error


def _host_and_port(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    if parts.scheme != "https" or not parts.netloc:
        raise InputError(f"{ENDPOINT} is {endpoint!r}; set it to https://HOST:PORT/ or unset it")
    return parts.netloc


def default_project() -> str:
    """Return the Google Cloud project of this machine's default credentials.

    Raises:
      InputError: if there are no default credentials, or if no default project is configured.
    """
    import google.auth
    from google.auth.exceptions import DefaultCredentialsError

    with contextlib.suppress(DefaultCredentialsError):
        project = google.auth.default()[1]
        if project:
            return project
    raise InputError(
        "no Google Cloud project is set; set GOOGLE_CLOUD_PROJECT, or run "
        "`gcloud config set project PROJECT`"
    )


class TpuApi:
    """Cloud TPU API requests for one TPU and, if `spec.queued`, for its queued resource.

    Args:
      client: the API client (default: the result of `new_client`).
      signals: the `Signals` object whose handlers are deferred during each request.

    Raises:
      InputError: if the request or the credentials are invalid.
      QuotaError: if the quota is exhausted; the same request may succeed later.
      CapacityError: if the zone has no capacity.
      UnavailableError: if the API gives no answer.
      StoppedError: for any other error.
    """

    def __init__(self, spec: TpuSpec, client: "tpu_v2.TpuClient | None", signals: Signals):
        self._client: Any = _UninterruptedClient(client or new_client(), signals)
        project = spec.project or default_project()
        self.spec = dataclasses.replace(spec, project=project)
        self._parent = f"projects/{project}/locations/{spec.zone}"
        self._node_name = f"{self._parent}/nodes/{spec.name}"
        self._queued_name = f"{self._parent}/queuedResources/{spec.name}"

    def node(self) -> "tpu_v2.Node | None":
        """Return the API's description of the TPU (a node), or None if the TPU does not exist."""
        return self._read(self._client.get_node, self._node_name)

    def queued(self) -> "tpu_v2.QueuedResource | None":
        """Return the TPU's queued resource (its request in Google's queue) if any, else None."""
        if not self.spec.queued:
            return None
        return self._read(self._client.get_queued_resource, self._queued_name)

    def _read(self, method: Any, name: str) -> Any:
        """Return the resource `name`, or None if it does not exist; `method` is the client's.

        If the API is overloaded or gives no answer, the request is repeated for `RETRY_SECONDS`.
        """
        try:
            with self._translated():
                # No retries by the client: signals would be deferred during its pauses as well.
                request = functools.partial(method, retry=None, timeout=RPC_SECONDS)
                return self._repeated()(request)(request={"name": name})
        except _MissingError:
            return None

    def create(
        self, labels: Mapping[str, str], metadata: Mapping[str, str], queue_seconds: float
    ) -> str:
        """Request the TPU and return the name of the API's long-running operation.

        The operation ends when the TPU has been created.  For a queued TPU, the operation ends when
        the request has entered the queue.

        Args:
          labels: labels of the TPU.
          metadata: metadata of the TPU's hosts.
          queue_seconds: time in seconds after which a queued request expires.
        """
        from google.cloud import tpu_v2

        node = self._new_node(labels, metadata)
        with self._translated(creating=True):
            if not self.spec.queued:
                operation = self._client.create_node(
                    parent=self._parent, node_id=self.spec.name, node=node, timeout=RPC_SECONDS
                )
                return operation.operation.name
            node_spec = {"parent": self._parent, "node_id": self.spec.name, "node": node}
            resource = tpu_v2.QueuedResource(
                tpu={"node_spec": [node_spec]},
                # The request expires by itself, even if this program has been killed.
                queueing_policy={"valid_until_duration": {"seconds": int(queue_seconds)}},
                spot=tpu_v2.QueuedResource.Spot() if self.spec.tier == "spot" else None,
            )
            operation = self._client.create_queued_resource(
                parent=self._parent,
                queued_resource_id=self.spec.name,
                queued_resource=resource,
                timeout=RPC_SECONDS,
            )
            return operation.operation.name

    def _new_node(self, labels: Mapping[str, str], metadata: Mapping[str, str]) -> "tpu_v2.Node":
        """Return the API's description of the node to create."""
        from google.cloud import tpu_v2

        spec = self.spec
        # For a queued TPU, `create` sets the tier on the queued resource.  The API rejects the
        # request if the node has a tier as well.
        tier = None if spec.queued else spec.tier
        return tpu_v2.Node(
            accelerator_type=spec.accelerator_type,
            runtime_version=spec.runtime,
            network_config={
                "network": spec.network or "",
                "subnetwork": spec.subnetwork or "",
                "enable_external_ips": spec.external_ips,
            },
            scheduling_config={"spot": tier == "spot", "preemptible": tier == "preemptible"},
            labels=dict(labels),
            metadata=dict(metadata),
        )

    def delete_node(self) -> None:
        """Request deletion of the TPU (a node) without waiting; temporary errors are ignored."""
        self._delete(lambda: self._client.delete_node(name=self._node_name, timeout=RPC_SECONDS))

    def delete_queued(self) -> None:
        """Request deletion of the queued resource and its TPU; temporary errors are ignored."""
        request = {"name": self._queued_name, "force": True}  # `force`: delete the node too
        self._delete(
            lambda: self._client.delete_queued_resource(request=request, timeout=RPC_SECONDS)
        )

    def _delete(self, request: Any) -> None:
        """Send a delete request; it is not an error if the resource does not exist.

        Temporary errors are ignored, because the caller repeats the request until the resource is
        gone.
        """
        from google.api_core import exceptions

        # FailedPrecondition and Aborted mean that another operation on the TPU is in progress.
        transient = (exceptions.FailedPrecondition, exceptions.Aborted, *_no_answer_errors())
        with contextlib.suppress(_MissingError, *transient), self._translated(transient):
            request()

    def operation_done(self, name: str) -> bool:
        """Return whether the API's long-running operation `name` has ended.

        If the operation has failed, the matching exception from `translate_error` is raised.
        """
        operation = self._read(self._client.get_operation, name)
        if operation is not None and operation.HasField("error"):
            raise self._failure(operation.error, "the TPU could not be created")
        return operation is None or operation.done

    def queued_error(self, resource: "tpu_v2.QueuedResource") -> Exception:
        """Return the exception to raise for a queued resource that has failed."""
        return self._failure(
            resource.state.failed_data.error, "the request was not fulfilled in time"
        )

    def _failure(self, status: Any, default: str) -> Exception:
        """Return the exception for a failed creation; its message is that of `status`, if any."""
        from google.api_core import exceptions

        error = exceptions.from_grpc_status(status.code, status.message or default)
        return self.translate_error(error, creating=True)

    def host_keys(self, host: int) -> list[tuple[str, str]]:
        """Return the SSH host keys that a host has published, as (type, base64) pairs.

        The list is empty if the host has not published its keys yet, or if the request fails.

        Args:
          host: number of the host in the TPU, from 0.
        """
        from google.api_core import exceptions

        request = {
            "name": self._node_name,
            "query_path": "hostkeys/",
            "worker_ids": [str(host)],
        }
        try:
            response = self._client.get_guest_attributes(request=request, timeout=RPC_SECONDS)
        except exceptions.GoogleAPICallError:
            return []
        return [
            (item.key, item.value)
            for attributes in response.guest_attributes
            for item in attributes.query_value.items
        ]

    @contextlib.contextmanager
    def _translated(
        self, transient: tuple[type[Exception], ...] = (), *, creating: bool = False
    ) -> Iterator[None]:
        """Turn the API's exceptions, except `transient` ones, into this package's exceptions."""
        from google.api_core import exceptions
        from google.auth.exceptions import GoogleAuthError

        try:
            yield
        except transient:
            raise
        except exceptions.RetryError as error:
            raise UnavailableError(
                f"the Cloud TPU API gave no answer for {RETRY_SECONDS:g} s "
                f"({_line(error.cause)}); check that the API is reachable"
            ) from error
        except exceptions.GoogleAPICallError as error:
            if isinstance(error, exceptions.NotFound) and not creating:
                raise _MissingError from error
            raise self.translate_error(error, creating) from error
        except GoogleAuthError as error:
            raise InputError(
                f"the Google Cloud credentials were not accepted ({_line(error)}); run "
                "`gcloud auth application-default login`"
            ) from error

    def translate_error(self, error: "GoogleAPICallError", creating: bool = False) -> Exception:
        """Return this package's exception for an API error.

        The exception's message names the TPU, quotes the API and, where possible, says what to do.

        Args:
          creating: whether the request was to create the TPU.  If such a request is invalid, the
            message also says what the zone offers.
        """
        from google.api_core import exceptions

        spec, message = self.spec, _line(error.message)
        subject = f"TPU {spec.name!r} ({spec.accelerator_type} in {spec.zone})"
        if isinstance(error, exceptions.AlreadyExists):
            return name_in_use_error(spec)
        if isinstance(error, exceptions.TooManyRequests):  # RESOURCE_EXHAUSTED: quota or capacity
            if "quota" in message.lower():
                return QuotaError(
                    f"{subject}: {message}; ask for more quota, or choose a smaller TPU"
                )
            return CapacityError(
                f"{subject}: {message}; try later or in another zone, or queue the request"
            )
        if isinstance(error, exceptions.Forbidden | exceptions.Unauthorized):
            return InputError(
                f"{subject}: {message}; check the zone, that the API tpu.googleapis.com is enabled "
                f"and that the account has the role roles/tpu.admin in project {spec.project!r}"
            )
        if creating and isinstance(error, exceptions.InvalidArgument | exceptions.NotFound):
            return InputError(f"{subject}, {spec.runtime}: {message}; {self._available()}")
        no_answer = isinstance(error, _no_answer_errors())
        error_type = UnavailableError if no_answer else StoppedError
        return error_type(f"{subject}: {message}")

    def offered(self, types: Iterable[str]) -> list[str]:
        """Return those of the accelerator types that the zone offers."""
        with self._translated():
            offered = self._repeated()(self._offered_types)()
        return [kind for kind in types if kind in offered]

    def _offered_types(self) -> list[str]:
        types = self._client.list_accelerator_types(parent=self._parent, timeout=RPC_SECONDS)
        return sorted({item.type_ for item in types})

    def _repeated(self) -> "retry.Retry":
        """Return a decorator that repeats a request for `RETRY_SECONDS` if there is no answer."""
        from google.api_core import exceptions, retry

        return retry.Retry(
            predicate=retry.if_exception_type(*_no_answer_errors(), exceptions.TooManyRequests),
            maximum=10.0,
            timeout=RETRY_SECONDS,
        )

    def _available(self) -> str:
        """Return advice for an invalid request, such as the TPU types that the zone offers."""
        from google.api_core import exceptions

        try:
            offered = self._offered_types()
            runtimes = self._client.list_runtime_versions(parent=self._parent, timeout=RPC_SECONDS)
            versions = {item.version for item in runtimes}
        except exceptions.GoogleAPICallError:
            offered, versions = [], set()
        generation = [name for name in offered if name.startswith(f"{self.spec.generation}-")]
        if not offered:
            return "check the zone: it lists no TPUs"
        if self.spec.accelerator_type not in offered:
            return f"the zone offers {', '.join(generation or offered)}"
        if versions and self.spec.runtime not in versions:
            return f"the zone's runtime versions are {', '.join(sorted(versions))}"
        return "check the accelerator type, the runtime version and the network"


class _UninterruptedClient:
    """A Cloud TPU API client whose requests are not interrupted by signals.

    A signal that arrives during a request is handled once the request has ended.
    """

    def __init__(self, client: "tpu_v2.TpuClient", signals: Signals):
        self._client, self._signals = client, signals

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)

        def request(*arguments: Any, **options: Any) -> Any:
            with self._signals.defer():
                return method(*arguments, **options)

        return request


class _MissingError(Exception):
    """The resource that a request names does not exist."""


def _no_answer_errors() -> tuple[type[Exception], ...]:
    """Return the exception types that mean that the API is unavailable, too slow or failing."""
    from google.api_core import exceptions

    return (
        exceptions.ServiceUnavailable,
        exceptions.DeadlineExceeded,
        exceptions.InternalServerError,
    )


def name_in_use_error(spec: TpuSpec) -> InputError:
    """Return the error for a TPU name that is already in use."""
    return InputError(
        f"TPU {spec.name!r} already exists in {spec.zone}; choose another name, or delete it: "
        f"{spec.delete_command()}"
    )


def _line(text: object) -> str:
    return " ".join(str(text).split()).rstrip(".")
